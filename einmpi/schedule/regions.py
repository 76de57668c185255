"""Regions of tensors, as products of runs of indices, and their places in buffers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.caches import bounded_cache
from einmpi.planner.moving.halo import Runs as Runs
from einmpi.planner.moving.halo import intersect as intersect
from einmpi.planner.moving.halo import joined
from einmpi.planner.moving.halo import length as length
from einmpi.planner.moving.halo import one_run as one_run
from einmpi.planner.moving.halo import share as share
from einmpi.planner.moving.halo import whole as whole
from einmpi.planner.moving.known_lists import Listed as Listed
from einmpi.planner.moving.known_lists import indices_of, located_listed, runs_of

# Those with `as` belong to the vocabulary of this module too, for rooms that know no planner.

# A region has runs for each dimension, and consists of all combinations of their indices. The
# region (((0, 4), (8, 10)), ((5, 6),)) of a matrix has six rows and one column.
#
# A region that a rank holds is stored densely in a buffer of the region's shape. There, the places
# of the rows 0–3, 8 and 9 are 0 to 5. `locate` turns indices into places: the rows ((8, 10),) of
# this buffer are at the places ((4, 6),).
Region: TypeAlias = tuple[Runs, ...]
Box: TypeAlias = tuple[slice, ...]


# ---- size and text ------------------------------------------------------------------------------


def shape(region: Region) -> tuple[int, ...]:
    """Return the extents of a region."""
    return tuple(map(length, region))


def elements(region: Region) -> int:
    """Return the number of elements of a region."""
    return prod(map(length, region))


def packed(region: Region) -> Region:
    """Return the place of a region in a buffer that holds nothing else."""
    return tuple(map(whole, shape(region)))


def show_region(region: Region) -> str:
    """Return text such as [0:4 8:10, 5:6], with the first runs only where there are many."""
    return f"[{', '.join(map(_show_runs, region))}]"


def _show_runs(runs: Runs) -> str:
    if not runs:
        return "nothing"
    shown = " ".join(f"{start}:{stop}" for start, stop in runs[:3])
    if len(runs) > 3:
        shown += f" … ({len(runs)} runs)"
    return shown


def indices(runs: Runs) -> npt.NDArray[np.intp]:
    """Return all indices of the runs, in order."""
    return indices_of(runs)


# ---- sets of indices ----------------------------------------------------------------------------


def union(parts: Iterable[Runs]) -> Runs:
    """Return the indices of all parts, which must be disjoint."""
    return joined(sorted(itertools.chain.from_iterable(parts)))


def subtract(one: Runs, two: Runs) -> Runs:
    """Return the indices of the first that the second does not have."""
    if not one:
        return ()
    if isinstance(one, Listed) or isinstance(two, Listed):
        return runs_of(np.setdiff1d(indices_of(one), indices_of(two), assume_unique=True))
    last = one[-1][1]
    gaps = []  # what the second leaves out, up to the end of the first
    end = 0
    for start, stop in two:
        if end < start:
            gaps.append((end, start))
        end = stop
    if end < last:
        gaps.append((end, last))
    return intersect(one, tuple(gaps))


def locate(inner: Runs, outer: Runs) -> Runs:
    """Return the places of the indices `inner` in a buffer that holds the indices `outer`."""
    if isinstance(inner, Listed) or isinstance(outer, Listed):
        return located_listed(inner, outer)
    return _locate(inner, outer)


@bounded_cache(16384)
def _locate(inner: Runs, outer: Runs) -> Runs:
    found = []
    stored = 0  # how many indices are stored before the current run of `outer`
    k = 0
    for start, stop in inner:
        while outer[k][1] <= start:
            stored += outer[k][1] - outer[k][0]
            k += 1
        assert outer[k][0] <= start and stop <= outer[k][1], "the inner indices are not all there"
        found.append((stored + start - outer[k][0], stored + stop - outer[k][0]))
    return joined(found)


@bounded_cache(16384)
def split(runs: Runs, pieces: int, which: int) -> Runs:
    """Divide the indices, in order, into nearly equal pieces and return piece number `which`."""
    count = length(runs)
    return stretch(runs, count * which // pieces, count * (which + 1) // pieces)


def stretch(runs: Runs, first: int, last: int) -> Runs:
    """Return the indices at the places from `first` up to `last`: the inverse of `locate`."""
    if isinstance(runs, Listed):
        return runs_of(runs.indices[first:last])
    found = []
    stored = 0
    for start, stop in runs:
        begin = max(first - stored, 0)
        end = min(last - stored, stop - start)
        if begin < end:
            found.append((start + begin, start + end))
        stored += stop - start
    return tuple(found)


# ---- regions in memory --------------------------------------------------------------------------


def flat_range(region: Region, extents: Sequence[int]) -> tuple[int, int] | None:
    """Return the range of a region among the elements in row-major order; None if it has gaps."""
    start = 0
    count = 1
    stride = 1
    inner_complete = True  # all inner dimensions are taken as a whole
    for runs, extent in zip(reversed(region), reversed(extents), strict=True):
        if len(runs) != 1:
            return None
        first, last = runs[0]
        taken = last - first
        if not inner_complete and taken != 1:
            return None
        start += first * stride
        count *= taken
        inner_complete = inner_complete and taken == extent
        stride *= extent
    return start, start + count


def chunks(region: Region, limit: int) -> list[Region]:
    """Cut a region into pieces of at most `limit` elements.

    Regions of the same shape are cut at the same places.
    """
    extents = shape(region)
    if 0 < prod(extents) <= limit:  # as a rule
        return [region]
    pieces = []
    for dimension, runs in enumerate(region):
        extent = extents[dimension]
        inner = prod(extents[dimension + 1 :])
        at_a_time = 1
        if inner:
            at_a_time = min(extent, max(1, limit // inner))
        count = -(-extent // at_a_time) if extent else 0
        pieces.append([split(runs, count, which) for which in range(count)])
    return list(itertools.product(*pieces))


def boxes(region: Region, place: Region) -> Iterator[tuple[Box, Box]]:
    """Yield a region and its place in a buffer, run by run, as (slices there, slices here).

    `place` is where `locate` finds the region: a run of the region is a run there.
    """
    for combination in itertools.product(*map(sides, region, place)):
        there = tuple(pair[0] for pair in combination)
        here = tuple(pair[1] for pair in combination)
        yield there, here


def sides(runs: Runs, places: Runs) -> list[tuple[slice, slice]]:
    """Return the runs of one dimension, each with its place.

    One run of places may hold several runs one after another.
    """
    pairs = []
    k = 0
    here = places[0][0] if places else 0
    for start, stop in runs:
        if here == places[k][1]:
            k += 1
            here = places[k][0]
        pairs.append((slice(start, stop), slice(here, here + stop - start)))
        here += stop - start
    return pairs


def paired_boxes(one: Region, two: Region) -> Iterator[tuple[Box, Box]]:
    """Yield two regions of the same shape, box by box, as (slices in one, slices in the other)."""
    for combination in itertools.product(*map(_paired_runs, one, two)):
        yield tuple(pair[0] for pair in combination), tuple(pair[1] for pair in combination)


def _paired_runs(one: Runs, two: Runs) -> list[tuple[slice, slice]]:
    """Return the indices of two runs in parts that are without gaps in both."""
    pairs = []
    others = list(two)
    for start, stop in one:
        while start < stop:
            other_start, other_stop = others.pop(0)
            count = min(stop - start, other_stop - other_start)
            pairs.append((slice(start, start + count), slice(other_start, other_start + count)))
            start += count
            if other_start + count < other_stop:
                others.insert(0, (other_start + count, other_stop))
    return pairs


# ---- slots ---------------------------------------------------------------------------------------
#
# Slots: the local buffers of a rank, each with its part of a tensor.


FINAL_LAYOUT = "'"  # role of a slot that holds a computed tensor in the layout the plan gives it


@dataclass(frozen=True)
class Slot:
    """A local buffer, which holds this rank's part of a tensor.

    A tensor may have several slots: Z as its kernel leaves it, Z' in its final layout, and Z→V.0
    in the layout in which V needs it as its operand 0.
    """

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    role: str = ""  # FINAL_LAYOUT, or operand_role(…)

    name: str = field(init=False, compare=False)  # tensor and role: unique in a schedule
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # Plain attributes, since every step of a run looks up slots by name.
        object.__setattr__(self, "name", self.tensor + self.role)
        nbytes = prod(self.shape) * np.dtype(self.dtype).itemsize
        object.__setattr__(self, "nbytes", nbytes)

    def __str__(self) -> str:
        return f"{self.name}{list(self.shape)}"


def operand_role(user: str, operand: int) -> str:
    """Return the role of a slot that a vertex reads as the operand with this number."""
    return f"→{user}.{operand}"


Slots: TypeAlias = tuple[Slot, ...]


def names_of(slots: Iterable[Slot]) -> list[str]:
    """Return the names of some slots, in their order."""
    return [slot.name for slot in slots]


def slot_for(tensor: str, region: Region, dtype: str, role: str = "") -> Slot:
    """Return the slot that holds a region of a tensor."""
    return Slot(tensor, shape(region), dtype, role)
