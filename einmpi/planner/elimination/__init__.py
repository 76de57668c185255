"""Minimising sums of tables over discrete variables."""
