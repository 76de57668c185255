"""Functions of LAPACK and BLAS, which scipy has: found when they are first needed."""

from __future__ import annotations

from functools import cache
from typing import Any

from einmpi.kernels.operands import Array


def lapack(name: str, like: Array) -> Any:
    """Return a function of LAPACK for matrices of the dtype of an array."""
    return _function("lapack", name, like.dtype.char)


def blas(name: str, like: Array) -> Any:
    """Return a function of BLAS for matrices of the dtype of an array."""
    return _function("blas", name, like.dtype.char)


@cache
def _function(library: str, name: str, dtype: str) -> Any:
    from scipy import linalg

    if library == "blas":
        return linalg.blas.get_blas_funcs((name,), dtype=dtype)[0]
    return linalg.lapack.get_lapack_funcs((name,), dtype=dtype)[0]
