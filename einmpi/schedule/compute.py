"""The step that computes: kernels, whole or one tile at a time.

A kernel cut along a label is the same kernel with smaller bounds. Kernels that share labels, its
rows, are computed for some indices of each row at a time: a tile. Why they are cut is the kind of
the tiles; how, is the same for all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from einmpi.graph.einsum import EinSum
from einmpi.planner.chains import Member, bytes_of_blocks
from einmpi.schedule.regions import (
    Region,
    Runs,
    Slot,
    Slots,
    length,
    names_of,
    one_run,
    shape,
    show_region,
    stretch,
    whole,
)
from einmpi.schedule.steps import Begin, Free, Reuse, Step, Transfer, whole_region
from einmpi.schedule.transfers import Members, Moves, Regions
from einmpi.units import plural

Bounds: TypeAlias = tuple[int, int]  # the start and the stop of some positions
Tile: TypeAlias = tuple[Bounds, ...]  # the positions of each row

PARTIAL_ROLE = "+"  # role of a slot with what one tile adds to a result


# ---- kernels -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """This rank's share of a vertex."""

    tensor: str
    target: Slot
    operands: tuple[Slot, ...]
    einsum: EinSum  # with the extents that this rank has
    index: tuple[tuple[str, Runs], ...]  # indices that a label used as a number has on this rank
    select: tuple[tuple[int, int, Runs], ...]  # (operand, dimension, what to take of it)
    # The vertex with its place in the program, for messages.
    located_name: str = field(default="", compare=False)
    # A part of a function of one matrix that many ranks share: what is done, in place, to a box of
    # the target, with a box of each operand. The boxes are regions of the slots, the target's last.
    part: str = ""
    boxes: tuple[Region, ...] = ()

    @property
    def vertex(self) -> str:
        return self.tensor

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        """The dtype of each operand."""
        return tuple([slot.dtype for slot in self.operands])

    def restricted_to(self, runs: Mapping[str, Runs]) -> Kernel:
        """Return the kernel for these indices of some labels only."""
        extents = []
        for label, extent in self.einsum.extents:
            extents.append((label, length(runs[label]) if label in runs else extent))
        index = dict(self.index)
        for label, indices in runs.items():
            if label in index or label in self.einsum.labels_as_numbers:
                index[label] = indices
        einsum = replace(self.einsum, extents=tuple(extents))
        return replace(self, einsum=einsum, index=tuple(index.items()))

    def assignment(self) -> str:
        """Return the text Z[8, 8] ← sum(A[i,j] * B[j,k])."""
        if self.part:
            shown = [self.target, *self.operands]
            return f"{self.part} {', '.join(map(str, shown))} in {show_region(self.boxes[-1])}"
        return f"{self.target} ← {self.einsum.summary(names_of(self.operands))}"

    def __str__(self) -> str:
        return f"kernel    {self.assignment()}"


class KernelTile(NamedTuple):
    """A kernel on some positions of its labels, and where these are in its slots."""

    kernel: Kernel
    operands: tuple[Region, ...]
    target: Region


def tile_of(
    kernel: Kernel, positions: Mapping[str, Bounds], copied: Container[int] = ()
) -> KernelTile:
    """Return a kernel on some positions of some labels.

    A copy of the region of an operand in `copied` contains what is selected, and nothing else.
    """
    einsum = kernel.einsum
    known = dict(kernel.index)
    runs = {}
    for label, (start, stop) in positions.items():
        indices = known.get(label, one_run(0, einsum.extent[label]))
        runs[label] = stretch(indices, start, stop)
    selected: dict[tuple[int, int], Runs] = {}
    for operand, dimension, taken in kernel.select:
        entry = einsum.operands[operand][dimension]
        bounds = positions.get(entry) if isinstance(entry, str) else None
        selected[operand, dimension] = taken if bounds is None else stretch(taken, *bounds)
    regions = []
    for operand, (slot, entries) in enumerate(zip(kernel.operands, einsum.operands, strict=True)):
        region: list[Runs] = []
        for dimension, entry in enumerate(entries):
            is_selected = (operand, dimension) in selected
            if is_selected and operand in copied:
                region.append(selected[operand, dimension])
            elif isinstance(entry, str) and entry in positions and not is_selected:
                region.append(one_run(*positions[entry]))
            else:
                region.append(whole(slot.shape[dimension]))  # a gather may read any of it
        regions.append(tuple(region))
    select = []
    for (operand, dimension), taken in selected.items():
        if operand not in copied:
            select.append((operand, dimension, taken))
    target = []
    for label, extent in zip(einsum.output, kernel.target.shape, strict=True):
        target.append(one_run(*positions[label]) if label in positions else whole(extent))
    own = replace(kernel.restricted_to(runs), select=tuple(select))
    return KernelTile(own, tuple(regions), tuple(target))


