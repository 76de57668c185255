"""A kernel piece by piece: which pieces there are, what memory and what copies they take, and which cut takes least."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from einmpi.graph.einsum import EinSum, OperandIndex
from einmpi.planner.pieces import Amounts, Sizes, block_sizes, counts, pieces_bytes
from einmpi.schedule.regions import Region, Runs, one_run, stretch, whole
from einmpi.schedule.steps import Kernel, Passes

PASS_WORTH = 2**18  # bytes that could be copied in the time it takes to begin a pass


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
    ranges = [
        [(k, min(k + size, extent[x])) for k in range(0, max(extent[x], 1), size)]
        for x, size in step.blocks
    ]
    shaped: dict[tuple[int, ...], EinSum] = {}  # most pieces have the same extents
    for chosen in itertools.product(*ranges):
        box = {label: range_ for (label, _), range_ in zip(step.blocks, chosen, strict=True)}
        extents = tuple(box[label][1] - box[label][0] for label in einsum.labels)
        if extents not in shaped:
            shaped[extents] = replace(
                einsum, extents=tuple(zip(einsum.labels, extents, strict=True))
            )
        yield _piece(step, shaped[extents], box)


def _piece(step: Passes, local: EinSum, box: Mapping[str, tuple[int, int]]) -> Piece:
    kernel, einsum = step.kernel, step.kernel.einsum
    selected = {
        (operand, dimension): stretch(runs, *box[_label(kernel, operand, dimension)])
        for operand, dimension, runs in kernel.select
    }
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
    index = tuple(
        (x, stretch(known[x], *box[x]) if x in known else one_run(*box[x]))
        for x in einsum.labels_as_numbers
    )
    target = tuple(one_run(*box[label]) for label in einsum.output)
    first = all(box[label][0] == 0 for label in einsum.aggregated)
    return Piece(
        replace(kernel, einsum=local, index=index, select=select), tuple(regions), target, first
    )


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
    found = _best(
        kernel.einsum, tuple(slot.shape for slot in slots), itemsizes, memory, tuple(inside)
    )
    return None if found is None else Passes(kernel, *found)


@lru_cache(maxsize=1024)  # layers repeat
def _best(
    einsum: EinSum,
    shapes: tuple[tuple[int, ...], ...],
    itemsizes: tuple[int, ...],
    memory: int,
    inside: tuple[int, ...],
) -> tuple[Any, ...] | None:
    """(blocks, inside, ahead, bytes of the pieces, bytes that are fetched)."""
    sizes = block_sizes(einsum)
    tries = [
        _cheapest(einsum, sizes, shapes, itemsizes, memory, inside, ahead)
        for ahead in (True, False)
    ]
    if not any(tries):
        # A plan is made for the longest shares. Of more than six labels others may be the longest here.
        tries = [
            _cheapest(
                einsum, np.ones_like(sizes[:1]), shapes, itemsizes, memory, inside, ahead=False
            )
        ]
    best = min(
        filter(None, tries), key=lambda each: each[0], default=None
    )  # of equal ones the first
    return None if best is None else best[1]


def _cheapest(
    einsum: EinSum,
    sizes: Sizes,
    shapes: Sequence[Sequence[int]],
    itemsizes: Sequence[int],
    memory: int,
    inside: tuple[int, ...],
    ahead: bool,
) -> tuple[float, tuple[Any, ...]] | None:
    """What the best of these ways costs, and how it cuts."""
    needed = pieces_bytes(einsum, sizes, shapes, itemsizes, inside, ahead)
    sizes, needed = sizes[needed <= memory], needed[needed <= memory]
    if not len(sizes):
        return None
    cut = counts(einsum, sizes).astype(np.float64)
    parts = dict(zip(einsum.labels, cut.T, strict=True))
    combined = prod(shapes[-1]) * itemsizes[-1] * (cut[:, len(einsum.output) :].prod(axis=1) - 1)
    fixed = combined + PASS_WORTH * cut.prod(axis=1)
    copied = _copied(einsum, shapes, itemsizes, sizes, inside)
    best: tuple[float, tuple[Any, ...]] | None = None
    for order in _orders(einsum.output):
        loops = (*order, *einsum.aggregated)
        fetched = np.zeros(len(sizes))
        for operand, nbytes in copied.items():
            fetched += nbytes * _times(einsum.operands[operand], parts, loops)
        # Of copies that nothing goes on beside, half as many take as long.
        cost = (fixed + fetched) * (1 if ahead else 2)
        row = int(cost.argmin())
        if best is None or cost[row] < best[0]:
            size = dict(zip(einsum.labels, map(int, sizes[row]), strict=True))
            blocks = tuple((x, size[x]) for x in loops)
            best = float(cost[row]), (blocks, inside, ahead, int(needed[row]), int(fetched[row]))
    return best


def _orders(output: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Orders of the loops over the output's labels: any two as the innermost. First the one in which they are."""
    if len(output) < 2:
        yield tuple(output)
    for last, before in itertools.permutations(reversed(output), 2):
        yield (*(label for label in output if label not in (last, before)), before, last)


def _copied(
    einsum: EinSum,
    shapes: Sequence[Sequence[int]],
    itemsizes: Sequence[int],
    sizes: Sizes,
    inside: Sequence[int],
) -> dict[int, Amounts]:
    """Bytes of all pieces of each operand that is copied, if each piece is copied once."""
    found = {}
    column = {label: k for k, label in enumerate(einsum.labels)}
    for operand, entries in enumerate(einsum.operands):
        if operand in inside:
            continue
        whole_of = [
            n
            for entry, n in zip(entries, shapes[operand], strict=True)
            if not isinstance(entry, str)
        ]
        total = np.full(len(sizes), float(itemsizes[operand] * prod(whole_of)))
        for label in dict.fromkeys(entry for entry in entries if isinstance(entry, str)):
            size, extent, power = (
                sizes[:, column[label]],
                einsum.extent[label],
                entries.count(label),
            )
            # Of a diagonal the pieces are squares.
            total *= (
                extent // size * size.astype(np.float64) ** power
                + (extent % size).astype(np.float64) ** power
            )
        found[operand] = total
    return found


def _times(
    entries: OperandIndex, parts: Mapping[str, Amounts], loops: Sequence[str]
) -> Amounts | int:
    """How often each piece of an operand is copied: it stays as long as the next pass wants the same one."""
    times: Amounts | int = 1
    changes: Any = False
    for label in reversed(loops):
        if label in entries:
            changes = changes | (parts[label] > 1)
        else:
            times = times * np.where(changes, parts[label], 1)
    return times
