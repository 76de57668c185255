"""A job made ready to run on the ranks of a communicator: planned once, called many times."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from logging import DEBUG
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arguments import named_inputs, named_values
from einmpi.comm.agreement import find_first_failure, together
from einmpi.comm.base import Comm, even_nodes
from einmpi.comm.programs import abort_on_divergence
from einmpi.comm.same_arrays import is_checking, require_same_arrays
from einmpi.compiled.backends import workplace_of
from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.inputs import Blocks, Inputs
from einmpi.compiled.origin import Origin
from einmpi.errors import InputError, nearest_of
from einmpi.files.datasets import Dataset, is_unchanged
from einmpi.files.hdf5.datasets import find_given
from einmpi.files.load import find_planned
from einmpi.files.specs import Number
from einmpi.graph.dtypes import DTYPES
from einmpi.job.job import Job
from einmpi.kernels.cuda.driver import is_device_array
from einmpi.kernels.given import as_numpy, check_plain_array
from einmpi.late import late
from einmpi.log import LOGGER
from einmpi.planner.make_plan import make_plan
from einmpi.planner.mesh import Mesh
from einmpi.planner.plan import Options, Plan
from einmpi.process.first_use import first_use_seconds
from einmpi.runtime.execute import InputSource, Keeper, execute
from einmpi.runtime.failure import RankFailure
from einmpi.runtime.gpu.copies import on_host
from einmpi.runtime.scratch import check_folder
from einmpi.schedule.layout import Layout, even_layout
from einmpi.schedule.lower import lower
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Load, Step
from einmpi.schedule.two_level import bytes_between
from einmpi.units import counted
from einmpi.version import __version__

# What all ranks agree on before they run: the plan and this rank's schedule.
Ready: TypeAlias = tuple[Plan, Schedule]


@dataclass(frozen=True)
class GivenArray:
    """An input given as an array that every rank has."""

    on_gpu: bool


@dataclass(frozen=True)
class GivenDataset:
    """An input given as a dataset in a file or as an object that is read box by box."""

    as_read: str


# How each input is given, by name; a DistArray by its layout.
InputKind: TypeAlias = Layout | GivenArray | GivenDataset
Kinds: TypeAlias = tuple[tuple[str, InputKind], ...]


@dataclass(frozen=True)
class Measured:
    """Times, in seconds, and amounts, in bytes, of one run of a rank."""

    seconds: float  # without loading and without checkpoints
    seconds_loading: float
    received: int
    peak: int
    shuffled: int = 0  # received while loading, besides what the plan moves
    between: int = 0  # the part of `received` that came from other nodes
    spilled: int = 0  # written to the slow tier
    fetched: int = 0  # copied from the slow tier


class Compiled:
    """A job made ready for the ranks of a communicator. `einmpi.compile` makes it.

    It plans when it is first called with inputs of a new kind: an array, a dataset, or a
    DistArray in some layout. Later calls with inputs of that kind use the same plan.

    Examples
    --------
    >>> step = einmpi.compile(einmpi.program("Y[i] = X[i] / 2", X=(3,)))
    >>> step({"X": np.array([4.0, 8.0, 16.0])})["Y"].gather()
    array([2., 4., 8.])
    """

    def __init__(self, job: Job, comm: Comm, options: Options) -> None:
        self.job = job
        self.comm = comm
        self.options = options
        self.work = workplace_of(job, comm)
        self.backend = self.work.backend
        self.ready: dict[Kinds, Ready] = {}
        # The same by what arrays look like, on a single rank.
        self.known: dict[Hashable, Ready] = {}
        self.reads_files = any(spec.file is not None for spec in job.inputs)
        self.parameters = {spec.name for spec in job.inputs if spec.value is not None}
        self.files: dict[str, Dataset] = {}
        self.resident: Blocks = {}  # inputs from files that stay between calls
        self.measured: Measured | None = None
        self.on_step: Callable[[Step], None] | None = None

    def __repr__(self) -> str:
        plans = counted(len(self.ready), "plan")
        return f"<Compiled {self.job!r} on {counted(self.comm.size, 'rank')}, {plans} so far>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        text: str = late("compiled_html")(self)
        return text

    def __call__(
        self, inputs: Mapping[str, Any] | None = None, **tensors: Any
    ) -> dict[str, DistArray]:
        """Compute the outputs. All ranks call it, with inputs of the same kind.

        Parameters
        ----------
        inputs : mapping of str to array, DistArray or h5py dataset, optional
            The inputs by name. Those that are missing are generated or read as the job says.
        **tensors : array, DistArray or h5py dataset
            More inputs by name.

        Returns
        -------
        dict of str to DistArray
            The outputs by name. They may be inputs of the next call.

        Raises
        ------
        InputError
            An input is missing, unknown, or has another shape or dtype than the job says; the
            same error on all ranks.
        EinmpiError
            A value cannot be computed with, such as an index in a gather that is out of range. All
            ranks raise an error, and further calls are possible.
        """
        outline: Hashable = None
        if inputs is None:
            inputs = tensors
        elif tensors:
            by_position = inputs
            inputs = together(self.comm, lambda: named_inputs(by_position, tensors))
        if isinstance(inputs, Mapping):
            outline = _outline(inputs)
        known = self.known.get(outline)
        if known is not None:  # a GPU would wait for everything that `prepare` does
            plan, schedule = known
            given = dict(inputs)
            if self.reads_files:
                self.find_files(given)
        else:
            with abort_on_divergence(self.comm):
                plan, schedule, given = self.prepare(inputs)
            unchanged = all(given[name] is inputs[name] for name in given)
            if outline is not None and self.comm.size == 1 and unchanged:
                self.known[outline] = plan, schedule
        sources = Inputs(self.job, given, self.files, self.resident)
        if self.comm.size == 1:
            outputs, self.measured = self.run_schedule(plan, schedule, sources, wait=False)
            return outputs
        failure = RankFailure()
        with abort_on_divergence(self.comm):
            outputs, self.measured = self.run_schedule(
                plan, schedule, sources, wait=False, failure=failure
            )
            first_failed = find_first_failure(self.comm, failure.error, failure.part)
        if first_failed is not None:
            # What other ranks have sent may be wrong, and all ranks have to read again together.
            self.forget_inputs()
            raise first_failed
        return outputs

    def forget_inputs(self) -> None:
        """Release the inputs that stay loaded between calls."""
        self.files.clear()
        self.resident.clear()
        self.backend.forget_inputs()

    def prepare(self, inputs: Mapping[str, Any]) -> tuple[Plan, Schedule, dict[str, Any]]:
        """Return the plan, this rank's schedule and the inputs as they are used.

        All ranks agree on the plan, or all raise an error.
        """
        checking = self.comm.size > 1 and is_checking()
        given, kinds = together(
            self.comm,
            lambda: checked_inputs(self.job, self.comm, inputs),
            lambda found: f"{checking} {found[1]!r}",
        )
        if checking:
            arrays = {name: on_host(array) for name, array in given.items() if is_array(array)}
            require_same_arrays(self.comm, "inputs", arrays)
        # However the carried ones are given, the plan says where they go.
        carried = self.options.carry
        others = {name: array for name, array in given.items() if name not in carried}
        if _move_to_one_mesh(others, self.options.mesh):
            given.update(others)
        kinds = tuple((name, _kind_of(given[name])) for name, _ in kinds if name in others)
        if kinds not in self.ready:
            self.ready[kinds] = self.make_ready(kinds)
        plan, schedule = self.ready[kinds]
        for name in carried:
            array = given.get(name)
            if isinstance(array, DistArray):
                layout = Layout(plan.mesh, array.shape, plan.layouts[name])
                given[name] = array if array.layout == layout else array.redistribute(layout)
        self.find_files(given)
        return plan, schedule, given

    def make_ready(self, kinds: Kinds = ()) -> Ready:
        """Return the plan for inputs that are given in this way, and this rank's schedule.

        All ranks agree on the plan, or all raise an error.
        """
        plan, schedule = together(
            self.comm,
            lambda: self._plan_and_lower(kinds),
            lambda ready: _fingerprint(self.job, ready[0]),
        )
        LOGGER.info(
            "planned %s on %d ranks in %.3f s: %d bytes to move",
            ", ".join(self.job.graph.outputs),
            plan.ranks,
            plan.seconds,
            plan.bytes_predicted,
        )
        if plan.bytes_between is None:
            own = bytes_between(schedule, self.comm.nodes)
            total = sum(int(text) for text in self.comm.allgather_text(str(own)))
            plan = replace(plan, counted=total)
        return plan, schedule

    def _plan_and_lower(self, kinds: Kinds) -> Ready:
        plan = self.plan(kinds)
        if plan.spilled:
            check_folder(self.job.scratch, self.job.source.name)
        return plan, self.backend.group_kernels(lower(plan, self.comm.rank))

    def find_files(self, given: Collection[str]) -> None:
        """Look up the inputs in files that are not given; those that stay loaded only once.

        The ranks read together, so all have to find the same. They do this before every call: a
        file may change between two calls, but not between here and the end of reading.
        """
        vertices = self.job.graph.by_name
        wanted = []
        for spec in self.job.inputs:
            stays_loaded = spec.name in self.files and spec.name in self.options.resident
            if spec.file and spec.name in vertices and spec.name not in given and not stays_loaded:
                wanted.append(spec)

        def find() -> dict[str, Dataset]:
            found = {}
            for spec in wanted:
                dataset = self.files.get(spec.name)
                if dataset is None or not is_unchanged(dataset):
                    vertex = vertices[spec.name]
                    dataset = find_planned(spec, vertex.bound, vertex.dtype)
                found[spec.name] = dataset
            return found

        if wanted:
            found = together(self.comm, find, _as_read)
            self.files.update(found)

    def plan(self, kinds: Kinds) -> Plan:
        """Make the plan for inputs that are given in this way."""
        # If nodes have different numbers of ranks, the mesh has one level, and the ranks count
        # what moves between nodes from their schedules.
        options = replace(
            _with_inputs(self.options, kinds, self.job.backend),
            nodes=max(self.comm.nodes) + 1,
            uneven=even_nodes(self.comm) is None,
        )
        plan = make_plan(self.job.graph, self.comm.size, options)
        self.work.check_memory(self.job.source.name, plan.peak - plan.ahead)
        return plan

    def run_schedule(
        self,
        plan: Plan,
        schedule: Schedule,
        sources: Inputs,
        checkpoints: Keeper | None = None,
        wait: bool = True,
        failure: RankFailure | None = None,
    ) -> tuple[dict[str, DistArray], Measured]:
        """Execute the schedule, and return the outputs and what was measured.

        Without `wait`, kernels on a GPU may still run on return; uses of the outputs follow them.
        With `failure`, a rank notes its first error there and goes on without computing.
        """
        self.backend.reserve(plan.peak)
        received = self.comm.received
        received_between = self.comm.received_between
        start = time.perf_counter()
        first_uses_before = first_use_seconds()
        storage = _TimedStorage(self.work.storage(sources))
        sources.shuffled = 0
        sources.shuffled_between = 0
        try:
            blocks, buffers = execute(
                schedule, self.backend, self.work.comm, storage, self.on_step, checkpoints, failure
            )
            if wait:
                self.backend.wait()
        finally:
            sources.close()
        seconds = time.perf_counter() - start - storage.seconds
        seconds -= first_use_seconds() - first_uses_before
        if checkpoints is not None:
            seconds -= checkpoints.seconds
        measured = Measured(
            seconds=seconds,
            seconds_loading=storage.seconds,
            received=self.comm.received - received - sources.shuffled,
            peak=buffers.peak,
            shuffled=sources.shuffled,
            between=self.comm.received_between - received_between - sources.shuffled_between,
            spilled=buffers.spilled,
            fetched=buffers.fetched,
        )
        if LOGGER.isEnabledFor(DEBUG):
            names = ", ".join(self.job.graph.outputs)
            LOGGER.debug(
                "computed %s in %.6f s, received %d bytes", names, seconds, measured.received
            )
        origin = self.origin(plan, sources.given)
        outputs = {}
        for name in self.job.graph.outputs:
            outputs[name] = self.output(plan, name, blocks.get(name), origin)
        return outputs, measured

    def origin(self, plan: Plan, given: Mapping[str, Any]) -> Origin:
        """Return where the results of a run with these inputs come from."""
        values: dict[str, Number | None] = dict.fromkeys(given)
        files = dict(self.files)
        for name, array in given.items():
            if isinstance(array, Dataset):
                files[name] = array
            elif name in self.parameters and isinstance(array, np.ndarray):
                values[name] = array.item()
        return Origin(self.job, lambda: plan.digest, values, files)

    def output(
        self, plan: Plan, name: str, local: npt.NDArray[Any] | None, origin: Origin
    ) -> DistArray:
        """Return an output, given this rank's block of it."""
        vertex = self.job.graph[name]
        layout = Layout(plan.mesh, vertex.bound, plan.layouts[name])
        if local is None:
            local = np.empty((0,) * (len(vertex.bound) or 1), vertex.dtype)
        result = DistArray(local, layout, self.comm)
        result.origin = origin
        result.tensor = name
        return result


