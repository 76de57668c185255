"""How ranks exchange arrays: the interface of a Comm, and the bytes that each call receives.

Buffers are 1-D and contiguous. A group is a tuple of ranks; all its members pass the same tuple.
"""

from __future__ import annotations

import mmap
import os
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from einmpi.caches import bounded_cache
from einmpi.errors import EinmpiError
from einmpi.graph.dtypes import DTYPES
from einmpi.process.environment import available_cores

Array = npt.NDArray[Any]
Group = tuple[int, ...]
# The elements for each member of a group. Their pieces lie one after another in a buffer.
Counts = Sequence[int]
# Arrays, each with the other rank.
Messages = Sequence[tuple[int, Array]]

# All dtypes can be sent, but only these are summed by a Comm: MPI has no float16, and numpy's sum
# of bool is a logical or.
SUMMABLE = frozenset(name for name, dtype in DTYPES.items() if dtype.mpi)


_SEPARATOR = "\x1f"  # stands in no text


class SharingError(EinmpiError):
    """Ranks of a node cannot share memory."""


class Calls:
    """What this rank has called since ranks last compared that. All of them call the same."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.code = 0  # of all these texts
        self.is_inside = False  # a call that is noted: those that it makes are not

    def note(self, text: str) -> None:
        """Add a call; the next comparison finds out whether all ranks have made it."""
        self.texts.append(text)
        self.code = zlib.crc32(f"{text}{_SEPARATOR}".encode(), self.code)

    def forget(self) -> None:
        """Begin anew after a comparison."""
        self.texts.clear()
        self.code = 0

    def after(self, text: str) -> str:
        """Return a text followed by the calls; `split_calls` takes them apart."""
        return _SEPARATOR.join((text, *self.texts))


def split_calls(text: str) -> list[str]:
    """Return a text and the calls after it."""
    return text.split(_SEPARATOR)


@bounded_cache(16)
def spread_over_nodes(size: int, nodes: int) -> tuple[int, ...]:
    """Return the node of each rank if ranks are placed evenly, one node after the other."""
    return tuple(rank * nodes // size for rank in range(size))


class Comm:
    """All ranks of a run, as one of them sees them.

    Every call blocks until this rank may use its buffers again. This one is a rank of a dry run: it
    counts bytes but moves nothing and never looks at an element. Others do more.
    """

    # Calls may come from any thread, but from one at a time only.
    serves_threads = True
    # Seconds that a rank sleeps between two looks at messages that it waits for; with 0 it looks
    # all the time, unless other ranks need its core.
    pause = 0.0
    received_shared = 0  # bytes of `received` that were read in memory that ranks share

    def __init__(self, rank: int, size: int, nodes: int = 1) -> None:
        self.rank = rank
        self.size = size
        self.cores = 1  # for this rank alone
        self.nodes = spread_over_nodes(size, nodes)  # the node of each rank
        self.ranks_on_node = 1  # on the node of this rank
        self.rank_on_node = 0  # the place of this rank among them
        self.received = 0  # bytes of payload from other ranks so far
        self.received_between = 0  # those of them from other nodes
        self.kept: dict[str, Any] = {}  # what callers keep for these ranks until the Comm is freed
        self.calls = Calls()

    @cached_property
    def cuda_aware(self) -> bool:
        """Whether buffers may be on a GPU."""
        return False

    def beside_kernels(self) -> AbstractContextManager[None]:
        """Return what another thread enters for a transfer while this one starts kernels.

        The transfer sees what the kernels make that this thread has started so far, and is complete
        where the `with` block ends.
        """
        return nullcontext()

    # ---- payload ---------------------------------------------------------------------------------

    def alltoallv(
        self,
        group: Group,
        send: Array,
        send_counts: Counts,
        receive: Array,
        receive_counts: Counts,
    ) -> None:
        """Exchange pieces with all other members. A rank's counts for itself are 0."""
        received = alltoallv_bytes(self, group, send, send_counts, receive, receive_counts)
        count_received(self, received)

    def allgatherv(self, group: Group, buffer: Array, counts: Counts) -> None:
        """Fill the buffer with the pieces of all members. The own piece is there already."""
        count_received(self, allgatherv_bytes(self, group, buffer, counts))

    def reduce_scatter(self, group: Group, send: Array, counts: Counts, receive: Array) -> bool:
        """Receive the sum of all members' pieces for this rank.

        Return False if that is not possible: then the caller has to exchange and add.
        """
        received = reduce_scatter_bytes(self, group, send, counts, receive)
        if send.dtype.name not in SUMMABLE:
            return False
        count_received(self, received)
        return True

    def sendrecv(
        self, to: int | None, send: Array | None, source: int | None, receive: Array | None
    ) -> None:
        """Send one message and receive one; None leaves one of them out.

        Messages between two ranks stay in order.
        """
        count_received(self, sendrecv_bytes(self, to, send, source, receive))

    # ---- prepared calls --------------------------------------------------------------------------

    def prepare_alltoallv(
        self,
        group: Group,
        send: Array,
        send_counts: Counts,
        receive: Array,
        receive_counts: Counts,
    ) -> Callable[[], None]:
        """Return `alltoallv` of small messages in these buffers, to be called again and again.

        Nothing is sent yet. Other members need not prepare their calls.
        """
        return partial(self.alltoallv, group, send, send_counts, receive, receive_counts)

    def prepare_allgatherv(self, group: Group, buffer: Array, counts: Counts) -> Callable[[], None]:
        """Return `allgatherv` of small messages in this buffer, to be called again and again.

        Nothing is sent yet. Other members need not prepare their calls.
        """
        return partial(self.allgatherv, group, buffer, counts)

    def prepare_compare(self, text: str) -> Callable[[], list[str] | None]:
        """Return `compare` of a text, to be called again and again.

        It sends what `compare` sends: other ranks may call that. Nothing is sent yet.
        """
        return lambda: self.compare(text)

    # ---- shared memory ---------------------------------------------------------------------------

    def share_memory(self, group: Group, nbytes: int) -> Array:
        """Return bytes of memory that all members of a group on one node read and write.

        Raise a SharingError on all members if that is not possible for one of them.
        """
        raise SharingError("these ranks share no memory")

    def barrier_among(self, group: Group) -> None:
        """Wait for all members of a group. What they wrote to shared memory before is there."""
        raise SharingError("these ranks share no memory")

    # ---- control ---------------------------------------------------------------------------------

    def lowest(self, number: int) -> int:
        """Return the lowest number of all ranks on every rank. Not counted."""
        return number

    def compare(self, text: str) -> list[str] | None:
        """Return None on all ranks if they say the same and have made the same calls.

        Otherwise return what each of them says, followed by its calls: `Calls.after`.
        """
        return None

    def allgather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks on every rank. Meant for short texts; not counted.

        It sends what `compare` sends.
        """
        found = self.compare(text) or [text] * self.size
        return [split_calls(each)[0] for each in found]

    def barrier(self) -> None:
        """Wait for all ranks."""

    def free(self) -> None:
        """Release everything that the Comm holds. All ranks call this."""


def pieces_of(buffer: Array, counts: Counts) -> list[Array]:
    """Return a view of each member's piece."""
    pieces = []
    start = 0
    for count in counts:
        pieces.append(buffer[start : start + count])
        start += count
    return pieces


