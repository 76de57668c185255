"""The cheapest way to do a contraction by BLAS: which operands are copied, how, and in which pieces."""

from __future__ import annotations

import cmath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, combinations, pairwise, product
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call, Const, Number, Scalar

# Nanoseconds an element or a call, for eight-byte numbers on one core; only their ratios matter.
MULTIPLY_ADD, DIRECT, COPY, TURN, CALL = 0.1, 1.0, 1.0, 3.0, 200.0
MAX_TEMPORARY_BYTES = (
    56 * 2**20
)  # bytes of temporaries at a time, at the most: kernels stay below 64 MiB, all in all
MIN_MATRIX_SIDE = 128  # rows or columns that a matrix keeps when it is halved for that

Labels: TypeAlias = tuple[str, ...]
Extent: TypeAlias = Mapping[str, int]
Part: TypeAlias = Mapping[str, tuple[int, int]]
Strides: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Contraction:
    """`scale` times a product of the operands at `positions`, or their conjugates, summed to the output's labels."""

    positions: tuple[int, ...]
    conj: tuple[bool, ...]
    indices: tuple[Labels, ...]  # of the factors, then of the output
    extents: tuple[tuple[str, int], ...]
    scale: Number


@lru_cache(maxsize=4096)
def recognise_contraction(einsum: EinSum) -> Contraction | None:
    """The EinSum as a contraction; None where it is none."""
    try:
        scale, leaves = _product(einsum.function, False)
        usable = (
            einsum.aggregation in (None, "sum") and 1 <= len(leaves) <= 2 and cmath.isfinite(scale)
        )
    except (TypeError, OverflowError):
        return None
    labels = [
        tuple(entry for entry in einsum.operands[k] if isinstance(entry, str)) for k, _ in leaves
    ]
    if not usable or labels != [einsum.operands[k] for k, _ in leaves]:
        return None  # too many operands, or a gather
    kept = [set(index) & set(einsum.output) for index in labels]
    if not einsum.aggregated and (len(kept) == 1 or kept[0] <= kept[1] or kept[1] <= kept[0]):
        return None  # elementwise work, no outer product
    scale *= prod(
        einsum.extent[label]
        for label in einsum.aggregated
        if not any(label in index for index in labels)
    )
    positions, conj = zip(*leaves, strict=True)
    return Contraction(positions, conj, (*labels, einsum.output), einsum.extents, scale)


def _product(node: Scalar, conj: bool) -> tuple[Any, tuple[tuple[int, bool], ...]]:
    """A product as its constant and its operands, each conjugated or not; TypeError where it is no product."""
    if isinstance(node, Const):
        return (node.value.conjugate() if conj else node.value), ()
    if isinstance(node, Arg):
        return 1, ((node.position, conj),)
    if not isinstance(node, Call) or node.op not in ("*", "conj", "neg"):
        raise TypeError("no product")
    parts = [_product(arg, conj != (node.op == "conj")) for arg in node.args]
    scale = prod((part[0] for part in parts), start=-1 if node.op == "neg" else 1)
    return scale, tuple(leaf for part in parts for leaf in part[1])


@dataclass(frozen=True)
class Lowering:
    """A kernel and what is done before and after it. `copies` and `conj` go over the factors, then the output."""

    kernel: str
    copies: tuple[
        Labels | None, ...
    ]  # the order in memory of a temporary; None: the array is used where it lies
    cost: float
    loops: Labels = ()
    matrix: tuple[Labels, ...] = (
        (),
        (),
        (),
    )  # the labels of the rows, of the inner dimension, of the columns
    dtype: str = ""  # of the product, before it goes to the output
    conj: tuple[bool, ...] = ()
    scaled: int = -1  # what is multiplied by the constant
    bytes: int = 0  # of the temporaries
    result: int = 0  # bytes of the product


PartialLowering: TypeAlias = tuple[Lowering, Part]
Summands: TypeAlias = tuple[PartialLowering, ...]


class ArrayLayout(NamedTuple):
    """Where an array lies: its strides, its labels from the longest to the shortest, and if it must be copied."""

    stride: Extent
    order: Labels
    forced: bool  # for any kernel
    foreign: bool  # for BLAS


