"""Schedules that need more than fits into memory: which slots leave it and come back when, and
which kernels are computed out of core. Each rank decides for itself; messages do not change."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.caches import bounded_cache
from einmpi.graph.scalar import IndexEntries
from einmpi.planner.memory import Amounts, Pieces, Sizes
from einmpi.schedule.compute import Compute, Kernel, Tiles
from einmpi.schedule.memory import bytes_needed, earliest_start, reordered
from einmpi.schedule.regions import Slot, names_of
from einmpi.schedule.steps import Load, Spill, Step, numbered

# Example: memory holds two of the slots a, b and c, which kernels use in the order a, b, c, a, b.
# When c is loaded, b leaves memory, since its next use is further away than that of a (Belady's
# rule):
#
#     load a; kernel on a
#     load b; evict b; kernel on b     the copy to the slow tier begins as soon as b has its values
#     drop b; load c; kernel on c      c gets the memory of b
#     free c; fetch b; kernel on a     b comes back while the kernel runs
#     kernel on b


def with_spills(steps: Sequence[Step], limit: int) -> list[Step]:
    """Add the steps that keep a rank below `limit` bytes, and cut kernels that are too large."""
    spilling = _Spilling(steps, limit)
    spilling.add_steps()
    return _fetch_early(_evict_early(spilling.done), limit)


class _Spilling:
    """Goes through the steps and keeps track of which slots are in memory and in the slow tier.

    When memory is short, the slot whose next use is furthest away leaves it.
    """

    def __init__(self, steps: Sequence[Step], limit: int) -> None:
        self.steps = steps
        self.limit = limit
        self.done: list[Step] = []
        self.memory: dict[str, Slot] = {}
        self.bytes_in_use = 0
        self.outside: set[str] = set()  # values are in the slow tier, perhaps in memory too
        # Inputs that stay between runs must not be moved. Count the most bytes that any rank has
        # of them: otherwise a rank with fewer bytes would cut its kernels differently, and ranks
        # that compute the same values would get different bits.
        self.kept_bytes: dict[str, int] = {}
        for _, load in numbered(steps, Load):
            if load.kept:
                itemsize = np.dtype(load.slot.dtype).itemsize
                self.kept_bytes[load.slot.name] = load.layout.max_elements() * itemsize
        self.kept_in_use = 0
        self.uses: dict[str, list[int]] = {}  # the steps that use each slot
        self.kernel_uses: dict[str, list[int]] = {}  # those of them that are kernels
        for number, step in enumerate(steps):
            for name in set(names_of((*step.reads, *step.writes))):
                self.uses.setdefault(name, []).append(number)
                if step.computes:
                    self.kernel_uses.setdefault(name, []).append(number)

    def add_steps(self) -> None:
        for number, step in enumerate(self.steps):
            for slot in step.frees:
                self.leave_memory(slot)
                self.outside.discard(slot.name)
            if step.kernels and not self.fits(step):
                (kernel,) = step.kernels
                self.compute_out_of_core(number, kernel)
                continue
            if step.computes:
                self.bring(number, (*step.reads, *step.writes), step.working_bytes)
                self.outside.difference_update(names_of(step.writes))
            elif step.writes:
                self.move(number, step)
            # Others need nothing in memory: an output that is stored may be in either tier.
            self.done.append(step)

    # ---- steps ----------------------------------------------------------------------------------

    def move(self, number: int, step: Step) -> None:
        """Prepare a step that loads or moves data.

        It works in memory, unless there is no room or a kernel wants its result outside.
        """
        slots = dict.fromkeys((*step.reads, *step.writes))
        if self.works_in_memory(number, step):
            self.bring(number, list(slots), step.working_bytes)
            self.outside.difference_update(names_of(step.writes))
            return
        for slot in slots:
            if slot.name in self.kept_bytes:
                continue
            if slot.name in self.memory:
                self.evict(slot)
            elif slot.name not in self.outside:
                self.done.append(Spill(slot, "place"))
                self.outside.add(slot.name)
        self.make_room(number, step.working_bytes, ())

    def works_in_memory(self, number: int, step: Step) -> bool:
        if step.keeps:
            return True
        if not self.fits(step):
            return False
        return not all(self.wanted_outside(number, slot) for slot in step.writes)

    def wanted_outside(self, number: int, slot: Slot) -> bool:
        """Return whether the next kernel that uses a slot is computed out of core."""
        later = self.kernel_uses.get(slot.name, [])
        position = bisect_right(later, number)
        if position == len(later):
            return False
        return not self.fits(self.steps[later[position]])

    def compute_out_of_core(self, number: int, kernel: Kernel) -> None:
        """Replace a kernel by tiles, from operands outside to a target outside."""
        for slot in dict.fromkeys(kernel.operands):
            if slot.name in self.memory and slot.name not in self.kept_bytes:
                self.evict(slot)
        inside = []
        for operand, slot in enumerate(kernel.operands):
            if slot.name in self.kept_bytes:
                inside.append(operand)
        tiled = out_of_core(kernel, self.limit - self.kept_in_use, inside)
        assert tiled is not None, (
            f"{kernel.vertex}: the plan promised that it can be done in {self.limit} bytes"
        )
        self.make_room(number, tiled.working_bytes, ())
        self.done += [Spill(kernel.target, "place"), tiled]
        self.outside.add(kernel.target.name)

    # ---- memory ---------------------------------------------------------------------------------

    def fits(self, step: Step) -> bool:
        """Return whether a step can be done in memory when everything else is outside."""
        sizes = {slot.name: slot.nbytes for slot in (*step.reads, *step.writes)}
        needed = self.kept_in_use + step.working_bytes
        for name, nbytes in sizes.items():
            if name not in self.kept_bytes:
                needed += nbytes
        return needed <= self.limit

    def bring(self, number: int, slots: Iterable[Slot], working_bytes: int) -> None:
        """Make sure that slots are in memory: fetch them, or make room for new ones."""
        used = {slot.name: slot for slot in slots}
        missing = [slot for slot in used.values() if slot.name not in self.memory]
        wanted = sum(slot.nbytes for slot in missing) + working_bytes
        self.make_room(number, wanted, used)
        for slot in missing:
            if slot.name in self.outside:
                self.done.append(Spill(slot, "fetch"))
            self.memory[slot.name] = slot
            self.bytes_in_use += slot.nbytes
            self.kept_in_use += self.kept_bytes.get(slot.name, 0)

    def make_room(self, number: int, wanted: int, used: Collection[str]) -> None:
        """Evict slots until so many bytes are free; the slots `used` stay."""

        def priority(slot: Slot) -> tuple[int, bool, int, str]:
            # Of slots with the same next use, prefer one that need not be copied, then the largest.
            next_use = self.next_use(slot, number)
            return next_use, slot.name in self.outside, slot.nbytes, slot.name

        while self.bytes_in_use + wanted > self.limit:
            movable = []
            for name, slot in self.memory.items():
                if name not in used and name not in self.kept_bytes:
                    movable.append(slot)
            assert movable, f"step {number} does not fit into {self.limit} bytes"
            self.evict(max(movable, key=priority))

    def next_use(self, slot: Slot, number: int) -> int:
        """Return the next step after `number` that uses a slot, or the number of all steps."""
        uses = self.uses[slot.name]
        position = bisect_right(uses, number)
        return uses[position] if position < len(uses) else len(self.steps)

    def evict(self, slot: Slot) -> None:
        if slot.name not in self.outside:
            self.done.append(Spill(slot, "evict"))
            self.outside.add(slot.name)
        self.done.append(Spill(slot, "drop"))
        self.leave_memory(slot)

    def leave_memory(self, slot: Slot) -> None:
        if self.memory.pop(slot.name, None) is not None:
            self.bytes_in_use -= slot.nbytes


# ---- copies run during kernels ------------------------------------------------------------------


def _evict_early(steps: Sequence[Step]) -> list[Step]:
    """Begin each copy to the slow tier directly behind the step that wrote the slot last.

    The slot stays in memory until it is dropped.
    """
    evicts_after: dict[int, list[Step]] = {}
    written: dict[str, int] = {}
    for number, step in enumerate(steps):
        for slot in step.writes:
            written[slot.name] = number
        for slot in step.spills("evict"):
            evicts_after.setdefault(written[slot.name], []).append(step)
    found: list[Step] = []
    for number, step in enumerate(steps):
        if not step.spills("evict"):
            found.append(step)
        found += evicts_after.get(number, ())
    return found


def _fetch_early(steps: Sequence[Step], limit: int) -> list[Step]:
    """Begin each copy from the slow tier as early as there is memory, in their order."""
    needed = bytes_needed(steps)
    fetches_before: dict[int, list[Step]] = {}
    moved: set[int] = set()
    last_start = 0
    last_use: dict[str, int] = {}  # the last step so far that used or dropped a slot
    for number, step in enumerate(steps):
        for slot in step.spills("fetch"):
            first = max(last_start, last_use[slot.name] + 1)
            start = earliest_start(steps, needed, number, slot.nbytes, limit, first=first)
            if start is None:
                continue
            last_start = start
            fetches_before.setdefault(start, []).append(step)
            moved.add(number)
            for k in range(start, number):
                needed[k] += slot.nbytes
        for slot in (*step.reads, *step.writes, *step.spills("place", "drop")):
            last_use[slot.name] = number
    return reordered(steps, fetches_before, moved)


# ---- out-of-core tiles ---------------------------------------------------------------------------
#
# The cheapest way to cut a kernel that does not fit into memory.
#
# Example: Z[i,k] = Σ[j](A[i,j] × B[j,k]) with extents of 100 and the blocks i:50, k:100, j:50 takes
# four tiles. The loops run over i, then k, then j:
#
#     1. Z[0:50, :]    = A[0:50, 0:50]     × B[0:50, :]
#     2. Z[0:50, :]   += A[0:50, 50:100]   × B[50:100, :]
#     3. Z[50:100, :]  = A[50:100, 0:50]   × B[0:50, :]
#     4. Z[50:100, :] += A[50:100, 50:100] × B[50:100, :]
#
# Every tile needs other pieces than the tile before: A is fetched once in all, B twice. The blocks
# i:50, k:100, j:100 make two tiles. B stays in memory between them and is fetched once, but its
# piece is twice as large.

TILE_OVERHEAD_BYTES = 2**18  # what could be copied in the time it takes to begin a tile


# A way to cut a kernel, after its cost in bytes that could be copied in the time that it takes.
_Priced: TypeAlias = tuple[float, Tiles]


def out_of_core(kernel: Kernel, memory: int, inside: Sequence[int] = ()) -> Compute | None:
    """Cut a kernel into tiles that fit into `memory` bytes; return None where nothing fits.

    The cut chosen is the one that fetches the fewest bytes, and combines the fewest where it cuts
    an aggregation. `inside` are operands that are whole in memory, not counted in `memory`.
    """
    slots = (*kernel.operands, kernel.target)
    shapes = tuple(slot.shape for slot in slots)
    itemsizes = tuple(np.dtype(slot.dtype).itemsize for slot in slots)
    tiles = _best_tiles(Pieces(kernel.einsum, shapes, itemsizes, tuple(inside)), memory)
    return None if tiles is None else Compute((kernel,), tiles)


@bounded_cache(1024)  # layers repeat
def _best_tiles(pieces: Pieces, memory: int) -> Tiles | None:
    sizes = pieces.sizes()
    found = [_cheapest(pieces, sizes, memory, ahead) for ahead in (True, False)]
    possible = [priced for priced in found if priced is not None]
    if not possible:
        # The plan promised that the longest shares fit. With more than six labels, other labels
        # may be the longest on this rank: then only single elements are sure to fit.
        ones = np.ones_like(sizes[:1])
        if pieces.einsum.sums_blocks:
            outputs = len(pieces.einsum.output)
            ones[:, outputs:] = sizes[:1, outputs:]
        single = _cheapest(pieces, ones, memory, ahead=False)
        return None if single is None else single[1]
    _, tiles = min(possible, key=lambda priced: priced[0])
    return tiles


def _cheapest(pieces: Pieces, sizes: Sizes, memory: int, ahead: bool) -> _Priced | None:
    """Return the cheapest of these sizes of blocks, with the best order of the loops."""
    needed = pieces.nbytes(sizes, ahead)
    fits = needed <= memory
    sizes = sizes[fits]
    needed = needed[fits]
    if len(sizes) == 0:
        return None
    einsum = pieces.einsum
    # A row for each way to cut, a column for each label: how many parts.
    parts = pieces.parts(sizes).astype(np.float64)
    parts_of = dict(zip(einsum.labels, parts.T, strict=True))
    aggregated_parts = parts[:, len(einsum.output) :].prod(axis=1)
    combined = prod(pieces.shapes[-1]) * pieces.itemsizes[-1] * (aggregated_parts - 1)
    fixed = combined + TILE_OVERHEAD_BYTES * parts.prod(axis=1)
    copied = _copied_once(pieces, sizes)
    best: _Priced | None = None
    for order in _orders(einsum.output):
        loops = (*order, *einsum.aggregated)
        fetched = np.zeros(len(sizes))
        for entries, nbytes in copied:
            fetched += nbytes * _times_copied(entries, parts_of, loops)
        cost = fixed + fetched
        if not ahead:
            cost = 2 * cost  # nothing is computed while pieces are copied
        row = int(cost.argmin())
        if best is None or cost[row] < best[0]:
            size = dict(zip(einsum.labels, map(int, sizes[row]), strict=True))
            tiles = Tiles(
                "slow",
                tuple([(label,) for label in loops]),
                tuple([size[label] for label in loops]),
                nbytes=int(needed[row]),
                inside=pieces.inside,
                ahead=ahead,
                fetched=int(fetched[row]),
            )
            best = float(cost[row]), tiles
    return best


def _orders(output: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield orders of the loops over the labels of the output: any two as the innermost ones.

    The order of the output itself comes first.
    """
    if len(output) < 2:
        yield tuple(output)
    for last, before in itertools.permutations(reversed(output), 2):
        outer = [label for label in output if label not in (last, before)]
        yield (*outer, before, last)


