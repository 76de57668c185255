"""The steps of a rank's schedule, but for those that compute. A step holds all that is needed to
carry it out, says which slots it reads, writes and frees, and prints as one line."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from einmpi.graph.eingraph import Known
from einmpi.planner import memory
from einmpi.schedule.layout import Layout
from einmpi.schedule.regions import (
    Region,
    Runs,
    Slot,
    Slots,
    elements,
    indices,
    show_region,
    whole,
)
from einmpi.schedule.transfers import Cut, Moves, Part
from einmpi.units import show_bytes

if TYPE_CHECKING:
    from einmpi.schedule.compute import Kernel

AnyStep = TypeVar("AnyStep", bound="Step")

MESSAGE_BUFFER_BYTES = memory.MESSAGE_BUFFER_BYTES

# What happens to a slot in memory and in the slow tier (docs/architecture.md).
SpillAction: TypeAlias = Literal["place", "evict", "drop", "fetch"]


def whole_region(slot: Slot) -> Region:
    """Return the region of all elements of a slot; a number is a vector of one element."""
    return tuple(map(whole, slot.shape or (1,)))


@dataclass(frozen=True)
class Step(ABC):
    """What all steps answer. Each kind of step has a vertex; other answers are empty by default."""

    name: ClassVar[str] = ""  # what reports call it; they leave out steps without a name
    # Whether it concerns the memory of this rank alone. All other steps are the same on all
    # ranks of the mesh, in the same order.
    manages_memory: ClassVar[bool] = False
    # Where it goes if kernels before and after it are computed together: if empty, they are not.
    when_fused: ClassVar[Literal["", "before", "between", "after"]] = ""

    @property
    def kind(self) -> str:
        """What reports call it."""
        return self.name

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

    def region_of(self, slot: Slot) -> Region:
        """Return which elements it uses, creates or changes of a slot that it reads or writes."""
        return whole_region(slot)

    def allocates(self, slow: Container[str] = ()) -> Slots:
        """Return the slots that must have an array in memory from here on.

        `slow` names the slots that have an array in the slow tier: those are written there.
        """
        return tuple(slot for slot in self.writes if slot.name not in slow)

    @property
    def reuses(self) -> Slots:
        """The slots that take the memory of an input."""
        return tuple([reuse.slot for reuse in self.reuse_steps])

    @property
    def reuse_steps(self) -> tuple[Reuse, ...]:
        """The steps that give slots the memory of an input: itself, or those inside of it."""
        return ()

    @property
    def begins(self) -> tuple[Begin, ...]:
        """The steps that begin to load: itself, or those inside of it."""
        return ()

    @property
    def frees(self) -> Slots:
        """The slots that are not used afterwards."""
        return ()

    @property
    def inner(self) -> Collection[Slot]:
        """The slots that are used inside of it only."""
        return ()

    @property
    def keeps(self) -> Slots:
        """The slots that must never be freed: outputs, and inputs that stay between runs."""
        return ()

    def spills(self, *actions: SpillAction) -> Slots:
        """Return the slots to which one of these happens."""
        return ()

    # How much work it is.

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels that it computes."""
        return ()

    @property
    def only_kernel(self) -> Kernel | None:
        """Its kernel, if it is nothing but one kernel, on whole slots."""
        return None

    def innermost(self) -> Iterator[tuple[Step, int]]:
        """Yield the steps that it repeats, or itself, and how often each is done."""
        yield self, 1

    def with_repeated(self, change: Callable[[tuple[Step, ...]], tuple[Step, ...]]) -> Step:
        """Return it with the steps that it repeats changed, if there are any."""
        return self

    @property
    def work(self) -> Iterator[tuple[Kernel, int]]:
        """The kernels that it computes, or that steps inside of it do, and how often."""
        for step, times in self.innermost():
            for kernel in step.kernels:
                yield kernel, times

    @property
    def computes(self) -> bool:
        """Whether it computes anything, from slots in memory if they fit."""
        return bool(self.kernels)

    @property
    def is_out_of_core(self) -> bool:
        """Whether it computes tiles from operands in the slow tier to a target there."""
        return False

    @property
    def transfer(self) -> Moves | None:
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
        """The most memory that it needs in addition to its slots: for messages, or for tiles."""
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

    # How passes change it.

    def inside_group(self) -> Step:
        """Return it as it is if kernels before and after it are computed together."""
        return self


# ---- memory --------------------------------------------------------------------------------------
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

    when_fused = "between"

    @property
    def frees(self) -> Slots:
        return (self.slot,)


@dataclass(frozen=True)
class Reuse(SlotStep):
    """The slot takes the memory of an input whose last use is before the slot is written, or just
    then, element by element. If a checked number is nan, the slot
    gets memory of its own, and the input stays."""

    when_fused = "between"

    source: Slot
    nan_checked: tuple[Slot, ...] = ()  # numbers

    @property
    def reuse_steps(self) -> tuple[Reuse, ...]:
        return (self,)

    def __str__(self) -> str:
        return f"{super().__str__()} in place of {self.source}"


