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
from einmpi.graph.scalar import Arg, Call, Number
from einmpi.runtime.contract_plan import Contraction, Labels, Layout, Strides, size_of, ways
from einmpi.runtime.cuda_launch import cupy
from einmpi.runtime.cuda_text import plain

# cuBLAS's numbers for the type of an array and for that of its sums: half precision is summed in single, and single
# precision keeps all of its bits unless TF32 is asked for.
TYPES = {"float16": (2, 68), "bfloat16": (14, 68), "float32": (0, 68), "float64": (1, 70), "complex64": (4, 68),
         "complex128": (5, 70)}  # fmt: skip
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
    loops: tuple[Labels, ...]  # each one loop, its labels from the slowest to the fastest; the first one is the batch
    matrix: tuple[Labels, Labels, Labels]  # rows, inner dimension, columns


def contract(contraction: Contraction, operands: Sequence[Any], target: Any, tf32: bool,
             generate: Callable[..., None]) -> bool:  # fmt: skip
    """Fill the target; False, and nothing is done, where a generated kernel does it better. `generate` does copies."""
    if len(contraction.positions) != 2 or target.dtype.name not in TYPES:
        return False
    arrays = [*(operands[k] for k in contraction.positions), target]
    if any(stride % array.itemsize for array in arrays for stride in array.strides):
        return False
    plan = _plan(contraction, tuple(a.dtype.name for a in arrays), tuple(a.strides for a in arrays))
    if plan is None:
        return False
    _run(plan, contraction, arrays, tf32, generate)
    return True


# ---- which way ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _plan(contraction: Contraction, dtypes: Labels, strides: Strides) -> _Plan | None:
    extent = dict(contraction.extents)
    indices = [dict.fromkeys(label for label in index if extent[label] > 1) for index in contraction.indices]
    # A factor is summed over labels that only it has, the output repeats along those that only it has: by copies.
    kept = [tuple(label for label in index if sum(label in other for other in indices) > 1) for index in indices]
    size = np.dtype(plain(dtypes[-1])).itemsize
    layouts = []
    for k, index in enumerate(kept):
        steps = list(zip(contraction.indices[k], strides[k], strict=True))  # a label may occur twice: the diagonal
        stride = {label: sum(step for other, step in steps if other == label) for label in index}
        order = tuple(sorted(index, key=lambda label: -abs(stride[label])))
        forced = len(index) < len(indices[k]) or dtypes[k] != dtypes[-1]
        layouts.append(Layout(stride, order, forced, forced))
    inner, target = [x for x in kept[0] if x not in kept[2]], kept[2]
    if not inner or not all(any(x in target and x not in kept[1 - k] for x in kept[k]) for k in (0, 1)):
        return None  # no product of matrices
    best: tuple[float, _Plan] | None = None
    for way in ways(layouts, extent, plain(dtypes[-1])):
        if way.kernel != "matmul" or not (way.matrix[0] or way.matrix[2]):
            continue
        parts = tuple(_Part(order, _elements(layout.stride, size) if order is None else _dense(order, extent))
                      for order, layout in zip(way.copies, layouts, strict=True))  # fmt: skip
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
    groups = [(label,) for label in loops]

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
    lines = [part.stride[group[-1]] for part in plan.parts for group in plan.matrix if group and group[-1] in part.stride]
    return all(size < LIMIT for size in (*sizes, *lines))


# ---- the run --------------------------------------------------------------------------------------------------------


def _run(plan: _Plan, contraction: Contraction, arrays: Sequence[Any], tf32: bool,
         generate: Callable[..., None]) -> None:  # fmt: skip
    dtype, extent = arrays[-1].dtype, dict(contraction.extents)
    rows, inner, columns = plan.matrix
    used, strides, ops = list(arrays), [dict(part.stride) for part in plan.parts], []
    # The product's transpose is that of the transposes, in the other order.
    turned = _turn(strides[2], rows, columns)
    for k, (down, along) in enumerate(((rows, inner), (inner, columns), (rows, columns))):
        order = plan.parts[k].order
        conj = k < 2 and contraction.conj[k] and arrays[k].dtype.kind == "c"
        op = _turn(strides[k], down, along) ^ turned
        if conj and order is None and op == PLAIN:  # cuBLAS conjugates what it transposes
            order = tuple(sorted(strides[k], key=lambda label: -abs(strides[k][label])))
            strides[k] = _dense(order, extent)
        if order is not None:
            used[k] = cupy().empty([extent[label] for label in order], dtype)
            if k < 2:
                _copy(arrays[k], contraction.indices[k], used[k], order, extent, conj, generate)
        ops.append(CONJUGATE if conj and order is None else op)
    _multiply(used, strides, ops, turned, plan, extent, contraction.scale, tf32)
    if used[2] is not arrays[2]:
        order = plan.parts[2].order or ()
        _copy(used[2], order, arrays[2], contraction.indices[2], extent, False, generate)


