"""Sums of products of two operands by cuBLAS: batches of matrix products on the arrays in place.

An operand is copied only if cuBLAS cannot take it as it is stored.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.caches import bounded_cache
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call
from einmpi.kernels.contraction import Contraction, Labels, Strides, size_of
from einmpi.kernels.cuda import capture, driver
from einmpi.kernels.cuda.capture import NO_REDUCED_PRECISION_SUMS
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.kernels.lowering import ArrayLayout, candidate_lowerings
from einmpi.kernels.prepared import PreparedCall
from einmpi.kernels.scalar_text import plain

# ---- batches -------------------------------------------------------------------------------------
#
# A contraction as batches of matrix products: which labels are rows, columns and batches.
#
# Each way to compute it has an estimated time; the fastest way within the limits of cuBLAS
# wins.


# Estimates in seconds, of which only the ratios matter.
SECONDS_PER_CALL = 5e-6
SECONDS_PER_COPIED_BYTE = 1e-12
SECONDS_PER_MULTIPLY_ADD = 5e-14  # in float32
CUBLAS_LIMIT = 2**31  # extents and strides between lines must be smaller


@dataclass(frozen=True)
class Storage:
    """How the elements of an array, or of its temporary copy, are stored."""

    copy_order: Labels | None  # of a dense copy, slowest label first; None: the array itself
    stride: Mapping[str, int]  # in elements, of the labels that the product uses


@dataclass(frozen=True)
class Batches:
    """A contraction as batches of matrix products."""

    storages: tuple[Storage, ...]  # of both factors and the output
    # Each loop with its labels from the slowest to the fastest. The first loop is the batch of a
    # call; the others are calls.
    loops: tuple[Labels, ...]
    rows: Labels
    depth: Labels
    columns: Labels

    @property
    def sides(self) -> tuple[tuple[Labels, Labels], ...]:
        """The rows and columns of both factors and of the output."""
        return (self.rows, self.depth), (self.depth, self.columns), (self.rows, self.columns)


@bounded_cache(4096)
def choose_batches(contraction: Contraction, dtypes: Labels, strides: Strides) -> Batches | None:
    """Return the cheapest way to compute a contraction; None if it is not a matrix product."""
    extent = dict(contraction.extents)
    dtype = plain(dtypes[-1])
    layouts = _array_layouts(contraction, dtypes, strides)
    if not _is_matrix_product(*(tuple(layout.stride) for layout in layouts)):
        return None
    best = None
    lowest_cost = 0.0
    for lowering in candidate_lowerings(layouts, extent, dtype):
        if lowering.kernel != "matmul":
            continue
        rows, depth, columns = lowering.matrix
        if not rows and not columns:
            continue
        storages = _storages(layouts, lowering.copies, extent, dtype)
        loops = _merge_loops(lowering.loops, storages, extent)
        batches = Batches(storages, loops, rows, depth, columns)
        if not _within_limits(batches, extent):
            continue
        cost = _seconds(batches, extent, np.dtype(dtype).itemsize)
        if best is None or cost < lowest_cost:
            best = batches
            lowest_cost = cost
    return best


def _array_layouts(contraction: Contraction, dtypes: Labels, strides: Strides) -> list[ArrayLayout]:
    """Return the strides of each array, and whether it has to be copied.

    Copies take care of labels that only one array has: a factor is summed over them, and the
    output repeats along them. They also convert to the dtype of the output.
    """
    extent = dict(contraction.extents)
    labels = []  # of each array, without those that have a single value
    for index in contraction.indices:
        labels.append(dict.fromkeys(label for label in index if extent[label] > 1))
    users = Counter(itertools.chain.from_iterable(labels))
    layouts = []
    for array, own_labels in enumerate(labels):
        shared = [label for label in own_labels if users[label] > 1]
        needs_copy = len(shared) < len(own_labels) or dtypes[array] != dtypes[-1]
        stride = dict.fromkeys(shared, 0)
        for label, step in zip(contraction.indices[array], strides[array], strict=True):
            if label in stride:
                stride[label] += step  # a label that occurs twice goes along the diagonal
        order = tuple(sorted(shared, key=lambda label: -abs(stride[label])))
        layouts.append(ArrayLayout(stride, order, needs_copy, needs_copy))
    return layouts


def _storages(
    layouts: Sequence[ArrayLayout],
    copy_orders: Sequence[Labels | None],
    extent: Mapping[str, int],
    dtype: str,
) -> tuple[Storage, ...]:
    """Return how each array, or its copy, is stored."""
    itemsize = np.dtype(dtype).itemsize
    storages = []
    for layout, copy_order in zip(layouts, copy_orders, strict=True):
        if copy_order is None:
            in_elements = {label: step // itemsize for label, step in layout.stride.items()}
            storages.append(Storage(None, in_elements))
        else:
            storages.append(Storage(copy_order, dense_strides(copy_order, extent)))
    return tuple(storages)


def _is_matrix_product(left: Labels, right: Labels, output: Labels) -> bool:
    """Tell whether there are rows, columns and a depth."""
    has_depth = any(label not in output for label in left)
    has_rows = any(label in output and label not in right for label in left)
    has_columns = any(label in output and label not in left for label in right)
    return has_depth and has_rows and has_columns


def dense_strides(order: Labels, extent: Mapping[str, int]) -> dict[str, int]:
    """Return the strides in elements of a dense array, whose slowest label is the first."""
    return {label: size_of(order[k + 1 :], extent) for k, label in enumerate(order)}


def _merge_loops(
    loops: Labels, storages: Sequence[Storage], extent: Mapping[str, int]
) -> tuple[Labels, ...]:
    """Merge loops that follow one another in every array; return them with the longest first."""

    groups: list[Labels] = [(label,) for label in loops]
    pair = _pair_to_merge(groups, storages, extent)
    while pair is not None:
        outer, inner = pair
        groups.remove(outer)
        groups.remove(inner)
        groups.append(outer + inner)
        pair = _pair_to_merge(groups, storages, extent)
    return tuple(sorted(groups, key=lambda group: (-size_of(group, extent), group)))


def _pair_to_merge(
    groups: Sequence[Labels], storages: Sequence[Storage], extent: Mapping[str, int]
) -> tuple[Labels, Labels] | None:
    """Return two loops of which one step of the first is the whole length of the second."""
    for outer, inner in itertools.permutations(groups, 2):
        merges = True
        for storage in storages:
            step = storage.stride.get(outer[-1], 0)
            length = storage.stride.get(inner[0], 0) * extent[inner[0]]
            merges = merges and step == length
        if merges:
            return outer, inner
    return None


def _seconds(batches: Batches, extent: Mapping[str, int], itemsize: int) -> float:
    """Estimate how long a product takes."""
    calls = prod(size_of(group, extent) for group in batches.loops[1:])
    batch = size_of(batches.loops[0], extent) if batches.loops else 1
    copied = 0
    for storage in batches.storages:
        if storage.copy_order is not None:
            copied += size_of(storage.copy_order, extent)
    # A small matrix takes as long as one tile of cuBLAS's kernels.
    rows = max(size_of(batches.rows, extent), 64)
    columns = max(size_of(batches.columns, extent), 64)
    depth = max(size_of(batches.depth, extent), 16)
    return (
        SECONDS_PER_CALL * calls
        + SECONDS_PER_COPIED_BYTE * copied * itemsize
        + SECONDS_PER_MULTIPLY_ADD * (calls * batch * rows * columns * depth)
    )


def _within_limits(batches: Batches, extent: Mapping[str, int]) -> bool:
    """Tell whether cuBLAS takes these extents and strides."""
    matrix = (batches.rows, batches.depth, batches.columns)
    numbers = [size_of(group, extent) for group in (*matrix, *batches.loops[:1])]
    fastest_labels = [group[-1] for group in matrix if group]
    for storage in batches.storages:
        numbers += [storage.stride[label] for label in fastest_labels if label in storage.stride]
    return all(number < CUBLAS_LIMIT for number in numbers)


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
BLAS_CHOICE = -1  # of an algorithm
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
    copies: Sequence[_Copy | None]  # of both factors and the output
    # For cuBLAS, which takes the factors in its own order.
    is_batched: bool
    head: tuple[int, ...]  # what to do with both factors; rows, columns, depth; the scale's address
    order: tuple[int, int, int]  # the factors in the order of cuBLAS, then 2 for the output
    # What follows the address of each of these: type, stride of lines and, in a batch, stride of
    # matrices; after the second factor the address of the scale of what the target had before;
    # after the output the number of matrices, the type of sums, and cuBLAS's choice of algorithm.
    numbers: tuple[tuple[int, ...], ...]
    offsets: Sequence[tuple[int, ...]]  # of each call, in bytes, in both factors and the output
    scales: npt.NDArray[Any]  # both scales, which have to stay in memory

    @property
    def sizes_of_copies(self) -> dict[Labels, int]:
        """The bytes of all temporary copies, by their labels."""
        used = [copy for copy in self.copies if copy is not None]
        return {copy.order: prod(copy.shape) * self.dtype.itemsize for copy in used}

    @property
    def temporary_bytes(self) -> int:
        """The size of all temporary copies."""
        return sum(self.sizes_of_copies.values())

    @property
    def halvable_labels(self) -> Labels:
        """The output labels of the largest copy: half of such a label needs half of the copy."""
        sizes = self.sizes_of_copies
        return tuple(label for label in max(sizes, key=sizes.__getitem__) if label in self.output)

    def prepared(self, generate: Generate) -> PreparedCall:
        """Return the call for arrays, of which generated kernels make copies if that is needed."""
        if not any(self.copies):
            left, right = self.positions

            def in_place(operands: Sequence[DeviceArray], target: DeviceArray) -> None:
                self.multiply((operands[left].data.ptr, operands[right].data.ptr, target.data.ptr))

            return in_place

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
        calls = []
        for offsets in self.offsets:
            arguments = list(self.head)
            for array, numbers in zip(self.order, self.numbers, strict=True):
                arguments += (addresses[array] + offsets[array], *numbers)
            calls.append(tuple(arguments))
        captured = capture.captured_blas()
        if captured is not None:
            for arguments_of_call in calls:
                captured.multiply(self.is_batched, arguments_of_call)
            return
        cuda = self.cupy.cuda
        blas = cuda.cublas
        handle = cuda.device.get_cublas_handle()
        mode = blas.getMathMode(handle)
        blas.setMathMode(handle, NO_REDUCED_PRECISION_SUMS)
        gemm = blas.gemmStridedBatchedEx if self.is_batched else blas.gemmEx
        try:
            for arguments_of_call in calls:
                gemm(handle, *arguments_of_call)
        finally:
            blas.setMathMode(handle, mode)


def _prepare_matrix(
    array: int,
    batches: Batches,
    contraction: Contraction,
    is_complex: bool,
    out_is_transposed: int,
) -> tuple[Mapping[str, int], int, _Copy | None]:
    """Return the strides of an array or of its copy in elements, what cuBLAS does to it, the copy.

    A factor that is to be conjugated is copied unless cuBLAS transposes it: it conjugates no other.
    """
    extent = dict(contraction.extents)
    storage = batches.storages[array]
    stride = storage.stride
    copy_order = storage.copy_order
    is_conjugated = array < 2 and contraction.conj[array] and is_complex
    operation = _operation(stride, *batches.sides[array]) ^ out_is_transposed
    if is_conjugated and copy_order is None:
        if operation == TRANSPOSED:
            return stride, CONJUGATE_TRANSPOSED, None
        copy_order = tuple(sorted(stride, key=lambda label: -abs(stride[label])))
        stride = dense_strides(copy_order, extent)
    if copy_order is None:
        return stride, operation, None
    index = contraction.indices[array]
    copy = _temporary_copy(index, copy_order, extent, is_conjugated, array == 2)
    return stride, operation, copy


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
    # The transpose of a product is the product of the transposes in the other order.
    transposed = _operation(batches.storages[2].stride, batches.rows, batches.columns)
    strides = []
    operations = []
    copies = []
    for number, array in enumerate(arrays):
        is_complex = array.dtype.kind == "c"
        stride, operation, copy = _prepare_matrix(
            number, batches, contraction, is_complex, transposed
        )
        strides.append(stride)
        operations.append(operation)
        copies.append(copy)
    batch = batches.loops[0] if batches.loops else ()
    batch_size = size_of(batch, extent)
    array_type, sum_type = TYPES[dtype.name]
    if tf32 and dtype.name in ("float32", "complex64"):
        sum_type = TF32_SUMS
    scale_dtype = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    scales = np.array([contraction.scale, int(add_to_target)], scale_dtype)
    matrices = []
    for stride, side in zip(strides, batches.sides, strict=True):
        matrix = [array_type, _line_stride(stride, *side, extent)]
        if batch_size > 1:
            matrix.append(stride.get(batch[-1], 0))
        matrices.append(matrix)
    first, second = (1, 0) if transposed == TRANSPOSED else (0, 1)
    sides = [size_of(batches.rows, extent), size_of(batches.columns, extent)]
    head = [operations[first], operations[second], sides[first], sides[second]]
    head += [size_of(batches.depth, extent), scales.ctypes.data]
    matrices[second].append(scales.ctypes.data + scales.itemsize)
    if batch_size > 1:
        matrices[2].append(batch_size)
    matrices[2] += [sum_type, BLAS_CHOICE]
    return MatrixProduct(
        cupy=driver.cupy(),
        positions=contraction.positions,
        output=contraction.indices[2],
        dtype=dtype,
        copies=copies,
        is_batched=batch_size > 1,
        head=tuple(head),
        order=(first, second, 2),
        numbers=tuple([tuple(matrices[number]) for number in (first, second, 2)]),
        offsets=list(_call_offsets(batches.loops[1:], strides, extent, dtype.itemsize)),
        scales=scales,
    )


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
