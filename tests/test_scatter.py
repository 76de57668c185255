"""Indices left of =, such as y[dst[e]:n, f] = sum(x[e,f]), against numpy, on one rank and more."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from distributed import run_on_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi_helpers import run_mpi

import einmpi
from einmpi.errors import EinmpiError, InputError
from einmpi.graph.dtypes import numpy_dtypes
from einmpi.kernels.cpu import compiled, dispatch
from einmpi.kernels.cpu import scatter as cpu_scatter
from einmpi.language.parse import parse_graph

UFUNCS: dict[str, Any] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "any": np.logical_or,
    "all": np.logical_and,
}


def start_of(name: str, dtype: np.dtype[Any]) -> Any:
    """Return the aggregate of no values."""
    if name in ("sum", "prod", "any", "all"):
        return {"sum": 0, "prod": 1, "any": False, "all": True}[name]
    if dtype.kind == "b":
        return name == "min"
    limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    if dtype.kind == "f":
        return -np.inf if name == "max" else np.inf
    return limits.min if name == "max" else limits.max


def scattered(name: str, place: np.ndarray, values: np.ndarray, extent: int) -> np.ndarray:
    """Return the aggregates of the rows of values that have the same place."""
    dtype = values.dtype
    if name in ("sum", "prod") and dtype.kind in "biu":
        dtype = np.dtype("uint64" if dtype.kind == "u" else "int64")
    if name in ("any", "all"):
        dtype = np.dtype(bool)
    wide = np.dtype("float64") if dtype.kind == "f" else dtype
    result = np.full((extent, *values.shape[1:]), start_of(name, dtype), wide)
    inside = (place >= 0) & (place < extent)
    with np.errstate(all="ignore"):
        UFUNCS[name].at(result, place[inside], values[inside].astype(wide))
        return result.astype(dtype)


def check(
    text: str, inputs: dict[str, Any], wanted: np.ndarray, ranks: int = 3, **options: Any
) -> None:
    """Compare y of a program with numpy's: by the reference, on one rank, on several."""
    arrays = {name: array for name, array in inputs.items() if isinstance(array, np.ndarray)}
    job = einmpi.program(text, **inputs)
    if str(2**64 - 1) not in str(job.graph):  # too large a constant for a program
        assert parse_graph(str(job.graph)) == job.graph
    done = run_on_threads(job, ranks, arrays, **options)
    assert done.moved == done.plan.bytes_predicted
    found = {
        "reference": einmpi.reference(job, arrays)["y"],
        "one rank": einmpi.run(job, arrays)["y"].gather(),
        "ranks": done.outputs["y"],
    }
    for path, values in found.items():
        assert values.dtype == wanted.dtype, path
        if wanted.dtype.kind in "fc":
            rtol = 64 * float(np.finfo(wanted.dtype).eps)
            np.testing.assert_allclose(values, wanted, rtol=rtol, atol=rtol * 8, err_msg=path)
        else:
            np.testing.assert_array_equal(values, wanted, err_msg=path)


@pytest.fixture(params=["compiled", "numpy"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compute by compiled loops, whatever the size, or by numpy alone."""
    threshold = 0 if request.param == "compiled" else 2**62
    monkeypatch.setattr(dispatch, "WORTH_COMPILING", threshold)
    return str(request.param)


RNG = np.random.default_rng(17)
EDGES = 60
NODES = 13
FEATURES = 5
GRAPH = {
    "dst": RNG.integers(-3, NODES + 3, EDGES),
    "src": RNG.integers(0, 9, EDGES).astype("int32"),
    "w": RNG.normal(size=EDGES),
    "x": RNG.normal(size=(EDGES, FEATURES)),
    "h": RNG.normal(size=(9, FEATURES)),
    "W": RNG.normal(size=(FEATURES, 4)),
    "place": RNG.integers(-2, NODES + 2, (EDGES, FEATURES)),
    "n": NODES,
}


def inputs_of(text: str) -> dict[str, Any]:
    """Return those of the graph's arrays and sizes that occur in a program."""
    words = set(re.findall(r"\w+", text))
    return {name: value for name, value in GRAPH.items() if name in words}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("dtype", numpy_dtypes())
@pytest.mark.parametrize("name", UFUNCS)
def test_every_aggregation_of_every_dtype(name: str, dtype: str) -> None:
    x = RNG.integers(-2, 3, (EDGES, 3)).astype(dtype)
    inputs = {"dst": GRAPH["dst"], "x": x, "n": NODES}
    text = f"y[dst[e]:n, f] = {name}(x[e,f])"
    if x.dtype.kind == "c":
        if name in ("max", "min"):
            with pytest.raises(InputError, match=f"{name} does not take complex numbers"):
                einmpi.program(text, **inputs)
        return
    check(text, inputs, scattered(name, GRAPH["dst"], x, NODES))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "bool"])
