"""Updates that BLAS adds to a tensor in place: the values of numpy, and nothing lost."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import einmpi
from einmpi.api import options_of
from einmpi.comm.threads import run_threads
from einmpi.compiled.program import Compiled
from einmpi.job.loop import StepProgram, make_loop
from einmpi.kernels.cpu import product_updates
from einmpi.kernels.cpu import product_updates as added_products
from einmpi.loops.running import LoopRun
from einmpi.planner import memory
from einmpi.runtime.buffers import Buffers


def stored(matrix, how):
    """Return the same matrix, stored by rows, by columns, or with gaps."""
    if how == "columns":
        return np.asfortranarray(matrix)
    if how == "gaps":
        wide = np.full((matrix.shape[0], matrix.shape[1] + 3), 7, matrix.dtype)
        wide[:, 1:-2] = matrix
        return wide[:, 1:-2]
    return matrix.copy()


@settings(max_examples=60, deadline=None)
@given(
    extents=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    storage=st.tuples(*[st.sampled_from(["rows", "columns", "gaps"])] * 3),
    dtype=st.sampled_from(["float32", "float64"]),
    alpha=st.sampled_from([1.0, -0.25, 3.0]),
    beta=st.sampled_from([1.0, 0.5, -2.0]),
)
def test_products_are_added_whatever_the_storage(extents, storage, dtype, alpha, beta):
    rows, depth, columns = extents
    rng = np.random.default_rng(rows + 10 * depth + 100 * columns)
    left = stored(rng.integers(-4, 5, (rows, depth)).astype(dtype), storage[0])
    right = stored(rng.integers(-4, 5, (depth, columns)).astype(dtype), storage[1])
    out = stored(rng.integers(-4, 5, (rows, columns)).astype(dtype), storage[2])
    outside = None if out.base is None else out.base.copy()
    expected = alpha * (left @ right) + beta * out
    assert added_products.can_add_product(left, right, out)
    added_products.add_product(left, right, out, alpha, beta)
    np.testing.assert_array_equal(out, expected)
    if storage[2] == "gaps":
        assert outside is not None and out.base is not None
        np.testing.assert_array_equal(out.base[:, :1], outside[:, :1])
        np.testing.assert_array_equal(out.base[:, -2:], outside[:, -2:])


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((4, 4), "complex128"),
        np.zeros((4, 4), "int64"),
        np.zeros((4, 4), ">f8"),
        np.zeros((8, 8))[::2, ::2],
        np.zeros((4, 4))[::-1],
        np.zeros((4, 4, 1)),
    ],
)
def test_arrays_that_blas_cannot_add_to(out):
    square = np.zeros((4, 4), out.dtype)
    assert not added_products.can_add_product(square, square, out)


TEXT = """
P[b,j] = sum(X[b,i] * W[i,j])
loss = sum((P[b,j] - T[b,j])**2)
G[i,j] = sum(X[b,i] * (P[b,j] - T[b,j]))
"""
# The expression of the next W, and by numpy.
UPDATES = {
    "W[i,j] - rate * G[i,j]": lambda w, g, rate: w - rate * g,
    "W[i,j] + G[i,j] / -50": lambda w, g, rate: w - g / 50,
    "(1 - rate * 0.1) * W[i,j] - rate * G[i,j]": lambda w, g, rate: (1 - rate * 0.1) * w - rate * g,
    "-(rate * G[i,j] - W[i,j])": lambda w, g, rate: w - rate * g,
    "W[i,j] / 2 - G[i,j] * rate": lambda w, g, rate: w / 2 - rate * g,
}
OTHER_UPDATES = [
    "W[i,j] - rate * G[i,j]**2",
    "W[i,j] - rate * G[i,j] - rate * W[i,j]",
    "W[i,j] - rate * W[i,j] * G[i,j]",
    "W[i,j] - rate * G[i,j] + 1",
    "maximum(W[i,j] - rate * G[i,j], 0)",
]


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(product_updates, "MIN_MULTIPLICATIONS", 1)


def inputs_of(rows=5, features=12, columns=8, seed=0, dtype="float64"):
    rng = np.random.default_rng(seed)
    return {
        "X": rng.normal(size=(rows, features)).astype(dtype),
        "T": rng.normal(size=(rows, columns)).astype(dtype),
        "W": rng.normal(size=(features, columns)).astype(dtype),
    }


def run_loop(text, inputs, ranks=1, steps=3, donate=True, rate=0.01, dtype="float64"):
    """Run steps of an update; return W, and the steps of rank 0's schedule."""
    job = einmpi.program(text, dtype=dtype, rate=rate, **inputs)
    program = StepProgram(job.written, job.sizes, job.inputs)
    loop = make_loop(program, lambda *_: "loop", steps, {"W": "W_next"}, None, ["loss"])

    def on_rank(comm):
        run = LoopRun(replace(job, loop=loop), comm, options_of(job))
        options = replace(run.step.options, donate=donate)
        run.step.options = options
        run.step.planning.options = options
        run.prepare(inputs)
        result = run.run()
        return result.outputs["W"].gather(), run.schedule.steps

    return run_threads(ranks, on_rank)[0]


