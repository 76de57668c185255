"""How far a run has come: a bar on a terminal, an occasional line in a log, by rank 0."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from threading import Event, Thread
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.comm.base import Comm
from einmpi.job.batches import PREFIX as VALIDATION
from einmpi.process.environment import CLEAR, screen
from einmpi.process.signals import on_abort
from einmpi.report.record import is_reported, operations_of
from einmpi.report.terminal import console_for
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Step
from einmpi.units import counted, show_bytes

BAR_INTERVAL = 0.2  # seconds
LINE_INTERVAL = 30.0
REDRAW_AFTER = 1.0  # seconds after which a bar is drawn again though no step has begun
OPERATIONS_PER_BYTE = 16  # that take as long as moving a byte
BAR_WIDTH = 24  # columns
LEAST_WIDTH_FOR_BAR = 60

OnRow: TypeAlias = Callable[[int, Mapping[str, npt.NDArray[Any]]], None]


class Progress:
    """Counts the steps of all repeats of a run. While it is open, a thread shows how far it is."""

    def __init__(
        self,
        comm: Comm,
        schedule: Schedule,
        repeats: int = 1,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.comm = comm
        self.schedule = schedule
        self.repeats = repeats
        self.clock = clock
        self.stream, self.width = screen()  # the width is 0 where there is no terminal
        self.interval = BAR_INTERVAL if self.width else LINE_INTERVAL
        self.received_before = comm.received
        self.start = clock()
        # How many steps have begun and when the last one did: a single value, read by the thread.
        self.begun = 0, self.start
        self.steps_shown = 0  # how many had begun when something was shown last
        self.time_shown = 0.0
        # The part of the work done before each step, and at the end; empty until it is shown.
        self.done: list[float] = []
        self.closed = Event()
        self.thread: Thread | None = None
        self.note: Callable[[], str] | None = None  # what a loop says about its last step

    def __call__(self, step: Step) -> None:
        """Note that a step begins. This is all that a run pays for."""
        self.begun = self.begun[0] + 1, self.clock()

    def open(self) -> None:
        self.closed.clear()
        self.thread = Thread(target=self._show_until_closed, daemon=True, name="progress")
        self.thread.start()

    def close(self) -> None:
        """Remove the bar, before anything else is written."""
        self.closed.set()
        is_writing = False
        if self.thread is not None:
            # On a terminal that is stopped the thread cannot finish; that must not stop the run.
            self.thread.join(timeout=1.0)
            is_writing = self.thread.is_alive()
        if self.steps_shown and self.width and not is_writing:
            self._write(CLEAR)
        self.thread = None
        self.steps_shown = 0
        self.time_shown = 0.0

    def _show_until_closed(self) -> None:
        while not self.closed.wait(self.interval):
            self.show()

    def show(self) -> None:
        """Show how far the run is, if there is anything new."""
        steps, step_start = self.begun
        now = self.clock()
        is_new = steps != self.steps_shown or now >= self.time_shown + REDRAW_AFTER
        if steps == 0 or (self.width and not is_new):
            return
        self.steps_shown = steps
        self.time_shown = now
        if not self.done:
            self._weigh_steps()
        repeat, number = divmod(steps - 1, len(self.schedule.steps))
        part = self._part_done(repeat, number, step_start, now)
        left = None
        if part:
            left = (now - self.start) * (1 - part) / part
        # The current step, or the next one if reports leave it out.
        step = next(filter(is_reported, self.schedule.steps[number:]), None)
        if self.width:
            self._write(CLEAR + self._bar(part, step, left) + "\r")
        else:
            self._write(self._line(part, step, left))

    def _weigh_steps(self) -> None:
        weights = []
        for step in self.schedule.steps:
            weights.append(0)
            if is_reported(step):
                weights[-1] = operations_of(step) + OPERATIONS_PER_BYTE * step.nbytes
        total = sum(weights) or 1
        self.done = [done / total for done in accumulate(weights, initial=0)]

    def _part_done(self, repeat: int, step: int, step_start: float, now: float) -> float:
        """Return how much of the work is done, from 0 to 1.

        Inside a long step the bar goes on as fast as before, but not beyond the step.
        """
        before = (repeat + self.done[step]) / self.repeats
        after = (repeat + self.done[step + 1]) / self.repeats
        growth = 1.0
        if step_start > self.start:
            growth = (now - self.start) / (step_start - self.start)
        return max(before, min(before * growth, after))

    def _line(self, part: float, step: Step | None, left: float | None) -> str:
        time_left = "" if left is None else f", {_about(left)}"
        if self.note is not None:
            return f"einmpi: {part:.0%} {self.note()}{time_left}\n"
        kernels = [each for each in self.schedule.steps if each.kind == "kernel"]
        vertices = {each.vertex for each in kernels}
        vertex = "" if step is None else step.vertex
        amount = counted(len(vertices), "vertex", "vertices")
        return f"einmpi: {part:.0%} {vertex} of {amount}{time_left}\n"

    def _bar(self, part: float, step: Step | None, left: float | None) -> str:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        texts = [f"{part:4.0%}"]
        if self.note is not None:
            texts.append(self.note())
        elif step is not None:
            texts += [step.vertex, step.kind]
        if self.comm.size > 1:
            texts.append(f"{show_bytes(self.comm.received - self.received_before)} received")
        if left is not None:
            texts.append(_about(left))
        line = Text("  ".join(texts), no_wrap=True, overflow="ellipsis")
        grid = Table.grid(padding=(0, 1, 0, 0))
        if self.width < LEAST_WIDTH_FOR_BAR:
            grid.add_row(line)
        else:
            grid.add_row(ProgressBar(total=1.0, completed=part, width=BAR_WIDTH), line)
        stream = io.StringIO()
        # The last column stays empty: some terminals begin a new line when it is filled.
        console_for(stream, max(1, self.width - 1)).print(grid, end="")
        return stream.getvalue().split("\n")[0].rstrip()

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):  # the terminal is gone; that is no reason to end a run
            self.closed.set()


@contextmanager
def shown_progress(
    comm: Comm, schedule: Schedule, repeats: int, quiet: bool
) -> Iterator[Progress | None]:
    """Show how far rank 0 is with the repeats of a run, in a with block, if it is not quiet.

    Yield what to call at the start of each step, if there is anything to call.
    """
    if comm.rank > 0 or quiet:
        yield None
        return
    progress = Progress(comm, schedule, repeats)
    progress.open()
    with on_abort(progress.close):
        try:
            yield progress
        finally:
            progress.close()


def _about(seconds: float) -> str:
    """Return an estimate with few digits: "about 2 min left"."""
    if seconds < 100:
        time = f"{seconds:.0f} s"
    elif seconds < 6000:
        time = f"{seconds / 60:.0f} min"
    else:
        time = f"{seconds / 3600:.1f} h"
    return f"about {time} left"


# ---- loops --------------------------------------------------------------------------------------


def row_notes(
    progress: Progress | None, note: Callable[[str], None], steps: int, which: str = ""
) -> OnRow:
    """Return the function to call at the end of each step of a loop, with what it has recorded.

    It tells a launcher, by `note`, which step a rank is in, and the user what the values are.
    `which` says which of several loops it is, before the step.
    """
    validated: dict[str, npt.NDArray[Any]] = {}  # numbers of the last validation

    def on_row(number: int, row: Mapping[str, npt.NDArray[Any]]) -> None:
        text = f"{which}step {number + 1} of {steps}"
        note(text)
        recorded = {}
        for name, value in row.items():
            if not name.startswith(VALIDATION):
                recorded[name] = value
            elif not np.isnan(value):
                validated[name] = value
        if progress is not None:
            progress.note = lambda: _row_text(text, {**recorded, **validated})

    note(f"{which}step 0 of {steps}")
    return on_row


def _row_text(step: str, row: Mapping[str, npt.NDArray[Any]]) -> str:
    values = [f"{name} {value.item():.6g}" for name, value in row.items()]
    return "  ".join([step, *values])
