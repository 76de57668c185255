"""Prepare a run that can be interrupted: from its start, or from a checkpoint."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, TypeAlias

from einmpi.checkpoint.folder import Array, CheckpointFolder
from einmpi.checkpoint.load import Block, GraphContents, Identity, Saved, SavedTensor
from einmpi.comm.agreement import together
from einmpi.comm.base import Comm
from einmpi.compiled.program import Compiled
from einmpi.errors import InputError
from einmpi.files.claims import Claim
from einmpi.files.datasets import Dataset, SourceFile
from einmpi.files.formats import find
from einmpi.files.specs import InputSpec
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.rewrite import in_order, needed, rest, saved_name
from einmpi.job.job import Job
from einmpi.planner.plan import Options, Plan
from einmpi.runtime.buffers import Buffers
from einmpi.schedule.overlap import with_overlap
from einmpi.schedule.schedule import Schedule, remaining
from einmpi.schedule.steps import SavePoint

# ---- save ----------------------------------------------------------------------------------------
#
# Save checkpoints of a run between the vertices of its graph, and restore them.


class Checkpoints(CheckpointFolder):
    """The checkpoints of a run of a schedule, after its vertices."""

    def __init__(
        self,
        folder: str,
        every: float,
        comm: Comm,
        graph: EinGraph,
        identity: Identity,
        asked: Sequence[str] = (),
        quiet: bool = False,
        claim: Claim | None = None,
    ) -> None:
        super().__init__(folder, every, comm, GraphContents(graph), identity, asked, quiet, claim)
        self.graph = graph  # in the order in which vertices are computed, once that is known
        self.number: dict[str, int] = {}  # vertex → how many are done after it
        self.restored: tuple[SavePoint, ...] = ()  # what is in slots when the run begins
        self.points: dict[str, SavePoint] = {}  # of the vertices so far
        self.open: set[str] = set()  # the vertices after which all ranks can save

    def find(self, resume: bool) -> None:
        super().find(resume)
        if self.saved is not None and self.saved.order:
            self.graph = in_order(self.graph, self.saved.order)

    def restore(self, rank: int, buffers: Buffers) -> None:
        """Put what was saved into its slots."""
        for point in self.restored:
            self.points[point.vertex] = point
            if self.saved is not None and point.layout.block(rank) is not None:
                array = buffers.make(point.slot)
                values = buffers.backend.to_host(array)
                self.saved.fill(point.vertex, rank, values)
                buffers.backend.from_host(values, array)

    def starts(self, plan: str, points: Sequence[SavePoint]) -> None:
        """Prepare for a run: find out after which vertices all ranks can save.

        A plan may compute vertices in another order than the program has. Which kernels are fused
        depends on a rank's extents, so ranks may differ.
        """
        self.plan = plan
        names: dict[str, None] = {}
        if self.saved is not None:
            names = {vertex.name: None for vertex in self.graph.computed[: self.saved.done]}
        names.update(dict.fromkeys(point.vertex for point in points))
        self.graph = in_order(self.graph, list(names))
        self.contents = self.contents.in_order(list(names))
        self.number = {name: number for number, name in enumerate(names, 1)}
        own = json.dumps([point.vertex for point in points if not point.inside])
        texts = self.comm.allgather_text(own)
        self.open = set.intersection(*(set(json.loads(text)) for text in texts))

    def reached(self, point: SavePoint, buffers: Buffers) -> None:
        """Save after a vertex if it is time to, or if any rank is asked to stop."""
        self.points[point.vertex] = point
        done = self.number[point.vertex]
        if point.vertex not in self.open:
            return  # between fused kernels
        if self.saved is not None and done <= self.saved.done:
            return  # a copy of what was saved
        start = time.monotonic()
        requests = {text for text in self.comm.allgather_text(self.request()) if text}
        if requests:
            problem = self.save(done, buffers)
            self.finish(done, requests, start, problem)

    def save(self, done: int, buffers: Buffers) -> str:
        """Save what is needed after the first `done` vertices; return what failed, or ""."""
        points = [self.points[name] for name in needed(self.graph, done)]
        blocks = [Block(point.vertex, point.slot.dtype, point.layout) for point in points]

        def find_arrays() -> list[Array | None]:
            arrays: list[Array | None] = []
            for point in points:
                array = None
                if point.slot.name in buffers:
                    array = buffers.backend.to_host(buffers[point.slot])
                arrays.append(array)
            return arrays

        return self.write(done, blocks, find_arrays)


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