class _TimedStorage:
    """A storage that counts the seconds in which a run waits for it, without first uses."""

    def __init__(self, storage: InputSource) -> None:
        self.storage = storage
        self.seconds = 0.0
        self.begin = storage.begin

    def fill(self, step: Load, target: Any, comm: Comm) -> None:
        start = time.perf_counter() - first_use_seconds()
        self.storage.fill(step, target, comm)
        self.seconds += time.perf_counter() - first_use_seconds() - start

    def block(self, step: Load, comm: Comm) -> Any:
        start = time.perf_counter() - first_use_seconds()
        block = self.storage.block(step, comm)
        self.seconds += time.perf_counter() - first_use_seconds() - start
        return block


# ---- inputs -------------------------------------------------------------------------------------


def checked_inputs(job: Job, comm: Comm, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Kinds]:
    """Return the given inputs as arrays of some kind, and how each is given."""
    given = {}
    for name, value in named_values("inputs", inputs).items():
        given[name] = as_input(job, name, value, as_array(name, value))
    if job.backend == "numpy":
        given = {name: on_host(array) for name, array in given.items()}
    kinds = check_inputs(job, given)
    for name, array in given.items():
        if isinstance(array, DistArray) and array.own_comm is not comm:
            raise InputError(
                "inputs",
                f"{name} is on another communicator",
                "DistArrays on the ranks of this run",
            )
    return given, kinds


