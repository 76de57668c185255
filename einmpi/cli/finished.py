"""What a run leaves behind, with or without loops: it becomes stored outputs and a Report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from einmpi.arrays.dist_array import DistArray
    from einmpi.checkpoint.folder import CheckpointFolder
    from einmpi.comm.base import Comm
    from einmpi.files.claims import Claim
    from einmpi.files.datasets import Dataset
    from einmpi.job.job import Job
    from einmpi.planner.plan import Plan
    from einmpi.report.recording.timeline import Timeline
    from einmpi.report.results import LoopReport, Report, Startup, Totals


@dataclass(frozen=True)
class FinishedRun:
    """The results of a run before they are stored, and what was measured."""

    plan: Plan
    outputs: Mapping[str, DistArray]
    files: Mapping[str, Dataset]  # where inputs were found
    totals: Totals
    planned: float  # when the first step could begin
    seconds_loading: float
    seconds_running: float
    seconds_all: Sequence[float]  # of each repeat
    work: str  # what computed, for people
    timeline: Timeline | None = None
    loops: Sequence[LoopReport] = ()
    checkpoints: CheckpointFolder | None = None


def stored_report(
    job: Job, finished: FinishedRun, comm: Comm, outputs_claim: Claim | None, start: float
) -> Report:
    """Store the outputs of a run, and return all there is to say about it.

    `start` is when the command began. Without `outputs_claim` nothing is stored.
    """
    from einmpi.comm.shared_memory import sharing_problem
    from einmpi.compiled.outputs import store
    from einmpi.process.first_use import first_use_seconds
    from einmpi.process.notes import activity_writer
    from einmpi.report.figures import figures
    from einmpi.report.results import Report
    from einmpi.runtime.threads import threads_of

    activity_writer(comm.rank)("storing the results")
    before_storing = time.perf_counter()
    if outputs_claim is not None:
        store(job, finished.plan.digest, finished.outputs, outputs_claim, finished.files)
    end = time.perf_counter()
    checkpoints = finished.checkpoints
    seconds = {
        "plan": finished.planned - start,
        "load": finished.seconds_loading,
        "run": finished.seconds_running,
        "checkpoint": checkpoints.seconds if checkpoints else 0.0,
        "store": end - before_storing,
        "startup": first_use_seconds(),
        "total": end - start,
    }
    resumed_from = None
    if checkpoints is not None and checkpoints.saved is not None:
        resumed_from = checkpoints.saved.place
    return Report(
        job,
        finished.plan,
        finished.totals,
        seconds,
        finished.seconds_all,
        finished.outputs,
        figures(comm, finished.outputs),
        finished.work,
        threads_of(comm).count,
        _startup_of_first_rank(),
        resumed_from=resumed_from,
        checkpoints=checkpoints.count if checkpoints else 0,
        timeline=finished.timeline,
        loops=finished.loops,
        sharing_problem=sharing_problem(comm),
    )


def _startup_of_first_rank() -> Startup:
    """Return what rank 0 did for the first time."""
    from einmpi.kernels.cpu.compiled import STATISTICS
    from einmpi.process.first_use import COMPILING, LOADING_GENERATORS, first_uses
    from einmpi.report.results import Startup

    seconds = first_uses()
    return Startup(STATISTICS.compiled, seconds[COMPILING], seconds[LOADING_GENERATORS])
