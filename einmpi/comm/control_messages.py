"""Numbers and texts that all ranks tell each other, apart from the payload.

`comm` is a communicator of mpi4py and `mpi` is its module, which is not imported here.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from einmpi.comm.base import pieces_of

# A rank that waits for others sleeps for longer and longer times (seconds).
SHORTEST_SLEEP = 2e-5
LONGEST_SLEEP = 5e-4

Result = TypeVar("Result")
# A call that yields each request of MPI before it goes on, and returns its result. Several calls
# on different communicators can wait side by side.
Steps: TypeAlias = Generator[Any, None, Result]


def lowest_in_steps(comm: Any, mpi: Any, number: int) -> Steps[int]:
    """Return the lowest number of all ranks."""
    lowest = np.array([number], np.int64)
    target = [lowest, mpi.INT64_T]
    yield comm.Iallreduce(mpi.IN_PLACE, target, mpi.MIN)
    return int(lowest[0])


def same_in_steps(comm: Any, mpi: Any, text: str) -> Steps[int | None]:
    """Return the lowest rank whose text differs from that of rank 0, or None."""
    # All numbers are equal if the least is also the greatest: one message tells that usually.
    numbers = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.int64)
    least = np.concatenate((numbers, ~numbers))
    target = [least, mpi.INT64_T]
    yield comm.Iallreduce(mpi.IN_PLACE, target, mpi.MIN)
    if (least[: numbers.size] == ~least[numbers.size :]).all():
        return None
    return (yield from _first_different_in_steps(comm, mpi, text))


def allgather_text_in_steps(comm: Any, mpi: Any, text: str) -> Steps[list[str]]:
    """Return the texts of all ranks."""
    different = yield from same_in_steps(comm, mpi, text)
    if different is None:  # the usual case, whose cost does not grow with the ranks
        return [text] * comm.size
    return (yield from _gather_in_steps(comm, mpi, text))


def differing_texts_in_steps(comm: Any, mpi: Any, text: str) -> Steps[list[str] | None]:
    """Return the texts of all ranks if they differ, None otherwise.

    These messages stay as they are, so that ranks of different versions understand them.
    """
    for _ in range(2):  # as the first versions did
        different = yield from _first_different_in_steps(comm, mpi, text)
        if different is None:
            return None
    return (yield from _gather_in_steps(comm, mpi, text))


def _first_different_in_steps(comm: Any, mpi: Any, text: str) -> Steps[int | None]:
    own = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    first = own.copy()
    yield comm.Ibcast([first, mpi.BYTE], root=0)
    is_same = bool((own == first).all())
    different = yield from lowest_in_steps(comm, mpi, comm.size if is_same else comm.rank)
    return None if different == comm.size else different


def _gather_in_steps(comm: Any, mpi: Any, text: str) -> Steps[list[str]]:
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
