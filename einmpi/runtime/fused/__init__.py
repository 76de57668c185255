"""Kernels that are computed together, one block at a time."""
