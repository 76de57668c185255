"""Kernels for CPUs: BLAS, compiled loops, and numpy as the fallback."""

import os

# numba must not colour its messages: where colorama is installed, that resets the terminal of
# every rank when it ends, on standard output.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")
