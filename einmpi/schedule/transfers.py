"""Which messages the ranks of a group exchange, as seen by one of them."""

from __future__ import annotations

import itertools
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import NamedTuple, TypeAlias

from einmpi.schedule.regions import Region, elements, one_run

Message: TypeAlias = tuple[int, Region]  # the other rank, and the elements that are sent


@dataclass(frozen=True)
class Part:
    """Some of the indices that a slot has in one dimension, for a transfer in parts."""

    dimension: int
    start: int
    stop: int
    extent: int  # the number of all indices; the same on all members of a group

    def share(self, amount: int) -> int:
        """Return this part's share of an amount, rounded up."""
        return -(-amount * (self.stop - self.start) // self.extent)

    def of_region(self, region: Region) -> Region:
        """Return a region that has all indices of the dimension, with those of the part only."""
        before = region[: self.dimension]
        after = region[self.dimension + 1 :]
        return (*before, one_run(self.start, self.stop), *after)

    def __str__(self) -> str:
        before = ":, " * self.dimension
        return f"[{before}{self.start}:{self.stop}]"


class Unchanged(NamedTuple):
    """A dimension in which all members of a group have the same indices, before and after."""

    dimension: int
    most: int  # indices of any rank


@dataclass(frozen=True)
class Cut:
    """How the transfers of a tensor are done in parts; equal on all members of their groups.

    All ranks have a cut, or none has one. They may have different numbers of parts.
    """

    parts: tuple[Part, ...]  # none if the rank has no elements
    after_kernel: bool  # each part is sent as soon as the kernel before has computed it
    before_kernel: bool  # an input, which is loaded and sent before the kernel before begins


# Of a million ranks few send something to this rank, and most get the same from it: there are no
# lists of all members.


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


@dataclass(frozen=True)
class Moves:
    """Who sends what to whom, so that every member of a group gets its block of a tensor.

    Regions to send are places in the source slot, regions to receive are places in the target
    slot. A rank sends nothing to itself: what it already has is copied from `own[0]` to `own[1]`.
    `sends` and `receives` list them for each member, None where there is no message.

    Where every member has partial results of the same slot, a member sends each other one that
    one's piece, and receives its own piece from all of them: `own` is its place, twice.

    Example: ranks 0 and 1 hold one row each of a 2×2 matrix and want one column each. On rank 0,
    `sends` is (None, the second element of its row), `receives` is (None, the second element of
    its column), and `own` says that the first element of the row is the first of the column.
    """

    members: Members
    me: int  # position of this rank in the group
    sent: Regions
    received: Regions
    own: tuple[Region, Region] | None
    same_to_all: bool  # each member sends the same elements to all others
    max_elements: int  # that any member may send or receive; the same bound on all members
    # The elements of the largest block that any member has before or after, if that is known.
    largest_block: int | None = None
    is_halo: bool = False  # most of a block stays where it is, and its neighbours' edges come
    unchanged: tuple[Unchanged, ...] = ()  # dimensions

    def part(self, part: Part) -> Moves:
        """Return the moves of a part of the slots, along one of the unchanged dimensions."""
        own = None
        if self.own is not None:
            own = part.of_region(self.own[0]), part.of_region(self.own[1])
        largest_block = self.largest_block
        if largest_block is not None:
            largest_block = part.share(largest_block)
        return replace(
            self,
            sent=self.sent.changed(part.of_region),
            received=self.received.changed(part.of_region),
            own=own,
            max_elements=part.share(self.max_elements),
            largest_block=largest_block,
        )

    @cached_property
    def group(self) -> tuple[int, ...]:
        """A list of the members."""
        return tuple(self.members)

    @cached_property
    def sends(self) -> tuple[Region | None, ...]:
        """What this rank sends to each member."""
        return self.sent.listing()

    @cached_property
    def receives(self) -> tuple[Region | None, ...]:
        """What this rank receives from each member."""
        return self.received.listing()

    @cached_property
    def words(self) -> int:
        """The number of elements that this rank receives."""
        return self.received.elements()

    @cached_property
    def words_sent(self) -> int:
        """The number of elements that this rank sends, once for every member that gets them."""
        return self.sent.elements()

    @cached_property
    def pieces(self) -> tuple[Region | None, ...]:
        """Where partial results are aggregated: the piece of each member, None for nothing."""
        found = list(self.sends)
        found[self.me] = None if self.own is None else self.own[0]
        return tuple(found)

    def fits_at_once(self, buffer_elements: int) -> bool:
        """Return whether a buffer holds all that any member sends; the same on all members.

        A buffer is also no larger than the largest block: that is what plans allow for. What is
        sent to several members, each of which needs another part, may be more where blocks are
        uneven.
        """
        if self.max_elements > buffer_elements:
            return False
        if self.same_to_all or self.largest_block is None:
            return True
        return self.max_elements <= self.largest_block

    def outgoing(self) -> Iterator[Message]:
        """The messages that this rank sends, beginning with the next member of the group."""
        return self._messages(self.sent)

    def incoming(self) -> Iterator[Message]:
        """The messages that this rank receives, in the same order."""
        return self._messages(self.received)

    def _messages(self, regions: Regions) -> Iterator[Message]:
        each = list(regions.each())
        following = bisect(each, self.me, key=lambda message: message[0])
        for member, region in (*each[following:], *each[:following]):
            yield self.members.rank(member), region
