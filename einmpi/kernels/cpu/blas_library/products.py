"""Matrix products by a BLAS library other than numpy's, prepared for arrays stored alike."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from einmpi.kernels.cpu.blas_library.loading import (
    AS_STORED,
    COLUMN_MAJOR,
    ROW_MAJOR,
    TRANSPOSED,
    LoadedBlas,
    MatrixFunctions,
)
from einmpi.kernels.operands import Array
from einmpi.kernels.prepared import address_of

# A product of two factors into a target, as `numpy.matmul` takes them.
Multiply: TypeAlias = Callable[[Array, Array, Array], Any]

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
