"""How long a plan takes on a measured machine: a dry run, with times of messages and kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from einmpi.comm.base import Group, spread_over_nodes
from einmpi.planner.machine import ATTOSECONDS_OF_A_PICOSECOND, Machine, Prices
from einmpi.planner.moving.volume import Bill
from einmpi.planner.plan import Plan
from einmpi.runtime.sharing.slots import SharedSlots
from einmpi.schedule.lower import lower
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Step
from einmpi.simulate.dry_run import Message, MessageRounds, agreed_slots, dry_run

# ---- timed comm ----------------------------------------------------------------------------------
#
# One rank of a dry run that adds up how long its messages take on a measured machine.


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


FIRST_RANK = 0  # it has the largest blocks, and the last rank the smallest ones


@dataclass
class _MovingTime:
    """How long one rank takes for what moves for a vertex."""

    inside: Duration = field(default_factory=Duration)
    between: Duration = field(default_factory=Duration)


@dataclass
class _RankTimes:
    """What one rank does for each vertex, and the bytes that it receives for all of them."""

    moving: dict[str, _MovingTime]
    operations: dict[str, int]
    received: int


def with_predicted_times(plan: Plan, machine: Machine) -> Plan:
    """Return the plan with bills that say how long a run takes on a machine.

    The messages are those that the first rank sends in a run, in shared memory and in rounds as
    there. Where shares are uneven, the last rank is looked at too. Ranks that have less to do wait
    for the others: a vertex is computed when the first rank has computed it, and the larger latency
    counts. But they leave the links to the others meanwhile: so the times of bytes are scaled to
    those of an average rank.
    """
    ranks = plan.mesh.ranks
    first = _times_on_rank(plan, machine, FIRST_RANK)
    samples = [first]
    if first.received * ranks != plan.bytes_predicted:
        samples.append(_times_on_rank(plan, machine, ranks - 1))
    received = sum(sample.received for sample in samples)

    def of_all_ranks(durations: Sequence[Duration]) -> int:
        latency = ranks * max(duration.latency for duration in durations)
        transfer = sum(duration.transfer for duration in durations)
        if received:
            transfer = transfer * plan.bytes_predicted // received
        return latency + transfer

    prices = Prices.of(machine)
    found = {}
    for name, bill in plan.bills.items():
        attoseconds = first.operations[name] * prices.operation(plan.graph[name])
        found[name] = replace(
            bill,
            computing=ranks * attoseconds // ATTOSECONDS_OF_A_PICOSECOND,
            moving_inside=of_all_ranks([sample.moving[name].inside for sample in samples]),
            moving_between=of_all_ranks([sample.moving[name].between for sample in samples]),
        )
    return replace(plan, bills=found)


def _times_on_rank(plan: Plan, machine: Machine, rank: int) -> _RankTimes:
    """Return what one rank does, from a dry run of its schedule."""
    nodes = spread_over_nodes(plan.ranks, plan.nodes)
    schedule = lower(plan, rank)
    (slots,) = agreed_slots([schedule], nodes, machine.shared)
    return _times_of_vertices(schedule, slots, TimedComm(rank, nodes, machine), plan.bills)


def _times_of_vertices(
    schedule: Schedule, slots: SharedSlots, comm: TimedComm, bills: Mapping[str, Bill]
) -> _RankTimes:
    """Go through a schedule; return how long messages take for each vertex, and its operations.

    Partial results are paid by the vertex that made them; what moves otherwise, by the vertex that
    is computed next. What moves after the last vertex is paid by that one.
    """
    times = {name: _MovingTime() for name in bills}
    operations = dict.fromkeys(bills, 0)
    last_step: Step | None = None
    vertex = ""  # the last one that was computed

    def pay(name: str) -> None:
        """Let a vertex pay for all that has moved and is not paid for."""
        times[name].inside.add(comm.inside)
        times[name].between.add(comm.between)
        comm.inside = Duration()
        comm.between = Duration()

    def end_step() -> None:
        if last_step is not None and last_step.kind == "reduce" and last_step.vertex in times:
            pay(last_step.vertex)

    def on_step(step: Step) -> None:
        nonlocal last_step, vertex
        end_step()
        last_step = step
        for kernel, count in step.work:
            if kernel.tensor in operations:
                operations[kernel.tensor] += count * kernel.einsum.operations()
        if step.computes and step.vertex in times:
            vertex = step.vertex
            pay(vertex)

    dry_run(schedule, slots, comm, on_step)
    end_step()
    if vertex:
        pay(vertex)
    return _RankTimes(times, operations, comm.received)
