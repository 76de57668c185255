"""Calls of a compiled job whose inputs look like those of an earlier call: their plan is known."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from einmpi.comm.agreement import all_say
from einmpi.comm.base import Comm
from einmpi.comm.programs import abort_on_divergence
from einmpi.comm.same_arrays import is_checking
from einmpi.compiled.given_inputs import kind_of, outline_of
from einmpi.compiled.prepared_runs import PreparedRun
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.scalar import gathers_in
from einmpi.planner.plan import Plan
from einmpi.schedule.schedule import Schedule

MOST_KNOWN_CALLS = 256


@dataclass
class KnownCall:
    """What was found in an earlier call, for inputs that look the same."""

    plan: Plan
    schedule: Schedule
    text: str  # the same on all ranks that do the same
    ask: Callable[[], bool]  # whether all ranks say this text
    may_fail: bool  # on one rank alone, because of the values of inputs
    prepared: PreparedRun | None = None
    may_be_prepared: bool = True


class KnownCalls:
    """The calls of a compiled job so far, by what their inputs look like."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.calls: dict[Hashable, KnownCall] = {}
        self.is_asking = False  # the same on all ranks
        self.ask_unknown = comm.prepare_same("")

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
        if not self.is_asking:
            return None
        with abort_on_divergence(self.comm):
            if is_checking():
                known = None
            if known is None:
                all_say(self.comm, "", self.ask_unknown)
                return None
            all_know_it = all_say(self.comm, known.text, known.ask)
        return known if all_know_it else None

    def add(
        self,
        inputs: Mapping[str, Any],
        given: Mapping[str, Any],
        plan: Plan,
        schedule: Schedule,
        fingerprint: Callable[[], str],
        reads_files: bool,
    ) -> None:
        """Remember a call for inputs that look like these, if they are used as they are.

        `given` are the inputs as they are used. `fingerprint` returns a text that stands for the
        job and its plan: ranks that say the same, and how their inputs are given, do the same.
        All ranks ask each other before the next call.
        """
        self.is_asking = True
        outline = outline_of(inputs, self.comm)
        if outline is None or any(given[name] is not inputs[name] for name in given):
            return
        if len(self.calls) >= MOST_KNOWN_CALLS:
            self.calls.clear()
        text = "a process alone does not ask"
        if self.comm.size > 1:
            kinds = sorted((name, repr(kind_of(array))) for name, array in inputs.items())
            text = f"known call {fingerprint()} {kinds}"
        may_fail = reads_files or _may_fail(plan.graph)
        ask = self.comm.prepare_same(text)
        self.calls[outline] = KnownCall(plan, schedule, text, ask, may_fail)


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
