"""The cheapest way to do a contraction by BLAS: which operands are copied, how, and in which pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, combinations, pairwise, product
from typing import NamedTuple

import numpy as np

from einmpi.kernels.contraction import Contraction, Extent, Labels, Strides, size_of

# Nanoseconds an element or a call, for eight-byte numbers on one core; only their ratios matter.
MULTIPLY_ADD, DIRECT, COPY, TURN, CALL = 0.1, 1.0, 1.0, 3.0, 200.0


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
