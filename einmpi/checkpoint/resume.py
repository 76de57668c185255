"""Prepare a run that can be interrupted: from its start, or from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, TypeAlias

from einmpi.checkpoint.load import Identity, Saved, SavedTensor
from einmpi.checkpoint.save import Checkpoints
from einmpi.comm.agreement import together
from einmpi.comm.base import Comm
from einmpi.compiled.program import Compiled
from einmpi.errors import InputError
from einmpi.files.claims import Claim
from einmpi.files.specs import InputSpec
from einmpi.graph.remainder import rest, saved_name
from einmpi.job.job import Job
from einmpi.planner.plan import Options, Plan
from einmpi.schedule.remainder import remaining
from einmpi.schedule.schedule import Schedule

# What to run, and the inputs that the checkpoint gives.
Prepared: TypeAlias = tuple[Compiled, Plan, Schedule, dict[str, Any]]


def open_checkpoints(
    job: Job,
    comm: Comm,
    folder: str,
    every: float,
    resume: bool,
    asked: Sequence[str] = (),
    quiet: bool = False,
    claim: Claim | None = None,
) -> Checkpoints:
    """Return the checkpoints of a run that is about to begin and has this claim to the folder.

    With `resume`, they have the checkpoint from which the run continues, if there is one.
    """
    job_identity = together(comm, lambda: identity(job))
    checkpoints = Checkpoints(folder, every, comm, job.graph, job_identity, asked, quiet, claim)
    checkpoints.find(resume)
    return checkpoints


def prepare(
    job: Job, comm: Comm, options_of: Callable[[Job], Options], checkpoints: Checkpoints | None
) -> Prepared:
    """Return what to run.

    If the plan is the one that made the checkpoint, the rest of its schedule is run, and results
    have the same bits as without an interruption. Otherwise, on another number of ranks, there is
    a new plan for the rest of the graph.
    """
    saved = None if checkpoints is None else checkpoints.saved
    if saved is None or saved.ranks == comm.size:
        compiled = Compiled(job, comm, together(comm, lambda: options_of(job)))
        plan, schedule, _ = compiled.prepare({})
        if checkpoints is not None:
            checkpoints.starts(plan.digest, schedule.points)
        if checkpoints is None or saved is None:
            return compiled, plan, schedule, {}
        if saved.plan == plan.digest:
            restored = [point for point in schedule.points if point.vertex in saved.blocks]
            checkpoints.restored = tuple(restored)
            return compiled, plan, remaining(schedule, saved.done), {}
    assert checkpoints is not None
    rest_of_job = replace(job, graph=rest(job.graph, saved.done))
    compiled = Compiled(rest_of_job, comm, together(comm, lambda: options_of(rest_of_job)))
    plan, schedule, given = compiled.prepare(_saved_tensors(job, saved))
    checkpoints.starts(plan.digest, schedule.points)
    return compiled, plan, schedule, given


def _saved_tensors(job: Job, saved: Saved) -> dict[str, SavedTensor]:
    tensors = {}
    for name in saved.blocks:
        vertex = job.graph[name]
        assert vertex.einsum is not None
        aggregation = vertex.einsum.aggregation
        tensors[saved_name(name)] = SavedTensor(saved, name, vertex.bound, aggregation)
    return tensors


def identity(job: Job) -> Identity:
    """Return what must be equal for two runs to give the same numbers, up to rounding.

    The number of ranks, the strategy and the threads may differ.
    """
    program = sha256(f"{job.graph}\n{job.fast_math}\n{job.strict}".encode()).hexdigest()
    parts = {"the program with its sizes": program}
    for spec in job.inputs:
        if spec.name in job.graph.by_name:
            parts[f"the input {spec.name}"] = _describe_input(spec)
    return parts


def _describe_input(spec: InputSpec) -> str:
    """Return a text about an input.

    A file counts as the same until it is written to; it may be found in another folder.
    """
    tensor = f"{spec.dtype}{list(spec.shape or ())}"
    if spec.file is None:
        return f"{spec.random} {tensor}, seed {spec.seed}, {spec.low} to {spec.high}"
    try:
        status = os.stat(spec.file)
    except OSError as error:
        raise InputError(
            spec.place, f"{spec.file}: {error.strerror or error}", "a readable file"
        ) from None
    return (
        f"{os.path.basename(spec.file)}:{spec.inside or None} rows {spec.rows} {tensor}, "
        f"{status.st_size} bytes, written at {status.st_mtime_ns} ns"
    )
