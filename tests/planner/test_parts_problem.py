"""The lower bound by parts in place of axes: no plan moves less, and many move no more."""

from __future__ import annotations

import itertools
import random
from math import prod

import numpy as np
import pytest
from bound_cases import TRAPS, is_among, optimum, random_products
from plan_oracle import P, R, axes_of, layouts, random_graph

import einmpi
from bench.paper.planning import GRAPHS
from einmpi.planner.factor import Edge
from einmpi.planner.lower_bound import parts as parts_problem
from einmpi.planner.lower_bound.parts import PartsEdge
from einmpi.planner.lower_bound.pieces import ALL_CUTS
from einmpi.planner.lower_bound.words import lower_bound_words
from einmpi.planner.make_plan import make_plan
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.volume import traffic
from einmpi.planner.plan import Options


def counts(ranks, ndim, axes):
    """Return the parts of each dimension, the copies, and the partial results."""
    found = [1] * (ndim + 2)
    for factor, symbol in zip(axes_of(ranks), axes, strict=True):
        found[{R: ndim, P: ndim + 1}.get(symbol, symbol)] *= factor
    return found


def least(ranks, bound, sources, targets):
    """Return what moves at least, by parts alone, for all pairs of layouts."""
    edge = Edge("T", bound, 8 * prod(bound), 0, 1, (), ())
    before = np.array([counts(ranks, len(bound), axes) for axes in sources])
    after = np.array([counts(ranks, len(bound), axes) for axes in targets])
    return PartsEdge(edge, 0.0, ranks).words(before, after)


def moved(ranks, bound, source, target):
    """Return the words that all ranks receive."""
    numbers = {R: len(bound), P: len(bound) + 1}
    rows = [tuple(numbers.get(symbol, symbol) for symbol in axes) for axes in (source, target)]
    return traffic(Mesh(ranks), bound, *rows).words.total


def with_partial_results(ranks, bound):
    """Return all layouts, and those in which some of the copies are partial results."""
    found = set()
    for axes in layouts(ranks, bound):
        copied = [axis for axis, symbol in enumerate(axes) if symbol == R]
        for count in range(len(copied) + 1):
            for partial in itertools.combinations(copied, count):
                found.add(tuple(P if axis in partial else s for axis, s in enumerate(axes)))
    return sorted(found, key=str)


BOUNDS = [(8,), (2, 2), (3, 5), (4, 4), (7, 9), (8, 3), (16, 16), (13, 14), (24, 24)]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("bound", BOUNDS)
def test_an_edge_moves_no_less_than_its_parts_say(ranks, bound):
    """All pairs of layouts."""
    sources = with_partial_results(ranks, bound)
    targets = layouts(ranks, bound)
    if len(sources) * len(targets) > 4000:
        sources = random.Random(0).sample(sources, 4000 // len(targets))
    bounds = least(ranks, bound, sources, targets)
    exact = 0
    for (row, source), (column, target) in itertools.product(
        enumerate(sources), enumerate(targets)
    ):
        words = moved(ranks, bound, source, target)
        assert bounds[row, column] <= words, (source, target)
        exact += bounds[row, column] == words
    assert exact > len(sources) * len(targets) / 4


def test_digits_of_different_numbers_are_not_independent():
    """On 9 nodes, 18 indices have the windows 3·3 and 3·2, though each divides them evenly."""
    bound = (18, 18)
    mesh = Mesh(54, nodes=9)
    assert mesh.factors == (3, 3, 3, 2)
    source, target = (2, 0, 2, 1), (2, 1, 2, 0)
    edge = Edge("T", bound, 8 * prod(bound), 0, 1, (), ())
    before, after = (np.array([[*mesh.parts(axes, (0, 1, 2)), 1]]) for axes in (source, target))
    words = traffic(mesh, bound, source, target).words.total
    assert PartsEdge(edge, 0.0, 54).words(before, after) <= words == 2106


@pytest.mark.parametrize(("ranks", "bound"), [(4, (4, 4)), (4, (3, 5)), (6, (6, 6)), (8, (8, 8))])
def test_a_layout_on_the_way_does_not_help(ranks, bound):
    """To a layout and from there to the reader moves no less than parts say for the reader."""
    sources = with_partial_results(ranks, bound)
    every = layouts(ranks, bound)
    first = np.array([[moved(ranks, bound, s, t) for t in every] for s in sources])
    then = np.array([[moved(ranks, bound, s, t) for t in every] for s in every])
    over_a_layout = (first[:, :, None] + then).min(axis=1)
    assert (least(ranks, bound, sources, every) <= over_a_layout).all()


@pytest.mark.sampled(30)
@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 12, 27, 30])
def test_no_word_is_counted_twice(trap, ranks):
    program, shapes, resident = TRAPS[trap]
    graph = einmpi.program(program, dtype="float32", **shapes).graph
    kept = tuple(resident.split())
    best = int(optimum(graph, ranks, kept))
    for words in (best, best + 1, 2 * best + 1000, 10**9):
        assert lower_bound_words(graph, ranks, kept, words) <= best


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("most_joined", [0, 1 << 19])
def test_the_bound_is_never_above_the_best_plan(seed, most_joined, monkeypatch):
    """Whichever plan is known; with costs that are passed on, and with elimination."""
    monkeypatch.setattr(parts_problem, "MOST_JOINED", most_joined)
    rng = random.Random(seed)
    equal = higher = 0
    for _ in range(30):
        if rng.random() < 0.5:
            graph = random_products(rng)
        else:
            extents = rng.choice(((1, 2, 3, 4, 5), (2, 4, 8, 16), (3, 6, 12, 100), (16, 200)))
            graph = random_graph(rng, rng.choice((1, 2, 3, 4, 6)), extents)
        resident = tuple(vertex.name for vertex in graph.inputs if rng.random() < 0.2)
        ranks = rng.choice((2, 3, 4, 5, 6, 7, 8, 12, 18, 30))
        best = int(optimum(graph, ranks, resident))
        alone = lower_bound_words(graph, ranks, resident)
        for words in (best, best + 1, 2 * best + 100):
            bound = lower_bound_words(graph, ranks, resident, words)
            assert alone <= bound <= best, f"{ranks} ranks, resident {resident}\n{graph}"
        equal += bound == best > 0
        higher += bound > alone
    assert equal > 5
    assert higher > 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_of_any_strategy_moves_less_than_the_bound_of_another(seed):
    rng = random.Random(seed)
    for _ in range(6):
        graph = random_products(rng)
        ranks = rng.choice((8, 12, 16, 36, 64))
        plans = []
        for strategy in ("eindecomp", "eindecomp-paper", "sqrt", "replicate"):
            plans.append(make_plan(graph, ranks, Options(strategy)))
        for plan, other in itertools.product(plans, plans):
            if is_among(other, plan):
                assert plan.lower_bound <= other.words_predicted


