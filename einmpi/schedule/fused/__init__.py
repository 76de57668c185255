"""Kernels that are computed together, and tensors that are never whole in memory."""
