"""Who listens to the steps of a run: the note of what a rank does, progress, and a recorder where one is wanted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from einmpi.checkpoint.save import Checkpoints
from einmpi.comm.base import Comm, on_first_rank
from einmpi.process.abort import on_abort
from einmpi.process.terminal import columns
from einmpi.report.progress import Progress
from einmpi.report.record import Recorder
from einmpi.report.timeline import Timeline
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Step

# Spans of all ranks up to which rank 0 gathers them without being asked to, for the summary on a terminal.
MOST_UNASKED = 200_000


class Observer:
    """What is heard of the runs of a schedule. The last run is recorded."""

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
        self.comm, self.repeats, self.runs = comm, repeats, 0
        self.wait = (
            wait  # for what was started: kernels on a GPU run on after the step that starts them
        )
        self.recorder = Recorder(comm, checkpoints) if record else None
        self.progress = Progress(comm, schedule, repeats) if comm.rank == 0 and not quiet else None
        self.timeline: Timeline | None = None  # on rank 0, when it was recorded

    @contextmanager
    def run(self, note: Callable[[str], None]) -> Iterator[Callable[[Step], None]]:
        """One of the runs: the function that wants to hear of its steps. All ranks come here."""
        self.runs += 1
        recorder = self.recorder if self.runs == self.repeats else None
        listeners: list[Callable[[Step], None]] = [
            each for each in (recorder, self.progress) if each is not None
        ]

        def hear(step: Step) -> None:
            if recorder is not None:
                self.wait()
            for listener in listeners:
                listener(step)
            note(" ".join(str(step).split()))

        if recorder is not None:
            recorder.begin()
        if self.progress is not None:
            self.progress.open()
        with on_abort(self._close):
            try:
                yield hear
            finally:
                self._close()
        if recorder is not None:
            self.timeline = recorder.finish()

    def _close(self) -> None:
        if self.progress is not None:
            self.progress.close()


def is_interactive(comm: Comm, schedule: Schedule) -> bool:
    """Whether rank 0 writes to a terminal, and there is not too much to gather for it; alike on all ranks."""
    few = comm.size * len(schedule.steps) <= MOST_UNASKED
    return on_first_rank(comm, lambda: "yes" if few and columns(sys.stdout) else "") == "yes"
