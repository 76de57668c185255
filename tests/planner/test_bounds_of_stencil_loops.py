"""Lower bounds of loops over stencils: never above a plan, whatever it repeats."""

from __future__ import annotations

import random

import numpy as np
import pytest

import einmpi
from einmpi.planner.factor import Factored, factor
from einmpi.planner.lower_bound.halos import HaloEdge
from einmpi.planner.lower_bound.pieces import Charges, KnownPlan, PartsProblem
from einmpi.planner.lower_bound.words import best_lower_bound
from einmpi.planner.make_plan import make_plan
from einmpi.planner.mesh import Mesh
from einmpi.planner.orders import NO_ORDERS, digit_orders
from einmpi.planner.plan import Options
from einmpi.planner.solving.solver import Solver

INSIDE = "(i>0)&(i<n-1)&(j>0)&(j<m-1)"
CROSS = "u[i-1,j] + u[i+1,j] + u[i,j-1] + u[i,j+1]"
CORNERS = "u[i-1,j-1] + u[i-1,j+1] + u[i+1,j-1] + u[i+1,j+1]"
RING = "u[(i+1)%n,j] + u[(i-1)%n,j] + u[i,(j+1)%m] + u[i,(j-1)%m]"
RING_WITH_CORNERS = f"{RING} + u[(i+1)%n,(j+1)%m] + u[(i-1)%n,(j-1)%m]"
CHANGE = "; change = max(abs(V[i,j] - u[i,j]))"
HEAD = "V[i:n,j:m] = "
LOOPS = {
    "star": f"{HEAD}where({INSIDE}, {CROSS}, u[i,j])",
    "star with its change": f"{HEAD}where({INSIDE}, {CROSS}, u[i,j]){CHANGE}",
    "box": f"{HEAD}where({INSIDE}, {CORNERS}, 0)",
    "box with its change": f"{HEAD}where({INSIDE}, {CORNERS} + {CROSS}, 0){CHANGE}",
    "ring": HEAD + RING,
    "ring with its change": HEAD + RING + CHANGE,
    "ring with corners": HEAD + RING_WITH_CORNERS + CHANGE,
    "ring and ends": f"{HEAD}u[(i+1)%n,j] + where((j>0)&(j<m-1), u[i,j-1] + u[i,j+1], 0){CHANGE}",
    "one side, far": f"{HEAD}where(i>2, u[i-3,j], 0) + u[i,j]{CHANGE}",
    "turned": f"{HEAD}where(i<n-1, u[i+1,j], 0) * 2; change = sum(V[i,j])",
    "two steps": f"W[i:n,j:m] = where(i>0, u[i-1,j], 0) + u[i,j]; "
    f"{HEAD}where(j>0, W[i,j-1], 0) + W[i,j]",
    "two wide steps": f"W[i:n,j:m] = where((i>0)&(i<n-1), u[i-1,j] + u[i+1,j], 0) + u[i,j]; "
    f"{HEAD}where((j>0)&(j<m-1), W[i,j-1] + W[i,j+1], 0) + W[i,j]",
}
SHAPES = ((6, 6), (12, 12), (4, 16), (9, 2))
CARRY = {"u": "V"}


def graph_of(loop, shape):
    n, m = shape
    outputs = ["V", "change"] if "change" in LOOPS[loop] else ["V"]
    return einmpi.program(LOOPS[loop], outputs=outputs, n=n, m=m, u=shape, dtype="float32").graph


def problem_of(graph, ranks, with_orders) -> tuple[Solver, Factored]:
    orders = NO_ORDERS
    mesh = Mesh(ranks)
    if with_orders:
        orders = digit_orders(graph, len(mesh.factors), CARRY)
    factored = factor(graph, ("u",), CARRY, same_layout={"V": "u"}, orders=orders)
    return Solver(factored, mesh), factored


