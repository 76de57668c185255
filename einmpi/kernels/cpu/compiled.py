"""One EinSum as one compiled nest of loops, for any ⊕ over any ⊗: computed in vectors, on several
threads, without temporaries.
"""

from __future__ import annotations

import itertools
import threading
from array import array as Numbers
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property, partial
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from einmpi.caches import bounded_cache
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import IndexEntries
from einmpi.kernels.cpu.loop_source import kernel_source
from einmpi.kernels.cpu.scalar_source import is_supported
from einmpi.kernels.cpu.small_integers.label_blocks import InBlocks, in_blocks
from einmpi.kernels.cpu.small_integers.row_products import bind_row_products, row_products_source
from einmpi.kernels.loop_nest import (
    MIN_PACKED_LANES,
    PACKED_BYTES,
    BoundNest,
    Counter,
    IndexedArray,
    Nest,
    Range,
    bind_nest,
    counted,
    summed_lane,
)
from einmpi.kernels.operands import (
    Array,
    apply_constant_indices,
    check_index_range,
    expressions_of,
    number_operands,
)
from einmpi.kernels.prepared import NumpyCall, PreparedCall, address_of, bound_call
from einmpi.process.startup import COMPILING, first_use

CHUNK_VALUES = 2**18  # values in a chunk of a long aggregation
MAX_CHUNKS = 32
MAX_CHUNKED_RESULTS = 2048  # with more results there is enough for threads to share
MIN_THREADED_VALUES = 2**15  # fewer values are not worth a second thread
MIN_SHARED_LANES = 64  # lanes of a thread: a few cache lines, so that threads do not collide
MAX_SHARED_LANES = 128  # to which such a number is rounded in an aggregation

CompiledKernel: TypeAlias = Callable[..., None]  # most are called with the address of parameters
Jobs: TypeAlias = npt.NDArray[np.int64]  # a row of parameters for each call of a kernel


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


@bounded_cache(1024)
def _is_compilable(einsum: EinSum, dtypes: tuple[str, ...]) -> bool:
    if any(DTYPES[dtype].is_half for dtype in dtypes):
        return False
    return all(is_supported(expression, dtypes) for expression in expressions_of(einsum))


def compute_by_compiled_loops(
    einsum: EinSum,
    operands: Sequence[Array],
    out: Array,
    index: Mapping[str, Array] | None = None,
    threads: int = 1,
) -> None:
    """Compute an EinSum into `out`, compiling its loops if that has not been done before."""
    prepare_by_compiled_loops(einsum, operands, out, index or {}, threads)(operands, out)


def prepare_by_compiled_loops(
    einsum: EinSum,
    operands: Sequence[Array],
    out: Array,
    index: Mapping[str, Array],
    threads: int,
    strict: bool = False,
) -> PreparedCall:
    """Return an EinSum as compiled loops on arrays that are stored as these are.

    A long aggregation to few results is cut into chunks, whose results are aggregated at the end.
    What needs neither that nor copies of arrays is prepared: a call sets addresses and runs.

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
    strict
        Give inf and nan where the program as written does.

    The call raises IndexError if an index of a gather is out of range, and ValueError if an
    aggregation of no values has no result.
    """
    if einsum.calls() == 0:
        return lambda _operands, out: _compute_nothing(einsum, out)
    starts = tuple((label, int(values[0])) for label, values in index.items() if len(values))
    has_free_order = not einsum.sums_blocks
    split = in_blocks(einsum, starts) if has_free_order and _are_ranges(index) else None
    if split is not None:
        return _prepare_in_blocks(split, operands, out, index, threads, strict)
    chunks = chunk_count(einsum)
    in_place = chunks == 1 and is_addressable(out)

    def results_for(out: Array) -> Array:
        if in_place:
            return out[None]
        return np.empty((chunks, *out.shape), DTYPES[out.dtype.name].accumulator)

    bound, views = bind_to_arrays(einsum, operands, results_for(out)[0, ...], index, strict)
    used_threads = threads if einsum.calls() >= MIN_THREADED_VALUES else 1
    are_views = all(map(is_addressable, operands)) and not bound.packed
    if in_place and are_views and not _has_empty_gather(bound):
        return _prepare_in_place(bound, views, operands, out, used_threads)

    def compute(operands: Sequence[Array], out: Array) -> None:
        results = results_for(out)
        arrays = [view.array for view in operand_views(einsum, operands, index)]
        used_chunks = _run_loops(bound, arrays, results, used_threads)
        if in_place:
            return
        with np.errstate(all="ignore"):
            if einsum.aggregation is None:
                out[...] = results[0]
            else:
                rule = AGGREGATIONS[einsum.aggregation]
                out[...] = rule.combine.reduce(results[:used_chunks], axis=0)

    return compute


