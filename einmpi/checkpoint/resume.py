"""Prepare a run that can be interrupted: from its start, or from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
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
from einmpi.files.datasets import Dataset
from einmpi.files.formats import find
from einmpi.files.identity import SourceFile
from einmpi.files.specs import InputSpec
from einmpi.graph.remainder import rest, saved_name
from einmpi.job.job import Job
from einmpi.planner.plan import Options, Plan
from einmpi.schedule.overlap.arrange import with_overlap
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
        compiled.planning.overlaps = False  # first the schedule may be cut at a save point
        plan, schedule, _ = compiled.prepare({})
        if checkpoints is not None:
            _agree_inputs_stayed(compiled, checkpoints)
            checkpoints.starts(plan.digest, schedule.points)
        if checkpoints is None or saved is None:
            return compiled, plan, with_overlap(schedule, plan.peak), {}
        if saved.plan == plan.digest:
            restored = [point for point in schedule.points if point.vertex in saved.blocks]
            checkpoints.restored = tuple(restored)
            rest_of_schedule = remaining(schedule, saved.done)
            return compiled, plan, with_overlap(rest_of_schedule, plan.peak), {}
    assert checkpoints is not None
    rest_of_job = replace(job, graph=rest(checkpoints.graph, saved.done))
    # What was saved comes first, so that the next checkpoint has it.
    options = replace(together(comm, lambda: options_of(rest_of_job)), first=tuple(saved.blocks))
    compiled = Compiled(rest_of_job, comm, options)
    plan, schedule, given = compiled.prepare(_saved_tensors(job, saved))
    _agree_inputs_stayed(compiled, checkpoints)
    checkpoints.starts(plan.digest, schedule.points)
    return compiled, plan, schedule, given


def _agree_inputs_stayed(compiled: Compiled, checkpoints: Checkpoints) -> None:
    together(
        compiled.comm,
        lambda: _check_inputs_stayed(compiled.job, compiled.files, checkpoints.identity),
    )


def _saved_tensors(job: Job, saved: Saved) -> dict[str, SavedTensor]:
    tensors = {}
    for name in saved.blocks:
        vertex = job.graph[name]
        aggregation = vertex.computed_einsum.aggregation
        tensors[saved_name(name)] = SavedTensor(saved, name, vertex.bound, aggregation)
    return tensors


def identity(job: Job) -> Identity:
    """Return what must be equal for two runs to give the same numbers, up to rounding.

    The number of ranks, the strategy and the threads may differ.
    """
    programs = job.one_after_another()
    text = ""
    for each in programs:
        text += f"{each.graph}\n{job.fast_math}\n{job.strict}"
        if each.loop is not None:
            # The number of steps may change: a loop may go on for longer than was first thought.
            text += f"\n{each.loop.carry}\n{each.loop.record}"
            if each.loop.validation is not None:
                text += f"\n{each.loop.validation.identity}"
            if each.loop.batches is not None:
                text += f"\n{replace(each.loop.batches, epochs=None)}"
    parts = {"the program with its sizes": sha256(text.encode()).hexdigest()}
    for spec in job.inputs:
        if any(spec.name in each.graph.by_name for each in programs):
            dataset = None if spec.file is None else find(spec)
            parts[_part_of_input(spec)] = _describe_input(spec, dataset)
    return parts


def _part_of_input(spec: InputSpec) -> str:
    return f"the input {spec.name}"


def _describe_input(spec: InputSpec, dataset: Dataset | None) -> str:
    """Return a text about an input.

    A file counts as the same until it is written to; it may be found in another folder.
    """
    tensor = f"{spec.dtype}{list(spec.shape or ())}"
    if spec.value is not None:
        return f"parameter {spec.value!r} {tensor}"
    if dataset is None:
        return f"{spec.random} {tensor}, seed {spec.seed}, {spec.low} to {spec.high}"
    first, *linked = dataset.sources
    text = (
        f"{os.path.basename(dataset.file)}:{spec.inside or None} rows {spec.slices or None} "
        f"{tensor}, {_written(first)}"
    )
    if linked:
        lines = [f"{os.path.basename(source.path)}, {_written(source)}" for source in linked]
        text += f", and {len(linked)} linked files {sha256(repr(lines).encode()).hexdigest()}"
    return text


def _written(source: SourceFile) -> str:
    return f"{source.identity.size} bytes, written at {source.identity.modified_ns} ns"


def _check_inputs_stayed(job: Job, files: Mapping[str, Dataset], found: Identity) -> None:
    """Refuse input files that have changed since the checkpoint was compared with them."""
    for spec in job.inputs:
        dataset = files.get(spec.name)
        if dataset is not None and _describe_input(spec, dataset) != found[_part_of_input(spec)]:
            raise InputError(
                spec.place,
                f"{dataset.title} was replaced during the run",
                "a file that stays unchanged",
            )
