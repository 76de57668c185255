"""Cholesky's factorisation and triangular systems on a grid of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from einmpi.schedule.panels.grid import COLUMN, EMPTY, ROW, GridSteps, Piece, below
from einmpi.schedule.regions import intersect, length, one_run


def cholesky(grid: GridSteps, result: Piece, operands: Sequence[Piece]) -> None:
    """Factor the diagonal block of each panel, divide what is below it, and update the rest."""
    rows, columns = result.region
    grid.compute("copy", result, result.region, (operands[0], result.region))
    status = grid.status()
    for panel in grid.panels:
        block = one_run(panel.start, panel.stop)
        lower = below(rows, panel.stop), block
        right = below(columns, panel.stop), block
        has_column = grid.has(panel, COLUMN)
        own = (block, block) if has_column and grid.has(panel, ROW) else EMPTY
        grid.compute("factor", result, own, inner=panel.width // 3)
        diagonal = grid.diagonal(COLUMN, panel, result)
        grid.note("note_nan", status, panel, diagonal)
        divided = lower if has_column else EMPTY
        grid.compute("divide", result, divided, diagonal, inner=panel.width // 2)
        of_rows = grid.spread(ROW, panel.column, result, "rows", lower, length(rows))
        of_columns = grid.piece("columns", right, (length(columns), panel.width))
        grid.send(COLUMN, of_rows, of_columns, partial(grid.below, panel), right)
        grid.compute(
            "update_lower",
            result,
            (lower[0], right[0]),
            (of_rows, lower),
            (of_columns, right),
            inner=panel.width // 2,
            index=(("i", lower[0]), ("j", right[0])),
        )
    grid.compute("lower", result, result.region, index=(("i", rows), ("j", columns)))
    grid.check("check_definite", status)


def solve(is_lower: bool, grid: GridSteps, result: Piece, operands: Sequence[Piece]) -> None:
    """Solve for the rows of each panel, and subtract what they add to the rows that are left."""
    matrix, right = operands
    rows, *columns = result.region
    grid.compute("copy", result, result.region, (right, result.region))
    status = grid.status()
    part = "solve_lower" if is_lower else "solve_upper"
    for panel in grid.panels if is_lower else grid.panels[::-1]:
        block = one_run(panel.start, panel.stop)
        left = below(rows, panel.stop) if is_lower else intersect(rows, one_run(0, panel.start))
        solved = (block, *columns)
        diagonal = grid.diagonal(ROW, panel, matrix)
        grid.note("note_zero", status, panel, diagonal)
        own = solved if grid.has(panel, ROW) else EMPTY[: len(solved)]
        grid.compute(part, result, own, diagonal, inner=panel.width // 2)
        known = grid.spread(COLUMN, panel.row, result, "solved", solved, panel.width)
        of_left = grid.spread(ROW, panel.column, matrix, "rows", (left, block), length(rows))
        grid.compute(
            "update",
            result,
            (left, *columns),
            (of_left, (left, block)),
            (known, solved),
            inner=panel.width,
        )
    grid.check("check_singular", status)