def _are_ranges(index: Mapping[str, Array]) -> bool:
    """Return whether the indices of all labels follow one another."""
    return all(isinstance(counted(values), Counter) for values in index.values())


def _prepare_in_blocks(
    split: InBlocks,
    operands: Sequence[Array],
    out: Array,
    index: Mapping[str, Array],
    threads: int,
    strict: bool,
) -> PreparedCall:
    """Prepare an EinSum over parts of labels, on views of the arrays."""
    compute = prepare_by_compiled_loops(
        split.einsum, split.views(operands), out.reshape(split.shape), index, threads, strict
    )

    def bind(operands: Sequence[Array], out: Array) -> Callable[[], object]:
        views, target = split.views(operands), out.reshape(split.shape)
        call = bound_call(compute, views, target)
        return lambda: call(views, target)

    def call(operands: Sequence[Array], out: Array) -> None:
        compute(split.views(operands), out.reshape(split.shape))

    return NumpyCall(call, bind)


def _compute_nothing(einsum: EinSum, out: Array) -> None:
    """Fill the results of an EinSum that has no values to aggregate, if there are any results."""
    if 0 in einsum.bound:
        return
    empty = AGGREGATIONS[einsum.required_aggregation].empty
    if empty is None:
        raise ValueError(f"{einsum.aggregation} of nothing has no value")
    out[...] = empty


def _prepare_in_place(
    bound: BoundNest,
    views: Sequence[OperandView],
    operands: Sequence[Array],
    out: Array,
    threads: int,
) -> PreparedCall:
    """Prepare loops that read and write the arrays themselves."""
    template = JobTemplate(bound, *shares_of(bound, bound.box, 1, threads))
    template.place_views(views, operands)
    template.place(-1, out, out)
    is_gather = any(bound.gathered)

    def run_kernel(operands: Sequence[Array], out: Array) -> None:
        template.run((*operands, out), threads)

    def bind(operands: Sequence[Array], out: Array) -> Callable[[], object]:
        if is_gather or len(template.jobs) > 1:
            return partial(run_kernel, operands, out)
        return _BoundKernel(template.kernel, template.jobs_for((*operands, out)))

    return NumpyCall(run_kernel, bind)


class _BoundKernel:
    """A kernel with its parameters, for one thread and arrays that stay the same."""

    def __init__(self, kernel: CompiledKernel, jobs: Jobs) -> None:
        self.kernel = kernel
        self.jobs = jobs
        self.address = address_of(jobs)

    def __call__(self) -> None:
        self.kernel(self.address)


