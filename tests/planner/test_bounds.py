"""The lower bound: its targets, and that no plan moves less."""

from __future__ import annotations

import contextlib
import itertools
import random

import pytest
from bound_cases import TRAPS, optimum, random_products
from plan_oracle import random_graph
from target_graphs import attention, chain, llama

import einmpi
from einmpi.planner.factor import factor
from einmpi.planner.lower_bound import units
from einmpi.planner.lower_bound.units import outer_products
from einmpi.planner.lower_bound.words import lower_bound_words
from einmpi.planner.make_plan import make_plan
from einmpi.planner.mesh import Mesh
from einmpi.planner.plan import Options
from einmpi.planner.repetition import repeated_layers
from einmpi.planner.search import search
from einmpi.planner.solving.solver import Solver

# ---- targets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("skew", "ranks", "squares"),
    [
        (1, 4, "6.00"),
        (1, 8, "9.00"),
        (1, 16, "15.00"),
        (1, 64, "27.00"),
        (1, 1024, "87.00"),
        (10, 4, "0.70"),
        (10, 8, "1.50"),
        (10, 16, "2.70"),
        (10, 64, "6.90"),
    ],
)
def test_the_bound_of_the_chain_is_that_of_the_target_table(skew, ranks, squares):
    assert f"{lower_bound_words(chain(skew), ranks) / 960**2:.2f}" == squares


def test_the_bounds_of_attention_and_of_a_llama_layer_are_those_of_the_target_table():
    assert f"{lower_bound_words(attention(), 8) / 1e6:.1f}" == "67.1"
    graph, weights = llama(8, 1024)
    assert lower_bound_words(graph, 8) == 571_514_880
    assert lower_bound_words(graph, 64) == 1_884_463_104
    assert lower_bound_words(graph, 8, weights) == 0


def test_one_rank_moves_nothing():
    assert lower_bound_words(chain(1), 1) == 0


def test_a_product_of_matrices_has_its_known_bound():
    """Cubes: 3·n²·(p^(1/3) − 1) words. Where B is resident, cutting rows moves nothing."""
    graph = einmpi.program(
        "Z[i,k] = sum(A[i,j] * B[j,k])", dtype="float32", A=(600, 600), B=(600, 600)
    ).graph
    assert lower_bound_words(graph, 27) == 3 * 600**2 * 2
    assert lower_bound_words(graph, 27, ("B",)) == 0


@pytest.mark.parametrize(("ranks", "cuts"), [(8, 2), (64, 4), (512, 8)])
def test_a_product_with_two_factors_of_a_tensor_pays_for_copies_of_all_of_them(ranks, cuts):
    """The three factors are each copied, or summed, over a face of the cube of ranks."""
    program = "Z[i,a] = sum(X[i,j,k] * B[j,a] * C[k,a])"
    shapes = {"X": (1024, 1024, 1024), "B": (1024, 24), "C": (1024, 24)}
    job = einmpi.program(program, **shapes)
    words = 3 * (cuts**2 - 1) * 1024 * 24
    assert lower_bound_words(job.graph, ranks) == words
    plan = einmpi.plan(job, ranks)
    assert (plan.words_predicted, plan.kind) == (words, "exact")


@pytest.mark.parametrize("ranks", [4, 64, 4096])
@pytest.mark.parametrize("size", [2**20, 2**28, 2**29])
def test_sums_that_do_not_fit_into_64_bits_have_a_bound(size, ranks):
    """As that of small matrices, times the number of elements."""
    text = "Z[i,k] = sum(A[i,j] * B[j,k])"
    small = einmpi.program(text, A=(2**13, 2**13), B=(2**13, 2**13)).graph
    graph = einmpi.program(text, A=(size, size), B=(size, size)).graph
    assert lower_bound_words(graph, ranks) == lower_bound_words(small, ranks) * (size // 2**13) ** 2


# ---- never above a plan -----------------------------------------------------------------------


@pytest.mark.sampled(60)
@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8, 12, 27, 30])
def test_the_bound_counts_no_word_twice(trap, ranks):
    program, shapes, resident = TRAPS[trap]
    graph = einmpi.program(program, dtype="float32", **shapes).graph
    kept = tuple(resident.split())
    assert lower_bound_words(graph, ranks, kept) <= optimum(graph, ranks, kept)


