"""Which BLAS multiplies matrices in this process: numpy's own, or a library that is chosen once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.kernels.cpu.blas_library.records import (
    AS_STORED,
    AUTO_BLAS,
    BLAS_LIBRARIES,
    BLAS_NAMES,
    COLUMN_MAJOR,
    CONJUGATE_TRANSPOSED,
    LOWER,
    NUMPY_BLAS,
    ROW_MAJOR,
    TRANSPOSED,
    UNKNOWN_LIBRARY,
    BlasLibrary,
    FoundFile,
    LoadedBlas,
    MatrixFunctions,
    UnusableLibraryError,
    find_file,
    load_blas,
)
from einmpi.kernels.operands import Array
from einmpi.kernels.prepared import address_of
from einmpi.process.environment import BLAS_VARIABLE, blas_name, loaded_blas, why_not_trusted

# ---- products ------------------------------------------------------------------------------------
#
# Matrix products by a BLAS library other than numpy's, prepared for arrays stored alike.


# A product of two factors into a target, as `numpy.matmul` takes them.
Multiply: TypeAlias = Callable[[Array, Array, Array], Any]

# A product of a factor and its conjugate transpose into a target, times a number.
OwnProduct: TypeAlias = Callable[[Array, Array, float], None]

# Multiplications of numbers in a call. With fewer, numpy's cheaper call is faster.
MIN_MULTIPLICATIONS = 2**21


class _Matrix(NamedTuple):
    """How BLAS reads a matrix: whether its rows are contiguous, and the distance between lines."""

    is_row_major: bool
    line_distance: int  # in elements
    lines: int


def prepare_product(blas: LoadedBlas, left: Array, right: Array, out: Array) -> Multiply:
    """Return what multiplies stacks of matrices that are stored as these are.

    It is numpy's matmul for small products, for vectors, for a matrix times its own transpose,
    which numpy computes with half the work, and where the library cannot read the arrays.
    """
    rows, depth = left.shape[-2:]
    columns = right.shape[-1]
    stack = out.shape[:-2]
    multiplications = rows * depth * columns
    is_small = multiplications * prod(stack) < MIN_MULTIPLICATIONS
    if is_small or min(rows, depth, columns) < 2 or _is_own_transpose(left, right):
        return np.matmul
    call = call_for(blas, left, right, out)
    if call is None:
        return np.matmul
    if not stack:
        return call.multiply
    steps = [_steps_in_stack(array, stack) for array in (left, right, out)]
    jumps = []  # from each matrix of the stack to the next, in elements
    for matrix, array_steps in zip(call.matrices, steps, strict=True):
        jump = _even_step(stack, array_steps) // out.itemsize
        if jump >= matrix.line_distance * matrix.lines:
            jumps.append(jump)
    if len(jumps) == 3 and call.functions.multiply_many is not None:
        return call.multiplying_many(jumps, prod(stack))
    if multiplications < MIN_MULTIPLICATIONS:
        return np.matmul
    offsets = []  # of each matrix in the three arrays, in bytes
    for place in product(*map(range, stack)):
        offsets.append([sum(map(int.__mul__, place, array_steps)) for array_steps in steps])
    return call.multiplying_each(offsets)


def call_for(blas: LoadedBlas, left: Array, right: Array, out: Array) -> BlasCall | None:
    """Return the call of a library for the last two dimensions of arrays stored like these.

    None if the library cannot read them.
    """
    functions = blas.functions.get(out.dtype.name)
    matrices = []
    for array in (left, right, out):
        matrix = _as_matrix(array)
        if functions is None or matrix is None or array.dtype != out.dtype:
            return None
        matrices.append(matrix)
    assert functions is not None
    rows, columns = out.shape[-2:]
    call = BlasCall(functions, matrices, (rows, columns, left.shape[-1]))
    return None if max(*call.sizes, *call.distances) > blas.largest_extent else call


class BlasCall:
    """A call of a library with all arguments but the addresses."""

    def __init__(
        self, functions: MatrixFunctions, matrices: list[_Matrix], sizes: tuple[int, int, int]
    ) -> None:
        self.functions = functions
        self.matrices = matrices
        self.sizes = sizes  # rows and columns of the target, and the length of the sums
        self.distances = [matrix.line_distance for matrix in matrices]
        *factors, target = matrices
        self.forms = [ROW_MAJOR if target.is_row_major else COLUMN_MAJOR]  # then those of factors
        for factor in factors:
            is_alike = factor.is_row_major == target.is_row_major
            self.forms.append(AS_STORED if is_alike else TRANSPOSED)

    def multiply(
        self, left: Array, right: Array, out: Array, alpha: Any = None, beta: Any = None
    ) -> None:
        """Multiply two matrices; α · left · right + β · out if these numbers are given."""
        self._multiply_at(address_of(left), address_of(right), address_of(out), alpha, beta)

    def multiplying_each(self, offsets: list[list[int]]) -> Multiply:
        """Return what multiplies matrices at these offsets from the first ones, one by one."""

        def multiply(left: Array, right: Array, out: Array) -> None:
            left_address = address_of(left)
            right_address = address_of(right)
            out_address = address_of(out)
            for to_left, to_right, to_out in offsets:
                self._multiply_at(
                    left_address + to_left, right_address + to_right, out_address + to_out
                )

        return multiply

    def multiplying_many(self, jumps: list[int], count: int) -> Multiply:
        """Return what multiplies many matrices in one call."""
        functions = self.functions
        multiply_many = functions.multiply_many
        assert multiply_many is not None, "the library has no such function"
        left_distance, right_distance, out_distance = self.distances
        to_left, to_right, to_out = jumps

        def multiply(left: Array, right: Array, out: Array) -> None:
            multiply_many(
                *self.forms,
                *self.sizes,
                functions.one,
                *(address_of(left), left_distance, to_left),
                *(address_of(right), right_distance, to_right),
                functions.zero,
                *(address_of(out), out_distance, to_out),
                count,
            )

        return multiply

    def _multiply_at(
        self, left: int, right: int, out: int, alpha: Any = None, beta: Any = None
    ) -> None:
        functions = self.functions
        left_distance, right_distance, out_distance = self.distances
        functions.multiply(
            *self.forms,
            *self.sizes,
            functions.one if alpha is None else alpha,
            *(left, left_distance),
            *(right, right_distance),
            functions.zero if beta is None else beta,
            *(out, out_distance),
        )


def _as_matrix(array: Array) -> _Matrix | None:
    """Return how BLAS can read the last two dimensions of an array; None if it cannot."""
    if array.ndim < 2 or not array.size or not array.flags.aligned or not array.dtype.isnative:
        return None
    itemsize = array.itemsize
    for is_row_major in (True, False):
        first, second = (-2, -1) if is_row_major else (-1, -2)
        lines = array.shape[first]
        length = array.shape[second]
        distance, rest = divmod(array.strides[first], itemsize)
        if lines == 1:
            distance = length
        is_dense = array.strides[second] == itemsize or length == 1
        if is_dense and distance >= length and rest == 0:
            return _Matrix(is_row_major, distance, lines)
    return None


def _is_own_transpose(left: Array, right: Array) -> bool:
    is_same_memory = address_of(left) == address_of(right)
    is_transposed = left.shape[-2:] == right.shape[:-3:-1]
    return is_same_memory and is_transposed and left.strides[-2:] == right.strides[:-3:-1]


def _steps_in_stack(array: Array, stack: tuple[int, ...]) -> list[int]:
    """Return the bytes from one matrix to the next along each dimension of the stack.

    An array with a single matrix along a dimension repeats it.
    """
    steps = []
    for extent, stride, wanted in zip(array.shape[:-2], array.strides[:-2], stack, strict=True):
        steps.append(stride if extent == wanted else 0)
    return steps


def _even_step(stack: tuple[int, ...], steps: list[int]) -> int:
    """Return the bytes from one matrix to the next if the whole stack is taken as one list.

    Return 0 if these distances differ.
    """
    step = steps[-1]
    matrices_inside = stack[-1]
    for extent, outer_step in zip(stack[-2::-1], steps[-2::-1], strict=True):
        if outer_step != step * matrices_inside:
            return 0
        matrices_inside *= extent
    return step


@dataclass(frozen=True)
class BlasChoice:
    """The BLAS of this process: a loaded library, or None for numpy's own, and why it is that."""

    library: LoadedBlas | None
    reason: str
    problem: str = ""  # why a library that is installed is not used

    def __str__(self) -> str:
        if self.library is None:
            return "numpy's own"
        return str(self.library)


