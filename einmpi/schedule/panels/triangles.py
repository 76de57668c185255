"""Cholesky's factorisation and triangular systems on a grid of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from einmpi.planner.grids import Panel
from einmpi.schedule.panels.grid import COLUMN, EMPTY, ROW, GridSteps, Piece, above, below
from einmpi.schedule.regions import Region, length, one_run


def cholesky(grid: GridSteps, result: Piece, operands: Sequence[Piece]) -> None:
    """Factor the diagonal block of each panel, divide what is below it, and update the rest."""
    grid.compute("copy", result, None, (operands[0], result.region))
    for panel in grid.panels:
        block = one_run(panel.start, panel.stop)
        lower = _below(grid, panel, grid.rank)
        right = below(grid.columns, panel.stop), block
        is_in = grid.is_in(panel, COLUMN)
        own = (block, block) if is_in and grid.is_in(panel, ROW) else EMPTY
        grid.compute("factor", result, own, inner=panel.width // 3)
        diagonal = grid.diagonal(COLUMN, panel, result)
        grid.note("note_nan", panel, diagonal)
        grid.compute("divide", result, lower if is_in else EMPTY, diagonal, inner=panel.width // 2)
        of_rows = grid.spread(ROW, panel.column, result, "rows", lower, length(grid.rows))
        of_columns = grid.piece("columns", right, length(grid.columns))
        grid.send(COLUMN, of_rows, of_columns, partial(_below, grid, panel), right)
        grid.compute(
            "update_lower",
            result,
            (lower[0], right[0]),
            (of_rows, lower),
            (of_columns, right),
            inner=panel.width // 2,
            index=(lower[0], right[0]),
        )
    grid.compute("lower", result, index=(grid.rows, grid.columns))
    grid.check("check_definite")


def _below(grid: GridSteps, panel: Panel, rank: int) -> Region:
    """Return what a rank has of a panel below its diagonal."""
    return below(grid.runs(ROW, rank), panel.stop), one_run(panel.start, panel.stop)


def triangular(part: str, grid: GridSteps, result: Piece, operands: Sequence[Piece]) -> None:
    """Solve a triangular system. With few columns on the right, the matrix stays where it is."""
    matrix, right = operands
    if grid.is_narrow:
        solve_narrow(part, grid, result, matrix, right)
    else:
        grid.compute("copy", result, None, (right, result.region))
        solve_wide(part, grid, result, matrix)
    grid.check("check_singular")


def solve_wide(part: str, grid: GridSteps, result: Piece, matrix: Piece) -> None:
    """Solve for the rows of each panel, and subtract what they add to the rows that are left."""
    is_lower = part == "solve_lower"
    columns = result.region[1]
    for panel in grid.panels if is_lower else grid.panels[::-1]:
        block = one_run(panel.start, panel.stop)
        rows = below(grid.rows, panel.stop) if is_lower else above(grid.rows, panel.start)
        diagonal = grid.diagonal(ROW, panel, matrix)
        grid.note("note_zero", panel, diagonal)
        own = (block, columns) if grid.is_in(panel, ROW) else EMPTY
        grid.compute(part, result, own, diagonal, inner=panel.width // 2)
        solved = grid.spread(COLUMN, panel.row, result, "solved", (block, columns), panel.width)
        left = grid.spread(ROW, panel.column, matrix, "rows", (rows, block), length(grid.rows))
        operands = (left, (rows, block)), (solved, (block, columns))
        grid.compute("update", result, (rows, columns), *operands, inner=panel.width)


def solve_narrow(part: str, grid: GridSteps, result: Piece, matrix: Piece, right: Piece) -> None:
    """Solve for the unknowns of each panel, from what known ones add to its rows.

    Unknowns are where the columns of the matrix are: ranks in a row of the grid add up their parts.
    """
    is_lower = part == "solve_lower"
    others = result.region[1:]
    grid.compute("clear", result)
    for panel in grid.panels if is_lower else grid.panels[::-1]:
        block = one_run(panel.start, panel.stop)
        known = above(grid.columns, panel.start) if is_lower else below(grid.columns, panel.stop)
        added = grid.piece("added", (block, *others))
        is_in = grid.is_in(panel, ROW)
        here = block if is_in else ()
        used = known if is_in else ()
        of_known = (matrix, (here, used)), (result, (used, *others))
        grid.compute("product", added, None, *of_known, inner=length(known))
        grid.reduce(ROW, panel.column, added, is_in)
        has_column = grid.is_in(panel, COLUMN)
        here = here if has_column else ()
        diagonal = matrix, (here, here)
        grid.note("note_zero", panel, diagonal)
        rows = here, *others
        grid.compute(part, result, rows, diagonal, (right, rows), (added, rows), inner=panel.width)
        solved = (block, *others) if has_column else None
        held = partial(grid.held_by, COLUMN, panel.row, (block, *others))
        grid.send(COLUMN, result, result, held, solved)