class TileView(NamedTuple):
    """What a tile takes of a whole slot."""

    name: str  # of the tile's own slot
    slot: Slot
    rows: tuple[int | None, ...]  # the row that each dimension is; None where it is taken whole

    def place(self, tile: Tile) -> tuple[slice, ...]:
        """Return where a tile is in the array of the slot."""
        return tuple(slice(None) if row is None else slice(*tile[row]) for row in self.rows)


# ---- storage -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HaloBlock:
    """The places of a block with its halo, as if all of it were in one slot.

    What neighbours send need not be put together with the rank's own elements: a kernel may read
    each element where it is. `whole` would be the slot of all, in which kernels index the
    elements. A source has some of them: the rank's own slot, or a halo buffer with what another
    rank has sent. `places` are its elements' in `whole`, one run for each dimension, `starts` the
    place in the source of the first one.
    """

    whole: Slot
    sources: tuple[Slot, ...]
    places: tuple[Region, ...]
    starts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Tiles:
    """How kernels are cut into tiles.

    Every row is a label of each kernel. A kernel whose output has all rows writes its results for
    a tile. One that aggregates a row has results which are complete after the last tile: those of
    each tile are combined with what is there, in the order of the tiles.
    """

    kind: Literal[
        "",  # not at all
        "cache",  # what passes between kernels may stay in the cache; or one kernel after another
        "memory",  # what passes between kernels has memory for one tile only
        "scattered",  # the rows that values are scattered to; the other rows do not change
        "slow",  # operands come from the slow tier, and the result goes there
    ] = ""
    rows: tuple[tuple[str, ...], ...] = ()  # for each row, the label that it is in each kernel
    block: tuple[int, ...] = ()  # how many indices of each row at a time; the first row outermost
    bounds: Tile = ()  # if only some positions of the rows are computed
    nbytes: int = 0  # of memory for tiles
    # Of the slow tier:
    inside: tuple[int, ...] = ()  # operands that stay in memory in any case, and are not copied
    ahead: bool = False  # there is memory to fetch the next tiles while one is computed
    fetched: int = 0  # bytes that are copied into memory


