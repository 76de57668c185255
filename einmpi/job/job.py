"""The Job: what to compute, where tensors come from and go, and how it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from einmpi.errors import InputError, one_of
from einmpi.files.specs import InputSpec, OutputSpec
from einmpi.graph.eingraph import EinGraph
from einmpi.job.backends import backend_record
from einmpi.job.history import HistorySpec
from einmpi.job.loop import Loop
from einmpi.kernels.cpu.blas_library.records import AUTO_BLAS
from einmpi.language.half_steps import HALF_MODES, round_every_step
from einmpi.language.parse import rewrite
from einmpi.language.syntax import Source
from einmpi.late import late
from einmpi.planner.moving.overlap import MODES
from einmpi.planner.saving_memory.recompute import AUTO

SHARED_MODES = ("auto", "off")  # of memory that the ranks of a node share; the first is the default


@dataclass(frozen=True)
class Job:
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
    strategy : str
        How the plan is chosen.
    memory : int or None
        The limit in bytes per rank.
    recompute : str or tuple of str
        "auto" if tensors may be dropped and computed again to stay within the limit, "none" if not;
        or the names of tensors for which this is done in any case.
    backend : str
        What computes: the name of a backend.
    fast_math : bool
        Whether faster, less exact arithmetic is allowed.
    roles : mapping of str to tuple of str
        The labels that have each role.
    graph : EinGraph
        The program as a graph of EinSums, rewritten to be cheap. It is what is planned and run.
    written : EinGraph
        The same program before it is rewritten. The reference evaluates it.
    machine : str or None
        The file with measured times of a machine.
    scratch : str or None
        The folder for tensors that do not fit into memory; None for the system's default.
    strict : bool
        Whether only rewrites are made that are exact for all values, inf and nan included.
    half : str
        "float32" if float16 and bfloat16 are computed in float32 and rounded once a statement,
        "steps" if they are rounded after every operation.
    blas : str
        Which BLAS multiplies matrices: "auto", "numpy", or the name of a library.
    overlap : str
        "auto" if kernels may run while tensors move between nodes, "off" if not.
    shared : str
        "auto" if the ranks of a node share memory where they can, "off" if they only exchange
        messages.
    loop : Loop or None
        How the program is repeated; None if it runs once.
    loops : tuple of Job
        If several loops follow one another, each as a job of its own. `source`, `graph`, `written`
        and `loop` are then those of the first one.

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
    strategy: str
    memory: int | None
    backend: str
    fast_math: bool
    roles: Mapping[str, tuple[str, ...]]
    graph: EinGraph
    written: EinGraph
    recompute: str | tuple[str, ...] = AUTO
    machine: str | None = None
    scratch: str | None = None
    strict: bool = False
    half: str = "float32"
    blas: str = AUTO_BLAS
    blas_place: str = field(default="", compare=False, repr=False)  # in the job file
    overlap: str = AUTO
    shared: str = SHARED_MODES[0]
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
        found = []
        for job in self.loops:
            with_settings = replace(
                job,
                strategy=self.strategy,
                memory=self.memory,
                backend=self.backend,
                fast_math=self.fast_math,
                machine=self.machine,
                scratch=self.scratch,
                blas=self.blas,
                blas_place=self.blas_place,
                overlap=self.overlap,
                shared=self.shared,
            )
            found.append(with_settings)
        return tuple(found)

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


def with_shared(job: Job, shared: str) -> Job:
    """Return the job with this setting of `shared`."""
    if shared not in SHARED_MODES:
        raise InputError("shared", f"shared is {shared!r:.60}", one_of(SHARED_MODES, str(shared)))
    return replace(job, shared=shared)


def with_strict(job: Job, strict: bool) -> Job:
    """Return the job with this setting of `strict`, and with the graph that it gives."""
    loops = tuple(with_strict(loop, strict) for loop in job.loops)
    graph = rewrite(job.source, job.as_computed, strict)
    return replace(job, strict=strict, graph=graph, loops=loops)


def with_overlap_mode(job: Job, overlap: str) -> Job:
    """Return the job with this setting of `overlap`."""
    if overlap not in MODES:
        raise InputError("overlap", f"overlap is {overlap!r:.60}", one_of(MODES, str(overlap)))
    return replace(job, overlap=overlap)


def with_half(job: Job, half: str) -> Job:
    """Return the job with this setting of `half`, and with the graph that it gives."""
    if half == job.half:
        return job
    if half not in HALF_MODES:
        raise InputError("half", f"half is {half!r:.60}", one_of(HALF_MODES, str(half)))
    loops = tuple(with_half(loop, half) for loop in job.loops)
    changed = replace(job, half=half, loops=loops)
    return replace(changed, graph=rewrite(job.source, changed.as_computed, job.strict))


def loop_of(job: Job) -> Loop:
    """Return the loop of a job that has one."""
    assert job.loop is not None, f"{job} has no loop"
    return job.loop
