"""How far a run is: a bar on a terminal, now and then a line in a log. Rank 0 shows its own steps."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from itertools import accumulate
from threading import Event, Thread
from time import perf_counter
from typing import Any

from einmpi.comm.base import Comm
from einmpi.process.terminal import CLEAR, screen
from einmpi.report.record import Work, work_of
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Step
from einmpi.units import show_bytes

BETWEEN_BARS, BETWEEN_LINES = 0.2, 30.0  # seconds
STALE = 1.0  # seconds after which a bar is drawn anew though nothing but time has passed
WORTH = 16  # operations that a byte takes as long as
_BAR, _NARROW = 24, 60  # columns


class Progress:
    """Hears of every step of the runs, and only notes it. While it is open, a thread shows how far they are."""

    def __init__(
        self,
        comm: Comm,
        schedule: Schedule,
        repeats: int = 1,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.comm, self.schedule, self.repeats, self.clock = comm, schedule, repeats, clock
        self.stream, self.width = screen()
        self.between = BETWEEN_BARS if self.width else BETWEEN_LINES
        self.received, self.start = comm.received, clock()
        self.at = 0, self.start  # steps that have begun, and when the last one did
        self.works: list[Work | None] = []  # of the steps; empty until something is shown
        self.done: list[
            float
        ] = []  # part of the work that is done before each step, and at the end
        self.shown = 0, 0.0  # how many steps had begun when something was shown, and when that was
        self.closed = Event()
        self.thread: Thread | None = None

    def __call__(self, step: Step) -> None:
        self.at = self.at[0] + 1, self.clock()

    def open(self) -> None:
        self.closed.clear()
        self.thread = Thread(target=self._watch, daemon=True, name="progress")
        self.thread.start()

    def close(self) -> None:
        """Take the bar away, before anything else is written."""
        self.closed.set()
        if self.thread is not None:
            self.thread.join(timeout=1.0)
        # A thread that still writes does so to a terminal that is stopped, which must not stop the run.
        if self.shown[0] and self.width and (self.thread is None or not self.thread.is_alive()):
            self._write(CLEAR)
        self.thread = None
        self.shown = 0, 0.0

    def _watch(self) -> None:
        while not self.closed.wait(self.between):
            self.show()

    def show(self) -> None:
        """Show how far the run is, if there is anything new."""
        (count, since), now = self.at, self.clock()
        if count == 0 or (self.width and count == self.shown[0] and now < self.shown[1] + STALE):
            return
        self.shown = count, now
        if not self.done:
            self.works = [work_of(step) for step in self.schedule.steps]
            weights = [work.operations + WORTH * work.nbytes if work else 0 for work in self.works]
            self.done = [done / (sum(weights) or 1) for done in accumulate(weights, initial=0)]
        run, step = divmod(count - 1, len(self.works))
        before, after = ((run + self.done[k]) / self.repeats for k in (step, step + 1))
        # Inside a long step the bar goes on as fast as before, but not beyond the step.
        passed = (now - self.start) / (since - self.start) if since > self.start else 1.0
        part = max(before, min(before * passed, after))
        left = (now - self.start) * (1 - part) / part if part else None
        work = next(
            (work for work in self.works[step:] if work), None
        )  # a Free is shown as what comes next
        vertex, kind = (work.vertex, work.kind) if work else ("", "")
        if self.width:
            self._write(CLEAR + self._bar(part, vertex, kind, left) + "\r")
        else:
            vertices = len({work.vertex for work in self.works if work and work.kind == "kernel"})
            about = f", about {_about(left)} left" if left is not None else ""
            self._write(f"einmpi: {part:.0%} {vertex} of {vertices} vertices{about}\n")

    def _bar(self, part: float, vertex: str, kind: str, left: float | None) -> str:
        from rich.console import Console
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        moved = self.comm.received - self.received
        texts = [
            f"{part:4.0%}",
            vertex,
            kind,
            f"{show_bytes(moved)} received" if self.comm.size > 1 else "",
            f"about {_about(left)} left" if left is not None else "",
        ]
        line = Text("  ".join(text for text in texts if text), no_wrap=True, overflow="ellipsis")
        colours: Any = None if os.environ.get("NO_COLOR") else "standard"
        shown = io.StringIO()
        # The last column stays empty: some terminals begin a new line when it is filled.
        console = Console(
            file=shown,
            force_terminal=True,
            width=max(1, self.width - 1),
            color_system=colours,
            highlight=False,
        )
        grid = Table.grid(padding=(0, 1, 0, 0))
        if self.width < _NARROW:
            grid.add_row(line)
        else:
            grid.add_row(ProgressBar(total=1.0, completed=part, width=_BAR), line)
        console.print(grid, end="")
        return shown.getvalue().split("\n")[0].rstrip()

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):  # nobody looks any more; that is no reason to end a run
            self.closed.set()


def _about(seconds: float) -> str:
    """2 min, 40 s, 3.5 h: an estimate has few digits."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
