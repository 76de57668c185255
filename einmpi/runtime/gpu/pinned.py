"""Pinned host memory: memory that a GPU copies from and to while the host goes on.

Pinned memory cannot be swapped out and takes long to allocate, so blocks are used again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.kernels.prepared import address_of

HostArray: TypeAlias = npt.NDArray[Any]

# Copies of smaller arrays take so little that they need not be pinned where they are.
MIN_PINNED_IN_PLACE_BYTES = 2**20
PORTABLE = 1  # a flag of CUDA: the memory is pinned for all GPUs


class PinnedMemory:
    """Blocks of pinned memory.

    A block is used again when nothing refers to it any more and all copies that were begun by then
    are done. Otherwise the host would overwrite what a GPU still reads.

    `begun_copies` returns events after which all copies begun so far are done.
    """

    def __init__(self, cuda: Any, begun_copies: Callable[[], list[Any]]) -> None:
        self.cuda = cuda
        self.begun_copies = begun_copies
        # By size: the events to wait for, and the block.
        self.unused: dict[int, list[tuple[list[Any], Any]]] = {}

    def array(self, nbytes: int, limit: int | None = None) -> npt.NDArray[np.uint8] | None:
        """Return an array of bytes in pinned memory.

        Return None if that takes a new block of more than `limit` bytes, or if the system has no
        more pinned memory.
        """
        for number, (events, block) in enumerate(self.unused.get(nbytes, ())):
            if all(event.done for event in events):
                del self.unused[nbytes][number]
                return self._array_on(nbytes, block)
        if limit is not None and nbytes > limit:
            return None
        try:
            block = self.cuda.alloc_pinned_memory(max(nbytes, 1))
        except self.cuda.runtime.CUDARuntimeError:
            return None
        return self._array_on(nbytes, block)

    def _array_on(self, nbytes: int, block: Any) -> npt.NDArray[np.uint8]:
        array = np.frombuffer(block, np.uint8, nbytes)
        # Views keep the array alive, so it is collected after the last of them. At the end of the
        # process nothing is given back, because CUDA may be gone by then.
        weakref.finalize(array, self._give_back, nbytes, block).atexit = False
        return array

    def _give_back(self, nbytes: int, block: Any) -> None:
        self.unused.setdefault(nbytes, []).append((self.begun_copies(), block))


@dataclass
class _GivenArray:
    """An array of the caller that owns its memory."""

    address: int
    nbytes: int
    first_run: object  # in which it was given
    is_pinned: bool | None = None  # None: not tried yet


class PinnedInPlace:
    """The memory of arrays that callers give again and again, pinned where it is.

    Pinning takes longer than one copy, so it is done when an array is given a second time. The
    memory is pinned until the array is collected.
    """

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        self.given: dict[int, _GivenArray] = {}  # by the id of the array that owns the memory
        self.nbytes = 0  # pinned now

    def is_pinned(self, array: HostArray, run: object, limit: int) -> bool:
        """Return whether a GPU can copy an array from where it is; pin it if it is given again.

        `run` is the run in which it is given. No more than `limit` bytes are pinned in all.
        """
        owner = _owner_of(array)
        if owner is None or owner.nbytes < MIN_PINNED_IN_PLACE_BYTES:
            return False
        address = address_of(owner)
        known = self.given.get(id(owner))
        if known is None:
            self.given[id(owner)] = _GivenArray(address, owner.nbytes, run)
            # At the end of the process CUDA may be gone before the array.
            weakref.finalize(owner, self._forget, id(owner)).atexit = False
            return False
        has_moved = (known.address, known.nbytes) != (address, owner.nbytes)
        if known.first_run is run or has_moved:
            return False
        if known.is_pinned is None:
            known.is_pinned = self._pin(known, limit)
        return known.is_pinned

    def _pin(self, given: _GivenArray, limit: int) -> bool:
        if self.nbytes + given.nbytes > limit:
            return False
        try:
            self.runtime.hostRegister(given.address, given.nbytes, PORTABLE)
        except self.runtime.CUDARuntimeError:
            return False  # such as memory that is pinned already, or that of a file
        self.nbytes += given.nbytes
        return True

    def _forget(self, identity: int) -> None:
        given = self.given.pop(identity)
        if given.is_pinned:
            self.runtime.hostUnregister(given.address)
            self.nbytes -= given.nbytes


def _owner_of(array: HostArray) -> HostArray | None:
    """Return the array that owns the memory of a view; None if the memory is not numpy's."""
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return owner if type(owner) is np.ndarray and owner.flags.owndata else None
