"""Sums of products of one or two operands as (batched) matrix products at BLAS speed, with the fewest copies."""

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
PIECE, THIN = 2**26, 128  # bytes of temporaries above which a product is halved; halves of labels are no shorter
EXACT = 2**53  # float64 holds every integer up to here

Labels: TypeAlias = tuple[str, ...]
Extent: TypeAlias = Mapping[str, int]
Part: TypeAlias = Mapping[str, tuple[int, int]]
Labelled: TypeAlias = tuple[np.ndarray, Labels]  # a label for each axis, every label once and none of extent 1


@dataclass(frozen=True)
class Contraction:
    """`scale` times a product of the operands at `positions`, or their conjugates, summed to the output's labels."""

    positions: tuple[int, ...]
    conj: tuple[bool, ...]
    indices: tuple[Labels, ...]  # of the factors, then of the output
    extents: tuple[tuple[str, int], ...]
    scale: Number


@dataclass(frozen=True)
class Plan:
    """A kernel and what is done before and after it. `copies` and `conj` go over the factors, then the output."""

    kernel: str
    copies: tuple[Labels | None, ...]  # the order in memory of a temporary; None: the array is used where it lies
    cost: float
    loops: Labels = ()
    matrix: tuple[Labels, ...] = ((), (), ())  # the labels of the rows, of the inner dimension, of the columns
    dtype: str = ""  # of the product, before it goes to the output
    conj: tuple[bool, ...] = ()
    scaled: int = -1  # what is multiplied by the constant
    bytes: int = 0  # of the temporaries


class Layout(NamedTuple):
    """Where an array lies: its strides, its labels from the longest to the shortest, and if it must be copied."""

    stride: Extent
    order: Labels
    forced: bool  # for any kernel
    foreign: bool  # for BLAS


@lru_cache(maxsize=4096)
def recognise(einsum: EinSum) -> Contraction | None:
    """The EinSum as a contraction; None where it is none."""
    try:
        scale, leaves = _product(einsum.function, False)
        usable = einsum.aggregation in (None, "sum") and 1 <= len(leaves) <= 2 and cmath.isfinite(scale)
    except (TypeError, OverflowError):
        return None
    labels = [tuple(entry for entry in einsum.operands[k] if isinstance(entry, str)) for k, _ in leaves]
    if not usable or labels != [einsum.operands[k] for k, _ in leaves]:
        return None  # too many operands, or a gather
    kept = [set(index) & set(einsum.output) for index in labels]
    if not einsum.aggregated and (len(kept) == 1 or kept[0] <= kept[1] or kept[1] <= kept[0]):
        return None  # elementwise work, no outer product
    scale *= prod(einsum.extent[label] for label in einsum.aggregated if not any(label in index for index in labels))
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


@lru_cache(maxsize=4096)
def _plan(contraction: Contraction, dtypes: Labels, strides: tuple[tuple[int, ...], ...], dtype: str) -> Plan:
    """The cheapest way to contract arrays of these dtypes and strides, the output last; `dtype` is the product's."""
    extent = dict(contraction.extents)
    indices = [dict.fromkeys(label for label in index if extent[label] > 1) for index in contraction.indices]
    # Of every array the labels that another one has: a factor is summed over the rest, the output repeats along it.
    kept = [tuple(label for label in index if sum(label in other for other in indices) > 1) for index in indices]
    sizes = [_size(index, extent) for index in kept]
    conj = [flag and name[0] == "c" for flag, name in zip((*contraction.conj, False), dtypes, strict=True)]
    if any(conj) and conj[:-1] == [name[0] == "c" for name in dtypes[:-1]]:
        conj = [not flag and k == len(conj) - 1 for k, flag in enumerate(conj)]  # conjugate the product instead
    scaled, limit = contraction.scale != 1 and dtypes[-1][0] in "fc" and not conj[-1], sizes[-1] // 8
    layouts = []
    for k, index in enumerate(kept):
        steps = list(zip(contraction.indices[k], strides[k], strict=True))  # a label may occur twice: the diagonal
        stride = {label: sum(step for other, step in steps if other == label) for label in index}
        order = tuple(sorted(index, key=lambda label: -abs(stride[label])))
        forced = len(index) < len(indices[k]) or conj[k] > conj[-1] or (scaled and sizes[k] == min(sizes) <= limit)
        layouts.append(Layout(stride, order, forced, forced or dtypes[k] != dtype))
    plan = min(_plans(layouts, extent, dtype), key=lambda plan: plan.cost)
    copied = [k for k, copy in enumerate(plan.copies) if copy is not None]
    where = min((k for k in copied if scaled and sizes[k] <= sizes[-1]), key=lambda k: sizes[k], default=len(sizes) - 1)
    size = np.dtype(dtype).itemsize * sum(sizes[k] for k in copied)
    return replace(plan, dtype=dtype, conj=tuple(conj), scaled=where, bytes=size)