# ---- the step ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compute(Step):
    """Compute kernels on this rank."""

    name = "kernel"

    kernels: tuple[Kernel, ...] = ()
    tiles: Tiles = Tiles()
    inner: frozenset[Slot] = frozenset()  # what passes between kernels, and is not used afterwards
    halos: tuple[HaloBlock, ...] = ()  # operands of the first kernel that are in several places
    replaced: Slot | None = None  # computed for this step alone: the result may take its memory
    # What is done if the kernels are computed one after another, with the number of kernels before
    # it: Free, Begin, Reuse.
    between: tuple[tuple[int, Step], ...] = ()

    @property
    def vertex(self) -> str:
        return self.kernels[-1].vertex

    @cached_property
    def is_plain(self) -> bool:
        """Whether there is nothing but one kernel, on whole slots."""
        is_whole = not self.tiles.kind and not self.tiles.bounds
        return len(self.kernels) == 1 and is_whole and not self.halos

    @property
    def only_kernel(self) -> Kernel | None:
        return self.kernels[0] if self.is_plain else None

    @property
    def is_out_of_core(self) -> bool:
        return self.tiles.kind == "slow"

    @cached_property
    def reads(self) -> Slots:
        read: dict[Slot, None] = {}
        for kernel in self.kernels:
            read.update(dict.fromkeys(kernel.operands))
        for block in self.halos:
            del read[block.whole]
            read.update(dict.fromkeys(block.sources))
        if len(self.kernels) > 1:
            for kernel in self.kernels:
                read.pop(kernel.target, None)
        return tuple(read)

    @cached_property
    def writes(self) -> Slots:
        return tuple(kernel.target for kernel in self.kernels if kernel.target not in self.inner)

    def allocates(self, slow: Container[str] = ()) -> Slots:
        begun: list[Slot] = []
        for _, step in self.between:
            begun += step.allocates(slow)
        return (*begun, *super().allocates(slow))

    @cached_property
    def frees(self) -> Slots:
        freed: list[Slot] = []
        for _, step in self.between:
            freed += step.frees
        return tuple(slot for slot in freed if slot not in self.inner)

    @property
    def working_bytes(self) -> int:
        return self.tiles.nbytes

    def __str__(self) -> str:
        tiles = self.tiles
        size = "×".join(map(str, tiles.block))
        steps: Sequence[object] = self.kernels
        if tiles.kind == "slow":
            kernel = self.kernels[0]
            extent = kernel.einsum.extent
            cut = []
            for (label,), count in zip(tiles.rows, tiles.block, strict=True):
                if count < extent[label]:
                    cut.append(f"{label}:{count}")
            return f"tiles     {kernel.assignment()}, {' '.join(cut) or 'all'} at a time"
        if tiles.kind == "cache":
            title = f"together, {size} {plural(prod(tiles.block), 'row')} at a time:"
            steps = self.steps
        elif tiles.kind == "memory":
            title = f"fused, {size} {plural(prod(tiles.block), 'row')} at a time:"
        elif tiles.kind == "scattered":
            label = tiles.rows[0][0]
            title = f"together, only for {label} that get values, {size} at a time:"
        elif len(self.kernels) > 1:
            title = "together, in one pass:"
        else:
            return f"{self.kernels[0]}{self._show_bounds()}"
        return "\n".join([f"{title[:-1]}{self._show_bounds()}:", *(f"  {step}" for step in steps)])

    def _show_bounds(self) -> str:
        shown = ""
        for labels, bounds in zip(self.tiles.rows, self.tiles.bounds, strict=False):
            if bounds != (0, self.kernels[-1].einsum.extent[labels[-1]]):
                shown += f" for {labels[-1]} = {bounds[0]}:{bounds[1]}"
        return shown

    # ---- kernel by kernel -----------------------------------------------------------------------

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """One step for each kernel, with what is done between them."""
        found: list[Step] = []
        between = list(self.between)
        for number, kernel in enumerate(self.kernels):
            while between and between[0][0] <= number:
                found.append(between.pop(0)[1])
            found.append(Compute((kernel,)))
        return (*found, *(step for _, step in between))

    @cached_property
    def one_by_one(self) -> tuple[Step, ...]:
        """The kernels and what is freed between them: the same work, one kernel after another."""
        return tuple(step for step in self.steps if step.kernels or step.frees)

    @cached_property
    def reuse_steps(self) -> tuple[Reuse, ...]:
        return tuple(reuse for _, step in self.between for reuse in step.reuse_steps)

    @cached_property
    def begins(self) -> tuple[Begin, ...]:
        return tuple(begin for _, step in self.between for begin in step.begins)

    @cached_property
    def early_begins(self) -> tuple[Begin, ...]:
        """The first of these, which need no memory that is freed here."""
        early: list[Begin] = []
        for _, step in self.between:
            if step.frees:
                break
            early += step.begins
        return tuple(early)

    # ---- parts ----------------------------------------------------------------------------------

    @cached_property
    def _regions(self) -> dict[Slot, Region]:
        """What is used of each slot. One that is read in two ways is read as a whole."""
        found: dict[Slot, Region] = {}
        for number, kernel in enumerate(self.kernels):
            part = self.kernel_at(number, self.tiles.bounds)
            slots = (*kernel.operands, kernel.target)
            for slot, region in zip(slots, (*part.operands, part.target), strict=True):
                if not slot.shape or found.setdefault(slot, region) != region:
                    found[slot] = whole_region(slot)
        return found

    def region_of(self, slot: Slot) -> Region:
        return self._regions[slot] if self.tiles.bounds else super().region_of(slot)

    @cached_property
    def part(self) -> Compute:
        """The same on slots that have only what is used of each: the slots of a tile."""
        kernels = []
        for number in range(len(self.kernels)):
            kernels.append(self._on_tile_slots(number, self.tiles.bounds))
        inner_names = names_of(self.inner)
        inner = frozenset(kernel.target for kernel in kernels if kernel.target.name in inner_names)
        tiles = replace(self.tiles, bounds=()) if self.tiles.kind else Tiles()
        last_use: dict[Slot, int] = {}
        for number, kernel in enumerate(kernels):
            for slot in (*kernel.operands, kernel.target):
                if slot in inner:
                    last_use[slot] = number
        between = [(number + 1, Free(slot)) for slot, number in last_use.items()]
        between.sort(key=lambda pair: pair[0])
        return Compute(tuple(kernels), tiles, inner, between=tuple(between))

    # ---- tiles ----------------------------------------------------------------------------------

    def all_tiles(self) -> Iterator[Tile]:
        """Yield all tiles, in the order in which they are computed."""
        cuts = []
        for labels, size in zip(self.tiles.rows, self.tiles.block, strict=True):
            extent = self.kernels[0].einsum.extent[labels[0]]
            starts = range(0, max(1, extent), max(1, size))  # without rows, one tile without rows
            cuts.append([(start, min(start + size, extent)) for start in starts])
        yield from itertools.product(*cuts)

    def _labels_at(self, number: int, tile: Tile) -> dict[str, Bounds]:
        """Return the positions of a kernel's labels in a tile."""
        found = {}
        for labels, bounds in zip(self.tiles.rows, tile, strict=True):
            found[labels[number]] = bounds
        return found

    def kernel_at(self, number: int, tile: Tile, copied: Container[int] = ()) -> KernelTile:
        """Return a kernel for a tile."""
        return tile_of(self.kernels[number], self._labels_at(number, tile), copied)

    def is_first(self, number: int, tile: Tile) -> bool:
        """Return whether no earlier tile has results for the same place of a kernel's target."""
        einsum = self.kernels[number].einsum
        for labels, (start, _) in zip(self.tiles.rows, tile, strict=True):
            if labels[number] in einsum.aggregated and start:
                return False
        return True

    def kind_of_tile(self, tile: Tile) -> tuple[tuple[int | None, int], ...]:
        """Return what the steps of a tile depend on.

        That is its shape, where each row starts that is used as a number, and which kernels have
        results of earlier tiles to combine theirs with.
        """
        found: list[tuple[int | None, int]] = []
        for (start, stop), depends in zip(tile, self._starts_matter, strict=True):
            found.append((start if depends else None, stop - start))
        for number in range(len(self.kernels)):
            found.append((None, int(self.is_first(number, tile))))
        return tuple(found)

    @cached_property
    def _starts_matter(self) -> tuple[bool, ...]:
        """For each row, whether a kernel uses its label as a number, or selects by it."""
        found = []
        for labels in self.tiles.rows:
            used = False
            for label, kernel in zip(labels, self.kernels, strict=True):
                used = used or label in kernel.einsum.labels_as_numbers
                for operand, dimension, _ in kernel.select:
                    used = used or kernel.einsum.operands[operand][dimension] == label
            found.append(used)
        return tuple(found)

    def steps_of_tile(self, tile: Tile) -> list[Step]:
        """Return the kernels of a tile, with what is combined and freed between them."""
        kernels = [self._on_tile_slots(number, tile) for number in range(len(self.kernels))]
        inner = set(names_of(self.inner))
        last_use: dict[str, int] = {}
        for number, kernel in enumerate(kernels):
            for slot in (*kernel.operands, kernel.target):
                last_use[slot.name] = number
        found: list[Step] = []
        for number, kernel in enumerate(kernels):
            if self.is_first(number, tile):
                found.append(Compute((kernel,)))
            else:
                added = replace(kernel.target, role=PARTIAL_ROLE)
                found.append(Compute((replace(kernel, target=added),)))
                aggregation = kernel.einsum.required_aggregation
                found += [_accumulation(aggregation, added, kernel.target), Free(added)]
            for slot in dict.fromkeys((*kernel.operands, kernel.target)):
                if slot.name in inner and last_use[slot.name] == number:
                    found.append(Free(slot))
        return found

    def _on_tile_slots(self, number: int, tile: Tile) -> Kernel:
        """Return a kernel for a tile, on the slots of the tile."""
        kernel = self.kernels[number]
        part = self.kernel_at(number, tile)
        slots = []
        used = zip((*kernel.operands, kernel.target), (*part.operands, part.target), strict=True)
        for position, (slot, region) in enumerate(used):
            role = slot.role
            if slot not in self.inner:
                role = _role_in_tile(slot, self._rows_in(number, position))
            slots.append(replace(slot, shape=shape(region), role=role))
        return replace(part.kernel, operands=tuple(slots[:-1]), target=slots[-1])

    def _rows_in(self, number: int, position: int) -> tuple[int | None, ...]:
        """Return the row that each dimension of a kernel's operand, or target, is.

        None where it is taken as a whole. The target comes after the operands.
        """
        kernel = self.kernels[number]
        row_of_label: dict[object, int] = {}
        for row, labels in enumerate(self.tiles.rows):
            row_of_label[labels[number]] = row
        selected = {(operand, dimension) for operand, dimension, _ in kernel.select}
        entries = (*kernel.einsum.operands, kernel.einsum.output)[position]
        found = []
        for dimension, entry in enumerate(entries):
            is_selected = (position, dimension) in selected
            found.append(None if is_selected else row_of_label.get(entry))
        return tuple(found)

    @cached_property
    def views(self) -> tuple[TileView, ...]:
        """What a tile takes of whole slots."""
        found: dict[TileView, None] = {}
        for number, kernel in enumerate(self.kernels):
            for position, slot in enumerate((*kernel.operands, kernel.target)):
                if slot not in self.inner:
                    rows = self._rows_in(number, position)
                    found[TileView(slot.tensor + _role_in_tile(slot, rows), slot, rows)] = None
        return tuple(found)

    @cached_property
    def rows_of_all_results(self) -> tuple[int, ...]:
        """The rows that no kernel aggregates."""
        found = []
        for row, labels in enumerate(self.tiles.rows):
            is_aggregated = False
            for label, kernel in zip(labels, self.kernels, strict=True):
                is_aggregated = is_aggregated or label in kernel.einsum.aggregated
            if not is_aggregated:
                found.append(row)
        return tuple(found)

    @cached_property
    def combines_tiles(self) -> bool:
        """Whether a result is complete only after several tiles."""
        extent = self.kernels[0].einsum.extent
        for row, (labels, size) in enumerate(zip(self.tiles.rows, self.tiles.block, strict=True)):
            if row not in self.rows_of_all_results and size < extent[labels[0]]:
                return True
        return False


