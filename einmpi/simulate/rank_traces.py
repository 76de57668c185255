"""The trace of each rank: a dry run of its schedule that notes messages and kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from einmpi.comm.base import spread_over_nodes
from einmpi.planner.plan import Plan
from einmpi.planner.prices import Prices
from einmpi.runtime.sharing.memory import choose_shared_slots
from einmpi.runtime.sharing.slots import SharedSlots
from einmpi.schedule.lower import lower
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Step
from einmpi.simulate.dry_run import dry_run
from einmpi.simulate.trace_comm import TraceComm
from einmpi.units import ATTOSECONDS


def rank_traces(plan: Plan, prices: Prices | None, shared: bool) -> Iterator[TraceComm]:
    """Yield what each rank has done in a dry run, with its trace, one rank after another.

    Kernels take the time that a measured machine needs, or are written as operations without one.
    `shared` says whether the ranks of a node share memory.
    """
    nodes = spread_over_nodes(plan.ranks, plan.nodes)
    kernel_times = _KernelTimes(plan, prices)
    first = 0
    while first < plan.ranks:
        # What the ranks of a node share depends on all of them.
        stop = first
        while stop < plan.ranks and nodes[stop] == nodes[first]:
            stop += 1
        schedules = [lower(plan, rank) for rank in range(first, stop)]
        slots_of_ranks = [SharedSlots()] * len(schedules)
        if shared:
            slots_of_ranks = agreed_slots(schedules, nodes)
        for schedule, slots in zip(schedules, slots_of_ranks, strict=True):
            yield _trace_of(schedule, slots, nodes, kernel_times)
        first = stop


def agreed_slots(schedules: Sequence[Schedule], nodes: tuple[int, ...]) -> list[SharedSlots]:
    """Return what ranks of a node that follow one another share, as they would agree on it.

    Other ranks of the node agree with them.
    """
    choices = [choose_shared_slots(schedule, nodes) for schedule in schedules]
    first = schedules[0].rank
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
        members = _group_that_is_asked(questions, range(first, first + len(schedules)))
        answer = all(questions[place][1] for place in members)
        for place in members:
            ask(place, answer)
    return chosen


def _group_that_is_asked(
    questions: Mapping[int, tuple[tuple[int, ...], bool]], ranks: range
) -> list[int]:
    """Return the places of a group whose members are all at the same question."""
    for group, _ in questions.values():
        members = [rank - ranks.start for rank in group if rank in ranks]
        if all(place in questions and questions[place][0] == group for place in members):
            return members
    raise AssertionError("the groups of a node wait for each other")


def _trace_of(
    schedule: Schedule, slots: SharedSlots, nodes: tuple[int, ...], kernel_times: _KernelTimes
) -> TraceComm:
    comm = TraceComm(schedule.rank, nodes)

    def on_step(step: Step) -> None:
        comm.steps.append((len(comm.lines), step))
        comm.operations += kernel_times.add(step, comm)

    comm.add("init")
    dry_run(schedule, slots, comm, on_step)
    comm.add("finalize")
    return comm


class _KernelTimes:
    """Writes kernels to a trace: in seconds of a measured machine, or in operations."""

    def __init__(self, plan: Plan, prices: Prices | None) -> None:
        self.plan = plan
        self.prices = prices
        self.times: dict[str, int] = {}  # attoseconds of an operation, by vertex

    def add(self, step: Step, comm: TraceComm) -> int:
        """Add the kernels of a step; return their operations."""
        operations = 0
        attoseconds = 0
        for kernel in step.kernels:
            count = kernel.einsum.operations()
            operations += count
            if self.prices is not None:
                attoseconds += count * self._time_of(kernel.tensor)
        if attoseconds:
            comm.add(f"sleep {attoseconds / ATTOSECONDS:.9g}")
        elif operations and self.prices is None:
            comm.add(f"compute {operations}")
        return operations

    def _time_of(self, name: str) -> int:
        assert self.prices is not None
        if name not in self.times:
            self.times[name] = self.prices.operation(self.plan.graph[name])
        return self.times[name]