def _plans(layouts: Sequence[Layout], extent: Extent, dtype: str) -> Iterator[Plan]:
    """Ways to contract: without BLAS and almost without copies, or by BLAS with some."""
    a, b, target = layouts[0], layouts[-2], layouts[-1]
    inner = [label for label in a.stride if label not in target.stride]
    copies = [layout.order if layout.forced else None for layout in layouts]
    if target.foreign and (inner or len(layouts) == 2):
        copies[-1] = target.order
    if len(layouts) == 2:
        yield Plan("reduce", (None, copies[-1]), 0.0)
        return
    size = np.dtype(dtype).itemsize
    width = size / 8 * (2 if dtype[0] == "c" else 1)
    abreast = a.order[-1:] == b.order[-1:] or not {*a.order[-1:], *b.order[-1:]} <= set(a.stride) & set(b.stride)
    cost = DIRECT * width * (1 if abreast else 4) * _size({*a.stride, *b.stride}, extent)
    cost += sum(COPY * _size(copy, extent) for copy in copies if copy is not None)
    yield Plan("einsum" if inner else "multiply", tuple(copies), cost)
    if not inner or dtype[0] not in "fc":
        return
    left, right = ([x for x in y.stride if x not in z.stride] for y, z in ((a, b), (b, a)))
    batch = tuple(label for label in a.stride if label in b.stride and label in target.stride)
    for extra in chain.from_iterable(combinations(left + right, count) for count in range(3)):
        loops, viewed = batch + extra, False
        options = [dict.fromkeys(tuple(x for x in y.order if x in group and x not in extra) for y in pair)
                   for group, pair in ((left, (a, target)), (inner, (a, b)), (right, (b, target)))]  # fmt: skip
        for rows, depth, columns in product(*options):
            sides = ((rows, depth), (depth, columns), (rows, columns))
            orders = [_copy_order(layout, side, extent, size) for layout, side in zip(layouts, sides, strict=True)]
            m, k, n = (_size(group, extent) for group in (rows, depth, columns))
            cost = (CALL + MULTIPLY_ADD * width * (m + 2) * (n + 2) * (k + 8)) * _size(loops, extent)
            for layout, order in zip(layouts, orders, strict=True):
                if order is not None:
                    cost += (COPY if order[-1:] == layout.order[-1:] else TURN) * _size(order, extent)
            yield Plan("matmul", tuple(orders), cost, loops, (rows, depth, columns))
            viewed = viewed or orders == [None, None, None]
        if viewed:
            return  # loops over smaller matrices can save no copy


def _copy_order(layout: Layout, side: tuple[Labels, Labels], extent: Extent, size: int) -> Labels | None:
    """The order in memory of the best copy that is a stack of matrices for BLAS; None: the array is one already."""
    if not layout.foreign and _blasable(layout.stride, side, extent, size):
        return None
    outer = tuple(label for label in layout.order if label not in side[0] + side[1])
    orders = (layout.order, outer + side[0] + side[1], outer + side[1] + side[0])
    strides = [{label: size * _size(order[k + 1 :], extent) for k, label in enumerate(order)} for order in orders]
    fitting = [tuple(stride) for stride in strides if _blasable(stride, side, extent, size)]
    return max(fitting, key=lambda order: order[-1:] == layout.order[-1:])


