"""Kernels for CPUs: BLAS, compiled loops, and numpy as the fallback."""