def test_a_label_shorter_than_the_ranks_does_not_back_copies():
    program = "T[j,k,l] = sum[i](X[k,l,j] + Y[l,i]); Z[m,j,l] = sum[k](T[l,k,j] + W[k,m])"
    graph = einmpi.program(
        program, dtype="float32", X=(200, 64, 64), Y=(64, 1000), W=(200, 200)
    ).graph
    plan = search(Solver(factor(graph, ("X",)), Mesh(100)))
    assert 4 * lower_bound_words(graph, 100, ("X",)) <= plan.cost


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(10))
def test_the_bound_is_never_above_the_best_plan_of_a_random_graph(seed):
    rng = random.Random(seed)
    close = 0
    for _ in range(100):
        extents = rng.choice(
            ((1, 2, 3, 4, 5), (2, 4, 8, 16), (3, 6, 12, 100), (1, 7, 8, 64, 1000), (16, 200, 1000))
        )
        graph = random_graph(rng, rng.choice((1, 2, 3, 4, 6, 8)), extents)
        resident = tuple(vertex.name for vertex in graph.inputs if rng.random() < 0.25)
        ranks = rng.choice((2, 3, 4, 5, 6, 7, 8))
        found = search(Solver(factor(graph, resident), Mesh(ranks)))
        bound = lower_bound_words(graph, ranks, resident)
        assert 0 <= 4 * bound <= found.cost, f"{ranks} ranks, resident {resident}\n{graph}"
        close += found.cost > 0 and 4 * bound > found.cost / 2
    assert close > 5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most_rows", [10, 250])
def test_the_bound_is_never_above_a_plan_of_random_products(seed, most_rows, monkeypatch):
    monkeypatch.setattr(units, "MOST_ROWS", most_rows)
    rng = random.Random(seed)
    joined = equal = 0
    for _ in range(60):
        graph = random_products(rng)
        resident = tuple(vertex.name for vertex in graph.inputs if rng.random() < 0.2)
        ranks = rng.choice((2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 18, 27, 30, 64))
        found = search(Solver(factor(graph, resident), Mesh(ranks)))
        bound = lower_bound_words(graph, ranks, resident)
        assert 0 <= 4 * bound <= found.cost, f"{ranks} ranks, resident {resident}\n{graph}"
        joined += bool(outer_products(graph, ranks))
        equal += found.cost > 0 and 4 * bound == found.cost
    assert joined > 2
    assert equal > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_plan_moves_less_than_its_bound(seed):
    """Plans of every strategy, on nodes, with layouts that are pinned, in little memory."""
    rng = random.Random(seed)
    for _ in range(8):
        graph = random_products(rng)
        ranks, nodes = rng.choice(((6, 2), (8, 4), (12, 3), (16, 4), (30, 1), (36, 6), (64, 8)))
        for strategy in ("eindecomp", "eindecomp-paper", "sqrt", "replicate"):
            for on_nodes, memory in ((1, None), (nodes, None), (1, 20_000)):
                options = Options(strategy, nodes=on_nodes, memory=memory)
                with contextlib.suppress(einmpi.InputError):  # too little memory
                    plan = make_plan(graph, ranks, options)
                    assert plan.lower_bound <= plan.words_predicted
        output = graph[graph.outputs[0]]
        pinned = Options(pins={output.name: (1,) * len(output.bound)})
        plan = make_plan(graph, ranks, pinned)
        assert lower_bound_words(graph, ranks) <= plan.words_predicted


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [8, 64, 1024])
@pytest.mark.parametrize("keep", [False, True])
def test_the_bound_is_never_above_the_plan_of_repeated_layers(ranks, keep):
    for batch, sequence in ((8, 1024), (1, 4096)):
        graph, weights = llama(batch, sequence, 4)
        resident = weights if keep else ()
        plan = search(Solver(factor(graph, resident, tie=repeated_layers(graph)), Mesh(ranks)))
        assert 4 * lower_bound_words(graph, ranks, resident) <= plan.cost


# ---- in general -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [lambda: chain(1), lambda: chain(10), attention, lambda: llama(8, 1024)[0]]
)
def test_twice_as_many_ranks_never_have_a_lower_bound(make):
    graph = make()
    bounds = [lower_bound_words(graph, 2**k) for k in range(13)]
    assert bounds == sorted(bounds)
    assert bounds[1] > 0


def test_a_resident_input_never_raises_the_bound():
    for graph in (chain(1), chain(10), attention()):
        inputs = [vertex.name for vertex in graph.inputs]
        for more, fewer in itertools.pairwise([*(inputs[:k] for k in range(len(inputs), -1, -1))]):
            assert lower_bound_words(graph, 8, more) <= lower_bound_words(graph, 8, fewer)
