"""The slots of a rank, and how many bytes they and message buffers take at the most."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from einmpi.runtime.backend import Backend
from einmpi.schedule.steps import Slot


class Buffers:
    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.arrays: dict[str, Any] = {}
        self.held = self.peak = 0

    def make(self, slot: Slot) -> Any:
        """The array of a slot; a new one, with any values, where there is none."""
        if slot.name not in self.arrays:
            self.put(slot, self.backend.allocate(slot.shape, slot.dtype))
        return self.arrays[slot.name]

    def put(self, slot: Slot, array: Any) -> None:
        assert slot.name not in self.arrays
        self.arrays[slot.name] = array
        self._grow(array.nbytes)

    def free(self, slot: Slot) -> None:
        self.held -= self.arrays.pop(slot.name).nbytes

    @contextlib.contextmanager
    def stage(self, count: int, dtype: str) -> Iterator[Any]:
        """A buffer of `count` elements for a message."""
        array = self.backend.allocate((count,), dtype)
        self._grow(array.nbytes)
        try:
            yield array
        finally:
            self.held -= array.nbytes

    def _grow(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def __getitem__(self, slot: Slot) -> Any:
        return self.arrays[slot.name]
