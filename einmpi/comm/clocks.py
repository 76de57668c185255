"""Clocks of ranks compared by messages, so that times of different machines share one axis."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from einmpi.comm.base import Comm, uncounted

_ROUND_TRIPS = 5  # of which the fastest counts


@dataclass(frozen=True)
class ClockReading:
    """The clock of a rank compared with that of rank 0."""

    time: float  # on the rank's own clock
    ahead: float  # seconds that it is ahead of rank 0's
    doubt: float  # seconds by which `ahead` may be wrong: half of the time of the messages


def compare_clocks(comm: Comm) -> list[ClockReading]:
    """Return on rank 0 a reading of every rank's clock, and nothing on other ranks.

    All ranks call this. Its bytes are not counted.
    """
    with uncounted(comm):
        if comm.rank > 0:
            _answer_rank_0(comm)
            return []
        readings = [ClockReading(time.perf_counter(), 0.0, 0.0)]
        for rank in range(1, comm.size):
            attempts = [_ask(comm, rank) for _ in range(_ROUND_TRIPS)]
            readings.append(min(attempts, key=lambda reading: reading.doubt))
    return readings


def _ask(comm: Comm, rank: int) -> ClockReading:
    stamp = np.zeros(1)
    start = time.perf_counter()
    comm.sendrecv(rank, stamp, None, None)
    comm.sendrecv(None, None, rank, stamp)
    end = time.perf_counter()
    their_time = float(stamp[0])
    return ClockReading(their_time, their_time - (start + end) / 2, (end - start) / 2)


def _answer_rank_0(comm: Comm) -> None:
    stamp = np.zeros(1)
    for _ in range(_ROUND_TRIPS):
        comm.sendrecv(None, None, 0, stamp)
        stamp[0] = time.perf_counter()
        comm.sendrecv(0, stamp, None, None)


def on_first_clock(
    times: npt.NDArray[np.float64], before: ClockReading, after: ClockReading
) -> npt.NDArray[np.float64]:
    """Convert times of a rank to rank 0's clock, from a reading before them and one after.

    Clocks drift apart evenly. A difference that the messages alone explain is no drift; taking it
    for one would distort short runs.
    """
    drift = after.ahead - before.ahead
    if abs(drift) <= before.doubt + after.doubt or after.time <= before.time:
        best = min(before, after, key=lambda reading: reading.doubt)
        return times - best.ahead
    passed = (times - before.time) / (after.time - before.time)
    return times - (before.ahead + drift * passed)
