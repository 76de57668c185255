"""What every rank did and when: the steps of a run on a common clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

# "wait" is the time in which a rank waits for transfers in the background.
KINDS = ("load", "exchange", "reduce", "kernel", "store", "spill", "wait")


@dataclass(frozen=True)
class Span:
    """One step on one rank. Times are seconds since the run began, on a common clock."""

    rank: int
    kind: str  # one of KINDS
    vertex: str  # the tensor that is loaded, moved or made; of fused kernels the last one
    label: str  # the step on one line
    start: float
    end: float
    nbytes: int = 0  # received from others, read, written, or copied to or from scratch
    operations: int = 0  # of a kernel
    group: tuple[int, ...] = ()  # the ranks that exchange or reduce together
    to: int | None = None  # the next of them, in a ring, that gets something from this rank
    during: str = ""  # in which step of a loop, as text
    background: bool = False  # a transfer, while other spans of the rank went on


class _Meeting(NamedTuple):
    """One exchange or reduction of a group of ranks."""

    kind: str
    vertex: str
    group: tuple[int, ...]
    number: int  # the group may do the same several times


@dataclass(frozen=True)
class Timeline:
    """The spans of all ranks."""

    ranks: int
    seconds: float  # from the first start to the last end
    # By rank; of each rank those in the background come last, and both are sorted by start. In a
    # loop, this holds for each of its steps.
    spans: tuple[Span, ...]

    @property
    def has_background(self) -> bool:
        """Whether transfers went on in the background."""
        return any(span.background for span in self.spans)

    def meetings(self) -> list[dict[int, int]]:
        """Find the spans that belong to the same exchange or reduction of a group.

        Return a dictionary for each: from the ranks to the places of their spans in `spans`.
        """
        found: dict[_Meeting, dict[int, int]] = {}
        counts: Counter[tuple[int, str, str, tuple[int, ...]]] = Counter()
        for place, span in enumerate(self.spans):
            if len(span.group) < 2:
                continue
            # The members of a group meet in the same order, so counting on each rank matches them.
            key = span.rank, span.kind, span.vertex, span.group
            meeting = _Meeting(span.kind, span.vertex, span.group, counts[key])
            counts[key] += 1
            found.setdefault(meeting, {})[span.rank] = place
        return list(found.values())