def even_nodes(comm: Comm) -> int | None:
    """Return the number of nodes if all have equally many ranks, one node after the other."""
    nodes = max(comm.nodes) + 1
    ranks_per_node, remainder = divmod(comm.size, nodes)
    if remainder:
        return None
    for rank, node in enumerate(comm.nodes):
        if node != rank // ranks_per_node:
            return None
    return nodes


# ---- the bytes that a call receives; a wrong call fails here, in every Comm alike ----------------


class Received(NamedTuple):
    """Bytes from other ranks, and those of them from other nodes."""

    nbytes: int
    between: int


def count_received(comm: Comm, received: Received) -> None:
    """Add the bytes of a call to the counters of a Comm."""
    comm.received += received.nbytes
    comm.received_between += received.between


def count_shared(comm: Comm, nbytes: int) -> None:
    """Count bytes of other ranks that were read in shared memory, without a message."""
    comm.received += nbytes
    comm.received_shared += nbytes


@contextmanager
def uncounted(comm: Comm) -> Iterator[None]:
    """Do not count what is received in the `with` block."""
    received = comm.received
    received_between = comm.received_between
    yield
    comm.received = received
    comm.received_between = received_between


def alltoallv_bytes(
    comm: Comm,
    group: Group,
    send: Array,
    send_counts: Counts,
    receive: Array,
    receive_counts: Counts,
) -> Received:
    """Check the arguments of `alltoallv` and return what it receives."""
    rank = comm.rank
    place = _check_member(rank, group, send_counts, receive_counts)
    assert send_counts[place] == receive_counts[place] == 0, (
        f"rank {rank} exchanges {send_counts[place]} elements with itself"
    )
    _check_buffer(rank, send, sum(send_counts))
    _check_buffer(rank, receive, sum(receive_counts))
    _check_dtypes(rank, send, receive)
    return _from_others(comm, group, receive_counts, receive)


