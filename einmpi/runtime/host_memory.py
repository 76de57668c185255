"""Arrays in memory of the host. That of large ones is used again, since new memory costs a page
fault for every few kilobytes, which can take longer than to compute what is written there."""

from __future__ import annotations

import ctypes
import sys
import threading
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

HostArray: TypeAlias = npt.NDArray[Any]
Memory: TypeAlias = npt.NDArray[np.uint8]

ALIGNMENT = 64  # bytes: equal alignment on all ranks, so that equal work gives equal bits
MOST_BYTES_OF_SMALL_ARRAY = 2**12
ARRAYS_ALLOCATED_TOGETHER = 4
MIN_RECYCLED_BYTES = 2**16  # of an array: the allocator may return larger ones to the system


def aligned_empty(shape: tuple[int, ...], dtype: str | np.dtype[Any]) -> HostArray:
    """Return a new array with any values, aligned like those of all ranks."""
    kind = np.dtype(dtype)
    return _array_in(np.empty(prod(shape) * kind.itemsize + ALIGNMENT, np.uint8), shape, kind)


def _array_in(memory: Memory, shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostArray:
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory.data))  # faster than `address_of`
    return np.ndarray(shape, dtype, memory, -address % ALIGNMENT)


class SmallArrays:
    """New small arrays of one shape, for one caller at a time. Several are allocated together.

    An array keeps the memory of those that were allocated with it.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape = (ARRAYS_ALLOCATED_TOGETHER, *shape)
        self.dtype = dtype
        nbytes = max(1, prod(shape) * dtype.itemsize)
        self.distance = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.strides = (self.distance, *np.empty(shape, dtype).strides)
        self.ready: list[HostArray] = []

    def take(self) -> HostArray:
        """Return an array with any values, as `aligned_empty` does."""
        if not self.ready:
            self._allocate()
        return self.ready.pop()

    def _allocate(self) -> None:
        memory = aligned_empty((ARRAYS_ALLOCATED_TOGETHER * self.distance,), np.dtype(np.uint8))
        arrays = np.ndarray(self.shape, self.dtype, memory, 0, self.strides)
        for number in range(ARRAYS_ALLOCATED_TOGETHER):
            self.ready.append(arrays[number, ...])  # an array, even without dimensions


class RecycledMemory:
    """The memory of large arrays. It is in use as long as there is an array in it, or a view.

    What is not in use any more is used for the next array of the same size. There is never more
    memory than was in use at once.
    """

    def __init__(self) -> None:
        self.blocks: list[Memory] = []  # the one that was made or used last comes last
        self.most_in_use = 0  # bytes
        self.idle_references = _references_of_idle_block()
        self.lock = threading.Lock()

    def array(self, shape: tuple[int, ...], dtype: str) -> HostArray:
        """Return an array like `aligned_empty`, in memory that was used before if there is any."""
        kind = np.dtype(dtype)
        nbytes = prod(shape) * kind.itemsize
        if nbytes < MIN_RECYCLED_BYTES:
            return aligned_empty(shape, dtype)
        return _array_in(self.take(nbytes + ALIGNMENT), shape, kind)

    def take(self, nbytes: int) -> Memory:
        """Return idle memory of this size, or new memory where there is none."""
        with self.lock:  # transfers in the background take memory too
            return self._take(nbytes)

    def _take(self, nbytes: int) -> Memory:
        idle = []
        in_use = nbytes
        for position in range(len(self.blocks)):
            if sys.getrefcount(self.blocks[position]) == self.idle_references:
                idle.append(position)
            else:
                in_use += self.blocks[position].nbytes
        self.most_in_use = max(self.most_in_use, in_use)
        for position in idle:
            if self.blocks[position].nbytes == nbytes:
                self.blocks.append(self.blocks.pop(position))
                return self.blocks[-1]
        self._release_idle(idle, self.most_in_use - in_use)
        self.blocks.append(np.empty(nbytes, np.uint8))
        return self.blocks[-1]

    def _release_idle(self, idle: list[int], most: int) -> None:
        """Give up idle blocks, those used long ago first, until they have at most `most` bytes."""
        total = sum(self.blocks[position].nbytes for position in idle)
        released = []
        for position in idle:
            if total > most:
                total -= self.blocks[position].nbytes
                released.append(position)
        for position in reversed(released):
            del self.blocks[position]

    def release(self) -> None:
        """Give up all memory; what is in use stays with its arrays."""
        self.blocks.clear()
        self.most_in_use = 0


def _references_of_idle_block() -> int:
    """Return how many references `sys.getrefcount` counts for a block that only a list has."""
    blocks = [np.empty(0, np.uint8)]
    return sys.getrefcount(blocks[0])
