"""The time of an action that all ranks do at once: the median of repeats on the slowest rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from einmpi.comm.base import Comm

_FEWEST_REPEATS = 3
_MOST_REPEATS = 100


def measure_seconds(comm: Comm, action: Callable[[], object], budget: float) -> float:
    """Return the seconds of an action. All ranks call this.

    They repeat the action equally often, for about `budget` seconds.
    """
    action()  # makes connections, compiles, touches memory
    first = slowest(comm, _time_once(comm, action))
    repeats = int(budget / max(first, 1e-9))
    repeats = min(max(repeats, _FEWEST_REPEATS), _MOST_REPEATS)
    times = [_time_once(comm, action) for _ in range(repeats)]
    return slowest(comm, median(times))


def _time_once(comm: Comm, action: Callable[[], object]) -> float:
    comm.barrier()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def slowest(comm: Comm, seconds: float) -> float:
    """Return the largest value of all ranks on all ranks, so that their decisions agree."""
    return max(float(text) for text in comm.allgather_text(repr(seconds)))
