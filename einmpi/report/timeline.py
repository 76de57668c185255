"""What every rank did when: the steps of a run on a common clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

KINDS = ("load", "exchange", "reduce", "kernel", "store", "spill")


@dataclass(frozen=True)
class Span:
    """One step on one rank. Seconds since the run began, on a clock common to all ranks."""

    rank: int
    kind: str  # one of KINDS
    vertex: str  # the tensor that is loaded, moved or made; of kernels done together the last one
    label: str  # the step in one line
    start: float
    end: float
    nbytes: int = 0  # received from others, read, written, or copied out of memory or into it
    operations: int = 0  # of a kernel
    group: tuple[int, ...] = ()  # the ranks that exchange or reduce together
    to: int | None = None  # the next of them, in a ring, that gets something from this rank


@dataclass(frozen=True)
class Timeline:
    ranks: int
    seconds: float  # from the first start to the last end
    spans: tuple[Span, ...]  # by rank, then by start

    def meetings(self) -> list[dict[int, int]]:
        """Where ranks meet: of each exchange and each reduction of a group its members' spans, as places in `spans`."""
        found: dict[tuple[str, str, tuple[int, ...], int], dict[int, int]] = {}
        turns: Counter[tuple[int, str, str, tuple[int, ...]]] = Counter()
        for place, span in enumerate(self.spans):
            if len(span.group) > 1:
                what = span.kind, span.vertex, span.group
                turn = turns[span.rank, *what]  # the members of a group meet in the same order
                turns[span.rank, *what] += 1
                found.setdefault((*what, turn), {})[span.rank] = place
        return list(found.values())
