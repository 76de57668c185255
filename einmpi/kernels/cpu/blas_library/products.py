"""Matrix products by a BLAS library other than numpy's, prepared for arrays stored alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    functions = blas.functions.get(out.dtype.name)
    if functions is None or left.dtype != out.dtype or right.dtype != out.dtype:
        return np.matmul
    rows, depth = left.shape[-2:]
    columns = right.shape[-1]
    stack = out.shape[:-2]
    multiplications = rows * depth * columns
    is_small = multiplications * prod(stack) < MIN_MULTIPLICATIONS
    if is_small or min(rows, depth, columns) < 2 or _is_own_transpose(left, right):
        return np.matmul
    first = _as_matrix(left)
    second = _as_matrix(right)
    target = _as_matrix(out)
    if first is None or second is None or target is None:
        return np.matmul
    distances = (first.line_distance, second.line_distance, target.line_distance)
    if max(rows, depth, columns, *distances) > blas.largest_extent:
        return np.matmul
    order = COLUMN_MAJOR
    if target.is_row_major:
        order = ROW_MAJOR
    first_form = TRANSPOSED
    if first.is_row_major == target.is_row_major:
        first_form = AS_STORED
    second_form = TRANSPOSED
    if second.is_row_major == target.is_row_major:
        second_form = AS_STORED
    call = _Call(
        functions,
        order=order,
        first=first_form,
        second=second_form,
        sizes=(rows, columns, depth),
        distances=distances,
    )
    if not stack:
        return call.multiply
    steps = [_steps_in_stack(array, stack) for array in (left, right, out)]
    jumps = []  # from each matrix of the stack to the next, in elements
    for matrix, array_steps in zip((first, second, target), steps, strict=True):
        jump = _even_step(stack, array_steps) // out.itemsize
        if jump >= matrix.line_distance * matrix.lines:
            jumps.append(jump)
    if len(jumps) == 3 and functions.multiply_many is not None:
        return call.multiplying_many(jumps, prod(stack))
    if multiplications < MIN_MULTIPLICATIONS:
        return np.matmul
    offsets = []  # of each matrix in the three arrays, in bytes
    for place in product(*map(range, stack)):
        offsets.append([sum(map(int.__mul__, place, array_steps)) for array_steps in steps])
    return call.multiplying_each(offsets)


@dataclass(frozen=True)
class _Call:
    """A call of a library with all arguments but the addresses.

    `first` and `second` say whether a factor is transposed, compared with the target.
    """

    functions: MatrixFunctions
    order: int
    first: int
    second: int
    sizes: tuple[int, int, int]  # rows and columns of the target, and the length of the sums
    distances: tuple[int, int, int]  # between the lines of the three arrays

    def multiply(self, left: Array, right: Array, out: Array) -> None:
        """Multiply two matrices."""
        self._multiply_at(address_of(left), address_of(right), address_of(out))

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
                self.order,
                self.first,
                self.second,
                *self.sizes,
                functions.one,
                *(address_of(left), left_distance, to_left),
                *(address_of(right), right_distance, to_right),
                functions.zero,
                *(address_of(out), out_distance, to_out),
                count,
            )

        return multiply

    def _multiply_at(self, left: int, right: int, out: int) -> None:
        functions = self.functions
        left_distance, right_distance, out_distance = self.distances
        functions.multiply(
            self.order,
            self.first,
            self.second,
            *self.sizes,
            functions.one,
            *(left, left_distance),
            *(right, right_distance),
            functions.zero,
            *(out, out_distance),
        )


def _as_matrix(array: Array) -> _Matrix | None:
    """Return how BLAS can read the last two dimensions of an array; None if it cannot."""
    rows, columns = array.shape[-2:]
    row_step, column_step = array.strides[-2:]
    itemsize = array.itemsize
    if column_step == itemsize and row_step >= columns * itemsize and row_step % itemsize == 0:
        return _Matrix(True, row_step // itemsize, rows)
    if row_step == itemsize and column_step >= rows * itemsize and column_step % itemsize == 0:
        return _Matrix(False, column_step // itemsize, columns)
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
