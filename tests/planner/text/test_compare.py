"""Plans side by side: operations of a rank beside the words that move."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT

import einmpi
from einmpi.errors import InputError
from einmpi.planner.strategies import STRATEGIES
from einmpi.planner.text.compare import compare
from einmpi.planner.text.explain import as_json
from einmpi.report.page_tables import comparison_table
from einmpi.schedule.lower import lower


def operations_of_ranks(plan):
    """Return the operations of each rank, counted from the kernels of its schedule."""
    counts = []
    for rank in range(plan.ranks):
        count = 0
        for step in lower(plan, rank).steps:
            count += sum(kernel.einsum.operations() for kernel in step.kernels)
        counts.append(count)
    return counts


@pytest.mark.sampled(9)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_operations_are_those_of_the_kernels_of_the_busiest_rank(strategy, ranks):
    job = einmpi.load(ROOT / "jobs/attention.toml")
    try:
        plan = einmpi.plan(job, ranks, strategy=strategy)
    except InputError:
        pytest.skip("the strategy does not apply")
    assert plan.operations_busiest == max(operations_of_ranks(plan))
    assert as_json(plan)["operations_max_rank"] == plan.operations_busiest


@settings(max_examples=20, deadline=None)
@given(extents=st.tuples(*[st.integers(1, 13)] * 4), ranks=st.integers(1, 9))
def test_no_rank_does_more_where_extents_do_not_divide(extents, ranks):
    rows, inner, columns, more = extents
    text = "T[i,k] = sum(A[i,j] * B[j,k])\nZ[i,l] = max(abs(T[i,k] - C[k,l]))"
    shapes = {"A": (rows, inner), "B": (inner, columns), "C": (columns, more)}
    plan = einmpi.plan(einmpi.program(text, **shapes), ranks)
    counts = operations_of_ranks(plan)
    assert max(counts) <= plan.operations_busiest <= plan.graph.operations() + 1
    assert plan.operations_busiest * ranks >= plan.graph.operations()


def test_a_strategy_that_repeats_work_shows_it():
    job = einmpi.load(ROOT / "jobs/attention.toml")
    comparison = compare(lambda name: einmpi.plan(job, 8, strategy=name))
    column = comparison.rows[0].index("operations a rank")
    assert comparison.rows[0].index("words") < column
    shown = {row[0]: int(row[column].replace(",", "")) for row in comparison.rows[1:]}
    assert shown["replicate"] == 8 * shown["eindecomp"]
    page = comparison_table(comparison.plans[0], comparison)
    assert "operations a rank" in page and f"{shown['replicate']:,}" in page
    assert "repeats work" not in comparison.text


def test_the_plan_that_moves_least_says_if_it_repeats_work(tmp_path):
    matrix = '{ shape = [64, 64], random = "ones", resident = true }'
    inputs = f"[inputs]\nA = {matrix}\nB = {matrix}\n"
    (tmp_path / "job.toml").write_text(f'program = "Z[i,k] = sum(A[i,j] * B[j,k])"\n{inputs}')
    job = einmpi.load(tmp_path / "job.toml")

    def make(name):
        if name not in ("sqrt", "replicate"):
            raise InputError(name, "left out", "sqrt or replicate")
        return einmpi.plan(job, 8, strategy=name)

    text = compare(make).text
    assert "replicate moves least, 0 B; sqrt is next" in text
    assert "replicate repeats work: a rank does 8 times the operations of sqrt" in text


def test_all_steps_of_loops_count(tmp_path):
    loop = '[[loop]]\nprogram = "y[i] = sum(A[i,j] * x[j])"\nsteps = {}\ncarry.x = "y"\n'
    inputs = 'inputs.x = { shape = [8], random = "ones" }\n'
    inputs += 'inputs.A = { shape = [8, 8], random = "ones" }\n'
    (tmp_path / "job.toml").write_text(inputs + loop.format(3) + loop.format(5))
    job = einmpi.load(tmp_path / "job.toml")
    comparison = compare(lambda name: einmpi.plan(job, 2, strategy=name))
    column = comparison.rows[0].index("operations a rank")
    first, second = comparison.plans[0].loops
    in_all = 3 * max(operations_of_ranks(first)) + 5 * max(operations_of_ranks(second))
    assert comparison.rows[1][column] == f"{in_all:,}"