def allgatherv_bytes(comm: Comm, group: Group, buffer: Array, counts: Counts) -> Received:
    """Check the arguments of `allgatherv` and return what it receives."""
    _check_member(comm.rank, group, counts)
    _check_buffer(comm.rank, buffer, sum(counts))
    return _from_others(comm, group, counts, buffer)


def reduce_scatter_bytes(
    comm: Comm, group: Group, send: Array, counts: Counts, receive: Array
) -> Received:
    """Check the arguments of `reduce_scatter` and return what it receives."""
    rank = comm.rank
    place = _check_member(rank, group, counts)
    _check_buffer(rank, send, sum(counts))
    _check_buffer(rank, receive, counts[place])
    _check_dtypes(rank, send, receive)
    return _from_others(comm, group, [counts[place]] * len(group), receive)


def sendrecv_bytes(
    comm: Comm, to: int | None, send: Array | None, source: int | None, receive: Array | None
) -> Received:
    """Check the arguments of `sendrecv` and return what it receives."""
    rank = comm.rank
    assert to is None or send is not None, f"rank {rank} sends nothing to rank {to}"
    assert (to == rank) == (source == rank), (
        f"rank {rank} sends to {to} and receives from {source}: a message to itself needs both"
    )
    if source is None:
        return Received(0, 0)
    assert receive is not None, f"rank {rank} has no buffer for rank {source}"
    return _from_others(comm, (source,), [receive.size], receive)


def _from_others(comm: Comm, group: Group, counts: Counts, buffer: Array) -> Received:
    own_node = comm.nodes[comm.rank]
    total = 0
    between = 0
    for member, elements in zip(group, counts, strict=True):
        if member != comm.rank:
            total += int(elements)
        if comm.nodes[member] != own_node:
            between += int(elements)
    return Received(total * buffer.dtype.itemsize, between * buffer.dtype.itemsize)


def _check_member(rank: int, group: Group, *all_counts: Counts) -> int:
    """Return the place of a rank in a group."""
    assert rank in group, f"rank {rank} is not a member of {group}"
    for counts in all_counts:
        assert len(counts) == len(group), f"{len(counts)} counts for {len(group)} members"
    return group.index(rank)


def _check_buffer(rank: int, buffer: Array, elements: int) -> None:
    assert buffer.ndim == 1 and buffer.size == elements, (
        f"rank {rank}: a buffer {buffer.shape} for {elements} elements"
    )


def _check_dtypes(rank: int, send: Array, receive: Array) -> None:
    assert send.dtype == receive.dtype, (
        f"rank {rank} sends {send.dtype} and receives {receive.dtype}"
    )


