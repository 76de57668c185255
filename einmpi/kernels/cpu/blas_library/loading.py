"""A BLAS library that is loaded into this process: its matrix products and its threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.kernels.cpu.blas_library.records import NAMINGS, BlasLibrary, Naming
from einmpi.kernels.prepared import address_of

_LETTERS = {"float32": "s", "float64": "d", "complex64": "c", "complex128": "z"}
_REAL = {"float32": ctypes.c_float, "float64": ctypes.c_double}
ROW_MAJOR = 101
COLUMN_MAJOR = 102
AS_STORED = 111
TRANSPOSED = 112


class UnusableLibraryError(Exception):
    """A library that cannot be loaded, or that has no matrix products as they should be."""


@dataclass(frozen=True)
class MatrixFunctions:
    """The products of one dtype: of two matrices, and of many that have equal distances.

    `one` and `zero` are what the library takes as these numbers, and `kept` is their memory.
    """

    multiply: Callable[..., None]
    multiply_many: Callable[..., None] | None
    one: Any
    zero: Any
    kept: npt.NDArray[Any]


@dataclass(frozen=True)
class LoadedBlas:
    """A BLAS library in this process."""

    name: str
    version: str
    path: str
    largest_extent: int  # that its integers can hold
    functions: dict[str, MatrixFunctions]  # by dtype
    set_threads: Callable[[int], None]

    def __str__(self) -> str:
        return " ".join(word for word in (self.name, self.version) if word)


def load_blas(library: BlasLibrary, path: str) -> LoadedBlas:
    """Load a library; raise UnusableLibraryError if its products are missing or wrong."""
    try:
        loaded = ctypes.CDLL(path)
    except OSError as error:
        raise UnusableLibraryError(" ".join(str(error).split())) from error
    naming = _naming_in(loaded)
    try:
        if library.prepare is not None:
            library.prepare(loaded, path)
        version = library.version(loaded)
        functions = {}
        for dtype, letter in _LETTERS.items():
            functions[dtype] = _matrix_functions(loaded, f"cblas_{letter}gemm", naming, dtype)
    except AttributeError as error:
        raise UnusableLibraryError(f"a function is missing: {error}") from error
    found = LoadedBlas(
        name=library.name or path,
        version=version,
        path=path,
        largest_extent=2 ** (8 * ctypes.sizeof(naming.integer) - 1) - 1,
        functions=functions,
        set_threads=_thread_setter(loaded, library.set_threads),
    )
    _check_products(found)
    return found


def _naming_in(loaded: ctypes.CDLL) -> Naming:
    """Return what a library calls its functions."""
    for naming in NAMINGS:
        if hasattr(loaded, f"{naming.prefix}cblas_dgemm{naming.suffix}"):
            return naming
    raise UnusableLibraryError("it has no function cblas_dgemm")


def _matrix_functions(
    loaded: ctypes.CDLL, name: str, naming: Naming, dtype: str
) -> MatrixFunctions:
    """Return the products of a dtype, with the types of their arguments."""
    prefix, suffix, integer = naming
    number: Any = _REAL.get(dtype, ctypes.c_void_p)  # complex ones are passed by address
    pointer = ctypes.c_void_p
    multiply = getattr(loaded, f"{prefix}{name}{suffix}")
    multiply.restype = None
    multiply.argtypes = [
        *[ctypes.c_int] * 3,
        *[integer] * 3,
        number,
        *(pointer, integer),
        *(pointer, integer),
        number,
        *(pointer, integer),
    ]
    multiply_many = getattr(loaded, f"{prefix}{name}_batch_strided{suffix}", None)
    if multiply_many is not None:
        multiply_many.restype = None
        multiply_many.argtypes = [
            *[ctypes.c_int] * 3,
            *[integer] * 3,
            number,
            *(pointer, integer, integer),
            *(pointer, integer, integer),
            number,
            *(pointer, integer, integer),
            integer,
        ]
    kept = np.array([1, 0], dtype)
    if dtype in _REAL:
        return MatrixFunctions(multiply, multiply_many, 1.0, 0.0, kept)
    address = address_of(kept)
    return MatrixFunctions(multiply, multiply_many, address, address + kept.itemsize, kept)


def _thread_setter(loaded: ctypes.CDLL, names: tuple[str, ...]) -> Callable[[int], None]:
    """Return what sets the number of threads; a library without such a function keeps its own."""
    for name in names:
        function = getattr(loaded, name, None)
        if function is not None:
            function.restype = None
            function.argtypes = [ctypes.c_int64]  # an int is passed in the same register
            return lambda count: function(count)
    return lambda count: None


def _check_products(found: LoadedBlas) -> None:
    """Compare a small product of each dtype with numpy's."""
    for dtype, functions in found.functions.items():
        left = np.arange(1, 7).reshape(2, 3).astype(dtype)
        right = np.arange(2, 14).reshape(3, 4).astype(dtype)
        out = np.full((2, 4), 7, dtype)
        functions.multiply(
            *(ROW_MAJOR, AS_STORED, AS_STORED, 2, 4, 3),
            functions.one,
            *(address_of(left), 3, address_of(right), 4),
            functions.zero,
            *(address_of(out), 4),
        )
        if not np.array_equal(out, left @ right):
            raise UnusableLibraryError(f"its product of {dtype} matrices is wrong")
