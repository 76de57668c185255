"""Householder's QR factorisation on a grid of ranks: panels by TSQR, updates by blocks.

Ranks in a column of the grid factor their rows of a panel, and then together the triangles that
they get, so that a panel takes few messages. The vectors of its reflections follow from its
orthogonal factor: they are the lower triangular factor of that, less a diagonal of signs. How they
combine follows from their products with each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from einmpi.planner.grids import Panel
from einmpi.schedule.panels.grid import COLUMN, EMPTY, ROW, GridSteps, Piece, below
from einmpi.schedule.panels.triangles import solve_narrow
from einmpi.schedule.regions import Region, length, one_run, whole


def qr(grid: GridSteps, q: Piece | None, r: Piece | None, operands: Sequence[Piece]) -> None:
    """Compute the factors that are wanted."""
    matrix = grid.copy(operands[0])
    for panel in grid.panels:
        vectors = factor(grid, panel, matrix)
        reflect(grid, "reflect", panel, vectors, [(matrix, panel.stop)])
        if r is not None and r.region[0] != grid.rows:  # all ranks in a column have its rows
            region = one_run(panel.start, panel.stop), below(grid.columns, panel.start)
            done = grid.spread(COLUMN, panel.row, matrix, "done", region, panel.width)
            grid.compute("copy", r, region, (done, region))
    if r is not None:
        if r.region[0] == grid.rows:
            grid.compute("copy", r, None, matrix)
        grid.compute("upper", r, index=r.region)
    if q is not None:
        grid.compute("identity", q, index=q.region)
        for panel in grid.panels[::-1]:
            vectors = grid.piece("vectors", rows_of(grid, panel), length(grid.rows))
            kept = vectors.region if grid.is_in(panel, COLUMN) else EMPTY
            grid.compute("unit_lower", vectors, kept, (matrix, kept), index=kept)
            reflect(grid, "reflect_back", panel, vectors, [(q, 0)])


def lstsq(grid: GridSteps, result: Piece, operands: Sequence[Piece]) -> None:
    """Reflect both sides of a system, and solve what is left."""
    matrix, right = map(grid.copy, operands)
    for panel in grid.panels:
        vectors = factor(grid, panel, matrix)
        reflect(grid, "reflect", panel, vectors, [(matrix, panel.stop), (right, 0)])
    solve_narrow("solve_upper", grid, result, matrix, right)
    grid.check("check_singular")


def rows_of(grid: GridSteps, panel: Panel) -> Region:
    """Return what a rank has of a panel from its diagonal on."""
    return below(grid.rows, panel.start), one_run(panel.start, panel.stop)


def factor(grid: GridSteps, panel: Panel, matrix: Piece) -> Piece:
    """Factor a panel: its triangle and its vectors take its place. Return the vectors."""
    width = panel.width
    region = rows_of(grid, panel)
    block = region[1]
    own = region if grid.is_in(panel, COLUMN) else EMPTY
    vectors = grid.piece("vectors", region, length(grid.rows))
    grid.compute("local_q", vectors, own, (matrix, own), inner=2 * width)
    ranks = grid.grid.ranks[0]
    square = whole(width)

    def place(rank: int) -> Region:
        first = grid.number(COLUMN, rank) * width
        return one_run(first, first + width), square

    mine = place(grid.rank) if own[1] else EMPTY
    triangles = grid.piece("triangles", (whole(ranks * width), square))
    grid.compute("product_h", triangles, mine, (vectors, own), (matrix, own), inner=length(own[0]))
    grid.send(COLUMN, triangles, triangles, place, triangles.region if own[1] else None)
    joined = grid.piece("joined", (whole((ranks + 1) * width), square))
    grid.compute("join", joined, joined.region if own[1] else EMPTY, triangles, inner=2 * width)
    grid.compute("combine", vectors, own, (joined, mine), inner=width)
    top, its_region = grid.diagonal(COLUMN, panel, vectors)
    grid.compute("to_vectors", vectors, own, (top, its_region), inner=width, index=own)
    grid.compute("copy", matrix, own, (vectors, own))
    triangle = one_run(ranks * width, (ranks + 1) * width), square
    here = (block, block) if own[1] and grid.is_in(panel, ROW) else EMPTY
    grid.compute("put_triangle", matrix, here, (top, its_region), (joined, triangle))
    return vectors


def reflect(
    grid: GridSteps,
    part: str,
    panel: Panel,
    vectors: Piece,
    targets: Sequence[tuple[Piece, int]],
) -> None:
    """Reflect matrices, each from some column on, by the vectors of a panel."""
    block = vectors.region[1]
    known = grid.spread(ROW, panel.column, vectors, "known", vectors.region, length(grid.rows))
    own = known, vectors.region

    def projected(piece: Piece, region: Region) -> Piece:
        found = grid.piece("projected", (block, *region[1:]))
        grid.compute("product_h", found, None, own, (piece, region), inner=length(region[0]))
        grid.reduce(COLUMN, panel.row, found, True)
        held = partial(grid.held_by, COLUMN, panel.row, found.region)
        grid.send(COLUMN, found, found, held, found.region)
        return found

    products = projected(*own)
    for target, first in targets:
        region = vectors.region[0], *(below(runs, first) for runs in target.region[1:])
        operands = own, products, projected(target, region)
        grid.compute(part, target, region, *operands, inner=panel.width)
