"""Compiled loops over lists of indices that never change, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import einmpi
from einmpi.kernels.cpu import dispatch, known_indices
from einmpi.kernels.fixed_lists import fix

UFUNCS: dict[str, Any] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "any": np.logical_or,
}


def compute(text: str, threads: int = 1, **arrays: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return the result of a program by its kernel, and whether its indices were not tested."""
    (vertex,) = einmpi.program(text, **arrays).graph.computed
    operands = [arrays[name] for name in vertex.inputs]
    out = np.empty(vertex.bound, vertex.dtype)
    call = dispatch.prepare_einsum(
        vertex.computed_einsum, operands, out, {}, threads, repetition=2**62
    )
    call(operands, out)
    is_known = isinstance(call, known_indices.KnownIndicesCall) and call.made[1] is not None
    return out, is_known


def numbers(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    values = rng.integers(0, 3, shape)
    if dtype[0] == "c":
        return (values - 1j).astype(dtype)
    return values.astype(dtype)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("width", [1, 6, 8, 32, 100])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int8", "bool"])
@pytest.mark.parametrize("name", UFUNCS)
def test_products_of_gathered_rows(name: str, dtype: str, width: int) -> None:
    if name == "max" and dtype[0] == "c":
        dtype = "int64"
    rng = np.random.default_rng(0)
    at = rng.integers(0, 7, 40).astype("uint32")
    by = rng.integers(0, 5, 40)
    U, V = numbers(rng, dtype, (7, width)), numbers(rng, dtype, (5, width))
    with np.errstate(all="ignore"):
        wanted = UFUNCS[name].reduce(U[at] * V[by], axis=1)
    text = f"s[q] = {name}[k](U[at[q],k] * V[by[q],k])"
    plain, is_known = compute(text, at=at, by=by, U=U, V=V)
    assert not is_known
    np.testing.assert_allclose(plain, wanted, rtol=1e-5)
    fix(at)
    fix(by)
    for threads in (1, 2, 3):
        found, is_known = compute(text, threads, at=at, by=by, U=U, V=V)
        assert is_known
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=1e-5)  # of products of up to 100 numbers


def test_gathers_without_an_aggregation() -> None:
    rng = np.random.default_rng(1)
    at = rng.integers(0, 7, 40).astype("uint32")
    x, A = rng.normal(size=7), rng.normal(size=40)
    fix(at)
    found, is_known = compute("s[q] = A[q] * x[at[q]] + q", at=at, A=A, x=x)
    assert is_known
    np.testing.assert_array_equal(found, A * x[at] + np.arange(40))


def test_indices_that_are_out_of_range_are_tested() -> None:
    at = np.array([0, 7], "uint32")
    fix(at)
    with pytest.raises(IndexError, match="out of range"):
        compute("s[q] = x[at[q]] * 2", at=at, x=np.ones(7))


def test_other_lists_make_other_loops() -> None:
    (vertex,) = einmpi.program("s[q] = x[at[q]] * 2", at=np.zeros(3, int), x=(3,)).graph.computed
    lists = [np.array(each) for each in ([0, 1, 2], [2, 1, 0], [1, 1, 1], [5, 0, 0])]
    x = np.array([1.0, 10, 100])
    operands = {"at": lists[0], "x": x}
    out = np.empty(3)
    given = [operands[name] for name in vertex.inputs]
    call = dispatch.prepare_einsum(vertex.computed_einsum, given, out, {}, repetition=2**62)
    for number, at in enumerate(lists):
        if number != 1:
            fix(at)
        given = [at if name == "at" else x for name in vertex.inputs]
        if number == 3:
            with pytest.raises(IndexError, match="out of range"):
                call(given, out)
            continue
        call(given, out)
        np.testing.assert_array_equal(out, 2 * x[at])
