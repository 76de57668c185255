"""Sums of products of two operands by cuBLAS, on the arrays as they lie: a batch of products of matrices, with a copy
only where the strides allow none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call
from einmpi.kernels.contraction import Contraction, Labels, Strides, size_of
from einmpi.kernels.cuda import driver
from einmpi.kernels.cuda.scalar_source import plain
from einmpi.kernels.lowering import ArrayLayout, candidate_lowerings

# cuBLAS's numbers for the type of an array and for that of its sums: half precision is summed in single, and single
# precision keeps all of its bits unless TF32 is asked for.
TYPES = {
    "float16": (2, 68),
    "bfloat16": (14, 68),
    "float32": (0, 68),
    "float64": (1, 70),
    "complex64": (4, 68),
    "complex128": (5, 70),
}
TF32 = 77
NO_SHORT_SUMS = 16  # a mode: parts of a sum are not rounded to half precision either
PLAIN, TURNED, CONJUGATE = 0, 1, 2
# Seconds a call, a byte of a copy, a multiplication and addition in float32; only their ratios matter.
CALL, COPIED, MULTIPLIED = 5e-6, 1e-12, 5e-14
LIMIT = 2**31  # of what cuBLAS takes as an extent or a stride between rows


@dataclass(frozen=True)
class _Part:
    """Where an array lies, or its copy: strides in elements of the labels that the product uses."""

    order: Labels | None  # of a copy, dense and in this order; None: the array itself
    stride: Mapping[str, int]


@dataclass(frozen=True)
class _Plan:
    parts: tuple[_Part, ...]
    loops: tuple[
        Labels, ...
    ]  # each one loop, its labels from the slowest to the fastest; the first one is the batch
    matrix: tuple[Labels, Labels, Labels]  # rows, inner dimension, columns


Generate = Callable[[EinSum, Sequence[Any], Any], None]  # by a generated kernel


def prepare_product(
    contraction: Contraction, operands: Sequence[Any], target: Any, tf32: bool, onto: bool = False
) -> _Product | None:
    """What fills the target, or is added to it with `onto`; None where a generated kernel does it better."""
    if len(contraction.positions) != 2 or target.dtype.name not in TYPES:
        return None
    arrays = [*(operands[k] for k in contraction.positions), target]
    plan = _plan(contraction, tuple(a.dtype.name for a in arrays), tuple(a.strides for a in arrays))
    return None if plan is None else _product(plan, contraction, arrays, tf32, onto)


# ---- which way ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _plan(contraction: Contraction, dtypes: Labels, strides: Strides) -> _Plan | None:
    extent = dict(contraction.extents)
    indices = [
        dict.fromkeys(label for label in index if extent[label] > 1)
        for index in contraction.indices
    ]
    # A factor is summed over labels that only it has, the output repeats along those that only it has: by copies.
    kept = [
        tuple(label for label in index if sum(label in other for other in indices) > 1)
        for index in indices
    ]
    size = np.dtype(plain(dtypes[-1])).itemsize
    layouts = []
    for k, index in enumerate(kept):
        steps = list(
            zip(contraction.indices[k], strides[k], strict=True)
        )  # a label may occur twice: the diagonal
        stride = {label: sum(step for other, step in steps if other == label) for label in index}
        order = tuple(sorted(index, key=lambda label: -abs(stride[label])))
        forced = len(index) < len(indices[k]) or dtypes[k] != dtypes[-1]
        layouts.append(ArrayLayout(stride, order, forced, forced))
    inner, target = [x for x in kept[0] if x not in kept[2]], kept[2]
    if not inner or not all(
        any(x in target and x not in kept[1 - k] for x in kept[k]) for k in (0, 1)
    ):
        return None  # no product of matrices
    best: tuple[float, _Plan] | None = None
    for way in candidate_lowerings(layouts, extent, plain(dtypes[-1])):
        if way.kernel != "matmul" or not (way.matrix[0] or way.matrix[2]):
            continue
        parts = tuple(
            _Part(order, _elements(layout.stride, size) if order is None else _dense(order, extent))
            for order, layout in zip(way.copies, layouts, strict=True)
        )
        plan = _Plan(parts, _merged(way.loops, parts, extent), _three(way.matrix))
        cost = _cost(plan, extent, size)
        if _is_short(plan, extent) and (best is None or cost < best[0]):
            best = cost, plan
    return best and best[1]


def _three(matrix: tuple[Labels, ...]) -> tuple[Labels, Labels, Labels]:
    rows, inner, columns = matrix
    return rows, inner, columns


def _elements(stride: Mapping[str, int], size: int) -> dict[str, int]:
    return {label: step // size for label, step in stride.items()}


def _dense(order: Labels, extent: Mapping[str, int]) -> dict[str, int]:
    return {label: size_of(order[k + 1 :], extent) for k, label in enumerate(order)}


def _merged(loops: Labels, parts: Sequence[_Part], extent: Mapping[str, int]) -> tuple[Labels, ...]:
    """The loops, those that lie behind one another in every array as one, the longest first."""
    groups: list[Labels] = [(label,) for label in loops]

    def joins(a: Labels, b: Labels) -> bool:
        return all(p.stride.get(a[-1], 0) == p.stride.get(b[0], 0) * extent[b[0]] for p in parts)

    while True:
        pair = next(((a, b) for a, b in itertools.permutations(groups, 2) if joins(a, b)), None)
        if pair is None:
            return tuple(sorted(groups, key=lambda group: (-size_of(group, extent), group)))
        groups = [group for group in groups if group not in pair] + [pair[0] + pair[1]]


def _cost(plan: _Plan, extent: Mapping[str, int], size: int) -> float:
    calls = prod(size_of(group, extent) for group in plan.loops[1:])
    batch = size_of(plan.loops[0], extent) if plan.loops else 1
    copied = sum(size_of(part.order, extent) for part in plan.parts if part.order is not None)
    m, k, n = (size_of(group, extent) for group in plan.matrix)
    # A small matrix takes as long as a tile of the device's kernels does.
    work = calls * batch * max(m, 64) * max(n, 64) * max(k, 16)
    return CALL * calls + COPIED * copied * size + MULTIPLIED * work


def _is_short(plan: _Plan, extent: Mapping[str, int]) -> bool:
    sizes = [size_of(group, extent) for group in (*plan.matrix, *plan.loops[:1])]
    ends = [group[-1] for group in plan.matrix if group]
    lines = [part.stride[label] for part in plan.parts for label in ends if label in part.stride]
    return all(size < LIMIT for size in (*sizes, *lines))


# ---- the run --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Copy:
    """A temporary for an array, of this shape, and what fills it, or the array from it."""

    order: Labels
    shape: tuple[int, ...]
    einsum: EinSum


@dataclass(frozen=True)
class _Product:
    """Calls of cuBLAS, and copies before and after. All that can be known without the arrays is."""

    cupy: Any
    positions: tuple[int, ...]
    output: Labels
    dtype: np.dtype[Any]
    copies: tuple[_Copy | None, ...]
    sizes: tuple[
        int, int, int, int
    ]  # rows, columns and depth of a product as cuBLAS sees it, and how many
    ops: tuple[int, int]
    first: int  # the factor that cuBLAS gets first
    lines: tuple[int, ...]  # how far apart the lines of each matrix are
    apart: tuple[int, ...]  # and the matrices of a batch
    numbers: np.ndarray  # what the product is multiplied by, and the target before it
    address: int  # of these
    kinds: tuple[int, int]
    places: tuple[tuple[int, ...], ...]  # bytes from the beginning of each array, for each call

    @property
    def bytes(self) -> int:
        """Of the temporaries."""
        return sum(
            prod(copy.shape) * self.dtype.itemsize for copy in self.copies if copy is not None
        )

    @property
    def copied(self) -> Labels:
        """The output's labels of the largest temporary: halves of them need half of it."""
        copies = [copy for copy in self.copies if copy is not None]
        largest = max(copies, key=lambda copy: prod(copy.shape), default=None)
        return tuple(label for label in largest.order if label in self.output) if largest else ()

    def __call__(self, operands: Sequence[Any], target: Any) -> None:
        """On the arrays as they lie."""
        x, y = self.positions
        self.multiply((operands[x].data.ptr, operands[y].data.ptr, target.data.ptr))

    def with_copies(self, generate: Generate) -> Callable[[Sequence[Any], Any], None]:
        def run(operands: Sequence[Any], target: Any) -> None:
            arrays = [*(operands[k] for k in self.positions), target]
            used = [
                array if copy is None else self.cupy.empty(copy.shape, self.dtype)
                for array, copy in zip(arrays, self.copies, strict=True)
            ]
            for array, copy, temporary in zip(arrays[:2], self.copies, used, strict=False):
                if copy is not None:
                    generate(copy.einsum, [array], temporary)
            self.multiply([array.data.ptr for array in used])
            if self.copies[2] is not None:
                generate(self.copies[2].einsum, [used[2]], target)

        return run

    def multiply(self, pointers: Sequence[int]) -> None:
        """One call for a batch of products, for each position of the other loops."""
        f, s = self.first, 1 - self.first
        (m, n, k, count), (kind, sums), lines, apart = (
            self.sizes,
            self.kinds,
            self.lines,
            self.apart,
        )
        alpha, beta = self.address, self.address + self.numbers.itemsize
        cuda = self.cupy.cuda
        blas, handle = cuda.cublas, cuda.device.get_cublas_handle()
        mode = blas.getMathMode(handle)
        blas.setMathMode(handle, NO_SHORT_SUMS)
        try:
            for places in self.places:
                at = [pointer + place for pointer, place in zip(pointers, places, strict=True)]
                if count == 1:
                    blas.gemmEx(
                        handle,
                        *self.ops,
                        m,
                        n,
                        k,
                        alpha,
                        at[f],
                        kind,
                        lines[f],
                        at[s],
                        kind,
                        lines[s],
                        beta,
                        at[2],
                        kind,
                        lines[2],
                        sums,
                        -1,
                    )
                else:
                    blas.gemmStridedBatchedEx(
                        handle,
                        *self.ops,
                        m,
                        n,
                        k,
                        alpha,
                        at[f],
                        kind,
                        lines[f],
                        apart[f],
                        at[s],
                        kind,
                        lines[s],
                        apart[s],
                        beta,
                        at[2],
                        kind,
                        lines[2],
                        apart[2],
                        count,
                        sums,
                        -1,
                    )
        finally:
            blas.setMathMode(handle, mode)


