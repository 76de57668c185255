"""Sums of products of two operands by cuBLAS: batches of matrix products on the arrays in place.

An operand is copied only if cuBLAS cannot take it as it is stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call
from einmpi.kernels.contraction import Contraction, Labels, size_of
from einmpi.kernels.cuda import driver
from einmpi.kernels.cuda.batches import Batches, choose_batches, dense_strides
from einmpi.kernels.cuda.capture import watch
from einmpi.kernels.cuda.capture.blas import NO_REDUCED_PRECISION_SUMS
from einmpi.kernels.cuda.driver import DeviceArray

# cuBLAS's constants for the type of an array and of its sums. Half precision is summed in single,
# and single precision keeps all of its bits unless TF32 is asked for.
TYPES = {
    "float16": (2, 68),
    "bfloat16": (14, 68),
    "float32": (0, 68),
    "float64": (1, 70),
    "complex64": (4, 68),
    "complex128": (5, 70),
}
TF32_SUMS = 77
PLAIN, TRANSPOSED, CONJUGATE_TRANSPOSED = 0, 1, 2  # what cuBLAS does to a factor

Generate = Callable[[EinSum, Sequence[DeviceArray], DeviceArray], None]  # by a generated kernel


def prepare_product(
    contraction: Contraction,
    operands: Sequence[DeviceArray],
    target: DeviceArray,
    tf32: bool,
    add_to_target: bool = False,
) -> MatrixProduct | None:
    """Return what fills the target, or adds to it; None if a generated kernel is better."""
    if len(contraction.positions) != 2 or target.dtype.name not in TYPES:
        return None
    arrays = [*(operands[position] for position in contraction.positions), target]
    dtypes = tuple(array.dtype.name for array in arrays)
    strides = tuple(array.strides for array in arrays)
    batches = choose_batches(contraction, dtypes, strides)
    if batches is None:
        return None
    return _prepare_calls(batches, contraction, arrays, tf32, add_to_target)


@dataclass(frozen=True)
class _Copy:
    """A temporary copy of an array, and the EinSum that fills it, or fills the array from it."""

    order: Labels
    shape: tuple[int, ...]
    einsum: EinSum


@dataclass(frozen=True)
class MatrixProduct:
    """Prepared calls of cuBLAS, with copies before and after them."""

    cupy: Any
    positions: tuple[int, ...]  # of the factors among the operands
    output: Labels
    dtype: np.dtype[Any]
    copies: tuple[_Copy | None, ...]  # of both factors and the output
    # For cuBLAS, which takes the factors in its own order.
    first_factor: int  # the factor that cuBLAS takes first: 0 or 1
    is_batched: bool
    head: tuple[int, ...]  # what to do with both factors; rows, columns, depth; the scale's address
    first_matrix: tuple[int, ...]  # type, stride of lines and, in a batch, stride of matrices
    second_matrix: tuple[int, ...]
    target_scale: int  # the address of the factor of what the target had before
    out_matrix: tuple[int, ...]  # also how many matrices a batch has
    sum_type: int
    offsets: tuple[tuple[int, int, int], ...]  # of each call, in bytes, in these three matrices
    scales: npt.NDArray[Any]  # both scales, which have to stay in memory

    @property
    def temporary_bytes(self) -> int:
        """The size of all temporary copies."""
        used = [copy for copy in self.copies if copy is not None]
        return sum(prod(copy.shape) * self.dtype.itemsize for copy in used)

    @property
    def copies_target(self) -> bool:
        return self.copies[2] is not None

    @property
    def halvable_labels(self) -> Labels:
        """The output labels of the largest copy: half of such a label needs half of the copy."""
        used = [copy for copy in self.copies if copy is not None]
        if not used:
            return ()
        largest = max(used, key=lambda copy: prod(copy.shape))
        return tuple(label for label in largest.order if label in self.output)

    def __call__(self, operands: Sequence[DeviceArray], target: DeviceArray) -> None:
        """Multiply the arrays in place; for a product without copies."""
        left, right = self.positions
        self.multiply((operands[left].data.ptr, operands[right].data.ptr, target.data.ptr))

    def with_copies(
        self, generate: Generate
    ) -> Callable[[Sequence[DeviceArray], DeviceArray], None]:
        """Return the call for a product with copies, which generated kernels make."""

        def call(operands: Sequence[DeviceArray], target: DeviceArray) -> None:
            arrays = [*(operands[position] for position in self.positions), target]
            used = []
            for array, copy in zip(arrays, self.copies, strict=True):
                used.append(array if copy is None else self.cupy.empty(copy.shape, self.dtype))
            for factor in (0, 1):
                copy = self.copies[factor]
                if copy is not None:
                    generate(copy.einsum, [arrays[factor]], used[factor])
            self.multiply([array.data.ptr for array in used])
            if self.copies[2] is not None:
                generate(self.copies[2].einsum, [used[2]], target)

        return call

    def multiply(self, addresses: Sequence[int]) -> None:
        """Call cuBLAS for one batch after the other."""
        first = addresses[self.first_factor]
        second = addresses[1 - self.first_factor]
        out = addresses[2]
        calls = []
        for first_offset, second_offset, out_offset in self.offsets:
            numbers = (
                *self.head,
                first + first_offset,
                *self.first_matrix,
                second + second_offset,
                *self.second_matrix,
                self.target_scale,
                out + out_offset,
                *self.out_matrix,
                self.sum_type,
                -1,  # the algorithm: cuBLAS's choice
            )
            calls.append(numbers)
        captured = watch.captured_blas()
        if captured is not None:
            for numbers in calls:
                captured.multiply(self.is_batched, numbers)
            return
        cuda = self.cupy.cuda
        blas = cuda.cublas
        handle = cuda.device.get_cublas_handle()
        mode = blas.getMathMode(handle)
        blas.setMathMode(handle, NO_REDUCED_PRECISION_SUMS)
        gemm = blas.gemmStridedBatchedEx if self.is_batched else blas.gemmEx
        try:
            for numbers in calls:
                gemm(handle, *numbers)
        finally:
            blas.setMathMode(handle, mode)


@dataclass
class _Factors:
    """How cuBLAS takes both factors and the output."""

    strides: list[dict[str, int]]  # of the arrays or their copies, in elements
    operations: list[int]  # PLAIN, TRANSPOSED or CONJUGATE_TRANSPOSED
    copies: list[_Copy | None]
    out_is_transposed: bool


def _prepare_factors(
    batches: Batches, contraction: Contraction, arrays: Sequence[DeviceArray]
) -> _Factors:
    """Choose what cuBLAS transposes and conjugates, and what a copy has to do."""
    extent = dict(contraction.extents)
    strides = [dict(storage.stride) for storage in batches.storages]
    # The transpose of a product is the product of the transposes in the other order.
    out_is_transposed = _operation(strides[2], batches.rows, batches.columns)
    operations = []
    copies: list[_Copy | None] = []
    for array, side in enumerate(batches.sides):
        copy_order = batches.storages[array].copy_order
        conjugate = False
        if array < 2:
            conjugate = contraction.conj[array] and arrays[array].dtype.kind == "c"
        operation = _operation(strides[array], *side) ^ out_is_transposed
        if conjugate and copy_order is None:
            if operation == TRANSPOSED:
                operation = CONJUGATE_TRANSPOSED
            else:  # cuBLAS conjugates only what it transposes: let a copy do it
                copy_order = _by_stride(strides[array])
                strides[array] = dense_strides(copy_order, extent)
        operations.append(operation)
        if copy_order is None:
            copies.append(None)
        else:
            index = contraction.indices[array]
            copies.append(_temporary_copy(index, copy_order, extent, conjugate, array == 2))
    return _Factors(strides, operations, copies, out_is_transposed == TRANSPOSED)


def _prepare_calls(
    batches: Batches,
    contraction: Contraction,
    arrays: Sequence[DeviceArray],
    tf32: bool,
    add_to_target: bool,
) -> MatrixProduct:
    """Work out everything about a product that does not depend on addresses."""
    dtype = arrays[-1].dtype
    extent = dict(contraction.extents)
    factors = _prepare_factors(batches, contraction, arrays)
    rows = size_of(batches.rows, extent)
    columns = size_of(batches.columns, extent)
    depth = size_of(batches.depth, extent)
    batch = batches.loops[0] if batches.loops else ()
    batch_size = size_of(batch, extent)
    array_type, sum_type = TYPES[dtype.name]
    if tf32 and dtype.name in ("float32", "complex64"):
        sum_type = TF32_SUMS
    scale_dtype = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    scales = np.array([contraction.scale, int(add_to_target)], scale_dtype)
    scale_address = scales.ctypes.data
    matrices = []
    for stride, side in zip(factors.strides, batches.sides, strict=True):
        matrix = [array_type, _line_stride(stride, *side, extent)]
        if batch_size > 1:
            matrix.append(stride.get(batch[-1], 0))
        matrices.append(tuple(matrix))
    if factors.out_is_transposed:
        first, second = 1, 0
        rows, columns = columns, rows
    else:
        first, second = 0, 1
    operations = (factors.operations[first], factors.operations[second])
    offsets = []
    for call in _call_offsets(batches.loops[1:], factors.strides, extent, dtype.itemsize):
        offsets.append((call[first], call[second], call[2]))
    return MatrixProduct(
        cupy=driver.cupy(),
        positions=contraction.positions,
        output=contraction.indices[2],
        dtype=dtype,
        copies=tuple(factors.copies),
        first_factor=first,
        is_batched=batch_size > 1,
        head=(*operations, rows, columns, depth, scale_address),
        first_matrix=matrices[first],
        second_matrix=matrices[second],
        target_scale=scale_address + scales.itemsize,
        out_matrix=(*matrices[2], batch_size) if batch_size > 1 else matrices[2],
        sum_type=sum_type,
        offsets=tuple(offsets),
        scales=scales,
    )


def _by_stride(stride: Mapping[str, int]) -> Labels:
    """Return labels from the longest stride to the shortest."""
    return tuple(sorted(stride, key=lambda label: -abs(stride[label])))


def _temporary_copy(
    index: Labels, order: Labels, extent: Mapping[str, int], conjugate: bool, is_output: bool
) -> _Copy:
    """Return a copy of a factor, or the temporary output that is copied to the output.

    The copy may permute, cast and conjugate. It sums over labels that only its source has, and
    repeats along those that only its target has.
    """
    source, target = (order, index) if is_output else (index, order)
    summed = tuple(label for label in dict.fromkeys(source) if label not in target)
    function = Call("conj", (Arg(0),)) if conjugate else Arg(0)
    extents = tuple((label, extent[label]) for label in (*target, *summed))
    einsum = EinSum(target, (source,), function, "sum" if summed else None, summed, extents)
    return _Copy(order, tuple(extent[label] for label in order), einsum)


def _operation(stride: Mapping[str, int], rows: Labels, columns: Labels) -> int:
    """Return PLAIN or TRANSPOSED: how cuBLAS sees a matrix with these rows and columns.

    cuBLAS takes neighbours in memory as a column.
    """
    if not rows or not columns:
        return PLAIN if columns else TRANSPOSED
    return PLAIN if stride[rows[-1]] == 1 else TRANSPOSED


def _line_stride(
    stride: Mapping[str, int], rows: Labels, columns: Labels, extent: Mapping[str, int]
) -> int:
    """Return the distance in memory between two lines of a matrix, in elements."""
    if _operation(stride, rows, columns) == PLAIN:
        fast = rows
        slow = columns
    else:
        fast = columns
        slow = rows
    return max(stride[slow[-1]] if slow else 1, size_of(fast, extent))


def _call_offsets(
    loops: Sequence[Labels],
    strides: Sequence[Mapping[str, int]],
    extent: Mapping[str, int],
    itemsize: int,
) -> Iterator[tuple[int, ...]]:
    """Yield where each call begins in every array, in bytes."""
    for position in itertools.product(*(range(size_of(group, extent)) for group in loops)):
        offsets = []
        for stride in strides:
            steps = zip(position, loops, strict=True)
            offset = sum(number * stride.get(group[-1], 0) for number, group in steps)
            offsets.append(itemsize * offset)
        yield tuple(offsets)