@pytest.mark.parametrize("name", UFUNCS)
def test_every_aggregation_compiled(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "WORTH_COMPILING", 0)
    test_every_aggregation_of_every_dtype(name, dtype)


def test_complex_sums(method: str) -> None:
    x = (RNG.normal(size=EDGES) + 1j * RNG.normal(size=EDGES)).astype("complex64")
    wanted = np.zeros(NODES, "complex128")
    inside = (GRAPH["dst"] >= 0) & (GRAPH["dst"] < NODES)
    np.add.at(wanted, GRAPH["dst"][inside], x[inside])
    check(
        "y[dst[e]:n] = sum(x[e])",
        {"dst": GRAPH["dst"], "x": x, "n": NODES},
        wanted.astype("complex64"),
    )


def joined_sum(values: np.ndarray, extent: int = NODES) -> np.ndarray:
    return scattered("sum", GRAPH["dst"], values, extent)


X, H, W, DST, SRC = GRAPH["x"], GRAPH["h"], GRAPH["w"], GRAPH["dst"], GRAPH["src"]
INSIDE = (DST >= 0) & (DST < NODES)
PLACE = GRAPH["place"]


def columnwise(name: str) -> np.ndarray:
    columns = [scattered(name, PLACE[:, f], X[:, f], NODES) for f in range(FEATURES)]
    return np.stack(columns, 1)


def matrix_of_pairs() -> np.ndarray:
    result = np.zeros((NODES, 9))
    np.add.at(result, (DST[INSIDE], SRC[INSIDE]), W[INSIDE])
    return result


