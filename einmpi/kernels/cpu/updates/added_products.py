"""Matrix products that are added to an array, out ← α · left · right + β · out, by BLAS."""

from __future__ import annotations

from functools import cache

from einmpi.kernels.cpu.blas_library.choice import blas_in_use
from einmpi.kernels.cpu.blas_library.loading import LoadedBlas, UnusableLibraryError, load_blas
from einmpi.kernels.cpu.blas_library.products import BlasCall, call_for
from einmpi.kernels.cpu.blas_library.records import UNKNOWN_LIBRARY
from einmpi.kernels.operands import Array
from einmpi.process.software import loaded_blas

REAL_DTYPES = ("float32", "float64")


def can_add_product(left: Array, right: Array, out: Array) -> bool:
    """Return whether `add_product` can be called with arrays that are stored like these."""
    return _call(left, right, out) is not None


def add_product(left: Array, right: Array, out: Array, alpha: float, beta: float) -> None:
    """Replace `out` by α · left · right + β · out, in place.

    The arrays are matrices of one dtype for which `can_add_product` holds. BLAS may leave out the
    product if α is 0, so that inf and nan in it are lost.
    """
    call = _call(left, right, out)
    assert call is not None
    call.multiply(left, right, out, alpha, beta)


def _call(left: Array, right: Array, out: Array) -> BlasCall | None:
    """Return the call for matrices that are stored like these; None if there is none."""
    library = blas_in_use().library or _numpy_blas()
    if library is None or out.ndim != 2 or out.dtype.name not in REAL_DTYPES:
        return None
    return call_for(library, left, right, out)


@cache
def _numpy_blas() -> LoadedBlas | None:
    """Return numpy's own BLAS; None if its functions are not found, or not right."""
    found = loaded_blas()
    if found is None:
        return None
    try:
        return load_blas(UNKNOWN_LIBRARY, found["filepath"])
    except UnusableLibraryError:
        return None
