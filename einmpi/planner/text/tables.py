"""Columns of text side by side, and notes below them."""

from __future__ import annotations

from collections.abc import Sequence

from einmpi.planner.plan_data import PlanData

Row = tuple[str, ...]
Note = tuple[str, str]  # a keyword, which may be empty, and the text that belongs to it

KEYWORD_COLUMNS = 13  # width of the keyword that begins a note


def show_cuts(plan: PlanData, name: str) -> str:
    """Return the parts of the labels of a vertex that are cut: "i:2 k:4"."""
    cut = [f"{label}:{parts}" for label, parts in plan.parts(name).items() if parts > 1]
    return " ".join(cut)


def show_layout(plan: PlanData, name: str) -> str:
    """Return the number of parts of each dimension in the layout a tensor is kept in: [4,2]."""
    return show_parts(plan.mesh.parts(plan.layouts[name], range(len(plan.graph[name].bound))))


def show_parts(parts: Sequence[int]) -> str:
    """Return the number of parts of each dimension: "[4,2]"."""
    return f"[{','.join(map(str, parts))}]"


def note_line(note: Note) -> str:
    """Return a note as a line of text: "digest       0123456789abcdef"."""
    keyword, text = note
    if not keyword:
        return text
    return f"{keyword:<{KEYWORD_COLUMNS}}{text}"


def table_lines(rows: Sequence[Row], left: int = 1) -> list[str]:
    """Return the rows with their columns aligned, the first `left` columns to the left."""
    widths = []
    for column in range(len(rows[0])):
        widths.append(max(len(row[column]) for row in rows))
    lines = []
    for row in rows:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.ljust(width) if column < left else cell.rjust(width))
        lines.append("  ".join(cells))
    return lines
