"""Sums and products whose bits do not depend on how a program is cut."""
