"""Maps and aggregates of their results in one pass: the same bits as one after the other."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import run_on_threads
from kept_results import kept
from step_kinds import computed_as

import einmpi
from einmpi.kernels import halo_parts, index_sets
from einmpi.kernels.cpu import compiled, dispatch, map_and_folds
from einmpi.process.environment import THREAD_VARIABLES
from einmpi.schedule import passes, stencils

SHAPES = {"U": (61, 40), "W": (61, 40)}
PROGRAMS = {
    "columns": "V[i,j] = U[i,j] / 3 + W[i,j]\ns[j] = sum[i](abs(V[i,j] - j))",
    "two": "V[i,j] = U[i,j] - i\ns = sum(abs(V[i,j]))\nt = min(V[i,j] * U[i,j])",
    "aggregates": "s = sum(abs(U[i,j] - j))\nt[j] = min[i](U[i,j] * i)",
    "stencil": """
V[i,j] = where((i > 0) & (i < 60) & (j > 0) & (j < 39),
               (U[i-1,j] + U[i+1,j] + U[i,j-1] + U[i,j+1]) / 4, U[i,j])
s = sum(abs(V[i,j] - U[i,j]))""",
}


@pytest.fixture(autouse=True)
def small_work_counts_as_large(monkeypatch):
    monkeypatch.setattr(index_sets, "MIN_SPLIT_VALUES", 1)
    monkeypatch.setattr(stencils, "MIN_FOLDED_BYTES", 1)
    monkeypatch.setattr(compiled, "CHUNK_VALUES", 100)
    monkeypatch.setattr(map_and_folds, "WORTH_COMPILING", 1)
    monkeypatch.setattr(dispatch, "WORTH_COMPILING", 200)
    kept(halo_parts.split_at_halos).clear()
    yield
    kept(halo_parts.split_at_halos).clear()


def outputs_of(program):
    """Return V and its aggregates: a tensor that is read only once would not be computed apart."""
    return [name for name in "Vst" if f"\n{name}" in f"\n{program}"]


def computed(program, inputs, threads=1):
    with pytest.MonkeyPatch.context() as patch:
        for variable in THREAD_VARIABLES:
            patch.setenv(variable, str(threads))
        made = einmpi.compile(einmpi.program(program, outputs=outputs_of(program), **inputs))
    found = {name: array.gather() for name, array in made(inputs).items()}
    ((_, schedule),) = made.ready.values()
    return made, found, schedule.steps


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_aggregates_on_ranks(ranks):
    """Messages are sent when all aggregates are there: the same ones, and as many."""
    inputs = {"U": np.random.default_rng(1).normal(size=SHAPES["U"])}
    job = einmpi.program(PROGRAMS["aggregates"], outputs=["s", "t"], U=SHAPES["U"])
    done = run_on_threads(job, ranks, inputs)
    assert done.moved == done.plan.bytes_predicted
    i, j = np.indices(SHAPES["U"])
    # Sums of 2,440 numbers in another order than numpy's.
    np.testing.assert_allclose(done.outputs["s"], np.abs(inputs["U"] - j).sum(), rtol=1e-13)
    np.testing.assert_array_equal(done.outputs["t"], (inputs["U"] * i).min(axis=0))


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_bits_as_one_after_the_other(monkeypatch, name):
    rng = np.random.default_rng(0)
    inputs = {}
    for tensor, shape in SHAPES.items():
        if f"{tensor}[" in PROGRAMS[name]:
            inputs[tensor] = rng.normal(size=shape)
    made, found, steps = computed(PROGRAMS[name], inputs)
    (sweep,) = [step for step in steps if computed_as(step) == "stencil"]
    assert len(sweep.kernels) - 1 == (2 if name == "two" else 1)
    assert "together, in one pass:" in str(sweep)
    calls = []
    compute = map_and_folds.MapAndFolds.compute
    monkeypatch.setattr(
        map_and_folds.MapAndFolds, "compute", lambda *given: (calls.append(1), compute(*given))
    )
    again = {tensor: array.copy() for tensor, array in inputs.items()}
    for tensor, array in made(again).items():
        assert np.array_equal(array.gather(), found[tensor])
    assert calls
    _, by_threads, _ = computed(PROGRAMS[name], inputs, threads=3)
    monkeypatch.setattr(passes, "with_folds", lambda schedule, *_: schedule)
    _, expected, steps = computed(PROGRAMS[name], inputs)
    assert not any(computed_as(step) == "stencil" for step in steps)
    for tensor, array in expected.items():
        assert np.array_equal(found[tensor], array)
        assert np.array_equal(by_threads[tensor], array)


def test_what_is_written_over_is_not_swept():
    """An update in place has a path of its own."""
    job = einmpi.program("x_next[i] = x[i] / 2\ns = sum(abs(x_next[i]))", x=(4000,))
    step = einmpi.compile(job, carry={"x": "x_next"}, donate=True)
    x = step({"x": np.ones(4000)})
    assert float(x["s"]) == 2000
    x = step({"x": x["x_next"]})
    assert float(x["s"]) == 1000


def test_a_product_is_left_to_blas():
    """A sum of products is not a compiled loop."""
    inputs = {name: np.ones(shape) for name, shape in SHAPES.items()}
    _, found, steps = computed("V[i,j] = U[i,j] / 3 + W[i,j]\ns = sum(V[i,j] * U[i,j])", inputs)
    assert [computed_as(step) for step in steps if step.kernels] == ["kernel", "kernel"]
    np.testing.assert_allclose(found["s"], 61 * 40 * 4 / 3)
