"""Plans with random cuts, as many as possible of them by axes of several windows on one label."""

import random

from einmpi.planner.cut_search import CutSearch
from einmpi.planner.solving.solver import Solution
from einmpi.planner.states import choices, symbols_to_cut


def crosses_windows(mesh, extents, cuts):
    """Whether axes of several windows cut one label; `cuts` are numbers of labels."""
    for symbol, extent in enumerate(extents):
        axes = {axis for axis, cut in enumerate(cuts) if cut == symbol}
        if axes and not any(axes <= set(window) for window in mesh.windows(extent)):
            return True
    return False


def plan_crosses_windows(plan):
    for name, state in plan.states.items():
        labels = plan.graph[name].computed_einsum.labels
        extents = [extent for _, extent in plan.graph[name].computed_einsum.extents]
        cuts = [None if label is None else labels.index(label) for label in state]
        if crosses_windows(plan.mesh, extents, cuts):
            return True
    for name, cuts in plan.layouts.items():
        if crosses_windows(plan.mesh, plan.graph[name].bound, cuts):
            return True
    return False


def random_states(search, choose):
    """Return a state for each variable, if possible one with axes of several windows on a label."""
    mesh = search.mesh
    axes = range(len(mesh.factors))
    states = []
    for number, variable in enumerate(search.problem.variables):
        if number in search.fixed:
            states.append(search.fixed[number])
            continue
        extents = variable.extents
        uncut = (len(extents),) * len(mesh.factors)
        symbols = symbols_to_cut(extents, uncut)
        rows = choices(mesh, extents, [(axis,) for axis in axes], uncut, symbols, True)
        across = [row for row in rows.tolist() if crosses_windows(mesh, extents, row)]
        states.append(tuple(choose.choice(across or rows.tolist())))
    return states


def random_cuts(monkeypatch, seed):
    """Let the planner take random cuts."""

    def solve(search, price):
        return Solution(0, random_states(search, random.Random(seed)), False)

    monkeypatch.setattr(CutSearch, "solve", solve)
