"""Pinned memory of the host, which a GPU copies from and to while the host goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np


class PinnedMemory:
    """Blocks that are used again when nobody refers to them any more and the copies that were begun are done: the host
    would write over what a GPU still reads."""

    def __init__(self, cuda: Any, begun: Callable[[], list[Any]]) -> None:
        self.cuda, self.begun = (
            cuda,
            begun,
        )  # `begun` gives events after which all copies so far are done
        self.idle: dict[
            int, list[tuple[list[Any], Any]]
        ] = {}  # by size: what to wait for, and the block

    def array(self, nbytes: int, most: int | None = None) -> np.ndarray | None:
        """Bytes in a block that was used before, or in a new one; None for a new one above `most` bytes, or where the
        system gives no more."""
        for number, (events, block) in enumerate(self.idle.get(nbytes, ())):
            if all(event.done for event in events):
                del self.idle[nbytes][number]
                return self._lent(nbytes, block)
        if most is not None and nbytes > most:
            return None
        try:
            return self._lent(nbytes, self.cuda.alloc_pinned_memory(max(nbytes, 1)))
        except self.cuda.runtime.CUDARuntimeError:
            return None

    def _lent(self, nbytes: int, block: Any) -> np.ndarray:
        array = np.frombuffer(block, np.uint8, nbytes)
        # Views keep the array alive, so it goes with the last of them. Not at the end of the process: CUDA may be gone.
        weakref.finalize(array, self._back, nbytes, block).atexit = False
        return array

    def _back(self, nbytes: int, block: Any) -> None:
        self.idle.setdefault(nbytes, []).append((self.begun(), block))
