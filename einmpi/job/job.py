"""The Job: what to compute, where tensors come from and go, and how it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from einmpi.errors import InputError
from einmpi.files.reading import decoded_bytes
from einmpi.files.specs import InputSpec, OutputSpec
from einmpi.graph.eingraph import EinGraph
from einmpi.job.loop import Loop
from einmpi.job.outputs import HistorySpec
from einmpi.job.settings import (
    SETTINGS,
    SHARED_MODES,
    Settings,
    backend_record,
    checked_recompute,
    with_settings_listed,
)
from einmpi.language.parse import rewrite
from einmpi.language.statements import round_every_step
from einmpi.language.syntax import Source
from einmpi.late import late
from einmpi.planner.moving.overlap import MODES

if TYPE_CHECKING:
    from einmpi.planner.machine import Machine
    from einmpi.planner.plan import Options

# What each of several loops has of its own: the graph of a step depends on it, or its names do.
_OF_EACH_LOOP = ("strict", "half", "recompute")


@with_settings_listed
@dataclass(frozen=True)
class Job(Settings):
    """A checked description of what to compute. `einmpi.load` and `einmpi.program` make it.

    Attributes
    ----------
    title : str
        What the job is called in output.
    path : str
        The job file; empty for a job made by `einmpi.program`.
    source : Source
        The text of the program.
    dtype : str
        The dtype of generated inputs that do not name their own.
    sizes : mapping of str to int
        The named sizes, evaluated.
    inputs : tuple of InputSpec
        Where tensors come from.
    outputs : tuple of OutputSpec
        Where results go.
    roles : mapping of str to tuple of str
        The labels that have each role.
    graph : EinGraph
        The program as a graph of EinSums, rewritten to be cheap. It is what is planned and run.
    written : EinGraph
        The same program before it is rewritten. The reference evaluates it.
    loop : Loop or None
        How the program is repeated; None if it runs once.
    loops : tuple of Job
        If several loops follow one another, each as a job of its own. `source`, `graph`, `written`
        and `loop` are then those of the first one.
    {settings}

    Raises
    ------
    InputError
        `strict` and `fast_math` are both set.

    Examples
    --------
    >>> job = einmpi.program("n = sum(X[i]**2)", X=(2,))
    >>> print(job.graph["n"])
    n ← Σ[i](X[i] ** 2)
    """

    title: str
    path: str
    source: Source
    dtype: str
    sizes: Mapping[str, int]
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    roles: Mapping[str, tuple[str, ...]]
    graph: EinGraph
    written: EinGraph
    blas_place: str = field(default="", compare=False, repr=False)  # in the job file
    loop: Loop | None = None
    loops: tuple[Job, ...] = ()

    @property
    def as_computed(self) -> EinGraph:
        """The program as written, with the casts that `half` asks for."""
        if self.half == "steps":
            return round_every_step(self.written)
        return self.written

    @property
    def histories(self) -> tuple[HistorySpec, ...]:
        """The files that get the values that loops record."""
        found = []
        for job in self.loops or (self,):
            if job.loop is not None and job.loop.history is not None:
                found.append(job.loop.history)
        return tuple(found)

    def one_after_another(self) -> tuple[Job, ...]:
        """Return the loops as jobs with the settings of this one; itself if it has only one."""
        if not self.loops:
            return (self,)
        settings = {}
        for name in SETTINGS:
            if name not in _OF_EACH_LOOP:
                settings[name] = getattr(self, name)
        return tuple(replace(job, **settings, blas_place=self.blas_place) for job in self.loops)

    def __post_init__(self) -> None:
        if self.strict and self.fast_math:
            raise InputError(
                self.path or self.source.name,
                "strict and fast_math are both true",
                "at most one of them",
            )

    def __repr__(self) -> str:
        inputs = ", ".join(vertex.name for vertex in self.graph.inputs)
        outputs = ", ".join(self.graph.outputs)
        return f"<Job {self.title or self.source.name}: {inputs} → {outputs}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        text: str = late("job_html")(self)
        return text


def may_share_memory(job: Job) -> bool:
    """Return whether the ranks of a node may share memory, if the system lets them."""
    return job.shared == SHARED_MODES[0] and backend_record(job.backend).is_on_host


def with_settings(job: Job, given: Mapping[str, Any], as_flags: bool = False) -> Job:
    """Return the job with settings that keywords or flags give, and with the graph they make.

    All are checked. Those that are None stay as the job says.
    """
    values: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        where = SETTINGS[name].flag if as_flags else name
        values[name] = SETTINGS[name].check(where, value)
        if name == "recompute":
            values[name] = checked_recompute(where, value, job.written)
        elif name == "blas":
            values["blas_place"] = where
    if not values:
        return job
    loops = tuple(with_settings(loop, given, as_flags) for loop in job.loops)
    changed = replace(job, **values, loops=loops)
    if (changed.strict, changed.half) == (job.strict, job.half):
        return changed
    return replace(changed, graph=rewrite(job.source, changed.as_computed, changed.strict))


def options_of(job: Job, nodes: int = 1, **settings: Any) -> Options:
    """Return what a job asks of a plan; settings take precedence over those of the job."""
    # Imported here so that a job can be made without the planner.
    from einmpi.planner.plan import Options

    job = with_settings(job, settings)
    used_inputs = [spec for spec in job.inputs if spec.name in job.graph.by_name]
    pins: dict[str, tuple[int, ...]] = {}
    places: dict[str, str] = {}
    tensors: list[InputSpec | OutputSpec] = [*used_inputs, *job.outputs]
    for each in tensors:
        if each.parts is not None:
            pins[each.name] = each.parts
            places[each.name] = each.place
    for name, parts in (job.pin or {}).items():
        pins[name] = parts
        places.pop(name, None)
    backend = backend_record(job.backend)
    decoded = 0
    if job.memory is not None and backend.is_on_host:
        decoded = max(map(decoded_bytes, used_inputs), default=0)
    return Options(
        strategy=job.strategy,
        memory=job.memory,
        decoded=decoded,
        recompute=job.recompute,
        chain_bytes=backend.chain_bytes,
        operations_of_a_byte=backend.operations_of_a_byte,
        resident=tuple(spec.name for spec in used_inputs if spec.resident is True),
        fitting=tuple(spec.name for spec in used_inputs if spec.resident == "fit"),
        pins=pins,
        roles=job.roles,
        nodes=nodes,
        machine=machine_of(job),
        overlap=job.overlap == MODES[0],
        files=tuple(spec.name for spec in used_inputs if spec.file is not None),
        pin_places=places,
    )


def machine_of(job: Job) -> Machine | None:
    """Return the machine whose times are minimised; None if bytes are."""
    from einmpi.planner.machine import read_machine

    machine = job.machine
    if isinstance(machine, str):
        machine = read_machine(machine)
    if machine is None or may_share_memory(job):
        return machine
    return replace(machine, shared=False)


def loop_of(job: Job) -> Loop:
    """Return the loop of a job that has one."""
    assert job.loop is not None, f"{job} has no loop"
    return job.loop
