"""CUDA kernels that compute whole chains, such as attention."""
