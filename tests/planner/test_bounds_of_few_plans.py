"""Lower bounds that hold among plans that repeat no more operations: no such plan moves less."""

from __future__ import annotations

import contextlib
import itertools
import random

import pytest
from bound_cases import TRAPS, is_among, random_products, repeated_operations
from plan_oracle import Oracle, R, axes_of, random_graph
from target_graphs import llama

import einmpi
from einmpi.planner.lower_bound import pieces
from einmpi.planner.lower_bound.pieces import (
    ALL_CUTS,
    REPEATING_NO_MORE,
    WITHIN_MEMORY,
    known_plan,
)
from einmpi.planner.lower_bound.words import best_lower_bound, lower_bound_words
from einmpi.planner.make_plan import make_plan
from einmpi.planner.plan import Options

STRATEGIES = ("eindecomp", "eindecomp-paper", "sqrt", "replicate")


def bound_of(plan):
    known = known_plan(plan, plan.words_predicted, None)
    return best_lower_bound(plan.graph, plan.mesh.ranks, plan.resident, known, is_default=True)


def all_plans(graph, ranks, resident):
    """(words, repeated operations) of every choice of states, with the best layouts for them."""
    oracle = Oracle(graph, ranks, resident)
    order = graph.computed
    lengths = axes_of(ranks)

    def repetitions(vertex, state):
        copies = 1
        for length, symbol in zip(lengths, oracle.states[vertex.name][state], strict=True):
            copies *= length if symbol == R else 1
        return vertex.operations() * (copies - 1)

    def visit(k, nbytes, repeated, chosen, opened):
        if k == len(order):
            yield nbytes // 4, repeated
            return
        vertex = order[k]
        added = oracle.step(vertex, chosen, opened)
        for state in range(len(added)):
            after = opened | oracle.opened(vertex, opened, state)
            yield from visit(
                k + 1,
                nbytes + int(added[state]),
                repeated + repetitions(vertex, state),
                {**chosen, vertex.name: state},
                after,
            )

    start = oracle.start()
    yield from visit(0, sum(int(costs.min()) for costs in start.values()), 0, {}, start)


def small_graph(rng):
    extents = rng.choice(((1, 2, 3, 4, 5), (2, 4, 8, 16), (3, 6, 12, 100)))
    return random_graph(rng, rng.choice((1, 2, 3)), extents, most_labels=2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(20))
def test_no_plan_of_all_that_repeat_no_more_moves_less(seed):
    """Every plan of small graphs."""
    rng = random.Random(seed)
    for _ in range(6):
        graph = small_graph(rng)
        resident = tuple(vertex.name for vertex in graph.inputs if rng.random() < 0.4)
        ranks = rng.choice((2, 3, 4, 6))
        every = sorted(set(all_plans(graph, ranks, resident)))
        for strategy in STRATEGIES:
            plan = make_plan(graph, ranks, Options(strategy, resident=resident))
            bound = bound_of(plan)
            most = repeated_operations(plan)
            least = min(words for words, repeated in every if repeated <= most)
            assert bound.words <= least, f"{strategy} {ranks} {resident}\n{graph}"
            if bound.among == ALL_CUTS:
                assert bound.words <= every[0][0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 12])
def test_plans_that_repeat_less_never_move_less(trap, ranks):
    program, shapes, resident = TRAPS[trap]
    graph = einmpi.program(program, dtype="float32", **shapes).graph
    check_all_strategies(graph, ranks, tuple(resident.split()))


def check_all_strategies(graph, ranks, resident=()):
    """Each plan against the bounds of all others."""
    plans = [make_plan(graph, ranks, Options(name, resident=resident)) for name in STRATEGIES]
    for plan, other in itertools.product(plans, plans):
        if is_among(other, plan):
            assert plan.lower_bound <= other.words_predicted
    return sum(plan.among == REPEATING_NO_MORE for plan in plans)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_no_plan_of_random_graphs_is_below_a_bound(seed):
    """5,000 graphs, and all strategies."""
    rng = random.Random(1000 + seed)
    raised = 0
    for number in range(50):
        if number % 2:
            graph = random_products(rng)
        else:
            extents = rng.choice(((1, 2, 3, 4, 5), (2, 4, 8, 16), (3, 6, 12, 100), (16, 200)))
            graph = random_graph(rng, rng.choice((2, 3, 4, 6)), extents)
        resident = tuple(vertex.name for vertex in graph.inputs if rng.random() < 0.3)
        raised += check_all_strategies(graph, rng.choice((2, 3, 4, 6, 8, 12, 16, 30)), resident)
    assert raised > 0