def check_inputs(job: Job, given: Mapping[str, Any]) -> Kinds:
    """Return how each input is given; refuse missing, unknown and unsuitable ones."""
    graph = job.graph
    specs = {spec.name for spec in job.inputs}
    for name in given:
        is_input = name in graph.by_name and graph[name].is_input
        if name not in specs and not is_input:
            expected = nearest_of([vertex.name for vertex in graph.inputs], name)
            raise InputError("inputs", f"unknown input {name!r}", expected)
    kinds: list[tuple[str, InputKind]] = []
    for vertex in graph.inputs:
        if vertex.name not in given:
            if vertex.name not in specs:
                raise InputError("inputs", f"input {vertex.name} is not given", str(vertex))
            continue
        array = given[vertex.name]
        if tuple(array.shape) != vertex.bound or _name_of(array.dtype) != vertex.dtype:
            extents = ", ".join(str(extent) for extent in array.shape)
            found = f"{_name_of(array.dtype)}[{extents}]"
            hint = ""
            if tuple(array.shape) == vertex.bound:
                hint = f'convert it with .astype("{vertex.dtype}"), which may change values'
                if not hasattr(array, "astype"):
                    hint = "give an array, or convert the elements in the program"
            raise InputError("inputs", f"{vertex.name} is {found}", str(vertex), hint)
        kinds.append((vertex.name, _kind_of(array)))
    return tuple(kinds)


