"""Calls of a compiled job whose inputs look like those of an earlier call: their plan is known."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from einmpi.comm.agreement import KNOWN, all_say
from einmpi.comm.base import Comm
from einmpi.comm.programs import abort_on_divergence
from einmpi.comm.same_arrays import is_checking
from einmpi.compiled.calls.prepared_runs import PreparedRun
from einmpi.compiled.given_inputs import kind_of, outline_of
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
    ask: Callable[[], list[str] | None]  # whether all ranks do the same: None if they do
    may_fail: bool  # on one rank alone, because of the values of inputs
    prepared: PreparedRun | None = None
    may_be_prepared: bool = True


class KnownCalls:
    """The calls of a compiled job so far, by what their inputs look like."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.calls: dict[Hashable, KnownCall] = {}
        self.is_asking = False  # the same on all ranks

    def find(self, inputs: Mapping[str, Any]) -> KnownCall | None:
        """Return the earlier call with inputs that look like these, if all ranks know it.

        Ranks ask each other once, with one small message. If they do not all know the same call,
        they check and compare everything.
        """
        known = self.find_own(inputs)
        if self.comm.size == 1:
            return known
        if not self.is_asking:
            return None
        return known if all_know(self.comm, known) else None

    def find_own(self, inputs: Mapping[str, Any]) -> KnownCall | None:
        """Return the earlier call that this rank knows. Nothing is sent."""
        outline = None
        if type(inputs) is dict or isinstance(inputs, Mapping):  # the usual type is known faster
            outline = outline_of(inputs, self.comm)
        return None if outline is None else self.calls.get(outline)

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
            text = f"{KNOWN}call {fingerprint()} {kinds}"
        may_fail = reads_files or _may_fail(plan.graph)
        ask = self.comm.prepare_compare(text)
        self.calls[outline] = KnownCall(plan, schedule, ask, may_fail)


def all_know(comm: Comm, known: KnownCall | None) -> bool:
    """Return whether all ranks know the same call. They all ask each other, with one message.

    With EINMPI_CHECK=1 none of them knows a call: values of inputs are compared in all calls.
    """
    with abort_on_divergence(comm):
        if known is not None and not is_checking():
            return all_say(comm, known.ask)
        all_say(comm, comm.prepare_compare(f"{KNOWN}call of nobody"))
    return False


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
