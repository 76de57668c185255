"""The traces of ranks, each by a dry run of its own schedule: an oracle for those of classes."""

from einmpi.comm.base import spread_over_nodes
from einmpi.schedule.lower import lower
from einmpi.simulate.classes import KernelTimes
from einmpi.simulate.dry_run import TraceComm, agreed_slots, dry_run


def rank_traces(plan, prices, shared):
    """What each rank has done, with its trace, its steps and its operations."""
    nodes = spread_over_nodes(plan.ranks, plan.nodes)
    kernel_times = KernelTimes(plan, prices)
    for node in sorted(set(nodes)):
        # What the ranks of a node share depends on all of them.
        ranks = [rank for rank in range(plan.ranks) if nodes[rank] == node]
        schedules = [lower(plan, rank) for rank in ranks]
        slots_of_ranks = agreed_slots(schedules, nodes, shared)
        for schedule, own_slots in zip(schedules, slots_of_ranks, strict=True):
            yield _trace_of(schedule, own_slots, nodes, kernel_times)


def _trace_of(schedule, slots, nodes, kernel_times):
    comm = TraceComm(schedule.rank, nodes)
    comm.operations = 0

    def on_step(step):
        comm.steps.append((len(comm.lines), step))
        comm.operations += kernel_times.add(step, comm)

    comm.add("init")
    dry_run(schedule, slots, comm, on_step)
    comm.add("finalize")
    return comm
