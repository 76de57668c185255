"""Tensors that are dropped and computed again: less memory, the same bits, costs as predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from distributed import run_on_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from training_programs import Step, classifier, perceptron, transformer_block, values_for

import einmpi
from einmpi.errors import InputError
from einmpi.loops.stages import with_updates_in_order
from einmpi.planner.make_plan import make_plan
from einmpi.planner.plan import Options, Plan
from einmpi.planner.planning import Planning
from einmpi.planner.saving_memory.recompute import without_copies
from einmpi.planner.text.explain import as_json

MIB = 2**20
# A step, and tensors of it to compute again: values of functions, products, and chains of both.
STEPS: dict[str, tuple[Callable[[], Step], tuple[str, ...]]] = {
    "every second layer": (lambda: perceptron(6, 24, 18), ("H1", "H3", "H5")),
    "all layers": (lambda: perceptron(5, 24, 18), ("H1", "H2", "H3", "H4")),
    "functions": (lambda: perceptron(4, 24, 18, "silu"), ("H1", "H2", "H3")),
    "block": (lambda: transformer_block(24, 12, 8, 20), ("n", "P", "Y", "U")),
    "classifier": (lambda: classifier(16, 30, 20, 11), ("H", "Z")),
}


def step_plan(step: Step, ranks: int, **options: Any) -> Plan:
    """Return the plan of a training step in a loop."""
    job, carry = step
    graph = with_updates_in_order(job.graph, carry)
    resident = tuple(vertex.name for vertex in graph.inputs)
    return make_plan(graph, ranks, Options(resident=resident, carry=carry, donate=True, **options))


# ---- what it costs and saves --------------------------------------------------------------------


@pytest.mark.slow
def test_a_perceptron_needs_little_more_than_half() -> None:
    """Of each layer, the argument of silu is kept, and its value is computed again."""
    step = perceptron(12, 4096, 2048, "silu", "float32")
    whole = step_plan(step, 4)
    assert whole.recomputed is None
    plan = step_plan(step, 4, memory=270 * MIB)
    recomputed = plan.recomputed
    assert recomputed is not None
    assert plan.spilled == 0
    assert plan.peak <= 270 * MIB < 0.62 * whole.peak
    assert recomputed.operations < whole.graph.operations() / 1000
    assert plan.graph.operations() == whole.graph.operations() + recomputed.operations
    assert recomputed.nbytes == 0
    assert recomputed.peak_before > 340 * MIB
    assert set(recomputed.tensors) <= {f"H{number}" for number in range(1, 13)}


def test_products_are_computed_again_where_that_is_cheaper_than_a_disk() -> None:
    """Each product takes twice as many operations for a byte as the layer is wide, a disk 32."""
    for width, is_cheaper in ((12, True), (120, False)):
        step = perceptron(12, 4096, width, "tanh")
        limit = step_plan(step, 1).peak * 7 // 10
        plan = step_plan(step, 1, memory=limit)
        assert plan.peak <= limit
        assert (plan.recomputed is not None) == is_cheaper
        assert (plan.spilled > 0) == (not is_cheaper)


def test_little_is_written_to_disk_if_the_rest_can_be_computed_again() -> None:
    step = perceptron(12, 4096, 2048, "silu", "float32")
    without = step_plan(step, 4, memory=200 * MIB, recompute="none")
    plan = step_plan(step, 4, memory=200 * MIB)
    assert without.recomputed is None
    assert plan.recomputed is not None
    assert 0 < plan.spilled < without.spilled / 2


def test_cuts_that_a_higher_price_of_memory_leaves_as_they_are_are_tried_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[Any] = []
    cut_graph = Planning.cut_graph

    def noted(self: Planning, states: Any, *problem: Any) -> Any:
        tried.append(states)
        return cut_graph(self, states, *problem)

    step = perceptron(6, 24, 18)
    half = step_plan(step, 1).peak // 2
    monkeypatch.setattr(Planning, "cut_graph", noted)
    assert step_plan(step, 1, memory=half).spilled
    assert len(tried) == 1  # on one rank, all prices have the same cuts


@pytest.mark.slow
def test_nothing_is_computed_again_without_a_limit_or_if_all_fits() -> None:
    for name, (make, _) in STEPS.items():
        plan = step_plan(make(), 4)
        assert plan.recomputed is None, name
        assert plan.digest == step_plan(make(), 4, recompute="none").digest
        assert step_plan(make(), 4, memory=plan.peak).recomputed is None


def test_the_plan_says_what_it_costs() -> None:
    job, _ = perceptron(4, 64, 32, "silu")
    plan = einmpi.plan(job, ranks=2, recompute=["H1", "H2"])
    recomputed = plan.recomputed
    assert recomputed is not None
    assert recomputed.tensors == ("H1", "H2")
    added = sum(plan.graph[name].operations() for name in recomputed.copies)
    assert plan.graph.operations() == job.graph.operations() + added
    (line,) = [line for line in str(plan).splitlines() if line.startswith("recomputed")]
    assert line.startswith(f"recomputed   H1, H2: {added:,} operations (")
    assert "moved more; peak memory" in line
    data = as_json(plan)["recomputed"]
    assert data["tensors"] == ["H1", "H2"]
    assert data["vertices"] == list(recomputed.copies)
    assert data["operations_added"] == added
    assert data["bytes_added"] == sum(plan.bills[name].nbytes for name in recomputed.copies)
    assert data["bytes_peak_without"] == einmpi.plan(job, ranks=2).peak
    assert "recomputed" not in as_json(einmpi.plan(job, ranks=2))


# ---- the results --------------------------------------------------------------------------------


def check_same(step: Step, ranks: int, recompute: Any, **options: Any) -> Plan:
    """Check bits and bytes of a run in which tensors are computed again."""
    job, _ = step
    values = values_for(job)
    wanted = run_on_threads(job, ranks, values, recompute="none")
    done = run_on_threads(job, ranks, values, recompute=recompute, **options)
    assert done.moved == done.plan.bytes_predicted
    assert max(done.peaks) <= done.plan.peak
    # Sums of what does not fit into memory are added up in pieces, and round differently.
    same_cuts = done.plan.states.items() >= wanted.plan.states.items()
    if same_cuts and not done.plan.spilled:
        for name, array in wanted.outputs.items():
            assert done.outputs[name].tobytes() == array.tobytes(), name
    for name, array in einmpi.reference(job, values).items():
        np.testing.assert_allclose(done.outputs[name], array, rtol=1e-9, atol=1e-12)
    return done.plan


SLOW = [pytest.param(ranks, marks=pytest.mark.slow) for ranks in (6, 8)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [1, 3, *SLOW])
@pytest.mark.parametrize("name", STEPS)
def test_named_tensors_are_computed_again(name: str, ranks: int) -> None:
    make, names = STEPS[name]
    plan = check_same(make(), ranks, names)
    recomputed = plan.recomputed
    assert recomputed is not None
    assert set(recomputed.tensors) <= set(names)
    for copy, tensor in recomputed.copies.items():
        assert plan.states[copy] == plan.states[tensor]
        assert plan.graph[copy].einsum == plan.graph[tensor].einsum
    without = without_copies(plan.graph, recomputed.copies)
    base = einmpi.plan(make()[0], ranks, recompute="none")
    if not any(vertex.is_auxiliary for vertex in without.vertices):
        assert sorted(map(str, without.vertices)) == sorted(map(str, base.graph.vertices))


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(
    layers=st.integers(2, 6),
    batch=st.integers(3, 20),
    width=st.integers(2, 12),
    function=st.sampled_from(["tanh", "relu", "silu", "exp"]),
    share=st.integers(40, 95),
    ranks=st.sampled_from([1, 2, 3, 4]),
)
def test_any_perceptron_in_any_memory(
    layers: int, batch: int, width: int, function: str, share: int, ranks: int
) -> None:
    """By computing again, by keeping tensors on disk, or both: within the limit."""
    step = perceptron(layers, batch, width, function)
    limit = einmpi.plan(step[0], ranks).peak * share // 100
    try:
        plan = check_same(step, ranks, "auto", memory=limit)
    except InputError as error:
        assert "no plan on" in str(error)
        return
    assert plan.peak <= limit


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        ("never", 'recompute: recompute is \'never\'; expected "auto", "none", or a list'),
        (3, "recompute: recompute is 3; expected"),
        (["X"], "recompute: X is an input; expected one of "),
        (["loss"], "recompute: loss is a result, which stays in memory; expected one of "),
        (["H7"], "recompute: there is no tensor H7; expected one of "),
        ([3], "recompute: recompute has 3; expected names of tensors"),
    ],
)
def test_wrong_arguments(recompute: Any, message: str) -> None:
    job, _ = perceptron(2, 8, 8)
    with pytest.raises(InputError) as caught:
        einmpi.plan(job, ranks=2, recompute=recompute)
    assert message in str(caught.value)
