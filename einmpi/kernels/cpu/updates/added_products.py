"""Matrix products that are added to an array, out ← α · left · right + β · out, by BLAS."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from einmpi.kernels.cpu.blas_library.choice import blas_in_use
from einmpi.kernels.operands import Array
from einmpi.kernels.prepared import address_of

ROW_MAJOR = 101
NOT_TRANSPOSED = 111
TRANSPOSED = 112

# Letters of BLAS, and what a call takes α and β as.
REAL_DTYPES: dict[str, tuple[str, type[Any]]] = {
    "float32": ("s", ctypes.c_float),
    "float64": ("d", ctypes.c_double),
}
# Before and after cblas_sgemm. Those of numpy's wheels come first: another package of the process
# may have a BLAS with the plain names, and other numbers of threads.
AFFIXES = (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", ""))
LIBRARY_WORDS = ("openblas", "mkl_rt", "blis", "libcblas", "libblas", "nvpl_blas", "armpl")

Function: TypeAlias = Callable[..., None]


class Matrix(NamedTuple):
    """How BLAS is told of a matrix: by rows, or transposed, and the distance of its rows."""

    is_transposed: bool
    distance: int  # in elements


def can_add_product(left: Array, right: Array, out: Array) -> bool:
    """Return whether `add_product` can be called with arrays that are stored like these."""
    if out.dtype.name not in REAL_DTYPES or _function(out.dtype.name) is None:
        return False
    for array in (left, right, out):
        if array.dtype != out.dtype or _matrix(array) is None:
            return False
    return True


def add_product(left: Array, right: Array, out: Array, alpha: float, beta: float) -> None:
    """Replace `out` by α · left · right + β · out, in place.

    The arrays are matrices of one dtype for which `can_add_product` holds. BLAS may leave out the
    product if α is 0, so that inf and nan in it are lost.
    """
    function = _function(out.dtype.name)
    matrix = _matrix(out)
    assert function is not None and matrix is not None
    if matrix.is_transposed:
        left, right, out = right.T, left.T, out.T
        matrix = Matrix(is_transposed=False, distance=matrix.distance)
    left_matrix = _matrix(left)
    right_matrix = _matrix(right)
    assert left_matrix is not None and right_matrix is not None
    rows, columns = out.shape
    function(
        ROW_MAJOR,
        TRANSPOSED if left_matrix.is_transposed else NOT_TRANSPOSED,
        TRANSPOSED if right_matrix.is_transposed else NOT_TRANSPOSED,
        rows,
        columns,
        left.shape[1],
        alpha,
        address_of(left),
        left_matrix.distance,
        address_of(right),
        right_matrix.distance,
        beta,
        address_of(out),
        matrix.distance,
    )


def _matrix(array: Array) -> Matrix | None:
    """Return how BLAS is told of an array; None if it cannot be."""
    if array.ndim != 2 or not array.size or not array.flags.aligned or not array.dtype.isnative:
        return None
    for is_transposed, matrix in ((False, array), (True, array.T)):
        rows, columns = matrix.shape
        row_stride, column_stride = matrix.strides
        is_dense = column_stride == array.itemsize or columns == 1
        distance = row_stride // array.itemsize
        if rows == 1:
            distance = columns
        if is_dense and distance >= columns and row_stride % array.itemsize == 0:
            return Matrix(is_transposed, distance)
    return None


def _function(dtype: str) -> Function | None:
    """Return BLAS's product for matrices of a dtype; None if the process has none that is right."""
    library = blas_in_use().library
    if library is not None:
        return library.functions[dtype].multiply
    return _function_of_numpy(dtype)


@cache
def _function_of_numpy(dtype: str) -> Function | None:
    """Return the product of numpy's BLAS."""
    letter, number = REAL_DTYPES[dtype]
    for path in _blas_libraries():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for before, after in AFFIXES:
            function = getattr(library, f"{before}cblas_{letter}gemm{after}", None)
            if function is None:
                continue
            # Numbers have 32 bits in some libraries; on Linux these read the lower half of 64.
            size = ctypes.c_int64
            address = ctypes.c_void_p
            kinds: list[type[Any]] = [ctypes.c_int] * 3 + [size] * 3
            kinds += [number, address, size, address, size, number, address, size]
            function.argtypes = kinds
            function.restype = None
            if _is_right(function, dtype):
                call: Function = function
                return call
    return None


def _blas_libraries() -> list[str]:
    """Return the libraries of this process that may be BLAS, as files, numpy's own ones first."""
    if not sys.platform.startswith("linux"):
        return []
    paths = []
    try:
        with open("/proc/self/maps", encoding="utf-8") as lines:
            for line in lines:
                fields = line.split(maxsplit=5)
                if len(fields) == 6:
                    paths.append(fields[5].rstrip("\n"))
    except OSError:
        return []
    found = []
    for path in dict.fromkeys(paths):
        name = os.path.basename(path).lower()
        if any(word in name for word in LIBRARY_WORDS):
            found.append(path)
    folder = os.path.dirname(os.path.dirname(np.__file__))
    return sorted(found, key=lambda path: not path.startswith(os.path.join(folder, "numpy")))


def _is_right(function: Function, dtype: str) -> bool:
    """Return whether a function computes a small product as it should."""
    left = np.arange(6, dtype=dtype).reshape(2, 3)
    right = np.arange(12, dtype=dtype).reshape(3, 4)
    out = np.ones((2, 4), dtype)
    function(
        *(ROW_MAJOR, NOT_TRANSPOSED, NOT_TRANSPOSED, 2, 4, 3),
        *(2.0, address_of(left), 3, address_of(right), 4),
        *(-1.0, address_of(out), 4),
    )
    return bool(np.array_equal(out, 2 * (left @ right) - 1))