class _Choice:
    """What was chosen, if anything was, and the threads that the library has."""

    def __init__(self) -> None:
        self.made: BlasChoice | None = None
        self.threads = 0  # not set yet
        self.lock = threading.Lock()  # ranks may be threads


_choice = _Choice()


def use_blas(wanted: str = AUTO_BLAS, place: str = "") -> BlasChoice:
    """Choose the BLAS of this process, unless it has one already.

    The environment variable EINMPI_BLAS takes precedence over `wanted`, which `place` says. A
    process has one BLAS: it would not repeat its results if some were computed by another one.
    """
    variable = os.environ.get(BLAS_VARIABLE, "")
    if variable:
        wanted = variable
        place = BLAS_VARIABLE
    with _choice.lock:
        if _choice.made is None:
            _choice.made = _choose(wanted, place)
        made = _choice.made
    name = NUMPY_BLAS if made.library is None else made.library.name
    if os.sep in wanted:
        is_made = made.library is not None and _is_same_file(wanted, made.library.path)
        if made.library is not None:
            name = made.library.path
    else:
        is_made = wanted in (AUTO_BLAS, name)
    if not is_made:
        raise InputError(
            place,
            f"blas is {wanted!r}, but this process multiplies with {name} already",
            f"{name!r} or {AUTO_BLAS!r}",
            f"a process has one BLAS; {BLAS_VARIABLE} chooses it",
        )
    return made


