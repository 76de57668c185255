"""Sets of indices as runs: the indices of a label that a rank has, and what two sets share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.planner.mesh import Mesh

# A run is a range of indices [start, stop). The indices {0, 1, 2, 3, 8, 9} of a dimension are the
# runs ((0, 4), (8, 10)): in ascending order, none of them empty, no two of them adjacent. So equal
# sets of indices are equal tuples.
Runs: TypeAlias = tuple[tuple[int, int], ...]
Ints = npt.NDArray[np.int64]


def one_run(start: int, stop: int) -> Runs:
    """Return the indices from `start` up to `stop`."""
    return ((start, stop),) if stop > start else ()


def whole(extent: int) -> Runs:
    """Return all indices of a dimension."""
    return one_run(0, extent)


def length(runs: Runs) -> int:
    """Return the number of indices."""
    if len(runs) == 1:  # as a rule; asked so often that it has to be quick
        return runs[0][1] - runs[0][0]
    count = 0
    for start, stop in runs:
        count += stop - start
    return count


@lru_cache(maxsize=65536)
def share(mesh: Mesh, extent: int, cuts: tuple[tuple[int, int], ...]) -> Runs:
    """Return the indices of a label that belong to the given digits of a rank.

    `cuts` are the (axis, digit) pairs of the axes that cut the label. Example: on the mesh of
    6 = 3·2 ranks a label of extent 12 falls into 6 blocks of 2 indices, one for each pair of
    digits. The cut (0, 1) selects the blocks with the first digit 1: ((4, 8),). The cut (1, 1)
    selects the blocks with the second digit 1: ((2, 4), (6, 8), (10, 12)).
    """
    found: Runs | None = None
    for window in mesh.windows(extent):
        digits = tuple((axis, value) for axis, value in cuts if axis in window)
        if digits:
            selected = _share_of_window(mesh, extent, window, digits)
            found = selected if found is None else intersect(found, selected)
    return whole(extent) if found is None else found


def equal_share_length(mesh: Mesh, extent: int, axes: Sequence[int]) -> int | None:
    """Return how many indices of a label every rank has; None if some may have more than others.

    All have equally many where the axes lie in one window whose blocks are equally long.
    """
    if not axes:
        return extent
    for window in mesh.windows(extent):
        if set(axes).issubset(window) and extent % prod(mesh.factors[axis] for axis in window) == 0:
            return extent // prod(mesh.factors[axis] for axis in axes)
    return None


def _share_of_window(
    mesh: Mesh, extent: int, window: tuple[int, ...], digits: tuple[tuple[int, int], ...]
) -> Runs:
    """Return the indices whose block has the given digits.

    The axes of the window cut the label into m blocks: index i is in block ⌊i·m/extent⌋.
    """
    blocks = prod(mesh.factors[axis] for axis in window)
    first, last = _runs_of_blocks(mesh, window, digits)
    starts = -(-first * extent // blocks)
    stops = -(-last * extent // blocks)
    return joined(zip(starts.tolist(), stops.tolist(), strict=True))


@lru_cache(maxsize=65536)
def _runs_of_blocks(
    mesh: Mesh, window: tuple[int, ...], digits: tuple[tuple[int, int], ...]
) -> tuple[Ints, Ints]:
    """Return the blocks with the given digits as runs: their starts and their stops."""
    blocks = prod(mesh.factors[axis] for axis in window)
    digit = dict(digits)
    selected = np.arange(blocks)
    unit = blocks  # how many blocks in a row have the same digit on the current axis
    for axis in window:
        unit //= mesh.factors[axis]
        if axis in digit:
            selected = selected[selected // unit % mesh.factors[axis] == digit[axis]]
    is_first = np.diff(selected, prepend=-2) > 1
    is_last = np.diff(selected, append=blocks + 2) > 1
    return selected[is_first], selected[is_last] + 1


def joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """Drop empty runs and join adjacent ones; the runs are in ascending order."""
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)


@lru_cache(maxsize=16384)
def intersect(one: Runs, two: Runs) -> Runs:
    """Return the indices that both have."""
    found = []
    k = m = 0
    while k < len(one) and m < len(two):
        start = max(one[k][0], two[m][0])
        stop = min(one[k][1], two[m][1])
        if start < stop:
            found.append((start, stop))
        if one[k][1] < two[m][1]:
            k += 1
        else:
            m += 1
    return tuple(found)
