"""A job whose run can be interrupted: prepared from its start, or from the checkpoint that another run has left."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from einmpi.checkpoint.load import Identity, Saved, SavedTensor
from einmpi.checkpoint.save import Checkpoints
from einmpi.comm.agreement import together
from einmpi.comm.base import Comm
from einmpi.compiled.program import Compiled
from einmpi.errors import InputError
from einmpi.files.specs import InputSpec
from einmpi.graph.remainder import rest, saved_name
from einmpi.job.job import Job
from einmpi.planner.make_plan import Options, Plan
from einmpi.schedule.remainder import remaining
from einmpi.schedule.schedule import Schedule

Prepared = tuple[
    Compiled, Plan, Schedule, dict[str, Any]
]  # the last are inputs that the checkpoint gives


def open_checkpoints(
    job: Job,
    comm: Comm,
    folder: str,
    every: float,
    resume: bool,
    asked: Sequence[str] = (),
    quiet: bool = False,
) -> Checkpoints:
    """The checkpoints of a run that is about to begin, with the one it goes on from where there is one."""
    found = Checkpoints(
        folder, every, comm, job.graph, together(comm, lambda: identity(job)), asked, quiet
    )
    found.find(resume)
    return found


def prepare(
    job: Job, comm: Comm, options_of: Callable[[Job], Options], checkpoints: Checkpoints | None
) -> Prepared:
    """What to run. Where the plan is that of the checkpoint, the rest of its schedule: the results have the same bits
    as without an interruption. Else, on another number of ranks, a new plan for the rest of the graph."""
    saved = checkpoints.saved if checkpoints is not None else None
    if saved is None or saved.ranks == comm.size:
        compiled = Compiled(job, comm, together(comm, lambda: options_of(job)))
        plan, schedule, _ = compiled.prepare({})
        if checkpoints is not None:
            checkpoints.starts(plan.digest, schedule.points)
        if checkpoints is None or saved is None:
            return compiled, plan, schedule, {}
        if saved.plan == plan.digest:
            checkpoints.restored = tuple(
                point for point in schedule.points if point.vertex in saved.blocks
            )
            return compiled, plan, remaining(schedule, saved.done), {}
    assert checkpoints is not None
    left = replace(job, graph=rest(job.graph, saved.done))
    compiled = Compiled(left, comm, together(comm, lambda: options_of(left)))
    plan, schedule, given = compiled.prepare(_tensors(job, saved))
    checkpoints.starts(plan.digest, schedule.points)
    return compiled, plan, schedule, given


def _tensors(job: Job, saved: Saved) -> dict[str, SavedTensor]:
    found = {}
    for name in saved.blocks:
        vertex = job.graph[name]
        assert vertex.einsum is not None
        found[saved_name(name)] = SavedTensor(saved, name, vertex.bound, vertex.einsum.aggregation)
    return found


def identity(job: Job) -> Identity:
    """What must be the same for two runs to give the same numbers, up to rounding. The number of ranks, the strategy
    and the threads need not be."""
    program = sha256(f"{job.graph}\n{job.fast_math}".encode()).hexdigest()
    inputs = {spec.name: spec for spec in job.inputs if spec.name in job.graph.by_name}
    return {"the program with its sizes": program} | {
        f"the input {name}": _text(spec) for name, spec in inputs.items()
    }


def _text(spec: InputSpec) -> str:
    """A file is the same as long as nobody writes to it; it may be found in another folder."""
    if spec.file is None:
        return f"{spec.random} {spec.dtype}{list(spec.shape or ())}, seed {spec.seed}, {spec.low} to {spec.high}"
    try:
        found = os.stat(spec.file)
    except OSError as error:
        raise InputError(
            spec.place, f"{spec.file}: {error.strerror or error}", "a file to read"
        ) from None
    inside = spec.inside or None
    return (
        f"{os.path.basename(spec.file)}:{inside} rows {spec.rows} {spec.dtype}{list(spec.shape or ())}, "
        f"{found.st_size} bytes, written at {found.st_mtime_ns} ns"
    )
