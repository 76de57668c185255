"""The steps of one rank's schedule. A step holds everything needed to carry it out, says which
slots it reads, writes, allocates and frees, and prints as one line."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from einmpi.planner import memory
from einmpi.schedule.layout import Layout
from einmpi.schedule.regions import Region, Slot, Slots, elements, show_region, whole
from einmpi.schedule.step import Drop, Evict, Fetch, Free, Kernel, Place, Reuse, Step, whole_region
from einmpi.schedule.transfers import Cut, Moves, Part, Reduction
from einmpi.units import plural, show_bytes

__all__ = [
    "MESSAGE_BUFFER_BYTES",
    "Begin",
    "Drop",
    "Evict",
    "Exchange",
    "Fetch",
    "Free",
    "Group",
    "Kernel",
    "Load",
    "Passes",
    "Place",
    "Reduce",
    "Reuse",
    "SavePoint",
    "Slot",
    "Step",
    "Store",
    "loads_among",
]

MESSAGE_BUFFER_BYTES = memory.MESSAGE_BUFFER_BYTES


# ---- data ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load(Step):
    """Fill a part of a slot with a region of an input.

    All ranks of the mesh have this step, even with nothing to load: from a file they may read it
    together.
    """

    kind = "load"

    tensor: str
    slot: Slot
    region: Region  # of the tensor
    place: Region  # in the slot
    layout: Layout  # the regions of all ranks
    kept: bool = False  # the input stays on the rank between runs
    overwritten: bool = False  # a later step writes over it

    @property
    def vertex(self) -> str:
        return self.tensor

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

    def fills(self) -> Iterator[tuple[Slot, Region]]:
        yield self.slot, self.place

    def __str__(self) -> str:
        return f"load      {self.slot} ← {show_region(self.region)} of {self.tensor}"


@dataclass(frozen=True)
class Begin(Step):
    """From here on there is memory for a later Load: a file can be read while kernels run."""

    kind = "load"
    manages_memory = True

    load: Load

    @property
    def vertex(self) -> str:
        return self.load.tensor

    def allocates(self, slow: Container[str] = ()) -> Slots:
        return self.load.allocates(slow)

    def __str__(self) -> str:
        return f"begin     {self.load.slot} ← {self.load.tensor}"


@dataclass(frozen=True)
class Exchange(Step):
    """Build the target's block of a tensor from the blocks of a group of ranks.

    In place where source and target are one slot.
    """

    kind = "exchange"

    tensor: str
    source: Slot
    target: Slot
    moves: Moves
    buffer_bytes: int = MESSAGE_BUFFER_BYTES  # of one message buffer; the same on all members
    cut: Cut | None = None  # how all members do it in parts, if they do
    part: Part | None = None  # if this is one of the parts
    background: bool = False  # later steps go on meanwhile, until one awaits it

    @property
    def vertex(self) -> str:
        return self.tensor

    @property
    def reads(self) -> Slots:
        return (self.source,)

    def region_read(self, slot: Slot) -> Region:
        return _region_of_part(slot, self.part)

    def region_written(self, slot: Slot) -> Region:
        return _region_of_part(slot, self.part)

    def in_parts(self) -> list[Exchange]:
        """Return the steps that do it part by part; itself if it is not cut."""
        if self.cut is None or not self.cut.parts:
            return [self]
        found = []
        for part in self.cut.parts:
            found.append(replace(self, moves=self.moves.part(part), cut=None, part=part))
        return found

    @property
    def writes(self) -> Slots:
        return (self.target,)

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
        is_packed = self.moves.fits_at_once(self.buffer_bytes // itemsize)
        if is_packed and not self.moves.same_to_all:
            largest = max(largest, self.moves.words_sent * itemsize)
        return memory.staging(largest, len(self.group), self.buffer_bytes)

    @property
    def completes_slot(self) -> bool:
        return self.source == self.target

    def fills(self) -> Iterator[tuple[Slot, Region]]:
        if self.moves.own is not None:
            yield self.target, self.moves.own[1]
        for _, region in self.moves.incoming():
            yield self.target, region

    def __str__(self) -> str:
        place = _place_of_part(self.part)
        return f"exchange  {self.source} → {self.target}{place} {_among(self.group, self.nbytes)}"


@dataclass(frozen=True)
class Reduce(Step):
    """Aggregate a slot over a group in place: each member gets its piece of the result."""

    kind = "reduce"

    tensor: str
    slot: Slot
    aggregation: str
    reduction: Reduction
    buffer_bytes: int = MESSAGE_BUFFER_BYTES  # of one message buffer; the same on all members
    cut: Cut | None = None  # how all members do it in parts, if they do
    part: Part | None = None  # if this is one of the parts
    background: bool = False  # later steps go on meanwhile, until one awaits it

    @property
    def vertex(self) -> str:
        return self.tensor

    @property
    def reads(self) -> Slots:
        return (self.slot,)

    def region_read(self, slot: Slot) -> Region:
        return _region_of_part(slot, self.part)

    def region_written(self, slot: Slot) -> Region:
        return _region_of_part(slot, self.part)

    def in_parts(self) -> list[Reduce]:
        """Return the steps that do it part by part; itself if it is not cut."""
        if self.cut is None or not self.cut.parts:
            return [self]
        found = []
        for part in self.cut.parts:
            found.append(replace(self, reduction=self.reduction.part(part), cut=None, part=part))
        return found

    @property
    def writes(self) -> Slots:
        return (self.slot,)

    @property
    def transfer(self) -> Reduction:
        return self.reduction

    @property
    def group(self) -> tuple[int, ...]:
        return self.reduction.group

    @property
    def nbytes(self) -> int:
        return self.reduction.words * np.dtype(self.slot.dtype).itemsize

    @property
    def working_bytes(self) -> int:
        nbytes = self.slot.nbytes
        if self.part is not None:
            nbytes = self.part.share(nbytes)
        return memory.staging(nbytes, len(self.group), self.buffer_bytes)

    def __str__(self) -> str:
        place = _place_of_part(self.part)
        among = _among(self.group, self.nbytes)
        return f"reduce    {self.slot}{place} by {self.aggregation} {among}"


@dataclass(frozen=True)
class Store(Step):
    """An output is complete."""

    kind = "store"

    tensor: str
    slot: Slot
    region: Region

    @property
    def vertex(self) -> str:
        return self.tensor

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
class SavePoint(Step):
    """A vertex is complete: a run can be saved here, and continue from here.

    Its tensor is in a slot; slots that only this vertex needed are freed.
    """

    manages_memory = True

    tensor: str
    slot: Slot
    layout: Layout  # with partial results where an axis cuts PARTIAL
    # In the middle of a group, or while a tensor is dropped that is computed again: what later
    # steps need may not be there.
    inside: bool = False

    @property
    def vertex(self) -> str:
        return self.tensor

    def __str__(self) -> str:
        return f"complete  {self.slot}"


# ---- computing ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group(Step):
    """Consecutive kernels that can be computed together, one block of rows at a time.

    What passes from one of them to the next need never be whole in memory.
    """

    kind = "kernel"

    steps: tuple[Kernel | Free | Begin | Reuse, ...]  # as they would be done one after another
    rows: tuple[tuple[str, ...], ...]  # for each row, the label that it is in each kernel
    block: tuple[int, ...]  # how many indices of each row at a time

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(kernel for step in self.steps for kernel in step.kernels)

    @cached_property
    def begins(self) -> tuple[Begin, ...]:
        return tuple(step for step in self.steps if isinstance(step, Begin))

    @cached_property
    def begins_in_order(self) -> tuple[tuple[Begin, ...], tuple[Begin, ...]]:
        """The loads to begin before the kernels, and those that need memory that is freed here."""
        early: list[Begin] = []
        late: list[Begin] = []
        is_freed = False
        for step in self.steps:
            is_freed = is_freed or bool(step.frees)
            if isinstance(step, Begin):
                (late if is_freed else early).append(step)
        return tuple(early), tuple(late)

    @cached_property
    def reuse_steps(self) -> tuple[Reuse, ...]:
        return tuple(step for step in self.steps if isinstance(step, Reuse))

    @cached_property
    def one_by_one(self) -> tuple[Kernel | Free, ...]:
        """The kernels and what is freed between them: the same work, not computed together."""
        return tuple(step for step in self.steps if isinstance(step, Kernel | Free))

    @property
    def vertex(self) -> str:
        return self.kernels[-1].vertex

    @cached_property
    def inner(self) -> frozenset[Slot]:
        """The slots that are created and freed in the group."""
        made = {kernel.target for kernel in self.kernels}
        freed: set[Slot] = set()
        for step in self.steps:
            freed.update(step.frees)
        return frozenset(made & freed)

    @cached_property
    def outer(self) -> Slots:
        """All other slots of the kernels: those read from outside, and those that remain."""
        used: dict[Slot, None] = {}
        for kernel in self.kernels:
            used.update(dict.fromkeys((*kernel.operands, kernel.target)))
        return tuple(slot for slot in used if slot not in self.inner)

    @cached_property
    def reads(self) -> Slots:
        made = {kernel.target for kernel in self.kernels}
        read: list[Slot] = []
        for kernel in self.kernels:
            read += kernel.operands
        return tuple(slot for slot in read if slot not in made)

    @cached_property
    def writes(self) -> Slots:
        return tuple(kernel.target for kernel in self.kernels if kernel.target not in self.inner)

    def allocates(self, slow: Container[str] = ()) -> Slots:
        begun: list[Slot] = []
        for begin in self.begins:
            begun += begin.allocates(slow)
        return (*begun, *super().allocates(slow))

    @property
    def reuses(self) -> Slots:
        return tuple(step.slot for step in self.reuse_steps)

    @cached_property
    def frees(self) -> Slots:
        freed: list[Slot] = []
        for step in self.steps:
            freed += step.frees
        return tuple(slot for slot in freed if slot not in self.inner)

    def fills(self) -> Iterator[tuple[Slot, Region]]:
        for slot in self.writes:
            yield slot, tuple(map(whole, slot.shape))

    def __str__(self) -> str:
        size = "×".join(map(str, self.block))
        rows = plural(prod(self.block), "row")
        lines = [f"together, {size} {rows} at a time:"]
        lines += [f"  {step}" for step in self.steps]
        return "\n".join(lines)


@dataclass(frozen=True)
class Passes(Step):
    """A kernel computed piece by piece, from operands in the slow tier to a target there."""

    kind = "kernel"
    in_passes = True

    kernel: Kernel
    blocks: tuple[tuple[str, int], ...]  # indices of each label at a time; outermost loop first
    inside: tuple[int, ...]  # operands that stay in memory in any case, and are not copied
    ahead: bool  # there is memory to fetch the next pieces while one is computed
    buffers: int  # bytes of the pieces in memory
    fetched: int  # bytes that are copied into them

    @property
    def vertex(self) -> str:
        return self.kernel.vertex

    @property
    def reads(self) -> Slots:
        return self.kernel.operands

    @property
    def writes(self) -> Slots:
        return (self.kernel.target,)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return (self.kernel,)

    @property
    def working_bytes(self) -> int:
        return self.buffers

    def fills(self) -> Iterator[tuple[Slot, Region]]:
        return self.kernel.fills()

    def __str__(self) -> str:
        extent = self.kernel.einsum.extent
        cut = " ".join(f"{label}:{size}" for label, size in self.blocks if size < extent[label])
        return f"passes    {self.kernel.assignment()}, {cut or 'all'} at a time"


def _region_bytes(region: Region, slot: Slot) -> int:
    return elements(region) * np.dtype(slot.dtype).itemsize


def _region_of_part(slot: Slot, part: Part | None) -> Region:
    everything = whole_region(slot)
    return everything if part is None else part.of_region(everything)


def _place_of_part(part: Part | None) -> str:
    return "" if part is None else f" at {part}"


def _among(group: tuple[int, ...], received: int) -> str:
    if len(group) == 1:
        return "locally"
    return f"among {len(group)} ranks, {show_bytes(received)} received"


def loads_among(steps: Sequence[Step]) -> Iterator[tuple[int, Load]]:
    """Yield the loads among some steps, each with its number."""
    for number, step in enumerate(steps):
        if isinstance(step, Load):
            yield number, step
