"""One EinSum as one compiled nest of loops, for any ⊕ over any ⊗: in vectors, on several threads, no temporaries."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import DTYPES, Type
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Scalar
from einmpi.kernels.cpu.loop_source import source
from einmpi.kernels.cpu.scalar_source import is_supported
from einmpi.kernels.loop_nest import PACKED_BYTES, BoundNest, IndexedArray, Nest, Range, bind_nest
from einmpi.kernels.operands import (
    apply_constant_indices,
    check_index_range,
    expressions_of,
    number_operands,
)

CHUNK_VALUES, MAX_CHUNKS = (
    2**18,
    32,
)  # values in a part of a long aggregation, and how many such parts at most
MAX_CHUNKED_RESULTS = 2048  # results: with fewer of them a long aggregation goes in parts
MIN_THREADED_VALUES = 2**15  # values that are not worth a second thread


@dataclass
class Statistics:
    """Kernels that this process compiled and loaded from disk, and the seconds that took."""

    compiled: int = 0
    loaded: int = 0
    compile_seconds: float = 0.0


View: TypeAlias = tuple[
    np.ndarray, tuple[str | Scalar, ...]
]  # an array and what indexes its dimensions

STATISTICS = Statistics()
KERNELS: dict[Nest, Callable[[int], None]] = {}
_LOCK = threading.Lock()


def supports_compiled_loops(einsum: EinSum, dtypes: Sequence[Any]) -> bool:
    """Whether `compute_by_compiled_loops` takes this EinSum with operands of these dtypes."""
    return _supports(einsum, tuple(np.dtype(dtype).name for dtype in dtypes))


@lru_cache(maxsize=1024)
def _supports(einsum: EinSum, dtypes: tuple[str, ...]) -> bool:
    def leaf(node: Scalar) -> Type:
        return np.dtype(dtypes[node.position] if isinstance(node, Arg) else np.int64)

    return "float16" not in dtypes and all(
        is_supported(node, leaf) for node in expressions_of(einsum)
    )


def compute_by_compiled_loops(
    einsum: EinSum,
    operands: Sequence[np.ndarray],
    out: np.ndarray,
    index: Mapping[str, np.ndarray] | None = None,
    threads: int = 1,
) -> None:
    """Fill `out`. Extents are those of the arrays; `index` has the indices that a label's positions stand for."""
    extent = einsum.extent
    if 0 in einsum.bound:
        return
    rule = AGGREGATIONS[einsum.aggregation] if einsum.aggregation else None
    if rule and any(extent[label] == 0 for label in einsum.aggregated):
        if rule.empty is None:
            raise ValueError(f"{einsum.aggregation} of nothing has no value")
        out[...] = rule.empty
        return
    chunks = _chunks(einsum)
    plain = chunks == 1 and _is_plain(out)
    parts = (
        out[None] if plain else np.empty((chunks, *out.shape), DTYPES[out.dtype.name].accumulator)
    )
    plan, views = prepare(einsum, operands, parts[0, ...], index or {})
    used = _run(
        plan,
        [array for array, _ in views],
        parts,
        threads if einsum.calls() >= MIN_THREADED_VALUES else 1,
    )
    if not plain:
        with np.errstate(all="ignore"):
            out[...] = rule.combine.reduce(parts[:used], axis=0) if rule else parts[0]


def prepare(
    einsum: EinSum, operands: Sequence[np.ndarray], out: np.ndarray, index: Mapping[str, np.ndarray]
) -> tuple[BoundNest, list[View]]:
    """The loops for these arrays, and every array that a kernel reads with what indexes it."""
    function, indices, labels = number_operands(einsum)
    given = [
        np.asarray(index[x], np.int64) if x in index else np.arange(einsum.extent[x])
        for x in labels
    ]
    views = [
        _usable(array, entries) for array, entries in zip((*operands, *given), indices, strict=True)
    ]
    layouts = tuple(
        IndexedArray(array.dtype.name, array.shape, array.strides, entries)
        for array, entries in views
    )
    target = IndexedArray(out.dtype.name, out.shape, out.strides, einsum.output)
    return bind_nest(function, layouts, target, einsum.aggregation, einsum.extents), views


