"""A job made ready to run on the ranks of a communicator: planned and lowered once, called again and again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from typing import Any

import numpy as np

from einmpi.comm.agreement import together
from einmpi.comm.base import Comm, even_nodes
from einmpi.compiled.backends import workplace_of
from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.inputs import Blocks, Inputs
from einmpi.errors import InputError, one_of
from einmpi.files.datasets import Dataset
from einmpi.files.hdf5 import find_given
from einmpi.files.load import find_planned
from einmpi.job.job import Job
from einmpi.kernels.cuda.driver import is_device_array
from einmpi.planner.make_plan import Options, Plan, make_plan
from einmpi.runtime.execute import Keeper, Storage, execute
from einmpi.runtime.gpu.copies import on_host
from einmpi.runtime.scratch import check_folder
from einmpi.schedule.layout import Layout, even_layout
from einmpi.schedule.lower import lower
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Load, Step
from einmpi.schedule.two_level import bytes_between
from einmpi.version import __version__

Kinds = tuple[
    tuple[str, str | Layout], ...
]  # how each input is given: "array", a dataset, or a DistArray's layout


@dataclass(frozen=True)
class Measured:
    """What one run of a rank took."""

    seconds: float  # without loading and without checkpoints
    seconds_loading: float
    received: int  # bytes
    peak: int  # bytes
    shuffled: int = 0  # bytes received while loading, beside what the plan moves
    between: int = 0  # bytes of those received that came from other nodes
    spilled: int = 0  # bytes written to the slow tier
    fetched: int = 0  # bytes copied from there


class Compiled:
    """A job made ready for the ranks of a communicator; `einmpi.compile` makes it.

    It plans when it is first called with inputs of a new kind: an array, a dataset, or a DistArray in some layout.
    """

    def __init__(self, job: Job, comm: Comm, options: Options) -> None:
        self.job, self.comm, self.options = job, comm, options
        self.work = workplace_of(job, comm)
        self.backend = self.work.backend
        self.ready: dict[Kinds, tuple[Plan, Schedule]] = {}
        self.known: dict[
            Hashable, tuple[Plan, Schedule]
        ] = {}  # the same by what arrays look like, on one rank
        self.files: dict[str, Dataset] = {}
        self.resident: Blocks = {}  # of inputs from files that stay between calls
        self.measured: Measured | None = None
        self.on_step: Callable[[Step], None] | None = None

    def __call__(self, inputs: Mapping[str, Any] | None = None) -> dict[str, DistArray]:
        """Compute the outputs, as DistArrays. All ranks call it, with inputs of the same kind."""
        given = dict(inputs or {})
        outline = _outline(given)
        known = self.known.get(outline)
        if known is not None:  # a GPU would wait for all that is done in `prepare`
            plan, schedule = known
        else:
            plan, schedule, used = self.prepare(given)
            if (
                outline is not None
                and self.comm.size == 1
                and all(used[name] is given[name] for name in given)
            ):
                self.known[outline] = plan, schedule
            given = used
        sources = Inputs(self.job, given, self.files, self.resident)
        outputs, self.measured = self.run(plan, schedule, sources, wait=False)
        return outputs

    def prepare(self, inputs: Mapping[str, Any]) -> tuple[Plan, Schedule, dict[str, Any]]:
        """The plan, this rank's schedule and the inputs as they are used: alike on all ranks, or an error on all."""
        given, kinds = together(
            self.comm, lambda: self.checked(inputs), lambda found: repr(found[1])
        )
        if _on_one_mesh(given):
            kinds = check_inputs(self.job, given)
        if kinds not in self.ready:
            plan = together(
                self.comm, lambda: self.plan(kinds), lambda plan: _fingerprint(self.job, plan)
            )
            if plan.spilled:
                together(self.comm, lambda: check_folder(self.job.scratch, self.job.source.name))
            schedule = lower(plan, self.comm.rank)
            if plan.bytes_between is None:
                own = bytes_between(schedule, self.comm.nodes)
                plan = replace(plan, counted=sum(map(int, self.comm.allgather_text(str(own)))))
            self.ready[kinds] = plan, self.backend.group_kernels(schedule)
        plan, schedule = self.ready[kinds]
        self.look({*given, *self.files})
        return plan, schedule, given

    def checked(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Kinds]:
        given = {name: as_array(name, array) for name, array in inputs.items()}
        if self.job.backend == "numpy":
            given = {name: on_host(array) for name, array in given.items()}
        kinds = check_inputs(self.job, given)
        for name, array in given.items():
            if isinstance(array, DistArray) and array.comm is not self.comm:
                raise InputError(
                    "inputs",
                    f"{name} lies on another communicator",
                    "DistArrays of the ranks of this run",
                )
        return given, kinds

    def look(self, known: Collection[str]) -> None:
        """Find the inputs in files that are not known yet. The ranks read together, so all have to find the same."""
        vertices = self.job.graph.by_name
        missing = [
            (spec, vertices[spec.name])
            for spec in self.job.inputs
            if spec.file and spec.name in vertices and spec.name not in known
        ]

        def find() -> dict[str, Dataset]:
            return {
                vertex.name: find_planned(spec, vertex.bound, vertex.dtype)
                for spec, vertex in missing
            }

        if missing:
            found = together(self.comm, find, _as_read)
            self.files |= found

    def plan(self, kinds: Kinds) -> Plan:
        # Where the nodes differ, the mesh has one level; the ranks count what goes between nodes by their schedules.
        count, uneven = max(self.comm.nodes) + 1, even_nodes(self.comm) is None
        options = replace(
            _with_inputs(self.options, kinds, self.job.backend), nodes=count, uneven=uneven
        )
        plan = make_plan(self.job.graph, self.comm.size, options)
        self.work.check_memory(self.job.source.name, plan.peak - plan.ahead)
        return plan

    def run(
        self,
        plan: Plan,
        schedule: Schedule,
        sources: Inputs,
        checkpoints: Keeper | None = None,
        wait: bool = True,
    ) -> tuple[dict[str, DistArray], Measured]:
        """Without `wait`, kernels on a GPU may go on after the return; what uses the outputs comes after them."""
        self.backend.reserve(plan.peak)
        before, start = (self.comm.received, self.comm.received_between), time.perf_counter()
        storage = _Timed(self.work.storage(sources))
        sources.shuffled = sources.shuffled_between = 0
        try:
            blocks, buffers = execute(
                schedule, self.backend, self.work.comm, storage, self.on_step, checkpoints
            )
            if wait:
                self.backend.wait()
        finally:
            sources.close()
        seconds = (
            time.perf_counter() - start - (checkpoints.seconds if checkpoints is not None else 0.0)
        )
        received = self.comm.received - before[0] - sources.shuffled
        between = self.comm.received_between - before[1] - sources.shuffled_between
        measured = Measured(
            seconds - storage.seconds,
            storage.seconds,
            received,
            buffers.peak,
            sources.shuffled,
            between,
            buffers.spilled,
            buffers.fetched,
        )
        return {
            name: self.output(plan, name, blocks.get(name)) for name in self.job.graph.outputs
        }, measured

    def output(self, plan: Plan, name: str, local: np.ndarray | None) -> DistArray:
        vertex = self.job.graph[name]
        layout = Layout(plan.mesh, vertex.bound, plan.layouts[name])
        if local is None:
            local = np.empty((0,) * (len(vertex.bound) or 1), vertex.dtype)
        return DistArray(local, layout, self.comm)