def _copy(source: Any, index: Labels, target: Any, order: Labels, extent: Mapping[str, int], conj: bool,
          generate: Callable[..., None]) -> None:  # fmt: skip
    """Permuted, cast, conjugated, summed over labels that only the source has, repeated along those of the target."""
    summed = tuple(label for label in dict.fromkeys(index) if label not in order)
    function = Call("conj", (Arg(0),)) if conj else Arg(0)
    extents = tuple((label, extent[label]) for label in (*order, *summed))
    generate(EinSum(order, (index,), function, "sum" if summed else None, summed, extents), [source], target, {})


def _turn(stride: Mapping[str, int], down: Labels, along: Labels) -> int:
    """How cuBLAS, for which neighbours in memory are a column, sees a matrix of these rows and columns."""
    if not down or not along:
        return PLAIN if along else TURNED
    return PLAIN if stride[down[-1]] == 1 else TURNED


def _multiply(arrays: Sequence[Any], strides: Sequence[Mapping[str, int]], ops: Sequence[int], turned: int,
              plan: _Plan, extent: Mapping[str, int], scale: Number, tf32: bool) -> None:  # fmt: skip
    """One call for a batch of products, for each position of the other loops."""
    rows, inner, columns = plan.matrix
    sides = ((rows, inner), (inner, columns), (rows, columns))
    m, k, n = (size_of(group, extent) for group in plan.matrix)
    lines = [_line(stride, *side, extent) for stride, side in zip(strides, sides, strict=True)]
    first, second = (1, 0) if turned else (0, 1)
    m, n = (n, m) if turned else (m, n)
    dtype = arrays[2].dtype
    kind, sums = TYPES[dtype.name]
    sums = TF32 if tf32 and dtype.name in ("float32", "complex64") else sums
    numbers = np.array([scale, 0], np.float32 if dtype.itemsize == 2 else dtype)
    alpha, beta = numbers.ctypes.data, numbers.ctypes.data + numbers.itemsize
    batch = plan.loops[0] if plan.loops else ()
    count = size_of(batch, extent)
    apart = [stride.get(batch[-1], 0) if batch else 0 for stride in strides]
    blas, handle = cupy().cuda.cublas, cupy().cuda.device.get_cublas_handle()
    mode = blas.getMathMode(handle)
    blas.setMathMode(handle, NO_SHORT_SUMS)
    try:
        for places in _places(plan.loops[1:], strides, extent):
            a, b, c = (array.data.ptr + place * dtype.itemsize for array, place in zip(arrays, places, strict=True))
            pair = [(a, lines[0], apart[0]), (b, lines[1], apart[1])]
            (x, ldx, dx), (y, ldy, dy) = pair[first], pair[second]
            if count == 1:
                blas.gemmEx(handle, ops[first], ops[second], m, n, k, alpha, x, kind, ldx, y, kind, ldy, beta, c, kind,
                            lines[2], sums, -1)  # fmt: skip
            else:
                blas.gemmStridedBatchedEx(handle, ops[first], ops[second], m, n, k, alpha, x, kind, ldx, dx, y, kind, ldy,
                                          dy, beta, c, kind, lines[2], apart[2], count, sums, -1)  # fmt: skip
    finally:
        blas.setMathMode(handle, mode)


def _line(stride: Mapping[str, int], down: Labels, along: Labels, extent: Mapping[str, int]) -> int:
    """How far apart the lines of a matrix are in memory."""
    fast, slow = (down, along) if _turn(stride, down, along) == PLAIN else (along, down)
    return max(stride[slow[-1]] if slow else 1, size_of(fast, extent))


def _places(loops: Sequence[Labels], strides: Sequence[Mapping[str, int]], extent: Mapping[str, int]
            ) -> Iterator[tuple[int, ...]]:  # fmt: skip
    for position in itertools.product(*(range(size_of(group, extent)) for group in loops)):
        pairs = list(zip(position, loops, strict=True))
        yield tuple(sum(n * stride.get(group[-1], 0) for n, group in pairs) for stride in strides)
