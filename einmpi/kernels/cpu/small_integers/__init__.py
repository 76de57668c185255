"""Sums over small integers, such as quantised weights, that are converted as they are read."""
