"""The members of a group, and a region for each of them, without a list of all members.

Of a million ranks few send something to this rank, and most get the same from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from einmpi.schedule.regions import Region, elements


@dataclass(frozen=True)
class Members:
    """Ranks that differ on some axes only, in ascending order.

    `axes` has for each axis how many ranks lie along it, and how far apart neighbours are.
    """

    first: int
    axes: tuple[tuple[int, int], ...]

    @cached_property
    def count(self) -> int:
        return prod(ranks for ranks, _ in self.axes)

    @cached_property
    def last(self) -> int:
        return self.first + sum((ranks - 1) * distance for ranks, distance in self.axes)

    def __iter__(self) -> Iterator[int]:
        for distance in _distances(self.axes):
            yield self.first + distance

    def rank(self, number: int) -> int:
        """Return the rank of a member."""
        rank = self.first
        for ranks, distance in reversed(self.axes):
            number, digit = divmod(number, ranks)
            rank += digit * distance
        return rank


def _distances(axes: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Yield the distances from the first of those that differ on these axes, the last fastest."""
    ranges = [range(0, count * distance, distance) for count, distance in axes]
    return map(sum, itertools.product(*ranges))


@dataclass(frozen=True)
class Regions:
    """A region for each member of a group, or none.

    Members that differ on the `free` axes only have the same region. `found` has it for the first
    of them. An axis is given by how many members lie along it, and how far apart their numbers are.
    """

    count: int  # members
    found: Mapping[int, Region] = field(hash=False)
    free: tuple[tuple[int, int], ...] = ()
    without: int | None = None  # a member that has none after all

    @classmethod
    def same(cls, count: int, region: Region | None) -> Regions:
        """Return the same region for all members."""
        return cls(count, {} if region is None else {0: region}, ((count, 1),))

    @classmethod
    def listed(cls, regions: Sequence[Region | None]) -> Regions:
        """Return these regions."""
        found = {number: region for number, region in enumerate(regions) if region is not None}
        return cls(len(regions), found)

    def of(self, member: int) -> Region | None:
        """Return the region of a member."""
        if member == self.without:
            return None
        digits = [member // distance % count * distance for count, distance in self.free]
        return self.found.get(member - sum(digits))

    def each(self) -> Iterator[tuple[int, Region]]:
        """Yield the members that have a region, in order, and their regions."""
        distances = list(_distances(self.free))
        numbers = [(first + far, first) for first in self.found for far in distances]
        for number, first in sorted(numbers):
            if number != self.without:
                yield number, self.found[first]

    def elements(self) -> int:
        """Return the elements of all members' regions together."""
        total = sum(map(elements, self.found.values())) * prod(count for count, _ in self.free)
        left_out = None if self.without is None else replace(self, without=None).of(self.without)
        return total if left_out is None else total - elements(left_out)

    def changed(self, change: Callable[[Region], Region]) -> Regions:
        """Return the regions with this change."""
        return replace(self, found={first: change(it) for first, it in self.found.items()})

    def only(self, accepts: Callable[[int], bool]) -> Regions:
        """Return the regions of those members only that are accepted."""
        return Regions(self.count, {each: it for each, it in self.each() if accepts(each)})

    def listing(self) -> tuple[Region | None, ...]:
        """Return a list of the members' regions."""
        found: list[Region | None] = [None] * self.count
        for number, region in self.each():
            found[number] = region
        return tuple(found)
