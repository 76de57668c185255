"""The functions of one matrix on a grid of ranks: what makes the steps of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from einmpi.graph.eingraph import Vertex
from einmpi.planner.plan import Plan
from einmpi.schedule.panels import elimination, orthogonal
from einmpi.schedule.panels.grid import GridSteps, Piece
from einmpi.schedule.panels.triangles import cholesky, triangular
from einmpi.schedule.steps import Step

OF_ONE_RESULT: Mapping[str, Callable[[GridSteps, Piece, Sequence[Piece]], None]] = {
    "cholesky": cholesky,
    "inv": elimination.solve,
    "lstsq": orthogonal.lstsq,
    "lu_diagonal": elimination.diagonal,
    "solve": elimination.solve,
    "solve_lower": partial(triangular, "solve_lower"),
    "solve_upper": partial(triangular, "solve_upper"),
}


def steps_on_grid(
    plan: Plan, vertex: Vertex, rank: int, results: Mapping[str, Piece], operands: Sequence[Piece]
) -> list[Step]:
    """Return the steps of a rank for a function of one matrix, given the results by their names."""
    grid = GridSteps(plan, vertex, rank)
    name = vertex.computed_einsum.required_matrix.record.name
    if name == "qr":
        orthogonal.qr(grid, results.get("q"), results.get("r"), operands)
    else:
        OF_ONE_RESULT[name](grid, results[""], operands)
    return grid.steps
