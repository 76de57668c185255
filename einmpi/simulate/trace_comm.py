"""One rank of a dry run that notes its messages: the lines of a trace that SimGrid replays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import zip_longest

from einmpi.comm.base import Group
from einmpi.comm.mpi import MOST_BYTES
from einmpi.schedule.steps import Step
from einmpi.simulate.message_rounds import Message, MessageRounds

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
        self.operations = 0
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
