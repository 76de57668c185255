"""Symmetric results by half of the work: the same values, exactly symmetric, and less computed."""

from dataclasses import replace

import numpy as np
import pytest

import einmpi
from einmpi.graph.scalar import Call, Const
from einmpi.kernels.cpu import dispatch, symmetric

N = 300
PROGRAMS = {
    "Z[i,k] = max(abs(X[i,j] - X[k,j]))": lambda x: abs(x[:, None] - x[None]).max(-1),
    "Z[i,k] = sum((X[i,j] - X[k,j])**2)": lambda x: ((x[:, None] - x[None]) ** 2).sum(-1),
    "Z[i,k] = sum(minimum(X[i,j], X[k,j]))": lambda x: np.minimum(x[:, None], x[None]).sum(-1),
    "Z[k,i] = sum(where(i == k, 1.0, X[i,j] + X[k,j]))": lambda x: np.where(
        np.eye(len(x), dtype=bool)[..., None], 1, x[:, None] + x[None]
    ).sum(-1),
}


def einsum_of(text, **shapes):
    return einmpi.program(text, **shapes).graph["Z"].computed_einsum


def counted_calls(monkeypatch):
    """Count the applications of ⊗ that are prepared as loops, whole and in tiles."""
    counts = []
    prepare_by_loops = dispatch.compiled.prepare_by_compiled_loops

    def prepare(einsum, *args, **kwargs):
        call = prepare_by_loops(einsum, *args, **kwargs)

        def compute(operands, out):
            counts.append(einsum.calls())
            call(operands, out)

        return compute

    monkeypatch.setattr(dispatch.compiled, "prepare_by_compiled_loops", prepare)
    return counts


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", PROGRAMS)
@pytest.mark.parametrize("n", [N, 257, 1024])
def test_half_of_the_work_gives_the_same_values(monkeypatch, text, n):
    counts = counted_calls(monkeypatch)
    x = np.random.default_rng(n).standard_normal((n, 40))
    einsum = einsum_of(text, X=x)
    out = np.full((n, n), np.nan)
    dispatch.compute_einsum(einsum, [x, x], out, {})
    np.testing.assert_array_equal(out, out.T)
    np.testing.assert_allclose(out, PROGRAMS[text](x), rtol=1e-12, atol=1e-12)
    tiles = min(symmetric.MOST_TILES, n // symmetric.MIN_ROWS)
    assert len(counts) == tiles
    assert sum(counts) <= einsum.calls() * (tiles + 1) / (2 * tiles) * 1.01
    copied = np.full((n, n), np.nan)
    dispatch.compute_einsum(einsum, [x, x.copy()], copied, {})
    assert counts[-1] == einsum.calls()
    np.testing.assert_array_equal(out, copied)


def test_a_prepared_call_looks_at_which_arrays_are_the_same():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, N, 40))
    einsum = einsum_of("Z[i,k] = max(abs(X[i,j] - X[k,j]))", X=x)
    out = np.empty((N, N))
    for prepared_for in ([x, x], [x, y]):
        call = dispatch.prepare_einsum(einsum, prepared_for, out, {})
        for operands in ([x, x], [x, y], [y, y]):
            call(operands, out)
            wanted = abs(operands[0][:, None] - operands[1][None]).max(-1)
            np.testing.assert_array_equal(out, wanted)


@pytest.mark.slow
def test_labels_with_other_indices_are_not_swapped():
    x = np.random.default_rng(0).standard_normal((N, 40))
    einsum = einsum_of("Z[i,k] = sum(abs(i - k) * X[i,j] * X[k,j] + X[k,j] * X[i,j])", X=x)
    out = np.empty((N, N))
    index = {"i": np.arange(N), "k": np.arange(N) + 5}
    dispatch.compute_einsum(einsum, [x, x], out, index)
    distance = abs(index["i"][:, None] - index["k"])
    np.testing.assert_allclose(out, (distance + 1) * (x @ x.T), rtol=1e-9, atol=1e-9)
    index["k"] = index["i"] = np.arange(N) * 2
    dispatch.compute_einsum(einsum, [x, x], out, index)
    distance = abs(index["i"][:, None] - index["k"])
    np.testing.assert_allclose(out, (distance + 1) * (x @ x.T), rtol=1e-9, atol=1e-9)


def test_several_labels_and_a_batch():
    x = np.random.default_rng(0).standard_normal((2, 260, 3, 33))
    einsum = einsum_of("Z[b,i,p,k,q] = max(abs(X[b,i,p,j] - X[b,k,q,j]))", X=x)
    out = np.full(einsum.bound, np.nan)
    dispatch.compute_einsum(einsum, [x, x], out, {})
    for batch in (0, 1):
        points = x[batch].reshape(-1, 33)
        wanted = abs(points[:, None] - points[None]).max(-1)
        np.testing.assert_array_equal(out[batch].reshape(wanted.shape), wanted)


