"""One EinSum as one compiled nest of loops, for any ⊕ over any ⊗: computed in vectors, on several
threads, without temporaries.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import DTYPES, Type
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, IndexEntries, Scalar
from einmpi.kernels.cpu.loop_source import kernel_source
from einmpi.kernels.cpu.scalar_source import is_supported
from einmpi.kernels.loop_choice import MIN_PACKED_LANES, PACKED_BYTES, bind_nest
from einmpi.kernels.loop_nest import BoundNest, Counter, IndexedArray, Nest, Range, counted
from einmpi.kernels.operands import (
    Array,
    apply_constant_indices,
    check_index_range,
    expressions_of,
    number_operands,
)
from einmpi.kernels.prepared import address_of
from einmpi.process.first_use import COMPILING, first_use

CHUNK_VALUES = 2**18  # values in a chunk of a long aggregation
MAX_CHUNKS = 32
MAX_CHUNKED_RESULTS = 2048  # with more results there is enough for threads to share
MIN_THREADED_VALUES = 2**15  # fewer values are not worth a second thread
MIN_SHARED_LANES = 64  # lanes of a thread: a few cache lines, so that threads do not collide
MAX_SHARED_LANES = 128  # to which such a number is rounded in an aggregation

CompiledKernel: TypeAlias = Callable[[int], None]  # called with the address of its parameters
Parameters: TypeAlias = npt.NDArray[np.int64]


@dataclass
class Statistics:
    """The kernels that this process compiled or loaded from disk."""

    compiled: int = 0
    loaded: int = 0


class OperandView(NamedTuple):
    """An array that a kernel reads, and what indexes its dimensions."""

    array: Array | Counter
    entries: IndexEntries


STATISTICS = Statistics()
KERNELS: dict[Hashable, CompiledKernel] = {}  # by their nests, or what else their source follows
_LOCK = threading.Lock()


def supports_compiled_loops(einsum: EinSum, dtypes: Sequence[npt.DTypeLike]) -> bool:
    """Return whether an EinSum can be compiled for operands of these dtypes."""
    return _is_compilable(einsum, tuple(np.dtype(dtype).name for dtype in dtypes))


@lru_cache(maxsize=1024)
def _is_compilable(einsum: EinSum, dtypes: tuple[str, ...]) -> bool:
    def dtype_of(leaf: Scalar) -> Type:
        return np.dtype(dtypes[leaf.position] if isinstance(leaf, Arg) else np.int64)

    if any(DTYPES[dtype].is_half for dtype in dtypes):
        return False
    return all(is_supported(expression, dtype_of) for expression in expressions_of(einsum))


def compute_by_compiled_loops(
    einsum: EinSum,
    operands: Sequence[Array],
    out: Array,
    index: Mapping[str, Array] | None = None,
    threads: int = 1,
) -> None:
    """Compute an EinSum into `out`, compiling its loops if that has not been done before.

    A long aggregation to few results is cut into chunks, whose results are aggregated at the end.

    Parameters
    ----------
    einsum
        What to compute; its extents are those of the arrays.
    operands, out
        The arrays. Operands are never written to.
    index
        The global indices of a label's positions, for labels that do not start at 0.
    threads
        How many threads to use; the result does not depend on it.

    Raises
    ------
    IndexError
        If an index of a gather is out of range.
    ValueError
        If an aggregation of no values has no result.
    """
    if 0 in einsum.bound:
        return
    rule = AGGREGATIONS[einsum.aggregation] if einsum.aggregation else None
    if rule is not None and einsum.calls() == 0:
        if rule.empty is None:
            raise ValueError(f"{einsum.aggregation} of nothing has no value")
        out[...] = rule.empty
        return
    chunks = chunk_count(einsum)
    in_place = chunks == 1 and is_addressable(out)
    if in_place:
        results = out[None]
    else:
        results = np.empty((chunks, *out.shape), DTYPES[out.dtype.name].accumulator)
    values = {label: counted(indices) for label, indices in (index or {}).items()}
    bound, views = bind_to_arrays(einsum, operands, results[0, ...], values)
    arrays = [view.array for view in views]
    used_threads = threads if einsum.calls() >= MIN_THREADED_VALUES else 1
    used_chunks = _run_loops(bound, arrays, results, used_threads)
    if in_place:
        return
    with np.errstate(all="ignore"):
        if rule is None:
            out[...] = results[0]
        else:
            out[...] = rule.combine.reduce(results[:used_chunks], axis=0)


def bind_to_arrays(
    einsum: EinSum, operands: Sequence[Array], out: Array, index: Mapping[str, Array | Counter]
) -> tuple[BoundNest, list[OperandView]]:
    """Return the loops for some arrays, and the arrays that they read.

    These are the operands, copied if typed pointers cannot reach their elements, and the values
    of labels that are used as numbers.

    Parameters
    ----------
    einsum
        What the loops compute.
    operands, out
        The arrays, whose strides become part of the result.
    index
        The global indices of a label's positions, for labels that do not start at 0.
    """
    views = operand_views(einsum, operands, index)
    reads = tuple(indexed_array(*view) for view in views)
    target = indexed_array(out, einsum.output)
    function = number_operands(einsum).function
    return bind_nest(function, reads, target, einsum.aggregation, einsum.extents), views


def operand_views(
    einsum: EinSum, operands: Sequence[Array], index: Mapping[str, Array | Counter]
) -> list[OperandView]:
    """Return what loops read: the operands, then the values of labels."""
    _, indices, labels = number_operands(einsum)
    views = []
    for array, entries in zip(operands, indices, strict=False):
        array, entries = apply_constant_indices(array, entries)
        if not is_addressable(array):
            array = array.astype(array.dtype.newbyteorder("="))
        views.append(OperandView(array, entries))
    for label in labels:
        values = index.get(label, Counter(0, einsum.extent[label]))
        views.append(OperandView(values, (label,)))
    return views


def indexed_array(array: Array | Counter, entries: IndexEntries) -> IndexedArray:
    """Return what loops need to know of an array."""
    is_counter = isinstance(array, Counter)
    return IndexedArray(array.dtype.name, array.shape, array.strides, entries, is_counter)


def is_addressable(array: Array) -> bool:
    """Return whether typed pointers reach all elements of an array."""
    if not array.flags.aligned or not array.dtype.isnative:
        return False
    return not any(stride % array.itemsize for stride in array.strides)


def chunk_count(einsum: EinSum) -> int:
    """Return into how many chunks a long aggregation is cut, so that threads can share it.

    Only the extents decide: the result must not depend on the number of threads.
    """
    if not einsum.aggregated or prod(einsum.bound) > MAX_CHUNKED_RESULTS:
        return 1
    return min(MAX_CHUNKS, max(1, einsum.calls() // CHUNK_VALUES))


def kernel_of(nest: Nest) -> CompiledKernel:
    """Return the compiled kernel of a nest; it is compiled, or loaded from disk, only once."""
    return built_kernel(nest, lambda: kernel_source(nest))


def built_kernel(key: Hashable, write_source: Callable[[], str]) -> CompiledKernel:
    """Return the compiled kernel of a source, which follows from a key."""
    known = KERNELS.get(key)
    if known is not None:
        return known
    # Ranks may be threads of one process; waiting for another one to compile counts as well.
    with first_use(COMPILING), _LOCK:
        if key not in KERNELS:
            # Not before a kernel is needed, as this module imports numba.
            from einmpi.kernels.cpu.cache import build_kernel

            KERNELS[key], was_on_disk = build_kernel(write_source())
            if was_on_disk:
                STATISTICS.loaded += 1
            else:
                STATISTICS.compiled += 1
        return KERNELS[key]


@cache
def pool(threads: int) -> ThreadPoolExecutor:
    """Return the pool of kernel threads, the same one for every kernel."""
    return ThreadPoolExecutor(threads, "einmpi-kernel")


def _run_loops(
    bound: BoundNest, arrays: Sequence[Array | Counter], results: Array, threads: int
) -> int:
    """Fill the results, one for each chunk, and return how many of them were used.

    Every call of the kernel gets parameters of its own: the box, the share of one loop, and the
    address of the result. Threads take turns at the calls of one box before the next box starts.
    """
    for dimensions in bound.gathered:
        if any(dimension.extent == 0 for dimension in dimensions):
            raise IndexError("an index is out of range; this dimension has extent 0")
    kernel = kernel_of(bound.nest)
    address = bound.position["A", len(arrays), 0]
    used = 1
    finished: list[Parameters] = []
    for box in _boxes(bound):
        parameters, _copies = _parameters_of(bound, arrays, results, box)
        jobs = []
        for number, (loop, share) in enumerate(shares_of(bound, box, len(results), threads)):
            job = parameters.copy()
            job[2 * loop : 2 * loop + 2] = share
            if len(results) > 1:
                job[address] += number * results.strides[0]
            jobs.append(job)
        used = len(jobs)
        if min(threads, used) > 1:
            list(pool(threads).map(kernel, map(address_of, jobs)))
        else:
            for job in jobs:
                kernel(address_of(job))
        finished += jobs
    check_gathers(bound, finished)
    return used


def check_gathers(bound: BoundNest, finished: Sequence[Parameters]) -> None:
    """Raise IndexError if a kernel met an index that is out of range."""
    for (letter, array, gather), position in bound.position.items():
        if letter == "L":  # the greatest index follows the least one
            low = min(parameters[position] for parameters in finished)
            high = max(parameters[position + 1] for parameters in finished)
            check_index_range(low, high, bound.gathered[array][gather].extent)


def _boxes(bound: BoundNest) -> Iterator[tuple[Range, ...]]:
    """Yield parts of the loops so small that the operands packed for a part stay small too."""
    nest = bound.nest
    steps = [axis.extent for axis in bound.axes]
    packed = [nest.reads[operand] for operand in bound.packed]

    def packed_bytes() -> int:
        total = 0
        for read in packed:
            total += np.dtype(read.dtype).itemsize * prod(steps[loop] for loop in read.loops)
        return total

    if packed:
        for loop in range(nest.output_loops):  # from the outermost to the lanes
            least = MIN_PACKED_LANES if loop == nest.lane else 1
            if not any(loop in read.loops for read in packed):
                continue
            while packed_bytes() > PACKED_BYTES and steps[loop] > least:
                steps[loop] = -(-steps[loop] // 2)
    cuts = []
    for axis, step in zip(bound.axes, steps, strict=True):
        starts = range(0, axis.extent, step)
        cuts.append([(start, min(start + step, axis.extent)) for start in starts])
    return itertools.product(*cuts)


def _parameters_of(
    bound: BoundNest, arrays: Sequence[Array | Counter], results: Array, box: Sequence[Range]
) -> tuple[Parameters, list[Array]]:
    """Return the parameters for a box of the loops, and the copies of packed operands.

    A copy has only the elements of the box, so its address is moved back to where the element at
    the origin of all loops would be. The copies must live as long as their addresses are in use.
    """
    parameters = bound.values.copy()
    for position, array in enumerate((*arrays, results)):
        parameters[bound.position["A", position, 0]] = address_of(array)
    copies = []
    lane = bound.nest.lane
    for operand in bound.packed:
        array = arrays[operand]
        assert not isinstance(array, Counter), "a Counter is contiguous"
        loops = sorted(bound.nest.reads[operand].loops, key=lambda loop: loop == lane)
        axes = [bound.axes[loop] for loop in loops]
        whole = as_strided(
            array,
            shape=[axis.extent for axis in axes],
            strides=[axis.strides[operand] for axis in axes],
            writeable=False,
        )
        copy = np.ascontiguousarray(whole[tuple(slice(*box[loop]) for loop in loops)])
        copies.append(copy)
        address = address_of(copy)
        for loop, stride in zip(loops, copy.strides, strict=True):
            parameters[bound.position["S", operand, loop]] = stride
            address -= box[loop][0] * stride  # a loop counts from the start of the whole nest
        parameters[bound.position["A", operand, 0]] = address
    parameters[: 2 * len(box)] = list(itertools.chain(*box))
    return parameters, copies


def shares_of(
    bound: BoundNest, box: tuple[Range, ...], chunks: int, threads: int
) -> Iterator[tuple[int, Range]]:
    """Yield what each call of the kernel computes: a loop, and the part of it.

    Chunks cut an aggregated loop. Threads cut a loop of the output, which changes no bit of the
    result; the lanes are cut only at multiples of a grain.
    """
    nest = bound.nest
    sizes = [stop - start for start, stop in box]
    grains = [1] * nest.loops
    pieces = chunks
    if chunks > 1:
        loop = max(range(nest.output_loops, nest.loops), key=lambda k: sizes[k])
    elif threads == 1 or nest.output_loops == 0:
        loop = 0
    else:
        is_map = nest.aggregation is None
        grains[nest.lane] = MIN_SHARED_LANES if is_map else min(nest.width, MAX_SHARED_LANES)
        loop = max(range(nest.output_loops), key=lambda k: sizes[k] // grains[k])
        pieces = threads
    start, stop = box[loop]
    grain = grains[loop]
    pieces = min(pieces, max(1, sizes[loop] // grain))
    cuts = [start + sizes[loop] * k // (pieces * grain) * grain for k in range(pieces)]
    for share in itertools.pairwise([*cuts, stop]):
        yield loop, share
