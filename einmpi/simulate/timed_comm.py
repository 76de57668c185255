"""One rank of a dry run that adds up how long its messages take on a measured machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from einmpi.comm.base import Group
from einmpi.planner.machine import Machine
from einmpi.simulate.message_rounds import Message, MessageRounds

# All ranks do the same at the same time, each with its own partners. So what one rank receives says
# how much the link of its node carries, and the links between its group of nodes and the others.
# On average, a rank sends as much as it receives.


@dataclass
class Duration:
    """Picoseconds that messages take: until the first byte arrives, and for all bytes."""

    latency: int = 0
    transfer: int = 0

    @property
    def total(self) -> int:
        return self.latency + self.transfer

    def add(self, other: Duration) -> None:
        """Add a time that follows this one."""
        self.latency += other.latency
        self.transfer += other.transfer


class TimedComm(MessageRounds):
    """Adds up times. Of messages on their way together, the slowest count."""

    def __init__(self, rank: int, nodes: tuple[int, ...], machine: Machine) -> None:
        super().__init__(rank, nodes)
        self.machine = machine
        self.node = nodes[rank]
        self.ranks_of_a_node = nodes.count(self.node)
        self.inside = Duration()  # of messages inside nodes
        self.between = Duration()
        # By the ring and the size of groups of nodes: ranks of a group that send to another one.
        self.senders_in_rings: dict[tuple[Group, int], int] = {}

    def send_together(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        arriving = [message for message in receives if message[1]]
        leaving = [message for message in sends if message[1]]
        inside = max(
            self._time_inside(arriving),
            self._time_inside(leaving),
            key=lambda duration: duration.total,
        )
        self._add(inside, self._time_between(arriving))

    def _time_inside(self, messages: Sequence[Message]) -> Duration:
        """Return the time of the messages inside the node, which a rank copies one by one."""
        found = Duration()
        for other, nbytes in messages:
            if self.nodes[other] == self.node:
                found.add(self._copy(nbytes))
        return found

    def _copy(self, nbytes: int) -> Duration:
        """Return the time of a message inside the node."""
        return Duration(1000 * self.machine.latency_inside, nbytes * self.machine.inside)

    def _time_between(self, messages: Sequence[Message]) -> Duration:
        """Return the time of the messages from other nodes."""
        away = [message for message in messages if self.nodes[message[0]] != self.node]
        if not away:
            return Duration()
        transfer = sum(nbytes for _, nbytes in away) * self.machine.between
        for groups in self.machine.groups:
            bytes_of_pairs: dict[int, int] = {}  # by the number of the other group
            for other, nbytes in away:
                number = self.nodes[other] // groups.nodes
                if number != self.node // groups.nodes:
                    bytes_of_pairs[number] = bytes_of_pairs.get(number, 0) + nbytes
            most = max(bytes_of_pairs.values(), default=0)
            ranks = groups.nodes * self.ranks_of_a_node
            transfer = max(transfer, most * ranks * groups.pair)
        return Duration(max(self._latency(other) for other, _ in away), transfer)

    def send_round(self, received: Message | None, sent: Message | None, ring: Group = ()) -> None:
        if received is None or not received[1]:
            return
        nbytes = received[1]
        partners = [received[0]] if sent is None else [received[0], sent[0]]
        between = inside = Duration()
        if any(self.nodes[rank] != self.node for rank in partners):
            if ring:
                senders = self._senders_in_ring(1, ring)
            else:
                senders = min(self.ranks_of_a_node, *self._distances(partners))
            transfer = nbytes * self.machine.between * senders // self.ranks_of_a_node
            for groups in self.machine.groups:
                number = self.node // groups.nodes
                if any(self.nodes[rank] // groups.nodes != number for rank in partners):
                    senders = self._senders_to_a_group(groups.nodes, partners, ring)
                    transfer = max(transfer, nbytes * senders * groups.pair)
            between = Duration(max(self._latency(rank) for rank in partners), transfer)
        if any(self.nodes[rank] == self.node for rank in partners):
            inside = self._copy(nbytes)
        self._add(inside, between)

    def _distances(self, partners: Sequence[int]) -> list[int]:
        return [abs(rank - self.rank) for rank in partners]

    def _senders_to_a_group(self, nodes: int, partners: Sequence[int], ring: Group) -> int:
        """Return how many ranks of a group of nodes send to the same other group in a round."""
        if ring:
            return self._senders_in_ring(nodes, ring)
        # Each rank sends to the one that comes so many later. Unless this is a whole number of
        # groups, two groups receive from one: the link to one of them carries more.
        ranks = nodes * self.ranks_of_a_node
        most = ranks
        for distance in self._distances(partners):
            beyond = distance % ranks
            most = min(most, distance if distance < ranks else max(beyond, ranks - beyond))
        return most

    def _senders_in_ring(self, nodes: int, ring: Group) -> int:
        """Return how many ranks of a group of nodes send to the next group."""
        key = ring, nodes
        if key not in self.senders_in_rings:
            numbers = [self.nodes[rank] // nodes for rank in ring]
            here = self.node // nodes
            members = numbers.count(here)
            ranks = nodes * self.ranks_of_a_node
            senders = 0
            for number, following in zip(numbers, [*numbers[1:], numbers[0]], strict=True):
                senders += number == here != following
            self.senders_in_rings[key] = senders * ranks // members
        return self.senders_in_rings[key]

    def barrier_among(self, group: Group) -> None:
        self.inside.latency += len(self.barrier_rounds(group)) * 1000 * self.machine.latency_inside

    def copy_shared(self, nbytes: int) -> None:
        self.inside.add(self._copy(nbytes))

    def _add(self, inside: Duration, between: Duration) -> None:
        """Add the longer of two times that pass together."""
        if inside.total > between.total:
            self.inside.add(inside)
        else:
            self.between.add(between)

    def _latency(self, other: int) -> int:
        """Return the latency of a message between this rank and another one."""
        if self.nodes[other] == self.node:
            return 1000 * self.machine.latency_inside
        latency = self.machine.latency_between
        for groups in self.machine.groups:
            if groups.latency and self.nodes[other] // groups.nodes != self.node // groups.nodes:
                latency = groups.latency
        return 1000 * latency
