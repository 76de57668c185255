"""The order of vertices: it frees early, keeps updates in place, and never needs more memory."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import run_on_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from target_graphs import attention, llama
from training_programs import Step, classifier, perceptron, transformer_block, values_for

import einmpi
from einmpi.graph.eingraph import EinGraph
from einmpi.loops.stages import with_updates_in_order
from einmpi.planner.make_plan import make_plan
from einmpi.planner.memory import Cuts
from einmpi.planner.peak_memory import bytes_at_vertices
from einmpi.planner.plan import Options, Plan
from einmpi.planner.saving_memory.order import Constraints, other_orders

STEPS = {
    "perceptron": lambda: perceptron(12, 4096, 2048, dtype="float32"),
    "relu": lambda: perceptron(12, 4096, 2048, "relu"),
    "silu": lambda: perceptron(5, 300, 200, "silu"),
    "wide weights": lambda: perceptron(4, 8, 500),
    "transformer block": lambda: transformer_block(600, 300, 64, 900),
    "classifier": lambda: classifier(128, 5975, 820, 1459),
}


def step_plan(step: Step, ranks: int, donate: bool, memory: int | None = None) -> Plan:
    """Return the plan of a training step in a loop."""
    job, carry = step
    graph = with_updates_in_order(job.graph, carry)
    resident = tuple(vertex.name for vertex in graph.inputs)
    options = Options(memory=memory, resident=resident, carry=carry, donate=donate)
    return make_plan(graph, ranks, options)


def peak_in_order_of(graph: EinGraph, plan: Plan) -> int:
    """Return the peak of a plan if its vertices were computed in another order."""
    needed = bytes_at_vertices(
        Cuts(graph, plan.mesh, plan.states, plan.layouts),
        plan.resident,
        in_place=plan.in_place.values(),
        blocked=plan.blocked,
    )
    return max(needed)


def check_order(graph: EinGraph) -> None:
    """Check that each tensor is computed before it is read."""
    known: set[str] = set()
    for vertex in graph.vertices:
        assert known.issuperset(vertex.inputs), vertex.name
        known.add(vertex.name)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("ranks", [1, 4, 6])
@pytest.mark.parametrize("name", STEPS)
def test_no_order_of_a_training_step_needs_more_memory(name: str, ranks: int, donate: bool) -> None:
    job, carry = STEPS[name]()
    graph = with_updates_in_order(job.graph, carry)
    plan = step_plan((job, carry), ranks, donate)
    check_order(plan.graph)
    assert set(plan.updatable) == set(carry)
    if any(vertex.is_auxiliary for vertex in plan.graph.vertices):
        return  # the plan has another graph, and another peak
    assert sorted(map(str, plan.graph.vertices)) == sorted(map(str, graph.vertices))
    assert plan.peak <= peak_in_order_of(graph, plan)


def test_gradients_are_used_as_soon_as_they_are_there() -> None:
    """As written, all gradients of activations wait for the updates at the end of the program."""
    job, carry = perceptron(12, 4096, 2048, dtype="float32")
    graph = with_updates_in_order(job.graph, carry)
    plan = step_plan((job, carry), 4, donate=True)
    assert plan.peak < 0.71 * peak_in_order_of(graph, plan)
    position = plan.graph.position
    assert position["W12_next"] < position["dH10"] < position["W2_next"]


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_graphs_of_models_need_no_more_memory(ranks: int) -> None:
    block, weights = llama(layers=2)
    for graph, resident in ((attention(), ()), (block, weights)):
        plan = make_plan(graph, ranks, Options(resident=resident))
        check_order(plan.graph)
        assert plan.peak <= peak_in_order_of(graph, plan)


def test_an_order_that_is_no_better_is_not_taken() -> None:
    job = einmpi.program("B[i] = A[i] + 1; C = sum(B[i]); D = max(B[i])", A=(10,))
    assert einmpi.plan(job, ranks=2).graph == job.graph


def test_a_large_tensor_waits_until_it_is_needed() -> None:
    """The last statement of the program needs two large tensors, one of which has just one use."""
    text = """
    L[i,j] = A[i] * B[j]
    s = sum(exp(L[i,j]))
    M[i,j] = A[i] + B[j] * s
    z[i] = sum(exp(M[i,j])) + A[i]
    y[i] = sum(L[i,j] * z[j])
    """
    job = einmpi.program(text, A=(500,), B=(500,))
    plan = einmpi.plan(job, ranks=1)
    assert plan.peak <= peak_in_order_of(job.graph, plan)
    check_order(plan.graph)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_orders_of_any_graph(data: st.DataObject) -> None:
    """They are orders, and do not depend on how often they are made; runs give the same bits."""
    count = data.draw(st.integers(2, 12), "vertices")
    names = ["X"]
    lines = []
    for number in range(count):
        first = data.draw(st.sampled_from(names))
        second = data.draw(st.sampled_from(names))
        form = data.draw(st.sampled_from(["{}[i,j] * {}[i,j]", "{}[i,j] - sum[k]({}[i,k])"]))
        lines.append(f"T{number}[i,j] = tanh({form.format(first, second)})")
        names.append(f"T{number}")
    outputs = data.draw(st.lists(st.sampled_from(names[1:]), min_size=1, unique=True))
    job = einmpi.program("\n".join(lines), outputs=outputs, X=(7, 7))
    nbytes = {}
    for vertex in job.graph.vertices:
        nbytes[vertex.name] = data.draw(st.integers(0, 9), vertex.name)
    found = list(other_orders(job.graph, Constraints(nbytes)))
    assert found == list(other_orders(job.graph, Constraints(nbytes)))
    for graph in found:
        check_order(graph)
        assert sorted(map(str, graph.vertices)) == sorted(map(str, job.graph.vertices))
    values = values_for(job)
    ranks = data.draw(st.sampled_from([1, 2, 3]))
    done = run_on_threads(job, ranks, values)
    assert done.moved == done.plan.bytes_predicted
    wanted = einmpi.reference(job, values)
    for name in outputs:
        np.testing.assert_allclose(done.outputs[name], wanted[name], rtol=1e-12, atol=1e-12)


def test_readers_of_an_input_come_before_its_update() -> None:
    """Even where the update would free more than they do."""
    text = "G[i] = x[i] * 2; x_next[i] = x[i] - G[i]; y[i] = x[i] + 1; z = sum(y[i])"
    job = einmpi.program(text, outputs=["x_next", "z"], x=(100,))
    graph = with_updates_in_order(job.graph, {"x": "x_next"})
    nbytes = {vertex.name: vertex.nbytes for vertex in graph.vertices}
    nbytes |= {"x": 0, "x_next": 0}
    for order in other_orders(graph, Constraints(nbytes, {"x_next": "x"})):
        for reader in order.consumers["x"]:
            assert order.position[reader] <= order.position["x_next"]


def test_updates_that_wait_for_each_other() -> None:
    """t must be computed before x_next, which must be computed before a_next, which reads t."""
    text = "x_next[i] = x[i] + a[i]; t = sum(x[i]); a_next[i] = a[i] - t"
    carry = {"x": "x_next", "a": "a_next"}
    job = einmpi.program(text, outputs=list(carry.values()), x=(100,), a=(100,))
    graph = with_updates_in_order(job.graph, carry)
    nbytes = {vertex.name: 1 for vertex in graph.vertices}
    updates = {output: name for name, output in carry.items()}
    for order in other_orders(graph, Constraints(nbytes, updates)):
        assert [vertex.name for vertex in order.computed] == ["t", "x_next", "a_next"]
