"""A dry run of a schedule: arrays have a shape only, and the communicator notes the messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from einmpi.comm.base import Array, Comm, Counts, Group, count_shared
from einmpi.comm.mpi import MOST_BYTES, broadcasting_member, is_gathered_directly
from einmpi.runtime.backend import ShapeBackend, SharedArrays
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.program import Program
from einmpi.runtime.sharing.memory import choose_shared_slots
from einmpi.runtime.sharing.slots import SharedSlots
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Load, Step, Transfer

# ---- calls ---------------------------------------------------------------------------------------
#
# The calls of one rank of a dry run, and their messages in the rounds of MpiComm.


# What MPICH does with a gather or a sum that einmpi leaves to MPI: below these bytes in all, few
# large messages in steps that double; otherwise one piece after another around a ring. SimGrid
# replays collectives of all ranks only, so those of a group are written as their messages.
DOUBLING_BYTES = 2**19

Message: TypeAlias = tuple[int, int]  # the other rank, and the bytes; 0 for no message


class CallComm(Comm):
    """Counts what a rank receives, and passes on each call with the bytes of its pieces.

    A subclass says what becomes of the calls.
    """

    def __init__(self, rank: int, nodes: tuple[int, ...]) -> None:
        super().__init__(rank, len(nodes), 1)
        self.nodes = nodes
        self.received_shared = 0

    @abstractmethod
    def exchange(self, group: Group, sent: Sequence[int], received: Sequence[int]) -> None:
        """Exchange pieces with all other members at once."""

    @abstractmethod
    def gather(self, group: Group, sizes: Sequence[int]) -> None:
        """Get the pieces of all members."""

    @abstractmethod
    def scatter_sums(self, group: Group, sizes: Sequence[int]) -> None:
        """Sum up what all members have, so that each gets its piece of the sum."""

    @abstractmethod
    def send_round(self, received: Message | None, sent: Message | None, ring: Group = ()) -> None:
        """Receive a message and send one at the same time, as all members of a group do.

        In a ring, each member sends to the next one.
        """

    @abstractmethod
    def barrier_among(self, group: Group) -> None:
        """Wait until all members of a group, which are on one node, have come here."""

    @abstractmethod
    def copy_shared(self, nbytes: int) -> None:
        """Copy bytes from memory that ranks share."""

    def read_shared(self, nbytes: int, copied: int) -> None:
        """Note bytes of other ranks in shared memory, and how many of them the rank copies."""
        count_shared(self, nbytes)
        if copied:
            self.copy_shared(copied)

    def alltoallv(
        self,
        group: Group,
        send: Array,
        send_counts: Counts,
        receive: Array,
        receive_counts: Counts,
    ) -> None:
        super().alltoallv(group, send, send_counts, receive, receive_counts)
        itemsize = send.dtype.itemsize
        self.exchange(group, _sizes(send_counts, itemsize), _sizes(receive_counts, itemsize))

    def allgatherv(self, group: Group, buffer: Array, counts: Counts) -> None:
        super().allgatherv(group, buffer, counts)
        self.gather(group, _sizes(counts, buffer.dtype.itemsize))

    def reduce_scatter(self, group: Group, send: Array, counts: Counts, receive: Array) -> bool:
        if not super().reduce_scatter(group, send, counts, receive):
            return False
        self.scatter_sums(group, _sizes(counts, send.dtype.itemsize))
        return True

    def sendrecv(
        self, to: int | None, send: Array | None, source: int | None, receive: Array | None
    ) -> None:
        super().sendrecv(to, send, source, receive)
        received = sent = None
        if source is not None and receive is not None:
            received = source, receive.nbytes
        if to is not None and send is not None:
            sent = to, send.nbytes
        self.send_round(received, sent)


def _sizes(counts: Counts, itemsize: int) -> list[int]:
    return [int(count) * itemsize for count in counts]


class MessageRounds(CallComm):
    """Takes every call apart into its messages.

    A subclass says what becomes of them: lines of a trace, or seconds.
    """

    @abstractmethod
    def send_together(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        """Receive and send messages that are all on their way at the same time."""

    def barrier_rounds(self, group: Group) -> list[tuple[int, int]]:
        """Return for each round of a barrier the ranks that signal this one and that it signals."""
        place = group.index(self.rank)
        found = []
        for distance in barrier_distances(len(group)):
            found.append((group[place - distance], group[(place + distance) % len(group)]))
        return found

    def exchange(self, group: Group, sent: Sequence[int], received: Sequence[int]) -> None:
        """Post all receives, then all sends, each rank beginning with another one."""
        place = group.index(self.rank)
        receives = []
        sends = []
        for step in range(1, len(group)):
            source = place - step
            receives.append((group[source], received[source]))
            target = (place + step) % len(group)
            sends.append((group[target], sent[target]))
        self.send_together(receives, sends)

    def gather(self, group: Group, sizes: Sequence[int]) -> None:
        place = group.index(self.rank)
        if is_gathered_directly(group, sum(sizes)):
            self.exchange(group, [sizes[place]] * len(group), sizes)
            return
        rounds = rounds_of_gather(place, sizes)
        self._send_rounds(group, rounds, group if goes_around_ring(sizes) else ())

    def scatter_sums(self, group: Group, sizes: Sequence[int]) -> None:
        self._send_rounds(group, rounds_of_sums(group.index(self.rank), sizes))

    def _send_rounds(self, group: Group, rounds: Iterator[Round], ring: Group = ()) -> None:
        for each in rounds:
            received = group[each.source], int(each.received)
            self.send_round(received, (group[each.target], int(each.sent)), ring)


# ---- rounds --------------------------------------------------------------------------------------
#
# The places in a group are numbers, or arrays of numpy for many ranks at once; then the sizes are
# an array, too.


Places: TypeAlias = Any


class Round(NamedTuple):
    """The places of a rank's partners in its group, and the bytes."""

    source: Places
    received: Any
    target: Places
    sent: Any


