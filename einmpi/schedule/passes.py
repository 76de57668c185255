"""A kernel computed piece by piece: which pieces there are, and which way to cut costs least."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import IndexEntries
from einmpi.planner.memory import Amounts, Sizes, block_sizes, counts, pieces_bytes
from einmpi.schedule.regions import Region, Runs, one_run, stretch, whole
from einmpi.schedule.steps import Kernel, Passes

# Example: Z[i,k] = Σ[j](A[i,j] × B[j,k]) with extents of 100 and the blocks i:50, k:100, j:50 takes
# four passes. The loops run over i, then k, then j:
#
#     1. Z[0:50, :]    = A[0:50, 0:50]     × B[0:50, :]
#     2. Z[0:50, :]   += A[0:50, 50:100]   × B[50:100, :]
#     3. Z[50:100, :]  = A[50:100, 0:50]   × B[0:50, :]
#     4. Z[50:100, :] += A[50:100, 50:100] × B[50:100, :]
#
# Every pass needs other pieces than the pass before: A is fetched once in all, B twice. The blocks
# i:50, k:100, j:100 make two passes. B stays in memory between them and is fetched once, but its
# piece is twice as large.

PASS_OVERHEAD_BYTES = 2**18  # what could be copied in the time it takes to begin a pass


@dataclass(frozen=True)
class Piece:
    """One pass: a kernel of its own, on a part of each operand and of the target."""

    kernel: Kernel
    operands: tuple[Region, ...]  # in their slots
    target: Region
    first: bool  # of the passes for this part of the target; later ones are aggregated into it


def pieces(step: Passes) -> Iterator[Piece]:
    """Yield the passes in order."""
    einsum = step.kernel.einsum
    ranges = []  # of each label, in the order of the loops
    for label, size in step.blocks:
        extent = einsum.extent[label]
        starts = range(0, max(extent, 1), size)
        ranges.append([(start, min(start + size, extent)) for start in starts])
    shaped: dict[tuple[int, ...], EinSum] = {}  # most pieces have the same extents
    for chosen in itertools.product(*ranges):
        box = {label: bounds for (label, _), bounds in zip(step.blocks, chosen, strict=True)}
        extents = tuple(box[label][1] - box[label][0] for label in einsum.labels)
        if extents not in shaped:
            named = tuple(zip(einsum.labels, extents, strict=True))
            shaped[extents] = replace(einsum, extents=named)
        yield _piece(step, shaped[extents], box)


def piece_in_box(kernel: Kernel, box: Mapping[str, tuple[int, int]]) -> Piece:
    """Return a kernel on the part of each label that `box` gives, from slots in memory."""
    everywhere = tuple(range(len(kernel.operands)))
    step = Passes(kernel, (), everywhere, ahead=False, buffers=0, fetched=0)
    extents = tuple((label, box[label][1] - box[label][0]) for label in kernel.einsum.labels)
    return _piece(step, replace(kernel.einsum, extents=extents), box)


def _piece(step: Passes, local: EinSum, box: Mapping[str, tuple[int, int]]) -> Piece:
    """Return the pass on the part of each label that `box` gives."""
    kernel = step.kernel
    einsum = kernel.einsum
    selected: dict[tuple[int, int], Runs] = {}
    for operand, dimension, runs in kernel.select:
        selected[operand, dimension] = stretch(runs, *box[_label(kernel, operand, dimension)])
    regions = []
    for operand, (slot, entries) in enumerate(zip(kernel.operands, einsum.operands, strict=True)):
        region: list[Runs] = []
        for dimension, entry in enumerate(entries):
            is_selected = (operand, dimension) in selected
            if is_selected and operand not in step.inside:
                region.append(selected[operand, dimension])
            elif isinstance(entry, str) and not is_selected:
                region.append(one_run(*box[entry]))
            else:
                region.append(whole(slot.shape[dimension]))  # a gather may read any of it
        regions.append(tuple(region))
    # A piece that was copied contains what is selected and nothing else.
    select = []
    for (operand, dimension), runs in selected.items():
        if operand in step.inside:
            select.append((operand, dimension, runs))
    known = dict(kernel.index)
    index = []
    for label in einsum.labels_as_numbers:
        if label in known:
            index.append((label, stretch(known[label], *box[label])))
        else:
            index.append((label, one_run(*box[label])))
    target = tuple(one_run(*box[label]) for label in einsum.output)
    first = all(box[label][0] == 0 for label in einsum.aggregated)
    own = replace(kernel, einsum=local, index=tuple(index), select=tuple(select))
    return Piece(own, tuple(regions), target, first)


def _label(kernel: Kernel, operand: int, dimension: int) -> str:
    entry = kernel.einsum.operands[operand][dimension]
    assert isinstance(entry, str)
    return entry


# ---- the cheapest way to cut --------------------------------------------------------------------


@dataclass(frozen=True)
class _Cut:
    """One way to cut a kernel; the fields are those of Passes."""

    cost: float  # in bytes that could be copied in the time it takes
    blocks: tuple[tuple[str, int], ...]
    ahead: bool
    buffers: int
    fetched: int


def in_passes(kernel: Kernel, memory: int, inside: Sequence[int] = ()) -> Passes | None:
    """Cut a kernel into pieces that fit into `memory` bytes; return None where nothing fits.

    The cut chosen is the one that fetches the fewest bytes, and combines the fewest where it cuts
    an aggregation. `inside` are operands that are whole in memory, not counted in `memory`.
    """
    slots = (*kernel.operands, kernel.target)
    shapes = tuple(slot.shape for slot in slots)
    itemsizes = tuple(np.dtype(slot.dtype).itemsize for slot in slots)
    cut = _best_cut(kernel.einsum, shapes, itemsizes, memory, tuple(inside))
    if cut is None:
        return None
    return Passes(kernel, cut.blocks, tuple(inside), cut.ahead, cut.buffers, cut.fetched)


@lru_cache(maxsize=1024)  # layers repeat
def _best_cut(
    einsum: EinSum,
    shapes: tuple[tuple[int, ...], ...],
    itemsizes: tuple[int, ...],
    memory: int,
    inside: tuple[int, ...],
) -> _Cut | None:
    sizes = block_sizes(einsum)
    best = _cheapest(einsum, sizes, shapes, itemsizes, memory, inside, ahead=True)
    without = _cheapest(einsum, sizes, shapes, itemsizes, memory, inside, ahead=False)
    if best is None or (without is not None and without.cost < best.cost):
        best = without
    if best is None:
        # The plan promised that the longest shares fit. With more than six labels, other labels
        # may be the longest on this rank: then only single elements are sure to fit.
        ones = np.ones_like(sizes[:1])
        best = _cheapest(einsum, ones, shapes, itemsizes, memory, inside, ahead=False)
    return best


def _cheapest(
    einsum: EinSum,
    sizes: Sizes,
    shapes: Sequence[Sequence[int]],
    itemsizes: Sequence[int],
    memory: int,
    inside: tuple[int, ...],
    ahead: bool,
) -> _Cut | None:
    """Return the cheapest of these sizes of blocks, with the best order of the loops."""
    needed = pieces_bytes(einsum, sizes, shapes, itemsizes, inside, ahead)
    fits = needed <= memory
    sizes = sizes[fits]
    needed = needed[fits]
    if len(sizes) == 0:
        return None
    # A row for each way to cut, a column for each label: how many parts.
    parts = counts(einsum, sizes).astype(np.float64)
    parts_of = dict(zip(einsum.labels, parts.T, strict=True))
    aggregated_parts = parts[:, len(einsum.output) :].prod(axis=1)
    combined = prod(shapes[-1]) * itemsizes[-1] * (aggregated_parts - 1)
    fixed = combined + PASS_OVERHEAD_BYTES * parts.prod(axis=1)
    copied = _copied_once(einsum, shapes, itemsizes, sizes, inside)
    best: _Cut | None = None
    for order in _orders(einsum.output):
        loops = (*order, *einsum.aggregated)
        fetched = np.zeros(len(sizes))
        for operand, nbytes in copied.items():
            fetched += nbytes * _times_copied(einsum.operands[operand], parts_of, loops)
        cost = fixed + fetched
        if not ahead:
            cost = 2 * cost  # nothing is computed while pieces are copied
        row = int(cost.argmin())
        if best is None or cost[row] < best.cost:
            size = dict(zip(einsum.labels, map(int, sizes[row]), strict=True))
            blocks = tuple((label, size[label]) for label in loops)
            best = _Cut(float(cost[row]), blocks, ahead, int(needed[row]), int(fetched[row]))
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


def _copied_once(
    einsum: EinSum,
    shapes: Sequence[Sequence[int]],
    itemsizes: Sequence[int],
    sizes: Sizes,
    inside: Sequence[int],
) -> dict[int, Amounts]:
    """Return the bytes of all pieces of each operand that is copied, each piece counted once."""
    found = {}
    column = {label: k for k, label in enumerate(einsum.labels)}
    for operand, entries in enumerate(einsum.operands):
        if operand in inside:
            continue
        nbytes = itemsizes[operand]
        for entry, extent in zip(entries, shapes[operand], strict=True):
            if not isinstance(entry, str):
                nbytes *= extent  # a gather needs all of this dimension
        total = np.full(len(sizes), float(nbytes))
        for label in dict.fromkeys(entry for entry in entries if isinstance(entry, str)):
            size = sizes[:, column[label]]
            extent = einsum.extent[label]
            power = entries.count(label)  # the pieces of a diagonal are squares
            last_size = (extent % size).astype(np.float64)
            total *= extent // size * size.astype(np.float64) ** power + last_size**power
        found[operand] = total
    return found


def _times_copied(
    entries: IndexEntries, parts_of: Mapping[str, Amounts], loops: Sequence[str]
) -> Amounts:
    """Return how often each piece of an operand is copied, for each way to cut.

    A piece stays in memory as long as the next pass wants the same one. So a loop over a label
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
