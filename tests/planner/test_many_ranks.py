"""Plans and schedules for up to a million ranks: nothing is as large as the number of ranks."""

import tracemalloc

import pytest
from paths import JOBS
from target_graphs import chain, llama

import einmpi
from einmpi.planner.make_plan import MAX_RANKS, make_plan
from einmpi.planner.plan import Options
from einmpi.schedule.lower import lower

MIB = 2**20


def square_product():
    return einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(2**20, 2**20), B=(2**20, 2**20)).graph


def mttkrp():
    text = "M[i,r] = sum(X[i,j,k] * B[j,r] * C[k,r])"
    return einmpi.program(text, X=(4096, 4096, 4096), B=(4096, 64), C=(4096, 64)).graph


GRAPHS = {
    "product": square_product,
    "chain": lambda: chain(1),
    "mttkrp": mttkrp,
    "llama": lambda: llama()[0],
    "heat": lambda: einmpi.load(JOBS / "heat.toml").graph,
}


CASES = [(name, strategy) for name in GRAPHS for strategy in ("eindecomp", "sqrt")]
SLOW = [("llama", "sqrt"), ("llama", "eindecomp"), ("product", "sqrt"), ("heat", "sqrt")]
MARKED = [pytest.param(*case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), MARKED)
def test_a_million_ranks_need_little_memory(name, strategy):
    graph = GRAPHS[name]()
    tracemalloc.start()
    try:
        plan = make_plan(graph, MAX_RANKS, Options(strategy=strategy))
        assert plan.lower_bound <= plan.words_predicted
        assert f"{MAX_RANKS} ranks" in str(plan)
        received = sum(step.nbytes for step in lower(plan, 77).steps)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0 < received < plan.bytes_predicted
    assert peak < 400 * MIB


@pytest.mark.slow
def test_lowering_one_of_a_million_ranks_makes_no_list_of_them():
    """The loss and the rate go to all ranks, biases to each 64th: few of them have a piece."""
    plan = make_plan(einmpi.load(JOBS / "ffnn.toml").graph, MAX_RANKS, Options())
    for rank in (0, 77, MAX_RANKS - 1):
        tracemalloc.start()
        try:
            steps = lower(plan, rank).steps
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        transfers = [step.moves for step in steps if step.transfer is not None]
        assert max(moves.members.count for moves in transfers) == MAX_RANKS
        kept = sum(len(moves.sent.found) + len(moves.received.found) for moves in transfers)
        assert kept < 5000
        assert peak < 8 * MIB