def _product(
    plan: _Plan, contraction: Contraction, arrays: Sequence[Any], tf32: bool, onto: bool
) -> _Product:
    dtype, extent = arrays[-1].dtype, dict(contraction.extents)
    rows, inner, columns = plan.matrix
    strides, ops, copies = [dict(part.stride) for part in plan.parts], [], []
    sides = ((rows, inner), (inner, columns), (rows, columns))
    # The product's transpose is that of the transposes, in the other order.
    turned = _turn(strides[2], rows, columns)
    for k, side in enumerate(sides):
        order = plan.parts[k].order
        conj = k < 2 and contraction.conj[k] and arrays[k].dtype.kind == "c"
        op = _turn(strides[k], *side) ^ turned
        if conj and order is None and op == PLAIN:  # cuBLAS conjugates what it transposes
            order = tuple(sorted(strides[k], key=lambda label: -abs(strides[k][label])))
            strides[k] = _dense(order, extent)
        ops.append(CONJUGATE if conj and order is None else op)
        copies.append(
            None if order is None else _copy(contraction.indices[k], order, extent, conj, k == 2)
        )
    m, k, n = (size_of(group, extent) for group in plan.matrix)
    kind, sums = TYPES[dtype.name]
    sums = TF32 if tf32 and dtype.name in ("float32", "complex64") else sums
    batch = plan.loops[0] if plan.loops else ()
    numbers = np.array([contraction.scale, int(onto)], np.float32 if dtype.itemsize == 2 else dtype)
    return _Product(
        driver.cupy(),
        contraction.positions,
        contraction.indices[2],
        dtype,
        tuple(copies),
        (n, m, k, size_of(batch, extent)) if turned else (m, n, k, size_of(batch, extent)),
        (ops[1], ops[0]) if turned else (ops[0], ops[1]),
        turned,
        tuple(_line(stride, *side, extent) for stride, side in zip(strides, sides, strict=True)),
        tuple(stride.get(batch[-1], 0) if batch else 0 for stride in strides),
        numbers,
        numbers.ctypes.data,
        (kind, sums),
        tuple(_places(plan.loops[1:], strides, extent, dtype.itemsize)),
    )


