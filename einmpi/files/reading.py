"""A tensor from a file to the ranks of a layout: each element is read once, in large pieces (docs/architecture.md)."""

from __future__ import annotations

import itertools
from concurrent.futures import Executor, Future
from dataclasses import replace
from math import prod
from typing import Any, TypeAlias

import numpy as np

from einmpi.comm.base import Comm
from einmpi.files.datasets import Dataset, Reader
from einmpi.files.formats import open_reader
from einmpi.schedule.layout import Layout
from einmpi.schedule.regions import Region, boxes, sides
from einmpi.schedule.shared_reads import Bounds, deal, suits_single_ranks

Cells: TypeAlias = dict[int, tuple[Bounds, np.ndarray]]
Sides: TypeAlias = list[
    list[tuple[slice, slice]]
]  # of each dimension: a run of the tensor, its place in the target


class Reading:
    """One tensor on its way into `target`. Where the blocks suit the file, each rank reads its own; else all ranks of
    the layout read cells in the order of the file, round by round, and pass them on."""

    def __init__(
        self,
        dataset: Dataset,
        layout: Layout,
        rank: int,
        target: np.ndarray,
        region: Region,
        place: Region,
    ) -> None:
        self.dataset, self.rank, self.target = dataset, rank, target
        self.region, self.place = region, place
        first = [0] * len(layout.bound)
        first[0] = dataset.first_row
        if not dataset.shape:  # a number is a vector of one element here
            self.target = target.reshape(1)
        if dataset.fortran:  # turned around, it lies in the file as any other
            layout = _backwards(layout)
            first, self.region, self.place, self.target = (
                first[::-1],
                region[::-1],
                place[::-1],
                target.T,
            )
        self.first = first
        self.spans: Sides = [
            sides(runs, places) for runs, places in zip(self.region, self.place, strict=True)
        ]
        itemsize = dataset.dtype.itemsize
        self.alone = 0 in layout.bound or suits_single_ranks(
            layout, itemsize, dataset.chunks, first
        )
        self.dealing = None if self.alone else deal(layout, itemsize, dataset.chunks, first)
        self.reader: Reader | None = None
        self.pending: Future[Any] | None = None
        # One is read into while the other is passed on.
        self.buffers: list[np.ndarray | None] = [None, None]

    def begin(self, background: Executor) -> None:
        """Start to read in the background: all, or the first round."""
        self.pending = (
            background.submit(self._own) if self.alone else background.submit(self._cells, 0)
        )

    def finish(self, comm: Comm, background: Executor | None = None) -> None:
        """Read and pass on what is left. All ranks of the layout call it."""
        try:
            if self.dealing is not None:
                assert background is not None
                self._together(comm, background)
            elif self.pending is not None:
                self.pending.result()
            else:
                self._own()
        finally:
            self.close()

    def close(self) -> None:
        """Wait for what is going on, whatever comes of it."""
        if self.pending is not None and not self.pending.cancel():
            self.pending.exception()
        if self.reader is not None:
            self.reader.close()
            self.reader = None

    # ---- from the file ----------------------------------------------------------------------------------------------

    def _own(self) -> None:
        for there, here in boxes(self.region, self.place):
            self._read(tuple((side.start, side.stop) for side in there), self.target, here)

    def _cells(self, turn: int) -> Cells:
        """What this rank reads in a round: in their place where they lie there in one piece, else in a buffer."""
        assert self.dealing is not None
        grid, dtype = self.dealing.grid, self.dataset.dtype
        found: Cells = {}
        start = 0
        for number in self.dealing.own(self.rank, turn):
            bounds = grid.bounds(number)
            extents = tuple(last - first for first, last in bounds)
            places = _within(self.spans, bounds)
            array = self.target[places[0]] if len(places) == 1 else self.target[:0]
            if array.shape != extents or not array.flags.c_contiguous:
                buffer = self.buffers[turn % 2]
                if buffer is None:
                    buffer = self.buffers[turn % 2] = np.empty(
                        self.dealing.at_once * prod(grid.cell), dtype
                    )
                array = buffer[start : start + prod(extents)].reshape(extents)
                start += array.size
            self._read(bounds, array, (slice(None),) * array.ndim)
            found[number] = bounds, array
        return found

    def _read(self, bounds: Bounds, target: np.ndarray, here: tuple[slice, ...]) -> None:
        if self.reader is None:
            self.reader = open_reader(self.dataset)
        if not self.dataset.shape:
            self.reader.read((), target.reshape(()), ())
            return
        there = tuple(
            slice(a + first, b + first) for (a, b), first in zip(bounds, self.first, strict=True)
        )
        self.reader.read(there, target, here)

    # ---- together ---------------------------------------------------------------------------------------------------

    def _together(self, comm: Comm, background: Executor) -> None:
        assert self.dealing is not None
        if self.pending is None:
            self.begin(background)
        for turn, coming in enumerate(self.dealing.coming(self.rank)):
            assert self.pending is not None
            cells = self.pending.result()
            if turn + 1 < self.dealing.rounds:
                self.pending = background.submit(self._cells, turn + 1)
            self._pass_on(turn, cells, coming, comm)

    def _pass_on(self, turn: int, cells: Cells, coming: dict[int, list[int]], comm: Comm) -> None:
        """Each rank sends to the one that is `shift` after it, while it receives from the one before it by as much."""
        assert self.dealing is not None
        rank, ranks, grid = self.rank, self.dealing.ranks, self.dealing.grid
        going = self.dealing.going(rank, turn)
        shifts = {(user - rank) % ranks for user in going} | {
            (rank - source) % ranks for source in coming
        }
        for shift in sorted(shifts):
            to, source = (rank + shift) % ranks, (rank - shift) % ranks
            out = [
                piece
                for number, region in going.get(to, ())
                for piece in _pieces(*cells[number], region)
            ]
            places = (
                box
                for number in coming.get(source, ())
                for box in _within(self.spans, grid.bounds(number))
            )
            back = [self.target[box] for box in places]
            if shift == 0:
                for piece, place in zip(out, back, strict=True):
                    if piece.ctypes.data != place.ctypes.data:
                        place[...] = piece
                continue
            send, receive = (
                _in_a_row(out, self.target, self.buffers[turn % 2]),
                _in_a_row(back, self.target),
            )
            unpack = receive is None
            if send is None:
                send = np.concatenate([piece.reshape(-1) for piece in out])
            if receive is None:
                receive = np.empty(sum(piece.size for piece in back), self.target.dtype)
            comm.sendrecv(to if out else None, send, source if back else None, receive)
            start = 0
            for place in back if unpack else ():
                place[...] = receive[start : start + place.size].reshape(place.shape)
                start += place.size


