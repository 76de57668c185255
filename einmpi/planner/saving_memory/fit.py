"""Which inputs can stay loaded between calls within a memory limit."""

from __future__ import annotations

from collections.abc import Sequence

from einmpi.planner.plan import Options, Plan
from einmpi.planner.plan_data import cuts_of
from einmpi.planner.saving_memory.cut_memory import CutMemory

MOST_TRIALS = 100  # sets of inputs whose memory is computed


def inputs_that_fit(plan: Plan, options: Options, names: Sequence[str]) -> tuple[str, ...]:
    """Return the inputs that can stay loaded if they are cut as a plan without them cuts them.

    They are tried in the order of their first use: what is used later can be read while earlier
    vertices are computed. An input that does not fit is passed over.
    """
    assert options.memory is not None
    limit = options.memory
    graph = plan.graph
    cut = cuts_of(plan)
    kept: list[str] = []
    waiting = [sorted(names, key=lambda name: graph.position[graph.consumers[name][0]])]
    for _ in range(MOST_TRIALS):
        if not waiting:
            break
        tried = waiting.pop()
        resident = (*plan.resident, *kept, *tried)
        if CutMemory(graph, plan.mesh, options, resident).peak(cut) <= limit:
            kept += tried
        elif len(tried) > 1:
            half = len(tried) // 2
            waiting += [tried[half:], tried[:half]]  # the first half is tried next
    return tuple(kept)
