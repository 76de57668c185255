"""How ranks exchange arrays: the interface, what it counts, and the two comms that need no other process.

Buffers are 1-D and contiguous. A group is a tuple of ranks; its members all pass the same tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Protocol, TypeVar

import numpy as np

from einmpi.errors import EinmpiError, failure
from einmpi.graph.dtypes import DTYPES
from einmpi.process.environment import available_cores
from einmpi.version import __version__

Result = TypeVar("Result")
Group = tuple[int, ...]
Counts = Sequence[
    int
]  # elements, one number for each member of a group; the pieces lie one after another

# Other dtypes travel, but no comm adds them up: MPI knows no float16, and a sum of bool is numpy's own idea.
SUMMABLE = frozenset(name for name, dtype in DTYPES.items() if dtype.mpi)


class Comm(Protocol):
    """What execution needs of the other ranks. Every call blocks until this rank's buffers are done with."""

    rank: int
    size: int
    cores: int  # that this rank has for itself
    ranks_on_node: int
    nodes: tuple[int, ...]  # the node of each rank
    rank_on_node: int  # among them
    received: int  # bytes of payload from other ranks so far
    received_between: int  # those of them that came from other nodes

    @property
    def cuda_aware(self) -> bool:
        """Whether it takes buffers on a GPU."""

    def alltoallv(
        self,
        group: Group,
        send: np.ndarray,
        send_counts: Counts,
        receive: np.ndarray,
        receive_counts: Counts,
    ) -> None:
        """A piece to and from each other member. A rank's own counts are 0: its own data never passes through."""

    def allgatherv(self, group: Group, buffer: np.ndarray, counts: Counts) -> None:
        """In place: own piece is there already, the other members' pieces come."""

    def reduce_scatter(
        self, group: Group, send: np.ndarray, counts: Counts, receive: np.ndarray
    ) -> bool:
        """The sum of all members' pieces for this one. False: not done, the caller has to exchange and add itself."""

    def sendrecv(
        self,
        to: int | None,
        send: np.ndarray | None,
        source: int | None,
        receive: np.ndarray | None,
    ) -> None:
        """One message out, one in, either may be missing. Messages between two ranks stay in order."""

    def same(self, text: str) -> int | None:
        """The lowest rank whose text differs from rank 0's, or None; on every rank."""

    def allgather_text(self, text: str) -> list[str]:
        """Every rank's text, on every rank. For short messages; they are not counted."""

    def barrier(self) -> None: ...

    def free(self) -> None:
        """Give back what the comm holds. All ranks call it."""


def pieces_of(buffer: np.ndarray, counts: Counts) -> list[np.ndarray]:
    """Views of each member's piece."""
    return [
        buffer[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)
    ]