def rounds_of_gather(place: Places, sizes: Any) -> Iterator[Round]:
    """Yield the rounds of a gather that is left to MPI."""
    root = broadcasting_member(sizes)
    if root is not None:
        return _along_tree(place, sizes, root)
    if is_doubling(sizes):
        return _by_halves(place, sizes, is_gather=True)
    return _around_ring(place, sizes)


def is_doubling(sizes: Any) -> bool:
    """Return whether a gather that is left to MPI goes in steps that double."""
    return len(sizes) > 2 and is_power_of_two(len(sizes)) and sum(sizes) < DOUBLING_BYTES


def goes_around_ring(sizes: Any) -> bool:
    """Return whether each rank only sends to the next one in a gather that is left to MPI."""
    return broadcasting_member(sizes) is None and not is_doubling(sizes)


def rounds_of_sums(place: Places, sizes: Any) -> Iterator[Round]:
    """Yield the rounds of sums that are left to MPI."""
    if is_power_of_two(len(sizes)):
        return _by_halves(place, sizes, is_gather=False)
    return _pair_by_pair(place, sizes)


def _along_tree(place: Places, sizes: Any, root: int) -> Iterator[Round]:
    """Each rank that has the only piece passes it on, first to the farthest half of the others."""
    size = len(sizes)
    behind = (place - root) % size
    for distance in reversed(barrier_distances(size)):
        sends = (behind % (2 * distance) == 0) & (behind + distance < size)
        receives = behind % (2 * distance) == distance
        source, target = (place - distance) % size, (place + distance) % size
        yield Round(source, sizes[root] * receives, target, sizes[root] * sends)


def _around_ring(place: Places, sizes: Any) -> Iterator[Round]:
    """Each rank passes on the piece that came last."""
    size = len(sizes)
    for step in range(size - 1):
        received = sizes[(place - step - 1) % size]
        yield Round((place - 1) % size, received, (place + 1) % size, sizes[(place - step) % size])


def _by_halves(place: Places, sizes: Any, is_gather: bool) -> Iterator[Round]:
    """Exchange pieces with ranks whose distance doubles, or halves where sums are scattered.

    In each round of a gather, two ranks exchange all that they have; in one of a sum, each gets the
    half that it needs.
    """
    bytes_before = np.concatenate([[0], np.cumsum(sizes)])
    distances = [2**number for number in range(len(sizes).bit_length() - 1)]
    for distance in distances if is_gather else reversed(distances):
        other = place ^ distance
        first = place // distance * distance
        others_first = other // distance * distance
        own = bytes_before[first + distance] - bytes_before[first]
        others = bytes_before[others_first + distance] - bytes_before[others_first]
        received, sent = (others, own) if is_gather else (own, others)
        yield Round(other, received, other, sent)


