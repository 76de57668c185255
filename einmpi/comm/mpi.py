"""Ranks as MPI processes: the Comm over a communicator of mpi4py."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from einmpi.comm.base import (
    ALONE,
    SUMMABLE,
    Array,
    Comm,
    Counts,
    Group,
    MessageComm,
    Messages,
    Received,
    allgatherv_bytes,
    count_received,
    pieces_of,
    reduce_scatter_bytes,
    share_unnamed_file,
)
from einmpi.comm.control_messages import (
    CODE_BYTES,
    CONTROL_TAG,
    DIGEST_BYTES,
    LONGEST_SLEEP,
    MOST_RANKS_OF_DIRECT_MESSAGES,
    SHORTEST_SLEEP,
    Result,
    Steps,
    compare_in_steps,
    differing_texts_in_steps,
    digest_of,
    gather_in_steps,
    lowest_in_steps,
    requests_to_all,
)
from einmpi.comm.mpi_library import cuda_aware, import_mpi, mpi_has_ended, world
from einmpi.errors import EinmpiError, InputError, failure
from einmpi.process.environment import available_cores
from einmpi.process.names import unlink_mpich_segment

# ---- nodes ---------------------------------------------------------------------------------------
#
# Which ranks of a communicator share a node. `mpi` is mpi4py's module, not imported here.


class Node(NamedTuple):
    """The node of a rank: its ranks, the place of this one, and the cores of all of them."""

    ranks: int
    rank: int
    cores: int


def sort_by_node(comm: Any, mpi: Any) -> tuple[Any, tuple[int, ...]]:
    """Return a duplicate of a communicator in which the ranks of a node follow each other.

    Also return the node of each rank. A mesh needs the ranks of a node together.
    """
    duplicate = comm.Dup()
    on_node = _ranks_on_node(duplicate, mpi)
    lowest_rank = np.array([on_node.bcast(duplicate.rank)], np.int64)  # stands for the node
    on_node.Free()
    lowest_ranks = np.empty(duplicate.size, np.int64)
    duplicate.Allgather([lowest_rank, mpi.INT64_T], [lowest_ranks, mpi.INT64_T])
    nodes = np.unique(lowest_ranks, return_inverse=True)[1]
    is_sorted = bool((np.diff(nodes) >= 0).all())
    if is_sorted:
        return duplicate, tuple(nodes.tolist())
    key = int(nodes[duplicate.rank]) * duplicate.size + duplicate.rank
    reordered = duplicate.Split(0, key)
    duplicate.Free()
    return reordered, tuple(np.sort(nodes).tolist())


def node_of(comm: Any, mpi: Any) -> Node:
    """Describe the node of this rank. Its ranks may be bound to different cores."""
    on_node = _ranks_on_node(comm, mpi)
    cores: set[int] = set()
    for cores_of_rank in on_node.allgather(available_cores()):
        cores |= cores_of_rank
    node = Node(on_node.size, on_node.rank, len(cores))
    on_node.Free()
    return node


def _ranks_on_node(comm: Any, mpi: Any) -> Any:
    """Return a communicator of the ranks on this node."""
    on_node = comm.Split_type(mpi.COMM_TYPE_SHARED)
    if comm.allreduce(on_node.size, mpi.MAX) > 1 or comm.size == 1:
        return on_node
    # No two ranks share memory: each is on a node of its own, or MPI does not know better, like
    # Open MPI under srun and some builds of MPICH. Then names of machines decide: ranks are first
    # grouped by a hash of the name, then by the name itself.
    on_node.Free()
    name = f"{mpi.Get_processor_name()} {os.environ.get('SLURMD_NODENAME', '')}"
    same_hash = comm.Split(zlib.crc32(name.encode()) % 2**31)
    names = same_hash.allgather(name)
    on_node = same_hash.Split(names.index(name))
    same_hash.Free()
    return on_node


FREED = "MPI: the communicator was freed; expected one that is in use"
# Counts of MPI 3, and of Open MPI 5, have 32 bits: nothing larger goes to MPI in one call.
MOST_BYTES = 2**30
# A gather in a small group, of few bytes in all, takes longer by MPI's own than message by message.
MOST_RANKS_OF_DIRECT_GATHER = 8
MOST_BYTES_OF_DIRECT_GATHER = 2**16
# So few bytes go to all others along a tree, in MPICH and in Open MPI.
MOST_BYTES_OF_BROADCAST = 2**11
# With more ranks than cores, a waiting rank first yields its core this often, then sleeps.
_YIELDS = 200


_Message: TypeAlias = tuple[Any, int]  # a buffer as mpi4py takes it, and the other rank


@cache
def _attribute() -> Any:
    """Return the key of the attribute by which MPI frees a Comm with its communicator."""
    create = import_mpi().Comm.Create_keyval
    return create(delete_fn=lambda _comm, _key, attached: attached.free())


def comm_of(comm: Any = None) -> Comm:
    """Return the Comm of a communicator of mpi4py, which is made only once.

    None means the world, or this process alone without a launcher. A Comm is returned unchanged.
    """
    if comm is not None and hasattr(comm, "allgather_text"):
        given: Comm = comm
        return given
    communicator = world() if comm is None else comm
    if communicator is None:
        return ALONE
    if not hasattr(communicator, "Get_attr"):
        problem = f"{type(communicator).__name__} is not a communicator"
        raise InputError("comm", problem, "a communicator of mpi4py, or None")
    if communicator == import_mpi().COMM_NULL:
        raise EinmpiError(FREED)
    attached: MpiComm | None = communicator.Get_attr(_attribute())
    if attached is None:
        attached = MpiComm(communicator)
        communicator.Set_attr(_attribute(), attached)
    return attached


def is_gathered_directly(group: Group, nbytes: int) -> bool:
    """Return whether each member of a group sends its piece to every other one itself.

    All members decide alike. MPI's own gather pays for larger groups and larger messages.
    """
    return len(group) <= MOST_RANKS_OF_DIRECT_GATHER and nbytes <= MOST_BYTES_OF_DIRECT_GATHER


def broadcasting_member(sizes: Sequence[int] | Array) -> int | None:
    """Return the only member of a group with a piece, if that is a small one; else None.

    A gather would also send messages without elements, so that all wait for all others.
    """
    members = np.flatnonzero(sizes)
    is_small = len(members) == 1 and sizes[members[0]] <= MOST_BYTES_OF_BROADCAST
    return int(members[0]) if is_small else None


class _FreedCommunicator:
    """Stands for a communicator that was freed: all its uses are the same error on all ranks."""

    def __getattr__(self, name: str) -> Any:
        raise failure(FREED)


class MpiComm(MessageComm):
    """All ranks of the caller's communicator, over a duplicate that keeps messages apart.

    Ranks are numbered node by node where every node has equally many; rank 0 stays rank 0.
    """

    def __init__(self, comm: Any) -> None:
        if comm.Is_inter():
            raise EinmpiError(
                "MPI: this is an intercommunicator with two sides; expected an intracommunicator"
            )
        self._mpi = import_mpi()
        self._all, nodes = sort_by_node(comm, self._mpi)
        super().__init__(self._all.rank, self._all.size)
        self.nodes = nodes
        self._all.Set_errhandler(self._mpi.ERRORS_RETURN)
        self.serves_threads = self._mpi.Query_thread() >= self._mpi.THREAD_SERIALIZED
        self.communicator = comm  # the user's own
        # A library may run out of communicators. All members of a group learn it together, and its
        # entry is None.
        self._communicators: dict[Group, Any | None] = {tuple(range(self.size)): self._all}
        self._signal = [np.zeros(1, np.uint8), 1, self._mpi.BYTE]
        self._heard = [np.zeros(1, np.uint8), 1, self._mpi.BYTE]
        node = node_of(self._all, self._mpi)
        self.ranks_on_node = node.ranks
        self.rank_on_node = node.rank
        self.cores = max(1, node.cores // node.ranks)
        self.oversubscribed = node.ranks > node.cores
        if self.rank_on_node == 0 and self.size == self._mpi.COMM_WORLD.size:
            unlink_mpich_segment()  # all ranks have started and attached to it
        self._sum_types: dict[str, Any] = {}
        for name in SUMMABLE:
            self._sum_types[name] = self._mpi.Datatype.fromcode(np.dtype(name).char)

    @cached_property
    def cuda_aware(self) -> bool:
        return cuda_aware()

    @property
    def is_freed(self) -> bool:
        """Whether it cannot be used any more: it was freed, or MPI has ended."""
        return not self._communicators or mpi_has_ended()

    # ---- payload ---------------------------------------------------------------------------------

    def _prepare_large_gather(
        self, group: Group, buffer: Array, counts: Counts
    ) -> Callable[[], None]:
        received = allgatherv_bytes(self, group, buffer, counts)
        if len(group) <= 2 or buffer.nbytes > MOST_BYTES:
            return partial(self._gather_in_a_ring, group, buffer, counts, received)
        byte_counts = [int(count) * buffer.dtype.itemsize for count in counts]
        root = broadcasting_member(byte_counts)
        everything = buffer.view(np.uint8)

        def gather() -> None:
            comm = self._communicator_of(group)
            if comm is None:
                self._gather_in_a_ring(group, buffer, counts, received)
                return
            count_received(self, received)
            if root is not None:
                request = comm.Ibcast([everything, buffer.nbytes, self._mpi.BYTE], root)
            else:
                target = [everything, byte_counts, self._mpi.BYTE]
                request = comm.Iallgatherv(self._mpi.IN_PLACE, target)
            self._wait([request])

        return gather

    def _gather_in_a_ring(
        self, group: Group, buffer: Array, counts: Counts, received: Received
    ) -> None:
        """Send each piece over each link once, wherever the ranks are."""
        count_received(self, received)
        pieces = pieces_of(buffer, counts)
        place = group.index(self.rank)
        preceding = group[place - 1]
        following = group[(place + 1) % len(group)]
        for step in range(len(group) - 1):
            receives = self._messages([(preceding, pieces[place - step - 1])])
            self._exchange(receives, self._messages([(following, pieces[place - step])]))

    def reduce_scatter(self, group: Group, send: Array, counts: Counts, receive: Array) -> bool:
        received = reduce_scatter_bytes(self, group, send, counts, receive)
        datatype = self._sum_types.get(send.dtype.name)
        if datatype is None or send.nbytes > MOST_BYTES:
            return False
        if len(group) == 1:
            receive[...] = send
            return True
        comm = self._communicator_of(group)
        if comm is None:
            return False
        count_received(self, received)
        request = comm.Ireduce_scatter(
            [send, datatype], [receive, datatype], list(counts), self._mpi.SUM
        )
        self._wait([request])
        return True

    # ---- shared memory ---------------------------------------------------------------------------

    def share_memory(self, group: Group, nbytes: int) -> Array:
        return share_unnamed_file(self, group, nbytes)

    def barrier_among(self, group: Group) -> None:
        # In each round a rank hears, directly or not, of twice as many others as before.
        place = group.index(self.rank)
        distance = 1
        while distance < len(group):
            source = group[place - distance]
            target = group[(place + distance) % len(group)]
            self._exchange([(self._heard, source)], [(self._signal, target)])
            distance *= 2

    # ---- prepared calls --------------------------------------------------------------------------

    # MPI's own alltoallv needs all ranks to agree whether counts are too large, and a rank does not
    # know the counts of others. Messages between pairs without data cost nothing and need no
    # communicator.

    def prepare_allgatherv(self, group: Group, buffer: Array, counts: Counts) -> Callable[[], None]:
        if is_gathered_directly(group, buffer.nbytes):
            return super().prepare_allgatherv(group, buffer, counts)
        return self._prepare_large_gather(group, buffer, counts)

    def prepare_exchange(
        self, call: str, receives: Messages, sends: Messages, received: Received
    ) -> Callable[[], None]:
        incoming = self._messages(receives)
        outgoing = self._messages(sends)

        def exchange_all() -> None:
            count_received(self, received)
            self._exchange(incoming, outgoing)

        if self.oversubscribed or len(incoming) > 1 or len(outgoing) > 1:
            return exchange_all
        nobody = (None, self._mpi.PROC_NULL)
        receive_buffer, source_rank = incoming[0] if incoming else nobody
        send_buffer, to = outgoing[0] if outgoing else nobody
        send_and_receive = self._all.Sendrecv
        nbytes, between = received

        def exchange_with_one() -> None:
            if self.pause:
                exchange_all()
                return
            self.received += nbytes
            self.received_between += between
            send_and_receive(send_buffer, to, 0, receive_buffer, source_rank, 0)

        return exchange_with_one

    # ---- control ---------------------------------------------------------------------------------

    def prepare_compare(self, text: str) -> Callable[[], list[str] | None]:
        if self.size > MOST_RANKS_OF_DIRECT_MESSAGES:
            return lambda: self.compare(text)
        own = np.empty(DIGEST_BYTES, np.uint8)
        own[:-CODE_BYTES] = np.frombuffer(digest_of(text), np.uint8)
        code = own[-CODE_BYTES:].view("<u4")
        calls = self.calls
        are_same = self._prepare_comparison(own)

        def compare() -> list[str] | None:
            code[0] = calls.code
            if are_same():
                if calls.texts:
                    calls.forget()
                return None
            return self._finish(gather_in_steps(self._all, self._mpi, calls.after(text)))

        return compare

    def _prepare_comparison(self, own: Array) -> Callable[[], bool]:
        """Return a call that tells whether all ranks have the same bytes in `own`."""
        received = np.empty((self.size, DIGEST_BYTES), np.uint8)
        others = [rank for rank in range(self.size) if rank != self.rank]
        if len(others) == 1 and not self.oversubscribed:
            (other,) = others
            other_row = received[other]
            send_and_receive = self._all.Sendrecv

            def compare_with_other() -> bool:
                send_and_receive(own, other, CONTROL_TAG, other_row, other, CONTROL_TAG)
                return bool(other_row.tobytes() == own.tobytes())

            return compare_with_other

        def compare_with_all() -> bool:
            received[self.rank] = own
            self._wait(requests_to_all(self._all, received))
            return received.tobytes() == own.tobytes() * self.size

        return compare_with_all

    def lowest(self, number: int) -> int:
        return self._finish(lowest_in_steps(self._all, self._mpi, number))

    def compare(self, text: str) -> list[str] | None:
        return self._finish(self.compare_in_steps(text))

    def compare_in_steps(self, text: str) -> Steps[list[str] | None]:
        return compare_in_steps(self._all, self._mpi, text, self.calls)

    def differing_texts(self, text: str) -> list[str] | None:
        """Return the texts of all ranks if they differ, None otherwise."""
        return self._finish(differing_texts_in_steps(self._all, self._mpi, text))

    def _finish(self, steps: Steps[Result]) -> Result:
        """Wait for one request of a call after another; return the result of the call."""
        while True:
            try:
                request = next(steps)
            except StopIteration as end:
                result: Result = end.value
                return result
            self._wait([request])

    def barrier(self) -> None:
        self._wait([self._all.Ibarrier()])

    def free(self) -> None:
        self.kept.clear()
        # The communicator of all ranks came first, so it is freed last.
        while self._communicators and not self._mpi.Is_finalized():
            _, comm = self._communicators.popitem()
            if comm is not None:
                comm.Free()
        self._all = _FreedCommunicator()

    # ---- requests and communicators --------------------------------------------------------------

    def _messages(self, pieces: Messages) -> list[_Message]:
        """Return pieces as messages that MPI can count. No elements need no message.

        Both sides split a piece in the same way.
        """
        messages: list[_Message] = []
        for peer, piece in pieces:
            most_elements = max(1, MOST_BYTES // piece.dtype.itemsize)
            for start in range(0, piece.size, most_elements):
                part = piece[start : start + most_elements]
                # As bytes: numpy has no buffer of bfloat16 that others could read.
                messages.append(([part.view(np.uint8), part.nbytes, self._mpi.BYTE], peer))
        return messages

    def _exchange(self, receives: Sequence[_Message], sends: Sequence[_Message]) -> None:
        requests = [self._all.Irecv(buffer, peer) for buffer, peer in receives]
        requests += [self._all.Isend(buffer, peer) for buffer, peer in sends]
        self._wait(requests)

    def _wait(self, requests: list[Any]) -> None:
        if self.pause:
            while not self._mpi.Request.Testall(requests):
                time.sleep(self.pause)
            return
        if not self.oversubscribed:
            self._mpi.Request.Waitall(requests)
            return
        # Waiting inside MPI would keep the core that other ranks need.
        for _ in range(_YIELDS):
            if self._mpi.Request.Testall(requests):
                return
            os.sched_yield()
        pause = SHORTEST_SLEEP
        while not self._mpi.Request.Testall(requests):
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_SLEEP)

    def _communicator_of(self, group: Group) -> Any | None:
        """Return the communicator of a group, or None if the library has no more of them."""
        if group not in self._communicators:
            everyone = self._all.Get_group()
            members = everyone.Incl(group)
            # Tags up to 32767 are allowed everywhere. Groups that are made at the same time rarely
            # have the same one.
            tag = zlib.crc32(np.array(group, "<i4").tobytes()) % 32768
            try:
                self._communicators[group] = self._all.Create_group(members, tag)
            except self._mpi.Exception:
                self._communicators[group] = None
            everyone.Free()
            members.Free()
        return self._communicators[group]
