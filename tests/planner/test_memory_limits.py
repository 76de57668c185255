"""Memory limits: true refusals, more memory never moves more, resident weights."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from paper_llama import llama_program
from schedule_checks import verify

import einmpi
from einmpi.graph.eingraph import EinGraph
from einmpi.models.config import NAMED
from einmpi.planner.make_plan import make_plan
from einmpi.planner.plan import Options, Plan
from einmpi.planner.planning import TooLittleMemory
from einmpi.planner.saving_memory.mixtures import searches_kept
from einmpi.planner.strategies import STRATEGIES
from einmpi.schedule.lower import lower
from einmpi.schedule.memory import peak_bytes

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.sampled(1)
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
    text, shapes, weights = llama_program(NAMED["7B"], 8, 1024, layers)
    return einmpi.program(text, dtype="float16", **shapes).graph, weights


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize("limit", [1290, 1400, 1495])
def test_cuts_that_need_least_memory_may_fit_as_they_are(limit):
    """The planner asked for the best of no plans: nothing had to leave memory."""
    text = "Y[l:12] = where(l < 7, X[l+4, 8, l//4], 0)"
    graph = einmpi.program(text, X=np.zeros((11, 11, 4), "int32")).graph
    plan = make_plan(graph, 3, Options(memory=limit, resident=("X",)))
    assert plan.peak <= limit and not plan.spilled
    verify([lower(plan, rank) for rank in range(3)])


def test_message_buffers_are_those_of_the_plan_beside_batches():
    """They were an eighth of the whole limit, of which the plan has only what batches leave."""
    text = "Y[i:12,k:6] = X[(k*3+1) % 16, k+1, 9] * i"
    graph = einmpi.program(text, X=np.zeros((16, 7, 12), "int64")).graph
    share = graph["X"].nbytes // 2  # of each rank
    own = make_plan(graph, 2, Options(memory=900))
    plan = make_plan(graph, 2, Options(memory=900 + share, batched=("X",)))
    assert (plan.peak, plan.stage, plan.memory) == (own.peak, own.stage, 900 + share)
    schedules = [lower(plan, rank) for rank in range(2)]
    verify(schedules)
    assert all(peak_bytes(schedule) <= 900 for schedule in schedules)


def random_indices(seed: int) -> EinGraph:
    """Return a program that reads less of its inputs than there is, by arithmetic and guards."""
    choose = random.Random(seed)
    shapes = {name: [choose.randint(1, 12) for _ in range(choose.randint(1, 3))] for name in "XW"}

    def element(labels: dict[str, int]) -> str:
        name = choose.choice("XW")
        index = []
        for extent in shapes[name]:
            label = choose.choice(list(labels))
            number = choose.randrange(extent)
            index.append(choose.choice((f"{label}%{extent}", f"({label}*3+1)%{extent}", number)))
            if labels[label] <= extent:
                index[-1] = f"{label}+{choose.randint(0, extent - labels[label])}"
        return f"{name}[{','.join(map(str, index))}]"

    outer = {label: choose.randint(1, 20) for label in "ij"[: choose.randint(1, 2)]}
    inner = {"k": choose.randint(1, 9)}
    left = ",".join(f"{label}:{extent}" for label, extent in outer.items())
    limit = choose.randint(0, 9)
    text = (
        f"Y[{left}] = where(i < {limit}, {element(outer)}, {choose.choice(('0', element(outer)))})"
    )
    if choose.random() < 0.7:
        text += f" + sum[k:{inner['k']}]({element({**outer, **inner})} * {element(inner)})"
    arrays = {
        name: np.zeros(shape, "int32") for name, shape in shapes.items() if f"{name}[" in text
    }
    return einmpi.program(text, **arrays).graph


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(300))
def test_every_limit_has_a_plan_or_a_refusal(seed):
    graph = random_indices(seed)
    choose = random.Random(seed)
    ranks = choose.randint(1, 9)
    options = Options(
        resident=tuple(each.name for each in graph.inputs if choose.random() < 0.5),
        recompute=choose.choice(("auto", "none")),
        strategy=choose.choice(("eindecomp", "eindecomp", "eindecomp-paper", "replicate")),
    )
    peak = make_plan(graph, ranks, options).peak
    for share in (0.1, 0.4, 0.6, 0.8, 0.95):
        limit = max(1, int(share * peak))
        try:
            plan = make_plan(graph, ranks, replace(options, memory=limit))
        except TooLittleMemory as error:
            limit = error.least
            plan = make_plan(graph, ranks, replace(options, memory=limit))
        schedules = [lower(plan, rank) for rank in range(ranks)]
        verify(schedules)
        assert max(peak_bytes(schedule) for schedule in schedules) <= plan.peak <= limit