def _is_same_file(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def blas_in_use() -> BlasChoice:
    """Return the BLAS of this process; numpy's own as long as none was chosen."""
    return _choice.made or BlasChoice(None, "nothing was computed yet")


def describe_blas_in_use() -> str:
    """Return the name and the version of the BLAS in use; an empty text if they are unknown."""
    library = blas_in_use().library
    return _name_of_numpy_blas() if library is None else str(library)


@cache
def _name_of_numpy_blas() -> str:
    return blas_name(loaded_blas())


def matrix_product(left: Array, right: Array, out: Array) -> Multiply:
    """Return what multiplies matrices that are stored as these are."""
    made = _choice.made
    if made is None or made.library is None:
        return np.matmul
    return prepare_product(made.library, left, right, out)


@cache
def _numpy_library() -> LoadedBlas | None:
    """Return the BLAS that numpy has, for what numpy has no function for; None if it is unknown."""
    found = loaded_blas()
    try:
        return None if found is None else load_blas(UNKNOWN_LIBRARY, found["filepath"])
    except UnusableLibraryError:
        return None


MIRRORED_ROWS = 64  # that are mirrored at a time


def prepare_product_with_own(factor: Array, out: Array, is_first: bool) -> OwnProduct | None:
    """Return what multiplies a complex matrix by its conjugate transpose, with half of the work.

    `is_first` says that the matrix itself is conjugated, and not its transpose. None if no library
    can read the arrays, or the product is small.
    """
    rows, depth = factor.shape
    library = blas_in_use().library or _numpy_library()
    call = None
    if rows > MIRRORED_ROWS and rows**2 * depth >= MIN_MULTIPLICATIONS and library is not None:
        call = call_for(library, factor, factor.T, out)
    if call is None or call.functions.multiply_by_own is None:
        return None
    multiply = call.functions.multiply_by_own
    matrix, _, target = call.matrices
    form = AS_STORED if matrix.is_row_major else CONJUGATE_TRANSPOSED
    # The transpose of the product is its conjugate.
    is_conjugated = is_first != (matrix.is_row_major != target.is_row_major)

    def compute(factor: Array, out: Array, scale: float) -> None:
        multiply(
            *(ROW_MAJOR, LOWER, form, rows, depth, scale),
            *(address_of(factor), matrix.line_distance, 0.0),
            *(address_of(out), target.line_distance),
        )
        square = out if target.is_row_major else out.T
        for start in range(0, rows, MIRRORED_ROWS):
            lines = square[start : start + MIRRORED_ROWS, : start + MIRRORED_ROWS]
            if is_conjugated:
                np.conjugate(lines, out=lines)
            np.conjugate(lines[:, :start].T, out=square[:start, start : start + MIRRORED_ROWS])
            corner = lines[:, start:]
            corner[...] = np.tril(corner) + np.tril(corner, -1).conj().T

    return compute


def set_blas_threads(count: int) -> None:
    """Set the threads of the library in use. Those of numpy's own BLAS are not changed."""
    library = blas_in_use().library
    if library is not None:
        library.set_threads(count)
        _choice.threads = count


class _OneThread:
    """The limit of one thread for each call of BLAS, which several threads may set at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.limits = ExitStack()

    def begin(self) -> None:
        with self.lock:
            if self.users == 0:
                self.limits.enter_context(_threadpools().limit(limits=1))
                library = blas_in_use().library
                if library is not None and _choice.threads != 1:
                    library.set_threads(1)
                    self.limits.callback(library.set_threads, max(1, _choice.threads))
            self.users += 1  # last, so that a limit that cannot be set has no user

    def end(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self.limits.close()


_one_thread = _OneThread()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let each call of BLAS use one thread, as long as a `with` block lasts.

    Several threads may be in such blocks: the limit ends with the last of them.
    """
    _one_thread.begin()
    try:
        yield
    finally:
        _one_thread.end()


@cache
def _threadpools() -> Any:
    """Return what sets the threads of numpy's BLAS."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


# ---- the choice ---------------------------------------------------------------------------------


def _choose(wanted: str, place: str) -> BlasChoice:
    if wanted == NUMPY_BLAS:
        return BlasChoice(None, f"{place} says so")
    if wanted == AUTO_BLAS:
        return _choose_automatically()
    if os.sep in wanted:
        return _load_path(wanted, place)
    by_name = {library.name: library for library in BLAS_LIBRARIES}
    if wanted not in by_name:
        raise InputError(place, f"there is no BLAS {wanted!r}", one_of(BLAS_NAMES, wanted))
    library = by_name[wanted]
    file = find_file(library)
    if file is None:
        what = f"the BLAS {wanted} is not installed"
        raise InputError(place, what, "an installed library", library.hint)
    problem = _why_not_trusted(file)
    if problem:
        raise InputError(place, problem, "a library that only you and root can change")
    return _load(library, file.path, place)


def _choose_automatically() -> BlasChoice:
    """Return the first library that is installed and made for this machine, else numpy's own.

    Where numpy has such a library, it stays with numpy.
    """
    for library in BLAS_LIBRARIES:
        file = find_file(library) if library.suits() else None
        if file is None:
            continue
        own = loaded_blas()
        if own is not None and own["internal_api"] in (library.name, "mkl"):
            return BlasChoice(None, f"numpy has {blas_name(own)}")
        problem = _why_not_trusted(file)
        if problem:
            return BlasChoice(None, f"{library.name} is not used", problem)
        try:
            return BlasChoice(load_blas(library, file.path), f"found {file.path}")
        except UnusableLibraryError as error:
            return BlasChoice(None, f"{library.name} is not used", f"{file.path}: {error}")
    return BlasChoice(None, "no other library for this machine was found")


def _load_path(path: str, place: str) -> BlasChoice:
    """Load the library at a path, which only the environment can name: it is a program."""
    if place != BLAS_VARIABLE:
        what = f"{path!r} is a path"
        hint = f"the environment variable {BLAS_VARIABLE} takes paths"
        raise InputError(place, what, one_of(BLAS_NAMES, path), hint)
    resolved = os.path.realpath(path)
    if not os.path.isfile(resolved):
        raise InputError(place, f"there is no file {path!r}", "the path of a BLAS library")
    problem = why_not_trusted(resolved)
    if problem:
        raise InputError(place, problem, "a library that only you and root can change")
    for library in BLAS_LIBRARIES:
        if any(fnmatch(os.path.basename(resolved), pattern) for pattern in library.files):
            return _load(library, resolved, place)
    return _load(UNKNOWN_LIBRARY, resolved, place)


def _load(library: BlasLibrary, path: str, place: str) -> BlasChoice:
    try:
        return BlasChoice(load_blas(library, path), f"{place} says so")
    except UnusableLibraryError as error:
        what = f"{path} cannot be used: {error}"
        raise InputError(place, what, "a BLAS library with the functions of CBLAS") from error


def _why_not_trusted(file: FoundFile) -> str:
    """Return how others could change a library; those beside Python's own packages are trusted."""
    return why_not_trusted(file.path) if file.variable else ""