@lru_cache(maxsize=4096)
def cheapest_lowering(
    contraction: Contraction, dtypes: Labels, strides: Strides, dtype: str
) -> Lowering:
    """The cheapest way to contract arrays of these dtypes and strides, the output last; `dtype` is the product's."""
    extent = dict(contraction.extents)
    indices = [
        dict.fromkeys(label for label in index if extent[label] > 1)
        for index in contraction.indices
    ]
    # Of every array the labels that another one has: a factor is summed over the rest, the output repeats along it.
    kept = [
        tuple(label for label in index if sum(label in other for other in indices) > 1)
        for index in indices
    ]
    sizes = [size_of(index, extent) for index in kept]
    conj = [
        flag and name[0] == "c"
        for flag, name in zip((*contraction.conj, False), dtypes, strict=True)
    ]
    if any(conj) and conj[:-1] == [name[0] == "c" for name in dtypes[:-1]]:
        conj = [
            not flag and k == len(conj) - 1 for k, flag in enumerate(conj)
        ]  # conjugate the product instead
    scaled, limit = (
        contraction.scale != 1 and dtypes[-1][0] in "fc" and not conj[-1],
        sizes[-1] // 8,
    )
    layouts = []
    for k, index in enumerate(kept):
        steps = list(
            zip(contraction.indices[k], strides[k], strict=True)
        )  # a label may occur twice: the diagonal
        stride = {label: sum(step for other, step in steps if other == label) for label in index}
        order = tuple(sorted(index, key=lambda label: -abs(stride[label])))
        forced = (
            len(index) < len(indices[k])
            or conj[k] > conj[-1]
            or (scaled and sizes[k] == min(sizes) <= limit)
        )
        layouts.append(ArrayLayout(stride, order, forced, forced or dtypes[k] != dtype))
    plan = min(candidate_lowerings(layouts, extent, dtype), key=lambda plan: plan.cost)
    copied = [k for k, copy in enumerate(plan.copies) if copy is not None]
    where = min(
        (k for k in copied if scaled and sizes[k] <= sizes[-1]),
        key=lambda k: sizes[k],
        default=len(sizes) - 1,
    )
    size, result = (
        np.dtype(dtype).itemsize * n
        for n in (sum(sizes[k] for k in copied), size_of(indices[-1], extent))
    )
    return replace(plan, dtype=dtype, conj=tuple(conj), scaled=where, bytes=size, result=result)


def candidate_lowerings(
    layouts: Sequence[ArrayLayout], extent: Extent, dtype: str
) -> Iterator[Lowering]:
    """Ways to contract: without BLAS and almost without copies, or by BLAS with some."""
    a, b, target = layouts[0], layouts[-2], layouts[-1]
    inner = [label for label in a.stride if label not in target.stride]
    copies = [layout.order if layout.forced else None for layout in layouts]
    if target.foreign and (inner or len(layouts) == 2):
        copies[-1] = target.order
    if len(layouts) == 2:
        yield Lowering("reduce", (None, copies[-1]), 0.0)
        return
    size = np.dtype(dtype).itemsize
    width = size / 8 * (2 if dtype[0] == "c" else 1)
    abreast = a.order[-1:] == b.order[-1:] or not {*a.order[-1:], *b.order[-1:]} <= set(
        a.stride
    ) & set(b.stride)
    cost = DIRECT * width * (1 if abreast else 4) * size_of({*a.stride, *b.stride}, extent)
    cost += sum(COPY * size_of(copy, extent) for copy in copies if copy is not None)
    yield Lowering("einsum" if inner else "multiply", tuple(copies), cost)
    if not inner or dtype[0] not in "fc":
        return
    left, right = ([x for x in y.stride if x not in z.stride] for y, z in ((a, b), (b, a)))
    batch = tuple(label for label in a.stride if label in b.stride and label in target.stride)
    for extra in chain.from_iterable(combinations(left + right, count) for count in range(3)):
        loops, viewed = batch + extra, False
        options = [
            dict.fromkeys(tuple(x for x in y.order if x in group and x not in extra) for y in pair)
            for group, pair in ((left, (a, target)), (inner, (a, b)), (right, (b, target)))
        ]
        for rows, depth, columns in product(*options):
            sides = ((rows, depth), (depth, columns), (rows, columns))
            orders = [
                _copy_order(layout, side, extent, size)
                for layout, side in zip(layouts, sides, strict=True)
            ]
            m, k, n = (size_of(group, extent) for group in (rows, depth, columns))
            cost = (CALL + MULTIPLY_ADD * width * (m + 2) * (n + 2) * (k + 8)) * size_of(
                loops, extent
            )
            for layout, order in zip(layouts, orders, strict=True):
                if order is not None:
                    cost += (COPY if order[-1:] == layout.order[-1:] else TURN) * size_of(
                        order, extent
                    )
            yield Lowering("matmul", tuple(orders), cost, loops, (rows, depth, columns))
            viewed = viewed or orders == [None, None, None]
        if viewed:
            return  # loops over smaller matrices can save no copy


