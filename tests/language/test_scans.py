"""Cumulative sums, products, maxima and minima against numpy, on one rank and on several."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from distributed import run_from_files, run_on_threads
from hypothesis import given, settings
from hypothesis import strategies as st

import einmpi
from einmpi.errors import InputError
from einmpi.graph.dtypes import numpy_dtypes
from einmpi.graph.two_pass_scans import with_scans_in_blocks
from einmpi.kernels import reference
from einmpi.kernels.cpu import scan as cpu_scan
from einmpi.kernels.cpu.dispatch import compute_einsum
from einmpi.language.parse import parse_graph

SCANS: dict[str, Any] = {
    "cumsum": np.add,
    "cumprod": np.multiply,
    "cummax": np.maximum,
    "cummin": np.minimum,
}
NOT_FINITE = [np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, -2.5]


def wanted_scan(name: str, x: np.ndarray, axis: int) -> np.ndarray:
    is_widened = name in ("cumsum", "cumprod") and x.dtype.kind in "bi"
    with np.errstate(all="ignore"):
        return SCANS[name].accumulate(x.astype("int64") if is_widened else x, axis=axis)


def check(text: str, arrays: dict[str, np.ndarray], wanted: np.ndarray, ranks: int = 3) -> None:
    job = einmpi.program(text, **arrays)
    done = run_on_threads(job, ranks, arrays)
    assert done.moved == done.plan.bytes_predicted
    found = {
        "reference": einmpi.reference(job, arrays)["Z"],
        "one rank": einmpi.run(job, arrays)["Z"].gather(),
        "ranks": done.outputs["Z"],
    }
    for path, values in found.items():
        assert values.dtype == wanted.dtype, path
        if wanted.dtype.kind in "fc":
            rtol = 32 * float(np.finfo(wanted.dtype).eps)
            np.testing.assert_allclose(values, wanted, rtol=rtol, atol=rtol * 8, err_msg=path)
        else:
            np.testing.assert_array_equal(values, wanted, err_msg=path)


@pytest.mark.sampled(
    8, always=["cumsum-float16", "cumprod-complex64", "cummax-uint8", "cummin-bool"]
)
@pytest.mark.parametrize("dtype", numpy_dtypes())
@pytest.mark.parametrize("name", SCANS)
def test_every_dtype(name: str, dtype: str) -> None:
    rng = np.random.default_rng(2)
    x = rng.integers(-2, 3, (4, 9)).astype(dtype)
    if x.dtype.kind == "c":
        if name in ("cummax", "cummin"):
            with pytest.raises(InputError, match=f"{name} does not take complex numbers"):
                einmpi.program(f"Z[i,j] = {name}[j](x[i,j])", x=x)
            return
        x = x + (1j * rng.integers(-2, 3, x.shape)).astype(dtype)
    for axis, label in enumerate("ij"):
        check(f"Z[i,j] = {name}[{label}](x[i,j])", {"x": x}, wanted_scan(name, x, axis))
    if x.dtype.kind == "i":
        limits = np.iinfo(dtype)
        x = rng.choice(np.array([limits.min, limits.max, 1, -1], dtype), (4, 9))
        check(f"Z[i,j] = {name}[j](x[i,j])", {"x": x}, wanted_scan(name, x, 1))


@pytest.mark.parametrize("name", SCANS)
def test_inf_and_nan_reach_only_what_follows(name: str) -> None:
    rng = np.random.default_rng(4)
    for dtype in ("float64", "float32", "float16"):
        x = rng.choice(np.array(NOT_FINITE, dtype), (9, 8))
        check(f"Z[i,j] = {name}[j](x[i,j])", {"x": x}, wanted_scan(name, x, 1))


def test_inside_expressions() -> None:
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(4, 9)), rng.normal(size=9)
    check("Z[i,j] = 1 + cumsum[j](x[i,j] * y[j]) / 2", {"x": x, "y": y}, 1 + (x * y).cumsum(1) / 2)
    check("Z[i] = max(cumsum[j](x[i,j]))", {"x": x}, x.cumsum(1).max(1))
    check("Z[j] = cumsum[j](sum[i](x[i,j]))", {"x": x}, x.sum(0).cumsum())
    check("Z[i,j] = cumsum[i](cumsum[j](x[i,j]))", {"x": x}, x.cumsum(1).cumsum(0))
    check("Z[j,i] = cummax[i](x[i,j])", {"x": x}, np.maximum.accumulate(x, 0).T)
    square = rng.normal(size=(5, 5))
    check("Z[i] = cumsum[i](x[i,i])", {"x": square}, np.diagonal(square).cumsum())
    check("Z[i:9] = cumsum[i](y[8 - i])", {"y": y}, y[::-1].cumsum())
    check("Z[j] = cumsum[j](y[j] * 0 + j)", {"y": y}, np.arange(9.0).cumsum())
    check("Z[j] = y[j] - cumsum[j](y[j])", {"y": y}, y - y.cumsum())
    check("Z[i,j] = softmax[j](cumsum[j](x[i,j]) * 0)", {"x": x}, np.full((4, 9), 1 / 9))


def test_no_values_and_one() -> None:
    for name in SCANS:
        check(f"Z[i,j] = {name}[j](x[i,j])", {"x": np.zeros((3, 0))}, np.zeros((3, 0)))
        check(f"Z[i,j] = {name}[j](x[i,j])", {"x": np.full((3, 1), 2.5)}, np.full((3, 1), 2.5))


def test_the_text_of_a_graph_reads_back() -> None:
    for dtype in ("float32", "complex64", "int32", "bool"):
        graph = einmpi.program("Z[i] = cumsum[i](x[i])", x=np.zeros(3, dtype)).graph
        assert parse_graph(str(graph)) == graph


def test_a_scan_takes_one_pass() -> None:
    """Computed as written, a million values would take a trillion operations."""
    x = np.random.default_rng(1).integers(-9, 9, 1_000_000)
    job = einmpi.program("Z[i] = cumsum[i](x[i])", x=x)
    assert job.graph.operations() == x.size
    np.testing.assert_array_equal(einmpi.run(job, {"x": x})["Z"].gather(), x.cumsum())
    np.testing.assert_array_equal(einmpi.reference(job, {"x": x})["Z"], x.cumsum())


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("Z[i] = sum[k](where(k <= i, x[k], 0))", lambda x: x.cumsum()),
        ("Z[i] = sum[k](where(k <= i, x[k], 1))", lambda x: x.cumsum() + np.arange(8, -1, -1)),
        ("Z[i] = prod[k](where(k <= i, x[k], 1))", lambda x: x.cumprod()),
        (
            "Z[i] = max[k](where(k <= i, x[k], 0.25))",
            lambda x: np.append(
                np.maximum(np.maximum.accumulate(x), 0.25)[:-1], np.maximum.reduce(x)
            ),
        ),
        ("Z[i] = sum[k](where(i <= k, x[k], 0))", lambda x: x[::-1].cumsum()[::-1]),
    ],
)
def test_scans_that_are_written_out(text: str, function: Any) -> None:
    """What takes the place of the values after an index need not be the neutral element."""
    x = -np.abs(np.random.default_rng(7).normal(size=9))
    job = einmpi.program(text.replace("Z[i]", "Z[i:9]"), x=x)
    for ranks in (1, 2, 3, 5):
        found = run_on_threads(job, ranks, {"x": x}).outputs["Z"]
        np.testing.assert_allclose(found, function(x), rtol=1e-12, atol=1e-12)
    vertex = job.written["Z"]
    as_written = reference.evaluate_einsum(vertex.einsum, [x], "float64")
    np.testing.assert_allclose(as_written, function(x), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(einmpi.reference(job, {"x": x})["Z"], function(x), atol=1e-12)


@pytest.mark.parametrize("extent", [1, 5, 9, 14])
@pytest.mark.parametrize("ranks", [1, 3])
def test_scans_with_more_or_fewer_results_than_values(extent: int, ranks: int) -> None:
    x = np.random.default_rng(7).integers(-9, 9, (2, 9)).astype(float)
    text = (
        f"Z[a,i:{extent}] = sum[k](where(k <= i, x[a,k], 0))"
        f"; M[i:{extent},a] = max[k](where(k <= i, x[a,k], -inf))"
    )
    last = np.minimum(np.arange(extent), 8)
    found = run_on_threads(einmpi.program(text, x=x), ranks, {"x": x}).outputs
    np.testing.assert_array_equal(found["Z"], x.cumsum(axis=1)[:, last])
    np.testing.assert_array_equal(found["M"], np.maximum.accumulate(x, axis=1)[:, last].T)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Z[i] = cumsum(x[i])", r"cumsum is not called like this; expected cumsum\[label\]"),
        ("Z[i] = cumsum[i:3](x[i])", "cumsum is not called like this"),
        ("Z[i] = cumsum[i](x[i], 2)", "cumsum is not called like this"),
        ("Z[i] = cumsum[j](x[i])", "label j does not occur in this cumsum; expected i"),
        ("Z = cumsum[i](x[i])", "label i is neither in the output Z nor aggregated"),
        ("cumsum[i] = x[i]", "cumsum is a word of the language"),
        ("Z[i] = cumsum[i]", r"cumsum is a function; expected a call: cumsum\[label\]"),
    ],
)
def test_wrong_calls(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        einmpi.program(text, x=(3,))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_shape_on_any_number_of_ranks(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(SCANS)))
    dtype = data.draw(st.sampled_from(["float64", "float32", "int32"]))
    shape = data.draw(st.tuples(*[st.integers(0, 12)] * 3))
    axis = data.draw(st.integers(0, 2))
    ranks = data.draw(st.integers(1, 9))
    order = "".join(data.draw(st.permutations("ijk")))
    x = np.random.default_rng(data.draw(st.integers(0, 99))).integers(-2, 3, shape).astype(dtype)
    text = f"Z[{','.join(order)}] = {name}[{'ijk'[axis]}](x[i,j,k])"
    wanted = wanted_scan(name, x, axis).transpose(["ijk".index(label) for label in order])
    check(text, {"x": x}, wanted, ranks)


@pytest.mark.parametrize("block", [1, 5, 64, 300])
def test_blocks_change_nothing(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_scan, "BLOCK_ELEMENTS", block)
    x = np.random.default_rng(9).integers(-9, 9, (7, 4, 31))
    for axis, label in enumerate("ijk"):
        text = f"Z[i,j,k] = cumsum[{label}](x[i,j,k])"
        check(text, {"x": x}, x.cumsum(axis), ranks=4)


@pytest.mark.parametrize("strategy", ["eindecomp-paper", "sqrt", "replicate"])
def test_every_strategy(strategy: str) -> None:
    x = np.random.default_rng(10).integers(-9, 9, (13, 29))
    job = einmpi.program("Z[i,j] = cumsum[j](x[i,j]); Y[i,j] = cummax[i](x[i,j])", x=x)
    for ranks in (2, 4, 6):
        done = run_on_threads(job, ranks, {"x": x}, strategy=strategy)
        np.testing.assert_array_equal(done.outputs["Z"], x.cumsum(1))
        np.testing.assert_array_equal(done.outputs["Y"], np.maximum.accumulate(x, 0))


# ---- two passes ---------------------------------------------------------------------------------


@pytest.mark.sampled(2, always=["2", "5"])
@pytest.mark.parametrize("ranks", range(1, 10))
def test_a_long_line_moves_totals_only(ranks: int) -> None:
    for length, name in zip((0, 1, 5, 9, 64, 101), cycle(SCANS), strict=False):
        x = np.random.default_rng(length).integers(-2, 3, length).astype("float64")
        outputs, moved = run_from_files(ranks, f"Z[i] = {name}[i](x[i])", {"x": x})
        np.testing.assert_array_equal(outputs["Z"], wanted_scan(name, x, 0))
        assert moved <= ranks**2 * x.itemsize


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_two_passes_over_any_shape(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(SCANS)))
    dtype = data.draw(st.sampled_from(["float64", "float32", "float16", "int32", "bool"]))
    lines = data.draw(st.lists(st.integers(1, 3), max_size=2))
    axis = data.draw(st.integers(0, len(lines)))
    shape = (*lines[:axis], data.draw(st.integers(1, 60)), *lines[axis:])
    ranks = data.draw(st.integers(2, 9))
    labels = "ijk"[: len(shape)]
    order = "".join(data.draw(st.permutations(labels)))
    x = np.random.default_rng(data.draw(st.integers(0, 99))).integers(-2, 3, shape).astype(dtype)
    text = f"Z[{','.join(order)}] = {name}[{labels[axis]}](x[{','.join(labels)}])"
    outputs, _ = run_from_files(ranks, text, {"x": x})
    wanted = wanted_scan(name, x, axis).transpose([labels.index(label) for label in order])
    assert outputs["Z"].dtype == wanted.dtype
    np.testing.assert_allclose(outputs["Z"], wanted, rtol=1e-2 if dtype == "float16" else 1e-6)


def test_two_passes_of_complex_numbers_and_truth_values() -> None:
    x = np.random.default_rng(3).normal(size=(50, 2)).view("complex128")[:, 0].astype("complex64")
    outputs, moved = run_from_files(4, "Z[i] = cumsum[i](x[i])", {"x": x})
    np.testing.assert_allclose(outputs["Z"], x.cumsum(), rtol=1e-5)
    assert moved <= 16 * 16
    for dtype in ("bool", "int64", "float64"):
        x = (np.arange(50) == 17).astype(dtype)
        text = "Z[i:50] = any[k](where(k <= i, x[k], False))"
        text += "; Y[i:50] = all[k](where(k <= i, y[k], True))"
        outputs, moved = run_from_files(4, text, {"x": x, "y": 1 - x.astype("int64")})
        assert moved <= 2 * 16
        np.testing.assert_array_equal(outputs["Z"], np.arange(50) >= 17)
        np.testing.assert_array_equal(outputs["Y"], np.arange(50) < 17)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SCANS)
def test_a_block_before_inf_or_nan_does_not_see_it(name: str) -> None:
    for place, value in ((0, np.inf), (12, np.nan), (13, -np.inf), (13, np.nan), (49, np.inf)):
        x = np.ones(50)
        x[place] = value
        outputs, _ = run_from_files(4, f"Z[i] = {name}[i](x[i])", {"x": x})
        np.testing.assert_array_equal(outputs["Z"], wanted_scan(name, x, 0))


def test_totals_keep_the_sign_of_zero() -> None:
    zeros = np.full(50, -0.0)
    outputs, _ = run_from_files(4, "Z[i] = cumsum[i](x[i])", {"x": zeros})
    assert np.signbit(outputs["Z"]).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ranks", [2, 5, 6])
def test_two_passes_inside_of_larger_programs(ranks: int) -> None:
    rng = np.random.default_rng(6)
    arrays = {"x": rng.normal(size=97), "y": rng.normal(size=97)}
    x, y = arrays["x"], arrays["y"]
    cases = {
        "Z[i] = cumsum[i](x[i] - mean[i](x[i])) + 0 * y[i]": (x - x.mean()).cumsum(),
        "Z[i] = cumsum[i](x[i] * y[i]) / 2": (x * y).cumsum() / 2,
        "Z[i] = cummax[i](cumsum[i](x[i])) - y[i]": np.maximum.accumulate(x.cumsum()) - y,
        "Z = max(cumsum[i](x[i] + y[i]))": (x + y).cumsum().max(),
        "Z[i:96] = cumsum[i](x[i+1] - x[i]) + 0 * y[i]": np.diff(x).cumsum(),
    }
    for text, wanted in cases.items():
        outputs, moved = run_from_files(ranks, text, arrays)
        np.testing.assert_allclose(outputs["Z"], wanted, rtol=1e-12, atol=1e-12, err_msg=text)
        assert moved < 16 * ranks**2, text


def test_what_moves_and_the_memory_do_not_depend_on_the_length() -> None:
    words = set()
    for length in (1000, 1_000_003, 10**9):
        plan = einmpi.plan(einmpi.program("Z[i] = cumsum[i](x[i])", x=(length,)), ranks=8)
        words.add(plan.words_predicted)
        assert plan.peak <= 2 * 8 * -(-length // 8) + 256  # a block of x and one of Z
        assert "Z: scan in two passes: 8 blocks along i, totals move" in str(plan)
    assert len(words) == 1 and words.pop() <= 64


def test_whole_lines_take_one_pass() -> None:
    job = einmpi.program("Z[a,i] = cumsum[i](x[a,i])", x=(40, 50))
    for ranks in (1, 2, 4, 8):
        plan = einmpi.plan(job, ranks=ranks)
        assert plan.graph is job.graph and plan.words_predicted == 0
    job = einmpi.program("Z[a,i] = cumsum[i](x[a,i]); Y[i] = cumsum[i](y[i])", x=(40, 50), y=(90,))
    plan = einmpi.plan(job, ranks=4)
    assert plan.graph["Z"] == job.graph["Z"] and plan.graph["Y"] != job.graph["Y"]
    # Every rank has all of a given array: to compute the whole scan there moves nothing.
    x = np.arange(50.0)
    done = run_on_threads(einmpi.program("Z[i] = cumsum[i](x[i])", x=x), 4, {"x": x})
    assert done.moved == 0 and done.plan.words_predicted == 0


def test_two_passes_with_little_memory() -> None:
    x = np.random.default_rng(8).integers(-9, 9, 4000).astype("float64")
    job = einmpi.program("Z[i] = cumsum[i](x[i])", x=x.shape)
    least = einmpi.plan(job, ranks=4).peak
    text = "Z[i] = cumsum[i](x[i])"
    outputs, _ = run_from_files(4, text, {"x": x}, memory=least)
    np.testing.assert_array_equal(outputs["Z"], x.cumsum())
    outputs, _ = run_from_files(4, text, {"x": x}, memory=least - 4000)
    np.testing.assert_array_equal(outputs["Z"], x.cumsum())


def test_a_pass_that_is_cut_inside_of_blocks_is_computed_as_written() -> None:
    """Any share of its labels gives the right values, also one that no plan would choose."""
    x = np.random.default_rng(12).integers(-9, 9, 30).astype("float64")
    graph = einmpi.program("Z[i] = cumsum[i](x[i])", x=x.shape).graph
    blocked = with_scans_in_blocks(graph, ["Z"], 4)
    known = {"x": x}
    for vertex in blocked.computed:
        operands = [known[name] for name in vertex.inputs]
        known[vertex.name] = reference.evaluate_einsum(vertex.einsum, operands, vertex.dtype)
        out = np.empty(vertex.bound, vertex.dtype)
        compute_einsum(vertex.einsum, operands, out, {})
        np.testing.assert_array_equal(out, known[vertex.name])
    np.testing.assert_array_equal(known["Z"], x.cumsum())
    einsum = blocked["Z"].einsum
    half = replace(
        einsum, extents=tuple((label, min(extent, 4)) for label, extent in einsum.extents)
    )
    i = np.array([3, 9, 10, 29])
    parts = []
    for inside in (np.arange(4), np.arange(4, 8)):
        out = np.empty(4)
        compute_einsum(half, [known["Z_offsets"], x], out, {"i": i, "i_inside": inside})
        parts.append(out)
    np.testing.assert_array_equal(parts[0] + parts[1], x.cumsum()[i])


@pytest.mark.parametrize("ranks", [4, 6])
def test_two_passes_on_two_nodes(ranks: int) -> None:
    x = np.random.default_rng(13).integers(-9, 9, 101).astype("float64")
    outputs, moved = run_from_files(ranks, "Z[i] = cumsum[i](x[i])", {"x": x}, nodes=2)
    np.testing.assert_array_equal(outputs["Z"], x.cumsum())
    assert moved <= ranks**2 * x.itemsize