class _Timed:
    """A storage, and the seconds in which a run waits for it."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.seconds, self.begin = storage, 0.0, storage.begin

    def fill(self, step: Load, target: Any, comm: Comm) -> None:
        start = time.perf_counter()
        self.storage.fill(step, target, comm)
        self.seconds += time.perf_counter() - start

    def block(self, step: Load, comm: Comm) -> Any:
        start = time.perf_counter()
        found = self.storage.block(step, comm)
        self.seconds += time.perf_counter() - start
        return found


# ---- inputs ---------------------------------------------------------------------------------------------------------


def check_inputs(job: Job, given: Mapping[str, Any]) -> Kinds:
    """How each input is given; an error where one is missing, unknown, or not what the graph wants."""
    graph, specs = job.graph, {spec.name for spec in job.inputs}
    for name in given:
        if name not in specs and (name not in graph.by_name or not graph[name].is_input):
            raise InputError(
                "inputs", f"unknown input {name!r}", one_of(vertex.name for vertex in graph.inputs)
            )
    kinds: list[tuple[str, str | Layout]] = []
    for vertex in graph.inputs:
        if vertex.name not in given:
            if vertex.name not in specs:
                raise InputError("inputs", f"input {vertex.name} is not given", str(vertex))
            continue
        array = given[vertex.name]
        if tuple(array.shape) != vertex.bound or _name_of(array.dtype) != vertex.dtype:
            found = f"{_name_of(array.dtype)}[{', '.join(map(str, array.shape))}]"
            raise InputError("inputs", f"{vertex.name} is {found}", str(vertex))
        kinds.append((vertex.name, _kind(array)))
    return tuple(kinds)


@cache  # numpy puts a name together each time; a call that takes little on a GPU waits for it
def _name_of(dtype: Any) -> str:
    return str(np.dtype(dtype).name)


def is_array(given: Any) -> bool:
    return isinstance(given, np.ndarray) or is_device_array(given)


def _outline(given: Mapping[str, Any]) -> Hashable:
    """Of arrays all that checks and plans depend on; None where something else is given."""
    if not all(map(is_array, given.values())):
        return None
    return tuple([(name, type(array), array.shape, array.dtype) for name, array in given.items()])


def _kind(array: Any) -> str | Layout:
    if isinstance(array, DistArray):
        return array.layout
    if is_array(array):
        return "array on a GPU" if is_device_array(array) else "array"
    return f"dataset {array.as_read()}" if isinstance(array, Dataset) else "dataset"


def _as_read(files: Mapping[str, Dataset]) -> str:
    return repr([(name, dataset.as_read()) for name, dataset in files.items()])


def as_array(name: str, given: Any) -> Any:
    """What is no array of any kind becomes one; a dataset of h5py one that every rank can read."""
    if is_array(given):
        return given
    dataset = find_given(given)
    if dataset is not None:
        return dataset
    if hasattr(given, "shape") and hasattr(given, "dtype"):
        return given
    try:
        return np.asarray(given)
    except (ValueError, TypeError) as error:
        raise InputError("inputs", f"{name} is no array: {error}", "an array of numbers") from None


def _with_inputs(options: Options, kinds: Kinds, backend: str) -> Options:
    """What the way inputs are given means for a plan: arrays are on every rank already, DistArrays in their layout.

    The host's arrays may be more than fits on a GPU: where its memory is limited they are loaded when they are needed.
    """
    given = {name: kind.cuts for name, kind in kinds if isinstance(kind, Layout)}
    mesh = next((kind.mesh for _, kind in kinds if isinstance(kind, Layout)), None)
    there = (
        "array on a GPU",
        *(("array",) if backend == "numpy" or options.memory is None else ()),
    )
    everywhere = tuple(
        name for name, kind in kinds if kind in there and name not in options.resident
    )
    resident = tuple(name for name in options.resident if name not in given)
    pins = {name: parts for name, parts in options.pins.items() if name not in given}
    other = {name for name, _ in kinds}
    datasets = tuple(
        name for name, kind in kinds if isinstance(kind, str) and kind.startswith("dataset")
    )
    files = tuple(name for name in options.files if name not in other) + datasets
    return replace(
        options, resident=resident + everywhere, pins=pins, given=given, mesh=mesh, files=files
    )


def _on_one_mesh(given: dict[str, Any]) -> bool:
    """DistArrays on another mesh than the first of them are laid out anew; whether there were any."""
    spread = [(name, array) for name, array in given.items() if isinstance(array, DistArray)]
    others = [
        (name, array) for name, array in spread if array.layout.mesh != spread[0][1].layout.mesh
    ]
    for name, array in others:
        given[name] = array.redistribute(even_layout(spread[0][1].layout.mesh, array.shape))
    return bool(others)


# ---- all ranks alike ------------------------------------------------------------------------------------------------


def _fingerprint(job: Job, plan: Plan) -> str:
    """Equal on ranks that are about to do the same."""
    inputs = [
        replace(spec, place="", file=os.path.basename(spec.file or "")) for spec in job.inputs
    ]
    outputs = [replace(spec, place="", file=os.path.basename(spec.file)) for spec in job.outputs]
    return sha256(
        repr((__version__, plan.digest, job.fast_math, inputs, outputs)).encode()
    ).hexdigest()
