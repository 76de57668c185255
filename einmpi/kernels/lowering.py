"""Turn a contraction into matrix products: every label becomes a row, a column, a contracted label
or a loop. An array whose strides do not allow that is copied; the cheapest combination wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, pairwise, product
from typing import NamedTuple, TypeAlias

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.graph.scalar import unique
from einmpi.kernels.contraction import (
    Contraction,
    Extent,
    Labels,
    SummedBlocks,
    dense_strides,
    drop_labels,
    keep_labels,
    size_of,
)
from einmpi.kernels.loop_nest import stride_by_entry

# Nanoseconds per element, or per call, for eight-byte numbers on one core. Only ratios matter.
MULTIPLY_ADD_NS = 0.1
DIRECT_NS = 1.0
COPY_NS = 1.0
TRANSPOSE_NS = 3.0
CALL_NS = 200.0


class StoredArray(NamedTuple):
    """How an array is stored; BLAS cannot use it in place if it is unaligned or byte-swapped."""

    dtype: str
    strides: tuple[int, ...]
    usable_in_place: bool = True


class MatrixLabels(NamedTuple):
    """The labels of the rows, of the contracted dimension and of the columns of a product."""

    rows: Labels
    contracted: Labels
    columns: Labels


NO_MATRIX = MatrixLabels((), (), ())


@dataclass(frozen=True)
class Lowering:
    """One numpy call that computes a contraction, with the copies made before and after it.

    `copies` and `conjugated` have an entry for each factor and one for the output. A copy is given
    by the order of its labels in memory; None means that the array is used in place.
    """

    kernel: str  # "reduce", "multiply", "einsum" or "matmul"
    copies: tuple[Labels | None, ...]
    cost: float
    loops: Labels = ()
    matrix: MatrixLabels = NO_MATRIX
    dtype: str = ""  # of the product, before it is converted to the output's
    conjugated: tuple[bool, ...] = ()
    scaled: int = -1  # the array that is multiplied by the constant
    temporary_bytes: int = 0
    result_bytes: int = 0
    blocks: SummedBlocks | None = None


class ArrayLayout(NamedTuple):
    """The strides of an array by label, and its labels from the longest stride to the shortest."""

    stride: Extent
    order: Labels
    must_copy: bool  # whatever the kernel
    must_copy_for_blas: bool


@bounded_cache(4096)
def cheapest_lowering(
    contraction: Contraction, arrays: tuple[StoredArray, ...], dtype: str
) -> Lowering:
    """Return the cheapest way to contract the factors into the last array.

    Labels of extent 1 play no part. Neither do labels that only one array has: a factor is summed
    over them when it is copied, and the product is repeated along those of the output.

    Parameters
    ----------
    contraction
        The contraction, whose extents are those of the arrays.
    arrays
        The factors in the order of `contraction.positions`, then the output.
    dtype
        The dtype in which products are computed.
    """
    extent = dict(contraction.extents)
    trivial = [label for label in extent if extent[label] <= 1]
    indices = [drop_labels(unique(index), trivial) for index in contraction.indices]
    shared = [_shared_labels(index, indices) for index in indices]
    sizes = [size_of(labels, extent) for labels in shared]
    conjugated = _conjugated(contraction, arrays)
    output = len(arrays) - 1
    # An integer product, or one that is conjugated, is scaled at the end.
    can_scale_early = arrays[output].dtype[0] in "fc" and not conjugated[output]
    blocks = contraction.blocks
    scales_early = can_scale_early and contraction.scale != 1 and blocks is None
    layouts = []
    for k, labels in enumerate(shared):
        table = stride_by_entry(contraction.indices[k], arrays[k].strides)
        stride = {label: table[label] for label in labels}
        order = tuple(sorted(labels, key=lambda label: -abs(stride[label])))
        has_own_labels = len(labels) < len(indices[k])
        is_conjugated_factor = conjugated[k] and k != output
        # To copy and scale a small factor is cheaper than to scale a large output.
        scales_this = scales_early and sizes[k] == min(sizes) <= sizes[output] // 8
        must_copy = has_own_labels or is_conjugated_factor or scales_this
        is_usable = arrays[k].usable_in_place and arrays[k].dtype == dtype
        layouts.append(ArrayLayout(stride, order, must_copy, must_copy or not is_usable))
    candidates = candidate_lowerings(layouts, extent, dtype, blocks)
    best = min(candidates, key=lambda lowering: lowering.cost)
    copied = [k for k, order in enumerate(best.copies) if order is not None]
    # The constant goes to the smallest copy, or else to the output.
    scaled = output
    if scales_early:
        small_copies = [k for k in copied if sizes[k] <= sizes[output]]
        scaled = min(small_copies, key=lambda k: sizes[k], default=output)
    itemsize = np.dtype(dtype).itemsize
    return replace(
        best,
        dtype=dtype,
        conjugated=conjugated,
        scaled=scaled,
        temporary_bytes=itemsize * sum(sizes[k] for k in copied),
        result_bytes=itemsize * size_of(indices[output], extent),
        blocks=blocks,
    )


def _shared_labels(index: Labels, indices: Sequence[Labels]) -> Labels:
    """Return the labels of one array that at least one other array has too."""
    arrays_with = Counter(chain.from_iterable(indices))
    return tuple(label for label in index if arrays_with[label] > 1)


def _conjugated(contraction: Contraction, arrays: Sequence[StoredArray]) -> tuple[bool, ...]:
    """Return which factors are conjugated, and whether the product is.

    To conjugate a real factor changes nothing. If all complex factors are conjugated, the product
    is conjugated instead: that needs no copies of the factors.
    """
    is_complex = [array.dtype[0] == "c" for array in arrays[:-1]]
    flags = [flag and own for flag, own in zip(contraction.conj, is_complex, strict=True)]
    if any(flags) and flags == is_complex:
        return (False,) * len(flags) + (True,)
    return (*flags, False)


def candidate_lowerings(
    layouts: Sequence[ArrayLayout],
    extent: Extent,
    dtype: str,
    blocks: SummedBlocks | None = None,
) -> Iterator[Lowering]:
    """Yield the ways to contract arrays with these layouts, the output's being the last one.

    Without BLAS few arrays need to be copied; BLAS is faster, but takes nothing but matrices whose
    rows or columns are contiguous. A single factor is only summed, and that needs no choice.

    Parameters
    ----------
    layouts
        Of the factors, then of the output. They have only labels that several arrays share.
    extent
        The extent of every label.
    dtype
        The dtype in which products are computed.
    blocks
        If the order of sums is given: by BLAS, with contracted labels in that order.
    """
    target = layouts[-1]
    if len(layouts) == 2:
        copy = target.order if target.must_copy_for_blas else None
        yield Lowering("reduce", (None, copy), 0.0)
        return
    contracted = drop_labels(layouts[0].stride, target.stride)
    if blocks is not None:
        orders = [keep_labels(blocks.labels, contracted)]
        yield from _matrix_lowerings(layouts, orders, extent, dtype)
        return
    yield _direct_lowering(layouts, contracted, extent, dtype)
    if contracted and dtype[0] in "fc":
        orders = _orders_in_memory(contracted, layouts[:2])
        yield from _matrix_lowerings(layouts, orders, extent, dtype)


def _direct_lowering(
    layouts: Sequence[ArrayLayout], contracted: Sequence[str], extent: Extent, dtype: str
) -> Lowering:
    """Return the lowering that lets numpy multiply, and sum, element by element.

    numpy is several times slower if the two factors are contiguous along different labels that
    both of them have: whichever its inner loop follows, it jumps through the other factor.
    """
    left, right, target = layouts
    copies = [layout.order if layout.must_copy else None for layout in layouts]
    if contracted and target.must_copy_for_blas:
        copies[-1] = target.order
    fastest = {*left.order[-1:], *right.order[-1:]}
    common = left.stride.keys() & right.stride.keys()
    same_direction = left.order[-1:] == right.order[-1:] or not fastest <= common
    slowdown = 1 if same_direction else 4
    cost = DIRECT_NS * _width(dtype) * slowdown * size_of({*left.stride, *right.stride}, extent)
    for order in copies:
        if order is not None:
            cost += COPY_NS * size_of(order, extent)
    return Lowering("einsum" if contracted else "multiply", tuple(copies), cost)


def _width(dtype: str) -> float:
    """Return the time of an operation in this dtype relative to an eight-byte real number."""
    eights = np.dtype(dtype).itemsize / 8
    return eights * 2 if dtype[0] == "c" else eights


def _matrix_lowerings(
    layouts: Sequence[ArrayLayout], contracted_orders: Sequence[Labels], extent: Extent, dtype: str
) -> Iterator[Lowering]:
    """Yield lowerings to batches of matrix products, with contracted labels in one of these orders.

    Labels of the left factor and the output become rows, those of the right factor and the output
    columns, and those of all three arrays loops over products. Up to two labels of the rows and
    columns may become loops as well: smaller matrices can fit strides that larger ones do not.
    Several labels in a row, or a column, are tried in each order in which an array has them.
    """
    left, right, target = layouts
    left_only = drop_labels(left.stride, right.stride)
    right_only = drop_labels(right.stride, left.stride)
    batch = keep_labels(keep_labels(left.stride, right.stride), target.stride)
    free = left_only + right_only
    for extra in chain(combinations(free, 0), combinations(free, 1), combinations(free, 2)):
        row_orders = _orders_in_memory(drop_labels(left_only, extra), (left, target))
        column_orders = _orders_in_memory(drop_labels(right_only, extra), (right, target))
        loops = batch + extra
        any_in_place = False
        for rows, depth, columns in product(row_orders, contracted_orders, column_orders):
            matrix = MatrixLabels(rows, depth, columns)
            lowering = _matrix_lowering(layouts, loops, matrix, extent, dtype)
            yield lowering
            any_in_place = any_in_place or lowering.copies == (None, None, None)
        if any_in_place:
            return  # smaller matrices cannot save another copy


def _orders_in_memory(labels: Sequence[str], layouts: Sequence[ArrayLayout]) -> list[Labels]:
    """Return the different orders in which arrays have some labels, slowest label first."""
    orders = [keep_labels(layout.order, labels) for layout in layouts]
    return list(dict.fromkeys(orders))


def _matrix_lowering(
    layouts: Sequence[ArrayLayout], loops: Labels, matrix: MatrixLabels, extent: Extent, dtype: str
) -> Lowering:
    """Return the lowering to matrix products of given rows, columns and contracted labels.

    The estimated time grows with the number of products, the multiplications in each of them (a
    few more than there are: small matrices are slow) and the copies.
    """
    rows, contracted, columns = matrix
    sides = ((rows, contracted), (contracted, columns), (rows, columns))
    row_count = size_of(rows, extent)
    depth = size_of(contracted, extent)
    column_count = size_of(columns, extent)
    work = MULTIPLY_ADD_NS * _width(dtype) * (row_count + 2) * (column_count + 2) * (depth + 8)
    cost = (CALL_NS + work) * size_of(loops, extent)
    itemsize = np.dtype(dtype).itemsize
    copies = []
    for layout, side in zip(layouts, sides, strict=True):
        order = _copy_order(layout, side, extent, itemsize)
        copies.append(order)
        if order is not None:
            keeps_direction = order[-1:] == layout.order[-1:]
            cost += (COPY_NS if keeps_direction else TRANSPOSE_NS) * size_of(order, extent)
    return Lowering("matmul", tuple(copies), cost, loops, matrix)


def _copy_order(
    layout: ArrayLayout, side: tuple[Labels, Labels], extent: Extent, itemsize: int
) -> Labels | None:
    """Return the order of the labels in a copy that BLAS can use, or None if none is needed.

    `side` has the labels of the rows and of the columns of the matrices that the array consists of;
    its other labels number the matrices. Of the orders that BLAS can use, one that keeps the label
    with the shortest stride is copied line by line instead of transposed.
    """
    if not layout.must_copy_for_blas and _is_blas_matrix(layout.stride, side, extent, itemsize):
        return None
    first, second = side
    outer = drop_labels(layout.order, first + second)
    fitting: list[Labels] = []
    for order in (layout.order, outer + first + second, outer + second + first):
        stride = dict(zip(order, dense_strides(order, extent, itemsize), strict=True))
        if _is_blas_matrix(stride, side, extent, itemsize):
            fitting.append(order)
    for order in fitting:
        if order[-1:] == layout.order[-1:]:
            return order
    return fitting[0]


def _is_blas_matrix(
    stride: Extent, side: tuple[Labels, Labels], extent: Extent, itemsize: int
) -> bool:
    """Return whether BLAS can use an array in place as matrices with these rows and columns.

    The labels of a group must walk through memory like a single one. Then either the rows or the
    columns must be contiguous, and the others must not overlap. A vector may have any stride.
    """
    steps: list[tuple[int, int]] = []  # the stride and the size of the rows and of the columns
    for group in side:
        for outer, inner in pairwise(group):
            if stride[outer] != stride[inner] * extent[inner]:
                return False
        if group:
            steps.append((stride[group[-1]], size_of(group, extent)))
    if len(steps) < 2:
        return all(step > 0 and step % itemsize == 0 for step, _ in steps)
    (inner_step, inner_size), (outer_step, _) = sorted(steps)
    is_contiguous = inner_step == itemsize
    overlaps = outer_step < inner_size * itemsize
    return is_contiguous and outer_step % itemsize == 0 and not overlaps


# ---- contraction split ---------------------------------------------------------------------------
#
# Split a contraction so that its temporaries fit into a set number of bytes: the output is cut
# into parts, and where it is too small for that, the sums are.


# With what else a kernel allocates, it stays below 64 MiB.
MAX_TEMPORARY_BYTES = 56 * 2**20
MIN_MATRIX_SIDE = 128  # rows or columns that splitting leaves to a matrix

Part: TypeAlias = Mapping[str, tuple[int, int]]  # start and stop of each label that was split


class LoweredPart(NamedTuple):
    """A part of a contraction's labels and the way to contract it."""

    lowering: Lowering
    part: Part