def _chunks(einsum: EinSum) -> int:
    """Into how many parts a long aggregation goes, so that threads can share it. Only the extents decide: the
    result does not depend on the number of threads."""
    if not einsum.aggregated or prod(einsum.bound) > MAX_CHUNKED_RESULTS:
        return 1
    return min(MAX_CHUNKS, max(1, einsum.calls() // CHUNK_VALUES))


# ---- what is computed -----------------------------------------------------------------------------------------------


def _is_plain(array: np.ndarray) -> bool:
    """Whether its elements can be reached by typed pointers."""
    return (
        array.flags.aligned
        and array.dtype.isnative
        and not any(s % array.itemsize for s in array.strides)
    )


def _usable(array: np.ndarray, entries: tuple[str | Scalar, ...]) -> View:
    array, entries = apply_constant_indices(array, entries)
    return (array if _is_plain(array) else array.astype(array.dtype.newbyteorder("="))), entries


# ---- the run --------------------------------------------------------------------------------------------------------


def kernel_of(nest: Nest) -> Callable[[int], None]:
    with _LOCK:  # ranks may be threads of one process
        if nest not in KERNELS:
            from einmpi.kernels.cpu.cache import (
                build,
            )  # imports numba, so not before a kernel is needed

            start = time.perf_counter()
            KERNELS[nest], found = build(source(nest))
            STATISTICS.compile_seconds += time.perf_counter() - start
            STATISTICS.loaded += found
            STATISTICS.compiled += not found
        return KERNELS[nest]


@cache
def pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "einmpi-kernel")


def _run(plan: BoundNest, arrays: Sequence[np.ndarray], parts: np.ndarray, threads: int) -> int:
    """Fill the parts, and say how many were used."""
    if any(extent == 0 for jumps in plan.jumps for _, extent in jumps):
        raise IndexError("an index is out of range; expected 0 to -1")
    kernel, told, used = kernel_of(plan.nest), [], 1
    for box in _boxes(plan):
        values, _kept = _located(plan, arrays, parts, box)
        jobs = []
        for number, (loop, share) in enumerate(_shares(plan, box, len(parts), threads)):
            job = values.copy()
            job[2 * loop : 2 * loop + 2] = share
            job[plan.position["A", len(arrays), 0]] += (
                number * parts.strides[0] if len(parts) > 1 else 0
            )
            jobs.append(job)
        used = len(jobs)
        if min(threads, used) > 1:
            list(pool(threads).map(kernel, map(address_of, jobs)))
        else:
            for job in jobs:
                kernel(address_of(job))
        told += jobs
    check_gathers(plan, told)
    return used


def check_gathers(plan: BoundNest, told: Sequence[np.ndarray]) -> None:
    """IndexError if a kernel met an index that is out of range."""
    for (letter, array, k), place in plan.position.items():
        if letter == "L":  # the greatest index stands behind the least
            low, high = min(job[place] for job in told), max(job[place + 1] for job in told)
            check_index_range(low, high, plan.jumps[array][k][1])


def _boxes(plan: BoundNest) -> Iterator[tuple[Range, ...]]:
    """Parts of the loops, so small that what is packed for each of them stays small too."""
    nest, steps = plan.nest, [axis.extent for axis in plan.axes]

    def size() -> int:
        reads = [nest.reads[m] for m in plan.packed]
        return sum(
            np.dtype(read.dtype).itemsize * prod(steps[k] for k in read.loops) for read in reads
        )

    for loop in range(nest.outputs) if plan.packed else ():  # from the outermost to the lanes
        if any(loop in nest.reads[m].loops for m in plan.packed):
            while size() > PACKED_BYTES and steps[loop] > (512 if loop == nest.lane else 1):
                steps[loop] = -(-steps[loop] // 2)
    cuts = [
        [(k, min(k + step, axis.extent)) for k in range(0, axis.extent, step)]
        for axis, step in zip(plan.axes, steps, strict=True)
    ]
    return itertools.product(*cuts)


def _located(
    plan: BoundNest, arrays: Sequence[np.ndarray], parts: np.ndarray, box: Sequence[Range]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The parameters of a box; the packed copies, which must live as long as their addresses are used."""
    values, copies = plan.values.copy(), []
    for m, array in enumerate((*arrays, parts)):
        values[plan.position["A", m, 0]] = address_of(array)
    for m in plan.packed:
        loops = sorted(plan.nest.reads[m].loops, key=lambda k: k == plan.nest.lane)
        axes = [plan.axes[k] for k in loops]
        whole = as_strided(
            arrays[m], [a.extent for a in axes], [a.strides[m] for a in axes], writeable=False
        )
        copy = np.ascontiguousarray(whole[tuple(slice(*box[k]) for k in loops)])
        copies.append(copy)
        start = address_of(copy)
        for k, stride in zip(loops, copy.strides, strict=True):
            values[plan.position["S", m, k]] = stride
            start -= box[k][0] * stride  # a loop counts from the box's start
        values[plan.position["A", m, 0]] = start
    values[: 2 * len(box)] = list(itertools.chain(*box))
    return values, copies


def _shares(
    plan: BoundNest, box: tuple[Range, ...], chunks: int, threads: int
) -> Iterator[tuple[int, Range]]:
    """What each call of the kernel does: a loop, and its part of it.

    Chunks cut an aggregated loop; threads cut one of the output, which changes no bit of the result.
    """
    nest, grain, pieces = plan.nest, 1, chunks
    sizes = [stop - start for start, stop in box]
    if chunks > 1:
        loop = max(range(nest.outputs, nest.loops), key=lambda k: sizes[k])
    elif threads == 1 or nest.outputs == 0:
        loop = 0
    else:
        grains = {nest.lane: 64 if nest.aggregation is None else min(nest.width, 128)}
        loop = max(range(nest.outputs), key=lambda k: sizes[k] // grains.get(k, 1))
        grain, pieces = grains.get(loop, 1), threads
    start, stop = box[loop]
    pieces = min(pieces, max(1, sizes[loop] // grain))
    cuts = [*(start + sizes[loop] * k // (pieces * grain) * grain for k in range(pieces)), stop]
    yield from ((loop, share) for share in itertools.pairwise(cuts))


def address_of(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