def _pieces(bounds: Bounds, array: np.ndarray, region: Region) -> list[np.ndarray]:
    """The runs of a region of the tensor that lie in a cell."""
    sliced = [
        [slice(a - first, b - first) for a, b in runs]
        for runs, (first, _) in zip(region, bounds, strict=True)
    ]
    return [array[box] for box in itertools.product(*sliced)]


def _within(spans: Sides, bounds: Bounds) -> list[tuple[slice, ...]]:
    """Where in the target the runs are that lie in a cell, in the same order."""
    found = []
    for pairs, (first, last) in zip(spans, bounds, strict=True):
        side = []
        for there, here in pairs:
            start, stop = max(there.start, first), min(there.stop, last)
            if start < stop:
                side.append(
                    slice(here.start + start - there.start, here.start + stop - there.start)
                )
        found.append(side)
    return list(itertools.product(*found))


def _in_a_row(pieces: list[np.ndarray], *arrays: np.ndarray | None) -> np.ndarray | None:
    """The pieces as one run of the array they are in, where they are that: nothing has to be copied then."""
    if not pieces:
        return np.empty(0, np.uint8)
    start = end = pieces[0].ctypes.data
    for piece in pieces:
        if not piece.flags.c_contiguous or piece.ctypes.data != end:
            return None
        end += piece.nbytes
    for array in arrays:
        if array is not None and array.flags.c_contiguous:
            first, flat = array.ctypes.data, array.reshape(-1)
            if first <= start and end <= first + array.nbytes:
                return flat[(start - first) // flat.itemsize : (end - first) // flat.itemsize]
    return None


def _backwards(layout: Layout) -> Layout:
    """The layout of the tensor with its dimensions in the opposite order."""
    last = len(layout.bound) - 1
    return replace(
        layout,
        bound=layout.bound[::-1],
        cuts=tuple(None if cut is None else last - cut for cut in layout.cuts),
        splits=tuple((axis, last - cut) for axis, cut in layout.splits),
    )