def bind_to_arrays(
    einsum: EinSum,
    operands: Sequence[Array],
    out: Array,
    index: Mapping[str, Array | Counter],
    strict: bool | None = None,
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
    strict
        Whether sums over few rows are as written; None for loops of which parts are computed.
    """
    views = operand_views(einsum, operands, index)
    reads = tuple(indexed_array(*view) for view in views)
    target = indexed_array(out, einsum.output)
    function = number_operands(einsum).function
    arguments = function, reads, target, einsum.aggregation, einsum.extents
    if einsum.sums_blocks:
        return bind_nest(*arguments, summed_lane(einsum)), views
    bound = None if strict is None else bind_row_products(*arguments, strict)
    return bound or bind_nest(*arguments), views


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
        views.append(OperandView(counted(values), (label,)))
    return views


def indexed_array(array: Array | Counter, entries: IndexEntries) -> IndexedArray:
    """Return what loops need to know of an array."""
    first = array.start if isinstance(array, Counter) else None
    return IndexedArray(array.dtype.name, array.shape, array.strides, entries, first)


def is_addressable(array: Array) -> bool:
    """Return whether typed pointers reach all elements of an array."""
    if not array.flags.aligned or not array.dtype.isnative:
        return False
    return not any(stride % array.itemsize for stride in array.strides)


def chunk_count(einsum: EinSum) -> int:
    """Return into how many chunks a long aggregation is cut, so that threads can share it.

    Only the extents decide: the result must not depend on the number of threads.
    """
    if not einsum.aggregated or prod(einsum.bound) > MAX_CHUNKED_RESULTS or einsum.sums_blocks:
        return 1
    return min(MAX_CHUNKS, max(1, einsum.calls() // CHUNK_VALUES))


def kernel_of(nest: Nest) -> CompiledKernel:
    """Return the compiled kernel of a nest; it is compiled, or loaded from disk, only once."""
    write = row_products_source if nest.tiles else kernel_source
    return built_kernel(nest, lambda: write(nest))


def built_kernel(
    key: Hashable, write_source: Callable[[], str], dtypes: tuple[str, ...] | None = None
) -> CompiledKernel:
    """Return the compiled kernel of a source, which follows from a key.

    It takes the address of its parameters, or if there are `dtypes` arrays of these.
    """
    known = KERNELS.get(key)
    if known is not None:
        return known
    # Ranks may be threads of one process; waiting for another one to compile counts as well.
    with first_use(COMPILING), _LOCK:
        if key not in KERNELS:
            # Not before a kernel is needed, as this module imports numba.
            from einmpi.kernels.cpu.cache import build_kernel

            KERNELS[key], was_on_disk = build_kernel(write_source(), dtypes)
            if was_on_disk:
                STATISTICS.loaded += 1
            else:
                STATISTICS.compiled += 1
        return KERNELS[key]


@cache
def pool(threads: int) -> ThreadPoolExecutor:
    """Return the pool of kernel threads, the same one for every kernel."""
    return ThreadPoolExecutor(threads, "einmpi-kernel")


# ---- jobs ---------------------------------------------------------------------------------------


def run_jobs(kernel: CompiledKernel, jobs: Jobs, threads: int) -> None:
    """Call a kernel with each of some parameters, on so many threads."""
    first = address_of(jobs)
    addresses = range(first, first + len(jobs) * jobs.strides[0], jobs.strides[0])
    if min(threads, len(jobs)) > 1:
        list(pool(threads).map(kernel, addresses))
    else:
        for address in addresses:
            kernel(address)


def even_ranges(start: int, stop: int, pieces: int, grain: int = 1) -> list[Range]:
    """Return a range in pieces of about the same length, cut at multiples of a grain."""
    size = stop - start
    cuts = [start + size * k // (pieces * grain) * grain for k in range(pieces)]
    return list(itertools.pairwise([*cuts, stop]))


class JobTemplate:
    """Parameters of the calls of a kernel, one for each range of a loop or each block.

    The addresses of some arrays are left open: those of arrays that are given for each run.
    """

    def __init__(
        self, bound: BoundNest, position: int, ranges: Sequence[Range], box: Sequence[Range] = ()
    ) -> None:
        """Make parameters for calls in a box that differ in the range at this position."""
        self.bound = bound
        self.jobs = np.tile(bound.values, (len(ranges), 1))
        self.jobs[:, : 2 * len(box)] = list(itertools.chain(*box))
        self.jobs[:, position : position + 2] = ranges
        self.open: list[tuple[int, Any]] = []  # the place of an address, and what is added to it
        self.kept: list[Any] = []  # arrays whose addresses are among the parameters

    @cached_property
    def kernel(self) -> CompiledKernel:
        """The kernel, which is compiled when it is needed."""
        return kernel_of(self.bound.nest)

    @cached_property
    def is_checked(self) -> bool:
        """Whether calls note indices that may be out of range."""
        return any(read.gathers and read.is_checked for read in self.bound.nest.reads)

    def place(self, number: int, view: Array | Counter, given: Array | None, more: Any = 0) -> None:
        """Place an array: `view`, of `given` or of no given array, and `more` bytes further on.

        `more` may be an array with a number for each call.
        """
        address = self.bound.addresses[number]
        if given is None:
            self.jobs[:, address] = address_of(view) + more
            self.kept.append(view)
        else:
            self.open.append((address, address_of(view) - address_of(given) + more))

    def place_views(self, views: Sequence[OperandView], operands: Sequence[Array | None]) -> None:
        """Place what loops read: views of operands, which are given, and the values of labels."""
        for number, (view, given) in enumerate(itertools.zip_longest(views, operands)):
            self.place(number, view.array, given)

    def pack(self, operand: int, array: Array | Counter, box: Sequence[Range]) -> None:
        """Place a copy of an operand's part in a box of the loops, dense along the lanes.

        Loops count from the start of the whole nest, so the address is moved back to where the
        element at the origin of all loops would be.
        """
        assert not isinstance(array, Counter), "a Counter is contiguous"
        lane = self.bound.nest.lane
        loops = sorted(self.bound.nest.reads[operand].loops, key=lambda loop: loop == lane)
        axes = [self.bound.axes[loop] for loop in loops]
        whole = as_strided(
            array,
            shape=[axis.extent for axis in axes],
            strides=[axis.strides[operand] for axis in axes],
            writeable=False,
        )
        copy = np.ascontiguousarray(whole[tuple(slice(*box[loop]) for loop in loops)])
        back = 0
        for loop, stride in zip(loops, copy.strides, strict=True):
            self.jobs[:, self.bound.position[f"stride{operand}_{loop}"]] = stride
            back += box[loop][0] * stride
        self.place(operand, copy, None, -back)

    @cached_property
    def only_job(self) -> Numbers[int]:
        """The parameters of the only call, in an array that is quick to copy and to change."""
        return Numbers("q", self.jobs[0].tobytes())

    def run(self, arrays: Sequence[Array], threads: int) -> None:
        """Make the calls for given arrays, in the order in which these were placed."""
        if len(self.jobs) > 1 or self.is_checked:
            jobs = self.jobs_for(arrays)
            run_jobs(self.kernel, jobs, threads)
            if self.is_checked:
                check_gathers(self.bound, jobs)
            return
        job = self.only_job[:]
        for (position, offset), array in zip(self.open, arrays, strict=True):
            job[position] = int(address_of(array) + offset)
        self.kernel(job.buffer_info()[0])

    def jobs_for(self, arrays: Sequence[Array]) -> Jobs:
        """Return the parameters for given arrays, in the order in which these were placed."""
        return self.jobs_at([address_of(array) for array in arrays])

    def jobs_at(self, addresses: Sequence[int]) -> Jobs:
        """Return the parameters for given arrays at these addresses."""
        jobs = self.jobs.copy()
        for (position, offset), address in zip(self.open, addresses, strict=True):
            jobs[:, position] = address + offset
        return jobs

    def calls_for(self, arrays: Sequence[Array]) -> tuple[Jobs, Callable[[int], None]]:
        """Return the parameters for given arrays, and what makes the call with a number."""
        jobs = self.jobs_for(arrays)
        kernel = self.kernel
        first = address_of(jobs)
        step = jobs.strides[0]
        return jobs, lambda number: kernel(first + number * step)


def _has_empty_gather(bound: BoundNest) -> bool:
    return any(dimension.extent == 0 for dimension in itertools.chain(*bound.gathered))


def _run_loops(
    bound: BoundNest, arrays: Sequence[Array | Counter], results: Array, threads: int
) -> int:
    """Fill the results, one for each chunk, and return how many of them were used.

    Threads take turns at the calls of one box before the next box starts.
    """
    if _has_empty_gather(bound):
        raise IndexError("an index is out of range; this dimension has extent 0")
    used = 1
    finished = []
    for box in _boxes(bound):
        template = JobTemplate(bound, *shares_of(bound, box, len(results), threads), box)
        for number, array in enumerate(arrays):
            if number in bound.packed:
                template.pack(number, array, box)
            else:
                template.place(number, array, None)
        used = len(template.jobs)
        chunks = np.arange(used) if len(results) > 1 else 0
        template.place(-1, results, None, chunks * results.strides[0])
        run_jobs(template.kernel, template.jobs, threads)
        finished.append(template.jobs)
    check_gathers(bound, np.concatenate(finished))
    return used


def check_gathers(bound: BoundNest, finished: Jobs) -> None:
    """Raise IndexError if a kernel met an index that is out of range."""
    for array, dimensions in enumerate(bound.gathered):
        if array < len(bound.nest.reads) and not bound.nest.reads[array].is_checked:
            continue
        for number, dimension in enumerate(dimensions):
            low = finished[:, bound.position[f"lowest{array}_{number}"]].min()
            high = finished[:, bound.position[f"highest{array}_{number}"]].max()
            check_index_range(low, high, dimension.extent)


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


def shares_of(
    bound: BoundNest, box: Sequence[Range], chunks: int, threads: int
) -> tuple[int, list[Range]]:
    """Return where the range of a loop is that calls share, and the part that each computes.

    Chunks cut an aggregated loop. Threads cut a loop of the output, which changes no bit of the
    result; the lanes are cut only at multiples of a grain.
    """
    nest = bound.nest
    sizes = [stop - start for start, stop in box]
    grains = [1] * nest.loops
    pieces = chunks
    if chunks > 1:
        whole = nest.tiles or [0] * nest.loops  # what is written out is not cut
        inner = [loop for loop in range(nest.output_loops, nest.loops) if not whole[loop]]
        loop = max(inner, key=lambda k: sizes[k], default=0)
        pieces = chunks if inner else 1
    elif threads == 1 or nest.output_loops == 0:
        loop = 0
    else:
        is_map = nest.aggregation is None
        grains[nest.lane] = MIN_SHARED_LANES if is_map else min(nest.width, MAX_SHARED_LANES)
        loop = max(range(nest.output_loops), key=lambda k: sizes[k] // grains[k])
        pieces = threads
    pieces = min(pieces, max(1, sizes[loop] // grains[loop]))
    return 2 * loop, even_ranges(*box[loop], pieces, grains[loop])
