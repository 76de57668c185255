"""Calls of a compiled job whose inputs look like those of an earlier call: their plan is known."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from einmpi.comm.agreement import all_say
from einmpi.comm.base import Comm
from einmpi.comm.programs import abort_on_divergence
from einmpi.comm.same_arrays import is_checking
from einmpi.compiled.given_inputs import outline_of
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.scalar import gathers_in
from einmpi.planner.plan import Plan
from einmpi.schedule.schedule import Schedule

MOST_KNOWN_CALLS = 256


@dataclass(frozen=True)
class KnownCall:
    """What was found in an earlier call, for inputs that look the same."""

    plan: Plan
    schedule: Schedule
    text: str  # the same on all ranks that took part in that call
    may_fail: bool  # on one rank alone, because of the values of inputs


class KnownCalls:
    """The calls of a compiled job so far, by what their inputs look like."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.calls: dict[Hashable, KnownCall] = {}
        self.calls_added = 0  # the same on all ranks

    def find(self, inputs: Mapping[str, Any]) -> KnownCall | None:
        """Return the earlier call with inputs that look like these, if all ranks know it.

        Ranks ask each other once, with one small message. If they do not all know the same call,
        they check and compare everything.
        """
        outline = None
        if type(inputs) is dict or isinstance(inputs, Mapping):  # the usual type is known faster
            outline = outline_of(inputs, self.comm)
        known = None if outline is None else self.calls.get(outline)
        if self.comm.size == 1:
            return known
        if not self.calls:  # on any rank
            return None
        with abort_on_divergence(self.comm):
            if is_checking():
                known = None
            all_know_it = all_say(self.comm, "" if known is None else known.text)
        return known if all_know_it else None

    def add(
        self,
        inputs: Mapping[str, Any],
        given: Mapping[str, Any],
        plan: Plan,
        schedule: Schedule,
        reads_files: bool,
    ) -> None:
        """Remember a call for inputs that look like these, if they are used as they are.

        `given` are the inputs as they are used. All ranks remember a call, so that all of them ask
        each other before the next one.
        """
        self.calls_added += 1
        outline = outline_of(inputs, self.comm)
        if outline is None or any(given[name] is not inputs[name] for name in given):
            if self.comm.size == 1:
                return
            outline = None, self.calls_added  # no inputs look like this
        if len(self.calls) >= MOST_KNOWN_CALLS:
            self.calls.clear()
        text = f"call {self.calls_added}"
        may_fail = reads_files or _may_fail(plan.graph)
        self.calls[outline] = KnownCall(plan, schedule, text, may_fail)


def _may_fail(graph: EinGraph) -> bool:
    """Return whether values of tensors could make a kernel fail."""
    for vertex in graph.computed:
        einsum = vertex.computed_einsum
        is_gathered = any(map(gathers_in, einsum.operands))
        aggregation = None if einsum.aggregation is None else AGGREGATIONS[einsum.aggregation]
        may_be_undefined = aggregation is not None and aggregation.empty is None
        is_special = einsum.segments or einsum.scan or einsum.pick
        if is_gathered or may_be_undefined or is_special:
            return True
    return False
