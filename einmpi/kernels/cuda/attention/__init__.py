"""Softmax attention on the tensor cores of NVIDIA GPUs."""
