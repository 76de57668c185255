"""A job made ready to run on the ranks of a communicator: planned once, called many times."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from einmpi.arguments import named_inputs
from einmpi.arrays.dist_array import DistArray
from einmpi.arrays.record import Origin
from einmpi.comm.agreement import (
    abort_on_divergence,
    find_first_failure,
    is_checking,
    require_same_arrays,
    together,
)
from einmpi.comm.base import Comm
from einmpi.compiled.given_inputs import (
    as_plain_arrays,
    checked_inputs,
    inputs_for_grids,
    is_array,
    kind_of,
    move_to_one_mesh,
    update_views,
)
from einmpi.compiled.inputs import Inputs
from einmpi.compiled.planning import Planning, Residents
from einmpi.compiled.prepared_runs import (
    KnownCall,
    KnownCalls,
    PreparedRun,
    prepare_run,
    take_donated,
)
from einmpi.compiled.running import Measured, Runner, Workplace, workplace_of
from einmpi.compiled.sparse import (
    SparseCall,
    StoredJob,
    has_sparse,
    pattern_digest,
    stored_job,
    with_coordinates,
)
from einmpi.compiled.sparse_inputs import with_sparse_inputs
from einmpi.files.datasets import Dataset, files_as_read, is_unchanged
from einmpi.files.reading import find_planned
from einmpi.files.specs import Number
from einmpi.job.job import Job, options_of
from einmpi.late import late
from einmpi.planner.plan import Options, Plan
from einmpi.process.startup import first_use_seconds
from einmpi.runtime.actions import InputSource, RankFailure
from einmpi.runtime.gpu.copies import on_host
from einmpi.runtime.program import Checkpointer
from einmpi.schedule.layout import Layout
from einmpi.schedule.lower import arrival_layout, lower, result_layout
from einmpi.schedule.passes import fuse
from einmpi.schedule.schedule import Schedule
from einmpi.units import counted

# ---- results -------------------------------------------------------------------------------------
#
# The outputs of a compiled job as DistArrays.


MOST_PATTERNS = 4  # for which a compiled job is kept


class Results:
    """Makes the outputs of runs: this rank's blocks, their layouts, and where they come from."""

    def __init__(
        self,
        job: Job,
        comm: Comm,
        work: Workplace,
        files: Mapping[str, Dataset],
        has_carried: bool,
    ) -> None:
        self.job = job
        self.comm = comm
        self.work = work
        self.files = files  # in which inputs were found, as of the last call
        self.has_carried = has_carried
        self.parameters = {spec.name for spec in job.inputs if spec.value is not None}
        self.layouts: dict[int, dict[str, Layout]] = {}  # of outputs, by the id of the plan
        self.origins: dict[int, tuple[Plan, Origin]] = {}  # by the id of the plan

    def outputs(
        self, plan: Plan, blocks: Mapping[str, Any], given: Mapping[str, Any]
    ) -> dict[str, DistArray]:
        """Return the outputs of a run, given this rank's blocks of them and the inputs."""
        origin = self.origin(plan, given)
        found = {}
        for name in self.job.graph.outputs:
            if name in plan.unread:
                found[name] = self.unread(plan, name, blocks, origin)
            else:
                found[name] = self.output(plan, name, blocks.get(name), origin)
        return found

    def unread(self, plan: Plan, name: str, blocks: Mapping[str, Any], origin: Origin) -> DistArray:
        """Return an output that stays in pairs of blocks until it is read, given these."""
        rest = plan.unread[name]
        pairs = {}
        for vertex in rest.graph.inputs:
            pairs[vertex.name] = self.output(plan, vertex.name, blocks.get(vertex.name), origin)

        def bring() -> npt.NDArray[Any]:
            job = replace(self.job, graph=rest.graph, inputs=())
            schedule = fuse(lower(rest, self.comm.rank), rest, self.work.backend.fusions)
            runner = Runner(job, self.comm, self.work, may_share=False)
            found, _ = runner.run(rest, schedule, Inputs(job, pairs, {}))
            return self.output(rest, name, found.get(name), origin).local

        no_block = np.empty(0, rest.graph[name].dtype)
        layout = self.layout_of(rest, name)
        result = DistArray._of_run(no_block, layout, self.comm, origin, name)
        result._leave_unread(bring)
        return result

    def output(
        self, plan: Plan, name: str, local: npt.NDArray[Any] | None, origin: Origin
    ) -> DistArray:
        """Return an output, given this rank's block of it."""
        if local is None:
            vertex = plan.graph[name]
            local = np.empty((0,) * (len(vertex.bound) or 1), vertex.dtype)
        result = DistArray(local, self.layout_of(plan, name), self.comm)
        result.origin = origin
        result.tensor = name
        return result

    def layout_of(self, plan: Plan, name: str) -> Layout:
        """Return the layout of an output: the same object for all runs of a plan."""
        plan_layouts = self.layouts.setdefault(id(plan), {})
        layout = plan_layouts.get(name)
        if layout is None:
            layout = result_layout(plan, name)
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
        if not files and not self.parameters and not self.has_carried:
            # It is the same for all runs of this plan.
            self.origins[id(plan)] = plan, origin
        return origin


