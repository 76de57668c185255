"""Runs of indices and products of them: which elements a rank holds under a layout. The only index arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import TypeAlias

import numpy as np

from einmpi.planner.mesh import Mesh

Runs: TypeAlias = tuple[
    tuple[int, int], ...
]  # [start, stop) each; in order, not empty, not touching
Region: TypeAlias = tuple[Runs, ...]  # a product: one set of indices for each dimension
Box: TypeAlias = tuple[slice, ...]


def one_run(start: int, stop: int) -> Runs:
    return ((start, stop),) if stop > start else ()


def whole(extent: int) -> Runs:
    return one_run(0, extent)


def length(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)


def shape(region: Region) -> tuple[int, ...]:
    return tuple(map(length, region))


def elements(region: Region) -> int:
    return prod(shape(region))


def packed(region: Region) -> Region:
    """The place of a region in an array of its own."""
    return tuple(map(whole, shape(region)))


def show_region(region: Region) -> str:
    """[0:4 8:12, :]-like text: the runs of each dimension, only the first ones where there are many."""
    return f"[{', '.join(_show_runs(runs) for runs in region)}]"


def _show_runs(runs: Runs) -> str:
    if not runs:
        return "nothing"
    shown = " ".join(f"{start}:{stop}" for start, stop in runs[:3])
    return shown if len(runs) <= 3 else f"{shown} … ({len(runs)} runs)"


def indices(runs: Runs) -> np.ndarray:
    """All indices of the runs, in order."""
    return (
        np.concatenate([np.arange(start, stop) for start, stop in runs]) if runs else np.arange(0)
    )


def _join(runs: Iterable[tuple[int, int]]) -> Runs:
    """Runs in order, without empty ones, neighbours that touch made one."""
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)


@lru_cache(maxsize=65536)
def share(mesh: Mesh, extent: int, cuts: tuple[tuple[int, int], ...]) -> Runs:
    """The indices of a label or dimension whose digit on each axis is as given by `cuts`: (axis, digit) pairs."""
    found = whole(extent)
    for window in mesh.windows(extent):
        digit = dict(cut for cut in cuts if cut[0] in window)
        if digit:
            found = intersect(found, _share_of_window(mesh, extent, window, digit))
    return found


def _share_of_window(mesh: Mesh, extent: int, window: Sequence[int], digit: dict[int, int]) -> Runs:
    """Index i lies in fine block ⌊i·m/extent⌋ of the window's m blocks; the block's digits decide."""
    factors = [mesh.factors[axis] for axis in window]
    blocks = prod(factors)
    kept, unit = np.arange(blocks), blocks
    for axis, factor in zip(window, factors, strict=True):
        unit //= factor
        if axis in digit:
            kept = kept[kept // unit % factor == digit[axis]]
    starts = -(-kept * extent // blocks)
    stops = -(-(kept + 1) * extent // blocks)
    return _join(zip(starts.tolist(), stops.tolist(), strict=True))


def intersect(one: Runs, two: Runs) -> Runs:
    found = []
    k = m = 0
    while k < len(one) and m < len(two):
        start, stop = max(one[k][0], two[m][0]), min(one[k][1], two[m][1])
        if start < stop:
            found.append((start, stop))
        if one[k][1] < two[m][1]:
            k += 1
        else:
            m += 1
    return tuple(found)


def union(parts: Iterable[Runs]) -> Runs:
    """The indices of all parts, no two of which have one in common."""
    return _join(sorted(run for part in parts for run in part))


def subtract(one: Runs, two: Runs) -> Runs:
    """The indices of the first that the second does not have."""
    gaps = itertools.pairwise((0, *itertools.chain.from_iterable(two), one[-1][1] if one else 0))
    return intersect(
        one, tuple(gap for k, gap in enumerate(gaps) if k % 2 == 0 and gap[0] < gap[1])
    )


def locate(inner: Runs, outer: Runs) -> Runs:
    """Where the indices of `inner` lie when those of `outer`, which has them all, are stored one after another."""
    found = []
    before = k = 0
    for start, stop in inner:
        while outer[k][1] <= start:
            before += outer[k][1] - outer[k][0]
            k += 1
        assert outer[k][0] <= start and stop <= outer[k][1], "the inner indices are not all there"
        found.append((before + start - outer[k][0], before + stop - outer[k][0]))
    return _join(found)


def split(runs: Runs, pieces: int, which: int) -> Runs:
    """Piece number `which` when the indices are dealt out, in order, into pieces as equal as can be."""
    count = length(runs)
    return stretch(runs, count * which // pieces, count * (which + 1) // pieces)


def stretch(runs: Runs, first: int, last: int) -> Runs:
    """The indices at the positions from `first` up to `last`, when they are stored one after another."""
    found, before = [], 0
    for start, stop in runs:
        begin, end = max(first - before, 0), min(last - before, stop - start)
        if begin < end:
            found.append((start + begin, start + end))
        before += stop - start
    return tuple(found)


def flat_range(region: Region, extents: Sequence[int]) -> tuple[int, int] | None:
    """The region as one run of elements in row-major order, or None where it is not one."""
    start, count, unit, all_taken = 0, 1, 1, True
    for runs, extent in zip(reversed(region), reversed(extents), strict=True):
        if len(runs) != 1:
            return None
        taken = runs[0][1] - runs[0][0]
        if not all_taken and taken != 1:
            return None
        start += runs[0][0] * unit
        count *= taken
        all_taken = all_taken and taken == extent
        unit *= extent
    return start, start + count


def chunks(region: Region, limit: int) -> list[Region]:
    """The region in pieces of at most `limit` elements. Regions of the same shape are cut in the same places."""
    extents = shape(region)
    counts = []
    for dimension, extent in enumerate(extents):
        inner = prod(extents[dimension + 1 :])
        at_a_time = min(extent, max(1, limit // inner)) if inner else 1
        counts.append(-(-extent // at_a_time) if extent else 0)
    pieces = [
        [split(runs, count, k) for k in range(count)]
        for runs, count in zip(region, counts, strict=True)
    ]
    return list(itertools.product(*pieces))


def boxes(region: Region, place: Region) -> Iterator[tuple[Box, Box]]:
    """A region and its place in a buffer, run by run: (slices of the tensor, slices of the buffer).

    `place` is where `locate` finds the region: a run of it is a run there.
    """
    for combination in itertools.product(*map(sides, region, place)):
        yield tuple(pair[0] for pair in combination), tuple(pair[1] for pair in combination)


def sides(runs: Runs, places: Runs) -> list[tuple[slice, slice]]:
    """The runs of one dimension, each with its place."""
    pairs = []
    for start, stop in runs:
        here = places[0][0]
        pairs.append((slice(start, stop), slice(here, here + stop - start)))
        left = here + stop - start
        places = ((left, places[0][1]), *places[1:]) if left < places[0][1] else places[1:]
    return pairs
