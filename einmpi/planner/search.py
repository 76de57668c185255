"""The search for the best cuts of one graph on one mesh: exact, or by freeing a few axes at a time.

docs/planner.md, "The search", describes the steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from einmpi.planner.mesh import Mesh, groupings
from einmpi.planner.solving.elimination import Limits
from einmpi.planner.solving.solver import Solution, Solver
from einmpi.planner.states import Groups, States

EXACT_AXES = 3  # up to so many axes, all states are searched at once
MAX_STATES = 300  # of a variable, for an exact search over more axes
MAX_MERGED_SHAPES = 3  # ways to merge the axes that are tried
MANY_VARIABLES = 500  # too many to merge axes: one axis at a time
# Work is counted in cells of joined tables, which bounds the time without looking at a clock.
EXACT_BUDGET_CELLS = 40_000_000
DESCENT_BUDGET_CELLS = 8_500_000
MERGED_LIMITS = Limits(1 << 22, 30_000_000, 1 << 15)
MOVE_LIMITS = Limits(1 << 18, 5_000_000, 1 << 12)
# In a tangled graph one axis is freed at a time, never two.
TANGLED_LIMITS = Limits(1 << 23, 60_000_000, 1 << 16)
TANGLED_BUDGET_CELLS = 30_000_000


def search(
    solver: Solver, start: States | None = None, other_starts: Sequence[States] = ()
) -> Solution:
    """Return the best states found.

    `start` is needed where parts are prescribed and the mesh has many axes. `other_starts` are
    further states to start from, where no parts are prescribed and the search is not exact.
    """
    best = None
    if solver.is_tangled:
        best = _one_axis_at_a_time(solver, start)
    elif _few_states(solver, start is not None):
        every_axis = [(axis,) for axis in range(len(solver.mesh.factors))]
        solver = replace(solver, across_windows=True)
        best = solver.solve(every_axis, limits=Limits(budget=EXACT_BUDGET_CELLS))
        if best.exact:
            return best
    elif start is not None:
        best = solver.solve([], start)
    else:
        best = _cheapest(_merged_solutions(solver))
    best = _descend(solver, best)
    if other_starts:
        # Which start leads farther does not show before the descent.
        found = []
        for groups in _groups_along_windows(solver):
            found.append(solver.solve(groups, limits=MERGED_LIMITS))
        for states in other_starts:
            found.append(_one_axis_at_a_time(solver, states))
        best = _cheapest([best, _descend(solver, _cheapest(found))])
    return replace(best, exact=False)


def search_holding(solver: Solver, held: Mapping[int, tuple[int, ...]]) -> Solution:
    """Return the best states found while some layouts are held as they are.

    Without them, the axes can be merged: every shape is solved, and improved on its own, because
    which one leads farthest does not show before. In the end the layouts are set free, unless it
    costs nothing to have the tensors there.
    """
    holding = replace(solver, fixed={**solver.fixed, **held})
    found = []
    shapes = merged_shapes(solver.mesh)
    if len(solver.mesh.factors) <= EXACT_AXES:
        shapes = shapes[:1]  # few axes are not merged
    for groups in shapes:
        merged = holding.solve(groups, limits=MERGED_LIMITS)
        found.append(_descend(holding, merged, most_axes=1))
    best = _cheapest(found)
    if any(_cost_of_layout(solver, number, best.states) for number in held):
        best = _descend(solver, best, most_axes=1)
    return replace(best, exact=False)


def _cost_of_layout(solver: Solver, layout: int, states: States) -> int:
    """Return what it costs to bring a computed tensor into its layout."""
    total = 0
    for edge in solver.problem.edges:
        if edge.target == layout and edge.source is not None:
            total += solver.edge_cost(edge, states[edge.source], states[layout])
    return total


def improve_across_windows(
    solver: Solver, best: Solution, held: Mapping[int, tuple[int, ...]]
) -> Solution:
    """Improve a solution by axes of several windows on one label.

    Each axis is freed once. Only if that saves a two-hundredth, the search goes on. Layouts that
    were held in the search before stay as they are.
    """
    staying = {number: best.states[number] for number in held}
    solver = replace(solver, across_windows=True, fixed={**solver.fixed, **staying})
    improved = best
    for groups in _moves(solver, best.states, 1):
        improved = _cheapest([improved, solver.solve(groups, improved.states, _limits(solver))])
    if best.cost - improved.cost > best.cost // 200:
        improved = _descend(solver, improved, most_axes=1 if held else 2)
    return replace(improved, exact=False)


def is_tangled(solver: Solver) -> bool:
    """Return whether the axes, merged into three, cannot be searched at once.

    Repeated layers should share their variables: the answer is the same, and comes sooner.
    """
    limit = Limits().first
    return solver.largest_join(merged_shapes(solver.mesh)[0], limit) > limit


def _few_states(solver: Solver, has_start: bool) -> bool:
    """Return whether all states of all axes can be searched at once."""
    axes = len(solver.mesh.factors)
    if axes <= EXACT_AXES:
        return True
    most_symbols = 1
    for number, variable in enumerate(solver.problem.variables):
        if number not in solver.prescribed:
            most_symbols = max(most_symbols, len(variable.extents) + 1)
    most_states = 4 * MAX_STATES if has_start else MAX_STATES
    states: int = most_symbols**axes
    return states <= most_states


def _cheapest(found: Iterable[Solution]) -> Solution:
    """Return the solution with the least cost; of equal ones the first."""
    return min(found, key=lambda solution: solution.cost)


def _merged_solutions(solver: Solver) -> Iterator[Solution]:
    """Yield solutions with the axes merged into at most three, balanced shapes first."""
    if len(solver.problem.variables) > MANY_VARIABLES:
        yield _one_axis_at_a_time(solver)
        return
    for groups in merged_shapes(solver.mesh):
        found = solver.solve(groups, limits=MERGED_LIMITS)
        yield found
        if not found.exact:  # too tangled for this: smaller steps do better
            yield _one_axis_at_a_time(solver)
            return
        if solver.memo.cells > EXACT_BUDGET_CELLS:
            return


def merged_shapes(mesh: Mesh) -> Sequence[Groups]:
    """Return ways to merge the axes into at most three groups.

    Where there are several nodes, the first ways have no group with axes of both levels.
    """
    if mesh.nodes == 1:
        return groupings(mesh.factors, EXACT_AXES)[:MAX_MERGED_SHAPES]
    shapes: list[Groups] = []
    for groups_between in (1, EXACT_AXES - 1):
        groups_inside = EXACT_AXES - groups_between
        between = groupings(mesh.factors[: mesh.node_axes], groups_between)[0]
        inside = groupings(mesh.factors[mesh.node_axes :], groups_inside)[0]
        shifted = tuple(tuple(mesh.node_axes + axis for axis in group) for group in inside)
        shape = (*between, *shifted)
        if shape not in shapes:
            shapes.append(shape)
    shapes.append(groupings(mesh.factors, EXACT_AXES)[0])
    return shapes[:MAX_MERGED_SHAPES]


def _groups_along_windows(solver: Solver) -> list[Groups]:
    """Return three groups of axes that short labels can take; nothing without short labels.

    A label shorter than the number of ranks can take a group of axes only from one of its windows.
    The groups lie between borders of windows; those of the labels with the heaviest tensors come
    first.
    """
    mesh = solver.mesh
    weights: dict[int, int] = {}  # extent of a short label → bytes of the tensors that have it
    for edge in solver.problem.edges:
        for extent in set(edge.bound):
            if 1 < extent < mesh.ranks:
                weights[extent] = weights.get(extent, 0) + edge.weight * edge.nbytes
    if not weights:
        return []
    borders = {0, len(mesh.factors)}
    for extent in sorted(weights, key=lambda extent: (-weights[extent], extent)):
        for window in mesh.windows(extent):
            for border in (min(window), max(window) + 1):
                if len(borders) <= EXACT_AXES:
                    borders.add(border)
    while len(borders) <= EXACT_AXES:  # halve the longest group
        pairs = itertools.pairwise(sorted(borders))
        first, last = max(pairs, key=lambda pair: pair[1] - pair[0])
        borders.add((first + last) // 2)
    groups = [tuple(range(*pair)) for pair in itertools.pairwise(sorted(borders))]
    return [groups]


def _limits(solver: Solver) -> Limits:
    return TANGLED_LIMITS if solver.is_tangled else MOVE_LIMITS


def _one_axis_at_a_time(solver: Solver, start: States | None = None) -> Solution:
    """Free each axis once, first to last; without a start, from states that cut nothing."""
    found = Solution(0, start or solver.uncut(), False)
    for axis in range(len(solver.mesh.factors)):
        found = solver.solve([(axis,)], found.states, _limits(solver))
    return found


def _descend(solver: Solver, best: Solution, most_axes: int = 2) -> Solution:
    """Improve a solution by freeing one axis at a time as long as that saves a hundredth.

    Then two axes are freed at a time, if so many are allowed; if that saves a hundredth, single
    axes are tried again.
    """
    budget = TANGLED_BUDGET_CELLS if solver.is_tangled else DESCENT_BUDGET_CELLS
    solver.memo.cells = 0
    free_axes = 1
    while solver.memo.cells <= budget:
        cost_before = best.cost
        for groups in _moves(solver, best.states, free_axes):
            if solver.memo.cells <= budget:
                best = _cheapest([best, solver.solve(groups, best.states, _limits(solver))])
        saves = cost_before - best.cost > best.cost // 100
        if saves:
            free_axes = 1
        elif free_axes < most_axes and not solver.is_tangled:
            free_axes += 1
        else:
            return best
    return best


def _moves(solver: Solver, states: States, free_axes: int) -> Sequence[Groups]:
    """Return the sets of one or two axes to free.

    Axes of equal length and level that cut everything alike are interchangeable: one of them, or
    one pair of them, is tried. They are not where digits have several orders: there each axis alone
    is tried.
    """
    mesh = solver.mesh
    has_orders = any(each.orders or each.blocks for each in solver.problem.variables)
    alike: dict[tuple[int, ...], list[int]] = {}
    for axis, length in enumerate(mesh.factors):
        symbols = [state[axis] for state in states]
        which = axis if has_orders and free_axes == 1 else -1
        alike.setdefault((length, axis < mesh.node_axes, which, *symbols), []).append(axis)
    classes = list(alike.values())
    if free_axes == 1:
        return [((axes[0],),) for axes in classes]
    moves = [((axes[0],), (axes[1],)) for axes in classes if len(axes) > 1]
    for first, second in itertools.combinations(classes, 2):
        moves.append(((first[0],), (second[0],)))
    return moves
