"""Softmax attention among the kernels of a chain."""
