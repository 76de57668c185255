"""Operands with index arithmetic, such as u[i+1]: what a rank fetches, and where it lies then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from einmpi.graph.arithmetic import call
from einmpi.graph.index_arithmetic import arithmetic_labels, interval_of
from einmpi.graph.scalar import Const, IndexEntries, Scalar
from einmpi.planner.moving.halo import Needed, axes_of_labels, is_inside, most_needed, shares_of
from einmpi.schedule.layout import Layout
from einmpi.schedule.moves import collection
from einmpi.schedule.regions import Region, Runs, Slot, Slots, locate, whole
from einmpi.schedule.step import Kernel, Step
from einmpi.schedule.steps import Exchange
from einmpi.schedule.transfers import Moves


def halo_moves(
    source: Layout, needed: Needed, state: Sequence[str | None], rank: int
) -> tuple[Moves | None, Region]:
    """Return the moves that bring what a rank needs, and the region of the tensor it has then.

    There are no moves if every rank has all it needs in its block already.
    """
    mesh = source.mesh
    if is_inside(mesh, needed, source.cuts, state):
        return None, source.region(mesh.digits(rank))
    wanted: list[Region] = []
    for other in range(mesh.ranks):
        wanted.append(_needed_region(source, needed, state, mesh.digits(other)))
    most = most_needed(mesh, needed, state)
    max_elements = max(source.max_elements() * mesh.ranks, most)
    moves = collection(source, wanted, rank, max_elements)
    largest_block = max(source.max_elements(), most)
    return replace(moves, largest_block=largest_block, is_halo=True), wanted[rank]


def _needed_region(
    source: Layout, needed: Needed, state: Sequence[str | None], digits: Sequence[int]
) -> Region:
    region = []
    for dimension in range(len(needed.bound)):
        axes = axes_of_labels(needed.labels(dimension), state)
        shares = shares_of(source.mesh, needed, dimension, axes, digits)
        region.append(needed.runs(dimension, shares))
    return tuple(region)


def index_in_region(
    entries: IndexEntries, region: Region, shares: Mapping[str, Runs]
) -> IndexEntries:
    """Return an index for a buffer that holds only this region, where it begins at 0.

    `shares` are the indices of the labels with which the rank computes.
    """
    found: list[str | Scalar] = []
    for entry, runs in zip(entries, region, strict=True):
        if isinstance(entry, str) or arithmetic_labels(entry) is None or not runs:
            found.append(entry)
        else:
            found.append(_index_in_runs(entry, runs, shares))
    return tuple(found)


def _index_in_runs(entry: Scalar, runs: Runs, shares: Mapping[str, Runs]) -> Scalar:
    """Return an index of a dimension for a buffer that holds one or two runs of it."""
    first_start, first_stop = runs[0]
    if len(runs) == 1:
        return _less(entry, first_start)
    second_start = runs[1][0]
    gap = second_start - first_stop
    bounds = {}
    for label in arithmetic_labels(entry) or ():
        if shares[label]:
            bounds[label] = shares[label][0][0], shares[label][-1][1] - 1
        else:
            return entry  # nothing is computed with it
    reached = interval_of(entry, bounds)
    if reached is not None and reached[1] < first_stop:
        return _less(entry, first_start)
    if reached is not None and reached[0] >= second_start:
        return _less(entry, first_start + gap)
    # Indices after the first run skip the gap.
    after_first_run = call("-", entry, Const(first_stop - 1))
    skipped = call("minimum", call("maximum", after_first_run, Const(0)), Const(gap))
    return _less(call("-", entry, skipped), first_start)


def _less(entry: Scalar, start: int) -> Scalar:
    return call("-", entry, Const(start)) if start else entry


def select_in_region(
    operand: int, entries: IndexEntries, region: Region, shares: Mapping[str, Runs]
) -> Iterator[tuple[int, int, Runs]]:
    """Yield what a kernel takes of the dimensions of a region that labels index, if not all."""
    for dimension, entry in enumerate(entries):
        if isinstance(entry, str) and shares[entry] != region[dimension]:
            yield operand, dimension, locate(shares[entry], region[dimension])


# ---- halos beside the block ---------------------------------------------------------------------

# What neighbours send need not be put together with the rank's own elements: a kernel may read each
# element where it is.


@dataclass(frozen=True)
class HaloBlock:
    """The places of a block with its halo, as if all of it were in one slot.

    `whole` would be this slot, in which kernels index the elements. A source has some of them: the
    rank's own slot, or what another rank has sent. `places` are its elements' in `whole`, one run
    for each dimension, `starts` the place in the source of the first one.
    """

    whole: Slot
    sources: tuple[Slot, ...]
    places: tuple[Region, ...]
    starts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class HaloExchange(Step):
    """Receive the halo of a block, each message in a slot of its own.

    The messages are those of an exchange that would copy the block too.
    """

    kind = "exchange"

    exchange: Exchange
    arriving: tuple[Slot | None, ...]  # for each member of the group

    @property
    def vertex(self) -> str:
        return self.exchange.vertex

    @property
    def reads(self) -> Slots:
        return self.exchange.reads

    @property
    def writes(self) -> Slots:
        return tuple(slot for slot in self.arriving if slot is not None)

    @property
    def transfer(self) -> Moves:
        return self.exchange.moves

    @property
    def group(self) -> tuple[int, ...]:
        return self.exchange.group

    @property
    def nbytes(self) -> int:
        return self.exchange.nbytes

    @property
    def working_bytes(self) -> int:
        return self.exchange.working_bytes

    def fills(self) -> Iterator[tuple[Slot, Region]]:
        for slot in self.writes:
            yield slot, tuple(map(whole, slot.shape))

    def __str__(self) -> str:
        return f"{self.exchange}, beside the block"


@dataclass(frozen=True)
class Sweep(Step):
    """Compute an elementwise kernel, and aggregates of its result, in one pass over memory.

    Operands of the kernel may be blocks with their halos beside them.
    """

    kind = "kernel"

    kernel: Kernel  # its operands are the blocks as if each were in one slot
    blocks: tuple[HaloBlock, ...] = ()
    folds: tuple[Kernel, ...] = ()  # they read the result of the kernel

    @property
    def vertex(self) -> str:
        return self.kernels[-1].vertex

    @cached_property
    def map_reads(self) -> Slots:
        """What the elementwise kernel reads."""
        found: dict[Slot, None] = {}
        together = [block.whole for block in self.blocks]
        for slot in self.kernel.operands:
            if slot not in together:
                found[slot] = None
        for block in self.blocks:
            found.update(dict.fromkeys(block.sources))
        return tuple(found)

    @cached_property
    def reads(self) -> Slots:
        found = dict.fromkeys(self.map_reads)
        for fold in self.folds:
            found.update(dict.fromkeys(fold.operands))
        return tuple(slot for slot in found if slot != self.kernel.target)

    @property
    def writes(self) -> Slots:
        return tuple(kernel.target for kernel in self.kernels)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return self.kernel, *self.folds

    def fills(self) -> Iterator[tuple[Slot, Region]]:
        for kernel in self.kernels:
            yield from kernel.fills()

    def __str__(self) -> str:
        if not self.folds:
            return str(self.kernel)
        lines = ["together, in one pass:"]
        lines += [f"  {kernel}" for kernel in self.kernels]
        return "\n".join(lines)
