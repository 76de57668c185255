"""A kernel computed piece by piece, between the slow tier and memory. The next pieces are fetched
while one is computed."""

from __future__ import annotations

from contextlib import ExitStack
from math import prod
from typing import TypeAlias

from einmpi.runtime.backend import Array, Copy
from einmpi.runtime.buffers import Buffers
from einmpi.schedule.passes import Piece, pieces
from einmpi.schedule.regions import Box, Region, boxes, packed, shape, whole
from einmpi.schedule.steps import Passes

Fetched: TypeAlias = tuple[Array, list[Copy]]  # an array, and the copies that fill it


def compute_in_passes(step: Passes, buffers: Buffers) -> None:
    """Compute a kernel whose operands have their values, to a target in the slow tier."""
    with ExitStack() as stack:
        memory = _PiecesInMemory(step, buffers, stack)
        following = pieces(step)
        piece = next(following)
        operands = memory.fetch(piece)
        for after in following:
            if step.ahead:
                operands_after = memory.fetch(after)
                memory.compute_piece(piece, operands, complete=after.first)
            else:
                memory.compute_piece(piece, operands, complete=after.first)
                operands_after = memory.fetch(after)
            piece = after
            operands = operands_after
        memory.compute_piece(piece, operands, complete=True)
        memory.finish()


class _PiecesInMemory:
    """The pieces in memory: of each operand the one in use, and the next one if there is room."""

    def __init__(self, step: Passes, buffers: Buffers, stack: ExitStack) -> None:
        self.step = step
        self.buffers = buffers
        self.sources = [buffers[slot] for slot in step.kernel.operands]
        count = 2 if step.ahead else 1
        self.operand_buffers = [_PieceBuffers(buffers, stack, count) for _ in self.sources]
        self.result_buffers = _PieceBuffers(buffers, stack, count)
        self.partial_buffer = _PieceBuffers(buffers, stack, 1)
        self.fetched: list[tuple[Region, Fetched] | None] = [None] * len(self.sources)
        self.target = buffers.slow[step.kernel.target.name]
        self.evicting: dict[int, Copy] = {}  # the copy of each of the result buffers
        self.last_copy: Copy | None = None
        self.result: Array = None

    def fetch(self, piece: Piece) -> list[Fetched]:
        """Begin to copy what the piece needs and is not there."""
        return [self._fetch_operand(number, region) for number, region in enumerate(piece.operands)]

    def _fetch_operand(self, number: int, region: Region) -> Fetched:
        source = self.sources[number]
        if number in self.step.inside:
            return source[(*_box(region), ...)], []
        known = self.fetched[number]
        if known is not None and known[0] == region:
            return known[1]
        dtype = self.step.kernel.operands[number].dtype
        array = self.operand_buffers[number].next(shape(region), dtype)
        self.buffers.fetched += array.nbytes
        copies = []
        for there, here in boxes(region, packed(region)):
            copy = self.buffers.backend.begin_copy(source[(*there, ...)], array[(*here, ...)])
            copies.append(copy)
        self.fetched[number] = region, (array, copies)
        return array, copies

    def compute_piece(self, piece: Piece, operands: list[Fetched], complete: bool) -> None:
        """Compute a piece, and begin to copy the result out if its part is complete."""
        backend = self.buffers.backend
        dtype = self.step.kernel.target.dtype
        for _, copies in operands:
            for copy in copies:
                copy.join()
            copies.clear()
        arrays = [array for array, _ in operands]
        extents = shape(piece.target)
        if piece.first:
            self.result = self.result_buffers.next(extents, dtype)
            if self.result_buffers.turn in self.evicting:
                self.evicting.pop(self.result_buffers.turn).join()
            backend.compute_kernel(piece.kernel, arrays, self.result)
        else:
            partial = self.partial_buffer.next(extents, dtype)
            backend.compute_kernel(piece.kernel, arrays, partial)
            aggregation = piece.kernel.einsum.aggregation
            assert aggregation is not None
            everything = tuple(map(whole, extents or (1,)))
            backend.combine(aggregation, self.result, everything, partial.reshape(-1))
        if complete:
            target = self.target[(*_box(piece.target), ...)]
            self.last_copy = backend.begin_copy(self.result, target)
            self.evicting[self.result_buffers.turn] = self.last_copy

    def finish(self) -> None:
        """Wait until the buffers are free. Whoever reads the target waits for the last copy."""
        for copy in self.evicting.values():
            copy.join()
        assert self.last_copy is not None
        self.buffers.evicting[self.step.kernel.target.name] = self.last_copy


def _box(region: Region) -> Box:
    """Return the slices of a region that has at most one run in each dimension."""
    slices = []
    for runs in region:
        slices.append(slice(*runs[0]) if runs else slice(0))
    return tuple(slices)


class _PieceBuffers:
    """Buffers for the pieces of one tensor, used in turn.

    They are as large as the first piece, which is the largest.
    """

    def __init__(self, buffers: Buffers, stack: ExitStack, count: int) -> None:
        self.buffers = buffers
        self.stack = stack
        self.count = count
        self.arrays: list[Array] = []
        self.turn = -1
        self.largest = 0

    def next(self, extents: tuple[int, ...], dtype: str) -> Array:
        """Return the buffer whose turn it is, in the shape of a piece."""
        size = prod(extents)
        self.largest = self.largest or size
        self.turn = (self.turn + 1) % self.count
        if self.turn == len(self.arrays):
            array = self.buffers.backend.allocate((self.largest,), dtype)
            self.arrays.append(self.stack.enter_context(self.buffers.counted(array)))
        return self.arrays[self.turn][:size].reshape(extents)
