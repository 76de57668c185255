"""The plans of a job, one for each way in which its inputs are given, and their schedules."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TypeAlias

from einmpi.comm.agreement import agree_on_calls, describe_argument, together
from einmpi.comm.base import Comm, even_nodes, sharing_nodes
from einmpi.compiled.given_inputs import GivenArray, InputKind, Kinds, with_inputs
from einmpi.compiled.inputs import Blocks
from einmpi.compiled.running import Workplace
from einmpi.compiled.stored_inputs import plan_with_files
from einmpi.errors import InputError
from einmpi.files.datasets import Dataset
from einmpi.files.specs import InputSpec
from einmpi.job.job import Job
from einmpi.job.settings import compared_settings
from einmpi.kernels.cpu.blas_library.choice import describe_blas_in_use
from einmpi.log import LOGGER
from einmpi.planner.mesh import Mesh
from einmpi.planner.plan import FittedInputs, Options, Plan
from einmpi.runtime.cpu.backend import NumpyBackend
from einmpi.runtime.host_memory import check_folder
from einmpi.runtime.sharing.inputs import find_shared_inputs
from einmpi.schedule.layout import Layout
from einmpi.schedule.lower import arrival_layout, lower
from einmpi.schedule.passes import fuse
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Load, numbered
from einmpi.schedule.two_level import bytes_between
from einmpi.version import __version__

# ---- residents -----------------------------------------------------------------------------------
#
# Inputs that stay loaded between calls: of one compiled job, or of several that share them.


@dataclass
class Residents:
    """The inputs of one rank that stay loaded, and how they are cut.

    Jobs that share them have the same object. The job that is planned first chooses the layouts,
    and the plans of the others keep to them. Memory is freed with the last of these jobs.
    """

    blocks: Blocks = field(default_factory=dict)  # in host memory
    files: dict[str, Dataset] = field(default_factory=dict)  # where they were found
    layouts: dict[str, Layout] = field(default_factory=dict)
    sources: dict[str, InputSpec] = field(default_factory=dict)  # where jobs say they come from
    is_shared: bool = False
    is_decided: bool = False  # whether a plan has chosen which inputs stay loaded
    times_forgotten: int = 0  # how often what was loaded has been given up

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the layouts, None as long as there are none."""
        for layout in self.layouts.values():
            return layout.mesh
        return None

    def add_sources(self, job: Job) -> None:
        """Note where the inputs come from that stay loaded for a job."""
        for spec in _resident_specs(job):
            self.sources.setdefault(spec.name, spec)

    def check_sources(self, job: Job) -> None:
        """Refuse a job that has nothing to share, or takes an input from another source."""
        common = [spec for spec in _resident_specs(job) if spec.name in self.sources]
        if not common:
            what = "the two jobs have no resident input in common"
            raise InputError("compile", what, "inputs of the same name that are resident in both")
        for spec in common:
            known = self.sources[spec.name]
            if _source_of(spec) != _source_of(known):
                what = f"{spec.name} is {_shown(spec)} here"
                what += f" and {_shown(known)} in the job to share with"
                raise InputError("compile", what, "the same source in both jobs")

    def add_layouts(self, plan: Plan, names: tuple[str, ...]) -> None:
        """Note how a plan cuts inputs that stay loaded, unless an earlier plan has cut them."""
        self.is_decided = True
        if self.mesh not in (None, plan.mesh):
            return  # this plan leaves other ranks idle
        for name in names:
            if plan.graph.consumers.get(name):
                self.layouts.setdefault(name, arrival_layout(plan, name))

    def with_layouts(self, options: Options, names: tuple[str, ...]) -> Options:
        """Return options for a plan that takes these inputs as they lie.

        What the first plan could not keep is not kept by the others: all have the same limit.
        """
        layouts = {}
        orders = dict(options.orders)
        for name in names:
            if name in self.layouts and name not in options.given:
                layouts[name] = self.layouts[name].cuts
                orders[name] = self.layouts[name].orders
        return replace(
            options,
            mesh=self.mesh or options.mesh,
            given={**options.given, **layouts},
            orders=orders,
            resident=tuple(name for name in options.resident if name not in layouts),
            fitting=() if self.is_decided else options.fitting,
            pins={name: parts for name, parts in options.pins.items() if name not in layouts},
            shared=tuple(layouts),
        )


def _resident_specs(job: Job) -> list[InputSpec]:
    """Return the inputs that stay loaded. Parameters are numbers that calls may give anew."""
    found = []
    for spec in job.inputs:
        is_used = spec.name in job.graph.by_name
        if spec.resident and spec.value is None and is_used:
            found.append(spec)
    return found


def _source_of(spec: InputSpec) -> InputSpec:
    """Return an input with only what its values depend on."""
    return replace(
        spec,
        file=None if spec.file is None else os.path.abspath(spec.file),
        declared_shape=None,
        declared_dtype=None,
        follow=(),
        resident=True,
        parts=None,
        place="",
    )


def _shown(spec: InputSpec) -> str:
    """Return where an input comes from, for a message."""
    tensor = f"{spec.dtype}{list(spec.shape or ())}"
    if spec.file is None:
        return f"{tensor}, {spec.random} with seed {spec.seed},"
    inside = f":{spec.inside}" if spec.inside else ""
    selected = " (a part)" if spec.slices else ""
    return f"{tensor} of {spec.file}{inside}{selected}"


# What all ranks agree on before they run: the plan and this rank's schedule.
Ready: TypeAlias = tuple[Plan, Schedule]


