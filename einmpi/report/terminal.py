"""What terminals show: coloured tables no wider than they are, elsewhere plain text; progress."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from threading import Event, Thread
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.comm.base import Comm
from einmpi.job.batches import PREFIX as VALIDATION
from einmpi.planner.plan import Plan
from einmpi.planner.text.compare import Comparison
from einmpi.planner.text.explain import explain, heading, loops_of, totals, vertex_rows
from einmpi.planner.text.summary import (
    KEYWORD_COLUMNS,
    Fold,
    Note,
    Row,
    note_line,
    table_lines,
    vertices_and_folds,
)
from einmpi.process.environment import CLEAR, columns, screen
from einmpi.process.signals import on_abort
from einmpi.report.record import is_reported, operations_of
from einmpi.report.results import LoopReport
from einmpi.report.times import VertexTimes, summary_rows
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Step
from einmpi.units import counted, plural, show_bytes, show_seconds

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

COLUMN_GAP = 2  # blanks
LEAST_EINSUM_WIDTH = 20  # columns for the text of a vertex
# Columns that are left out on a narrow terminal, the least important first.
OPTIONAL_COLUMNS = (
    "paper's cost",
    "lower bound",
    "repartition",
    "aggregate",
    "join",
    "busiest rank",
    "operations a rank",
    "words",
    "GB/s",
    "GFLOP/s",
    "imbalance",
)


def plan_text(plan: Plan, full: bool = False) -> str:
    """Return EXPLAIN. On a terminal the vertices that move most are red, and idle ones are dim."""
    if not _on_terminal():
        return explain(plan, full)
    texts = []
    for title, each in loops_of(plan):
        if title:
            texts.append(f"{title}\n")
        texts.append(_rendered_plan(each, full) + "\n\n")
    return "".join(texts).rstrip("\n")


def _rendered_plan(plan: Plan, full: bool) -> str:
    """Return the plan of a program, or of a loop, for a terminal."""
    most = max((bill.nbytes for bill in plan.bills.values()), default=0)
    styles = []
    for shown in vertices_and_folds(plan, full):
        if isinstance(shown, Fold):
            styles.append("")
            continue
        amount = plan.bills[shown.name].nbytes
        if amount == 0:
            styles.append("dim")
        elif 2 * amount > most:
            styles.append("red")
        else:
            styles.append("yellow")
    return _render(heading(plan), vertex_rows(plan, full), 2, styles, totals(plan, full))


def comparison_text(comparison: Comparison) -> str:
    """Return the strategies side by side. On a terminal those that move least are green."""
    if not _on_terminal():
        return comparison.text
    bytes_moved = [plan.cost_in_all.nbytes for plan in comparison.plans]
    styles = ["green" if nbytes == min(bytes_moved) else "" for nbytes in bytes_moved]
    return _render("", comparison.rows, 1, styles, comparison.notes)


def summary_text(vertices: Sequence[VertexTimes], peak: int, planned: int) -> str:
    """Return where the time of a run went."""
    memory = f"{show_bytes(peak)} a rank, {show_bytes(planned)} planned"
    return _times_text("", vertices, [("peak memory", memory)])


def loop_summary_text(title: str, loop: LoopReport) -> str:
    """Return where the time of all steps of a loop went; empty if they were not recorded."""
    if loop.record is None:
        return ""
    steps = loop.steps - loop.steps_before
    took = f"{counted(steps, 'step')} in {show_seconds(steps * loop.seconds_a_step)}"
    pace = f"{1 / loop.seconds_a_step:,.0f} a second" if loop.seconds_a_step else "–"
    traced = ", ".join(map(str, loop.record.traced))
    noun = plural(len(loop.record.traced), "step")
    notes = [("all steps", f"{took}, {pace}"), ("traced", f"{noun} {traced}")]
    return _times_text(title, loop.record.times, notes)


def _times_text(title: str, vertices: Sequence[VertexTimes], notes: Sequence[Note]) -> str:
    """Return a table of times with its notes.

    On a terminal a vertex that mostly waits is red, one that moves longer than it computes yellow.
    """
    rows = summary_rows(vertices)
    if not _on_terminal():
        lines = [*table_lines(rows), *map(note_line, notes)]
        return "\n".join([title, *lines] if title else lines)
    styles = []
    for row in rows[1:]:
        computing, moving, waiting = map(float, row[1:4])
        if waiting > computing + moving:
            styles.append("red")
        elif moving > computing:
            styles.append("yellow")
        else:
            styles.append("")
    return _render(title, rows, 1, styles, notes)


def _on_terminal() -> bool:
    return columns(sys.stdout) > 0


def console_for(stream: io.StringIO, width: int) -> Console:
    """Return a rich console that renders for a terminal of this width."""
    from rich.console import Console

    return Console(
        file=stream,
        force_terminal=True,
        width=width,
        color_system=None if os.environ.get("NO_COLOR") else "standard",
        highlight=False,
    )


def _render(
    title: str, rows: Sequence[Row], left: int, styles: Sequence[str], notes: Sequence[Note]
) -> str:
    """Render a table whose first `left` columns are aligned to the left."""
    # All strings are wrapped in Text: rich would take [i,j] for markup.
    from rich.table import Table
    from rich.text import Text

    width = columns(sys.stdout)
    widths = _column_widths(rows, left, width)
    heads = rows[0]
    table = Table(box=None, pad_edge=False, padding=(0, COLUMN_GAP, 0, 0), header_style="bold")
    for column, size in widths.items():
        table.add_column(
            Text(heads[column]),
            justify="left" if column < left else "right",
            width=size,
            overflow="fold",
        )
    for row, style in zip(rows[1:], styles, strict=True):
        table.add_row(*(Text(row[column]) for column in widths), style=style)
    stream = io.StringIO()
    console = console_for(stream, width)
    if title:
        console.print(Text(title, style="bold"))
    console.print(table)
    left_out = [name for column, name in enumerate(heads) if column not in widths]
    if left_out:
        console.print(Text(f"no room for: {', '.join(left_out)}", style="dim"))
    for note in notes:
        console.print(_note_renderable(note))
    return stream.getvalue().rstrip("\n")


def _note_renderable(note: Note) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    word, text = note
    if not word:
        return Text(text)
    line = Table.grid()
    line.add_column(width=KEYWORD_COLUMNS, style="cyan")
    line.add_column(overflow="fold")
    line.add_row(Text(word), Text(text))
    return line


def _column_widths(rows: Sequence[Row], left: int, width: int) -> dict[int, int]:
    """Return the columns that a terminal has room for, and the width of each.

    EinSums and heads may wrap. A number on two lines would be read as two numbers, so on a narrow
    terminal columns of numbers are left out instead.
    """
    full = {}
    least = {}
    for column, head in enumerate(rows[0]):
        cells = [len(row[column]) for row in rows[1:]]
        full[column] = max([len(head), *cells])
        least[column] = max([*map(len, head.split()), *cells], default=0)
    room = width - COLUMN_GAP * (len(full) - 1)
    if sum(full.values()) <= room:
        return full
    if left > 1:
        least[0] = min(least[0], LEAST_EINSUM_WIDTH)
    heads = list(rows[0])
    for name in OPTIONAL_COLUMNS:
        if name in heads and sum(least.values()) > room:
            del least[heads.index(name)]
            room += COLUMN_GAP
    spare = max(0, room - sum(least.values()))
    least[0] = min(full[0], least[0] + spare)
    return least


# ---- progress ------------------------------------------------------------------------------------
#
# How far a run has come: a bar on a terminal, an occasional line in a log, by rank 0.


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
