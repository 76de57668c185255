"""A kernel done piece by piece, between the slow tier and memory; the next pieces are fetched while one is computed."""

from __future__ import annotations

from contextlib import ExitStack
from math import prod
from typing import Any

from einmpi.runtime.backend import Copy
from einmpi.runtime.buffers import Buffers
from einmpi.schedule.passes import Piece, pieces
from einmpi.schedule.regions import Box, Region, boxes, packed, shape, whole
from einmpi.schedule.steps import Passes

Arriving = tuple[Any, list[Copy]]  # an array, and the copies that fill it


def compute_in_passes(step: Passes, buffers: Buffers) -> None:
    """The operands have their values; the target is in the slow tier."""
    with ExitStack() as stack:
        work = _Work(step, buffers, stack)
        following = pieces(step)
        piece: Piece | None = next(following)
        assert piece is not None
        operands = work.fetch(piece)
        while piece is not None:
            after = next(following, None)
            ahead = work.fetch(after) if step.ahead and after is not None else None
            work.compute(piece, operands, complete=after is None or after.first)
            if after is not None:
                operands = work.fetch(after) if ahead is None else ahead
            piece = after
        work.finish()


class _Work:
    """The pieces that are in memory: of each operand the one in use and the one on its way, where there are two."""

    def __init__(self, step: Passes, buffers: Buffers, stack: ExitStack) -> None:
        self.step, self.buffers = step, buffers
        self.sources = [buffers[slot] for slot in step.kernel.operands]
        turns = 2 if step.ahead else 1
        self.pieces = [_Turns(buffers, stack, turns) for _ in self.sources]
        self.made, self.partial = _Turns(buffers, stack, turns), _Turns(buffers, stack, 1)
        self.arriving: list[tuple[Region, Arriving] | None] = [None] * len(self.sources)
        self.target = buffers.slow[step.kernel.target.name]
        self.leaving: dict[int, Copy] = {}  # of each turn of `made`
        self.last: Copy | None = None
        self.out: Any = None

    def fetch(self, piece: Piece) -> list[Arriving]:
        """Begin to copy what the piece needs and is not there."""
        return [self._operand(number, region) for number, region in enumerate(piece.operands)]

    def _operand(self, number: int, region: Region) -> Arriving:
        source = self.sources[number]
        if number in self.step.inside:
            return source[(*_box(region), ...)], []
        known = self.arriving[number]
        if known is not None and known[0] == region:
            return known[1]
        extents = shape(region)
        array = self.pieces[number].next(extents, self.step.kernel.operands[number].dtype)
        self.buffers.fetched += array.nbytes
        copies = [
            self.buffers.backend.begin_copy(source[(*there, ...)], array[(*here, ...)])
            for there, here in boxes(region, packed(region))
        ]
        self.arriving[number] = region, (array, copies)
        return array, copies

    def compute(self, piece: Piece, operands: list[Arriving], complete: bool) -> None:
        backend, dtype = self.buffers.backend, self.step.kernel.target.dtype
        for _, copies in operands:
            for copy in copies:
                copy.join()
            copies.clear()
        arrays = [array for array, _ in operands]
        extents = shape(piece.target)
        if piece.first:
            self.out = self.made.next(extents, dtype)
            if self.made.turn in self.leaving:
                self.leaving.pop(self.made.turn).join()
            backend.compute(piece.kernel, arrays, self.out)
        else:
            part = self.partial.next(extents, dtype)
            backend.compute(piece.kernel, arrays, part)
            aggregation = piece.kernel.einsum.aggregation
            assert aggregation is not None
            backend.combine(
                aggregation, self.out, tuple(map(whole, extents or (1,))), part.reshape(-1)
            )
        if complete:
            self.last = backend.begin_copy(self.out, self.target[(*_box(piece.target), ...)])
            self.leaving[self.made.turn] = self.last

    def finish(self) -> None:
        """The buffers go; whoever reads the target waits for the last copy."""
        for copy in self.leaving.values():
            copy.join()
        assert self.last is not None
        self.buffers.leaving[self.step.kernel.target.name] = self.last


def _box(region: Region) -> Box:
    """A region that has one run in each dimension, or none."""
    return tuple(slice(*runs[0]) if runs else slice(0) for runs in region)


class _Turns:
    """Buffers for pieces of one kind, used in turn. The first piece, which is as large as any, says how large."""

    def __init__(self, buffers: Buffers, stack: ExitStack, turns: int) -> None:
        self.buffers, self.stack, self.turns = buffers, stack, turns
        self.arrays: list[Any] = []
        self.turn = -1
        self.largest = 0

    def next(self, extents: tuple[int, ...], dtype: str) -> Any:
        """The buffer whose turn it is, in the shape of a piece."""
        self.largest = self.largest or prod(extents)
        self.turn = (self.turn + 1) % self.turns
        if self.turn == len(self.arrays):
            array = self.buffers.backend.allocate((self.largest,), dtype)
            self.arrays.append(self.stack.enter_context(self.buffers.counted(array)))
        return self.arrays[self.turn][: prod(extents)].reshape(extents)