class Planning:
    """Makes the plans of a job when inputs are first given in a new way, and keeps them."""

    def __init__(
        self, job: Job, comm: Comm, options: Options, work: Workplace, residents: Residents
    ) -> None:
        self.job = job
        self.comm = comm
        self.options = options
        self.work = work
        self.residents = residents
        self.ready: dict[Kinds, Ready] = {}
        # By the id of a plan, which is kept too.
        self.fingerprints: dict[int, tuple[Plan, str]] = {}
        # Whether transfers go on while kernels run. A schedule that is cut at a save point is
        # arranged for that afterwards.
        self.overlaps = True

    def ready_for(self, kinds: Kinds) -> Ready:
        """Return the plan for inputs that are given in this way, and this rank's schedule.

        All ranks call it. They agree on the plan, whether it is new or known, or all raise an
        error.
        """
        if kinds not in self.ready:
            self.ready[kinds] = self.make_ready(kinds)
        else:  # other ranks may call another program
            known = self.ready[kinds]
            together(self.comm, lambda: known, lambda ready: self.fingerprint(ready[0]))
        return self.ready[kinds]

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
        """Make the plan for inputs that are given in this way, and this rank's schedule.

        All ranks agree on the plan, or all raise an error.
        """
        if self.comm.size > 1:  # by their settings ranks decide what they ask each other next
            self.comm.calls.note(f"compile({self.settings})")
            agree_on_calls(self.comm)
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
        loaded = tuple(name for name in self.staying(plan) if name not in given)
        self.residents.add_layouts(plan, loaded)
        return plan, schedule

    def staying(self, plan: Plan) -> tuple[str, ...]:
        """Return the inputs of the job that a plan keeps loaded between calls."""
        return tuple(name for name in self.options.may_stay if name in plan.resident)

    @property
    def may_share(self) -> bool:
        """Whether ranks of a node may share memory, if the system lets them."""
        is_on_host = isinstance(self.work.backend, NumpyBackend)
        return self.job.shared == "auto" and self.comm.size > 1 and is_on_host

    def fingerprint(self, plan: Plan) -> str:
        """Return a text that is equal on ranks that are about to do the same."""
        known = self.fingerprints.get(id(plan))
        if known is None:
            fingerprint = _fingerprint(self.job, plan, self.settings)
            known = self.fingerprints[id(plan)] = plan, fingerprint
        return known[1]

    @property
    def settings(self) -> str:
        """All that ranks have to set alike, as a text."""
        settings = {}
        for name, usual in vars(Options()).items():
            value = getattr(self.options, name)
            # Files may have other paths on each node; how they are stored is compared by itself.
            if value != usual and name not in ("pin_places", "stored"):
                settings[name] = value
        if self.options.machine is not None:
            settings["machine"] = self.options.machine.digest
        settings |= compared_settings(self.job)
        return describe_argument({**settings, "share": self.residents.is_shared})

    def _plan_and_lower(self, kinds: Kinds, nodes: Sequence[int]) -> Ready:
        """Plan, and lower the plan. `nodes` are those whose ranks share memory, if they may."""
        plan = self._plan(kinds)
        if plan.spilled:
            check_folder(self.job.scratch, self.job.source.name)
        schedule = lower(plan, self.comm.rank)
        saved = 0
        if nodes:
            shared = find_shared_inputs(schedule, nodes)
            for _, load in numbered(schedule.steps, Load):
                if load.slot.name in shared and load.tensor not in dict(kinds):
                    saved += shared[load.slot.name].bytes_saved(load.slot)
        needed = plan.peak - plan.ahead - plan.overlap - saved
        for each in plan.unread.values():
            needed = max(needed, each.peak)
        self.work.check_memory(self.job.source.name, needed)
        return plan, fuse(schedule, plan, self.work.backend.fusions, self.overlaps)

    def _plan(self, kinds: Kinds) -> Plan:
        # If nodes have different numbers of ranks, the mesh has one level, and the ranks count
        # what moves between nodes from their schedules.
        options = replace(
            with_inputs(self.options, kinds, self.job.backend),
            nodes=max(self.comm.nodes) + 1,
            uneven=even_nodes(self.comm) is None,
            overlap=self.options.overlap and self.work.comm.serves_threads,
        )
        if self.residents.is_shared:
            given = dict(kinds)
            loaded = tuple(name for name in self.options.may_stay if name not in given)
            options = self.residents.with_layouts(options, loaded)
        plan = plan_with_files(self.job.graph, self.comm.size, options)
        if self.options.fitting and plan.fitted is None:
            plan = replace(plan, fitted=self._fitted_by_others(plan, kinds))
        return plan

    def _fitted_by_others(self, plan: Plan, kinds: Kinds) -> FittedInputs:
        """Return which inputs stay loaded, where a job that shares them has decided that."""
        given = dict(kinds)
        names = [name for name in self.options.fitting if name not in given]
        kept = tuple(name for name in names if name in plan.resident)
        return FittedInputs(kept, tuple(name for name in names if name not in plan.resident))


def _fingerprint(job: Job, plan: Plan, settings: str) -> str:
    """Return a text that is equal on ranks that are about to do the same."""
    inputs = []
    for input_spec in job.inputs:
        file = os.path.basename(input_spec.file or "")
        inputs.append(replace(input_spec, place="", file=file, follow=()))
    outputs = []
    for output_spec in job.outputs:
        outputs.append(replace(output_spec, place="", file=os.path.basename(output_spec.file)))
    blas = describe_blas_in_use()  # another one rounds otherwise
    agreed = (__version__, plan.digest, settings, plan.overlapped, blas, inputs, outputs)
    return sha256(repr(agreed).encode()).hexdigest()
