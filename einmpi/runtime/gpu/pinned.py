"""Pinned host memory: memory that a GPU copies from and to while the host goes on.

Pinned memory cannot be swapped out and takes long to allocate, so blocks are used again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt


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