def _copy(index: Labels, order: Labels, extent: Mapping[str, int], conj: bool, back: bool) -> _Copy:
    """Permuted, cast, conjugated, summed over labels that only the source has, repeated along those of the target."""
    source, target = (order, index) if back else (index, order)
    summed = tuple(label for label in dict.fromkeys(source) if label not in target)
    function = Call("conj", (Arg(0),)) if conj else Arg(0)
    extents = tuple((label, extent[label]) for label in (*target, *summed))
    einsum = EinSum(target, (source,), function, "sum" if summed else None, summed, extents)
    return _Copy(order, tuple(extent[label] for label in order), einsum)


def _turn(stride: Mapping[str, int], down: Labels, along: Labels) -> int:
    """How cuBLAS, for which neighbours in memory are a column, sees a matrix of these rows and columns."""
    if not down or not along:
        return PLAIN if along else TURNED
    return PLAIN if stride[down[-1]] == 1 else TURNED


def _line(stride: Mapping[str, int], down: Labels, along: Labels, extent: Mapping[str, int]) -> int:
    """How far apart the lines of a matrix are in memory."""
    fast, slow = (down, along) if _turn(stride, down, along) == PLAIN else (along, down)
    return max(stride[slow[-1]] if slow else 1, size_of(fast, extent))


def _places(
    loops: Sequence[Labels],
    strides: Sequence[Mapping[str, int]],
    extent: Mapping[str, int],
    size: int,
) -> Iterator[tuple[int, ...]]:
    """Where each call begins in every array, in bytes."""
    for position in itertools.product(*(range(size_of(group, extent)) for group in loops)):
        pairs = list(zip(position, loops, strict=True))
        yield tuple(
            size * sum(n * stride.get(group[-1], 0) for n, group in pairs) for stride in strides
        )
