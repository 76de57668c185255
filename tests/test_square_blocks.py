"""Stencils in contiguous blocks of all dimensions: values, bytes, and arrays in such blocks."""

from __future__ import annotations

from dataclasses import replace

import fake_cupy
import numpy as np
import pytest
from distributed import run_from_files, run_on_threads

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.planner.mesh import Mesh
from einmpi.planner.orders import digit_orders, other_first_axes
from einmpi.schedule.layout import Layout

RNG = np.random.default_rng(5)
SQUARE = RNG.normal(size=(24, 24))
CUBE = RNG.normal(size=(12, 12, 12))


def five_points(u):
    found = u.copy()
    found[1:-1, 1:-1] = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    return found


def seven_points(u):
    padded = np.pad(u, 1)
    inner = slice(1, -1)
    found = np.zeros_like(u)
    for dimension in range(3):
        for side in (slice(None, -2), slice(2, None)):
            index = [inner] * 3
            index[dimension] = side
            found += padded[tuple(index)]
    return found


FIVE = "[i,j] = where((i>0)&(i<23)&(j>0)&(j<23), u[i-1,j] + u[i+1,j] + u[i,j-1] + u[i,j+1], u[i,j])"
GUARDED = (
    "where(i>0, u[i-1,j,k], 0) + where(i<11, u[i+1,j,k], 0) + where(j>0, u[i,j-1,k], 0)"
    " + where(j<11, u[i,j+1,k], 0) + where(k>0, u[i,j,k-1], 0) + where(k<11, u[i,j,k+1], 0)"
)
CASES = {
    "five points": (f"v{FIVE}", SQUARE, five_points),
    "two steps": (
        f"w{FIVE}\nv{FIVE.replace('u[', 'w[')}",
        SQUARE,
        lambda u: five_points(five_points(u)),
    ),
    "transposed": (f"w{FIVE}\nv[j,i] = w[i,j] * 2", SQUARE, lambda u: 2 * five_points(u).T),
    "seven points": (f"v[i:12,j:12,k:12] = {GUARDED}", CUBE, seven_points),
    "periodic": (
        "v[i:24,j:24] = u[(i+1)%24,j] + u[(i-1)%24,j] + u[i,(j+1)%24] + u[i,(j-1)%24]",
        SQUARE,
        lambda u: sum(np.roll(u, step, axis) for step in (1, -1) for axis in (0, 1)),
    ),
    "pooled": (
        "w[x,y] = sum[a:3,b:3](u[x+a,y+b]); v[x:11,y:11] = max[a:2,b:2](w[2*x+a,2*y+b])",
        SQUARE,
        lambda u: (
            np.lib.stride_tricks.sliding_window_view(u, (3, 3))
            .sum((2, 3))
            .reshape(11, 2, 11, 2)
            .max((1, 3))
        ),
    ),
    "summed": (
        f"w{FIVE}\nv[i] = sum(w[i,j] * u[i,j])",
        SQUARE,
        lambda u: (five_points(u) * u).sum(1),
    ),
}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 9, 12, 16])
@pytest.mark.parametrize("name", CASES)
def test_values_and_bytes(name, ranks):
    """Schedules are verified, bytes moved are those planned, and memory is at most the plan's."""
    text, u, expected = CASES[name]
    outputs, _ = run_from_files(ranks, text, {"u": u})
    # Another order of a few sums of numbers around 1.
    np.testing.assert_allclose(outputs["v"], expected(u), rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("ranks", [4, 6, 16])
@pytest.mark.parametrize("name", CASES)
def test_values_on_gpus(name, ranks, monkeypatch):
    """The GPU backend without a GPU: halos are packed and unpacked there."""
    fake_cupy.install(monkeypatch)
    text, u, expected = CASES[name]
    job = replace(einmpi.program(text, u=u), backend="cupy")
    done = run_on_threads(job, ranks, {"u": u})
    if name != "summed":  # there is a matrix to read once more, which may be cut into rows
        assert any(any(orders) for orders in done.plan.orders.values())
    np.testing.assert_allclose(done.outputs["v"], expected(u), rtol=1e-12, atol=1e-12)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("ranks", [4, 6, 16])
@pytest.mark.parametrize("name", ["five points", "two steps", "periodic"])
def test_gradients(name, ranks):
    """The step is linear, v = S·u, so that the gradient of g·v² is 2·Sᵀ·(g·v)."""
    text, u, step = CASES[name]
    g = RNG.normal(size=u.shape)
    text += "\nloss = sum(g[i,j] * v[i,j]**2)\ndu[p,q] = grad(loss, u[p,q])"
    outputs, _ = run_from_files(ranks, text, {"u": u, "g": g})
    columns = []
    for place in range(u.size):
        unit = np.zeros(u.size)
        unit[place] = 1
        columns.append(step(unit.reshape(u.shape)).ravel())
    expected = np.stack(columns) @ (2 * g * step(u)).ravel()
    # Sums of some dozens of numbers around 1, in another order.
    np.testing.assert_allclose(outputs["du"].ravel(), expected, rtol=1e-11, atol=1e-11)


def test_programs_without_index_arithmetic_keep_the_order_of_the_mesh():
    graph = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=(8, 8), B=(8, 8)).graph
    assert digit_orders(graph, 6) == {}
    one = einmpi.program("v[i:7] = u[i+1] - u[i]", u=(8,)).graph
    assert digit_orders(one, 6) == {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "images, channels, ranks, words",
    [(8, 16, 32, 177_152), (8, 16, 64, 359_424), (8, 16, 1024, 3_140_608), (6, 64, 96, 3_119_616)],
)
def test_blocks_of_images_begin_after_the_axes_of_the_batch(images, channels, ranks, words):
    """No plan of a convolution moves less: the images of a batch are cut, and blocks of them."""
    text = "V[b,o,x,y] = sum[c,u,v](X[b,c,x+u,y+v] * K[o,c,u,v])"
    n, results = (66, 32) if channels == 16 else (58, 64)
    job = einmpi.program(text, X=(images, channels, n, n), K=(results, channels, 3, 3))
    plan = einmpi.plan(job, ranks)
    assert plan.words_predicted == plan.lower_bound == words


