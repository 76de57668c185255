"""Figures of a machine: each is the best of several rounds, so that one disturbance spoils none.

A round measures all figures one after another, so the repeats of a figure are seconds apart.
Another process that takes the cores for a while slows down a round, not all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import inf
from statistics import median

from einmpi.comm.base import Comm

ROUNDS = 5
# After these, sizes stay: the size that counts is measured in three rounds at least.
_GROWING_ROUNDS = 3
_FEWEST_REPEATS = 3  # of an action, in each round
_MOST_REPEATS = 100
_LONG_ENOUGH = 0.01  # seconds of an action that is large enough to show its speed

Action = Callable[[], object]


class Figure:
    """The seconds for a unit of an action that all ranks do at once, such as a byte of an exchange.

    `action_of` makes the action of a size. The size grows until the action takes long enough, or
    until there is no larger one. All ranks make the same decisions, by the slowest of them.
    """

    def __init__(
        self,
        comm: Comm,
        action_of: Callable[[int], Action],
        units_of: Callable[[int], float],
        sizes: Sequence[int],
        budget: float,  # seconds in all
    ) -> None:
        self.comm = comm
        self.action_of = action_of
        self.units_of = units_of
        self.sizes = sizes
        self.budget = budget / ROUNDS
        self.place = 0  # of the size that is measured
        self.own_best = inf  # the shortest time of a round on this rank
        self.best = inf  # the longest of these on any rank

    @property
    def seconds(self) -> float:
        """The seconds of a unit."""
        return self.best / self.units_of(self.sizes[self.place])

    def measure_round(self, may_grow: bool) -> None:
        """Repeat the action; go on with larger ones if it was too short."""
        self._measure_size()
        long_enough = min(_LONG_ENOUGH, self.budget / _FEWEST_REPEATS)
        while may_grow and self.best < long_enough and self.place + 1 < len(self.sizes):
            self.place += 1
            self.own_best = self.best = inf
            self._measure_size()

    def _measure_size(self) -> None:
        """Take the median of repeats, whose number follows from the best round so far."""
        repeats = int(self.budget / self.best) if 0 < self.best < inf else 0
        repeats = min(max(repeats, _FEWEST_REPEATS), _MOST_REPEATS)
        action = self.action_of(self.sizes[self.place])
        action()  # makes connections, compiles, touches memory
        times = [_time_once(self.comm, action) for _ in range(repeats)]
        self.own_best = min(self.own_best, median(times))
        self.best = _slowest(self.comm, self.own_best)


def measure_figures(figures: Sequence[Figure]) -> None:
    """Measure all figures in turn, again and again. All ranks call this."""
    for number in range(ROUNDS):
        for figure in figures:
            figure.measure_round(may_grow=number < _GROWING_ROUNDS)


def _time_once(comm: Comm, action: Action) -> float:
    comm.barrier()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _slowest(comm: Comm, seconds: float) -> float:
    """Return the largest value of all ranks on all ranks, so that their decisions agree."""
    return max(float(text) for text in comm.allgather_text(repr(seconds)))