CASES: dict[str, tuple[str, Any]] = {
    "the label last": ("y[f, dst[e]:n] = sum(x[e,f])", lambda: joined_sum(X).T),
    "degrees": ("y[dst[e]:n] = sum(1)", lambda: joined_sum(np.ones(EDGES, "int64"))),
    "a gather": (
        "y[dst[e]:n, f] = sum(w[e] * h[src[e], f])",
        lambda: joined_sum(W[:, None] * H[SRC]),
    ),
    "written out": (
        "y[k:n, f] = sum(where(dst[e] == k, w[e] * h[src[e], f], 0))",
        lambda: joined_sum(W[:, None] * H[SRC]),
    ),
    "written out, the other way": (
        "y[k:n, f] = sum[e](where(k == dst[e], x[e, f], 0.0))",
        lambda: joined_sum(X),
    ),
    "written out, another number": (
        "y[k:n, f] = max(where(dst[e] == k, x[e, f], 0.25))",
        lambda: np.maximum(scattered("max", DST, X, NODES), 0.25),
    ),
    "two indices": ("y[dst[e]:n, src[e]:9] = sum(w[e])", matrix_of_pairs),
    "two indices, written out": (
        "y[a:n, b:9] = sum(where((b == src[e]) & (dst[e] == a), w[e], 0))",
        matrix_of_pairs,
    ),
    "the same index twice": (
        "y[dst[e]:n, dst[e]:n] = sum(w[e])",
        lambda: np.diag(joined_sum(W)),
    ),
    "arithmetic": (
        "y[dst[e]//4:n] = sum(w[e])",
        lambda: scattered("sum", DST // 4, W, NODES),
    ),
    "arithmetic on labels alone": (
        "y[e//5:n] = sum(w[e])",
        lambda: np.pad(W.reshape(12, 5).sum(1), (0, 1)),
    ),
    "an index for each column": ("y[place[e,f]:n, f] = max(x[e,f])", lambda: columnwise("max")),
    "two labels of an index": (
        "y[place[e,f]:n] = sum(x[e,f])",
        lambda: scattered("sum", PLACE.ravel(), X.ravel(), NODES),
    ),
    "more labels than the index": (
        "y[dst[e]:n] = sum(x[e,f] * f)",
        lambda: joined_sum((X * np.arange(FEATURES)).sum(1)),
    ),
    "the place as a number": (
        "y[k:n, f] = sum(where(dst[e] == k, x[e,f] * k, 0))",
        lambda: joined_sum(X * DST[:, None]),
    ),
    "inside an expression": (
        "y[dst[e]:n, f] = relu(sum(x[e,f]) - h[0,f])",
        lambda: np.maximum(joined_sum(X) - H[0], 0),
    ),
    "beside another sum": (
        "y[dst[e]:n] = sum(w[e]) / sum(h[i,f])",
        lambda: joined_sum(W) / H.sum(),
    ),
    "around another aggregation": (
        "y[dst[e]:n] = sum(max(h[src[e],f]))",
        lambda: joined_sum(H[SRC].max(1)),
    ),
    "a macro that uses its argument twice": (
        "y[dst[e]:n, f] = sum(silu(h[src[e],f]))",
        lambda: joined_sum(H[SRC] / (1 + np.exp(-H[SRC]))),
    ),
    "a contraction": (
        "y[dst[e]:n, g] = sum(w[e] * h[src[e],f] * W[f,g])",
        lambda: joined_sum(W[:, None] * H[SRC]) @ GRAPH["W"],
    ),
    "a product with labels of the index": (
        "y[place[e,f]:n, f] = sum[e,j](h[0,f] * h[j,0] * w[e])",
        lambda: np.stack(
            [scattered("sum", PLACE[:, f], W * H[0, f] * H[:, 0].sum(), NODES) for f in range(5)], 1
        ),
    ),
    "a count": ("y[dst[e]:n] = count(w[e] > 0)", lambda: joined_sum((W > 0).astype("int64"))),
    "a slice": (
        "y[dst[1:][e]:n] = sum(w[1:][e])",
        lambda: scattered("sum", DST[1:], W[1:], NODES),
    ),
    "a computed index": (
        "d[e] = dst[e] + 1; y[d[e]:n] = sum(w[e])",
        lambda: scattered("sum", DST + 1, W, NODES),
    ),
    "no places": ("y[dst[e]:0, f] = sum(x[e,f])", lambda: np.zeros((0, FEATURES))),
    "one place": ("y[dst[e]:1, f] = sum(x[e,f])", lambda: joined_sum(X, 1)),
}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("ranks", [1, 4, 6])
@pytest.mark.parametrize("case", CASES)
def test_values_and_bytes(case: str, ranks: int) -> None:
    text, wanted = CASES[case]
    check(text, inputs_of(text), wanted(), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_compiled_loops(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "WORTH_COMPILING", 0)
    text, wanted = CASES[case]
    check(text, inputs_of(text), wanted(), 1)


@pytest.mark.parametrize("ranks", range(1, 10))
def test_any_number_of_ranks(ranks: int) -> None:
    text = "y[dst[e]:n, f] = sum(w[e] * h[src[e], f])"
    check(text, inputs_of(text), joined_sum(W[:, None] * H[SRC]), ranks)


@pytest.mark.parametrize("strategy", ["eindecomp-paper", "sqrt", "replicate"])
def test_every_strategy(strategy: str) -> None:
    text = "y[dst[e]:n, f] = max(x[e,f])"
    for ranks in (2, 4, 6):
        wanted = scattered("max", DST, X, NODES)
        check(text, inputs_of(text), wanted, ranks, strategy=strategy)


@pytest.mark.parametrize("parts", [(1, 1), (6, 1), (2, 3), (3, 2), (1, 6)])
def test_results_that_are_cut_anyhow(parts: tuple[int, int]) -> None:
    """A rank's places need not be in one piece."""
    text = "y[dst[e]:12, f] = sum(x[e,f])"
    x = RNG.integers(-9, 9, (EDGES, 6)).astype("float64")
    inputs = {"dst": DST, "x": x}
    check(text, inputs, scattered("sum", DST, x, 12), 6, pin={"y": parts})


MACROS: dict[str, Any] = {
    "mean": np.mean,
    "var": np.var,
    "std": np.std,
    "norm": lambda values: np.sqrt((values**2).sum()),
    "logsumexp": lambda values: np.log(np.exp(values).sum()),
}


@pytest.mark.parametrize("name", MACROS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_macros_of_a_segment(name: str, dtype: str) -> None:
    w = W.astype(dtype)
    every = np.r_[DST, np.arange(NODES)]  # no segment is empty
    values = np.r_[w, np.ones(NODES, dtype)]
    wanted = [MACROS[name](values[every == k].astype("float64")) for k in range(NODES)]
    inputs = {"dst": every, "w": values, "n": NODES}
    check(f"y[dst[e]:n] = {name}(w[e])", inputs, np.array(wanted).astype(dtype))


def test_the_first_extreme_of_a_segment() -> None:
    values = RNG.integers(0, 4, EDGES)
    least = np.full(NODES, 2**63 - 1)
    for k in range(NODES):
        members = np.flatnonzero(k == DST)
        if len(members):
            least[k] = members[values[members].argmin()]
    inputs = {"dst": DST, "w": values, "n": NODES}
    check("y[dst[e]:n] = argmin(w[e])", inputs, least)


def test_a_mean_of_nothing_is_nan() -> None:
    found = einmpi.run("y[dst[e]:3] = mean(w[e])", dst=np.array([0, 2]), w=np.ones(2))["y"].gather()
    np.testing.assert_array_equal(found, [1, np.nan, 1])


def test_values_that_go_nowhere_are_not_computed() -> None:
    dst = np.array([0, 7, 1, -1])
    src = np.array([1, 99, 0, -5])  # out of range where dst is
    h = np.array([2.0, np.nan])
    for text in (
        "y[dst[e]:2] = sum(h[src[e]])",
        "y[k:2] = sum(where(dst[e] == k, h[src[e]], 0))",
    ):
        check(text, {"dst": dst, "src": src, "h": h}, np.array([np.nan, 2.0]), 2)
    with pytest.raises(EinmpiError, match="an index from -5 to 99 is out of range"):
        einmpi.run("y[dst[e]:9] = sum(h[src[e]])", dst=np.arange(4), src=src, h=h)


def test_an_index_out_of_range_in_a_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "WORTH_COMPILING", 0)
    arrays = {"dst": np.arange(4), "src": np.array([0, 1, 0, 9]), "h": np.ones(2)}
    with pytest.raises(EinmpiError, match="an index from 0 to 9 is out of range; expected 0 to 1"):
        einmpi.run("y[dst[e]:4] = sum(h[src[e]])", **arrays)
    with pytest.raises(EinmpiError, match="this dimension has extent 0"):
        einmpi.run("y[dst[e]:4] = sum(h[src[e]])", **{**arrays, "h": np.ones(0)})
    arrays["dst"] = np.arange(-4, 0)
    found = einmpi.run("y[dst[e]:4] = sum(h[src[e]])", **arrays)["y"].gather()
    np.testing.assert_array_equal(found, 0)


def test_no_values_at_all() -> None:
    inputs = {"dst": np.zeros(0, "int64"), "x": np.zeros((0, 3)), "n": 4}
    check("y[dst[e]:n, f] = sum(x[e,f])", inputs, np.zeros((4, 3)))
    with pytest.raises(InputError, match="max over e, which has extent 0"):
        einmpi.program("y[dst[e]:n, f] = max(x[e,f])", **inputs)


def test_parameters() -> None:
    job = einmpi.program("y[dst[e]:n] = sum(lr * w[e])", dst=DST, w=W, n=NODES, lr=0.5)
    found = einmpi.run(job, {"dst": DST, "w": W})["y"].gather()
    np.testing.assert_allclose(found, joined_sum(0.5 * W), rtol=1e-12, atol=1e-12)


# ---- operations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "operations"),
    [
        ("y[dst[e]:1000, f] = sum(x[src[e], f])", 5000 * 64),
        ("y[dst[e]:1000, f] = sum(w[e] * x[src[e], f])", 2 * 5000 * 64),
        ("y[k:1000, f] = sum(where(k == dst[e], x[src[e], f], 0))", 5000 * 64),
        ("y[dst[e]:1000] = sum(1)", 5000),
        ("y[dst[e]//4:1000] = sum(w[e])", 2 * 5000),
        ("y[dst[e]:1000, src[e]:1000] = sum(w[e])", 5000),
        ("y[dst[e]:1000, f] = max(x[src[e], f])", 5000 * 64),
        # scattered before a product of matrices, or after it
        ("y[dst[e]:1000, g] = sum(x[src[e],f] * W[f,g])", 5000 * 64 + 2 * 1000 * 64 * 32),
        ("y[dst[e]:9000, g] = sum(z[e,f] * W[f,g])", 2 * 5000 * 64 * 32 + 5000 * 32),
        ("y[dst[e]:1000, f, g] = sum(z[e,f] * W[0,g])", 5000 * 64 + 1000 * 64 * 32),
        ("y[dst[e]:1000, g] = max(z[e,f] + W[f,g])", 5000 * 64 + 2 * 1000 * 64 * 32),
        ("m[e,f] = 2 * z[e,f]; y[dst[e]:1000, f] = sum(m[e,f])", 2 * 5000 * 64),
    ],
)
def test_operations_are_those_of_the_values(text: str, operations: int) -> None:
    edges = np.zeros(5000, "int64")
    given = {"x": (1000, 64), "W": (64, 32), "z": (5000, 64), "w": (5000,), "dst": edges}
    given["src"] = edges
    used = {name: given[name] for name in given if f"{name}[" in text}
    job = einmpi.program(text, **used)
    assert job.graph.operations() == operations
    assert parse_graph(str(job.graph)) == job.graph


@pytest.mark.parametrize("places", [5, 90])
@pytest.mark.parametrize("name", ["sum", "max"])
def test_products_around_scattered_values(places: int, name: str) -> None:
    """Scattered first if there are few places, last if there are many; indices stay guarded."""
    op = {"sum": "*", "max": "+"}[name]
    dst = RNG.integers(0, places, EDGES)
    src = SRC.copy()
    dst[3] = -1
    src[3] = 99
    values = H[np.where(dst >= 0, src, 0)]
    product = values[:, :, None] * GRAPH["W"] if name == "sum" else values[:, :, None] + GRAPH["W"]
    wanted = scattered(name, dst, product.sum(1) if name == "sum" else product.max(1), places)
    inputs = {"dst": dst, "src": src, "h": H, "W": GRAPH["W"]}
    text = f"y[dst[e]:{places}, g] = {name}(h[src[e],f] {op} W[f,g])"
    check(text, inputs, wanted, 4)
    assert len(einmpi.program(text, **inputs).graph.computed) > 1
    found = einmpi.run(text, inputs, strict=True)["y"].gather()
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
    inputs["h"] = np.round(H * 9).astype("int64")
    inputs["W"] = np.round(GRAPH["W"] * 9).astype("int64")
    values = inputs["h"][np.where(dst >= 0, src, 0)][:, :, None]
    product = values * inputs["W"] if name == "sum" else values + inputs["W"]
    wanted = scattered(name, dst, product.sum(1) if name == "sum" else product.max(1), places)
    check(text, inputs, wanted, 3)


def test_both_forms_are_the_same_vertex() -> None:
    given = {"dst": DST, "src": SRC, "h": H, "w": W}
    left = einmpi.program("y[dst[e]:13, f] = sum(w[e] * h[src[e], f])", **given).graph
    right = "y[dst_1:13, f] = sum(where(dst[e] == dst_1, w[e] * h[src[e], f], 0))"
    assert einmpi.program(right, **given).graph == left


# ---- kernels ------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [1, 3, 300])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bits_do_not_depend_on_threads(
    features: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "WORTH_COMPILING", 0)
    monkeypatch.setattr("einmpi.kernels.cpu.scatter.MIN_THREADED_VALUES", 0)
    x = RNG.normal(size=(700, features)).astype(dtype)
    dst = RNG.integers(0, 11, 700)
    einsum = einmpi.program("y[dst[e]:11, f] = sum(x[e,f])", dst=dst, x=x).graph["y"].einsum
    results = []
    for threads in (1, 2, 3, 5, 16):
        out = np.full((11, features), np.nan, dtype)
        dispatch.compute_einsum(einsum, _in_order(einsum, dst, x), out, {}, threads)
        results.append(out)
    for result in results[1:]:
        assert result.tobytes() == results[0].tobytes()
    if dtype == "float64":
        assert results[0].tobytes() == scattered("sum", dst, x, 11).tobytes()


