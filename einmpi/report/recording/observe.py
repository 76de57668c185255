"""The observers of a run's steps: progress, a recorder, and the note of what a rank is doing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from einmpi.checkpoint.resume import Checkpoints
from einmpi.comm.agreement import on_first_rank
from einmpi.comm.base import Comm
from einmpi.process.environment import columns
from einmpi.report.progress import Progress, shown
from einmpi.report.recording.record import Recorder, Timeline
from einmpi.runtime.background import OnTransfer
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Step

# Up to this many spans, of all ranks, are gathered for the summary on a terminal without a request.
MAX_SPANS_UNREQUESTED = 200_000


class Observer:
    """Observes the repeated runs of a schedule, and records the last one on request."""

    def __init__(
        self,
        comm: Comm,
        schedule: Schedule,
        repeats: int = 1,
        record: bool = False,
        quiet: bool = False,
        checkpoints: Checkpoints | None = None,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        self.comm = comm
        self.repeats = repeats
        self.runs = 0  # that have begun
        self.wait = wait  # until kernels are done: on a GPU they outlast the step that starts them
        self.recorder = Recorder(comm, checkpoints) if record else None
        self.progress: Progress | None = None
        if comm.rank == 0 and not quiet:
            self.progress = Progress(comm, schedule, repeats)
        self.timeline: Timeline | None = None  # on rank 0, after a recorded run
        self.on_transfer: OnTransfer | None = None  # for transfers in the background

    @contextmanager
    def observe_run(self, note: Callable[[str], None]) -> Iterator[Callable[[Step], None]]:
        """Observe one run. Yield the function to call at the start of each step.

        All ranks call this. `note` gets the text of each step.
        """
        self.runs += 1
        recorder = self.recorder if self.runs == self.repeats else None
        observers: list[Callable[[Step], None]] = []
        if recorder is not None:
            observers.append(recorder)
        if self.progress is not None:
            observers.append(self.progress)

        def on_step(step: Step) -> None:
            if recorder is not None:
                self.wait()
            for observer in observers:
                observer(step)
            note(" ".join(str(step).split()))

        if recorder is not None:
            self.on_transfer = recorder.on_transfer
            recorder.begin()
        with shown(self.progress):
            yield on_step
        if recorder is not None:
            self.timeline = recorder.finish()


def is_interactive(comm: Comm, schedule: Schedule) -> bool:
    """Whether rank 0 writes to a terminal and a recording is small; the same on all ranks."""
    is_small = comm.size * len(schedule.steps) <= MAX_SPANS_UNREQUESTED
    answer = on_first_rank(comm, lambda: "yes" if is_small and columns(sys.stdout) else "")
    return answer == "yes"