def even_nodes(comm: Comm) -> int | None:
    """The number of nodes, where each has equally many ranks, one node after the other; None where it is not so."""
    count = max(comm.nodes) + 1
    each, rest = divmod(comm.size, count)
    even = not rest and all(node == rank // each for rank, node in enumerate(comm.nodes))
    return count if even else None


# ---- what a call receives from others, in bytes; a wrong call ends here, in every comm alike ------------------------

Amount = tuple[int, int]  # bytes from other ranks, and those of them from other nodes


def count(comm: Comm, amount: Amount) -> None:
    comm.received += amount[0]
    comm.received_between += amount[1]


@contextmanager
def uncounted(comm: Comm) -> Iterator[None]:
    """What is received meanwhile does not count."""
    before = comm.received, comm.received_between
    yield
    comm.received, comm.received_between = before


def alltoallv_bytes(
    comm: Comm,
    group: Group,
    send: np.ndarray,
    send_counts: Counts,
    receive: np.ndarray,
    receive_counts: Counts,
) -> Amount:
    rank = comm.rank
    me = _member(rank, group, send_counts, receive_counts)
    assert send_counts[me] == receive_counts[me] == 0, (
        f"rank {rank} exchanges {send_counts[me]} elements with itself"
    )
    _holds(rank, send, sum(send_counts))
    _holds(rank, receive, sum(receive_counts))
    assert send.dtype == receive.dtype, (
        f"rank {rank} sends {send.dtype} and receives {receive.dtype}"
    )
    return _from_others(comm, group, receive_counts, receive)


def allgatherv_bytes(comm: Comm, group: Group, buffer: np.ndarray, counts: Counts) -> Amount:
    _member(comm.rank, group, counts)
    _holds(comm.rank, buffer, sum(counts))
    return _from_others(comm, group, counts, buffer)


def reduce_scatter_bytes(
    comm: Comm, group: Group, send: np.ndarray, counts: Counts, receive: np.ndarray
) -> Amount:
    rank = comm.rank
    me = _member(rank, group, counts)
    _holds(rank, send, sum(counts))
    _holds(rank, receive, counts[me])
    assert send.dtype == receive.dtype, (
        f"rank {rank} sends {send.dtype} and receives {receive.dtype}"
    )
    return _from_others(comm, group, [counts[me]] * len(group), receive)


def sendrecv_bytes(
    comm: Comm,
    to: int | None,
    send: np.ndarray | None,
    source: int | None,
    receive: np.ndarray | None,
) -> Amount:
    rank = comm.rank
    assert to is None or send is not None, f"rank {rank} sends nothing to rank {to}"
    assert (to == rank) == (source == rank), (
        f"rank {rank} sends to {to} and receives from {source}: itself is both"
    )
    if source is None:
        return 0, 0
    assert receive is not None, f"rank {rank} has no buffer for rank {source}"
    return _from_others(comm, (source,), [receive.size], receive)


def _from_others(comm: Comm, group: Group, counts: Counts, buffer: np.ndarray) -> Amount:
    here = comm.nodes[comm.rank]
    pairs = list(zip(group, counts, strict=True))
    total = sum(elements for member, elements in pairs if member != comm.rank)
    between = sum(elements for member, elements in pairs if comm.nodes[member] != here)
    return int(total) * buffer.dtype.itemsize, int(between) * buffer.dtype.itemsize


def _member(rank: int, group: Group, *counts: Counts) -> int:
    assert rank in group, f"rank {rank} is no member of {group}"
    for each in counts:
        assert len(each) == len(group), f"{len(each)} counts for {len(group)} members"
    return group.index(rank)


def _holds(rank: int, buffer: np.ndarray, count: int) -> None:
    assert buffer.ndim == 1 and buffer.size == count, (
        f"rank {rank}: a buffer {buffer.shape} for {count} elements"
    )


# ---- comms without other processes ----------------------------------------------------------------------------------


class SelfComm:
    """One process: rank 0 of 1."""

    rank, size, ranks_on_node, rank_on_node, received, received_between, cuda_aware = (
        0,
        1,
        1,
        0,
        0,
        0,
        False,
    )
    nodes: tuple[int, ...] = (0,)
    cores = len(available_cores())

    def alltoallv(
        self,
        group: Group,
        send: np.ndarray,
        send_counts: Counts,
        receive: np.ndarray,
        receive_counts: Counts,
    ) -> None:
        alltoallv_bytes(self, group, send, send_counts, receive, receive_counts)

    def allgatherv(self, group: Group, buffer: np.ndarray, counts: Counts) -> None:
        allgatherv_bytes(self, group, buffer, counts)

    def reduce_scatter(
        self, group: Group, send: np.ndarray, counts: Counts, receive: np.ndarray
    ) -> bool:
        reduce_scatter_bytes(self, group, send, counts, receive)
        if send.dtype.name not in SUMMABLE:
            return False
        receive[...] = send
        return True

    def sendrecv(
        self,
        to: int | None,
        send: np.ndarray | None,
        source: int | None,
        receive: np.ndarray | None,
    ) -> None:
        sendrecv_bytes(self, to, send, source, receive)
        if source is not None and receive is not None:
            receive[...] = send

    def same(self, text: str) -> int | None:
        return None

    def allgather_text(self, text: str) -> list[str]:
        return [text]

    def barrier(self) -> None:
        pass

    def free(self) -> None:
        pass


ALONE = SelfComm()


def placed(size: int, nodes: int) -> tuple[int, ...]:
    """The node of each rank, when they lie one node after the other."""
    return tuple(rank * nodes // size for rank in range(size))


class CountingComm:
    """One rank of many in a dry run: counts, moves nothing and never looks at an element."""

    def __init__(self, rank: int, size: int, nodes: int = 1) -> None:
        self.rank, self.size, self.ranks_on_node, self.cores = rank, size, 1, 1
        self.nodes = placed(size, nodes)
        self.received = self.received_between = 0
        self.rank_on_node, self.cuda_aware = 0, False

    def alltoallv(
        self,
        group: Group,
        send: np.ndarray,
        send_counts: Counts,
        receive: np.ndarray,
        receive_counts: Counts,
    ) -> None:
        count(self, alltoallv_bytes(self, group, send, send_counts, receive, receive_counts))

    def allgatherv(self, group: Group, buffer: np.ndarray, counts: Counts) -> None:
        count(self, allgatherv_bytes(self, group, buffer, counts))

    def reduce_scatter(
        self, group: Group, send: np.ndarray, counts: Counts, receive: np.ndarray
    ) -> bool:
        needed = reduce_scatter_bytes(self, group, send, counts, receive)
        if send.dtype.name not in SUMMABLE:
            return False
        count(self, needed)
        return True

    def sendrecv(
        self,
        to: int | None,
        send: np.ndarray | None,
        source: int | None,
        receive: np.ndarray | None,
    ) -> None:
        count(self, sendrecv_bytes(self, to, send, source, receive))

    def same(self, text: str) -> int | None:
        return None

    def allgather_text(self, text: str) -> list[str]:
        return [text] * self.size

    def barrier(self) -> None:
        pass

    def free(self) -> None:
        pass


# ---- all ranks alike ------------------------------------------------------------------------------------------------


def on_first_rank(comm: Comm, action: Callable[[], str | None]) -> str:
    """Let rank 0 do something that may fail; where it does, all ranks raise the error. Its text goes to all ranks."""
    told = "0 "  # a status, and what there is to say
    if comm.rank == 0:
        try:
            told += action() or ""
        except EinmpiError as error:
            told = f"{error.status} {error}"
    status, _, text = comm.allgather_text(told)[0].partition(" ")
    if int(status):
        raise failure(int(status), text, everywhere=True)
    return text


def together(
    comm: Comm, function: Callable[[], Result], same: Callable[[Result], str] | None = None
) -> Result:
    """Do something on every rank that may fail on some: then it fails on all, with the same error. `same` gives a text
    of the result that must be equal on all ranks."""
    try:
        result = function()
    except EinmpiError as error:
        agree(comm, "", error)
        raise  # agree has raised already
    if comm.size > 1:  # else there is nobody to ask, and the text would be made for nothing
        agree(comm, same(result) if same is not None else "ok")
    return result


def same_version(comm: Comm) -> None:
    """The first that ranks ask each other, so that nothing else has to be understood by other versions."""
    different = comm.same(__version__)
    if different is not None:
        versions = comm.allgather_text(__version__)
        raise failure(
            EinmpiError.status,
            f"einmpi: rank {different} has version {versions[different]}, rank 0 has "
            f"{versions[0]}; all ranks must have the same",
            everywhere=True,
        )


def agree(comm: Comm, fingerprint: str, error: EinmpiError | None = None) -> None:
    """Nothing on any rank before all want the same: one that failed, or has another job, ends all with its error."""
    text = f"error {error.status} {error}" if error is not None else fingerprint
    different = comm.same(text)
    if different is not None:
        error = EinmpiError(
            f"einmpi: rank {different} has another command, job or version of einmpi than rank 0; "
            "all ranks must do the same"
        )
        for rank, found in enumerate(comm.allgather_text(text)):
            if found.startswith("error "):
                _, status, message = found.split(" ", 2)
                error = failure(int(status), message)
                error.add_note(f"on rank {rank}")
                break
    if error is not None:
        error.everywhere = True
        raise error
