"""How long something takes when all ranks do it at once: the median of its repeats, on the slowest rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from einmpi.comm.base import Comm

_LEAST, _MOST = 3, 100  # repeats


def seconds_of(comm: Comm, action: Callable[[], object], budget: float) -> float:
    """All ranks call it. They repeat the action equally often, about as long as the budget allows."""
    action()  # makes connections, compiles, touches memory
    repeats = int(budget / max(slowest(comm, _timed(comm, action)), 1e-9))
    return slowest(
        comm, median(_timed(comm, action) for _ in range(min(max(repeats, _LEAST), _MOST)))
    )


def _timed(comm: Comm, action: Callable[[], object]) -> float:
    comm.barrier()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def slowest(comm: Comm, seconds: float) -> float:
    """The largest number of all ranks, on all ranks: what they decide by it they decide alike."""
    return max(map(float, comm.allgather_text(repr(seconds))))
