"""A job made ready to run on the ranks of a communicator: planned once, called many times."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from logging import DEBUG
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arguments import named_inputs
from einmpi.comm.agreement import find_first_failure, together
from einmpi.comm.base import Comm, even_nodes
from einmpi.comm.programs import abort_on_divergence
from einmpi.comm.same_arrays import is_checking, require_same_arrays
from einmpi.comm.shared_memory import sharing_nodes
from einmpi.compiled.backends import workplace_of
from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.donated import take_donated
from einmpi.compiled.given_inputs import (
    GivenArray,
    InputKind,
    Kinds,
    checked_inputs,
    is_array,
    kind_of,
    move_to_one_mesh,
    with_inputs,
)
from einmpi.compiled.inputs import Inputs
from einmpi.compiled.known_calls import KnownCall, KnownCalls
from einmpi.compiled.measured import Measured, TimedStorage
from einmpi.compiled.origin import Origin
from einmpi.compiled.prepared_runs import PreparedRun, prepare_run
from einmpi.compiled.residents import Residents
from einmpi.files.datasets import Dataset, files_as_read, is_unchanged
from einmpi.files.load import find_planned
from einmpi.files.specs import Number
from einmpi.job.job import Job
from einmpi.kernels.cpu.blas_library.choice import describe_blas_in_use
from einmpi.late import late
from einmpi.log import LOGGER
from einmpi.planner.make_plan import make_plan
from einmpi.planner.plan import Options, Plan
from einmpi.planner.plan_data import FittedInputs
from einmpi.process.first_use import first_use_seconds
from einmpi.runtime.backend import NumpyBackend
from einmpi.runtime.execute import Keeper, execute
from einmpi.runtime.failure import RankFailure
from einmpi.runtime.gpu.copies import on_host
from einmpi.runtime.overlap.background import OnTransfer, SharedBuffers
from einmpi.runtime.repeated import Repeated, RepeatedSchedule
from einmpi.runtime.scratch import check_folder
from einmpi.runtime.sharing.arrays import NOTHING_SHARED
from einmpi.runtime.sharing.inputs import find_shared_inputs
from einmpi.runtime.sharing.memory import SharedMemory, set_up_shared_memory
from einmpi.schedule.layout import Layout
from einmpi.schedule.lower import lower
from einmpi.schedule.memory import spilled_bytes
from einmpi.schedule.overlap.arrange import with_overlap
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Step, loads_among
from einmpi.schedule.two_level import bytes_between
from einmpi.units import counted
from einmpi.version import __version__

# What all ranks agree on before they run: the plan and this rank's schedule.
Ready: TypeAlias = tuple[Plan, Schedule]


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

    def __init__(
        self, job: Job, comm: Comm, options: Options, share: Compiled | None = None
    ) -> None:
        self.job = job
        self.comm = comm
        self.options = options
        self.work = workplace_of(job, comm)
        self.backend = self.work.backend
        self.ready: dict[Kinds, Ready] = {}
        self.known_calls = KnownCalls(comm)
        self.reads_files = any(spec.file is not None for spec in job.inputs)
        self.parameters = {spec.name for spec in job.inputs if spec.value is not None}
        self.files: dict[str, Dataset] = {}
        self.residents: Residents = Residents() if share is None else share.residents
        self.resident = self.residents.blocks  # inputs that stay between calls
        self.residents.add_sources(job)
        if share is not None:
            self.residents.is_shared = True
            self.backend.share_inputs(share.backend)
        self.layouts: dict[int, dict[str, Layout]] = {}  # of outputs, by the id of the plan
        # By the id of a plan or a schedule, which is kept too.
        self.origins: dict[int, tuple[Plan, Origin]] = {}
        self.fingerprints: dict[int, tuple[Plan, str]] = {}
        self.repeated: dict[int, tuple[Schedule, Repeated | None]] = {}
        self.shared: dict[int, tuple[Schedule, SharedMemory | None]] = {}
        self.measured: Measured | None = None
        self.on_step: Callable[[Step], None] | None = None
        self.on_transfer: OnTransfer | None = None
        # Whether transfers go on while kernels run. A schedule that is cut at a save point is
        # arranged for that afterwards.
        self.overlaps = True
        self.keeps_memory = False  # that a run does not use any more, for the next one

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
        if inputs is None:
            inputs = tensors
        elif tensors:
            by_position = inputs
            inputs = together(self.comm, lambda: named_inputs(by_position, tensors))
        return self.call_as_known(self.known_calls.find(inputs), inputs)

    def call_as_known(
        self, known: KnownCall | None, inputs: Mapping[str, Any]
    ) -> dict[str, DistArray]:
        """Do a call, given the earlier one that all ranks know. `__call__` looks for it first."""
        if known is not None and known.prepared is not None and self.on_step is None:
            if known.prepared.is_up_to_date(self.residents.times_forgotten):
                prepared_outputs = self._call_prepared(known, known.prepared, inputs)
                if prepared_outputs is not None:
                    return prepared_outputs
            else:  # it is prepared again after the inputs are loaded
                known.prepared = None
                known.may_be_prepared = True
        if known is not None:
            plan = known.plan
            schedule = known.schedule
            given = dict(inputs)
            if self.reads_files:
                self.find_files(given, self._staying(plan))
        else:
            with abort_on_divergence(self.comm):
                plan, schedule, given = self.prepare(inputs)
            self.known_calls.add(
                inputs,
                given,
                plan,
                schedule,
                lambda: self.fingerprint(plan),
                self.reads_files,
            )
        sources = self._sources(inputs, given)
        if self.comm.size == 1:
            outputs, self.measured = self.run_schedule(plan, schedule, sources, wait=False)
        else:
            failure = RankFailure()
            with abort_on_divergence(self.comm):
                outputs, self.measured = self.run_schedule(
                    plan, schedule, sources, wait=False, failure=failure
                )
                first_failed = self._first_failed(known, failure)
            if first_failed is not None:
                self._raise_failure(first_failed)
        if known is not None:
            self._prepare_next_call(known, inputs)
        return outputs

    def _sources(self, inputs: Mapping[str, Any], given: dict[str, Any]) -> Inputs:
        """Return the inputs of a run, and take those from the caller that were given away.

        `inputs` are those of the caller, `given` the same as they are used.
        """
        sources = Inputs(self.job, given, self.files, self.resident)
        if self.options.donate:  # whatever the plan can make of it
            sources.overwritable = take_donated(self.options.carry, inputs, given)
        return sources

    def _first_failed(self, known: KnownCall | None, failure: RankFailure) -> Exception | None:
        """Return the error that this rank raises after a call because one of them has failed."""
        if known is None or known.may_fail:
            return find_first_failure(self.comm, failure.error, failure.part)
        if failure.error is not None:
            raise failure.error  # no other rank expects it: all of them end
        return None

    def _raise_failure(self, error: Exception) -> NoReturn:
        # What other ranks have sent may be wrong, and all ranks have to read again together.
        self.forget_inputs()
        raise error

    def _prepare_next_call(self, known: KnownCall, inputs: Mapping[str, Any]) -> None:
        """Prepare further calls with inputs that look like these, if that is possible."""
        if not known.may_be_prepared or known.prepared is not None:
            return
        repeated = self.repeated_schedule(known.schedule)
        if not isinstance(repeated, RepeatedSchedule):
            known.may_be_prepared = False  # on a GPU
            return
        if not repeated.calls:
            return  # they are bound in the next run
        known.may_be_prepared = False
        shared = self.shared_memory(known.schedule)
        if shared is not None and shared.most_bytes_anywhere:
            return  # a prepared call knows nothing of groups that share memory, here or elsewhere
        layouts = {name: self.layout_of(known.plan, name) for name in self.job.graph.outputs}
        known.prepared = prepare_run(
            repeated, known.schedule, self.job, inputs, self.residents, layouts
        )

    def _call_prepared(
        self, known: KnownCall, prepared: PreparedRun, inputs: Mapping[str, Any]
    ) -> dict[str, DistArray] | None:
        """Do a call that is prepared; return None if another thread does it at this moment."""
        comm = self.comm
        received = comm.received
        received_between = comm.received_between
        start = time.perf_counter()
        first_uses_before = first_use_seconds()
        first_failed = None

        def take_sources() -> Inputs:
            return self._sources(inputs, dict(inputs))

        if comm.size == 1:
            blocks = prepared.output_blocks(inputs, take_sources, None)
        else:
            failure = RankFailure()
            with abort_on_divergence(comm):
                blocks = prepared.output_blocks(inputs, take_sources, failure)
                if blocks is not None:
                    first_failed = self._first_failed(known, failure)
        if first_failed is not None:
            self._raise_failure(first_failed)
        if blocks is None:
            return None
        self.backend.release()
        seconds = time.perf_counter() - start - (first_use_seconds() - first_uses_before)
        self.measured = Measured(
            seconds,
            0.0,
            comm.received - received,
            prepared.repeated.peak,
            0,
            comm.received_between - received_between,
        )
        self._log_run(self.measured)
        plan = known.plan
        origin = self.origin(plan, inputs)
        outputs = {}
        for name, layout in prepared.layouts.items():
            if name in blocks:
                outputs[name] = DistArray._of_run(blocks[name], layout, comm, origin, name)
            else:
                outputs[name] = self.output(plan, name, None, origin)
        return outputs

    def forget_inputs(self) -> None:
        """Release the inputs that stay loaded between calls."""
        self.files.clear()
        self.residents.files.clear()
        self.residents.times_forgotten += 1
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
        mesh = self.residents.mesh if self.residents.is_shared else None
        if move_to_one_mesh(others, mesh or self.options.mesh):
            given.update(others)
        kinds = tuple((name, kind_of(given[name])) for name, _ in kinds if name in others)
        if kinds not in self.ready:
            self.ready[kinds] = self.make_ready(kinds)
        else:  # other ranks may call another program
            ready = self.ready[kinds]
            together(self.comm, lambda: ready, lambda ready: self.fingerprint(ready[0]))
        plan, schedule = self.ready[kinds]
        for name in carried:
            array = given.get(name)
            if isinstance(array, DistArray):
                layout = Layout(plan.mesh, array.shape, plan.layouts[name])
                given[name] = array if array.layout == layout else array.redistribute(layout)
        self.find_files(given, self._staying(plan))
        return plan, schedule, given

    def plan_for_arrays(self) -> None:
        """Plan a call that gives arrays for all inputs that the job does not bring itself.

        All ranks call it, before a first call that need not succeed: no plan may fit into memory.
        """
        specs = {spec.name for spec in self.job.inputs}
        kinds: list[tuple[str, InputKind]] = []
        for vertex in self.job.graph.inputs:
            if vertex.name not in specs and vertex.name not in self.options.carry:
                kinds.append((vertex.name, GivenArray(on_gpu=False)))
        if tuple(kinds) not in self.ready:
            self.ready[tuple(kinds)] = self.make_ready(tuple(kinds))

    def make_ready(self, kinds: Kinds = ()) -> Ready:
        """Return the plan for inputs that are given in this way, and this rank's schedule.

        All ranks agree on the plan, or all raise an error.
        """
        nodes = sharing_nodes(self.comm) if self.may_share else ()
        plan, schedule = together(
            self.comm,
            lambda: self._plan_and_lower(kinds, nodes),
            lambda ready: self.fingerprint(ready[0]),
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
        given = dict(kinds)
        loaded = tuple(name for name in self._staying(plan) if name not in given)
        self.residents.add_layouts(plan, loaded)
        return plan, schedule

    def _plan_and_lower(self, kinds: Kinds, nodes: Sequence[int]) -> Ready:
        """Plan, and lower the plan. `nodes` are those whose ranks share memory, if they may."""
        plan = self.plan(kinds)
        if plan.spilled:
            check_folder(self.job.scratch, self.job.source.name)
        schedule = lower(plan, self.comm.rank)
        saved = 0
        if nodes:
            shared = find_shared_inputs(schedule, nodes)
            for _, load in loads_among(schedule.steps):
                if load.slot.name in shared and load.tensor not in dict(kinds):
                    saved += shared[load.slot.name].bytes_saved(load.slot)
        needed = plan.peak - plan.ahead - plan.overlap - saved
        self.work.check_memory(self.job.source.name, needed)
        schedule = self.backend.group_kernels(schedule)
        if self.overlaps:
            schedule = with_overlap(schedule, plan.peak)
        return plan, schedule

    @property
    def may_share(self) -> bool:
        """Whether ranks of a node may share memory, if the system lets them."""
        is_on_host = isinstance(self.backend, NumpyBackend)
        return self.job.shared == "auto" and self.comm.size > 1 and is_on_host

    def _staying(self, plan: Plan) -> tuple[str, ...]:
        """Return the inputs of the job that a plan keeps loaded between calls."""
        return tuple(name for name in self.options.may_stay if name in plan.resident)

    def find_files(self, given: Collection[str], staying: Sequence[str]) -> None:
        """Look up the inputs in files that are not given; those that stay loaded only once.

        The ranks read together, so all have to find the same. They do this before every call: a
        file may change between two calls, but not between here and the end of reading.
        """
        if self.residents.is_shared:
            self._find_shared_files(staying)
        vertices = self.job.graph.by_name
        wanted = []
        for spec in self.job.inputs:
            stays_loaded = spec.name in self.files and spec.name in staying
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
            found = together(self.comm, find, files_as_read)
            self.files.update(found)
            for name in staying:
                if name in found:
                    self.residents.files[name] = found[name]

    def _find_shared_files(self, staying: Sequence[str]) -> None:
        """Note which inputs other jobs have loaded or forgotten since the last call."""
        for name in staying:
            known = self.residents.files.get(name)
            if known is None:
                self.files.pop(name, None)
            else:
                self.files[name] = known

    def plan(self, kinds: Kinds) -> Plan:
        """Make the plan for inputs that are given in this way."""
        # If nodes have different numbers of ranks, the mesh has one level, and the ranks count
        # what moves between nodes from their schedules.
        options = replace(
            with_inputs(self.options, kinds, self.job.backend),
            nodes=max(self.comm.nodes) + 1,
            uneven=even_nodes(self.comm) is None,
            overlap=self.options.overlap and self._can_overlap(),
        )
        if self.residents.is_shared:
            given = dict(kinds)
            loaded = tuple(name for name in self.options.may_stay if name not in given)
            options = self.residents.with_layouts(options, loaded)
        plan = make_plan(self.job.graph, self.comm.size, options)
        if self.options.fitting and plan.fitted is None:
            plan = replace(plan, fitted=self._fitted_by_others(plan, kinds))
        return plan

    def _fitted_by_others(self, plan: Plan, kinds: Kinds) -> FittedInputs:
        """Return which inputs stay loaded, where a job that shares them has decided that."""
        given = dict(kinds)
        names = [name for name in self.options.fitting if name not in given]
        kept = tuple(name for name in names if name in plan.resident)
        return FittedInputs(kept, tuple(name for name in names if name not in plan.resident))

    def _can_overlap(self) -> bool:
        """Return whether messages can be sent while kernels run: from host memory, by a thread."""
        return isinstance(self.backend, NumpyBackend) and self.work.comm.serves_threads

    def run_schedule(
        self,
        plan: Plan,
        schedule: Schedule,
        sources: Inputs,
        checkpoints: Keeper | None = None,
        wait: bool = True,
        failure: RankFailure | None = None,
    ) -> tuple[dict[str, DistArray], Measured]:
        """Execute the schedule, and return the outputs and what was measured."""
        blocks, measured = self.run_blocks(
            plan, schedule, sources, checkpoints, wait=wait, failure=failure
        )
        return self.outputs(plan, blocks, sources.given), measured

    def run_blocks(
        self,
        plan: Plan,
        schedule: Schedule,
        sources: Inputs,
        checkpoints: Keeper | None = None,
        wait: bool = True,
        failure: RankFailure | None = None,
    ) -> tuple[dict[str, Any], Measured]:
        """Execute the schedule, and return this rank's blocks of the outputs and what was measured.

        Without `wait`, kernels on a GPU may still run on return; uses of the outputs follow them.
        With `failure`, a rank notes its first error there and goes on without computing.
        """
        self.backend.reserve(plan.peak, lambda: sources.bytes_on_device(schedule))
        shared = self.shared_memory(schedule)
        received = self.comm.received
        received_shared = self.comm.received_shared
        received_between = self.comm.received_between
        start = time.perf_counter()
        first_uses_before = first_use_seconds()
        loader = self.work.storage(sources)
        storage = TimedStorage(loader, sources.given)
        sources.shuffled = 0
        sources.shuffled_between = 0
        try:
            if shared is not None:
                shared.begin_run()
                self.backend.shared = shared
                sources.sharing = shared
            repeated = self.repeated_schedule(schedule)
            if repeated is None or self.on_step is not None or checkpoints is not None:
                blocks, buffers = execute(
                    schedule,
                    self.backend,
                    self.work.comm,
                    storage,
                    self.on_step,
                    checkpoints,
                    failure,
                    self.on_transfer,
                )
            else:
                blocks, buffers = repeated.run(storage, failure)
            if wait:
                self.backend.wait()
        finally:
            loader.close()
            self.backend.shared = NOTHING_SHARED
            if shared is not None:
                shared.end_run(keep=self.keeps_memory)
            if not self.keeps_memory:
                self.backend.release()
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
            spilled_planned=spilled_bytes(schedule) if plan.spilled else 0,
            fetched=buffers.fetched,
            shared=self.comm.received_shared - received_shared,
            shared_planned=0 if shared is None else shared.found.bytes_received,
        )
        if isinstance(buffers, SharedBuffers):
            measured.seconds_hidden = buffers.background.seconds_hidden
        self._log_run(measured)
        return blocks, measured

    def _log_run(self, measured: Measured) -> None:
        if LOGGER.isEnabledFor(DEBUG):
            LOGGER.debug(
                "computed %s in %.6f s, received %d bytes",
                ", ".join(self.job.graph.outputs),
                measured.seconds,
                measured.received,
            )

    @contextmanager
    def keeping_memory(self) -> Iterator[None]:
        """Use memory again from run to run, as long as a `with` block lasts."""
        self.keeps_memory = True
        try:
            yield
        finally:
            self.keeps_memory = False
            self.backend.release()
            for _, shared in self.shared.values():
                if shared is not None:
                    shared.end_run(keep=False)

    def repeated_schedule(self, schedule: Schedule) -> Repeated | None:
        """Return what runs a schedule again and again; None if it has to be done step by step."""
        known = self.repeated.get(id(schedule))
        if known is None:
            found = self.work.repeated(schedule)
            # Keep a reference to the schedule, so that no other object gets the same id.
            known = self.repeated[id(schedule)] = schedule, found
        return known[1]

    def shared_memory(self, schedule: Schedule) -> SharedMemory | None:
        """Return the slots of a schedule that ranks share; None if there are none.

        All ranks call it. They find out together, before the first run of the schedule.
        """
        known = self.shared.get(id(schedule))
        if known is None:
            found = None
            if self.may_share:
                found = set_up_shared_memory(schedule, self.comm)
            # Keep a reference to the schedule, so that no other object gets the same id.
            known = self.shared[id(schedule)] = schedule, found
        return known[1]

    def outputs(
        self, plan: Plan, blocks: Mapping[str, Any], given: Mapping[str, Any]
    ) -> dict[str, DistArray]:
        """Return the outputs of a run, given this rank's blocks of them and the inputs."""
        origin = self.origin(plan, given)
        found = {}
        for name in self.job.graph.outputs:
            found[name] = self.output(plan, name, blocks.get(name), origin)
        return found

    def layout_of(self, plan: Plan, name: str) -> Layout:
        """Return the layout of an output: the same object for all runs of a plan."""
        plan_layouts = self.layouts.setdefault(id(plan), {})
        layout = plan_layouts.get(name)
        if layout is None:
            layout = Layout(plan.mesh, self.job.graph[name].bound, plan.layouts[name])
            plan_layouts[name] = layout
        return layout

    def origin(self, plan: Plan, given: Mapping[str, Any]) -> Origin:
        """Return where the results of a run with these inputs come from."""
        known = self.origins.get(id(plan))
        if known is not None:
            return known[1]
        values: dict[str, Number | None] = dict.fromkeys(given)
        files = dict(self.files)
        for name, array in given.items():
            if isinstance(array, Dataset):
                files[name] = array
            elif name in self.parameters and isinstance(array, np.ndarray):
                values[name] = array.item()
        origin = Origin(self.job, lambda: plan.digest, values, files)
        if not files and not self.parameters and not self.options.carry:
            # It is the same for all runs of this plan.
            self.origins[id(plan)] = plan, origin
        return origin

    def output(
        self, plan: Plan, name: str, local: npt.NDArray[Any] | None, origin: Origin
    ) -> DistArray:
        """Return an output, given this rank's block of it."""
        if local is None:
            vertex = self.job.graph[name]
            local = np.empty((0,) * (len(vertex.bound) or 1), vertex.dtype)
        result = DistArray(local, self.layout_of(plan, name), self.comm)
        result.origin = origin
        result.tensor = name
        return result

    def fingerprint(self, plan: Plan) -> str:
        """Return a text that is equal on ranks that are about to do the same."""
        known = self.fingerprints.get(id(plan))
        if known is None:
            known = self.fingerprints[id(plan)] = plan, _fingerprint(self.job, plan)
        return known[1]


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
    blas = describe_blas_in_use()  # another one rounds otherwise
    modes = (job.fast_math, job.strict, job.shared, plan.overlapped)
    agreed = (__version__, plan.digest, *modes, blas, inputs, outputs)
    return sha256(repr(agreed).encode()).hexdigest()
