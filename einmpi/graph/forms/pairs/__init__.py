"""Symmetric results as pairs of blocks of rows, and what is computed from these."""