def _copy_order(
    layout: ArrayLayout, side: tuple[Labels, Labels], extent: Extent, size: int
) -> Labels | None:
    """The order in memory of the best copy that is a stack of matrices for BLAS; None: the array is one already."""
    if not layout.foreign and _blasable(layout.stride, side, extent, size):
        return None
    outer = tuple(label for label in layout.order if label not in side[0] + side[1])
    orders = (layout.order, outer + side[0] + side[1], outer + side[1] + side[0])
    strides = [
        {label: size * size_of(order[k + 1 :], extent) for k, label in enumerate(order)}
        for order in orders
    ]
    fitting = [tuple(stride) for stride in strides if _blasable(stride, side, extent, size)]
    return max(fitting, key=lambda order: order[-1:] == layout.order[-1:])


def _blasable(stride: Extent, side: tuple[Labels, Labels], extent: Extent, size: int) -> bool:
    """Whether two groups of labels are the dimensions of a matrix, or a vector, that matmul gives to BLAS as it is."""
    if any(stride[x] != stride[y] * extent[y] for group in side for x, y in pairwise(group)):
        return False
    steps = sorted((stride[group[-1]], size_of(group, extent)) for group in side if group)
    if len(steps) < 2:
        return all(step > 0 and step % size == 0 for step, _ in steps)
    (fast, count), (slow, _) = steps
    return fast == size and slow % size == 0 and slow >= count * size


def split_to_fit_memory(
    contraction: Contraction, dtypes: Labels, strides: Strides, dtype: str, part: Part
) -> Iterator[Summands]:
    """The output in parts that need no more than MAX_TEMPORARY_BYTES bytes of temporaries, and what is added up for each of them."""
    plan, extent = cheapest_lowering(contraction, dtypes, strides, dtype), dict(contraction.extents)
    if plan.bytes <= MAX_TEMPORARY_BYTES:
        yield ((plan, part),)
        return
    output = contraction.indices[-1]
    largest = max((copy for copy in plan.copies if copy), key=lambda copy: size_of(copy, extent))
    usable = [label for label in largest if label in output and _is_thick(plan, label, extent)]
    if not usable and size_of(output, extent) * np.dtype(dtype).itemsize > MAX_TEMPORARY_BYTES // 8:
        usable = [label for label in output if extent[label] > 1]
    if usable:
        for half, place in _halves(contraction, usable, part):
            yield from split_to_fit_memory(half, dtypes, strides, dtype, place)
    else:  # the output is small, and the sums are long
        dense = dense_strides(output, extent, dtype)
        yield tuple(
            _summands(contraction, (*dtypes[:-1], dtype), (*strides[:-1], dense), dtype, part)
        )


def _summands(
    contraction: Contraction, dtypes: Labels, strides: Strides, dtype: str, part: Part
) -> Iterator[PartialLowering]:
    plan = cheapest_lowering(contraction, dtypes, strides, dtype)
    inner = [
        label
        for copy in plan.copies[:-1]
        for label in copy or ()
        if label not in contraction.indices[-1]
    ]
    if plan.bytes <= MAX_TEMPORARY_BYTES // 2 or not inner:
        yield plan, part
        return
    for half, place in _halves(contraction, inner, part):
        yield from _summands(half, dtypes, strides, dtype, place)


def bytes_needed(summands: Summands) -> int:
    """Bytes of temporaries: the copies, and where there are several summands the total and one of them."""
    return max(plan.bytes + (2 * plan.result if len(summands) > 1 else 0) for plan, _ in summands)


def _halves(
    contraction: Contraction, labels: Sequence[str], part: Part
) -> Iterator[tuple[Contraction, Part]]:
    """Both halves of the longest of some labels."""
    extent = dict(contraction.extents)
    label = max(labels, key=lambda x: extent[x])
    start, stop = part.get(label, (0, extent[label]))
    for half in ((start, (start + stop) // 2), ((start + stop) // 2, stop)):
        extents = tuple(
            (x, half[1] - half[0] if x == label else size) for x, size in contraction.extents
        )
        yield replace(contraction, extents=extents), {**part, label: half}


def _is_thick(plan: Lowering, label: str, extent: Extent) -> bool:
    """Whether a label can be halved without making thin matrices of those that BLAS gets."""
    groups = [group for group in plan.matrix if label in group]
    return all(size_of(group, extent) >= 2 * MIN_MATRIX_SIDE for group in groups)


def dense_strides(index: Labels, extent: Extent, dtype: str) -> tuple[int, ...]:
    """Those of a C-contiguous array."""
    return tuple(
        np.dtype(dtype).itemsize * size_of(index[k + 1 :], extent) for k in range(len(index))
    )


def size_of(labels: Iterable[str], extent: Extent) -> int:
    return prod(extent[label] for label in labels)