def _blasable(stride: Extent, side: tuple[Labels, Labels], extent: Extent, size: int) -> bool:
    """Whether two groups of labels are the dimensions of a matrix, or a vector, that matmul gives to BLAS as it is."""
    if any(stride[x] != stride[y] * extent[y] for group in side for x, y in pairwise(group)):
        return False
    steps = sorted((stride[group[-1]], _size(group, extent)) for group in side if group)
    if len(steps) < 2:
        return all(step > 0 and step % size == 0 for step, _ in steps)
    (fast, count), (slow, _) = steps
    return fast == size and slow % size == 0 and slow >= count * size


def _size(labels: Iterable[str], extent: Extent) -> int:
    return prod(extent[label] for label in labels)


def contract(contraction: Contraction, operands: Sequence[np.ndarray], out: np.ndarray) -> None:
    """The contraction of the operands, written into `out`, whose dtype is that of the EinSum."""
    if 0 in (extent for _, extent in contraction.extents):
        out[...] = 0
        return
    arrays = [*(operands[k] for k in contraction.positions), out]
    names, strides = tuple(array.dtype.name for array in arrays), tuple(array.strides for array in arrays)
    dtype = _product_dtype(contraction, out.dtype, arrays[:-1])
    with np.errstate(all="ignore"):
        for plan, part in _pieces(contraction, names, strides, dtype, {}):
            views = [_view(array, index, part) for array, index in zip(arrays, contraction.indices, strict=True)]
            _run(plan, views, contraction.scale)


def workspace(contraction: Contraction, dtypes: Sequence[str], dtype: str) -> int:
    """Bytes of temporaries that `contract` makes at once for C-contiguous arrays; for integers the most it may make."""
    extent, names = dict(contraction.extents), (*(dtypes[k] for k in contraction.positions), dtype)
    if 0 in extent.values():
        return 0
    strides = tuple(
        tuple(np.dtype(name).itemsize * _size(index[k + 1 :], extent) for k in range(len(index)))
        for name, index in zip(names, contraction.indices, strict=True)
    )
    inner = _product_dtype(contraction, np.dtype(dtype), ())
    return max(plan.bytes for plan, _ in _pieces(contraction, names, strides, inner, {}))


def _product_dtype(contraction: Contraction, dtype: np.dtype[Any], factors: Iterable[np.ndarray]) -> str:
    """float16 is summed in float32; integers are multiplied by BLAS as float64, if that holds any sum of them."""
    if dtype.kind != "i" or len(contraction.positions) == 1:
        return "float32" if dtype == np.float16 else dtype.name
    terms = prod(extent for label, extent in contraction.extents if label not in contraction.indices[-1])
    limit = terms * abs(contraction.scale) * prod(max(1, -int(array.min()), int(array.max())) for array in factors)
    return "float64" if terms > 1 and limit <= EXACT else dtype.name


