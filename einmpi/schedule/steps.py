"""The steps of a rank's schedule. Each carries all that is needed to do it, and prints as one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias

import numpy as np

from einmpi.graph.einsum import EinSum
from einmpi.planner import memory
from einmpi.schedule.layout import Layout
from einmpi.schedule.regions import Region, Runs, elements, shape, show_region
from einmpi.units import show_bytes

STAGE = memory.STAGE  # the most bytes of a buffer for messages


@dataclass(frozen=True)
class Slot:
    """A local buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def tensor(self) -> str:
        """Whose values it holds: slots have the name of a tensor, and what for where there are several."""
        return self.name.partition("→")[0].rstrip("'")

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.name}{list(self.shape)}"


@dataclass(frozen=True)
class Load:
    """Fill a part of a slot with a region of an input; the whole slot when the two have the same size.

    All ranks of the mesh have it, also those with nothing to load: from a file they may read it together.
    """

    tensor: str
    slot: Slot
    region: Region  # of the tensor
    place: Region  # in the slot
    layout: Layout  # the regions of all ranks
    kept: bool = False  # the rank has it already: it lies there between runs

    def __str__(self) -> str:
        return f"load      {self.slot} ← {show_region(self.region)} of {self.tensor}"


@dataclass(frozen=True)
class Begin:
    """From here on there is memory for a Load that comes later: a file can be read while kernels run."""

    load: Load

    def __str__(self) -> str:
        return f"begin     {self.load.slot} ← {self.load.tensor}"


@dataclass(frozen=True)
class Moves:
    """Who sends what to whom in a group of ranks. Places are in the source's slot, and in the target's.

    Nothing is None; a rank sends nothing to itself: what it has already is copied from `own[0]` to `own[1]`.
    """

    group: tuple[int, ...]
    me: int  # position in the group
    sends: tuple[Region | None, ...]
    receives: tuple[Region | None, ...]
    own: tuple[Region, Region] | None
    everybody: bool  # all members receive the same from a member
    most: int  # a bound on the elements that a member sends or receives, equal for all of them

    @property
    def words(self) -> int:
        """Elements that this rank receives."""
        return sum(elements(region) for region in self.receives if region is not None)


@dataclass(frozen=True)
class Exchange:
    """Make the target's block of a tensor from the blocks of a group of ranks; in place where the two are one slot."""

    tensor: str
    source: Slot
    target: Slot
    moves: Moves
    stage: int = STAGE  # bytes of a buffer for messages; the same on all members

    @property
    def nbytes(self) -> int:
        return self.moves.words * np.dtype(self.target.dtype).itemsize

    def __str__(self) -> str:
        return f"exchange  {self.source} → {self.target} {_among(self.moves.group, self.nbytes)}"


@dataclass(frozen=True)
class Reduce:
    """Each member of a group gets its piece of the slot aggregated over the whole group, in place."""

    tensor: str
    slot: Slot
    aggregation: str
    group: tuple[int, ...]
    me: int
    pieces: tuple[Region | None, ...]  # of each member, in the slot
    stage: int = STAGE

    @property
    def nbytes(self) -> int:
        own = self.pieces[self.me]
        return (
            0
            if own is None
            else (len(self.group) - 1) * elements(own) * np.dtype(self.slot.dtype).itemsize
        )

    def __str__(self) -> str:
        return f"reduce    {self.slot} by {self.aggregation} {_among(self.group, self.nbytes)}"


@dataclass(frozen=True)
class Kernel:
    """Compute the rank's share of a vertex."""

    vertex: str
    target: Slot
    operands: tuple[Slot, ...]
    einsum: EinSum  # with the extents that the rank has
    index: tuple[
        tuple[str, Runs], ...
    ]  # the indices that a label stands for on this rank, where that matters
    select: tuple[tuple[int, int, Runs], ...]  # (operand, dimension, what to take of it)

    def __str__(self) -> str:
        return (
            f"kernel    {self.target} ← {self.einsum.show([slot.name for slot in self.operands])}"
        )


@dataclass(frozen=True)
class Store:
    """An output is complete."""

    tensor: str
    slot: Slot
    region: Region

    def __str__(self) -> str:
        return f"store     {self.slot} → {show_region(self.region)} of {self.tensor}"


@dataclass(frozen=True)
class _OnSlot:
    """A step that is about the array of a slot, not about its values."""

    slot: Slot

    def __str__(self) -> str:
        return f"{type(self).__name__.lower():<10}{self.slot}"


class Free(_OnSlot):
    """The slot is not used any more."""


