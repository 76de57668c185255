"""Kernels for NVIDIA GPUs: cuBLAS and generated CUDA source."""