def _pieces(contraction: Contraction, dtypes: Labels, strides: tuple[tuple[int, ...], ...], dtype: str, part: Part
            ) -> Iterator[tuple[Plan, Part]]:  # fmt: skip
    """A plan and its part of the labels' ranges: all of them, or halves where temporaries are large."""
    plan, extent = _plan(contraction, dtypes, strides, dtype), dict(contraction.extents)
    largest = max((copy for copy in plan.copies if copy), key=lambda copy: _size(copy, extent), default=())
    usable = [x for x in largest if x in contraction.indices[-1] and (x in plan.loops or extent[x] >= 2 * THIN)]
    if plan.bytes <= PIECE or not usable:
        yield plan, part
        return
    label = max(usable, key=lambda x: extent[x])
    start, stop = part.get(label, (0, extent[label]))
    for half in ((start, (start + stop) // 2), ((start + stop) // 2, stop)):
        extents = tuple((x, half[1] - half[0] if x == label else size) for x, size in contraction.extents)
        yield from _pieces(replace(contraction, extents=extents), dtypes, strides, dtype, {**part, label: half})


def _run(plan: Plan, views: list[Labelled], scale: Any) -> None:
    """Copy the factors, multiply, copy to the output; conjugate and scale what the plan says."""
    parts = list(views)
    for k, order in enumerate(plan.copies):
        if order is not None:
            shape = dict(zip(views[k][1], views[k][0].shape, strict=True))
            parts[k] = np.empty([shape[label] for label in order], plan.dtype), order
    for k, (array, _) in enumerate(parts):
        if k == len(parts) - 1:
            _apply(plan, parts)
        elif parts[k] is not views[k]:
            _fill(parts[k], views[k])
        if plan.conj[k]:
            np.conjugate(array, out=array)
        if plan.scaled == k and scale != 1:  # an integer may wrap around
            whole = array.dtype.kind in "bi"
            np.multiply(array, np.array(scale % 2**64, "u8").astype(array.dtype) if whole else scale, out=array)
    if parts[-1] is not views[-1]:
        _fill(views[-1], parts[-1])


def _apply(plan: Plan, parts: list[Labelled]) -> None:
    """The kernel on the factors, into the last of the parts."""
    loops, (rows, inner, columns), (out, labels) = plan.loops, plan.matrix, parts[-1]
    if plan.kernel == "reduce":
        _fill(parts[1], parts[0])
    elif plan.kernel == "multiply":  # numpy is faster if the innermost loop goes along the first factor
        a, b = (_stack(part, labels) for part in sorted(parts[:2], key=lambda part: not {*labels[-1:]} <= {*part[1]}))
        np.multiply(a, b, out=out, dtype=plan.dtype, casting="unsafe")
    elif plan.kernel == "einsum":
        names = list(dict.fromkeys(parts[0][1] + parts[1][1]))
        x, y, z = ([names.index(label) for label in index] for _, index in parts)
        np.einsum(parts[0][0], x, parts[1][0], y, z, out=out, dtype=np.dtype(plan.dtype), casting="unsafe")
    else:
        a, b = _stack(parts[0], loops, rows, inner), _stack(parts[1], loops, inner, columns)
        np.matmul(a, b, out=_stack(parts[2], loops, rows, columns))


def _view(array: np.ndarray, index: Labels, part: Part) -> Labelled:
    region: Any = tuple(slice(*part.get(label, (None,))) for label in index)
    array, labels = array[(..., *region)], tuple(dict.fromkeys(index))
    if len(labels) < len(index):
        array = np.einsum(array, [labels.index(label) for label in index], list(range(len(labels))))  # the diagonal
    kept = [axis for axis, extent in enumerate(array.shape) if extent != 1]
    return array.reshape([array.shape[axis] for axis in kept]), tuple(labels[axis] for axis in kept)


def _stack(part: Labelled, loops: Labels, *groups: Labels) -> np.ndarray:
    """A view: an axis for each label of `loops`, of extent 1 for one it lacks, then one for each group of labels."""
    array, labels = part
    extent = dict(zip(labels, array.shape, strict=True))
    shape = [*(extent.get(label, 1) for label in loops), *(_size(group, extent) for group in groups)]
    return array.transpose([labels.index(x) for x in chain(loops, *groups) if x in extent]).reshape(shape)


def _fill(target: Labelled, source: Labelled) -> None:
    """Every copy is made here: permuted, cast, summed over labels that only the source has, repeated along the rest."""
    summed = tuple(label for label in source[1] if label not in target[1])
    array, axes = _stack(source, target[1] + summed), tuple(range(-len(summed), 0))
    if summed:
        np.add.reduce(array, axis=axes, dtype=target[0].dtype, out=target[0])
    else:
        np.copyto(target[0], array, casting="unsafe")