Summands: TypeAlias = tuple[LoweredPart, ...]  # that are added up to one part of the output


def split_to_fit_memory(
    contraction: Contraction, arrays: tuple[StoredArray, ...], dtype: str, part: Part
) -> Iterator[Summands]:
    """Yield parts of the output that each need at most MAX_TEMPORARY_BYTES of temporaries.

    Halving a label of the output that the largest copy has halves that copy. Where this would cut
    matrices into thin strips, other labels of the output are halved; and where the output itself
    is small, the contracted labels are, so that the part becomes a sum of several products.

    Parameters
    ----------
    contraction
        The contraction of the part; its extents are those of the part.
    arrays
        How the whole factors and the whole output are stored.
    dtype
        The dtype in which products are computed.
    part
        The part of each label that was split before; {} at first.
    """
    lowering = cheapest_lowering(contraction, arrays, dtype)
    if lowering.temporary_bytes <= MAX_TEMPORARY_BYTES:
        yield (LoweredPart(lowering, part),)
        return
    extent = dict(contraction.extents)
    output = contraction.indices[-1]
    itemsize = np.dtype(dtype).itemsize
    candidates = keep_labels(_largest_copy(lowering, extent), output)
    labels = [label for label in candidates if _leaves_large_matrices(lowering, label, extent)]
    is_large = size_of(output, extent) * itemsize > MAX_TEMPORARY_BYTES // 8
    if not labels and is_large:
        labels = [label for label in output if extent[label] > 1]
    if not labels and contraction.blocks is not None:
        yield (LoweredPart(lowering, part),)
        return
    if labels:
        for half, half_part in _halves(contraction, labels, part):
            yield from split_to_fit_memory(half, arrays, dtype, half_part)
    else:  # the output is small and the sums are long
        total = StoredArray(dtype, dense_strides(output, extent, itemsize))
        yield tuple(_split_sum(contraction, (*arrays[:-1], total), dtype, part))