def by_numpy(inputs, update, steps=3, rate=0.01):
    weights = inputs["W"].copy()
    for _ in range(steps):
        gradient = inputs["X"].T @ (inputs["X"] @ weights - inputs["T"])
        weights = update(weights, gradient, rate)
    return weights


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("update", list(UPDATES))
def test_updates_by_one_product(update, ranks):
    inputs = inputs_of()
    text = f"{TEXT}W_next[i,j] = {update}"
    expected = by_numpy(inputs, UPDATES[update])
    bits = []
    for donate in (True, False):
        found, steps = run_loop(text, inputs, ranks, donate=donate)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        assert any(len(step.kernels) == 2 for step in steps)
        bits.append(found.tobytes())
    assert bits[0] == bits[1]


@pytest.mark.parametrize("update", OTHER_UPDATES)
def test_other_updates_are_computed_as_they_are_written(update):
    _, steps = run_loop(f"{TEXT}W_next[i,j] = {update}", inputs_of())
    assert not any(len(step.kernels) == 2 for step in steps)


def test_a_product_that_reads_what_is_updated_is_not_added_in_place():
    text = "loss = sum(W[i,j])\nG[i,j] = sum(W[i,k] * W[k,j])\nW_next[i,j] = W[i,j] - 0.1 * G[i,j]"
    inputs = {"W": np.random.default_rng(0).normal(size=(6, 6))}
    found, steps = run_loop(text, inputs, steps=2)
    expected = inputs["W"]
    for _ in range(2):
        expected = expected - 0.1 * (expected @ expected)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert not any(len(step.kernels) == 2 for step in steps)


@pytest.mark.parametrize("old", ["W", "V"])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_what_a_product_reads_is_not_overwritten_by_its_update(old, in_blocks, monkeypatch):
    """The update takes the memory of W, whether it updates W or another tensor."""
    if in_blocks:
        monkeypatch.setattr(product_updates, "MIN_MULTIPLICATIONS", 2**60)
        monkeypatch.setattr(memory, "PRODUCT_BLOCK_BYTES", 128)
        monkeypatch.setattr(memory, "LEAST_BLOCK_ROWS", 1)
    rng = np.random.default_rng(0)
    inputs = {"W": rng.normal(size=(8, 8)), "V": rng.normal(size=(8, 8))}
    text = "loss = sum(V[i,j])\nG[i,j] = sum(W[k,i] * W[k,j])\n"
    text += f"W_next[i,j] = {old}[i,j] - rate * G[i,j]"
    found, _ = run_loop(text, inputs, steps=2)
    expected = inputs["W"]
    for _ in range(2):
        updated = expected if old == "W" else inputs["V"]
        expected = updated - 0.01 * (expected.T @ expected)
    np.testing.assert_allclose(found, expected, rtol=1e-11)