def every_value(solver, factored):
    """Return the values of each variable: what cuts each axis, and the parts of each symbol."""
    states = solver.uncut()
    rows = [solver.rows(k, solver.every_axis, state) for k, state in enumerate(states)]
    parts = []
    for variable, choices, state in zip(factored.variables, rows, states, strict=True):
        parts.append(solver.every_axis.parts(choices, len(variable.extents), state))
    return rows, parts


@pytest.mark.sampled(12)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 8, 12])
def test_an_edge_moves_no_less_than_what_is_needed_and_not_stored(loop, shape, ranks):
    """All pairs of a layout and a state, in both orders of the digits."""
    graph = graph_of(loop, shape)
    for with_orders in (False, True):
        solver, factored = problem_of(graph, ranks, with_orders)
        rows, parts = every_value(solver, factored)
        problem = PartsProblem(graph, ranks, factored, Charges({}, {}))
        found = [edge for edge in problem.edges if isinstance(edge, HaloEdge)]
        assert found
        for edge in found:
            table = solver.edge_table(edge.edge, rows, solver.every_axis, solver.uncut())
            least = edge.words(
                edge.before(parts[edge.edge.source]), edge.after(parts[edge.edge.target])
            )
            assert (least <= table.costs // 4).all()
            if shape == (12, 12) and ranks == 2 and "far" not in loop:
                assert (least == table.costs // 4).any(axis=0).all()


def every_plan(graph, ranks, with_orders):
    """Return the words of each choice of values, the operations it repeats, and all parts."""
    solver, factored = problem_of(graph, ranks, with_orders)
    rows, parts = every_value(solver, factored)
    sizes = [len(each) for each in rows]

    def spread(costs, ends):
        shape = [size if number in ends else 1 for number, size in enumerate(sizes)]
        ordered = costs if list(ends) == sorted(ends) else costs.T
        return ordered.reshape(shape)

    words = np.zeros(sizes, np.int64)
    for edge in factored.edges:
        table = solver.edge_table(edge, rows, solver.every_axis, solver.uncut())
        words += spread(table.costs // 4, table.scope)
    repeated = np.zeros(sizes, np.int64)
    for number, each in enumerate(parts):
        repeated += spread(factored.operations[number] * (each[:, -1] - 1), (number,))
    return factored, parts, words, repeated


def bound_of(graph, ranks, known):
    return best_lower_bound(graph, ranks, ("u",), known, is_default=True)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_no_plan_of_all_is_below_the_bound_of_another(loop, shape, ranks):
    """Plans of all kinds, the best and the worst, against every plan that repeats no more."""
    graph = graph_of(loop, shape)
    rng = random.Random(f"{loop} {shape} {ranks}")
    for with_orders in (False, True):
        factored, parts, words, repeated = every_plan(graph, ranks, with_orders)
        chosen = [rng.randrange(words.size) for _ in range(4)]
        for most in np.unique(repeated)[:6].tolist():  # the best plan that repeats no more
            allowed = np.where(repeated <= most, words, np.iinfo(np.int64).max)
            chosen.append(int(allowed.argmin()))
        for place in chosen:
            cell = np.unravel_index(place, words.shape)
            names = {
                name: tuple(parts[number][cell[number]].tolist())
                for name, number in factored.number.items()
            }
            known = KnownPlan(int(words[cell]), names, carry=CARRY)
            assert known.repeated_operations(graph) == repeated[cell]
            bound = bound_of(graph, ranks, known)
            assert bound.words <= words[repeated <= repeated[cell]].min()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("shape", [(12, 12), (32, 20), (64, 64)])
def test_plans_of_loops_that_move_something_have_a_bound(loop, shape):
    graph = graph_of(loop, shape)
    for ranks in (2, 4, 6, 7, 12, 16, 64):
        plan = make_plan(graph, ranks, Options(carry=CARRY))
        assert plan.lower_bound <= plan.words_predicted
        assert plan.lower_bound > 0 or plan.words_predicted == 0, ranks
        if loop.startswith("two") and shape == (64, 64):
            assert plan.lower_bound == plan.words_predicted
