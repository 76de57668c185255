"""The arrays of a rank's slots, in memory and in the slow tier, and how many bytes they take."""

from __future__ import annotations

from einmpi.runtime.backend import Array, Backend, Copy, Tier
from einmpi.schedule.regions import Slot


class Buffers:
    """The arrays of slots.

    A slot has an array in memory, in the slow tier, or in both. The one in memory is used where
    there is one.
    """

    __slots__ = (
        "arrays",
        "backend",
        "bytes_in_use",
        "evicting",
        "fetched",
        "fetching",
        "peak",
        "shared",
        "slow",
        "spilled",
    )

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.arrays: dict[str, Array] = {}  # in memory
        self.slow: dict[str, Array] = {}  # in the slow tier
        self.fetching: dict[str, Copy] = {}  # from the slow tier, perhaps not complete yet
        self.evicting: dict[str, Copy] = {}  # to the slow tier, perhaps not complete yet
        self.bytes_in_use = 0  # of memory
        self.peak = 0  # the most of them so far
        self.spilled = 0  # bytes written to the slow tier
        self.fetched = 0  # bytes copied from there
        self.shared = backend.shared
        if self.shared.bytes_per_rank:
            self.grow(self.shared.bytes_per_rank)

    def make(self, slot: Slot) -> Array:
        """Return the array of a slot; create one in memory, with any values, if there is none."""
        if slot.name in self:
            return self[slot]
        if slot.name in self.shared.arrays and self.shared.is_free(slot):
            array = self.arrays[slot.name] = self.shared.arrays[slot.name]
            return array
        array = self.backend.allocate(slot.shape, slot.dtype)
        self.put(slot, array)
        return array

    def put(self, slot: Slot, array: Array) -> None:
        """Use an array as the memory of a slot."""
        assert slot.name not in self.arrays
        self.arrays[slot.name] = array
        self.grow(-(-array.nbytes // self.shared.ranks_sharing.get(slot.name, 1)))

    def shared_array(self, slot: Slot) -> Array:
        """Return the array of a slot that must be in memory which other ranks read."""
        array = self[slot]
        assert array is self.shared.arrays[slot.name], f"{slot} is not in shared memory"
        return array

    def reuse(self, slot: Slot, source: Slot) -> None:
        """Use the memory of another slot, which is counted already."""
        assert slot.name not in self
        self.arrays[slot.name] = self[source]

    def hand_over(self, slot: Slot, target: Slot) -> None:
        """Give the memory of a slot to another one. The slot has none from here on."""
        assert target.name not in self
        self.arrays[target.name] = self.arrays.pop(slot.name)

    def free(self, slot: Slot) -> None:
        """Give up both arrays of a slot."""
        for copies in (self.fetching, self.evicting):
            if slot.name in copies:
                copies.pop(slot.name).join()
        self.slow.pop(slot.name, None)
        if slot.name in self.arrays:
            array = self.arrays.pop(slot.name)
            if array is not self.shared.arrays.get(slot.name):
                self.shrink(array.nbytes)

    # ---- between memory and the slow tier -------------------------------------------------------

    def place(self, slot: Slot) -> None:
        """Create a slot in the slow tier."""
        assert slot.name not in self
        self.slow[slot.name] = self.backend.allocate(slot.shape, slot.dtype, "slow")
        self.spilled += slot.nbytes

    def evict(self, slot: Slot) -> None:
        """Begin to copy a slot to the slow tier, over an older copy if there is one."""
        array = self[slot]
        if slot.name not in self.slow:
            self.slow[slot.name] = self.backend.allocate(slot.shape, slot.dtype, "slow")
        self.evicting[slot.name] = self.backend.begin_copy(array, self.slow[slot.name])
        self.spilled += slot.nbytes

    def drop(self, slot: Slot) -> None:
        """Give up the memory of a slot that is in the slow tier."""
        for copies in (self.fetching, self.evicting):
            if slot.name in copies:
                copies[slot.name].join()
        self.fetching.pop(slot.name, None)
        self.shrink(self.arrays.pop(slot.name).nbytes)

    def fetch(self, slot: Slot) -> None:
        """Begin to copy a slot from the slow tier to memory."""
        if slot.name in self.evicting:
            self.evicting[slot.name].join()
        array = self.backend.allocate(slot.shape, slot.dtype)
        self.put(slot, array)
        self.fetching[slot.name] = self.backend.begin_copy(self.slow[slot.name], array)
        self.fetched += slot.nbytes

    # ---- messages -------------------------------------------------------------------------------

    def message_buffer(self, count: int, slot: Slot) -> CountedArray:
        """Lend a buffer of `count` elements for a message of a slot."""
        tier: Tier = "memory" if slot.name in self.arrays else "host"
        return CountedArray(self, self.backend.allocate((count,), slot.dtype, tier))

    def counted(self, array: Array) -> CountedArray:
        """Count the bytes of an array as long as a `with` block lasts."""
        return CountedArray(self, array)

    def grow(self, nbytes: int) -> None:
        """Count bytes of memory that are in use from here on."""
        self.bytes_in_use += nbytes
        if self.bytes_in_use > self.peak:
            self.peak = self.bytes_in_use

    def shrink(self, nbytes: int) -> None:
        """Count bytes of memory that are not in use any more."""
        self.bytes_in_use -= nbytes

    # ---- reading --------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self.arrays or name in self.slow

    def __getitem__(self, slot: Slot) -> Array:
        """Return the array of a slot, once its values are there."""
        if slot.name not in self.arrays:
            if slot.name in self.evicting:
                self.evicting.pop(slot.name).wait()
            return self.slow[slot.name]
        if slot.name in self.fetching:
            self.fetching.pop(slot.name).join()
        return self.arrays[slot.name]


class PartBuffers(Buffers):
    """Views of the arrays of slots, for a step on a part of them."""

    def __init__(self, whole: Buffers, views: dict[str, Array]) -> None:
        self.whole = whole
        super().__init__(whole.backend)
        self.arrays = views

    def grow(self, nbytes: int) -> None:
        self.whole.grow(nbytes)

    def shrink(self, nbytes: int) -> None:
        self.whole.shrink(nbytes)


class CountedArray:
    """An array whose bytes are counted in a `with` block."""

    def __init__(self, buffers: Buffers, array: Array) -> None:
        self.buffers = buffers
        self.array = array

    def __enter__(self) -> Array:
        self.buffers.grow(self.array.nbytes)
        return self.array

    def __exit__(self, *_: object) -> None:
        self.buffers.shrink(self.array.nbytes)