def as_input(job: Job, name: str, value: Any, array: Any) -> Any:
    """Return a given array in the dtype of the input, if numpy calls a cast to it safe.

    `value` is what the caller gave. A number of Python adapts, as constants in programs do: an
    integer is a real number too.
    """
    vertex = job.graph.by_name.get(name)
    if vertex is None or not vertex.is_input or not hasattr(array, "astype"):
        return array
    if _name_of(array.dtype) == vertex.dtype:
        return array
    wanted = np.dtype(vertex.dtype)
    if type(value) in (bool, int, float, complex):
        return _as_number_of(name, value, wanted, array)
    if not np.can_cast(np.dtype(array.dtype), wanted, "safe"):
        return array  # check_inputs refuses it
    return array.astype(wanted)


def _as_number_of(
    name: str, value: complex, dtype: np.dtype[Any], array: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Return a number of Python in a dtype that can hold its kind, else the array as it is."""
    kinds = "biufc"
    number_kind = {bool: "b", int: "i", float: "f", complex: "c"}[type(value)]
    kind = DTYPES[dtype.name].kind
    if kinds.index(number_kind) > kinds.index(kind):
        return array
    if kind in "iu" and type(value) is int:
        limits = np.iinfo(dtype)
        if not limits.min <= value <= limits.max:
            what = f"{name} is {value}, which does not fit into {dtype.name}"
            raise InputError("inputs", what, f"a number from {limits.min} to {limits.max}")
    with np.errstate(over="ignore"):
        return np.asarray(value).astype(dtype)


@cache  # numpy assembles a name each time; short calls on a GPU would wait for it
def _name_of(dtype: Any) -> str:
    return str(np.dtype(dtype).name)


def is_array(given: Any) -> bool:
    """Return whether this is an array of numpy or CuPy."""
    return isinstance(given, np.ndarray) or is_device_array(given)


def _outline(given: Mapping[str, Any]) -> Hashable:
    """Return all that checks and plans depend on; None if anything but arrays is given."""
    if not all(map(is_array, given.values())):
        return None
    return tuple([(name, type(array), array.shape, array.dtype) for name, array in given.items()])


def _kind_of(array: Any) -> InputKind:
    if isinstance(array, DistArray):
        return array.layout
    if is_array(array):
        return GivenArray(on_gpu=is_device_array(array))
    if isinstance(array, Dataset):
        return GivenDataset(array.as_read())
    return GivenDataset("")


def _as_read(files: Mapping[str, Dataset]) -> str:
    return repr([(name, dataset.as_read()) for name, dataset in files.items()])


def as_array(name: str, given: Any) -> Any:
    """Return an array of any kind unchanged, anything else as a numpy array.

    An h5py dataset becomes one that every rank can read.
    """
    check_plain_array("inputs", name, given)
    if is_array(given):
        return given
    dataset = find_given(given)
    if dataset is not None:
        return dataset
    if hasattr(given, "shape") and hasattr(given, "dtype"):
        return given
    return as_numpy("inputs", name, given)


def _with_inputs(options: Options, kinds: Kinds, backend: str) -> Options:
    """Return the options of a plan for inputs that are given in this way.

    An array is on every rank already, a DistArray is in its layout. The host's arrays may not fit
    on a GPU: if its memory is limited they are loaded when they are needed.
    """
    host_arrays_stay = backend == "numpy" or options.memory is None
    layouts = {}
    everywhere = []
    datasets = []
    mesh = options.mesh
    for name, kind in kinds:
        if isinstance(kind, Layout):
            layouts[name] = kind.cuts
            if mesh is None:
                mesh = kind.mesh
        elif isinstance(kind, GivenDataset):
            datasets.append(name)
        elif (kind.on_gpu or host_arrays_stay) and name not in options.resident:
            everywhere.append(name)
    given_names = {name for name, _ in kinds}
    return replace(
        options,
        resident=(*(name for name in options.resident if name not in layouts), *everywhere),
        pins={name: parts for name, parts in options.pins.items() if name not in layouts},
        given=layouts,
        mesh=mesh,
        files=(*(name for name in options.files if name not in given_names), *datasets),
    )


def _move_to_one_mesh(given: dict[str, Any], mesh: Mesh | None) -> bool:
    """Redistribute DistArrays to a mesh, by default that of the first; return whether any moved."""
    moved = False
    for name, array in given.items():
        if not isinstance(array, DistArray):
            continue
        if mesh is None:
            mesh = array.layout.mesh
        elif array.layout.mesh != mesh:
            given[name] = array.redistribute(even_layout(mesh, array.shape))
            moved = True
    return moved


# ---- agreement of all ranks ---------------------------------------------------------------------


def _fingerprint(job: Job, plan: Plan) -> str:
    """Return a text that is equal on ranks that are about to do the same."""
    inputs = []
    for input_spec in job.inputs:
        file = os.path.basename(input_spec.file or "")
        inputs.append(replace(input_spec, place="", file=file, follow=()))
    outputs = []
    for output_spec in job.outputs:
        outputs.append(replace(output_spec, place="", file=os.path.basename(output_spec.file)))
    agreed = (__version__, plan.digest, job.fast_math, job.strict, inputs, outputs)
    return sha256(repr(agreed).encode()).hexdigest()
