"""Weighted sums of differences by BLAS: the values, the error bound, and only where wanted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from distributed import run_on_threads
from hypothesis import given, settings
from hypothesis import strategies as st

import einmpi
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call
from einmpi.kernels.cpu import dispatch
from einmpi.kernels.cpu import dispatch as weighted_difference
from einmpi.kernels.distances import recognise_weighted_difference

GRADIENTS = """
Z[i,j] = sum((x[i,k] - y[j,k])**2)
loss = sum(exp(-Z[i,j]))
dx[i,k] = grad(loss, x[i,k])
dy[j,k] = grad(loss, y[j,k])
"""


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sums that were prepared as matrix products."""
    found = []
    prepare = weighted_difference.prepare_by_blas

    def note(contraction, operands, out):
        found.append(str(contraction))
        return prepare(contraction, operands, out)

    monkeypatch.setattr(weighted_difference, "prepare_by_blas", note)
    return found


@st.composite
def weighted_differences(draw: st.DrawFn) -> EinSum:
    """Draw Σ w·(x − y) or Σ w·(y − x) with any batch and own labels, in any order."""
    extra = {label: draw(st.booleans()) for label in "bcdl"}
    batch = ["b"] if extra["b"] else []  # of w, x and y
    rows = ["i", "c"] if extra["c"] else ["i"]  # of w and x
    columns = ["k", "d"] if extra["d"] else ["k"]  # of x and y
    summed = ["j", "l"] if extra["l"] else ["j"]  # of w and y
    x_rows = rows if draw(st.booleans()) else rows[1:]  # x need not have all labels of w
    indices = (batch + rows + summed, batch + x_rows + columns, batch + columns + summed)
    positions = draw(st.permutations(range(3)))
    operands = [()] * 3
    for position, index in zip(positions, indices, strict=True):
        operands[position] = tuple(draw(st.permutations(index)))
    weights, kept, other = map(Arg, positions)
    pair = (kept, other) if draw(st.booleans()) else (other, kept)
    factors = (weights, Call("-", pair))
    function = Call("*", factors if draw(st.booleans()) else factors[::-1])
    output = tuple(draw(st.permutations(batch + rows + columns)))
    sizes = {label: draw(st.integers(1, 4)) for label in "bcdlijk"}
    extents = tuple((label, sizes[label]) for label in (*output, *summed))
    return EinSum(output, tuple(operands), function, "sum", tuple(summed), extents)


@settings(max_examples=100, deadline=None)
@given(
    einsum=weighted_differences(),
    dtype=st.sampled_from(["float32", "float64", "complex64", "complex128"]),
    is_turned=st.booleans(),
)
def test_any_weighted_difference(einsum, dtype, is_turned):
    difference = recognise_weighted_difference(einsum)
    assert difference is not None
    rng = np.random.default_rng(3)
    operands = []
    for index in einsum.operands:
        values = rng.normal(size=[einsum.extent[label] for label in index])
        if dtype.startswith("complex"):
            values = values + 1j * rng.normal(size=values.shape)
        array = values.astype(dtype)
        operands.append(np.asfortranarray(array)[::-1] if is_turned else array)
    out = np.full(einsum.bound, 7, dtype)
    dispatch.compute_einsum(einsum, operands, out, {}, 1, fast=True)
    exact = np.full(einsum.bound, 7, "complex128" if dtype.startswith("complex") else "float64")
    wide = [array.astype(exact.dtype) for array in operands]
    dispatch.compute_einsum(einsum, wide, exact, {}, 1, fast=False)
    np.testing.assert_allclose(out, exact, rtol=0, atol=100 * np.finfo(dtype).eps)


def test_gradients_of_distances_are_matrix_products(products):
    rng = np.random.default_rng(4)
    inputs = {"x": rng.normal(size=(13, 5)), "y": rng.normal(size=(17, 5))}
    job = einmpi.program(GRADIENTS, **inputs)
    for ranks in (1, 2, 3):
        products.clear()
        exact = run_on_threads(job, ranks, inputs)
        assert products == []  # only if it is allowed
        fast = run_on_threads(replace(job, fast_math=True), ranks, inputs)
        assert len(products) >= 2
        assert fast.moved == fast.plan.bytes_predicted == exact.plan.bytes_predicted
        for name in ("dx", "dy"):
            np.testing.assert_allclose(
                fast.outputs[name], exact.outputs[name], rtol=1e-10, atol=1e-13
            )


def test_large_gradients_are_not_computed_by_compiled_groups(products):
    rng = np.random.default_rng(5)
    inputs = {"x": rng.normal(size=(96, 40)), "y": rng.normal(size=(96, 40))}
    job = einmpi.program(GRADIENTS.replace("exp(-Z", "tanh(Z"), **inputs)
    fast = run_on_threads(replace(job, fast_math=True), 1, inputs).outputs
    assert len(products) == 2
    difference = inputs["x"][:, None] - inputs["y"][None]
    weights = 2 / np.cosh((difference**2).sum(axis=2)) ** 2
    wanted = (weights[..., None] * difference).sum(axis=1)
    np.testing.assert_allclose(fast["dx"], wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "Z[i,k] = sum[j](w[i,j] * (u[i,k] + y[j,k]))",  # no difference
        "Z[i,k] = sum[j](w[i,j] * (v[j,k] - y[j,k]))",  # both are summed
        "Z[i,j] = sum[k](w[i,j] * (v[j,k] - y[j,k]))",  # the weights are not
        "Z[i,k] = max[j](w[i,j] * (u[i,k] - y[j,k]))",  # no sum
        "Z[i,k] = sum[j](w[i,j] * (u[i,k] - y[p[j],k]))",  # a gather
        "Z[k] = sum[i](d[i,i] * (c[k] - u[i,k]))",  # a diagonal
    ],
)
def test_what_is_no_weighted_difference(text):
    shapes = {"w": (3, 4), "u": (3, 5), "v": (4, 5), "y": (4, 5), "d": (3, 3), "c": (5,)}
    used = {name: shape for name, shape in shapes.items() if f"{name}[" in text}
    if "p[" in text:
        used["p"] = np.zeros(4, np.int64)
    graph = einmpi.program(text, **used).graph
    for vertex in graph.computed:
        assert recognise_weighted_difference(vertex.computed_einsum) is None


def test_other_dtypes_are_computed_as_usual(products):
    text = "Z[i,k] = sum[j](w[i,j] * (x[i,k] - y[j,k]))"
    shapes = {"w": (3, 4), "x": (3, 5), "y": (4, 5)}
    for dtype in ("float16", "int64"):
        inputs = {name: np.ones(shape, dtype) for name, shape in shapes.items()}
        job = einmpi.program(text, **inputs)
        assert (run_on_threads(replace(job, fast_math=True), 1, inputs).outputs["Z"] == 0).all()
    assert products == []
