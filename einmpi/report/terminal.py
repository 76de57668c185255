"""Tables for a terminal, coloured and no wider than it is; elsewhere the same as plain text."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
from einmpi.process.environment import columns
from einmpi.report.results import LoopReport
from einmpi.report.times import VertexTimes, summary_rows
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
