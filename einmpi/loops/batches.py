"""The batches of a running loop: where their rows come from, in which order, read ahead."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.dist_array import DistArray
from einmpi.comm.agreement import together
from einmpi.comm.base import Comm
from einmpi.compiled.running import Measured
from einmpi.errors import InputError
from einmpi.files.datasets import Dataset, Reader, check_unchanged, files_as_read
from einmpi.files.formats import open_reader
from einmpi.files.reading import fill_box, find_planned, read_selected_box, words
from einmpi.files.specs import InputSpec
from einmpi.job.batches import Batches, Shuffle
from einmpi.job.job import Job, loop_of
from einmpi.planner.plan import BatchPlan, Plan
from einmpi.runtime.gpu.copies import on_host
from einmpi.runtime.host_memory import aligned_empty
from einmpi.schedule.layout import Layout
from einmpi.schedule.lower import arrival_layout
from einmpi.schedule.regions import Box, Region, boxes, elements, indices, packed, shape

Array: TypeAlias = npt.NDArray[Any]


class LoopBatches:
    """The batches of a loop on one rank.

    `given` are the arrays of the caller, with all their rows. All ranks make it together.
    """

    def __init__(self, job: Job, batches: Batches, comm: Comm, given: Mapping[str, Any]) -> None:
        self.batches = batches
        self.comm = comm
        self.specs = {spec.name: spec for spec in job.inputs if spec.name in batches.names}
        self.files: dict[str, Dataset] = {}
        self.sources: dict[str, RowSource] = together(
            comm, lambda: self._find_sources(given), lambda _: files_as_read(self.files)
        )
        self.layouts: dict[str, Layout] = {}
        # What this rank uses besides the memory of a step.
        self.bytes_ahead = 0
        self.bytes_arriving = 0
        self.is_counted = reads_into_memory_of_plan(job)
        self.reading: ReadAhead | None = None

    def _find_sources(self, given: Mapping[str, Any]) -> dict[str, RowSource]:
        sources: dict[str, RowSource] = {}
        for name, spec in self.specs.items():
            array = given.get(name)
            if isinstance(array, DistArray):
                what = f"{name} comes in batches, and is a DistArray"
                raise InputError("inputs", what, "an array, or a dataset in a file")
            if array is None and spec.file is not None:
                array = find_planned(spec, spec.whole_shape or (), spec.dtype or "")
            if isinstance(array, Dataset):
                self.files[name] = array
                sources[name] = DatasetRows(array)
            elif array is not None:
                sources[name] = ArrayRows(on_host(array))
            else:
                sources[name] = GeneratedRows(spec)
        return sources

    def arrive_in(self, plan: Plan, job: Job) -> BatchPlan:
        """Take note of the layouts in which a step needs the rows; return how they arrive."""
        for name in self.sources:
            if name in plan.graph.by_name:
                self.layouts[name] = arrival_layout(plan, name)
        found = plan_batches(job, plan)
        assert found is not None
        self.bytes_ahead = found.bytes_ahead
        self.bytes_arriving = found.bytes_arriving
        return found

    def start(self, steps: int) -> None:
        """Get ready to read the batches of at most so many steps."""
        readers = []
        ahead = self.bytes_ahead > 0
        for name, layout in self.layouts.items():
            spec = self.specs[name]
            block = rows_read_together(self.batches, spec.chunk_rows) if ahead else 1
            region = layout.block(self.comm.rank)
            if region is None:  # an idle rank
                region = ((),) * len(layout.bound)
            source = self.sources[name]
            readers.append(RankRows(name, spec.dtype or "", region, source, self.batches, block))
        self.reading = ReadAhead(self.batches, readers, ahead, steps)

    def place(self, step: int, values: dict[str, Any]) -> None:
        """Put this rank's part of the batch of a step among the values that the step reads.

        If it cannot be read, an error is raised on this rank alone.
        """
        assert self.reading is not None
        for name in self.layouts:  # the batch of the step before is not needed any more
            values.pop(name, None)
        for name, block in self.reading.take(step).items():
            values[name] = DistArray(block, self.layouts[name], self.comm)

    def with_reading(self, measured: Measured) -> Measured:
        """Return what was measured in a step with the memory and the time of reading its batch."""
        assert self.reading is not None
        seconds = measured.seconds_loading + self.reading.seconds_waiting
        self.reading.seconds_waiting = 0.0
        peak = measured.peak
        if self.is_counted:
            peak += self.bytes_arriving + self.reading.bytes_used
        return replace(measured, seconds_loading=seconds, peak=peak)

    def close(self) -> None:
        """End the thread that reads, and close the files."""
        if self.reading is not None:
            self.reading.close()
            self.reading = None


@contextmanager
def reading_batches(batches: LoopBatches | None, steps: int) -> Iterator[None]:
    """Read batches during a with block, at the end of which no thread reads any more."""
    if batches is None:
        yield
        return
    batches.start(steps)
    try:
        yield
    finally:
        batches.close()


def reads_into_memory_of_plan(job: Job) -> bool:
    """Return whether what is read ahead takes memory that the plan counts.

    On a GPU the plan counts that of the device, and batches are read into that of the host.
    """
    return job.backend == "numpy"


def plan_batches(job: Job, plan: Plan) -> BatchPlan | None:
    """Return how batches arrive in the layouts of a plan.

    They are read ahead if the memory limit leaves room for it.
    """
    batches = loop_of(job).batches
    if batches is None:
        return None
    ahead = 0
    arriving = 0
    nbytes = 0
    for spec in job.inputs:
        if spec.name not in batches.names or spec.name not in plan.graph.by_name:
            continue
        vertex = plan.graph[spec.name]
        layout = arrival_layout(plan, spec.name)
        itemsize = np.dtype(vertex.dtype).itemsize
        nbytes += vertex.nbytes
        arriving += layout.max_elements() * itemsize
        block = rows_read_together(batches, spec.chunk_rows)
        ahead += bytes_ahead(batches, layout, itemsize, block)
    limit = plan.memory if reads_into_memory_of_plan(job) else None
    if limit is not None and plan.peak + arriving + ahead > limit:
        ahead = 0
    seed = None
    block = 1
    if batches.shuffle is not None:
        seed = batches.shuffle.seed
        block = batches.shuffle.block
    return BatchPlan(
        names=batches.names,
        rows=batches.rows,
        batch=batches.batch,
        steps_an_epoch=batches.steps_an_epoch,
        last="pad" if batches.pads_last else "drop",
        seed=seed,
        block=block,
        nbytes=nbytes,
        bytes_arriving=arriving,
        bytes_ahead=ahead,
    )


def batch_of_whole_array(batches: Batches, array: Array, step: int) -> Array:
    """Return the batch of a step, given all rows: for the reference."""
    order = rows_in_order(batches.rows, batches.shuffle, batches.epoch_of(step))
    first = batches.first_of(step)
    found = array[order[first : first + batches.batch]]
    missing = batches.batch - len(found)
    return np.concatenate([found, np.zeros((missing, *array.shape[1:]), array.dtype)])


# ---- read ahead ----------------------------------------------------------------------------------
#
# While a step computes, a thread reads this rank's rows of the next batch.


# ---- batch order ---------------------------------------------------------------------------------
#
# The order in which a loop takes the rows of its batches: a function of seed and epoch alone.


Numbers: TypeAlias = npt.NDArray[np.int64]

WINDOW_BLOCKS = 16  # whose rows are mixed with each other


class EpochOrder:
    """The order of the rows in one epoch.

    Each block of neighbouring rows gets a random word, and the blocks are sorted by these words. If
    blocks have more than one row, then the rows of each window of WINDOW_BLOCKS blocks get words
    and are sorted by them too. The words are those of two streams of a counter-based generator, one
    for blocks and one for rows, so that all ranks find the same order without asking each other.
    """

    def __init__(self, rows: int, shuffle: Shuffle, epoch: int) -> None:
        self.rows = rows
        self.block = shuffle.block
        # Generated inputs have keys below 2**64.
        self.key_of_blocks = shuffle.seed + 2**64 * (2 * epoch + 1)
        self.key_of_rows = shuffle.seed + 2**64 * (2 * epoch + 2)
        count = -(-rows // self.block)
        self.blocks: Numbers = np.argsort(words(self.key_of_blocks, 0, count), kind="stable")
        sizes = np.full(count, self.block)
        sizes[self.blocks == count - 1] = rows - (count - 1) * self.block
        ends = np.cumsum(sizes)
        last_blocks = np.arange(WINDOW_BLOCKS - 1, count - 1, WINDOW_BLOCKS)
        # Where in the order each window begins, and where the last one ends.
        self.window_bounds: Numbers = np.concatenate([[0], ends[last_blocks], [rows]])

    def window_of(self, position: int) -> int:
        """Return the number of the window that has a position."""
        return int(np.searchsorted(self.window_bounds, position, side="right")) - 1

    def rows_of_window(self, window: int) -> Numbers:
        """Return the rows of a window, in their new order."""
        chosen = self.blocks[window * WINDOW_BLOCKS : (window + 1) * WINDOW_BLOCKS]
        if self.block == 1:
            return chosen
        ranges = []
        for block in chosen:
            first = block * self.block
            ranges.append(np.arange(first, min(first + self.block, self.rows)))
        start = int(self.window_bounds[window])
        stop = int(self.window_bounds[window + 1])
        order = np.argsort(words(self.key_of_rows, start, stop), kind="stable")
        found: Numbers = np.concatenate(ranges)[order]
        return found

    def rows_at(self, start: int, stop: int) -> Numbers:
        """Return the rows at the positions from `start` to before `stop`."""
        if self.block == 1:
            return self.blocks[start:stop]
        found = [np.arange(0)]
        position = start
        while position < stop:
            window = self.window_of(position)
            first, last = self.window_bounds[window : window + 2].tolist()
            end = min(stop, last)
            found.append(self.rows_of_window(window)[position - first : end - first])
            position = end
        return np.concatenate(found)


def rows_in_order(rows: int, shuffle: Shuffle | None, epoch: int) -> Numbers:
    """Return all rows in the order of an epoch."""
    if shuffle is None:
        return np.arange(rows)
    return EpochOrder(rows, shuffle, epoch).rows_at(0, rows)


# ---- row sources ---------------------------------------------------------------------------------
#
# Where the rows of batches come from: a file, an array, or a generator.


class DatasetRows:
    """Rows of a dataset in a file. It is opened when it is first read, and stays open."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.reader: Reader | None = None

    def read_box(self, there: Box, target: Array, here: Box) -> None:
        """Put a box of the tensor at a place in the target."""
        if self.reader is None:
            self.reader = open_reader(self.dataset)
        read_selected_box(self.reader, self.dataset, there, target, here)

    def check(self) -> None:
        """Refuse a file that has changed."""
        check_unchanged(self.dataset)

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()
            self.reader = None