def test_a_batch_in_blocks():
    """Values and bytes where labels of images begin with a later axis."""
    x, k = RNG.normal(size=(4, 2, 10, 10)), RNG.normal(size=(3, 2, 3, 3))
    text = "V[b,o,x,y] = sum[c,u,v](X[b,c,x+u,y+v] * K[o,c,u,v])"
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))
    graph = einmpi.program(text, X=x, K=k).graph
    assert other_first_axes(graph, Mesh(16)) == [2]
    outputs, _ = run_from_files(16, text, {"X": x, "K": k})
    expected = np.einsum("bcxyuv,ocuv->boxy", windows, k)
    np.testing.assert_allclose(outputs["V"], expected, rtol=1e-12, atol=1e-12)


def test_labels_that_go_together_have_one_order():
    text, _, _ = CASES["transposed"]
    orders = digit_orders(einmpi.program(text, u=(24, 24)).graph, 4)
    assert orders["tensor", "u"] == (0, -1)
    assert orders["tensor", "v"] == (-1, 0)
    cube = digit_orders(einmpi.program(CASES["seven points"][0], u=(12, 12, 12)).graph, 6)
    assert cube["tensor", "u"] == cube["vertex", "v"] == (0, 2, -1)


@pytest.mark.parametrize("ranks", [4, 6, 8])
def test_arrays_in_square_blocks_are_used_by_other_programs(ranks):
    """Their layouts say how their digits are ordered; arrays in other orders move if need be."""
    step_job = einmpi.program(f"v{FIVE}", u=(24, 24))
    both_job = einmpi.program("z[i,j] = a[i,j] + b[j,i]", a=(24, 24), b=(24, 24))
    plain_job = einmpi.program("z[i,k] = sum(a[i,j] * a[j,k])", a=(24, 24))
    plan = einmpi.plan(step_job, ranks)
    layout = Layout(plan.mesh, (24, 24), plan.layouts["u"], (), plan.orders_of("u"))
    expected = five_points(SQUARE)
    twice = five_points(expected)

    def on_rank(comm):
        array = einmpi.DistArray.from_global(SQUARE, comm)
        in_blocks = array.redistribute(layout)
        first = einmpi.run(step_job, {"u": in_blocks}, comm=comm)["v"]
        before = comm.received
        second = einmpi.run(step_job, {"u": first}, comm=comm)["v"]
        moved = comm.received - before
        assert first.layout == second.layout == layout and layout.orders == (0, -1)
        np.testing.assert_allclose(second.gather(), twice, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal((first + 1).gather(), first.gather() + 1)
        np.testing.assert_array_equal(first.T.gather(), first.gather().T)
        np.testing.assert_array_equal(first[3:17:2, ::-1].gather(), first.gather()[3:17:2, ::-1])
        np.testing.assert_array_equal(
            first.reshape(4, 144).gather(), first.gather().reshape(4, 144)
        )
        np.testing.assert_array_equal((first + array).gather(), first.gather() + SQUARE)
        z = einmpi.run(both_job, {"a": first, "b": first}, comm=comm)["z"]
        np.testing.assert_array_equal(z.gather(), first.gather() + first.gather().T)
        z = einmpi.run(both_job, {"a": first, "b": array}, comm=comm)["z"]
        np.testing.assert_array_equal(z.gather(), first.gather() + SQUARE.T)
        z = einmpi.run(plain_job, {"a": first}, comm=comm)["z"]
        np.testing.assert_allclose(z.gather(), expected @ expected, rtol=1e-10, atol=1e-10)
        return moved

    moved = sum(run_threads(ranks, on_rank))
    assert moved == plan.bytes_predicted