@dataclass(frozen=True)
class Group:
    """Kernels that can be done together, a block of rows at a time: what lies between them need never be whole."""

    steps: tuple[Kernel | Free | Begin, ...]  # the same, one after another
    rows: tuple[tuple[str, ...], ...]  # of each row the label that it is in each kernel
    block: tuple[int, ...]  # how many of each row at a time

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(step for step in self.steps if isinstance(step, Kernel))

    @property
    def vertex(self) -> str:
        return self.kernels[-1].vertex

    @cached_property
    def inner(self) -> frozenset[Slot]:
        """The slots that are made and used up in here."""
        made = {kernel.target for kernel in self.kernels}
        return frozenset(
            step.slot for step in self.steps if isinstance(step, Free) and step.slot in made
        )

    @cached_property
    def outer(self) -> tuple[Slot, ...]:
        """All others: what is read, and what is made and stays."""
        used = (slot for kernel in self.kernels for slot in (*kernel.operands, kernel.target))
        return tuple(slot for slot in dict.fromkeys(used) if slot not in self.inner)

    def __str__(self) -> str:
        size = "×".join(map(str, self.block))
        return "\n".join(
            [f"together, {size} rows at a time:", *(f"  {step}" for step in self.steps)]
        )


# ---- more than fits: slots have an array in memory, in the slow tier (docs/architecture.md), or in both --------------


class Place(_OnSlot):
    """The slot is made in the slow tier, by the steps that fill it."""

    def __str__(self) -> str:
        return f"{super().__str__()} outside"


class Evict(_OnSlot):
    """Begin to copy a slot to the slow tier. It stays in memory, to be read only, until it is dropped."""


class Drop(_OnSlot):
    """The slot's memory is given up: its values are in the slow tier."""


class Fetch(_OnSlot):
    """Begin to copy a slot from the slow tier into memory. What reads it there waits until it is whole."""


@dataclass(frozen=True)
class Passes:
    """A kernel done piece by piece: from operands in the slow tier to a target there."""

    kernel: Kernel
    blocks: tuple[
        tuple[str, int], ...
    ]  # how much of each label at a time; the first is the outermost loop
    inside: tuple[
        int, ...
    ]  # operands that stay in memory in any case: they are used where they lie
    ahead: bool  # there is memory to fetch the next pieces while one is computed
    buffers: int  # bytes of the pieces in memory
    fetched: int  # bytes that are copied into them

    @property
    def vertex(self) -> str:
        return self.kernel.vertex

    def __str__(self) -> str:
        extent = self.kernel.einsum.extent
        cut = " ".join(f"{label}:{size}" for label, size in self.blocks if size < extent[label])
        return f"passes{str(self.kernel)[6:]}, {cut or 'all'} at a time"


Step: TypeAlias = (
    Load
    | Begin
    | Exchange
    | Reduce
    | Kernel
    | Group
    | Store
    | Free
    | Place
    | Evict
    | Drop
    | Fetch
    | Passes
)


ASIDE = (
    Free,
    Begin,
    Place,
    Evict,
    Drop,
    Fetch,
)  # steps that have to do with memory alone: a rank has its own


def reads(step: Step) -> Iterator[Slot]:
    """The slots whose values a step uses."""
    if isinstance(step, Exchange):
        yield step.source
    elif isinstance(step, Kernel):
        yield from step.operands
    elif isinstance(step, Group):
        made = {kernel.target for kernel in step.kernels}
        yield from (slot for kernel in step.kernels for slot in kernel.operands if slot not in made)
    elif isinstance(step, Passes):
        yield from step.kernel.operands
    elif isinstance(step, Reduce | Store):
        yield step.slot


def writes(step: Step) -> Iterator[Slot]:
    """The slots a step makes or changes."""
    if isinstance(step, Exchange | Kernel):
        yield step.target
    elif isinstance(step, Group):
        yield from (begin.load.slot for begin in step.steps if isinstance(begin, Begin))
        yield from (kernel.target for kernel in step.kernels if kernel.target not in step.inner)
    elif isinstance(step, Passes):
        yield step.kernel.target
    elif isinstance(step, Load | Reduce):
        yield step.slot
    elif isinstance(step, Begin):
        yield step.load.slot


def _among(group: tuple[int, ...], received: int) -> str:
    return (
        f"among {len(group)} ranks, {show_bytes(received)} received"
        if len(group) > 1
        else "locally"
    )


def slot_of(name: str, region: Region, dtype: str) -> Slot:
    return Slot(name, shape(region), dtype)