@dataclass
class ArrayRows:
    """Rows of an array that every rank has, or of an object that is indexed like one."""

    array: Any

    def read_box(self, there: Box, target: Array, here: Box) -> None:
        target[here] = self.array[there]

    def check(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class GeneratedRows:
    """Rows of a generated tensor."""

    spec: InputSpec

    def read_box(self, there: Box, target: Array, here: Box) -> None:
        assert self.spec.whole_shape is not None
        fill_box(self.spec, self.spec.whole_shape, there, target[here])

    def check(self) -> None: ...

    def close(self) -> None: ...


RowSource: TypeAlias = DatasetRows | ArrayRows | GeneratedRows


def read_rows(source: RowSource, rows: Numbers, columns: Region, target: Array) -> None:
    """Put rows of a source, in this order, into a target that has their columns densely.

    `columns` is the region of the dimensions after the first.
    """
    if isinstance(source, ArrayRows) and isinstance(source.array, np.ndarray):
        if source.array.shape[1:] == target.shape[1:]:
            # With "raise", numpy would copy the target first.
            np.take(source.array, rows, axis=0, out=target, mode="clip")
            return
        for there, here in boxes(columns, packed(columns)):
            chosen: Any = (rows, *there)
            target[(slice(None), *here)] = source.array[chosen]
        return
    for start, stop in _consecutive(rows):
        first = int(rows[start])
        there_rows = slice(first, first + stop - start)
        for there, here in boxes(columns, packed(columns)):
            source.read_box((there_rows, *there), target, (slice(start, stop), *here))


def _consecutive(rows: Numbers) -> Iterator[tuple[int, int]]:
    """Yield the stretches of numbers each of which is one more than that before it."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    bounds = [0, *breaks.tolist(), len(rows)]
    for start, stop in itertools.pairwise(bounds):
        if start < stop:
            yield start, stop


class ReadAhead:
    """The batches of one rank, step after step.

    A thread reads the next batch into arrays of its own. It makes no MPI calls. With `ahead` it
    does so during a step, and keeps rows that were stored together with those of the batch; without
    it every batch is read when it is needed, and takes no memory besides its own.
    """

    def __init__(
        self,
        batches: Batches,
        readers: Sequence[RankRows],
        ahead: bool,
        steps: int,
    ) -> None:
        self.batches = batches
        self.steps = steps
        self.ahead = ahead
        self.readers = readers
        self.order: tuple[int, EpochOrder] | None = None  # of the last epoch that was read
        self.thread = ThreadPoolExecutor(1, "batches")
        self.pending: tuple[int, Future[dict[str, Array]]] | None = None
        self.seconds_waiting = 0.0

    def take(self, step: int) -> dict[str, Array]:
        """Return this rank's blocks of the batch of a step, and begin to read the next one.

        An error of the thread is raised here.
        """
        if self.pending is None or self.pending[0] != step:
            self._begin(step)
        assert self.pending is not None
        start = time.perf_counter()
        blocks = self.pending[1].result()
        self.seconds_waiting += time.perf_counter() - start
        self.pending = None
        if self.ahead and step + 1 < self.steps:
            self._begin(step + 1)
        return blocks

    @property
    def bytes_used(self) -> int:
        """The most memory that reading ahead has used so far, besides the batch of a step."""
        return sum(reader.bytes_used for reader in self.readers) if self.ahead else 0

    def close(self) -> None:
        """Wait for the thread, whatever comes of it, and close the files."""
        self.thread.shutdown(cancel_futures=True)
        for reader in self.readers:
            reader.source.close()

    def _begin(self, step: int) -> None:
        self.pending = step, self.thread.submit(self._read, step)

    def _read(self, step: int) -> dict[str, Array]:
        """Read a batch. This is all that the thread does."""
        order = self._order_of(self.batches.epoch_of(step))
        return {reader.name: reader.read(step, order) for reader in self.readers}

    def _order_of(self, epoch: int) -> EpochOrder | None:
        shuffle = self.batches.shuffle
        if shuffle is None:
            return None
        if self.order is None or self.order[0] != epoch:
            self.order = epoch, EpochOrder(self.batches.rows, shuffle, epoch)
        return self.order[1]


class RankRows:
    """The rows of one input that a rank needs.

    Rows that are read one by one go to their place at once. Where rows are stored or shuffled
    together, a window of them is read as a whole, block by block, and what this rank needs of it is
    kept until the steps have taken it.
    """

    def __init__(
        self,
        name: str,
        dtype: str,
        region: Region,  # of a batch
        source: RowSource,
        batches: Batches,
        block: int,  # rows that are read together
    ) -> None:
        self.name = name
        self.dtype = dtype
        self.source = source
        self.batches = batches
        self.region = region
        self.columns: Region = region[1:]
        self.batch_bytes = elements(region) * np.dtype(dtype).itemsize
        self.own_indices: Numbers = indices(region[0])  # in a batch
        self.block = block
        # The window that is kept: its epoch and number, the positions of its rows in the order of
        # the epoch, and the rows.
        self.window: tuple[int, int] | None = None
        self.positions: Numbers = np.arange(0)
        self.kept: Array = np.empty(0)
        self.bytes_used = 0  # at most so far

    def read(self, step: int, order: EpochOrder | None) -> Array:
        """Return the block of a batch in the layout of the plan; padding is zeros."""
        target = aligned_empty(shape(self.region), self.dtype)
        count = self.batches.count_of(step)
        present = int(np.searchsorted(self.own_indices, count))
        target[present:] = 0
        self._note_bytes(target.nbytes + self.kept.nbytes)
        if not target[:present].size:
            return target
        positions = self.batches.first_of(step) + self.own_indices[:present]
        if self.block > 1:
            self._take_from_windows(self.batches.epoch_of(step), order, positions, target[:present])
        else:
            rows = positions
            if order is not None:
                start = int(positions[0])
                rows = order.rows_at(start, int(positions[-1]) + 1)[positions - start]
            read_rows(self.source, rows, self.columns, target[:present])
        self.source.check()
        return target

    def _note_bytes(self, in_use: int) -> None:
        self.bytes_used = max(self.bytes_used, in_use)

    def _take_from_windows(
        self, epoch: int, order: EpochOrder | None, positions: Numbers, target: Array
    ) -> None:
        done = 0
        while done < len(positions):
            position = int(positions[done])
            window = position // self.block if order is None else order.window_of(position)
            if self.window != (epoch, window):
                self._keep_window(epoch, window, order)
            end = int(np.searchsorted(positions, self.positions[-1], side="right"))
            first = int(np.searchsorted(self.positions, position))
            target[done:end] = self.kept[first : first + end - done]
            done = end

    def _keep_window(self, epoch: int, window: int, order: EpochOrder | None) -> None:
        """Read what this rank needs of a window."""
        self.kept = np.empty(0)  # release the last one before the next is read
        self.window = None
        if order is None:
            start = window * self.block
            rows = np.arange(start, min(start + self.block, self.batches.rows))
        else:
            start = int(order.window_bounds[window])
            rows = order.rows_of_window(window)
        positions = np.arange(start, start + len(rows))
        taken = self.batches.steps_an_epoch * self.batches.batch
        is_needed = np.isin(positions % self.batches.batch, self.own_indices)
        is_needed &= positions < taken
        self.positions = positions[is_needed]
        rows = rows[is_needed]
        columns_shape = shape(self.columns)
        self.kept = np.empty((len(rows), *columns_shape), self.dtype)
        for block in np.unique(rows // self.block):
            in_block = np.flatnonzero(rows // self.block == block)
            first = int(rows[in_block].min())
            last = int(rows[in_block].max()) + 1
            together = np.empty((last - first, *columns_shape), self.dtype)
            self._note_bytes(self.batch_bytes + self.kept.nbytes + together.nbytes)
            read_rows(self.source, np.arange(first, last), self.columns, together)
            self.kept[in_block] = together[rows[in_block] - first]
        self.window = epoch, window


def rows_read_together(batches: Batches, chunk_rows: int) -> int:
    """Return how many neighbouring rows are read at once: a block of the shuffle, or a chunk."""
    return chunk_rows if batches.shuffle is None else batches.shuffle.block


def bytes_ahead(batches: Batches, layout: Layout, itemsize: int, block: int) -> int:
    """Return a bound on the memory that reading an input ahead takes on a rank.

    It has to hold the next batch, and if rows are read in blocks, a window and a block of them.
    """
    if 0 in layout.bound:
        return 0
    batch_bytes = layout.max_elements() * itemsize
    if block == 1:
        return batch_bytes
    own_rows = layout.max_extent(0)
    row_bytes = -(-batch_bytes // own_rows)
    blocks = WINDOW_BLOCKS if batches.shuffle is not None else 1
    window_rows = min(blocks * block, batches.rows)
    kept_rows = min(window_rows, (window_rows // batches.batch + 2) * own_rows)
    return batch_bytes + row_bytes * (kept_rows + min(block, batches.rows))