@dataclass(frozen=True)
class Spill(SlotStep):
    """Move a slot between memory and the slow tier.

    - place: create it in the slow tier; later steps fill it there.
    - evict: begin to copy it to the slow tier. It stays in memory, read-only, until it is dropped.
    - drop: give up its memory, when the copy is complete.
    - fetch: begin to copy it from the slow tier to memory. Steps that read it wait for the copy.
    """

    action: SpillAction

    @property
    def kind(self) -> str:
        return "" if self.action == "place" else "spill"

    def spills(self, *actions: SpillAction) -> Slots:
        return (self.slot,) if self.action in actions else ()

    def allocates(self, slow: Container[str] = ()) -> Slots:
        return (self.slot,) if self.action == "fetch" else ()

    @property
    def nbytes(self) -> int:
        return self.slot.nbytes if self.action in ("evict", "fetch") else 0

    def __str__(self) -> str:
        place = " outside" if self.action == "place" else ""
        return f"{self.action:<10}{self.slot}{place}"


# ---- data ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorStep(Step):
    """A step about the values of a tensor."""

    tensor: str

    @property
    def vertex(self) -> str:
        return self.tensor


@dataclass(frozen=True)
class Numbers:
    """The indices in a region of a list that is known, as places among those that a rank has."""

    known: Known
    region: Region
    indices: Runs

    @cached_property
    def values(self) -> npt.NDArray[Any]:
        """An array like the region."""
        listed = self.known.values[np.ix_(*map(indices, self.region))]
        return np.searchsorted(indices(self.indices), listed).astype(listed.dtype)


@dataclass(frozen=True)
class Load(TensorStep):
    """Fill a part of a slot with a region of an input.

    All ranks of the mesh have this step, even with nothing to load: from a file they may read it
    together. A list of indices may be numbered anew.
    """

    name = "load"
    when_fused = "before"

    slot: Slot
    region: Region  # of the tensor
    place: Region  # in the slot
    layout: Layout  # the regions of all ranks
    kept: bool = False  # the input stays on the rank between runs
    overwritten: bool = False  # a later step writes over it
    numbers: Numbers | None = None

    @property
    def writes(self) -> Slots:
        return (self.slot,)

    @property
    def keeps(self) -> Slots:
        return (self.slot,) if self.kept else ()

    @property
    def nbytes(self) -> int:
        return _region_bytes(self.region, self.slot)

    @property
    def completes_slot(self) -> bool:
        return True

    def __str__(self) -> str:
        numbered = "" if self.numbers is None else ", numbered anew"
        return f"load      {self.slot} ← {show_region(self.region)} of {self.tensor}{numbered}"


@dataclass(frozen=True)
class Begin(Step):
    """From here on there is memory for a later Load: a file can be read while kernels run."""

    name = "load"
    manages_memory = True
    when_fused = "between"

    load: Load

    @property
    def vertex(self) -> str:
        return self.load.tensor

    @property
    def begins(self) -> tuple[Begin, ...]:
        return (self,)

    def allocates(self, slow: Container[str] = ()) -> Slots:
        return self.load.allocates(slow)

    def __str__(self) -> str:
        return f"begin     {self.load.slot} ← {self.load.tensor}"


