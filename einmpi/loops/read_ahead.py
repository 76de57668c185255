"""Batches read ahead: while a step computes, a thread reads this rank's rows of the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.job.loop import Batches
from einmpi.loops.batch_order import WINDOW_BLOCKS, EpochOrder, Numbers
from einmpi.loops.row_sources import RowSource, read_rows
from einmpi.schedule.layout import Layout
from einmpi.schedule.regions import Region, elements, indices, shape

Array: TypeAlias = npt.NDArray[Any]
Allocate: TypeAlias = Callable[[tuple[int, ...], str], Array]


@dataclass(frozen=True)
class BatchedInput:
    """An input that comes in batches: its rows, and the layout that a step needs."""

    name: str
    dtype: str
    layout: Layout
    source: RowSource
    block: int  # rows that are read together


class ReadAhead:
    """The batches of one rank, step after step.

    A thread reads the next batch into arrays of its own. It makes no MPI calls. With `ahead` it
    does so during a step, and keeps rows that were stored together with those of the batch; without
    it every batch is read when it is needed, and takes no memory besides its own.
    """

    def __init__(
        self,
        batches: Batches,
        inputs: Sequence[BatchedInput],
        rank: int,
        allocate: Allocate,
        ahead: bool,
        steps: int,
    ) -> None:
        self.batches = batches
        self.steps = steps
        self.ahead = ahead
        self.readers = [_RankRows(each, batches, rank, allocate, ahead) for each in inputs]
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


class _RankRows:
    """The rows of one input that a rank needs.

    Rows that are read one by one go to their place at once. Where rows are stored or shuffled
    together, a window of them is read as a whole, block by block, and what this rank needs of it is
    kept until the steps have taken it.
    """

    def __init__(
        self, batched: BatchedInput, batches: Batches, rank: int, allocate: Allocate, ahead: bool
    ) -> None:
        self.name = batched.name
        self.dtype = batched.dtype
        self.source = batched.source
        self.batches = batches
        self.allocate = allocate
        region = batched.layout.block(rank)
        if region is None:  # an idle rank
            region = ((),) * len(batched.layout.bound)
        self.region: Region = region
        self.columns: Region = region[1:]
        self.batch_bytes = elements(region) * np.dtype(batched.dtype).itemsize
        self.own_indices: Numbers = indices(region[0])  # in a batch
        self.block = batched.block if ahead else 1
        # The window that is kept: its epoch and number, the positions of its rows in the order of
        # the epoch, and the rows.
        self.window: tuple[int, int] | None = None
        self.positions: Numbers = np.arange(0)
        self.kept: Array = np.empty(0)
        self.bytes_used = 0  # at most so far

    def read(self, step: int, order: EpochOrder | None) -> Array:
        """Return the block of a batch in the layout of the plan; padding is zeros."""
        target = self.allocate(shape(self.region), self.dtype)
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
