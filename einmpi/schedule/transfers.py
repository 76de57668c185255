"""Which messages the ranks of a group exchange, as seen by one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from einmpi.schedule.regions import Region, elements

Message: TypeAlias = tuple[int, Region]  # the other rank, and the elements that are sent


@dataclass(frozen=True)
class Moves:
    """Who sends what to whom, so that every member of a group gets its block of a tensor.

    `sends` and `receives` have one entry for each member, None where there is no message.
    Regions to send are places in the source slot, regions to receive are places in the target
    slot. A rank sends nothing to itself: what it already has is copied from `own[0]` to `own[1]`.

    Example: ranks 0 and 1 hold one row each of a 2×2 matrix and want one column each. On rank 0,
    `sends` is (None, the second element of its row), `receives` is (None, the second element of
    its column), and `own` says that the first element of the row is the first of the column.
    """

    group: tuple[int, ...]
    me: int  # position of this rank in the group
    sends: tuple[Region | None, ...]
    receives: tuple[Region | None, ...]
    own: tuple[Region, Region] | None
    same_to_all: bool  # each member sends the same elements to all others
    max_elements: int  # that any member may send or receive; the same bound on all members
    # The elements of the largest block that any member has before or after, if that is known.
    largest_block: int | None = None
    is_halo: bool = False  # most of a block stays where it is, and its neighbours' edges come

    @cached_property
    def words(self) -> int:
        """The number of elements that this rank receives."""
        return sum(elements(region) for _, region in self.incoming())

    @cached_property
    def words_sent(self) -> int:
        """The number of elements that this rank sends, once for every member that gets them."""
        return sum(elements(region) for _, region in self.outgoing())

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
        return _messages(self.group, self.me, self.sends)

    def incoming(self) -> Iterator[Message]:
        """The messages that this rank receives, in the same order."""
        return _messages(self.group, self.me, self.receives)


@dataclass(frozen=True)
class Reduction:
    """Who aggregates which piece of a slot in which every member of a group has partial results.

    A rank sends to each other member that member's piece, and receives its own piece from all.
    """

    group: tuple[int, ...]
    me: int  # position of this rank in the group
    pieces: tuple[Region | None, ...]  # of each member, as places in the slot; None for nothing

    @cached_property
    def words(self) -> int:
        """The number of elements that this rank receives."""
        return sum(elements(region) for _, region in self.incoming())

    def outgoing(self) -> Iterator[Message]:
        """The messages that this rank sends, beginning with the next member of the group."""
        return _messages(self.group, self.me, self.pieces)

    def incoming(self) -> Iterator[Message]:
        """The messages that this rank receives, in the same order."""
        own = self.pieces[self.me]
        return _messages(self.group, self.me, [own] * len(self.group))


Transfer: TypeAlias = Moves | Reduction


def _messages(group: Sequence[int], me: int, regions: Sequence[Region | None]) -> Iterator[Message]:
    for member in (*range(me + 1, len(group)), *range(me)):
        region = regions[member]
        if region is not None:
            yield group[member], region