def _in_order(einsum: Any, dst: np.ndarray, x: np.ndarray) -> list[np.ndarray]:
    return [dst if len(entries) == 1 else x for entries in einsum.operands]


def test_loops_are_compiled_once_for_all_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "WORTH_COMPILING", 0)
    counts = []
    for edges, nodes, features in ((40, 5, 7), (50, 9, 8), (60, 30, 9)):
        dst = RNG.integers(0, nodes, edges)
        x = RNG.normal(size=(edges, features))
        job = einmpi.program("y[dst[e]:n, f] = sum(2.5 * x[e,f])", dst=dst, x=x, n=nodes)
        found = einmpi.run(job, {"dst": dst, "x": x})["y"].gather()
        np.testing.assert_allclose(found, scattered("sum", dst, 2.5 * x, nodes), rtol=1e-12)
        counts.append(compiled.STATISTICS.compiled + compiled.STATISTICS.loaded)
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize("case", ["a gather", "two labels of an index", "an index for each column"])
@pytest.mark.parametrize("limit", [1, 7, 64])
def test_small_chunks_change_nothing(
    case: str, limit: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_scatter, "CHUNK_PLACES", limit)
    monkeypatch.setattr(cpu_scatter, "BLOCK_ELEMENTS", limit)
    text, wanted = CASES[case]
    check(text, inputs_of(text), wanted(), 1)