def _pair_by_pair(place: Places, sizes: Any) -> Iterator[Round]:
    size = len(sizes)
    for step in range(1, size):
        target = (place + step) % size
        yield Round((place - step) % size, sizes[place], target, sizes[target])


def barrier_distances(size: int) -> list[int]:
    """Return for each round of a barrier how far the rank is that each member signals."""
    return [2**number for number in range((size - 1).bit_length())]


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


# ---- dry run -----------------------------------------------------------------------------------


def dry_run(
    schedule: Schedule, slots: SharedSlots, comm: CallComm, on_step: Callable[[Step], None]
) -> None:
    """Carry out the steps of a schedule, of which some slots lie in shared memory.

    `on_step` is called before each step.
    """
    backend = ShapeBackend()
    backend.shared = _SharedNotes(slots)
    for group in slots.groups:
        comm.barrier_among(group)  # nobody may still read what the last run has left
    Program(schedule, backend, comm).run(_NoInputs(), on_step=on_step)


class _SharedNotes(SharedArrays):
    """The transfers in shared memory of a dry run: barriers, and what a rank copies."""

    def __init__(self, slots: SharedSlots) -> None:
        super().__init__()
        for step in slots.steps:
            self.transfers[step.number] = _note_transfer


def _note_transfer(step: Transfer, buffers: Buffers, comm: Comm) -> None:
    assert isinstance(comm, CallComm)
    for slot in step.writes:
        buffers.make(slot)
    comm.barrier_among(step.group)
    # What is gathered is read where it is.
    comm.read_shared(step.nbytes, 0 if step.moves.same_to_all else step.nbytes)


class _NoInputs:
    """Inputs without values; reading them takes no time."""

    array_type: type[Any] = np.ndarray

    def begin(self, step: Load, make: Any, comm: Comm, outside: bool) -> None:
        pass

    def fill(self, step: Load, target: Array, comm: Comm) -> None:
        pass

    def block(self, step: Load, comm: Comm) -> Array:
        return np.broadcast_to(np.zeros((), step.slot.dtype), step.slot.shape)

    def close(self) -> None:
        pass

    def takes_messages(self, step: Load) -> bool:
        return False


def agreed_slots(
    schedules: Sequence[Schedule], nodes: tuple[int, ...], shared: bool
) -> list[SharedSlots]:
    """Return what ranks of a node share, as they would agree on it; nothing unless `shared`.

    Other ranks of the node agree with them.
    """
    if not shared:
        return [SharedSlots()] * len(schedules)
    choices = [choose_shared_slots(schedule, nodes) for schedule in schedules]
    place_of = {schedule.rank: place for place, schedule in enumerate(schedules)}
    chosen = [SharedSlots()] * len(schedules)
    questions: dict[int, tuple[tuple[int, ...], bool]] = {}

    def ask(place: int, answer: bool | None) -> None:
        try:
            questions[place] = choices[place].send(answer)
        except StopIteration as end:
            questions.pop(place, None)
            chosen[place] = end.value

    for place in range(len(schedules)):
        ask(place, None)
    while questions:
        members = _group_that_is_asked(questions, place_of)
        answer = all(questions[place][1] for place in members)
        for place in members:
            ask(place, answer)
    return chosen


def _group_that_is_asked(
    questions: Mapping[int, tuple[tuple[int, ...], bool]], place_of: Mapping[int, int]
) -> list[int]:
    """Return the places of a group whose members are all at the same question."""
    for group, _ in questions.values():
        members = [place_of[rank] for rank in group if rank in place_of]
        if all(place in questions and questions[place][0] == group for place in members):
            return members
    raise AssertionError("the groups of a node wait for each other")


# ---- trace comm ----------------------------------------------------------------------------------
#
# One rank of a dry run that notes its messages: the lines of a trace that SimGrid replays.


BYTES_OF_A_SIGNAL = 1  # of a barrier


class Tag(IntEnum):
    """What a message of a trace is."""

    PAYLOAD = 0  # elements that one rank passes to another
    SIGNAL = 1  # a round of a barrier, which is not counted
    COPY = 2  # a rank copies from memory that it shares: a message to itself, which is not counted