def _split_sum(
    contraction: Contraction, arrays: tuple[StoredArray, ...], dtype: str, part: Part
) -> Iterator[LoweredPart]:
    """Yield parts of the contracted labels that are small enough to be copied.

    Half of the memory is left for the total and for the summand that is added to it next.
    """
    lowering = cheapest_lowering(contraction, arrays, dtype)
    copied = unique(*(order or () for order in lowering.copies[:-1]))
    contracted = drop_labels(copied, contraction.indices[-1])
    if lowering.temporary_bytes <= MAX_TEMPORARY_BYTES // 2 or not contracted:
        yield LoweredPart(lowering, part)
        return
    for half, half_part in _halves(contraction, contracted, part):
        yield from _split_sum(half, arrays, dtype, half_part)


def bytes_needed(summands: Summands) -> int:
    """Return the most bytes of temporaries that are needed at a time to compute some summands.

    A single product goes straight to the output. Several are added to a total, one by one, so the
    total and one product exist in addition to the copies.
    """
    results = 0 if len(summands) == 1 else 2
    return max(
        lowering.temporary_bytes + results * lowering.result_bytes for lowering, _ in summands
    )


def _halves(
    contraction: Contraction, labels: Sequence[str], part: Part
) -> Iterator[tuple[Contraction, Part]]:
    """Yield both halves of the longest of some labels."""
    extent = dict(contraction.extents)
    longest = max(labels, key=lambda label: extent[label])
    start, stop = part.get(longest, (0, extent[longest]))
    middle = (start + stop) // 2
    for half in ((start, middle), (middle, stop)):
        extents = {**extent, longest: half[1] - half[0]}
        yield replace(contraction, extents=tuple(extents.items())), {**part, longest: half}


def _largest_copy(lowering: Lowering, extent: Extent) -> Labels:
    """Return the labels of the largest temporary."""
    orders = [order for order in lowering.copies if order]
    return max(orders, key=lambda order: size_of(order, extent))


def _leaves_large_matrices(lowering: Lowering, label: str, extent: Extent) -> bool:
    """Return whether halving a label leaves matrices large enough for BLAS to be fast."""
    groups = [group for group in lowering.matrix if label in group]
    return all(size_of(group, extent) >= 2 * MIN_MATRIX_SIDE for group in groups)
