"""The slots of a rank, in memory and in the slow tier, and how many bytes they and message buffers take at the most."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from einmpi.runtime.backend import Backend, Copy
from einmpi.schedule.steps import Slot


class Buffers:
    """A slot has an array in memory, in the slow tier, or in both. The one in memory is used where there is one."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.arrays: dict[str, Any] = {}  # in memory
        self.slow: dict[str, Any] = {}
        self.coming: dict[str, Copy] = {}  # from the slow tier, perhaps not yet whole
        self.leaving: dict[str, Copy] = {}  # to the slow tier, perhaps not yet whole
        self.outputs: dict[str, Slot] = {}  # the slots of outputs that are complete
        self.held = self.peak = 0  # bytes of memory
        self.spilled = self.fetched = 0  # bytes written to the slow tier, and copied from there

    def make(self, slot: Slot) -> Any:
        """The array of a slot; a new one, with any values, where there is none."""
        if slot.name in self:
            return self[slot]
        array = self.backend.allocate(slot.shape, slot.dtype)
        self.put(slot, array)
        return array

    def put(self, slot: Slot, array: Any) -> None:
        """An array in memory for a slot."""
        assert slot.name not in self.arrays
        self.arrays[slot.name] = array
        self._grow(array.nbytes)

    def free(self, slot: Slot) -> None:
        for copies in (self.coming, self.leaving):
            if slot.name in copies:
                copies.pop(slot.name).join()
        self.slow.pop(slot.name, None)
        if slot.name in self.arrays:
            self.held -= self.arrays.pop(slot.name).nbytes

    # ---- between memory and the slow tier ---------------------------------------------------------------------------

    def place(self, slot: Slot) -> None:
        """Make a slot in the slow tier."""
        assert slot.name not in self
        self.slow[slot.name] = self.backend.allocate_slow(slot.shape, slot.dtype)
        self.spilled += slot.nbytes

    def evict(self, slot: Slot) -> None:
        """Begin to copy a slot to the slow tier, over an older copy where there is one."""
        array = self[slot]
        if slot.name not in self.slow:
            self.slow[slot.name] = self.backend.allocate_slow(slot.shape, slot.dtype)
        self.leaving[slot.name] = self.backend.begin_copy(array, self.slow[slot.name])
        self.spilled += slot.nbytes

    def drop(self, slot: Slot) -> None:
        """Give up the memory of a slot that is in the slow tier."""
        for copies in (self.coming, self.leaving):
            if slot.name in copies:
                copies[slot.name].join()
        self.coming.pop(slot.name, None)
        self.held -= self.arrays.pop(slot.name).nbytes

    def fetch(self, slot: Slot) -> None:
        """Begin to copy a slot from the slow tier."""
        if slot.name in self.leaving:
            self.leaving[slot.name].join()
        self.put(slot, self.backend.allocate(slot.shape, slot.dtype))
        self.coming[slot.name] = self.backend.begin_copy(
            self.slow[slot.name], self.arrays[slot.name]
        )
        self.fetched += slot.nbytes

    # ---- messages ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stage(self, count: int, slot: Slot) -> Iterator[Any]:
        """A buffer of `count` elements for a message of a slot."""
        array = self.backend.allocate_message(count, slot.dtype, slow=slot.name not in self.arrays)
        with self.counted(array):
            yield array

    @contextlib.contextmanager
    def counted(self, array: Any) -> Iterator[Any]:
        """An array that is there for a while."""
        self._grow(array.nbytes)
        try:
            yield array
        finally:
            self.held -= array.nbytes

    def _grow(self, nbytes: int) -> None:
        self.held += nbytes
        if self.held > self.peak:
            self.peak = self.held

    # ---- reading ----------------------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self.arrays or name in self.slow

    def __getitem__(self, slot: Slot) -> Any:
        """The array of a slot, with its values."""
        if slot.name not in self.arrays:
            if slot.name in self.leaving:
                self.leaving.pop(slot.name).wait()
            return self.slow[slot.name]
        if slot.name in self.coming:
            self.coming.pop(slot.name).join()
        return self.arrays[slot.name]
