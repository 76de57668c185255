"""Calls of a compiled job that look like earlier ones: what is known of them, what is bound for
them, and inputs that a caller gives away."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.dist_array import DistArray
from einmpi.comm.agreement import KNOWN, abort_on_divergence, all_say, is_checking
from einmpi.comm.base import Comm
from einmpi.compiled.given_inputs import is_array, kind_of, outline_of
from einmpi.compiled.inputs import PrepareTaking, TakeBlock, resident_key
from einmpi.compiled.planning import Residents
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.scalar import Arg
from einmpi.job.job import Job
from einmpi.kernels.cuda.driver import is_device_array
from einmpi.kernels.fixed_lists import is_within
from einmpi.planner.plan import Plan
from einmpi.runtime.actions import InputSource, RankFailure
from einmpi.runtime.host_memory import aligned_empty
from einmpi.runtime.program import Program
from einmpi.schedule.layout import Layout
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Load, numbered

# ---- prepared runs -------------------------------------------------------------------------------
#
# Runs of a known call with all that is the same in every call worked out ahead: how blocks are
# taken from inputs, what is bound to the steps of the schedule, and the layouts of outputs.


Array: TypeAlias = npt.NDArray[Any]
TakeSources: TypeAlias = Callable[[], InputSource]


class PreparedRun:
    """The runs of a schedule on given arrays and DistArrays that look alike.

    Other inputs stay loaded: their blocks are the same in every run.
    """

    def __init__(
        self,
        program: Program,
        take_blocks: Mapping[str, tuple[str, TakeBlock]],
        overwritten: Sequence[Load],
        resident_blocks: Mapping[str, Array],
        times_forgotten: int,
        layouts: Mapping[str, Layout],
    ) -> None:
        self.program = program
        self.resident_blocks = resident_blocks  # by the name of the slot
        self.times_forgotten = times_forgotten  # what stays loaded, until it was prepared
        self.overwritten = overwritten  # inputs that are written over
        self.layouts = layouts  # of the outputs
        self.take_blocks = []
        for slot, (tensor, take) in take_blocks.items():
            self.take_blocks.append((slot, tensor, take))

    def is_up_to_date(self, times_forgotten: int) -> bool:
        """Return whether the inputs that stay loaded have not been given up since."""
        return not self.resident_blocks or times_forgotten == self.times_forgotten

    def output_blocks(
        self, inputs: Mapping[str, Any], take_sources: TakeSources, failure: RankFailure | None
    ) -> dict[str, Array] | None:
        """Return this rank's blocks of the outputs; None if another thread runs the schedule.

        `take_sources` returns the inputs, with those that were given away taken from the caller.
        It is called if a run writes over some of them.
        """

        def take_all() -> dict[str, Array]:
            blocks = dict(self.resident_blocks)
            for slot, tensor, take in self.take_blocks:
                blocks[slot] = take(inputs[tensor])
            if self.overwritten:
                sources = take_sources()
                for step in self.overwritten:
                    blocks[step.slot.name] = sources.block(step, self.program.comm)
            return blocks

        return self.program.run_on_blocks(take_all, failure)


def prepare_run(
    program: Program,
    schedule: Schedule,
    job: Job,
    inputs: Mapping[str, Any],
    residents: Residents,
    layouts: Mapping[str, Layout],
    prepare_taking: PrepareTaking,
) -> PreparedRun | None:
    """Prepare runs on inputs that look like these; return None if that is not possible.

    `residents` are the inputs that stay loaded, and `layouts` those of the outputs.

    The schedule has been bound before. It takes all its other inputs from arrays and DistArrays.
    Those that it changes are DistArrays, which a caller may give away.
    """
    take_blocks: dict[str, tuple[str, TakeBlock]] = {}
    overwritten = []
    resident_blocks: dict[str, Array] = {}
    blocks = {}
    for _, step in numbered(schedule.steps, Load):
        given = inputs.get(step.tensor)
        is_given = step.tensor in inputs and step.numbers is None
        if not is_given and step.kept and not step.overwritten:
            key = resident_key(job, step)
            block = residents.blocks.get(key, program.backend.resident.get(key))
            if block is None:
                return None
            resident_blocks[step.slot.name] = block
            blocks[step.slot.name] = block
            continue
        if step.kept and step.overwritten and isinstance(given, DistArray):
            overwritten.append(step)
            blocks[step.slot.name] = aligned_empty(step.slot.shape, step.slot.dtype)
            continue
        take = None
        is_gone = isinstance(given, DistArray) and given._is_given_away
        if step.kept and not step.overwritten and not is_gone:
            take = prepare_taking(step, given)
        if take is None:
            return None
        take_blocks[step.slot.name] = step.tensor, take
        blocks[step.slot.name] = take(given)
    if not program.accepts(blocks):
        return None
    times = residents.times_forgotten
    return PreparedRun(program, take_blocks, overwritten, resident_blocks, times, layouts)


# ---- known calls ---------------------------------------------------------------------------------
#
# Calls of a compiled job whose inputs look like those of an earlier call: their plan is known.


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
        return self.agreed(self.find_own(inputs))

    def agreed(self, known: KnownCall | None) -> KnownCall | None:
        """Return an earlier call that this rank knows, if all ranks know it. All of them ask."""
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
            self.calls = {}  # not cleared: another thread may be about to write to it
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
        aggregation = None if einsum.aggregation is None else AGGREGATIONS[einsum.aggregation]
        may_be_undefined = aggregation is not None and aggregation.empty is None
        is_special = einsum.scan or einsum.pick or einsum.matrix
        if may_be_undefined or is_special or not _are_indices_known(graph, vertex):
            return True
    return False


def _are_indices_known(graph: EinGraph, vertex: Vertex) -> bool:
    """Return whether the indices of all gathers are known, and in range; and those of scatters."""
    segments = vertex.computed_einsum.segments
    for index in segments.indices if segments else ():
        if not isinstance(index, Arg) or graph[vertex.inputs[index.position]].known is None:
            return False
    for name, entries in zip(vertex.inputs, vertex.computed_einsum.operands, strict=True):
        for entry, extent in zip(entries, graph[name].bound, strict=True):
            if isinstance(entry, Arg):
                known = graph[vertex.inputs[entry.position]].known
                if known is None or not is_within(known.values, extent):
                    return False
            elif not isinstance(entry, str):
                return False
    return True


def take_donated(
    names: Collection[str], inputs: Mapping[str, Any], given: dict[str, Any]
) -> set[str]:
    """Take the DistArrays among these inputs from the caller; return which can be written over.

    `inputs` are those of the caller, `given` the same as they are used.
    """
    overwritable = _overwritable(names, given)
    donated: dict[int, DistArray] = {}  # by identity
    for name in names:
        array = inputs.get(name)
        if isinstance(array, DistArray):
            donated[id(array)] = array
    for name, used in given.items():
        if id(used) in donated or (isinstance(used, DistArray) and used.is_view):
            given[name] = DistArray(used.local, used.layout, used.own_comm)
    for array in donated.values():
        array._give_away()
    return overwritable


def _overwritable(names: Collection[str], given: Mapping[str, Any]) -> set[str]:
    """Return which of these inputs can be written over, as they are given.

    These are DistArrays that share no memory with another input. Arrays and datasets stay as they
    are, and so does what a view is a view of.
    """
    on_devices: Counter[int] = Counter()  # the addresses of all arrays that GPUs have
    # Arrays of the host by what owns their memory: others do not overlap with them.
    on_host: dict[int, list[tuple[str, Any]]] = {}
    borrowed: list[tuple[str, Any]] = []  # arrays whose memory numpy does not own
    for name, array in given.items():
        block: Any = array.local if isinstance(array, DistArray) else array
        if is_device_array(block):
            on_devices[block.data.mem.ptr] += 1
        elif is_array(block):
            owner = _owner(block)
            if type(owner) is np.ndarray:
                on_host.setdefault(id(owner), []).append((name, block))
            else:
                borrowed.append((name, block))
    found = set()
    for name in names:
        array = given.get(name)
        if not isinstance(array, DistArray) or array.is_view:
            continue
        own: Any = array.local
        if is_device_array(own):
            is_shared = on_devices[own.data.mem.ptr] > 1
        else:
            others = on_host.get(id(_owner(own)), []) + borrowed
            if type(_owner(own)) is not np.ndarray:
                others = [*itertools.chain(*on_host.values()), *borrowed]
            is_shared = False
            for other_name, block in others:
                if other_name != name and np.may_share_memory(own, block):
                    is_shared = True
        if not is_shared:
            found.add(name)
    return found


def _owner(array: Any) -> Any:
    """Return the array, or other object, whose memory an array uses."""
    while type(array) is np.ndarray and array.base is not None:
        array = array.base
    return array