BYTE = 6  # the number of MPI_BYTE in a trace
_PAYLOAD = int(Tag.PAYLOAD)  # quicker to write than a member of an Enum


class TraceComm(MessageRounds):
    """Writes down the messages of a rank."""

    def __init__(self, rank: int, nodes: tuple[int, ...]) -> None:
        super().__init__(rank, nodes)
        self.lines: list[str] = []
        self.messages = 0  # that it sends, with elements
        self.steps: list[tuple[int, Step]] = []  # with the number of lines before each of them

    def add(self, action: str) -> None:
        """Add an action to the trace."""
        self.lines.append(f"{self.rank} {action}")

    def send_together(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        """Post the messages to other nodes; exchange those inside the node meanwhile.

        A rank copies what goes to its node, one message after the other. SimGrid would not let
        these messages wait for each other.
        """
        here = self.nodes[self.rank]
        for source, nbytes in receives:
            if self.nodes[source] != here:
                for part in parts_of(nbytes):
                    self._receive(source, part)
        for to, nbytes in sends:
            if self.nodes[to] != here:
                for part in parts_of(nbytes):
                    self._send(to, part)
        for received, sent in self._rounds_inside(dict(receives), dict(sends)):
            for arriving, leaving in _parts_of_round(received, sent):
                self._post(arriving, leaving)
                if arriving is not None:
                    self.add(f"wait {arriving[0]} {self.rank} {_PAYLOAD}")
                if leaving is not None:
                    self.add(f"wait {self.rank} {leaving[0]} {_PAYLOAD}")
        self._wait()

    def _rounds_inside(
        self, receives: Mapping[int, int], sends: Mapping[int, int]
    ) -> list[tuple[Message, Message]]:
        """Return the messages inside the node in rounds, which are the same on all its ranks."""
        here = self.nodes[self.rank]
        members = sorted({self.rank, *(other for other in sends if self.nodes[other] == here)})
        place = members.index(self.rank)
        found = []
        for step in range(1, len(members)):
            source = members[place - step]
            to = members[(place + step) % len(members)]
            found.append(((source, receives[source]), (to, sends[to])))
        return found

    def send_round(self, received: Message | None, sent: Message | None, ring: Group = ()) -> None:
        for arriving, leaving in _parts_of_round(received, sent):
            self._post(arriving, leaving)
            self._wait()

    def barrier_among(self, group: Group) -> None:
        for source, target in self.barrier_rounds(group):
            self.add(f"irecv {source} {Tag.SIGNAL:d} {BYTES_OF_A_SIGNAL} {BYTE}")
            self.add(f"isend {target} {Tag.SIGNAL:d} {BYTES_OF_A_SIGNAL} {BYTE}")
            self.add("waitall")

    def copy_shared(self, nbytes: int) -> None:
        self.add(f"irecv {self.rank} {Tag.COPY:d} {nbytes} {BYTE}")
        self.add(f"isend {self.rank} {Tag.COPY:d} {nbytes} {BYTE}")
        self.add("waitall")

    def _post(self, arriving: Message | None, leaving: Message | None) -> None:
        if arriving is not None:
            self._receive(*arriving)
        if leaving is not None:
            self._send(*leaving)

    def _receive(self, source: int, nbytes: int) -> None:
        self.add(f"irecv {source} {_PAYLOAD} {nbytes} {BYTE}")

    def _send(self, to: int, nbytes: int) -> None:
        self.add(f"isend {to} {_PAYLOAD} {nbytes} {BYTE}")
        self.messages += 1

    def _wait(self) -> None:
        if self.lines and not self.lines[-1].endswith("waitall"):
            self.add("waitall")


def _parts_of_round(
    received: Message | None, sent: Message | None
) -> list[tuple[Message | None, Message | None]]:
    """Return the messages of a round in parts that MPI can count."""
    arriving = [] if received is None else [(received[0], part) for part in parts_of(received[1])]
    leaving = [] if sent is None else [(sent[0], part) for part in parts_of(sent[1])]
    return list(zip_longest(arriving, leaving))


def parts_of(nbytes: int) -> list[int]:
    """Return the sizes of the messages in which MPI can count so many bytes."""
    sizes = [MOST_BYTES] * (nbytes // MOST_BYTES)
    if nbytes % MOST_BYTES:
        sizes.append(nbytes % MOST_BYTES)
    return sizes
