"""Searches for the states that cost least: exact, and large neighbourhoods (docs/planner.md)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from einmpi.planner.cost_tables import Groups, Solution, Solver, States
from einmpi.planner.eliminate import Limits
from einmpi.planner.mesh import Mesh, groupings

EXACT_AXES = 3
MAX_STATES = 300  # of a variable, for an exact solution over more axes
MAX_SHAPES = 3
MANY_VARIABLES = 500
# Counted in cells of joined tables: bounds the time without looking at a clock.
SHAPES_BUDGET = 40_000_000
MOVES_BUDGET = 8_500_000
SHAPE_LIMITS = Limits(1 << 22, 30_000_000, 1 << 15)
MOVE_LIMITS = Limits(1 << 18, 5_000_000, 1 << 12)


def search(solver: Solver, start: States | None = None, others: Sequence[States] = ()) -> Solution:
    """The best states found; `start` is needed where parts are prescribed and the mesh has many axes.

    `others` are states that somebody else has found good, where no parts are prescribed: a search that is not exact
    looks there too.
    """
    axes = range(len(solver.mesh.factors))
    best = None
    open_ = [
        len(v.extents) + 1 for k, v in enumerate(solver.problem.variables) if k not in solver.wanted
    ]
    few = max(open_, default=1) ** len(axes) <= (MAX_STATES if start is None else 4 * MAX_STATES)
    if len(axes) <= EXACT_AXES or few:
        best = solver.solve([(axis,) for axis in axes], limits=Limits(budget=SHAPES_BUDGET))
        if best.exact:
            return best
    if start is not None and best is None:
        best = solver.solve([], start)
    elif best is None:
        best = _least(_shapes(solver))
    best = _descend(solver, best)
    if others:
        # Which start leads farther does not show before.
        found = [solver.solve(groups, limits=SHAPE_LIMITS) for groups in _along_windows(solver)]
        found += [_one_axis_at_a_time(solver, states) for states in others]
        best = _least([best, _descend(solver, _least(found))])
    return replace(best, exact=False)


def _least(found: Iterable[Solution]) -> Solution:
    return min(found, key=lambda solution: solution.cost)


def _shapes(solver: Solver) -> Iterator[Solution]:
    """Solutions over axes merged into at most three, balanced shapes first."""
    if len(solver.problem.variables) > MANY_VARIABLES:
        yield _one_axis_at_a_time(solver)
        return
    for groups in _merged(solver.mesh):
        found = solver.solve(groups, limits=SHAPE_LIMITS)
        yield found
        if not found.exact:  # too tangled for this: smaller steps do better
            yield _one_axis_at_a_time(solver)
            return
        if solver.memo.cells > SHAPES_BUDGET:
            return


def _merged(mesh: Mesh) -> Sequence[Groups]:
    """The axes merged into a few; where there are several nodes, also so that no group lies on both levels."""
    if mesh.nodes == 1:
        return groupings(mesh.factors, EXACT_AXES)[:MAX_SHAPES]
    levels = mesh.factors[: mesh.node_axes], mesh.factors[mesh.node_axes :]
    shapes: list[Groups] = []
    for most in ((1, EXACT_AXES - 1), (EXACT_AXES - 1, 1)):
        between, inside = (
            groupings(level, count)[0] for level, count in zip(levels, most, strict=True)
        )
        later = tuple(tuple(mesh.node_axes + axis for axis in group) for group in inside)
        shapes.append((*between, *later))
    return [*dict.fromkeys(shapes), groupings(mesh.factors, EXACT_AXES)[0]][:MAX_SHAPES]


def _along_windows(solver: Solver) -> list[Groups]:
    """Groups that labels with few indices can take: what lies in one of their windows. The heaviest tensors decide."""
    mesh = solver.mesh
    weights: dict[int, int] = {}
    for edge in solver.problem.edges:
        for extent in set(edge.bound):
            if 1 < extent < mesh.ranks:
                weights[extent] = weights.get(extent, 0) + edge.weight * edge.nbytes
    if not weights:
        return []
    borders = {0, len(mesh.factors)}
    for extent in sorted(weights, key=lambda extent: (-weights[extent], extent)):
        for border in (
            border for window in mesh.windows(extent) for border in (window[0], window[-1] + 1)
        ):
            borders |= {border} if len(borders) <= EXACT_AXES else set()
    while len(borders) <= EXACT_AXES:
        first, last = max(itertools.pairwise(sorted(borders)), key=lambda pair: pair[1] - pair[0])
        borders.add((first + last) // 2)
    return [tuple(tuple(range(*pair)) for pair in itertools.pairwise(sorted(borders)))]


def _one_axis_at_a_time(solver: Solver, start: States | None = None) -> Solution:
    found = Solution(0, start or solver.uncut(), False)
    for axis in range(len(solver.mesh.factors)):
        found = solver.solve([(axis,)], found.states, MOVE_LIMITS)
    return found


def _descend(solver: Solver, best: Solution) -> Solution:
    """Free one axis at a time while that saves a hundredth; then two at a time, and start again if that did."""
    solver.memo.cells = 0
    count = 1
    while solver.memo.cells <= MOVES_BUDGET:
        before = best.cost
        for move in _moves(solver.mesh, best.states, count):
            if solver.memo.cells <= MOVES_BUDGET:
                best = _least([best, solver.solve(move, best.states, MOVE_LIMITS)])
        saved = before - best.cost > best.cost // 100
        if count == 2 and not saved:
            return best
        count = 1 if saved else 2
    return best


def _moves(mesh: Mesh, states: States, count: int) -> Sequence[Groups]:
    """Which `count` axes to free. Axes of equal length and level that cut everything alike are tried once."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for axis, factor in enumerate(mesh.factors):
        alike.setdefault(
            (factor, axis < mesh.node_axes, *(state[axis] for state in states)), []
        ).append(axis)
    classes = list(alike.values())
    if count == 1:
        return [((axes[0],),) for axes in classes]
    pairs = [((axes[0],), (axes[1],)) for axes in classes if len(axes) > 1]
    return pairs + [
        ((first[0],), (second[0],)) for first, second in itertools.combinations(classes, 2)
    ]
