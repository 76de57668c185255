"""Prepare a run that can be interrupted: from its start, or from a checkpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from einmpi.arrays.dist_array import DistArray
from einmpi.arrays.record import block_extents
from einmpi.checkpoint.folder import SAVE, CheckpointFolder, Saving, check_inputs_stayed
from einmpi.checkpoint.load import (
    Block,
    EndedLoop,
    GraphContents,
    LoopContents,
    LoopKinds,
    Saved,
    SavedTensor,
    best_name,
    history_name,
)
from einmpi.comm.agreement import together
from einmpi.comm.base import Comm
from einmpi.compiled.program import Compiled
from einmpi.files.datasets import Array
from einmpi.graph.rewrite import in_order, needed, rest, saved_name
from einmpi.job.job import Job
from einmpi.planner.plan import Options, Plan
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.gpu.copies import on_host
from einmpi.schedule.layout import Layout, even_layout
from einmpi.schedule.overlap import with_overlap
from einmpi.schedule.regions import boxes, packed
from einmpi.schedule.schedule import Schedule, remaining
from einmpi.schedule.steps import SavePoint

# ---- save ----------------------------------------------------------------------------------------
#
# Save checkpoints of a run between the vertices of its graph, and restore them.


class Checkpoints(CheckpointFolder):
    """The checkpoints of a run of a schedule, after its vertices."""

    def __init__(self, saving: Saving, comm: Comm, job: Job) -> None:
        super().__init__(saving, comm, GraphContents(job.graph), job)
        self.graph = job.graph  # in the order in which vertices are computed, once that is known
        if self.saved is not None and self.saved.order:
            self.graph = in_order(self.graph, self.saved.order)
        self.number: dict[str, int] = {}  # vertex → how many are done after it
        self.restored: tuple[SavePoint, ...] = ()  # what is in slots when the run begins
        self.points: dict[str, SavePoint] = {}  # of the vertices so far
        self.open: set[str] = set()  # the vertices after which all ranks can save

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
        self.contents = self.contents.at((), list(names))
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
        arrays = []
        for point in points:
            is_here = point.slot.name in buffers
            arrays.append(buffers.backend.to_host(buffers[point.slot]) if is_here else None)
        return self.write(done, blocks, arrays)


# What to run, and the inputs that the checkpoint gives.
Prepared: TypeAlias = tuple[Compiled, Plan, Schedule, dict[str, Any]]


def prepare(
    job: Job,
    comm: Comm,
    options_of: Callable[[Job], Options],
    checkpoints: Checkpoints | None,
    inputs: Mapping[str, Any],
) -> Prepared:
    """Return what to run, given some of the inputs of the job.

    If the plan is the one that made the checkpoint, the rest of its schedule is run, and results
    have the same bits as without an interruption. Otherwise, on another number of ranks, there is
    a new plan for the rest of the graph.
    """
    saved = None if checkpoints is None else checkpoints.saved

    def plan_options(of_job: Job) -> Options:
        # A checkpoint has tensors of the program only: no result is left in pairs of blocks.
        options = together(comm, lambda: options_of(of_job))
        return options if checkpoints is None else replace(options, unread=False)

    if saved is None or saved.ranks == comm.size:
        compiled = Compiled(job, comm, plan_options(job))
        compiled.planning.overlaps = False  # first the schedule may be cut at a save point
        plan, schedule, given = compiled.prepare(inputs)
        if checkpoints is not None:
            _agree_inputs_stayed(compiled, checkpoints)
            checkpoints.starts(plan.digest, schedule.points)
        if checkpoints is None or saved is None:
            return compiled, plan, with_overlap(schedule, plan.peak), given
        if saved.plan == plan.digest:
            restored = [point for point in schedule.points if point.vertex in saved.blocks]
            checkpoints.restored = tuple(restored)
            rest_of_schedule = remaining(schedule, saved.done)
            return compiled, plan, with_overlap(rest_of_schedule, plan.peak), given
    assert checkpoints is not None
    rest_of_job = replace(job, graph=rest(checkpoints.graph, saved.done))
    # What was saved comes first, so that the next checkpoint has it.
    options = replace(plan_options(rest_of_job), first=tuple(saved.blocks))
    compiled = Compiled(rest_of_job, comm, options)
    given = {name: array for name, array in inputs.items() if name in rest_of_job.graph.by_name}
    plan, schedule, given = compiled.prepare({**given, **_saved_tensors(job, saved)})
    _agree_inputs_stayed(compiled, checkpoints)
    checkpoints.starts(plan.digest, schedule.points)
    return compiled, plan, schedule, given


def _agree_inputs_stayed(compiled: Compiled, checkpoints: Checkpoints) -> None:
    together(
        compiled.comm,
        lambda: check_inputs_stayed(compiled.job, compiled.files, checkpoints.identity),
    )


def _saved_tensors(job: Job, saved: Saved) -> dict[str, SavedTensor]:
    tensors = {}
    for name in saved.blocks:
        vertex = job.graph[name]
        aggregation = vertex.computed_einsum.aggregation
        tensors[saved_name(name)] = SavedTensor(saved, name, vertex.bound, aggregation)
    return tensors


# ---- loops ---------------------------------------------------------------------------------------


class LoopCheckpoints(CheckpointFolder):
    """The checkpoints of a loop, between its steps: what is carried and what was recorded.

    They are saved every so many steps, or else by the clock of rank 0.
    """

    def __init__(self, saving: Saving, comm: Comm, job: Job, loops: Sequence[LoopKinds]) -> None:
        self.contents: LoopContents
        super().__init__(saving, comm, LoopContents(loops), job)
        self.ended_rows: list[dict[str, Array]] = []  # what loops that have ended recorded
        self.kept: dict[str, DistArray] = {}  # results of theirs that are still needed

    # ---- where a loop continues -----------------------------------------------------------------

    def enter(
        self,
        ended: Sequence[EndedLoop],
        rows: Sequence[dict[str, Array]],
        kept: Mapping[str, DistArray],
    ) -> None:
        """Note what a loop that begins, or continues, finds: the loops before it have ended."""
        self.contents = self.contents.at(ended, ())
        self.ended_rows = list(rows)
        self.kept = dict(kept)

    @property
    def continues_here(self) -> bool:
        """Whether the checkpoint is one of the loop that is running."""
        return self.saved is not None and len(self.saved.ended) == len(self.contents.ended)

    @property
    def steps_done(self) -> int:
        """The number of steps of the loop that an earlier run has done."""
        if self.saved is None or not self.continues_here:
            return 0
        return self.saved.done - self.contents.steps_before

    def carried(self) -> dict[str, SavedTensor]:
        """Return the inputs of the next step."""
        return self._saved_tensors(list(self.contents.current.loop.carry))

    def best(self) -> dict[str, SavedTensor]:
        """Return what is kept of the best validation, if there was one."""
        names = {best_name(name): name for name in self.contents.current.loop.kept_best}
        saved = self._saved_tensors(list(names))
        return {names[name]: tensor for name, tensor in saved.items()}

    def restored(self, saved: SavedTensor, layout: Layout) -> DistArray:
        """Read a tensor of a checkpoint into a layout."""
        local: Array = np.empty(block_extents(layout, self.comm.rank), saved.dtype)
        region = layout.block(self.comm.rank)
        if region is not None:  # not on an idle rank
            for there, here in boxes(region, packed(region)):
                local[here] = saved[there]
        return DistArray(local, layout, self.comm)

    def kept_results(self) -> dict[str, SavedTensor]:
        """Return the results of earlier loops that are still needed."""
        return self._saved_tensors([kind.name for kind in self.contents.current.kept])

    def _saved_tensors(self, names: Sequence[str]) -> dict[str, SavedTensor]:
        assert self.saved is not None
        found = {}
        for kind in self.contents.tensors(self.saved.done):
            if kind.name in names:
                found[kind.name] = SavedTensor(self.saved, kind.name, kind.bound, None)
        return found

    def history(self, number: int) -> dict[str, Array]:
        """Return the values that a loop has recorded before the checkpoint."""
        found: dict[str, Array] = {}
        if self.saved is not None:
            for name in self.contents.loops[number].loop.columns:
                found[name] = np.array(self.saved.mapped(history_name(name, number), 0))
        return found

    # ---- when to save ---------------------------------------------------------------------------

    def next_planned(self, done: int) -> int | None:
        """Return after how many steps the next checkpoint is due; None if the clock decides."""
        every_steps = self.saving.every_steps
        return (done // every_steps + 1) * every_steps if every_steps else None

    def step_request(self, done: int) -> str:
        """Return what this rank asks for after a step."""
        every_steps = self.saving.every_steps
        if not every_steps or self.saving.asked:
            return self.request()
        return SAVE if done % every_steps == 0 else ""

    def save(
        self,
        done: int,
        requests: Sequence[str],
        plan: Plan,
        carried: Mapping[str, DistArray],
        rows: Mapping[str, Array],
    ) -> None:
        """Save what the next step needs. All ranks call it; it may end the run."""
        start = time.monotonic()
        blocks = []
        everywhere: tuple[Any, ...] = (None,) * len(plan.mesh.factors)
        arrays: list[Array] = []
        for name, array in {**carried, **self._kept_on(plan)}.items():
            layout = replace(array.layout, mesh=plan.mesh, bound=array.shape or (1,))
            blocks.append(Block(name, array.dtype.name, layout))
            arrays.append(np.ascontiguousarray(on_host(array.local)))
        for number, recorded in enumerate([*self.ended_rows, rows]):
            for name, values in recorded.items():
                layout = Layout(plan.mesh, values.shape, everywhere)
                blocks.append(Block(history_name(name, number), values.dtype.name, layout))
                arrays.append(np.ascontiguousarray(values))
        self.plan = plan.digest
        steps_in_all = self.contents.steps_before + done
        problem = self.write(steps_in_all, blocks, arrays)
        self.finish(steps_in_all, requests, start, problem)

    def _kept_on(self, plan: Plan) -> dict[str, DistArray]:
        """Return what is still needed of earlier loops on the mesh of a plan."""
        found = {}
        for kind in self.contents.current.kept:
            array = self.kept[kind.name]
            if array.layout.mesh != plan.mesh:
                array = array.redistribute(even_layout(plan.mesh, array.shape))
            found[kind.name] = array
        return found
