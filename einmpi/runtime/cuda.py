"""Kernels."""
def compute(*a, **k): raise NotImplementedError