@pytest.mark.parametrize("limit", [8, 64, 200])
def test_totals_in_parts(limit: int, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_scatter, "TOTAL_BYTES", limit)
    monkeypatch.setattr(cpu_scatter, "MIN_CUT_EXTENT", 2)
    x = X.astype("float32")
    inputs = {"dst": DST, "x": x, "n": NODES}
    check("y[dst[e]:n, f] = sum(x[e,f])", inputs, scattered("sum", DST, x, NODES), 1)
    check("y[f, dst[e]:n] = sum(x[e,f])", inputs, scattered("sum", DST, x, NODES).T, 1)


def test_operands_that_are_views(method: str) -> None:
    x = RNG.normal(size=(FEATURES, 2 * EDGES))[::-1, ::2].T
    dst = np.asfortranarray(RNG.integers(0, NODES, (EDGES, 3)))[:, 1]
    arrays = [x, dst]
    einsum = einmpi.program("y[f, dst[e]:13] = sum(x[e,f])", dst=dst, x=x).graph["y"].einsum
    out = np.zeros((NODES, FEATURES)).T
    ordered = [arrays[1] if len(entries) == 1 else arrays[0] for entries in einsum.operands]
    dispatch.compute_einsum(einsum, ordered, out, {})
    np.testing.assert_allclose(out, scattered("sum", dst, x, NODES).T, rtol=1e-12)


