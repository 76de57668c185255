"""What a run of a rank took: times and amounts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from einmpi.arrays.dist_array import DistArray
from einmpi.comm.base import Comm
from einmpi.process.first_use import first_use_seconds
from einmpi.runtime.actions import InputSource
from einmpi.schedule.steps import Load


@dataclass(slots=True)  # frozen ones take longer to make, and every step of a loop makes two
class Measured:
    """Times, in seconds, and amounts, in bytes, of one run of a rank."""

    seconds: float  # without loading and without checkpoints
    seconds_loading: float
    received: int
    peak: int
    shuffled: int = 0  # received while loading, besides what the plan moves
    between: int = 0  # the part of `received` that came from other nodes
    spilled: int = 0  # written to the slow tier
    spilled_planned: int = 0
    fetched: int = 0  # copied from the slow tier
    seconds_hidden: float = 0.0  # of transfers, in which the rank did something else
    shared: int = 0  # the part of `received` that was read in memory that ranks share
    shared_planned: int = 0

    def plus(self, later: Measured) -> Measured:
        """Return the times and amounts of this run and a later one together."""
        return Measured(
            seconds=self.seconds + later.seconds,
            seconds_loading=self.seconds_loading + later.seconds_loading,
            received=self.received + later.received,
            peak=max(self.peak, later.peak),
            shuffled=self.shuffled + later.shuffled,
            between=self.between + later.between,
            spilled=self.spilled + later.spilled,
            spilled_planned=self.spilled_planned + later.spilled_planned,
            fetched=self.fetched + later.fetched,
            seconds_hidden=self.seconds_hidden + later.seconds_hidden,
            shared=self.shared + later.shared,
            shared_planned=self.shared_planned + later.shared_planned,
        )


class TimedStorage:
    """A storage that counts the seconds in which a run waits for it, without first uses.

    Given arrays of the storage's own type are used where they are, which takes no time worth
    counting.
    """

    def __init__(self, storage: InputSource, given: Mapping[str, Any]) -> None:
        self.storage = storage
        self.given = given
        self.array_type = storage.array_type
        self.seconds = 0.0
        self.begin = storage.begin
        self.close = storage.close
        self.takes_messages = storage.takes_messages

    def fill(self, step: Load, target: Any, comm: Comm) -> None:
        start = time.perf_counter() - first_use_seconds()
        self.storage.fill(step, target, comm)
        self.seconds += time.perf_counter() - first_use_seconds() - start

    def block(self, step: Load, comm: Comm) -> Any:
        kind = type(self.given.get(step.tensor))
        if (kind is self.array_type or kind is DistArray) and not step.overwritten:
            return self.storage.block(step, comm)
        start = time.perf_counter() - first_use_seconds()
        block = self.storage.block(step, comm)
        self.seconds += time.perf_counter() - first_use_seconds() - start
        return block