def layers_of(rng, count):
    """The same few products again and again, with weights of their own."""
    size, inner = rng.choice(((8, 16), (12, 6), (5, 7), (64, 256)))
    lines = []
    shapes = {"x_0": (16, size)}
    for k in range(1, count + 1):
        shapes[f"W_{k}"] = (size, inner)
        shapes[f"V_{k}"] = (inner, size)
        lines.append(f"y_{k}[b,h] = tanh(sum(x_{k - 1}[b,i] * W_{k}[i,h]))")
        lines.append(f"z_{k}[b,i] = sum(y_{k}[b,h] * V_{k}[h,i])")
        lines.append(f"x_{k}[b,i] = z_{k}[b,i] / (1 + max[j](abs(z_{k}[b,j]))) + x_{k - 1}[b,i]")
    weights = tuple(name for name in shapes if name != "x_0")
    return einmpi.program("\n".join(lines), dtype="float32", **shapes).graph, weights


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_the_sum_over_layers_is_no_higher_than_the_bound_of_all_together(seed, monkeypatch):
    rng = random.Random(seed)
    graph, weights = layers_of(rng, 12)
    resident = weights if rng.random() < 0.7 else ()
    ranks = rng.choice((2, 4, 6, 8))
    for name in STRATEGIES:
        plan = make_plan(graph, ranks, Options(name, resident=resident))
        by_layers = bound_of(plan)
        monkeypatch.setattr(pieces, "VARIABLES_OF_GROUP", 10**6)
        together = bound_of(plan)
        monkeypatch.undo()
        assert by_layers.words <= together.words <= plan.words_predicted
    check_all_strategies(graph, ranks, resident)


def test_equal_layers_are_solved_once(monkeypatch):
    graph, weights = llama(1, 4096, 12)
    plan = make_plan(graph, 8, Options(resident=weights))
    sizes = []
    solve = pieces.least_words

    def counted(piece, *given):
        sizes.append(len(piece.variables))
        return solve(piece, *given)

    monkeypatch.setattr(pieces, "least_words", counted)
    bound = bound_of(plan)
    assert bound == (plan.words_predicted, REPEATING_NO_MORE)
    assert len(sizes) < 6 and max(sizes) < 100


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("batch", "sequence"), [(8, 1024), (1, 4096)])
@pytest.mark.parametrize("ranks", [8, 64, 256, 1024, pytest.param(4096, marks=pytest.mark.slow)])
def test_models_with_resident_weights_are_planned_exactly(batch, sequence, ranks):
    graph, weights = llama(batch, sequence, 32)
    plan = make_plan(graph, ranks, Options(resident=weights))
    assert plan.kind == "exact"
    assert repeated_operations(plan) == 0 or plan.words_predicted == 0
    assert lower_bound_words(graph, ranks, weights) == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_no_plan_within_memory_is_below_the_bound_of_another(seed):
    """Weights stay on the ranks as far as they fit."""
    rng = random.Random(seed)
    raised = 0
    for _ in range(2):
        graph, weights = layers_of(rng, rng.choice((1, 2, 3)))
        ranks = rng.choice((2, 4, 6, 8))
        free = make_plan(graph, ranks, Options(resident=weights))
        plans = {}
        for percent in (100, 80, 60, 45, 30):
            for name in ("eindecomp", "sqrt"):
                limit = free.peak * percent // 100
                options = Options(name, memory=limit, resident=weights)
                with contextlib.suppress(einmpi.InputError):
                    plans[percent, name] = make_plan(graph, ranks, options)
        for plan, other in itertools.product(plans.values(), plans.values()):
            within = plan.among != WITHIN_MEMORY or other.memory <= plan.memory
            if within and is_among(other, plan):
                assert plan.lower_bound <= other.words_predicted
        raised += sum(plan.among == WITHIN_MEMORY for plan in plans.values())
    if seed < 8:  # elsewhere memory does not matter
        assert raised > 0