# ---- properties ---------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_shape_on_any_number_of_ranks(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(UFUNCS)))
    dtype = data.draw(st.sampled_from(["float64", "float32", "float16", "int32", "int64", "bool"]))
    edges = data.draw(st.integers(1 if name in ("max", "min") else 0, 12))
    nodes = data.draw(st.integers(0, 9))
    features = data.draw(st.integers(0, 4))
    ranks = data.draw(st.integers(1, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    dst = rng.integers(-2, nodes + 2, edges).astype(data.draw(st.sampled_from(["int32", "int64"])))
    x = rng.integers(-2, 3, (edges, features)).astype(dtype)
    wanted = scattered(name, dst, x, nodes)
    form = data.draw(st.sampled_from(["dst[e]:n, f", "f, dst[e]:n"]))
    if form.startswith("f"):
        wanted = wanted.T
    inputs = {"dst": dst, "x": x, "n": nodes}
    text = f"y[{form}] = {name}(x[e,f])"
    if nodes == 0:
        text = text.replace(":n", ":0")
        del inputs["n"]
    check(text, inputs, wanted, ranks)


# ---- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "y[dst[e], f] = sum(x[e,f])",
            r"the index dst\[e\] left of = has no extent; expected an extent, written as "
            r"dst\[e\]:EXTENT",
        ),
        ("y[w[e]:n] = sum(w[e])", r"the index w\[e\] is float64; expected an integer"),
        (
            "y[dst[e]:n] = sum(w[e]) + w[e]",
            r"label e is neither in the output y\[dst\[e\]\] nor aggregated",
        ),
        ("y[dst[e]:n] = w[e]", "label e is neither in the output"),
        (
            "y[dst[e]:n] = 1.5",
            r"nothing is aggregated over dst\[e\], which is left of =; expected one of sum, prod",
        ),
        (
            "y[place[e,f]:n] = sum[e](x[e,0])",
            r"label f is in an index left of =, but this sum does not aggregate it; expected "
            r"sum\[e,f\]\(...\)",
        ),
        ("y[dst[e]:n] = softmax[e](w[e])", "label e is neither in the output"),
        ("y[dst[e]:n] = cumsum[e](w[e])", "label e is neither in the output"),
        ("y[nowhere[e]:n] = sum(w[e])", "unknown tensor 'nowhere'"),
        ("y[dst[e,f]:n] = sum(x[e,f])", r"dst\[e, f\] has the wrong number of indices"),
        ("y[dst[e]:m] = sum(w[e])", "unknown size 'm'"),
        ("y[0:n] = sum(w[e])", "0:n is not a label"),
        ("y[dst[f]:n] = sum(w[f] + x[e,f])", "label f has two extents"),
    ],
)
def test_errors(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        einmpi.program(text, **GRAPH)


# ---- real ranks ---------------------------------------------------------------------------------

PROGRAM = """
import numpy as np
import einmpi
from einmpi.comm.mpi import comm_of

rng = np.random.default_rng(3)
dst = rng.integers(-2, 32, 400)
x = rng.integers(-9, 9, (400, 6)).astype("float64")
job = einmpi.program("y[dst[e]:30, f] = sum(x[e,f]); d[dst[e]:30] = sum(1)", dst=dst, x=x)
compiled = einmpi.compile(job)
found = compiled({"dst": dst, "x": x})
wanted = np.zeros((30, 6))
inside = (dst >= 0) & (dst < 30)
np.add.at(wanted, dst[inside], x[inside])
np.testing.assert_array_equal(found["y"].gather(), wanted)
np.testing.assert_array_equal(found["d"].gather(), np.bincount(dst[inside], minlength=30))
((plan, _),) = compiled.ready.values()
received = comm_of(None).allgather_text(str(compiled.measured.received))
assert sum(int(text) for text in received) == plan.bytes_predicted
"""


@pytest.mark.slow
def test_real_ranks() -> None:
    done = run_mpi(3, PROGRAM)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtypes", [("int64", "int16"), ("int32", "int8"), ("uint64", "uint8")])
def test_extremes_of_products_of_two_widths(dtypes: tuple[str, str]) -> None:
    """Values are scattered before the product, with the neutral element of its dtype."""
    wide = RNG.integers(0, 99, 5).astype(dtypes[0])
    narrow = RNG.integers(0, 99, (EDGES, 6)).astype(dtypes[1])
    inputs = {"dst": GRAPH["dst"], "w": wide, "x": narrow, "n": NODES}
    for name, other, ufunc in (("max", "minimum", np.minimum), ("min", "maximum", np.maximum)):
        values = ufunc(wide, narrow[:, :, None])  # e, l, f
        wanted = scattered(name, GRAPH["dst"], values, NODES)
        check(f"y[dst[e]:n,l,f] = {name}({other}(w[f], x[e,l]))", inputs, wanted)


@pytest.mark.parametrize("kind", ["bool", "int16", "float16"])
def test_a_product_with_smaller_numbers_keeps_its_dtype(kind):
    """Factors are scattered before the product where that saves operations: in its own dtype."""
    rng = np.random.default_rng(4)
    B = rng.integers(0, 2, 40).astype(kind)
    C = rng.normal(size=30).astype("float32")
    n = rng.integers(0, 3, 40)
    given = {"B": B, "C": C, "n": n}
    job = einmpi.program("T[n[i]:3] = sum[i,j](B[i] * C[j])", **given)
    found = einmpi.run(job, given)["T"].gather()
    assert found.dtype == job.written["T"].dtype == "float32"
    expected = [B[n == k].astype(float).sum() * C.astype(float).sum() for k in range(3)]
    # Sums of 40 small integers are exact; those of 30 float32 have errors of some 1e-7.
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("ranks", [2, 8])
def test_one_place_for_all_values(ranks, monkeypatch):
    """Ranks have parts of the label; the place on each of them is a number of its own."""
    monkeypatch.setattr(dispatch, "WORTH_COMPILING", 1)
    arrays = {"B": RNG.normal(size=(16, 8)), "C": RNG.normal(size=(16, 6))}
    job = einmpi.program(
        "T[i,k:6] = sum[l,m,n](where(5 == k, B[n,l] - C[m,i], 0))", pin={"T": (1, 2)}, **arrays
    )
    found = run_on_threads(job, ranks, arrays).outputs["T"]
    np.testing.assert_allclose(found, einmpi.reference(job, arrays)["T"], rtol=1e-12, atol=1e-12)
