"""One block of memory for all that a run allocates: every run has it at the same addresses.

The places in the block are found in a run that is recorded.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

MemoryPointer: TypeAlias = Any  # cupy.cuda.MemoryPointer
Allocator: TypeAlias = Callable[[int], MemoryPointer]

ALIGNMENT = 512  # of all memory that CuPy allocates


class LayoutChanged(Exception):
    """A run allocates something else than the run that was recorded."""


class Place(NamedTuple):
    """An allocation, and where it is in the block."""

    nbytes: int
    offset: int


class ArenaLayout:
    """Where allocations go in a block: a place is used again once its memory is released."""

    def __init__(self) -> None:
        self.total = 0  # bytes of the block
        self.in_use = 0
        self.most_in_use = 0
        self.gaps: list[tuple[int, int]] = []  # (offset, bytes), in order, never adjacent

    def take(self, nbytes: int) -> int:
        """Return the offset of a new allocation, in the smallest gap that has room for it."""
        size = aligned(nbytes)
        self.in_use += size
        self.most_in_use = max(self.most_in_use, self.in_use)
        fitting = [(length, offset) for offset, length in self.gaps if length >= size]
        if fitting:
            length, offset = min(fitting)
            self.gaps.remove((offset, length))
            if length > size:
                insort(self.gaps, (offset + size, length - size))
            return offset
        offset = self.total
        if self.gaps and sum(self.gaps[-1]) == self.total:
            offset, _ = self.gaps.pop()  # the last gap grows
        self.total = offset + size
        return offset

    def release(self, place: Place) -> None:
        """Let the place of an allocation be used again."""
        offset = place.offset
        length = aligned(place.nbytes)
        self.in_use -= length
        for other_offset, other_length in list(self.gaps):
            if other_offset + other_length == offset:
                self.gaps.remove((other_offset, other_length))
                offset = other_offset
                length += other_length
            elif offset + length == other_offset:
                self.gaps.remove((other_offset, other_length))
                length += other_length
        insort(self.gaps, (offset, length))


def aligned(nbytes: int) -> int:
    """Return how much memory an allocation takes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class _Recorded:
    """Memory of CuPy's pool, with the place that stands for it; collected with its array."""

    def __init__(self, layout: ArenaLayout, place: Place, memory: MemoryPointer) -> None:
        self.memory = memory
        # At the end of the process nothing is released.
        weakref.finalize(self, layout.release, place).atexit = False


def recording_allocator(
    cuda: Any, device: int, layout: ArenaLayout, places: list[Place]
) -> Allocator:
    """Return an allocator that takes memory as usual, and appends to `places` where it would be."""
    allocate_as_usual = cuda.get_allocator()

    def allocate(nbytes: int) -> MemoryPointer:
        memory = allocate_as_usual(nbytes)
        if nbytes == 0:
            return memory
        place = Place(nbytes, layout.take(nbytes))
        places.append(place)
        owner = _Recorded(layout, place, memory)
        return cuda.MemoryPointer(cuda.UnownedMemory(memory.ptr, nbytes, owner, device), 0)

    return allocate


def placing_allocator(cuda: Any, device: int, address: int, places: list[Place]) -> Allocator:
    """Return an allocator that gives out these places of a block, in their order.

    Whoever uses the allocator keeps the block.
    """
    allocate_as_usual = cuda.get_allocator()
    following = iter(places)

    def allocate(nbytes: int) -> MemoryPointer:
        if nbytes == 0:
            return allocate_as_usual(nbytes)
        place = next(following, None)
        if place is None or place.nbytes != nbytes:
            raise LayoutChanged
        memory = cuda.UnownedMemory(address + place.offset, nbytes, places, device)
        return cuda.MemoryPointer(memory, 0)

    return allocate
