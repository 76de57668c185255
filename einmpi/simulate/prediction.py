"""How long a plan takes on a measured machine: a dry run, with times of messages and kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from einmpi.comm.base import spread_over_nodes
from einmpi.planner.machine import Machine
from einmpi.planner.moving.traffic import Bill
from einmpi.planner.plan import Plan
from einmpi.planner.prices import ATTOSECONDS_OF_A_PICOSECOND, Prices
from einmpi.runtime.sharing.slots import SharedSlots
from einmpi.schedule.lower import lower
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Reduce, Step
from einmpi.simulate.dry_run import dry_run
from einmpi.simulate.rank_traces import agreed_slots
from einmpi.simulate.timed_comm import Duration, TimedComm

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
    slots = agreed_slots([schedule], nodes)[0] if machine.shared else SharedSlots()
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
        if isinstance(last_step, Reduce) and last_step.vertex in times:
            pay(last_step.vertex)

    def on_step(step: Step) -> None:
        nonlocal last_step, vertex
        end_step()
        last_step = step
        for kernel in step.kernels:
            if kernel.tensor in operations:
                operations[kernel.tensor] += kernel.einsum.operations()
        if step.kernels and step.vertex in times:
            vertex = step.vertex
            pay(vertex)

    dry_run(schedule, slots, comm, on_step)
    end_step()
    if vertex:
        pay(vertex)
    return _RankTimes(times, operations, comm.received)
