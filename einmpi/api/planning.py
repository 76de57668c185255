"""Plan a job: what a job and a call ask of a plan, and the plan."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from einmpi.arguments import as_int, named_values, optional_text, path_name
from einmpi.errors import InputError
from einmpi.files.load import decoded_bytes
from einmpi.job.backends import backend_record
from einmpi.job.job import (
    Job,
    may_share_memory,
    with_half,
    with_overlap_mode,
    with_shared,
    with_strict,
)
from einmpi.job.recompute import checked_recompute
from einmpi.planner.moving.overlap import MODES
from einmpi.planner.strategies import DEFAULT_STRATEGY
from einmpi.units import parse_bytes

if TYPE_CHECKING:
    from einmpi.planner.machine import Machine
    from einmpi.planner.plan import Options, Plan


class Settings(NamedTuple):
    """What a call says about how a job is planned and run; the job decides where it is None."""

    strategy: str | None = None
    memory: int | str | None = None
    recompute: str | Sequence[str] | None = None
    pin: Mapping[str, Sequence[int]] | None = None
    machine: str | os.PathLike[str] | Machine | None = None
    fast_math: bool | None = None
    strict: bool | None = None
    half: str | None = None
    overlap: str | None = None
    shared: str | None = None

    def applied_to(self, job: Job) -> Job:
        """Return the job with those of the settings that are a part of it."""
        if self.fast_math is not None:
            job = replace(job, fast_math=truth_value("fast_math", self.fast_math))
        if self.strict is not None:
            job = with_strict(job, truth_value("strict", self.strict))
        if self.half is not None:
            job = with_half(job, self.half)
        if self.overlap is not None:
            job = with_overlap_mode(job, self.overlap)
        if self.shared is not None:
            job = with_shared(job, self.shared)
        return job

    def options(self, job: Job, nodes: int = 1) -> Options:
        """Return what these settings and the job ask of a plan."""
        return options_of(
            job, self.strategy, self.memory, self.pin, self.machine, nodes, self.recompute
        )


def options_of(
    job: Job,
    strategy: str | None = None,
    memory: int | str | None = None,
    pin: Mapping[str, Sequence[int]] | None = None,
    machine: str | os.PathLike[str] | Machine | None = None,
    nodes: int = 1,
    recompute: str | Sequence[str] | None = None,
) -> Options:
    """Return what a job asks of a plan; the other arguments take precedence over the job."""
    # Imported here so that `import einmpi` stays fast.
    from einmpi.planner.plan import Options

    limit = job.memory if memory is None else parse_bytes(str(memory), "memory")
    used_inputs = [spec for spec in job.inputs if spec.name in job.graph.by_name]
    pins: dict[str, tuple[int, ...]] = {}
    places: dict[str, str] = {}
    for spec in used_inputs:
        if spec.parts is not None:
            pins[spec.name] = spec.parts
            places[spec.name] = spec.place
    for output in job.outputs:
        if output.parts is not None:
            pins[output.name] = output.parts
            places[output.name] = output.place
    for name, parts in named_values("pin", pin).items():
        pins[name] = tuple(parts) if isinstance(parts, Iterable) else (parts,)
        places.pop(name, None)
    again = job.recompute
    if recompute is not None:
        again = checked_recompute("recompute", recompute, job.written)
    backend = backend_record(job.backend)
    decoded = 0
    if limit is not None and backend.is_on_host:
        decoded = max(map(decoded_bytes, used_inputs), default=0)
    return Options(
        strategy=optional_text("strategy", "strategy", strategy, DEFAULT_STRATEGY) or job.strategy,
        memory=limit,
        decoded=decoded,
        recompute=again,
        chain_bytes=backend.chain_bytes,
        operations_of_a_byte=backend.operations_of_a_byte,
        resident=tuple(spec.name for spec in used_inputs if spec.resident is True),
        fitting=tuple(spec.name for spec in used_inputs if spec.resident == "fit"),
        pins=pins,
        roles=job.roles,
        nodes=nodes,
        machine=_machine(job, machine),
        overlap=job.overlap == MODES[0],
        files=tuple(spec.name for spec in used_inputs if spec.file is not None),
        pin_places=places,
    )


def _machine(job: Job, given: str | os.PathLike[str] | Machine | None) -> Machine | None:
    """Return the machine whose times are minimised; None if bytes are."""
    from einmpi.planner.machine import Machine, read_machine

    if isinstance(given, Machine):
        machine = given
    else:
        file = job.machine if given is None else path_name("machine", given)
        if file is None:
            return None
        machine = read_machine(file)
    return machine if may_share_memory(job) else replace(machine, shared=False)


def plan(
    job: Job,
    ranks: int,
    *,
    strategy: str | None = None,
    memory: int | str | None = None,
    recompute: str | Sequence[str] | None = None,
    pin: Mapping[str, Sequence[int]] | None = None,
    nodes: int = 1,
    machine: str | os.PathLike[str] | Machine | None = None,
    strict: bool | None = None,
    half: str | None = None,
    overlap: str | None = None,
) -> Plan:
    """Plan how a job is cut over ranks. No MPI is started and no data is read.

    ``print(plan)`` shows what the command ``einmpi plan`` prints.

    Parameters
    ----------
    job : Job
        What to compute.
    ranks : int
        The number of ranks.
    strategy : str, optional
        How cuts are chosen; by default as the job says.
    memory : int or str, optional
        The limit per rank, in bytes or as a text such as ``"4 GiB"``; by default as the job says.
    recompute : str or sequence of str, optional
        ``"auto"`` to drop tensors and compute them again where the limit asks for it, ``"none"``
        not to, or the names of tensors for which to do it in any case; by default as the job says.
    pin : mapping of str to sequence of int, optional
        For inputs and outputs, into how many parts each dimension has to be cut.
    nodes : int, optional
        The number of nodes. Each has the same number of ranks.
    machine : path, optional
        A file that ``einmpi calibrate`` has written. The plan is then made for the times in it,
        and has ``seconds_predicted``.
    strict : bool, optional
        Whether to make only rewrites that are exact for all values, inf and nan included; by
        default as the job says.
    half : {"float32", "steps"}, optional
        Whether float16 and bfloat16 are computed in float32 and rounded once a statement, or
        rounded after every operation, as numpy does; by default as the job says.
    overlap : {"auto", "off"}, optional
        Whether kernels may run while tensors move between nodes; by default as the job says.

    Returns
    -------
    Plan
        The plan.

    Raises
    ------
    InputError
        An argument is wrong, or no plan stays within the memory limit.

    Examples
    --------
    >>> job = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(400, 300), B=(300, 400))
    >>> einmpi.plan(job, ranks=4).parts("Z")
    {'i': 2, 'k': 2, 'j': 1}
    >>> einmpi.plan(job, ranks=4, pin={"A": (4, 1), "Z": (4, 1)}).words_predicted
    320000
    """
    from einmpi.planner.make_plan import make_plan

    settings = Settings(
        strategy, memory, recompute, pin, machine, strict=strict, half=half, overlap=overlap
    )
    job = settings.applied_to(check_job("plan", job))

    def options(of_job: Job) -> Options:
        return settings.options(of_job, as_int(nodes))

    ranks = as_int(ranks)
    if job.loop is not None:
        from einmpi.loops.planning import plan_loops  # it imports much that others do not need

        return plan_loops(job, ranks, options)
    return make_plan(job.graph, ranks, options(job))


def truth_value(name: str, given: bool) -> bool:
    """Return a truth value that a caller gave; refuse anything else."""
    if not isinstance(given, bool):
        raise InputError(name, f"{given!r} is not a truth value", "True or False")
    return given


def check_job(where: str, job: Job) -> Job:
    """Return a job that a caller gave; refuse anything else."""
    if not isinstance(job, Job):
        raise InputError(
            where,
            f"job is {type(job).__name__}",
            "a Job",
            "einmpi.load and einmpi.program make one",
        )
    return job
