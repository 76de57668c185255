"""The steps of transfers that go on while kernels run: parts of a kernel, and waiting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from einmpi.schedule.passes import Piece
from einmpi.schedule.regions import Region
from einmpi.schedule.slots import Slot, Slots
from einmpi.schedule.step import Kernel, Step
from einmpi.schedule.steps import Exchange, Reduce


@dataclass(frozen=True)
class KernelPart(Step):
    """A kernel for some of the indices of one label of its output.

    It needs only a part of what is on its way, and what it has computed can be sent at once.
    """

    kind = "kernel"

    kernel: Kernel  # the whole one
    piece: Piece
    label: str
    start: int
    stop: int

    @property
    def vertex(self) -> str:
        return self.kernel.vertex

    @property
    def reads(self) -> Slots:
        return self.kernel.operands

    @property
    def writes(self) -> Slots:
        return self.kernel.writes

    def region_read(self, slot: Slot) -> Region:
        found = super().region_read(slot)
        for operand, region in zip(self.kernel.operands, self.piece.operands, strict=True):
            # An operand that is read twice, by different indices, is read as a whole.
            if operand == slot and self.kernel.operands.count(slot) == 1 and slot.shape:
                found = region
        return found

    def region_written(self, slot: Slot) -> Region:
        return self.piece.target if slot.shape else super().region_written(slot)

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        return (self.piece.kernel,)

    def fills(self) -> Iterator[tuple[Slot, Region]]:
        yield self.kernel.target, self.piece.target

    def __str__(self) -> str:
        return f"{self.kernel} for {self.label} = {self.start}:{self.stop}"


@dataclass(frozen=True)
class Await(Step):
    """Wait for a transfer in the background, and for all that began before it."""

    kind = "wait"
    manages_memory = True

    moving: Exchange | Reduce

    @property
    def vertex(self) -> str:
        return self.moving.vertex

    @property
    def awaited(self) -> Step:
        return self.moving

    def __str__(self) -> str:
        (slot,) = self.moving.writes
        place = "" if self.moving.part is None else f" at {self.moving.part}"
        return f"await     {slot}{place}"