# ---- input files ---------------------------------------------------------------------------------
#
# The inputs of a job that come from files, looked up before they are read.


class InputFiles:
    """Where the inputs of a job were found in files."""

    def __init__(self, job: Job, comm: Comm, residents: Residents) -> None:
        self.job = job
        self.comm = comm
        self.residents = residents
        self.found: dict[str, Dataset] = {}

    def find(self, given: Collection[str], staying: Sequence[str]) -> None:
        """Look up the inputs in files that are not given; those that stay loaded only once.

        The ranks read together, so all have to find the same. They do this before every call: a
        file may change between two calls, but not between here and the end of reading.
        """
        if self.residents.is_shared:
            self._take_from_other_jobs(staying)
        vertices = self.job.graph.by_name
        wanted = []
        for spec in self.job.inputs:
            stays_loaded = spec.name in self.found and spec.name in staying
            if spec.file and spec.name in vertices and spec.name not in given and not stays_loaded:
                wanted.append(spec)

        def find() -> dict[str, Dataset]:
            found = {}
            for spec in wanted:
                dataset = self.found.get(spec.name)
                if dataset is None or not is_unchanged(dataset):
                    vertex = vertices[spec.name]
                    dataset = find_planned(spec, vertex.bound, vertex.dtype)
                found[spec.name] = dataset
            return found

        if wanted:
            found = together(self.comm, find, files_as_read)
            self.found.update(found)
            for name in staying:
                if name in found:
                    self.residents.files[name] = found[name]

    def forget(self) -> None:
        """Look up all inputs again before the next call."""
        self.found.clear()
        self.residents.files.clear()

    def _take_from_other_jobs(self, staying: Sequence[str]) -> None:
        """Note which inputs other jobs have loaded or forgotten since the last call."""
        for name in staying:
            known = self.residents.files.get(name)
            if known is None:
                self.found.pop(name, None)
            else:
                self.found[name] = known


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
        self.known_calls = KnownCalls(comm)
        self.reads_files = any(spec.file is not None for spec in job.inputs)
        self.reads_sparse = any(spec.key_dimensions for spec in job.inputs)
        self.residents: Residents = Residents() if share is None else share.residents
        self.resident = self.residents.blocks  # inputs that stay between calls
        self.residents.add_sources(job)
        if share is not None:
            self.residents.is_shared = True
            self.backend.resident = share.backend.resident
        self.planning = Planning(job, comm, options, self.work, self.residents)
        self.ready = self.planning.ready
        self.input_files = InputFiles(job, comm, self.residents)
        self.files = self.input_files.found
        self.runner = Runner(job, comm, self.work, self.planning.may_share)
        self.results = Results(job, comm, self.work, self.files, bool(options.carry))
        self.measured: Measured | None = None  # in the last call
        self.of_patterns: dict[str, tuple[StoredJob, Compiled]] = {}  # of sparse inputs
        self.last_sparse: SparseCall | None = None
        self.sparse_repetition = 1  # how often a job over stored elements is run, about

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
        if self.last_sparse is not None:
            known_sparse, used = self.last_sparse.find(inputs)
            if known_sparse is not None:
                return self._call_stored(self.last_sparse, known_sparse, used)
        inputs = as_plain_arrays(inputs)
        if self.reads_sparse:
            inputs = with_sparse_inputs(self.comm, self.job, inputs)
        known = self.known_calls.find(inputs)
        if known is None and has_sparse(inputs):
            return self._call_sparse(inputs)
        return self.call_as_known(known, inputs)

    def _call_sparse(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Do a call with sparse inputs: by a job over what is stored, one for each pattern."""
        given = with_coordinates(self.comm, self.job, inputs)
        key = pattern_digest(given)
        known = self.of_patterns.get(key)
        if known is None:
            stored = stored_job(self.comm, self.job, given)
            options = replace(
                options_of(stored.job), carry=self.options.carry, donate=self.options.donate
            )
            known = stored, Compiled(stored.job, self.comm, options)
            known[1].backend.repetition = max(self.backend.repetition, self.sparse_repetition)
            if len(self.of_patterns) >= MOST_PATTERNS:
                self.of_patterns.clear()
            self.of_patterns[key] = known
        stored, compiled = known
        used = stored.inputs(given)
        call = SparseCall(stored, compiled, inputs, given, used)
        self.last_sparse = None if self.options.donate else call
        return self._call_stored(call, compiled.known_calls.find(used), used)

    def _call_stored(
        self, call: SparseCall, known: KnownCall | None, inputs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Do a call of a job over what is stored, given the earlier one that all ranks know."""
        outputs = call.compiled.call_as_known(known, inputs)
        self.measured = call.compiled.measured
        return call.stored.results(outputs)

    def call_as_known(
        self, known: KnownCall | None, inputs: Mapping[str, Any]
    ) -> dict[str, DistArray]:
        """Do a call, given the earlier one that all ranks know. `__call__` looks for it first."""
        if known is not None and known.prepared is not None and self.runner.on_step is None:
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
                self.input_files.find(given, self.planning.staying(plan))
        else:
            with abort_on_divergence(self.comm):
                plan, schedule, given = self.prepare(inputs)
            self.known_calls.add(
                inputs,
                given,
                plan,
                schedule,
                lambda: self.planning.fingerprint(plan),
                self.reads_files,
            )
        sources = self._sources(inputs, given)
        blocks = self._run_call(plan, schedule, sources, known)
        outputs = self.results.outputs(plan, blocks, sources.given)
        if known is not None:
            self._prepare_next_call(known, inputs)
        return outputs

    def _run_call(
        self, plan: Plan, schedule: Schedule, sources: Inputs, known: KnownCall | None
    ) -> dict[str, Any]:
        """Execute the schedule of a call, and return this rank's blocks of the outputs.

        If it fails on a rank, all raise an error.
        """
        if self.comm.size == 1:
            blocks, self.measured = self.runner.run(plan, schedule, sources, wait=False)
            return blocks
        failure = RankFailure()
        with abort_on_divergence(self.comm):
            blocks, self.measured = self.runner.run(
                plan, schedule, sources, wait=False, failure=failure
            )
            first_failed = self._first_failed(known, failure)
        if first_failed is not None:
            self._raise_failure(first_failed)
        return blocks

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
        if not known.may_be_prepared or known.prepared is not None or known.plan.unread:
            return
        program = self.runner.program(known.schedule)
        if not program.is_bound:
            return  # it is bound in the next run, if at all
        known.may_be_prepared = False
        shared = self.runner.shared_memory(known.schedule)
        if shared is not None and shared.most_bytes_anywhere:
            return  # a prepared call knows nothing of groups that share memory, here or elsewhere
        layouts = {}
        for name in self.job.graph.outputs:
            layouts[name] = self.results.layout_of(known.plan, name)
        known.prepared = prepare_run(
            program,
            known.schedule,
            self.job,
            inputs,
            self.residents,
            layouts,
            self.work.prepare_taking,
        )

    def _call_prepared(
        self, known: KnownCall, prepared: PreparedRun, inputs: Mapping[str, Any]
    ) -> dict[str, DistArray] | None:
        """Do a call that is prepared; return None if another thread does it at this moment."""
        comm = self.comm
        # Without an object that counts: this call is to take a few microseconds.
        received = comm.received
        received_between = comm.received_between
        start = time.perf_counter()
        first_uses_before = first_use_seconds()
        first_failed = None

        def take_sources() -> InputSource:
            return self.work.storage(self._sources(inputs, dict(inputs)))

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
            prepared.program.peak,
            0,
            comm.received_between - received_between,
        )
        self.runner.log(self.measured)
        plan = known.plan
        origin = self.results.origin(plan, inputs)
        outputs = {}
        for name, layout in prepared.layouts.items():
            if name in blocks:
                outputs[name] = DistArray._of_run(blocks[name], layout, comm, origin, name)
            else:
                outputs[name] = self.results.output(plan, name, None, origin)
        return outputs

    def forget_inputs(self) -> None:
        """Release the inputs that stay loaded between calls. All ranks call it."""
        self.input_files.forget()
        self.residents.times_forgotten += 1
        self.resident.clear()
        self.backend.resident.clear()

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
        update_views(given)
        if checking:
            arrays = {name: on_host(array) for name, array in given.items() if is_array(array)}
            require_same_arrays(self.comm, "inputs", arrays)
        # However the carried ones are given, the plan says where they go.
        carried = self.options.carry
        arriving = [] if self.comm.size == 1 else inputs_for_grids(self.job.graph, given)
        placed = (*carried, *arriving)
        others = {name: array for name, array in given.items() if name not in placed}
        mesh = self.residents.mesh if self.residents.is_shared else None
        if move_to_one_mesh(others, mesh or self.options.mesh, self.job.graph):
            given.update(others)
        kinds = tuple((name, kind_of(given[name])) for name, _ in kinds if name in others)
        plan, schedule = self.planning.ready_for(kinds)
        for name in arriving:
            given[name] = given[name]._in_layout(arrival_layout(plan, name))
        for name in carried:
            array = given.get(name)
            if isinstance(array, DistArray):
                layout = result_layout(plan, name)
                given[name] = array if array.layout == layout else array.redistribute(layout)
        self.input_files.find(given, self.planning.staying(plan))
        return plan, schedule, given

    def run_schedule(
        self,
        plan: Plan,
        schedule: Schedule,
        sources: Inputs,
        checkpoints: Checkpointer | None = None,
    ) -> tuple[dict[str, DistArray], Measured]:
        """Execute the schedule, and return the outputs and what was measured."""
        blocks, measured = self.runner.run(plan, schedule, sources, checkpoints)
        return self.results.outputs(plan, blocks, sources.given), measured
