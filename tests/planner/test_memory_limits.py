"""Memory limits: true refusals, more memory never moves more, resident weights."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace

import pytest

import einmpi
from einmpi.graph.eingraph import EinGraph
from einmpi.models.paper import MODELS, llama_program
from einmpi.planner.make_plan import make_plan
from einmpi.planner.plan import Options, Plan
from einmpi.planner.saving_memory.searches import searches_kept
from einmpi.planner.strategies import STRATEGIES

ROLES = {"batch": ("b",), "sequence": ("s", "t"), "head": ("h",), "hidden": ("f",)}
# Limits that differ by a byte or two can exchange their places: a message buffer is an eighth of
# the limit, rounded down.
FEW_BYTES = 16


def random_program(seed: int) -> tuple[EinGraph, tuple[str, ...]]:
    """Return products of matrices, some read twice, and those inputs that are resident."""
    choose = random.Random(seed)
    extents = {label: choose.choice((24, 36, 64, 96)) for label in "abcdef"}
    labels = choose.choices("abcdef", k=choose.randint(3, 6))
    lines = []
    shapes = {"X0": (extents["a"], extents[labels[0]])}
    columns = [labels[0]]
    for number, label in enumerate(labels[1:], 1):
        before = columns[-1]
        shapes[f"W{number}"] = (extents[before], extents[label])
        lines.append(f"X{number}[i,k] = tanh(sum(X{number - 1}[i,j] * W{number}[j,k]))")
        columns.append(label)
    last = len(columns) - 1
    lines.append(f"Y[i] = sum[j](X{last}[i,j]**2) + sum[j](X0[i,j])")
    weights = [name for name in shapes if name.startswith("W")]
    resident = choose.sample(weights, choose.randint(0, len(weights)))
    graph = einmpi.program("\n".join(lines), outputs=["Y"], **shapes).graph
    return graph, tuple(resident)


def least_limit(graph: EinGraph, ranks: int, options: dict[str, object]) -> int:
    with pytest.raises(einmpi.InputError) as caught:
        make_plan(graph, ranks, Options(memory=1, **options))
    found = re.search(r"at least (\d+) bytes, or more ranks$", str(caught.value))
    assert found
    return int(found[1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(6))
def test_more_memory_never_moves_more(seed):
    graph, resident = random_program(seed)
    for ranks in (3, 8):
        options = {"resident": resident, "recompute": "none"}
        most = make_plan(graph, ranks, Options(**options)).peak
        limit = most // 2
        moved = []
        while limit < most + most // 8:
            plan = make_plan(graph, ranks, Options(memory=limit, **options))
            assert plan.peak <= limit
            if not plan.spilled:
                moved.append(plan.bytes_predicted)
            limit += limit // 8 + FEW_BYTES
        assert moved
        assert moved == sorted(moved, reverse=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(6, 12))
def test_more_memory_never_moves_more_at_random_limits(seed):
    graph, resident = random_program(seed)
    choose = random.Random(seed)
    options = Options(resident=resident, recompute="none")
    with searches_kept():
        most = make_plan(graph, 8, options).peak
        moved = []
        for limit in sorted(choose.sample(range(most // 3, most, FEW_BYTES), 12)):
            plan = make_plan(graph, 8, replace(options, memory=limit))
            assert plan.peak <= limit
            if not plan.spilled:
                moved.append(plan.bytes_predicted)
    assert moved == sorted(moved, reverse=True)


@pytest.mark.parametrize("strategy", ["eindecomp", "sqrt"])
@pytest.mark.parametrize("seed", range(4))
def test_a_refusal_names_the_lowest_limit(seed, strategy):
    graph, resident = random_program(seed)
    for ranks in (1, 4, 11):
        options = {"resident": resident, "strategy": strategy}
        least = least_limit(graph, ranks, options)
        assert make_plan(graph, ranks, Options(memory=least, **options)).peak <= least
        with pytest.raises(einmpi.InputError, match=f"at least {least} bytes"):
            make_plan(graph, ranks, Options(memory=least - 1, **options))


def test_no_strategy_plans_below_a_limit_that_is_refused():
    """The family of plans of the search has the cuts of all strategies in it."""
    for seed in range(4):
        graph, resident = random_program(seed)
        least = least_limit(graph, 8, {"resident": resident})
        for strategy in ("eindecomp-paper", "sqrt", "replicate"):
            assert least <= least_limit(graph, 8, {"resident": resident, "strategy": strategy})


def llama(layers: int) -> tuple[EinGraph, tuple[str, ...]]:
    text, shapes, weights = llama_program(MODELS["7B"], 8, 1024, layers)
    return einmpi.program(text, dtype="float16", **shapes).graph, weights


def test_resident_weights_fit_where_megatron_fits_and_move_less():
    graph, weights = llama(4)
    options = Options(strategy="megatron", roles=ROLES, resident=weights)
    megatron = make_plan(graph, 8, options)
    plan = make_plan(graph, 8, Options(memory=megatron.peak, resident=weights))
    assert plan.peak <= megatron.peak and not plan.spilled
    # 30.1 and 24.4 G words for all 32 layers.
    assert 1.2 * plan.words_predicted < megatron.words_predicted


@pytest.mark.slow
def test_words_fall_in_small_steps_as_memory_grows():
    """Layers need not be cut alike where resident inputs are what fills memory."""
    graph, weights = llama(8)
    weights_of_a_rank = sum(graph[name].nbytes for name in weights) // 8
    limit = weights_of_a_rank * 4 // 3
    words = []
    while limit < 5 * weights_of_a_rank // 2:
        plan: Plan = make_plan(graph, 8, Options(memory=limit, resident=weights))
        assert not plan.spilled
        words.append(plan.words_predicted)
        limit += limit // 8
    for more, fewer in itertools.pairwise(words):
        # An eighth more memory saves less than a third of the words: there are no jumps.
        assert fewer <= more <= 1.4 * fewer


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [0, 10, 14, 16, 24, 35])
def test_no_strategy_moves_less_within_a_limit(seed):
    """Strategies that repeat more than a tenth of the work are left out."""
    graph, resident = random_program(seed)
    roles = {"batch": ("i",), "sequence": ("i",), "head": ("k",), "hidden": ("k", "j")}
    for ranks in (2, 4, 8):
        free = Options(resident=resident, recompute="none", roles=roles)
        most = make_plan(graph, ranks, free).peak
        for share in (6, 7):
            limit = most * share // 8
            within = replace(free, memory=limit)
            try:
                plan = make_plan(graph, ranks, within)
            except einmpi.InputError:
                continue  # the limit is too low for any plan
            for strategy in STRATEGIES:
                other = make_plan(graph, ranks, replace(free, strategy=strategy))
                repeats_work = 10 * other.operations_busiest * ranks > 11 * graph.operations()
                if other.peak <= limit and not repeats_work:
                    assert not plan.spilled
                    assert plan.bytes_predicted <= other.bytes_predicted, (ranks, share, strategy)