def test_a_product_with_its_own_transpose_is_symmetric():
    x = np.random.default_rng(0).standard_normal((500, 200))
    einsum = einsum_of("Z[i,k] = sum(X[i,j] * X[k,j])", X=x)
    out = np.empty((500, 500))
    dispatch.compute_einsum(einsum, [x, x], out, {})
    np.testing.assert_array_equal(out, out.T)
    np.testing.assert_allclose(out, x @ x.T, rtol=1e-12, atol=1e-9)


def counted_products(monkeypatch):
    """Count the products of a matrix and its own conjugate transpose."""
    counts = []
    prepare = symmetric.prepare_product_with_own

    def prepare_counted(*arguments):
        multiply = prepare(*arguments)

        def compute(*arrays):
            counts.append(1)
            multiply(*arrays)

        return compute if multiply is not None else None

    monkeypatch.setattr(symmetric, "prepare_product_with_own", prepare_counted)
    return counts


def complex_array(*shape, dtype="complex128"):
    rng = np.random.default_rng(0)
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)


OF_CONJUGATES = {
    "Z[i,k] = sum(X[i,j] * conj(X[k,j]))": lambda x: x @ x.conj().T,
    "Z[i,k] = sum(conj(X[i,j]) * X[k,j])": lambda x: x.conj() @ x.T,
    "Z[k,i] = sum(X[i,j] * conj(X[k,j]))": lambda x: (x @ x.conj().T).T,
    "Z[i,k] = sum(X[j,i] * conj(X[j,k]))": lambda x: x.T @ x.conj(),
    "Z[i,k] = sum(conj(X[j,i]) * X[j,k])": lambda x: x.conj().T @ x,
}


@pytest.mark.parametrize("text", OF_CONJUGATES)
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_product_with_conjugates_takes_half_of_the_work(monkeypatch, text, dtype, order):
    counts = counted_products(monkeypatch)
    x = complex_array(150, 170, dtype=dtype).copy(order)
    wanted = OF_CONJUGATES[text](x)
    einsum = einmpi.program(text, X=x).graph["Z"].computed_einsum
    out = np.full(wanted.shape, np.nan, dtype, order)
    dispatch.compute_einsum(einsum, [x, x], out, {})
    assert len(counts) == 1
    np.testing.assert_array_equal(out, out.conj().T)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(out, wanted, rtol=0, atol=8 * eps * abs(wanted).max())
    dispatch.compute_einsum(einsum, [x, x.copy()], out, {})  # two arrays: all of it is computed
    assert len(counts) == 1
    np.testing.assert_allclose(out, wanted, rtol=0, atol=8 * eps * abs(wanted).max())


def test_products_that_are_not_halved(monkeypatch):
    counts = counted_products(monkeypatch)
    x = complex_array(150, 160)
    for text, wanted in (
        ("Z[i,k] = sum(X[i,j] * X[k,j])", x @ x.T),
        ("Z[i,k] = sum(real(X[i,j]) * conj(X[k,j]))", x.real @ x.conj().T),
    ):
        job = einmpi.program(text, X=x)
        np.testing.assert_allclose(einmpi.run(job, X=x)["Z"].local, wanted, rtol=1e-10, atol=1e-9)
    assert not counts


@pytest.mark.parametrize(("scale", "halved"), [(3.0, 1), (-0.5, 1), (2j, 0)])
def test_products_times_a_number(monkeypatch, scale, halved):
    counts = counted_products(monkeypatch)
    x = complex_array(150, 160)
    einsum = einsum_of("Z[i,k] = sum(X[i,j] * conj(X[k,j]))", X=x)
    einsum = replace(einsum, function=Call("*", (Const(scale), einsum.function)))
    out = np.empty((150, 150), complex)
    dispatch.compute_einsum(einsum, [x, x], out, {})
    np.testing.assert_allclose(out, scale * (x @ x.conj().T), rtol=1e-10, atol=1e-9)
    assert len(counts) == halved  # a complex multiple is not its own conjugate transpose


def test_a_prepared_product_with_conjugates_looks_at_which_arrays_are_the_same(monkeypatch):
    counts = counted_products(monkeypatch)
    x, y = complex_array(2, 150, 160)
    einsum = einsum_of("Z[i,k] = sum(X[i,j] * conj(X[k,j]))", X=x)
    out = np.empty((150, 150), complex)
    call = dispatch.prepare_einsum(einsum, [x, x], out, {})
    for operands in ([x, x], [x, y], [y, y]):
        call(operands, out)
        np.testing.assert_allclose(out, operands[0] @ operands[1].conj().T, rtol=1e-10, atol=1e-9)
    assert len(counts) == 2


def test_other_conjugated_results_are_symmetric():
    x = complex_array(N, 40)
    einsum = einsum_of("Z[i,k] = sum(exp(X[i,j] + conj(X[k,j])))", X=x)
    out = np.full((N, N), np.nan, complex)
    dispatch.compute_einsum(einsum, [x, x], out, {})
    above = np.triu(out, 1)
    np.testing.assert_array_equal(above, np.tril(out, -1).conj().T)
    np.testing.assert_allclose(out, np.exp(x[:, None] + x[None].conj()).sum(-1), rtol=1e-12)
