"""What every rank did when: the steps of a run on a common clock."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("load", "exchange", "reduce", "kernel", "store")


@dataclass(frozen=True)
class Span:
    """One step on one rank. Seconds since the run began, on a clock common to all ranks."""

    rank: int
    kind: str  # one of KINDS
    vertex: str  # the tensor that is loaded, moved or made; of kernels done together the last one
    label: str  # the step in one line
    start: float
    end: float
    nbytes: int = 0  # received from others, or read, or written
    operations: int = 0  # of a kernel


@dataclass(frozen=True)
class Timeline:
    ranks: int
    seconds: float  # from the first start to the last end
    spans: tuple[Span, ...]  # by rank, then by start