def _role_in_tile(slot: Slot, rows: tuple[int | None, ...]) -> str:
    """Return the role of a tile's slot: a tile may take two parts of one slot."""
    return f"{slot.role}{list(rows)}"


def box_of(region: Region) -> tuple[slice, ...]:
    """Return the slices of a region that has at most one run in each dimension."""
    return tuple(slice(*runs[0]) if runs else slice(0) for runs in region)


def _accumulation(aggregation: str, part: Slot, total: Slot) -> Transfer:
    """Return the step that combines what one tile adds with what is there from earlier ones."""
    everything = whole_region(total)
    own = everything, everything
    nothing = Regions.same(1, None)
    moves = Moves(Members(0, ()), 0, nothing, nothing, own, same_to_all=False, max_elements=0)
    return Transfer(total.tensor, part, total, moves, aggregation=aggregation)


def members_of(kernels: Sequence[Kernel]) -> list[Member]:
    """Return kernels as what a chain consists of."""
    found = []
    for kernel in kernels:
        itemsize = np.dtype(kernel.target.dtype).itemsize
        inputs = tuple(names_of(kernel.operands))
        found.append(Member(kernel.target.name, inputs, kernel.einsum, itemsize))
    return found


def fused(
    kernels: Sequence[Kernel],
    inner: frozenset[Slot],
    rows: tuple[tuple[str, ...], ...],
    block: tuple[int, ...],
    bounds: Tile = (),
) -> Compute:
    """Return kernels as one step: what passes between them has memory for one tile only."""
    nbytes = bytes_of_blocks(members_of(kernels), names_of(inner), rows, block)
    return Compute(tuple(kernels), Tiles("memory", rows, block, bounds, nbytes), inner)
