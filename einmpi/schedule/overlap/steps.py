"""The steps of transfers that go on while kernels run: parts of a kernel, and waiting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from einmpi.schedule.blocked_updates import BlockedUpdate
from einmpi.schedule.passes import Piece
from einmpi.schedule.regions import Region, shape
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

    @property
    def output(self) -> tuple[str, ...]:
        return self.kernel.einsum.output

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
class UpdatePart(Step):
    """An update and the product that it adds, for some of the indices of one label."""

    kind = "kernel"

    update: BlockedUpdate  # the whole one
    of_product: Piece
    of_update: Piece
    label: str  # of the update
    start: int
    stop: int

    @property
    def vertex(self) -> str:
        return self.update.vertex

    @property
    def reads(self) -> Slots:
        return self.update.reads

    @property
    def writes(self) -> Slots:
        return self.update.writes

    @property
    def output(self) -> tuple[str, ...]:
        return self.update.update.einsum.output

    @cached_property
    def regions(self) -> dict[Slot, Region]:
        """The part of each slot; none is read twice."""
        found: dict[Slot, Region] = {}
        own = self.update
        pairs = [*zip(own.product.operands, self.of_product.operands, strict=True)]
        pairs += zip(own.update.operands, self.of_update.operands, strict=True)
        for slot, region in pairs:
            found[slot] = region if slot.shape else super().region_read(slot)
        found[own.update.target] = self.of_update.target
        return found

    @cached_property
    def part(self) -> BlockedUpdate:
        """The same on slots that have the extents of the part."""
        product = self._with_slots(self.update.product, self.of_product)
        return BlockedUpdate(product, self._with_slots(self.update.update, self.of_update))

    def _with_slots(self, kernel: Kernel, piece: Piece) -> Kernel:
        target = replace(kernel.target, shape=shape(piece.target))
        operands = []
        for slot, region in zip(kernel.operands, piece.operands, strict=True):
            operands.append(replace(slot, shape=shape(region)) if slot.shape else slot)
        return replace(piece.kernel, target=target, operands=tuple(operands))

    def region_read(self, slot: Slot) -> Region:
        return self.regions[slot]

    def region_written(self, slot: Slot) -> Region:
        return self.regions[slot]

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return self.part.kernels

    @property
    def working_bytes(self) -> int:
        return self.part.working_bytes

    def fills(self) -> Iterator[tuple[Slot, Region]]:
        yield self.update.update.target, self.of_update.target

    def __str__(self) -> str:
        return f"{self.update} for {self.label} = {self.start}:{self.stop}"


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
