"""What all steps of a schedule answer, and the kernel, the step that computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from einmpi.graph.einsum import EinSum
from einmpi.schedule.regions import Region, Runs, Slot, Slots, length, names_of, whole
from einmpi.schedule.transfers import Transfer


def whole_region(slot: Slot) -> Region:
    """Return the region of all elements of a slot; a number is a vector of one element."""
    return tuple(map(whole, slot.shape or (1,)))


@dataclass(frozen=True)
class Step(ABC):
    """What all steps answer. Each kind of step has a vertex; other answers are empty by default."""

    kind: ClassVar[str] = ""  # what reports call it; they leave out steps without a kind
    # Whether it concerns the memory of this rank alone. All other steps are the same on all
    # ranks of the mesh, in the same order.
    manages_memory: ClassVar[bool] = False
    in_passes: ClassVar[bool] = False  # whether it computes piece by piece, in the slow tier

    @property
    @abstractmethod
    def vertex(self) -> str:
        """The vertex, computed or input, that it is about."""

    @property
    def reads(self) -> Slots:
        """The slots whose values it uses."""
        return ()

    @property
    def writes(self) -> Slots:
        """The slots whose values it creates or changes."""
        return ()

    def region_read(self, slot: Slot) -> Region:
        """Return which elements it uses of a slot that it reads."""
        return whole_region(slot)

    def region_written(self, slot: Slot) -> Region:
        """Return which elements it may create or change of a slot that it writes."""
        return whole_region(slot)

    def allocates(self, slow: Container[str] = ()) -> Slots:
        """Return the slots that must have an array in memory from here on.

        `slow` names the slots that have an array in the slow tier: those are written there.
        """
        return tuple(slot for slot in self.writes if slot.name not in slow)

    @property
    def reuses(self) -> Slots:
        """The slots that take the memory of an input."""
        return ()

    @property
    def frees(self) -> Slots:
        """The slots that are not used afterwards."""
        return ()

    @property
    def keeps(self) -> Slots:
        """The slots that must never be freed: outputs, and inputs that stay between runs."""
        return ()

    # What does not fit into memory: the arrays of slots are in memory, in the slow tier
    # (docs/architecture.md), or in both.

    @property
    def places(self) -> Slots:
        """The slots that it creates in the slow tier, without values."""
        return ()

    @property
    def evicts(self) -> Slots:
        """The slots that it copies to the slow tier."""
        return ()

    @property
    def drops(self) -> Slots:
        """The slots that lose their memory and keep their values in the slow tier."""
        return ()

    @property
    def fetches(self) -> Slots:
        """The slots that it copies from the slow tier to memory."""
        return ()

    # How much work it is.

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels that it computes."""
        return ()

    @property
    def transfer(self) -> Transfer | None:
        """The messages that it sends and receives."""
        return None

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks among which it moves data."""
        return ()

    @property
    def nbytes(self) -> int:
        """The bytes that it loads, stores, receives, or copies between memory and slow tier."""
        return 0

    @property
    def working_bytes(self) -> int:
        """The most memory that it needs in addition to its slots: for messages, or for pieces."""
        return 0

    @property
    def background(self) -> bool:
        """Whether it is a transfer during which later steps go on."""
        return False

    @property
    def awaited(self) -> Step | None:
        """The transfer in the background that it waits for, with all that began before it."""
        return None

    # How it fills slots.

    @property
    def completes_slot(self) -> bool:
        """Whether it adds elements to a slot that other steps fill too."""
        return False

    def fills(self) -> Iterator[tuple[Slot, Region]]:
        """Yield the places to which it writes new elements; a place may be empty."""
        yield from ()


@dataclass(frozen=True)
class Kernel(Step):
    """Compute this rank's share of a vertex."""

    kind = "kernel"

    tensor: str
    target: Slot
    operands: tuple[Slot, ...]
    einsum: EinSum  # with the extents that this rank has
    index: tuple[tuple[str, Runs], ...]  # indices that a label used as a number has on this rank
    select: tuple[tuple[int, int, Runs], ...]  # (operand, dimension, what to take of it)
    # The vertex with its place in the program, for messages.
    located_name: str = field(default="", compare=False)

    @property
    def vertex(self) -> str:
        return self.tensor

    @property
    def reads(self) -> Slots:
        return self.operands

    @property
    def writes(self) -> Slots:
        return (self.target,)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return (self,)

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        """The dtype of each operand."""
        return tuple([slot.dtype for slot in self.operands])

    def fills(self) -> Iterator[tuple[Slot, Region]]:
        yield self.target, tuple(map(whole, self.target.shape))

    def restricted_to(self, runs: Mapping[str, Runs]) -> Kernel:
        """Return the kernel for these indices of some labels only."""
        extents = []
        for label, extent in self.einsum.extents:
            extents.append((label, length(runs[label]) if label in runs else extent))
        index = dict(self.index)
        for label, indices in runs.items():
            if label in self.einsum.labels_as_numbers:
                index[label] = indices
        einsum = replace(self.einsum, extents=tuple(extents))
        return replace(self, einsum=einsum, index=tuple(index.items()))

    def assignment(self) -> str:
        """Return the text Z[8, 8] ← sum(A[i,j] * B[j,k])."""
        return f"{self.target} ← {self.einsum.summary(names_of(self.operands))}"

    def __str__(self) -> str:
        return f"kernel    {self.assignment()}"


# ---- memory steps --------------------------------------------------------------------------------
#
# The steps that concern the arrays of a slot, in memory and in the slow tier, not its values.


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