@pytest.mark.parametrize("old", ["W", "V"])
def test_rows_that_scattered_sums_read_are_not_overwritten(old, monkeypatch):
    monkeypatch.setattr(memory, "SPARSE_BLOCK_BYTES", 32)
    rng = np.random.default_rng(0)
    inputs = {"W": rng.normal(size=(20, 3)), "V": rng.normal(size=(20, 3))}
    inputs["to"] = np.array([5, 3, 0, 3])
    inputs["source"] = np.array([3, 5, 5, 0])
    text = "loss = sum(V[i,j])\nG[to[p]:20,j] = sum(W[source[p],j])\n"
    text += f"W_next[i,j] = {old}[i,j] - rate * G[i,j]"
    found, _ = run_loop(text, inputs, steps=2)
    expected = inputs["W"]
    for _ in range(2):
        sums = np.zeros((20, 3))
        np.add.at(sums, inputs["to"], expected[inputs["source"]])
        expected = (expected if old == "W" else inputs["V"]) - 0.01 * sums
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_a_rate_of_zero_keeps_nan_of_the_product():
    inputs = inputs_of()
    inputs["T"][0, 0] = np.nan
    text = f"{TEXT}W_next[i,j] = W[i,j] - rate * G[i,j]".replace("loss = ", "loss = 0 * ")
    text = text.replace("sum((P[b,j] - T[b,j])**2)", "sum(P[b,j])")
    found, _ = run_loop(text, inputs, steps=1, rate=0.0)
    assert np.isnan(found[:, 0]).all()
    assert not np.isnan(found[:, 1:]).any()


def test_without_a_library_blocks_are_computed(monkeypatch):
    inputs = inputs_of(dtype="float32")
    text = f"{TEXT}W_next[i,j] = W[i,j] - rate * G[i,j]"
    at_once, _ = run_loop(text, inputs, dtype="float32")
    monkeypatch.setattr(added_products, "_numpy_blas", lambda: None)
    by_blocks, steps = run_loop(text, inputs, dtype="float32")
    assert any(len(step.kernels) == 2 for step in steps)
    np.testing.assert_allclose(at_once, by_blocks, rtol=1e-5)


def test_small_products_are_left_to_numpy(monkeypatch):
    monkeypatch.undo()
    _, steps = run_loop(f"{TEXT}W_next[i,j] = W[i,j] - rate * G[i,j]", inputs_of())
    assert not any(len(step.kernels) == 2 for step in steps)


SUM = "P[i,k] = sum(A[i,j] * B[j,k])\nZ[i,k] = 3 * P[i,k] + sum(C[i,j] * D[j,k]){rest}"
# What follows the sum of two products, and whether the sum takes the memory of the first one.
SUMS = {
    "needed once": ("", True),
    "needed again": ("\nY[i] = sum(P[i,k])", False),
    "not linear": (" * P[i,k]", False),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", SUMS)
def test_a_sum_of_products_takes_the_memory_of_the_first_one(case, ranks, monkeypatch):
    rest, takes_memory = SUMS[case]
    rng = np.random.default_rng(1)
    inputs = {name: rng.normal(size=(12, 12)) for name in "ABCD"}
    job = einmpi.program(SUM.format(rest=rest), **inputs)
    handed_over = []
    hand_over = Buffers.hand_over

    def noted(buffers, slot, target):
        handed_over.append((slot.name, target.name))
        hand_over(buffers, slot, target)

    monkeypatch.setattr(Buffers, "hand_over", noted)

    def on_rank(comm):
        step = Compiled(job, comm, options_of(job))
        results = []
        for factor in (1, 2, 3):
            results.append(step({**inputs, "A": factor * inputs["A"]})["Z"])
        # In the end, so that none may lie in memory which a later run has used.
        return [found.gather() for found in results]

    a, b, c, d = inputs.values()
    for results in run_threads(ranks, on_rank):
        for factor, found in enumerate(results, start=1):
            first = factor * a @ b
            second = c @ d * first if case == "not linear" else c @ d
            # Sums of 12 products of numbers around 1: BLAS may add them in another order.
            np.testing.assert_allclose(found, 3 * first + second, rtol=1e-12, atol=1e-12)
    assert handed_over == [("P", "Z")] * (3 * ranks if takes_memory else 0)
