"""The steps that concern the arrays of a slot, in memory and in the slow tier, not its values."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from einmpi.schedule.slots import Slot, Slots
from einmpi.schedule.step import Step


@dataclass(frozen=True)
class SlotStep(Step):
    """A step that concerns the arrays of one slot, not its values."""

    manages_memory = True

    slot: Slot

    @property
    def vertex(self) -> str:
        return self.slot.tensor

    def __str__(self) -> str:
        return f"{type(self).__name__.lower():<10}{self.slot}"


class Free(SlotStep):
    """The slot is not used any more."""

    @property
    def frees(self) -> Slots:
        return (self.slot,)


class Place(SlotStep):
    """Create the slot in the slow tier; later steps fill it there."""

    @property
    def places(self) -> Slots:
        return (self.slot,)

    def __str__(self) -> str:
        return f"{super().__str__()} outside"


class Evict(SlotStep):
    """Begin to copy a slot to the slow tier. It stays in memory, read-only, until it is dropped."""

    kind = "spill"

    @property
    def evicts(self) -> Slots:
        return (self.slot,)

    @property
    def nbytes(self) -> int:
        return self.slot.nbytes


class Drop(SlotStep):
    """Give up the slot's memory: its values are in the slow tier."""

    kind = "spill"  # it waits for the copy; the bytes are counted with Evict

    @property
    def drops(self) -> Slots:
        return (self.slot,)


class Fetch(SlotStep):
    """Begin to copy a slot from the slow tier to memory. Steps that read it wait for the copy."""

    kind = "spill"

    @property
    def fetches(self) -> Slots:
        return (self.slot,)

    def allocates(self, slow: Container[str] = ()) -> Slots:
        return (self.slot,)

    @property
    def nbytes(self) -> int:
        return self.slot.nbytes


@dataclass(frozen=True)
class Reuse(SlotStep):
    """The slot takes the memory of an input whose last use is before the slot is written, or just
    then, element by element. If a checked number is nan, the slot
    gets memory of its own, and the input stays."""

    source: Slot
    nan_checked: tuple[Slot, ...] = ()  # numbers

    @property
    def reuses(self) -> Slots:
        return (self.slot,)

    def __str__(self) -> str:
        return f"{super().__str__()} in place of {self.source}"
