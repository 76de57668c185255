"""Gaussian elimination on a grid of ranks, with pivots from a tournament.

Rows stay on their ranks. For each panel, each rank in a column of the grid proposes rows; of those
that all propose, all choose the same. The rows chosen are sent along columns of the grid, and take
their places in the triangular factor; a rank moves the rows that it has left together. So the
values decide who sends how many rows, and nothing else: all together always send as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from einmpi.planner.grids import NUMBERS, Panel
from einmpi.schedule.panels.grid import COLUMN, EMPTY, ROW, GridSteps, Piece, below
from einmpi.schedule.panels.triangles import solve_narrow, solve_wide
from einmpi.schedule.regions import Region, length, one_run, whole


def solve(grid: GridSteps, result: Piece, operands: Sequence[Piece]) -> None:
    """Eliminate in the matrix and on its right, and solve what is left."""
    matrix, *given = operands
    if given:
        right = grid.copy(given[0])
    else:
        right = grid.piece("right", result.region)
        grid.compute("identity", right, index=right.region)
    factor = grid.piece("factor", matrix.region)
    done = grid.piece("done", right.region) if grid.is_narrow else result
    elimination = Elimination(grid, matrix, factor, (right, done))
    for panel in grid.panels:
        chosen = elimination.add_panel(panel)
        block = one_run(panel.start, panel.stop)
        has_diagonal = grid.is_in(panel, ROW) and grid.is_in(panel, COLUMN)
        grid.compute("triangle", factor, (block, block) if has_diagonal else EMPTY, chosen)
    if grid.is_narrow:
        solve_narrow("solve_upper", grid, result, factor, done)
    else:
        solve_wide("solve_upper", grid, result, factor)
    grid.check("check_singular")


def diagonal(grid: GridSteps, result: Piece, operands: Sequence[Piece]) -> None:
    """Keep the diagonal of the triangular factor, the first element with the sign of the rows."""
    elimination = Elimination(grid, operands[0])
    numbers = grid.piece("numbers", result.region, dtype="int64")
    for panel in grid.panels:
        chosen = elimination.add_panel(panel)
        for part, piece in (("store_diagonal", result), ("store_numbers", numbers)):
            grid.compute(part, piece, (one_run(panel.start, panel.stop),), chosen)
    grid.compute("sign", result, None, numbers)


class Elimination:
    """Eliminates panel by panel, in a copy of a matrix and on the right of it.

    `factor` takes the rows that are done, and so does the second piece of `right`.
    """

    def __init__(
        self,
        grid: GridSteps,
        matrix: Piece,
        factor: Piece | None = None,
        right: tuple[Piece, Piece] | None = None,
    ) -> None:
        self.grid = grid
        self.left = grid.copy(matrix)
        # The numbers of the rows as they lie now, and then how many of them are left.
        self.order = grid.piece("order", (whole(length(grid.rows) + 1),), dtype="int64")
        grid.compute("begin_order", self.order, index=(grid.rows,))
        self.updated = [(self.left, factor), *([right] if right else [])]
        me = grid.number(COLUMN, grid.rank)
        self.me = (one_run(me, me + 1),)

    def add_panel(self, panel: Panel) -> Piece:
        """Add the steps of a panel; return its factors, with the numbers of the chosen rows."""
        grid = self.grid
        rows, block = grid.rows, one_run(panel.start, panel.stop)
        in_panel = (rows, block) if grid.is_in(panel, COLUMN) else EMPTY
        chosen = self.choose(panel, in_panel)
        known = self.order, chosen
        taken = []
        for left, done in self.updated:
            columns = left.region[1:]
            if left is self.left:
                columns = (below(grid.columns, panel.stop),)
            piece = grid.piece("taken", (block, *columns))
            grid.compute("take", piece, None, *known, (left, (rows, *columns)), index=self.me)
            grid.compute("compact", left, (rows, *columns), *known, index=self.me)
            taken.append((piece, left, done))
        grid.compute("compact", self.left, in_panel, *known, index=self.me)
        grid.compute("forget", self.order, None, chosen, index=self.me)
        lower = self.spread_lower(panel, chosen, in_panel)
        counts = grid.piece("counts", (whole(grid.grid.ranks[0]),), dtype="int64")
        grid.compute("count_chosen", counts, None, chosen)
        for piece, left, done in taken:
            held = partial(grid.held_by, COLUMN, panel.row, piece.region)
            grid.send(COLUMN, piece, piece, held, piece.region, counts.slot)
            grid.compute("sort", piece, None, chosen, inner=panel.width // 2)
            if done is not None:
                place = piece.region if grid.is_in(panel, ROW) else EMPTY[: len(piece.region)]
                grid.compute("copy", done, place, (piece, place))
            where = rows, *piece.region[1:]
            grid.compute("update_left", left, where, self.order, lower, piece, inner=panel.width)
        return chosen

    def choose(self, panel: Panel, in_panel: Region) -> Piece:
        """Let ranks propose rows, and choose among them; return their factors on all ranks."""
        grid, width = self.grid, panel.width
        ranks = grid.grid.ranks[0]
        columns = whole(width + NUMBERS)

        def proposed_by(rank: int) -> Region:
            first = grid.number(COLUMN, rank) * width
            return one_run(first, first + width), columns

        proposed = grid.piece("proposed", (whole(ranks * width), columns))
        own = proposed_by(grid.rank) if in_panel[0] else EMPTY
        operands = self.order, (self.left, in_panel)
        grid.compute("propose", proposed, own, *operands, inner=width, index=self.me)
        wanted = proposed.region if in_panel[0] else None
        grid.send(COLUMN, proposed, proposed, proposed_by, wanted)
        chosen = grid.piece("chosen", (whole(width), columns))
        is_in = chosen.region if grid.is_in(panel, COLUMN) else EMPTY
        grid.compute("choose", chosen, is_in, proposed, inner=width)
        held = partial(grid.held_by, ROW, panel.column, chosen.region)
        grid.send(ROW, chosen, chosen, held, chosen.region)
        grid.note("note_zero", panel, (chosen, (whole(width), whole(width))))
        return chosen

    def spread_lower(self, panel: Panel, chosen: Piece, in_panel: Region) -> Piece:
        """Send the lower factor of the rows that are left along rows of the grid."""
        grid, rows = self.grid, self.grid.rows
        lower = grid.piece("lower", (rows, one_run(panel.start, panel.stop)))
        operands = self.order, chosen, (self.left, in_panel)
        grid.compute("divide_left", lower, in_panel, *operands, inner=panel.width // 2)
        counts = grid.piece("counts", (whole(grid.grid.ranks[1]),), dtype="int64")
        owner = one_run(panel.column, panel.column + 1)
        grid.compute("count_left", counts, None, self.order, index=(owner,))
        region = below(rows, panel.stop), lower.region[1]
        held = partial(grid.held_by, ROW, panel.column, region)
        grid.send(ROW, lower, lower, held, region, counts.slot)
        return lower
