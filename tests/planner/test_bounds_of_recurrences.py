"""Lower bounds of recurrences, all of whose steps count: no plan moves less."""

from __future__ import annotations

import itertools

import pytest
from bound_cases import is_among

import einmpi
from einmpi.planner.factor import factor
from einmpi.planner.lower_bound.words import lower_bound_words
from einmpi.planner.make_plan import make_plan
from einmpi.planner.mesh import Mesh
from einmpi.planner.plan import Options
from einmpi.planner.search import search
from einmpi.planner.solving.solver import Solver

RNN = "h[t,k] = tanh(sum(W[k,l] * where(t > 0, h[t-1,l], 0.0)) + sum(U[k,j] * x[t,j]))"
FILTER = """
guess[t,i] = where(t > 0, sum(A[i,j] * m[t-1,j]), 0.0)
m[t,i] = guess[t,i] + gain[i] * (y[t] - sum(C[j] * guess[t,j]))
"""
SPREAD = "P[t:steps,i,l] = where(t > 0, sum(A[i,k] * P[t-1,k,j] * B[j,l]), Q[i,l])"
AFTERWARDS = f"{RNN}; Z[t,o] = sum(h[t,k] * V[o,k])"
CASES = {
    "a network": (RNN, {"W": (8, 8), "U": (8, 4), "x": (5, 4)}, {}),
    "a narrow network": (RNN, {"W": (3, 3), "U": (3, 40), "x": (12, 40)}, {}),
    "a wide network": (RNN, {"W": (64, 64), "U": (64, 2), "x": (30, 2)}, {}),
    "a filter": (FILTER, {"A": (12, 12), "gain": (12,), "C": (12,), "y": (9,)}, {}),
    "two products": (SPREAD, {"A": (6, 6), "B": (6, 6), "Q": (6, 6)}, {"steps": 7}),
    "with a reader": (AFTERWARDS, {"W": (8, 8), "U": (8, 4), "x": (5, 4), "V": (9, 8)}, {}),
}
STRATEGIES = ("eindecomp", "eindecomp-paper", "sqrt", "replicate")


def graph_of(case):
    text, shapes, sizes = CASES[case]
    return einmpi.program(text, dtype="float32", **shapes, **sizes).graph


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_the_bound_is_never_above_the_best_plan(case, ranks):
    graph = graph_of(case)
    for resident in ((), tuple(vertex.name for vertex in graph.inputs)):
        factored = factor(graph, resident, same_layout=graph.carried)
        found = search(Solver(factored, Mesh(ranks)))
        assert found.exact
        best = found.cost // 4
        for words in (best, best + 1, 3 * best + 100, 10**7):
            assert 0 <= lower_bound_words(graph, ranks, resident, words) <= best


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 12])
def test_no_plan_of_any_strategy_is_below_the_bound_of_another(case, ranks):
    graph = graph_of(case)
    for resident in ((), tuple(vertex.name for vertex in graph.inputs)):
        plans = [make_plan(graph, ranks, Options(name, resident=resident)) for name in STRATEGIES]
        for plan, other in itertools.product(plans, plans):
            if is_among(other, plan):
                assert plan.lower_bound <= other.words_predicted


def test_every_step_counts():
    """A filter whose matrices are cut moves the same in each step."""
    bounds = []
    for steps in (100, 200):
        shapes = {"A": (64, 64), "gain": (64,), "C": (64,), "y": (steps,)}
        graph = einmpi.program(FILTER, dtype="float32", **shapes).graph
        plan = make_plan(graph, 4, Options(resident=tuple(shapes)))
        assert plan.lower_bound == plan.words_predicted > 0
        bounds.append(plan.lower_bound)
    assert 1.9 * bounds[0] < bounds[1] <= 2 * bounds[0]
