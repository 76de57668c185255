"""Elements that ranks request from each other, or send to each other unasked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.comm.agreement import agree_on_calls
from einmpi.comm.base import Comm
from einmpi.comm.programs import abort_on_divergence

Array: TypeAlias = npt.NDArray[Any]
Integers: TypeAlias = npt.NDArray[np.int64]


def request_elements(
    comm: Comm,
    dtype: np.dtype[Any],
    places: Integers,
    owners: Integers,
    answer: Callable[[Integers], Array],
) -> Array:
    """Return the elements at some places, each of which a rank owns. All ranks call it.

    `answer` returns the elements of this rank at places that it owns.
    """
    # Numbers of 16 bits are sorted much faster.
    short_owners = owners.astype(np.uint16) if comm.size < 2**16 else owners
    order = np.argsort(short_owners, kind="stable")
    counts = np.bincount(owners, minlength=comm.size)
    starts = np.concatenate(([0], np.cumsum(counts)))
    own = order[starts[comm.rank] : starts[comm.rank + 1]]
    values = np.empty(places.size, dtype)
    values[own] = answer(places[own])
    if comm.size == 1:
        return values
    elsewhere = np.concatenate((order[: starts[comm.rank]], order[starts[comm.rank + 1] :]))
    counts[comm.rank] = 0
    is_other = np.arange(comm.size) != comm.rank
    one_each = is_other.astype(int).tolist()
    everyone = tuple(range(comm.size))
    agree_on_calls(comm)
    with abort_on_divergence(comm):
        others_counts = np.empty(comm.size - 1, np.int64)
        comm.alltoallv(everyone, counts[is_other], one_each, others_counts, one_each)
        asked = np.zeros(comm.size, np.int64)
        asked[is_other] = others_counts
        wanted = np.empty(int(asked.sum()), np.int64)
        comm.alltoallv(everyone, places[elsewhere], counts.tolist(), wanted, asked.tolist())
        incoming = np.empty(elsewhere.size, dtype)
        comm.alltoallv(everyone, answer(wanted), asked.tolist(), incoming, counts.tolist())
    values[elsewhere] = incoming
    return values


def exchange_elements(
    comm: Comm,
    dtype: np.dtype[Any],
    parts: Sequence[Array],
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
) -> Array:
    """Send elements to other ranks; return those that they send here. All ranks call it.

    `parts` are the elements to send, in the order of the ranks that get them. The counts have a
    number for each rank, 0 for this one.
    """
    to_send = np.concatenate([np.empty(0, dtype), *parts])
    received = np.empty(sum(receive_counts), dtype)
    agree_on_calls(comm)
    with abort_on_divergence(comm):
        everyone = tuple(range(comm.size))
        comm.alltoallv(everyone, to_send, send_counts, received, receive_counts)
    return received
