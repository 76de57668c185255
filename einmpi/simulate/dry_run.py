"""A dry run of a schedule: arrays have a shape only, and the communicator notes the messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from itertools import zip_longest
from typing import Any

import numpy as np

from einmpi.comm.base import Comm, Group
from einmpi.comm.mpi import MOST_BYTES
from einmpi.runtime.backend import Array, ShapeBackend, SharedArrays
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.program import Program
from einmpi.runtime.sharing.memory import choose_shared_slots
from einmpi.runtime.sharing.slots import SharedSlots
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Load, Step, Transfer
from einmpi.simulate.message_rounds import CallComm, Message, MessageRounds


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


# ---- shared slots --------------------------------------------------------------------------------


def agreed_slots(schedules: Sequence[Schedule], nodes: tuple[int, ...]) -> list[SharedSlots]:
    """Return what ranks of a node share, as they would agree on it.

    Other ranks of the node agree with them.
    """
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
