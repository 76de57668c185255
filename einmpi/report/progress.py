"""How far a run is: a bar on a terminal, now and then a line in a log. Rank 0 shows its own steps."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from itertools import accumulate
from time import perf_counter
from typing import Any, TextIO

from einmpi.report.record import Work, work_of
from einmpi.runtime.comm import Comm
from einmpi.runtime.terminals import CLEAR, columns
from einmpi.schedule.steps import Schedule, Step
from einmpi.units import show_bytes

BETWEEN_BARS, BETWEEN_LINES = 0.1, 30.0  # seconds
WORTH = 16  # operations that a byte takes as long as
_BAR, _NARROW = 24, 60  # columns


class Progress:
    """Hears of every step of the runs, and speaks so seldom that it costs nothing."""

    def __init__(self, comm: Comm, schedule: Schedule, repeats: int = 1, stream: TextIO | None = None,
                 clock: Callable[[], float] = perf_counter) -> None:  # fmt: skip
        self.comm, self.schedule, self.repeats, self.clock = comm, schedule, repeats, clock
        self.stream = sys.stderr if stream is None else stream
        self.width = columns(self.stream)
        self.between = BETWEEN_BARS if self.width else BETWEEN_LINES
        self.count, self.before, self.start = 0, comm.received, clock()
        self.next = self.start + self.between
        self.works: list[Work | None] = []  # of the steps; empty until somebody waits
        self.done: list[float] = []  # part of the work that is done before each step
        self.shown = False

    def __call__(self, step: Step) -> None:
        self.count += 1
        now = self.clock()
        if now >= self.next:
            self.next = now + self.between
            self._show(now - self.start)

    def close(self) -> None:
        """Take the bar away, before anything else is written."""
        if self.shown and self.width:
            self._write(CLEAR)
            self.shown = False

    def _show(self, seconds: float) -> None:
        if not self.done:
            self.works = [work_of(step) for step in self.schedule.steps]
            weights = [work.operations + WORTH * work.nbytes if work else 0 for work in self.works]
            self.done = [done / (sum(weights) or 1) for done in accumulate(weights, initial=0)]
        run, step = divmod(self.count - 1, len(self.works))
        part = min((run + self.done[step]) / self.repeats, 1.0)
        left = seconds * (1 - part) / part if part else None
        work = next((work for work in self.works[step:] if work), None)  # a Free belongs to what comes next
        vertex, kind = (work.vertex, work.kind) if work else ("", "")
        self.shown = True
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

        moved = self.comm.received - self.before
        texts = [f"{part:4.0%}", vertex, kind, f"{show_bytes(moved)} received" if self.comm.size > 1 else "",
                 f"about {_about(left)} left" if left is not None else ""]  # fmt: skip
        line = Text("  ".join(text for text in texts if text), no_wrap=True, overflow="ellipsis")
        colours: Any = None if os.environ.get("NO_COLOR") else "standard"
        shown = io.StringIO()
        # The last column stays empty: some terminals begin a new line when it is filled.
        console = Console(file=shown, force_terminal=True, width=max(1, self.width - 1), color_system=colours,
                          highlight=False)  # fmt: skip
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
            self.next = float("inf")


def _about(seconds: float) -> str:
    """2 min, 40 s, 3.5 h: an estimate has few digits."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
