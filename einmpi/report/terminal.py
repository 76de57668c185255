"""Tables for a terminal: with colours, and no wider than it is. Elsewhere the same is plain text."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from einmpi.planner.make_plan import Plan
from einmpi.planner.text.explain import (
    WORD,
    Comparison,
    Row,
    explain,
    heading,
    note_line,
    table_lines,
    totals,
    vertex_rows,
)
from einmpi.planner.text.summary import Note
from einmpi.process.terminal import columns
from einmpi.report.summary import VertexTimes, summary_notes, summary_rows

_EINSUM = 20  # columns at least for the text of a vertex
# Columns that a narrow terminal goes without, the first one first.
_DISPENSABLE = (
    "paper's cost",
    "lower bound",
    "repartition",
    "aggregate",
    "join",
    "busiest rank",
    "words",
    "GB/s",
    "GFLOP/s",
    "imbalance",
)


def plan_text(plan: Plan) -> str:
    """EXPLAIN; on a terminal the vertices that move most are red, those that move nothing pale."""
    if not _on_terminal():
        return explain(plan)
    moved = [plan.bills[vertex.name].nbytes for vertex in plan.graph.computed]
    most = max(moved, default=0)
    styles = [
        "dim" if amount == 0 else "red" if 2 * amount > most else "yellow" for amount in moved
    ]
    return _rendered(heading(plan), vertex_rows(plan), 2, styles, totals(plan))


def comparison_text(comparison: Comparison) -> str:
    """Strategies side by side; on a terminal what moves least is green."""
    if not _on_terminal():
        return comparison.text
    least = min((plan.bytes_predicted for plan in comparison.plans), default=0)
    styles = ["green" if plan.bytes_predicted == least else "" for plan in comparison.plans]
    return _rendered("", comparison.rows, 1, styles, comparison.notes)


def summary_text(vertices: Sequence[VertexTimes], peak: int, planned: int) -> str:
    """Where the time went; on a terminal what mostly waits is red, what moves more than it computes yellow."""
    rows, notes = summary_rows(vertices), summary_notes(peak, planned)
    if not _on_terminal():
        return "\n".join([*table_lines(rows), *map(note_line, notes)])
    styles = [
        "red" if waiting > computing + moving else "yellow" if moving > computing else ""
        for computing, moving, waiting in (map(float, row[1:4]) for row in rows[1:])
    ]
    return _rendered("", rows, 1, styles, notes)


def _on_terminal() -> bool:
    return columns(sys.stdout) > 0


def _rendered(
    title: str, rows: Sequence[Row], left: int, styles: Sequence[str], notes: Sequence[Note]
) -> str:
    """Everything goes to rich as Text: [i,j] is no markup."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = columns(sys.stdout)
    colours: Any = None if os.environ.get("NO_COLOR") else "standard"
    shown = io.StringIO()
    console = Console(
        file=shown, force_terminal=True, width=width, color_system=colours, highlight=False
    )
    kept = _columns(rows, left, width)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column, size in kept.items():
        side: Any = "left" if column < left else "right"
        table.add_column(Text(rows[0][column]), justify=side, width=size, overflow="fold")
    for row, style in zip(rows[1:], styles, strict=True):
        table.add_row(*(Text(row[column]) for column in kept), style=style)
    if title:
        console.print(Text(title, style="bold"))
    console.print(table)
    if len(kept) < len(rows[0]):
        missing = [name for column, name in enumerate(rows[0]) if column not in kept]
        console.print(Text(f"no room for: {', '.join(missing)}", style="dim"))
    for word, text in notes:
        line = Table.grid()
        line.add_column(width=WORD, style="cyan")
        line.add_column(overflow="fold")
        line.add_row(Text(word), Text(text))
        console.print(line if word else Text(text))
    return shown.getvalue().rstrip("\n")


def _columns(rows: Sequence[Row], left: int, width: int) -> dict[int, int]:
    """The columns that a terminal has room for, and the width of each.

    EinSums wrap, and so do heads. A number in two lines would be read as two numbers, so some columns go instead.
    """
    wide = {column: max(map(len, cells)) for column, cells in enumerate(zip(*rows, strict=True))}
    room = width - 2 * (len(wide) - 1)  # two blanks between columns
    if sum(wide.values()) <= room:
        return wide
    least = {
        column: max(map(len, [*rows[0][column].split(), *(row[column] for row in rows[1:])]))
        for column in wide
    }
    if left > 1:
        least[0] = min(least[0], _EINSUM)
    order = [column for name in _DISPENSABLE for column in wide if rows[0][column] == name]
    while order and sum(least.values()) > room:
        del least[order.pop(0)]
        room += 2
    return {**least, 0: min(wide[0], least[0] + max(0, room - sum(least.values())))}
