"""The part of a stored tensor that is read: along each dimension a range, or a single index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from einmpi.errors import InputError
from einmpi.units import counted

# What is written for a dimension: an index, or start, stop and step, where None means from the
# first or to the last element. Negative numbers count from the end.
SliceEntry: TypeAlias = int | tuple[int | None, int | None, int]

_NAMES = ("rows", "columns")  # of the first dimensions in messages


@dataclass(frozen=True)
class Range:
    """What is selected along a dimension: `count` indices from `first` on, `step` apart.

    A single index that is `dropped` leaves the tensor without this dimension.
    """

    first: int
    count: int
    step: int = 1
    dropped: bool = False

    def in_file(self, start: int, stop: int) -> slice:
        """Return the indices in the file for those from start to before stop of the tensor."""
        if start == stop:
            return slice(self.first, self.first)
        last = self.first + (stop - 1) * self.step
        return slice(self.first + start * self.step, last + 1, self.step)


def whole_ranges(shape: Sequence[int]) -> tuple[Range, ...]:
    """Return the ranges that select everything."""
    return tuple(Range(0, extent) for extent in shape)


def resolve(
    entries: Sequence[SliceEntry], shape: Sequence[int], where: str, title: str
) -> tuple[Range, ...]:
    """Return the range along each dimension; those without an entry are selected whole."""
    if len(entries) > len(shape):
        expected = f"at least {len(entries)}, as many as are selected from"
        raise InputError(where, f"{title} has {counted(len(shape), 'dimension')}", expected)
    ranges = []
    for dimension, extent in enumerate(shape):
        if dimension >= len(entries):
            ranges.append(Range(0, extent))
            continue
        entry = entries[dimension]
        name = _NAMES[dimension] if dimension < len(_NAMES) else f"dimension {dimension}:"
        if isinstance(entry, int):
            index = _from_start(entry, extent, 0)
            if not 0 <= index < extent:
                what = f"{name} {entry} of {title}, which has {extent}"
                raise InputError(where, what, f"an index within 0:{extent}")
            ranges.append(Range(index, 1, dropped=True))
            continue
        start = _from_start(entry[0], extent, 0)
        stop = _from_start(entry[1], extent, extent)
        step = entry[2]
        if not 0 <= start <= stop <= extent:
            shown = ":".join("" if end is None else str(end) for end in entry[:2])
            what = f"{name} {shown} of {title}, which has {extent}"
            raise InputError(where, what, f"a range within 0:{extent}")
        ranges.append(Range(start, -(-(stop - start) // step), step))
    return tuple(ranges)


def _from_start(end: int | None, extent: int, default: int) -> int:
    if end is None:
        return default
    return end + extent if end < 0 else end
