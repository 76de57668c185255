"""Clocks of ranks compared by messages, so that times of different machines can be put on one axis."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from einmpi.comm.base import Comm, uncounted

_ROUNDS = 5  # messages there and back; the quickest counts


@dataclass(frozen=True)
class Reading:
    """A clock beside that of rank 0."""

    time: float  # on that clock
    ahead: float  # of rank 0's, seconds
    doubt: float  # it may be as much more or less: half of the time that the messages took


def compare_clocks(comm: Comm) -> list[Reading]:
    """On rank 0 a reading of every rank's clock, elsewhere nothing. All ranks call it; its bytes are not counted."""
    stamp = np.zeros(1)
    readings = [Reading(time.perf_counter(), 0.0, 0.0)] if comm.rank == 0 else []
    with uncounted(comm):
        for rank in range(1, comm.size) if comm.rank == 0 else ():
            tries = []
            for _ in range(_ROUNDS):
                start = time.perf_counter()
                comm.sendrecv(rank, stamp, None, None)
                comm.sendrecv(None, None, rank, stamp)
                end = time.perf_counter()
                tries.append(
                    Reading(float(stamp[0]), float(stamp[0]) - (start + end) / 2, (end - start) / 2)
                )
            readings.append(min(tries, key=lambda reading: reading.doubt))
        for _ in range(_ROUNDS if comm.rank > 0 else 0):
            comm.sendrecv(None, None, 0, stamp)
            stamp[0] = time.perf_counter()
            comm.sendrecv(0, stamp, None, None)
    return readings


def on_first_clock(times: np.ndarray, before: Reading, after: Reading) -> np.ndarray:
    """Times of a rank as rank 0's clock would have shown them, from a reading before them and one after.

    Clocks drift apart evenly. A difference that the messages alone may have made is no drift: it would bend short runs.
    """
    drift = after.ahead - before.ahead
    if abs(drift) <= before.doubt + after.doubt or after.time <= before.time:
        return times - min(before, after, key=lambda reading: reading.doubt).ahead
    passed = (times - before.time) / (after.time - before.time)
    return times - (before.ahead + drift * passed)
