"""The NumPy backend: blocks in memory of the host, and kernels that are prepared once."""
