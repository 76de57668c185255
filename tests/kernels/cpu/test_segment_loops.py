"""Scattered aggregates over segments of sorted places, against numpy one value after another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import einmpi
from einmpi.kernels.cpu import dispatch, segment_loops
from einmpi.kernels.cpu.known_indices import KnownIndicesCall
from einmpi.kernels.fixed_lists import fact, fix, identity_of, is_within

UFUNCS: dict[str, Any] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "any": np.logical_or,
    "all": np.logical_and,
}
DTYPES = ("float32", "float64", "complex64", "complex128", "int8", "int64", "uint16", "bool")
TEXTS = {  # with the extent of the lanes
    "vector": ("y[to[q]:n] = {}(A[q] * x[at[q]])", 0),
    "lanes": ("y[to[q]:n,f] = {}(A[q] * x[at[q],f])", 5),
    "two": ("y[to[q]:n,f] = {}(A[q] * x[at[q],f] * z[by[q],f])", 64),
    "tiles": ("y[to[q]:n,i,f] = {}[q,j](B[q,i,j] * v[at[q],j,f])", 3),
    "inside": ("y[to[q]:n] = {}[q,j](B[q,0,j] * v[at[q],j,0])", 1),
    "own row": ("y[to[q]:n,f] = {}(A[q] * w[to[q],f] + x[at[q],f])", 70),
}
# Each is compiled: each aggregation and each dtype with some of the forms.
CASES = [
    (form, name, DTYPES[(5 * i + k) % len(DTYPES)])
    for k, form in enumerate(TEXTS)
    for i, name in enumerate(UFUNCS)
]


def values_of(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if dtype == "bool":
        return rng.random(shape) < 0.7
    values = rng.integers(0 if dtype[0] == "u" else -2, 3, shape)
    if dtype[0] == "c":
        return (values + 1j * rng.integers(-2, 3, shape)).astype(dtype)
    return (values / 2 if dtype[0] == "f" else values).astype(dtype)


def inputs_of(rng: np.random.Generator, dtype: str, to: np.ndarray, lanes: int) -> dict[str, Any]:
    count = len(to)
    return {
        "to": to,
        "at": rng.integers(0, 5, count).astype("uint32"),
        "by": rng.integers(0, 3, count),
        "A": values_of(rng, dtype, (count,)),
        "B": values_of(rng, dtype, (count, 2, 3)),
        "x": values_of(rng, dtype, (5,)),
        "w": values_of(rng, dtype, (7, lanes)),
        "z": values_of(rng, dtype, (3, lanes)),
        "v": values_of(rng, dtype, (5, 3, lanes)),
    }


def compute(
    text: str, inputs: dict[str, Any], threads: int = 1, fixed: bool = True
) -> tuple[np.ndarray, bool]:
    """Return y of a program by its kernel, and whether that went through segments."""
    names = [name for name in inputs if f"{name}[" in text]
    chosen = {name: inputs[name] for name in names}
    (vertex,) = einmpi.program(text, n=7, **chosen).graph.computed
    einsum = vertex.computed_einsum
    arrays = [chosen[name] for name in vertex.inputs]
    if fixed:
        for name in ("to", "at", "by"):
            fix(inputs[name])
    out = np.empty(vertex.bound, vertex.dtype)
    call = dispatch.prepare_einsum(einsum, arrays, out, {}, threads, repetition=2**62)
    call(arrays, out)
    by_segments = isinstance(call, KnownIndicesCall) and call.made[1] is not None
    return out, by_segments


def wanted(text: str, inputs: dict[str, Any], name: str, like: np.ndarray) -> np.ndarray:
    """Return the same, by numpy, from the function of the program."""
    to, at, by = (inputs[each].astype(int) for each in ("to", "at", "by"))
    A, B, x, z, v = (inputs[each] for each in "ABxzv")
    inside = (to >= 0) & (to < 7)
    w = inputs["w"][np.where(inside, to, 0)]
    tile = A.reshape(-1, *[1] * (x.ndim - 1))
    if "B[q,i,j]" in text:
        values = B[:, :, :, None] * v[at][:, None]
    elif "B[q,0,j]" in text:
        values = B[:, 0] * v[at][:, :, 0]
    elif "z[" in text:
        values = tile * x[at] * z[by]
    elif "w[" in text:
        values = tile * w + x[at]
    else:
        values = tile * x[at]
    dtype = like.dtype
    wide = {"f": "float64", "c": "complex128"}.get(dtype.kind, dtype)
    neutral = {"sum": 0, "prod": 1, "any": False, "all": True}.get(name)
    if neutral is None and dtype.kind == "b":
        neutral = name == "min"
    elif neutral is None:
        limits = np.iinfo(dtype) if dtype.kind in "iu" else None
        low, high = (limits.min, limits.max) if limits else (-np.inf, np.inf)
        neutral = low if name == "max" else high
    result = np.full(like.shape, neutral, wide)
    for place, value in zip(to[inside], values[inside], strict=True):
        value = value.astype(wide)
        if "[q,j]" in text:
            value = UFUNCS[name].reduce(value, axis=1 if "[q,i,j]" in text else 0)
        result[place] = UFUNCS[name](result[place], value)
    return result.astype(dtype)


PLACES = st.lists(st.integers(0, 9), min_size=1, max_size=30)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("form", "name", "dtype"), CASES)
@settings(max_examples=12)
@given(drawn=PLACES, is_sorted=st.booleans(), threads=st.integers(1, 3), seed=st.integers(0, 99))
def test_segments_are_what_numpy_aggregates(
    form: str, name: str, dtype: str, drawn: list[int], is_sorted: bool, threads: int, seed: int
) -> None:
    text, lanes = TEXTS[form]
    if name in ("max", "min") and dtype[0] == "c":
        dtype = "float32"
    to = np.array(sorted(drawn) if is_sorted else drawn, "uint32")
    rng = np.random.default_rng(seed)
    inputs = inputs_of(rng, dtype, to, max(1, lanes))
    if "x[at[q],f]" in text:
        inputs["x"] = values_of(rng, dtype, (5, lanes))
    found, by_segments = compute(text.format(name), inputs, threads)
    # Sums and products of halves are exact, but for long products.
    np.testing.assert_allclose(found, wanted(text, inputs, name, found), rtol=1e-5)
    assert by_segments == (segment_loops.ends_of(to, 0, 7) is not None)


@pytest.mark.parametrize("lanes", [0, 3, 100, 600])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_bits_do_not_depend_on_threads(
    dtype: str, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_loops, "MIN_THREADED_VALUES", 0)
    rng = np.random.default_rng(3)
    to = np.sort(rng.integers(0, 7, 3000)).astype("uint32")
    inputs = inputs_of(rng, dtype, to, 1)
    shape = (5, lanes) if lanes else (5,)
    inputs["A"] = rng.standard_normal(3000).astype(dtype)
    inputs["x"] = rng.standard_normal(shape).astype(dtype)
    text = TEXTS["lanes" if lanes else "vector"][0].format("sum")
    alone, by_segments = compute(text, inputs)
    assert by_segments
    for threads in (2, 3):
        np.testing.assert_array_equal(compute(text, inputs, threads)[0], alone)
    exact = wanted(text, inputs, "sum", alone)
    # 3000 values of about 1, in parts of 128: rounded a few hundred times.
    rtol = 1e-4 if dtype in ("float32", "complex64") else 1e-12
    np.testing.assert_allclose(alone, exact, rtol=rtol, atol=100 * rtol)


@pytest.mark.parametrize(("form", "name"), [("vector", "sum"), ("tiles", "max"), ("lanes", "any")])
def test_long_segments_are_cut(form: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_loops, "MIN_THREADED_VALUES", 0)
    monkeypatch.setattr(segment_loops, "LONG_SEGMENT", 10)
    rng = np.random.default_rng(3)
    to = np.repeat(np.array([0, 2, 3, 6], "uint32"), [5, 45, 10, 21])
    text, lanes = TEXTS[form]
    inputs = inputs_of(rng, "bool" if name == "any" else "float64", to, max(1, lanes))
    if form == "lanes":
        inputs["x"] = values_of(rng, "bool", (5, lanes))
    alone, by_segments = compute(text.format(name), inputs)
    assert by_segments
    np.testing.assert_allclose(alone, wanted(text.format(name), inputs, name, alone))
    for threads in (2, 3):
        np.testing.assert_array_equal(compute(text.format(name), inputs, threads)[0], alone)


def test_ends_of_segments() -> None:
    ends = segment_loops.ends_of
    for places, first, extent, expected in (
        ([0, 0, 2], 0, 3, ([0, 2, 2], [2, 2, 3])),
        ([1, 1, 2, 9, 9], 1, 2, ([0, 2], [2, 3])),
        ([0, 1, 2, 3], 2, 2, ([2, 3], [3, 4])),
        # Empty places at the ends of two blocks.
        ([0, 0, 9, 9, 3, 4, 9], 0, 5, ([0, 4, 4, 4, 5], [2, 4, 4, 5, 6])),
        ([9, 9], 0, 2, ([0, 0], [0, 0])),
    ):
        found = ends(np.array(places, "uint32"), first, extent)
        assert found is not None
        assert (found.first.tolist(), found.end.tolist()) == expected
    assert ends(np.array([1, 0], "uint32"), 0, 2) is None
    assert ends(np.array([0, 9, 0], "uint32"), 0, 2) is None


def test_lists_that_may_change_are_read_in_every_call() -> None:
    rng = np.random.default_rng(0)
    inputs = inputs_of(rng, "float64", np.array([0, 1, 1], "uint32"), 1)
    assert not compute(TEXTS["vector"][0].format("sum"), inputs, fixed=False)[1]
    assert compute(TEXTS["vector"][0].format("sum"), inputs)[1]


def test_indices_out_of_range_are_found() -> None:
    inputs = inputs_of(np.random.default_rng(0), "float64", np.array([0, 1, 1], "uint32"), 1)
    inputs["at"] = np.array([0, 5, 1])
    with pytest.raises(IndexError, match="out of range"):
        compute(TEXTS["vector"][0].format("sum"), inputs)


def test_facts_of_fixed_lists() -> None:
    array = np.array([3, 1, 2], "uint32")
    assert identity_of(array) is None
    assert not is_within(array, 4)
    fix(array)
    assert is_within(array, 4)
    assert not is_within(array, 3)
    assert is_within(array[1:], 3)
    assert identity_of(array[1:]) != identity_of(array[:2])
    calls: list[int] = []
    for _ in range(2):
        assert fact(array, "key", lambda: calls.append(1) or "found") == "found"
    assert calls == [1]
    other = np.array([3, 1, 2], "uint32")
    del array
    fix(other)
    assert not is_within(other, 3)
