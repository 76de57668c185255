"""Numbers and texts that all ranks tell each other, apart from the payload.

`comm` is a communicator of mpi4py and `mpi` is its module, which is not imported here.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from einmpi.comm.base import Calls, Comm, pieces_of, uncounted
from einmpi.errors import EinmpiError

# A rank that waits for others sleeps for longer and longer times (seconds).
SHORTEST_SLEEP = 2e-5
LONGEST_SLEEP = 5e-4

# Up to so many ranks, each sends its number or digest to every other one itself. MPI's own
# collective calls take several times as long.
MOST_RANKS_OF_DIRECT_MESSAGES = 8
# Payload has the tag 0.
CONTROL_TAG = 1
DIGEST_BYTES = 32
CODE_BYTES = 4  # of them, for the calls of a rank
_NUMBER_BYTES = 8
_NUMBER_MARK = hashlib.sha256(b"a number").digest()[_NUMBER_BYTES:]

Result = TypeVar("Result")
Bytes: TypeAlias = npt.NDArray[np.uint8]
# A call that yields each request of MPI before it goes on, and returns its result. Several calls
# on different communicators can wait side by side.
Steps: TypeAlias = Generator[Any, None, Result]


def digest_of(text: str) -> bytes:
    """Return what ranks send each other to compare a text, before the code of their calls."""
    return hashlib.sha256(text.encode()).digest()[:-CODE_BYTES]


def lowest_in_steps(comm: Any, mpi: Any, number: int) -> Steps[int]:
    """Return the lowest number of all ranks."""
    if comm.size > MOST_RANKS_OF_DIRECT_MESSAGES:
        return (yield from _lowest_by_mpi_in_steps(comm, mpi, number))
    own = number.to_bytes(_NUMBER_BYTES, "little", signed=True) + _NUMBER_MARK
    rows = yield from _send_to_all_in_steps(comm, own)
    messages = [row.tobytes() for row in rows]
    if any(message[_NUMBER_BYTES:] != _NUMBER_MARK for message in messages):
        yield from gather_in_steps(comm, mpi, "a number")  # others compare a text
        raise EinmpiError("einmpi: ranks make different calls; all ranks must make the same")
    numbers = [message[:_NUMBER_BYTES] for message in messages]
    return min(int.from_bytes(each, "little", signed=True) for each in numbers)


def _lowest_by_mpi_in_steps(comm: Any, mpi: Any, number: int) -> Steps[int]:
    lowest = np.array([number], np.int64)
    target = [lowest, mpi.INT64_T]
    yield comm.Iallreduce(mpi.IN_PLACE, target, mpi.MIN)
    return int(lowest[0])


def compare_in_steps(comm: Any, mpi: Any, text: str, calls: Calls) -> Steps[list[str] | None]:
    """Return what `Comm.compare` returns.

    However ranks come to compare something, they send the same messages: what they do need not be
    the same.
    """
    own = digest_of(text) + calls.code.to_bytes(CODE_BYTES, "little")
    if comm.size <= MOST_RANKS_OF_DIRECT_MESSAGES:
        rows = yield from _send_to_all_in_steps(comm, own)
        is_same = rows.tobytes() == own * comm.size
    else:
        # All are equal if the least number is also the greatest: one message tells that usually.
        digest = np.frombuffer(own, np.int64)
        numbers = np.concatenate((digest, ~digest))
        least = numbers.copy()
        yield comm.Iallreduce(mpi.IN_PLACE, [least, mpi.INT64_T], mpi.MIN)
        is_same = bool((least == numbers).all())
    if not is_same:
        return (yield from gather_in_steps(comm, mpi, calls.after(text)))
    calls.forget()
    return None


def _send_to_all_in_steps(comm: Any, own: bytes) -> Steps[Bytes]:
    """Return the digests of all ranks, one in a row."""
    rows = np.empty((comm.size, DIGEST_BYTES), np.uint8)
    rows[comm.rank] = np.frombuffer(own, np.uint8)
    yield from requests_to_all(comm, rows)
    return rows


def requests_to_all(comm: Any, rows: Bytes) -> list[Any]:
    """Start to send the row of this rank to every other one, and to receive their rows."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    requests = [comm.Irecv(rows[other], other, CONTROL_TAG) for other in others]
    return requests + [comm.Isend(rows[comm.rank], other, CONTROL_TAG) for other in others]


def differing_texts_in_steps(comm: Any, mpi: Any, text: str) -> Steps[list[str] | None]:
    """Return the texts of all ranks if they differ, None otherwise.

    These messages stay as they are, so that ranks of different versions understand them.
    """
    own = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    for _ in range(2):  # as the first versions did
        first = own.copy()
        yield comm.Ibcast([first, mpi.BYTE], root=0)
        number = comm.size if (own == first).all() else comm.rank
        if (yield from _lowest_by_mpi_in_steps(comm, mpi, number)) == comm.size:
            return None
    return (yield from gather_in_steps(comm, mpi, text))


def gather_in_steps(comm: Any, mpi: Any, text: str) -> Steps[list[str]]:
    own = np.frombuffer(text.encode(), np.uint8)
    length = np.array([own.size], np.int64)
    lengths = np.empty(comm.size, np.int64)
    integer = mpi.INT64_T
    yield comm.Iallgather([length, integer], [lengths, integer])
    counts = lengths.tolist()
    everything = np.empty(sum(counts), np.uint8)
    target = [everything, counts, mpi.BYTE]
    yield comm.Iallgatherv([own, mpi.BYTE], target)
    return [piece.tobytes().decode() for piece in pieces_of(everything, counts)]


def finish_side_by_side(calls: Sequence[Steps[None]]) -> None:
    """Finish calls on different communicators, in whatever order the other ranks allow."""
    waiting: list[tuple[Steps[None], Any]] = []
    for steps in calls:
        with contextlib.suppress(StopIteration):
            waiting.append((steps, next(steps)))
    pause = SHORTEST_SLEEP
    while waiting:
        unfinished = []
        for steps, request in waiting:
            if not request.Test():
                unfinished.append((steps, request))
                continue
            pause = SHORTEST_SLEEP
            with contextlib.suppress(StopIteration):
                unfinished.append((steps, next(steps)))
        waiting = unfinished
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_SLEEP)


# ---- clocks --------------------------------------------------------------------------------------
#
# Clocks of ranks compared by messages, so that times of different machines share one axis.


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