@dataclass(frozen=True)
class Transfer(TensorStep):
    """Move elements of a tensor among a group of ranks.

    Without an aggregation, the target's block is built from the blocks of the group. With one, each
    member gets its piece of what they all have partial results of, aggregated. In place where
    source and target are one slot.
    """

    source: Slot
    target: Slot
    moves: Moves
    buffer_bytes: int = MESSAGE_BUFFER_BYTES  # of one message buffer; the same on all members
    aggregation: str | None = None
    cut: Cut | None = None  # how all members do it in parts, if they do
    part: Part | None = None  # if this is one of the parts
    background: bool = False  # later steps go on meanwhile, until one awaits it
    # Halo buffers, if the block stays where it is: for each member, the slot of its message.
    arriving: tuple[Slot | None, ...] = ()
    number: int = -1  # among the steps as they were lowered
    # The rows that each member sends in fact, where the values decide: all together are as many.
    counts: Slot | None = None

    @property
    def kind(self) -> str:
        return "exchange" if self.aggregation is None else "reduce"

    @property
    def reads(self) -> Slots:
        is_added = self.aggregation is not None and self.source != self.target
        counts = () if self.counts is None else (self.counts,)
        return (self.source, self.target) if is_added else (self.source, *counts)

    @property
    def writes(self) -> Slots:
        if self.arriving:
            return tuple(slot for slot in self.arriving if slot is not None)
        return (self.target,)

    def region_of(self, slot: Slot) -> Region:
        everything = whole_region(slot)
        return everything if self.part is None else self.part.of_region(everything)

    def in_parts(self) -> list[Transfer]:
        """Return the steps that do it part by part; itself if it is not cut."""
        if self.cut is None or not self.cut.parts:
            return [self]
        found = []
        for part in self.cut.parts:
            found.append(replace(self, moves=self.moves.part(part), cut=None, part=part))
        return found

    @property
    def required_aggregation(self) -> str:
        """The aggregation, where there is one."""
        assert self.aggregation is not None, f"{self} aggregates nothing"
        return self.aggregation

    @property
    def transfer(self) -> Moves:
        return self.moves

    @property
    def group(self) -> tuple[int, ...]:
        return self.moves.group

    @property
    def nbytes(self) -> int:
        return self.moves.words * np.dtype(self.target.dtype).itemsize

    @property
    def working_bytes(self) -> int:
        largest = max(self.source.nbytes, self.target.nbytes)
        if self.part is not None:
            largest = self.part.share(largest)
        itemsize = np.dtype(self.target.dtype).itemsize
        if self.moves.same_to_all:  # of a slot with more, only a part may be sent
            largest = min(largest, self.moves.max_elements * itemsize)
        is_packed = self.moves.fits_at_once(self.buffer_bytes // itemsize)
        if self.aggregation is None and is_packed and not self.moves.same_to_all:
            largest = max(largest, self.moves.words_sent * itemsize)
        return memory.staging(largest, self.moves.members.count, self.buffer_bytes)

    @property
    def completes_slot(self) -> bool:
        return self.aggregation is None and self.source == self.target

    def __str__(self) -> str:
        place = "" if self.part is None else f" at {self.part}"
        among = "locally"
        if self.moves.members.count > 1:
            among = f"among {self.moves.members.count} ranks, {show_bytes(self.nbytes)} received"
        if self.aggregation is not None:
            return f"reduce    {self.target}{place} by {self.aggregation} {among}"
        halo = ", to halo buffers" if self.arriving else ""
        return f"exchange  {self.source} → {self.target}{place} {among}{halo}"


@dataclass(frozen=True)
class Await(Step):
    """Wait for a transfer in the background, and for all that began before it."""

    name = "wait"
    manages_memory = True

    moving: Transfer

    @property
    def vertex(self) -> str:
        return self.moving.vertex

    @property
    def awaited(self) -> Step:
        return self.moving

    def __str__(self) -> str:
        place = "" if self.moving.part is None else f" at {self.moving.part}"
        return f"await     {self.moving.target}{place}"


@dataclass(frozen=True)
class Store(TensorStep):
    """An output is complete."""

    name = "store"

    slot: Slot
    region: Region

    @property
    def reads(self) -> Slots:
        return (self.slot,)

    @property
    def keeps(self) -> Slots:
        return (self.slot,)

    @property
    def nbytes(self) -> int:
        return _region_bytes(self.region, self.slot)

    def __str__(self) -> str:
        return f"store     {self.slot} → {show_region(self.region)} of {self.tensor}"


@dataclass(frozen=True)
class SavePoint(TensorStep):
    """A vertex is complete: a run can be saved here, and continue from here.

    Its tensor is in a slot; slots that only this vertex needed are freed.
    """

    manages_memory = True
    when_fused = "after"

    slot: Slot
    layout: Layout  # with partial results where an axis cuts PARTIAL
    # In the middle of a group, or while a tensor is dropped that is computed again: what later
    # steps need may not be there.
    inside: bool = False

    def inside_group(self) -> SavePoint:
        return replace(self, inside=True)

    def __str__(self) -> str:
        return f"complete  {self.slot}"


@dataclass(frozen=True)
class Repeat(Step):
    """Do other steps again and again: those of a recurrence."""

    name = "repeat"
    computes = True

    recurrence: str
    steps: tuple[Step, ...]
    times: int
    # The slots that they use and that are there before and afterwards: what is the same each time,
    # and what is carried from one time to the next, in place.
    outer: Slots
    most_bytes: int  # of other slots and of messages
    results: Slots = ()  # those of the outer slots that are made here

    @property
    def vertex(self) -> str:
        return self.recurrence

    @property
    def reads(self) -> Slots:
        return tuple(slot for slot in self.outer if slot not in self.results)

    @property
    def writes(self) -> Slots:
        written = {slot for step in self.steps for slot in step.writes}
        return tuple(slot for slot in self.outer if slot in written)

    def innermost(self) -> Iterator[tuple[Step, int]]:
        for step in self.steps:
            yield step, self.times

    def with_repeated(self, change: Callable[[tuple[Step, ...]], tuple[Step, ...]]) -> Repeat:
        return replace(self, steps=change(self.steps))

    @property
    def nbytes(self) -> int:
        return self.times * sum(step.nbytes for step in self.steps)

    @property
    def working_bytes(self) -> int:
        return self.most_bytes

    def __str__(self) -> str:
        received = f", {show_bytes(self.nbytes)} received" if self.nbytes else ""
        inside = "".join(f"\n  {step}" for step in self.steps)
        return f"repeat    {self.times} times{received}:{inside}"


def _region_bytes(region: Region, slot: Slot) -> int:
    return elements(region) * np.dtype(slot.dtype).itemsize


def numbered(steps: Sequence[Step], kind: type[AnyStep]) -> Iterator[tuple[int, AnyStep]]:
    """Yield the steps of one class among some steps, each with its number."""
    for number, step in enumerate(steps):
        if isinstance(step, kind):
            yield number, step