class MessageComm(Comm):
    """Ranks that send each other messages: all payload but sums goes through one function."""

    @abstractmethod
    def prepare_exchange(
        self, call: str, receives: Messages, sends: Messages, received: Received
    ) -> Callable[[], None]:
        """Return a function that exchanges messages of a call and counts what is received."""

    def alltoallv(
        self,
        group: Group,
        send: Array,
        send_counts: Counts,
        receive: Array,
        receive_counts: Counts,
    ) -> None:
        self.prepare_alltoallv(group, send, send_counts, receive, receive_counts)()

    def allgatherv(self, group: Group, buffer: Array, counts: Counts) -> None:
        self.prepare_allgatherv(group, buffer, counts)()

    def sendrecv(
        self, to: int | None, send: Array | None, source: int | None, receive: Array | None
    ) -> None:
        received = sendrecv_bytes(self, to, send, source, receive)
        receives = [] if source is None or receive is None else [(source, receive)]
        sends = [] if to is None or send is None else [(to, send)]
        self.prepare_exchange("sendrecv", receives, sends, received)()

    def prepare_alltoallv(
        self,
        group: Group,
        send: Array,
        send_counts: Counts,
        receive: Array,
        receive_counts: Counts,
    ) -> Callable[[], None]:
        received = alltoallv_bytes(self, group, send, send_counts, receive, receive_counts)
        outgoing = pieces_of(send, send_counts)
        incoming = pieces_of(receive, receive_counts)
        return self._prepare_pieces("alltoallv", group, outgoing, incoming, received)

    def prepare_allgatherv(self, group: Group, buffer: Array, counts: Counts) -> Callable[[], None]:
        received = allgatherv_bytes(self, group, buffer, counts)
        pieces = pieces_of(buffer, counts)
        outgoing = [pieces[group.index(self.rank)]] * len(group)
        return self._prepare_pieces("allgatherv", group, outgoing, pieces, received)

    def _prepare_pieces(
        self,
        call: str,
        group: Group,
        outgoing: Sequence[Array],
        incoming: Sequence[Array],
        received: Received,
    ) -> Callable[[], None]:
        """Return a function that exchanges pieces with all other members of a group."""
        place = group.index(self.rank)
        receives = []
        sends = []
        # Each rank starts with another one.
        for step in range(1, len(group)):
            source = place - step
            target = (place + step) % len(group)
            receives.append((group[source], incoming[source]))
            sends.append((group[target], outgoing[target]))
        return self.prepare_exchange(f"{call}{group}", receives, sends, received)


# ---- local ---------------------------------------------------------------------------------------
#
# A Comm without other processes.


class SelfComm(Comm):
    """One process: rank 0 of 1."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.cores = len(available_cores())

    def reduce_scatter(self, group: Group, send: Array, counts: Counts, receive: Array) -> bool:
        is_summed = super().reduce_scatter(group, send, counts, receive)
        if is_summed:
            receive[...] = send
        return is_summed

    def sendrecv(
        self, to: int | None, send: Array | None, source: int | None, receive: Array | None
    ) -> None:
        super().sendrecv(to, send, source, receive)
        if source is not None and receive is not None:
            receive[...] = send


ALONE = SelfComm()


# ---- shared memory -------------------------------------------------------------------------------
#
# Memory that the ranks of a node share: a file in memory without a name, which one rank creates
# and the others map. The system frees it with the last of them, however they end.


ALIGNMENT = 64  # bytes, as for all arrays of a rank
PROBE_BYTES = mmap.PAGESIZE
_KEPT_NODES = "nodes that share memory"
_KEPT_PROBLEM = "problem with shared memory"


class _File(NamedTuple):
    """An open file as other processes find and recognise it; a process 0 stands for no file."""

    process: int
    descriptor: int
    device: int
    inode: int


def aligned_bytes(nbytes: int) -> Array:
    """Return new bytes of memory, aligned as those of mapped files are."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