def test_a_large_result_stays_where_it_is():
    """Its reader could be cut without copies, but for what that moves of the result."""
    shapes = {"X": (64,) * 5, **dict.fromkeys("BCDE", (64, 24))}
    text = "Z[i,a] = sum(X[i,j,k,l,m] * B[j,a] * C[k,a] * D[l,a] * E[m,a])"
    graph = einmpi.program(text, **shapes).graph
    assert lower_bound_words(graph, 8) == 14 * 64 * 24
    assert lower_bound_words(graph, 8, words=10**6) == 23 * 64 * 24
    for ranks, copies in ((64, 171), (256, 635)):
        plan = make_plan(graph, ranks)
        assert (plan.words_predicted, plan.kind) == (copies * 64 * 24, "exact")


@pytest.mark.parametrize("ranks", [8, 64, 1024])
def test_the_gradients_of_a_network_are_planned_exactly(ranks):
    """Weights are read forwards and backwards, cut in two ways."""
    text = """
        H[b,h] = relu(sum(X[b,i] * W1[i,h])); Z[b,l] = sum(H[b,h] * W2[h,l])
        loss = sum(Z[b,l] ** 2); D1[i,h] = grad(loss, W1[i,h]); D2[h,l] = grad(loss, W2[h,l])
    """
    shapes = {"X": (4096, 8192), "W1": (8192, 4096), "W2": (4096, 1024)}
    outputs = ["loss", "D1", "D2"]
    job = einmpi.program(text, dtype="float32", outputs=outputs, **shapes)
    plan = einmpi.plan(job, ranks)
    assert plan.kind == "exact"
    assert lower_bound_words(job.graph, ranks) < plan.words_predicted


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("attention", 96), ("attention", 256), ("llama-layer", 64), ("llama-layer", 256)],
)
def test_plans_are_exact_where_tables_are_large(name, ranks):
    """Single vertices move up to 1 % less. Plans of other strategies are far above the bound."""
    graph = GRAPHS[name]()
    plan = make_plan(graph, ranks)
    assert (plan.kind, plan.among) == ("exact", ALL_CUTS)
    assert lower_bound_words(graph, ranks) < plan.lower_bound
    other = make_plan(graph, ranks, Options("sqrt"))
    assert other.lower_bound == plan.lower_bound < other.words_predicted


def test_a_bound_is_looked_for_up_to_any_number_of_words():
    """It is the smaller one of this number and the minimum."""
    graph = GRAPHS["attention"]()
    alone, least = 285_212_672, 285_343_744
    for words in (alone + 1, least - 1, least, least + 1, 2 * least):
        assert lower_bound_words(graph, 96, words=words) == min(words, least)
