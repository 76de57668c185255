"""A kernel piece by piece: which pieces there are, what memory and what copies they take, and which cut takes least."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from einmpi.graph.einsum import EinSum
from einmpi.plan.pieces import block_sizes, pieces_bytes
from einmpi.schedule.regions import Region, Runs, one_run, stretch, whole
from einmpi.schedule.steps import Kernel, Passes

PASS_WORTH = 2**16  # bytes that could be copied in the time it takes to begin a pass


@dataclass(frozen=True)
class Piece:
    """One pass: a kernel of its own, on a part of each operand and of the target."""

    kernel: Kernel
    operands: tuple[Region, ...]  # in their slots
    target: Region
    first: bool  # of those that make this part of the target; the others are aggregated into it


def pieces(step: Passes) -> Iterator[Piece]:
    """The passes in their order."""
    einsum, extent = step.kernel.einsum, step.kernel.einsum.extent
    ranges = [[(k, min(k + size, extent[x])) for k in range(0, max(extent[x], 1), size)] for x, size in step.blocks]
    for chosen in itertools.product(*ranges):
        box = {label: range_ for (label, _), range_ in zip(step.blocks, chosen, strict=True)}
        first = all(box[label][0] == 0 for label in einsum.aggregated)
        yield _piece(step, box, first)


def _piece(step: Passes, box: Mapping[str, tuple[int, int]], first: bool) -> Piece:
    kernel, einsum = step.kernel, step.kernel.einsum
    selected = {(operand, dimension): stretch(runs, *box[_label(kernel, operand, dimension)])
                for operand, dimension, runs in kernel.select}  # fmt: skip
    regions = []
    for operand, (slot, entries) in enumerate(zip(kernel.operands, einsum.operands, strict=True)):
        region: list[Runs] = []
        for dimension, entry in enumerate(entries):
            if (operand, dimension) in selected and operand not in step.inside:
                region.append(selected[operand, dimension])
            elif isinstance(entry, str) and (operand, dimension) not in selected:
                region.append(one_run(*box[entry]))
            else:
                region.append(whole(slot.shape[dimension]))  # a gather may want any of it
        regions.append(tuple(region))
    # Pieces that are copied hold what is selected and nothing else.
    select = tuple((*key, runs) for key, runs in selected.items() if key[0] in step.inside)
    known = dict(kernel.index)
    index = tuple((x, stretch(known[x], *box[x]) if x in known else one_run(*box[x])) for x in einsum.labels_as_numbers)
    extents = tuple((label, box[label][1] - box[label][0]) for label in einsum.labels)
    target = tuple(one_run(*box[label]) for label in einsum.output)
    local = replace(kernel, einsum=replace(einsum, extents=extents), index=index, select=select)
    return Piece(local, tuple(regions), target, first)


def _label(kernel: Kernel, operand: int, dimension: int) -> str:
    entry = kernel.einsum.operands[operand][dimension]
    assert isinstance(entry, str)
    return entry


# ---- the cut that takes least ---------------------------------------------------------------------------------------


def in_passes(kernel: Kernel, memory: int, inside: Sequence[int] = ()) -> Passes | None:
    """The kernel in pieces that fit into so many bytes: the cut with which the fewest bytes are fetched, and combined
    where an aggregation is cut. None where there is no such cut.

    `inside` are operands that are in memory whole, beside these bytes.
    """
    slots = (*kernel.operands, kernel.target)
    itemsizes = tuple(np.dtype(slot.dtype).itemsize for slot in slots)
    found = _best(kernel.einsum, tuple(slot.shape for slot in slots), itemsizes, memory, tuple(inside))
    return None if found is None else Passes(kernel, *found)


@lru_cache(maxsize=1024)  # layers repeat
def _best(einsum: EinSum, shapes: tuple[tuple[int, ...], ...], itemsizes: tuple[int, ...], memory: int,
          inside: tuple[int, ...]) -> tuple[Any, ...] | None:  # fmt: skip
    """(blocks, inside, ahead, bytes of the pieces, bytes that are fetched)."""
    for ahead in (True, False):
        best: tuple[int, tuple[Any, ...]] | None = None
        for size in block_sizes(einsum):
            needed = pieces_bytes(einsum, size, shapes, itemsizes, inside, ahead)
            if needed > memory:
                continue
            counts = _counts(einsum, size)
            passes = prod(counts.values())
            combined = (prod(counts[label] for label in einsum.aggregated) - 1) * prod(shapes[-1]) * itemsizes[-1]
            for order in _orders(einsum, size):
                loops = (*order, *einsum.aggregated)
                fetched = _fetched(einsum, shapes, itemsizes, size, loops, inside)
                cost = fetched + combined + PASS_WORTH * passes
                if best is None or cost < best[0]:  # of equal ones the first
                    best = cost, (tuple((x, size[x]) for x in loops), inside, ahead, needed, fetched)
        if best is not None:
            return best[1]
    return None


def _counts(einsum: EinSum, size: Mapping[str, int]) -> dict[str, int]:
    return {label: -(-max(extent, 1) // size[label]) for label, extent in einsum.extents}


def _orders(einsum: EinSum, size: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Orders of the loops over the output's labels. What is not cut is no loop and stands at the end."""
    loops = [label for label in einsum.output if size[label] < einsum.extent[label]]
    rest = [label for label in einsum.output if label not in loops]
    for order in itertools.permutations(loops) if len(loops) <= 3 else [tuple(loops)]:
        yield (*order, *rest)


def _fetched(einsum: EinSum, shapes: Sequence[Sequence[int]], itemsizes: Sequence[int], size: Mapping[str, int],
             loops: Sequence[str], inside: Sequence[int]) -> int:  # fmt: skip
    """Bytes that are copied into memory. A piece stays as long as the next pass wants the same one."""
    counts, extent, total = _counts(einsum, size), einsum.extent, 0
    for operand, entries in enumerate(einsum.operands):
        if operand in inside:
            continue
        own = {entry for entry in entries if isinstance(entry, str)}
        last = max((place for place, label in enumerate(loops) if label in own and counts[label] > 1), default=-1)
        total += prod(
            [itemsizes[operand]]
            + [counts[label] for label in loops[: last + 1] if label not in own]
            + [n for entry, n in zip(entries, shapes[operand], strict=True) if not isinstance(entry, str)]
            + [sum(length ** entries.count(label) for length in _lengths(extent[label], size[label])) for label in own]
        )
    return total


def _lengths(extent: int, size: int) -> list[int]:
    return [min(size, extent - k) for k in range(0, max(extent, 1), size)]