def share_unnamed_file(comm: Comm, group: Group, nbytes: int) -> Array:
    """Return memory of a file that the first member of a group creates, mapped by all members."""
    problem = ""
    descriptor = -1
    memory = None
    file = _File(0, 0, 0, 0)
    is_first = comm.rank == group[0]
    if is_first:
        try:
            descriptor = os.memfd_create("einmpi", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, nbytes)
            status = os.fstat(descriptor)
            file = _File(os.getpid(), descriptor, status.st_dev, status.st_ino)
        except (OSError, AttributeError) as error:
            problem = f"no file in memory: {error}"
    file = _File(*_gather_numbers(comm, group, file)[0])
    if file.process == 0:
        problem = problem or f"rank {group[0]} could not create it"
    elif not problem:
        try:
            if not is_first:
                descriptor = _open_file_of(file)
            memory = mmap.mmap(descriptor, nbytes)
        except (OSError, ValueError) as error:
            problem = f"process {file.process}: {error}"
    succeeded = _gather_numbers(comm, group, [int(memory is not None)])
    if descriptor >= 0:
        os.close(descriptor)
    if memory is None or [0] in succeeded:
        raise SharingError(problem or "another rank of the node could not map it")
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _open_file_of(file: _File) -> int:
    """Return a descriptor of another process's file, if it is the one that process means."""
    descriptor = os.open(f"/proc/{file.process}/fd/{file.descriptor}", os.O_RDWR | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) != (file.device, file.inode):
        # The number means another process here: the ranks are in different containers.
        os.close(descriptor)
        raise OSError("it has another file")
    return descriptor


def _gather_numbers(comm: Comm, group: Group, own: list[int] | _File) -> list[list[int]]:
    """Return the numbers of all members of a group."""
    count = len(own)
    numbers = np.zeros((len(group), count), np.int64)
    numbers[group.index(comm.rank)] = own
    with uncounted(comm):
        comm.allgatherv(group, numbers.reshape(-1), [count] * len(group))
    return numbers.tolist()


# ---- which ranks share memory --------------------------------------------------------------------


def sharing_nodes(comm: Comm) -> tuple[int, ...]:
    """Return the node of each rank; a rank of a node that cannot share memory has one of its own.

    The ranks of every node try it together, once. All ranks call this.
    """
    if _KEPT_NODES not in comm.kept:
        problem = ""
        node = comm.nodes[comm.rank]
        group = tuple(rank for rank in range(comm.size) if comm.nodes[rank] == node)
        if len(group) > 1:
            try:
                comm.share_memory(group, PROBE_BYTES)
            except SharingError as error:
                problem = str(error)
        problems = comm.allgather_text(problem)
        failed = {comm.nodes[rank] for rank, text in enumerate(problems) if text}
        nodes = []
        for rank, node in enumerate(comm.nodes):
            nodes.append(-1 - rank if node in failed else node)
        comm.kept[_KEPT_NODES] = tuple(nodes)
        comm.kept[_KEPT_PROBLEM] = next(filter(None, problems), "")
    found: tuple[int, ...] = comm.kept[_KEPT_NODES]
    return found


def sharing_problem(comm: Comm) -> str:
    """Return why the ranks of a node cannot share memory; "" if they can, or have not tried."""
    problem: str = comm.kept.get(_KEPT_PROBLEM, "")
    return problem


def gather_texts_among(comm: Comm, group: Group, text: str) -> list[str]:
    """Return the texts of all members of a group. All of them call it; nothing is counted."""
    own = np.frombuffer(text.encode(), np.uint8)
    sizes = [size for (size,) in _gather_numbers(comm, group, [own.size])]
    everything = np.zeros(sum(sizes), np.uint8)
    pieces = pieces_of(everything, sizes)
    pieces[group.index(comm.rank)][...] = own
    with uncounted(comm):
        comm.allgatherv(group, everything, sizes)
    return [piece.tobytes().decode() for piece in pieces]


def all_agree(comm: Comm, group: Group, answer: bool) -> bool:
    """Return whether all members of a group answer yes. All of them call it."""
    return [0] not in _gather_numbers(comm, group, [int(answer)])
