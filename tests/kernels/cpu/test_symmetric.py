"""Symmetric results by half of the work: the same values, exactly symmetric, and less computed."""

import numpy as np
import pytest

import einmpi
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


def complex_array(*shape, dtype="complex128"):
    rng = np.random.default_rng(0)
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)


def test_other_conjugated_results_are_symmetric():
    x = complex_array(N, 40)
    einsum = einsum_of("Z[i,k] = sum(exp(X[i,j] + conj(X[k,j])))", X=x)
    out = np.full((N, N), np.nan, complex)
    dispatch.compute_einsum(einsum, [x, x], out, {})
    above = np.triu(out, 1)
    np.testing.assert_array_equal(above, np.tril(out, -1).conj().T)
    np.testing.assert_allclose(out, np.exp(x[:, None] + x[None].conj()).sum(-1), rtol=1e-12)