def _copied_once(pieces: Pieces, sizes: Sizes) -> list[tuple[IndexEntries, Amounts]]:
    """Return the bytes of all pieces of each operand that is copied, each piece counted once."""
    found = []
    for entries, shape, nbytes in pieces.copied:
        for entry, extent in zip(entries, shape, strict=True):
            if not isinstance(entry, str):
                nbytes *= extent  # a gather needs all of this dimension
        total = np.full(len(sizes), float(nbytes))
        for label in dict.fromkeys(entry for entry in entries if isinstance(entry, str)):
            size = sizes[:, pieces.columns[label]]
            extent = pieces.einsum.extent[label]
            power = entries.count(label)  # the pieces of a diagonal are squares
            last_size = (extent % size).astype(np.float64)
            total *= extent // size * size.astype(np.float64) ** power + last_size**power
        found.append((entries, total))
    return found


def _times_copied(
    entries: IndexEntries, parts_of: Mapping[str, Amounts], loops: Sequence[str]
) -> Amounts:
    """Return how often each piece of an operand is copied, for each way to cut.

    A piece stays in memory as long as the next tile wants the same one. So a loop over a label
    that the operand does not have copies it again only if a loop inside it changes the piece.
    """
    ways = len(next(iter(parts_of.values()))) if parts_of else 1
    times: Amounts = np.ones(ways)
    changes: npt.NDArray[np.bool_] = np.zeros(ways, bool)
    for label in reversed(loops):
        if label in entries:
            changes = changes | (parts_of[label] > 1)
        else:
            times = times * np.where(changes, parts_of[label], 1)
    return times
