"""Functions and macros against numpy: every dtype, values at the ends of their range, no values,
and several ranks, whose bytes moved are those of the plan.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from distributed import run_on_threads
from hypothesis import given, settings
from hypothesis import strategies as st

import einmpi
from einmpi.errors import InputError
from einmpi.graph.dtypes import numpy_dtypes
from einmpi.kernels.cpu import dispatch

FLOATS = [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 1e-3, 7.0, -7.0, 800.0, -800.0]
NOT_FINITE = [np.inf, -np.inf, np.nan]


def values_of(dtype: str) -> np.ndarray:
    kind = np.dtype(dtype).kind
    if kind == "b":
        return np.array([True, False])
    if kind == "i":
        limits = np.iinfo(dtype)
        return np.array([0, 1, -1, 3, -3, 7, -7, limits.min, limits.max], dtype)
    numbers = np.array([*FLOATS, *NOT_FINITE])
    if kind == "f":
        return numbers.astype(dtype)
    pairs = np.empty((len(numbers), len(numbers)), "complex128")
    pairs.real = numbers[:, None]
    pairs.imag = numbers
    return pairs.ravel().astype(dtype)


def pairs_of(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs of values."""
    first, second = np.meshgrid(values_of(dtype), values_of(dtype))
    return first.ravel(), second.ravel()


def computed(text: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return Z by the reference, on one rank and on three."""
    job = einmpi.program(text, **arrays)
    return {
        "reference": einmpi.reference(job, arrays)["Z"],
        "one rank": einmpi.run(job, arrays)["Z"].gather(),
        "three ranks": run_on_threads(job, 3, arrays).outputs["Z"],
    }


def check(text: str, arrays: dict[str, np.ndarray], wanted: Any, units: float = 0.0) -> None:
    """Compare with what numpy gives, up to some units in the last place."""
    wanted = np.asarray(wanted)
    for path, found in computed(text, arrays).items():
        assert found.dtype == wanted.dtype, (path, text)
        message = f"{path}: {text}"
        if units:
            rtol = units * float(np.finfo(wanted.dtype).eps)
            np.testing.assert_allclose(found, wanted, rtol=rtol, err_msg=message)
        else:
            np.testing.assert_array_equal(found, wanted, err_msg=message)
            if wanted.dtype.kind == "f":
                same_sign = np.signbit(found) == np.signbit(wanted)
                assert (same_sign | np.isnan(wanted)).all(), message


# ---- elementwise --------------------------------------------------------------------------------

REAL_DTYPES = [name for name in numpy_dtypes() if np.dtype(name).kind != "c"]
NUMBERS = [name for name in REAL_DTYPES if name != "bool"]


@pytest.mark.parametrize("dtype", numpy_dtypes())
def test_which_numbers_are_finite(dtype: str) -> None:
    x = values_of(dtype)
    check("Z[i] = isnan(x[i])", {"x": x}, np.isnan(x))
    check("Z[i] = isfinite(x[i])", {"x": x}, np.isfinite(x))


@pytest.mark.parametrize("dtype", numpy_dtypes())
def test_rounding(dtype: str) -> None:
    """Integers and bools stay what they are, as in numpy 2.1 and later."""
    x = values_of(dtype)
    is_whole = x.dtype.kind in "biu"
    for name, function in {"floor": np.floor, "ceil": np.ceil, "round": np.rint}.items():
        if x.dtype.kind == "c" and name != "round":
            with pytest.raises(InputError, match=f"{name} does not take complex numbers"):
                einmpi.program(f"Z[i] = {name}(x[i])", x=x)
            continue
        check(f"Z[i] = {name}(x[i])", {"x": x}, x if is_whole else function(x))


@pytest.mark.parametrize("dtype", NUMBERS)
def test_floor_division(dtype: str) -> None:
    """Integers divided by 0 are 0, and the least one divided by −1 is itself."""
    x, y = pairs_of(dtype)
    with np.errstate(all="ignore"):
        wanted = x // y
    check("Z[i] = x[i] // y[i]", {"x": x, "y": y}, wanted)
    with np.errstate(all="ignore"):
        check("Z[i] = x[i] // 3", {"x": x}, x // 3)
        check("Z[i] = 3 // x[i]", {"x": x}, 3 // x)


def test_floor_division_of_constants() -> None:
    check("Z = 7 // 2 - -7 // 2 + 1 // 0", {}, np.int64(7))
    check("Z = 7.5 // 2", {}, np.float64(3))
    with pytest.raises(InputError, match="// does not take complex numbers"):
        einmpi.program("Z[i] = x[i] // 2", x=np.zeros(2, "complex64"))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_floor_division_in_compiled_loops(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "WORTH_COMPILING", 0)
    x, y = pairs_of(dtype)
    job = einmpi.program("Z[i] = x[i] // y[i]", x=x, y=y)
    with np.errstate(all="ignore"):
        wanted = x // y
    found = einmpi.run(job, {"x": x, "y": y})["Z"].gather()
    np.testing.assert_array_equal(found, wanted)
    if wanted.dtype.kind == "f":
        assert (np.signbit(found) == np.signbit(wanted))[~np.isnan(wanted)].all()


@pytest.mark.sampled(6, always=["float16", "bool"])
@pytest.mark.parametrize("dtype", REAL_DTYPES)
def test_clip(dtype: str) -> None:
    x = values_of(dtype)
    low = 2 if x.dtype.kind == "u" else -2
    if dtype != "bool":
        check(f"Z[i] = clip(x[i], {low}, 5)", {"x": x}, np.clip(x, low, 5))
        check(f"Z[i] = clip(x[i], 5, {low})", {"x": x}, np.clip(x, 5, low))
        check("Z[i] = clip(x[i], x[0], x[3])", {"x": x}, np.clip(x, x[0], x[3]))
    check("Z[i] = clip(x[i], 0.25, 0.75)", {"x": x}, np.clip(x, 0.25, 0.75))


def test_clip_of_wrong_numbers() -> None:
    with pytest.raises(InputError, match="4294967296 does not fit into int32"):
        einmpi.program("Z[i] = clip(x[i], 0, 2**32)", x=np.zeros(2, "int32"))
    with pytest.raises(InputError, match=r"expected clip\(x, low, high\)"):
        einmpi.program("Z[i] = clip(x[i], 0)", x=(2,))
    with pytest.raises(InputError, match=r"expected arctan2\(y, x\)"):
        einmpi.program("Z[i] = arctan2(x[i])", x=(2,))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "bool"])
def test_sigmoid_is_precise_everywhere(dtype: str) -> None:
    x = values_of(dtype)
    if x.dtype.kind == "f":
        x = np.concatenate([x, np.linspace(-700, 700, 71)]).astype(dtype)
    kind = np.exp.resolve_dtypes((x.dtype, None))[-1]
    exact = 1 / (1 + np.exp(-x.astype("longdouble")))
    check("Z[i] = sigmoid(x[i])", {"x": x}, exact.astype(kind), units=4)
    if dtype == "float64":
        assert computed("Z[i] = sigmoid(x[i])", {"x": np.array([-740.0])})["one rank"][0] > 0


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_sigmoid_of_complex_numbers(dtype: str) -> None:
    x = np.array([0.5 - 1j, -2 + 0.25j, 3j, 50.0, -50 + 1j, 0]).astype(dtype)
    check("Z[i] = sigmoid(x[i])", {"x": x}, 1 / (1 + np.exp(-x)), units=8)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "bool"])
def test_arctan2(dtype: str) -> None:
    y, x = pairs_of(dtype)
    check("Z[i] = arctan2(y[i], x[i])", {"y": y, "x": x}, np.arctan2(y, x), units=4)


@pytest.mark.parametrize("name", ["tan", "sinh", "cosh", "log2", "log10"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "bool"])
def test_smooth_functions_everywhere(name: str, dtype: str) -> None:
    x = values_of(dtype)
    with np.errstate(all="ignore"):
        wanted = getattr(np, name)(x)
    check(f"Z[i] = {name}(x[i])", {"x": x}, wanted, units=8)


def test_the_text_of_a_graph_reads_back() -> None:
    from einmpi.language.parse import parse_graph

    text = "Z[i] = clip(x[i] // 2 // 3 % 4 * (x[i] // (1 + x[i])), floor(x[i]), 9)"
    graph = einmpi.program(text, x=(3,)).graph
    assert parse_graph(str(graph)) == graph


# ---- macros that aggregate ----------------------------------------------------------------------


def test_the_standard_deviation_keeps_its_digits() -> None:
    """The mean of the squares minus the square of the mean would have none left here."""
    x = 1e9 + np.arange(40.0).reshape(4, 10) / 7
    check("Z[i] = std(x[i,j])", {"x": x}, x.std(axis=1), units=1e6)
    check("Z[i] = std[j](x[i,j], ddof=1)", {"x": x}, x.std(axis=1, ddof=1), units=1e6)
    check("Z[i] = var[j](x[i,j], ddof=1)", {"x": x}, x.var(axis=1, ddof=1), units=1e6)


@pytest.mark.sampled(3, always=["float16", "complex64", "int8"])
@pytest.mark.parametrize("dtype", numpy_dtypes())
def test_std_norm_and_count(dtype: str) -> None:
    rng = np.random.default_rng(3)
    least = 0 if np.dtype(dtype).kind == "u" else -9
    x = rng.integers(least, 9, (5, 8)).astype(dtype)
    if x.dtype.kind == "c":
        x = x + (1j * rng.integers(-9, 9, x.shape)).astype(dtype)
    units = 8.0
    if dtype != "bool":
        check("Z[i] = std(x[i,j])", {"x": x}, x.std(axis=1), units)
    wide = x if x.dtype.kind in "fc" else x.astype("float64")
    norm = np.sqrt((np.abs(wide) ** 2).sum(axis=1))
    check("Z[i] = norm(x[i,j])", {"x": x}, norm, units)
    check("Z = norm(x[i,j])", {"x": x}, np.sqrt((np.abs(wide) ** 2).sum()), units)
    check("Z[i] = count(x[i,j])", {"x": x}, np.count_nonzero(x, axis=1))
    check("Z = count(x[i,j] != x[0,j])", {"x": x}, np.int64(np.count_nonzero(x != x[0])))


@pytest.mark.sampled(3, always=["int8", "uint8", "int64"])
@pytest.mark.parametrize("dtype", [name for name in numpy_dtypes() if "int" in name])
def test_macros_of_integers_do_not_wrap(dtype: str) -> None:
    """They are computed in float64, as numpy's mean is: few roundings of numbers of one sign."""
    limits = np.iinfo(dtype)
    x = np.linspace(limits.max // 2, limits.max // 4 * 3, 14).astype(dtype).reshape(2, 7)
    x[0, 0] = limits.min
    wide = x.astype("float64")
    powers = np.exp(wide - wide.max(axis=1, keepdims=True))
    squares = (wide**2).sum(axis=1)
    wanted = {
        "Z[i] = mean(x[i,j])": x.mean(axis=1),
        "Z = mean(x[i,j])": x.mean(),
        "Z[i] = var(x[i,j])": x.var(axis=1),
        "Z[i] = std[j](x[i,j], ddof=1)": x.std(axis=1, ddof=1),
        "Z[i] = norm(x[i,j])": np.sqrt(squares),
        "Z[i] = logsumexp(x[i,j])": wide.max(axis=1) + np.log(powers.sum(axis=1)),
        "Z[i,j] = softmax[j](x[i,j])": powers / powers.sum(axis=1, keepdims=True),
        "Z[i,j] = rmsnorm[j](x[i,j])": wide / np.sqrt(squares / 7 + 1e-6)[:, None],
        "Z[k[j]:3] = mean(x[0,j])": [x[0, :4].mean(), x[0, 4:].mean(), np.nan],
    }
    for text, numbers in wanted.items():
        given = {"x": x}
        if "k[" in text:
            given["k"] = np.array([0] * 4 + [1] * 3)
        check(text, given, numbers, units=32)
    assert computed("Z[i,j] = silu(x[i,j])", {"x": x})["one rank"][1, 1] == x[1, 1]


def test_the_variance_of_fewer_values_than_ddof() -> None:
    """As in numpy, a quotient by 0. A segment without values has no variance."""
    x = np.array([1.0, 2.0])
    check("Z = var(x[i], ddof=3)", {"x": x}, np.inf)
    k = np.array([0, 0])
    check("Z[k[i]:2] = var(x[i], ddof=1)", {"x": x, "k": k}, np.array([0.5, np.nan]))


def test_macros_of_no_values() -> None:
    x = np.zeros((3, 0))
    check("Z[i] = norm(x[i,j])", {"x": x}, np.zeros(3))
    check("Z[i] = count(x[i,j])", {"x": x}, np.zeros(3, "int64"))
    check("Z[j] = argmin[i](x[i,j])", {"x": x}, np.zeros(0, "int64"))
    for name in ("argmin", "argmax"):
        with pytest.raises(InputError, match=f"{name} over j, which has extent 0"):
            einmpi.program(f"Z[i] = {name}(x[i,j])", x=x)


@pytest.mark.sampled(3, always=["argmin-float16", "argmax-bool"])
@pytest.mark.parametrize("dtype", REAL_DTYPES)
@pytest.mark.parametrize("name", ["argmin", "argmax"])
def test_argmin_and_argmax(name: str, dtype: str) -> None:
    """The first of equal values wins, and the first nan before all others."""
    rng = np.random.default_rng(5)
    function = getattr(np, name)
    usual = values_of(dtype)
    finite = usual[np.isfinite(usual)]
    for choices in (usual, finite, finite[:2]):
        x = choices[rng.integers(0, len(choices), (6, 5, 4))]
        check(f"Z[i,k] = {name}(x[i,j,k])", {"x": x}, function(x, axis=1))
        check(f"Z = {name}(x[i,j,k])", {"x": x}, function(x))
        check(f"Z[i] = {name}[j,k](x[i,j,k])", {"x": x}, function(x.reshape(6, -1), axis=1))
        order = x.transpose(0, 2, 1).reshape(6, -1)
        check(f"Z[i] = {name}[k,j](x[i,j,k])", {"x": x}, function(order, axis=1))


def test_argmax_of_an_expression_inside_another() -> None:
    """The values are computed once, so that the greatest one equals itself."""
    rng = np.random.default_rng(6)
    x, y = rng.normal(size=(7, 9)).astype("float32"), rng.normal(size=(9, 5)).astype("float32")
    distance = ((x[:, :, None] - y[None]) ** 2).sum(axis=1)
    text = "D[i,k] = sum((x[i,j] - y[j,k])**2); Z[i] = 1 + argmin(D[i,k])"
    check(text, {"x": x, "y": y}, 1 + distance.argmin(axis=1))
    sums = x[:, :, None] / 3 + y[None] / 7
    text = "Z[i] = argmax(x[i,j] / 3 + y[j,k] / 7)"
    check(text, {"x": x, "y": y}, sums.reshape(7, -1).argmax(axis=1))
    taken = "k[i] = argmax(x[i,j]); Z[i] = x[i,k[i]]"
    check(taken, {"x": x}, x.max(axis=1))


def test_programs_of_every_day() -> None:
    """A step of k-means, the nearest neighbours' labels, and the mean without nan."""
    rng = np.random.default_rng(8)
    x, c = rng.normal(size=(23, 3)), rng.normal(size=(4, 3))
    nearest = ((x[:, None] - c) ** 2).sum(axis=2).argmin(axis=1)
    text = """
    near[i] = argmin(sum[d]((x[i,d] - c[k,d])**2))
    Z[k:4,d]  = sum(where(near[i] == k, x[i,d], 0)) / count(near[i] == k)
    """
    means = [x[nearest == cluster].mean(axis=0) for cluster in range(4)]
    check(text, {"x": x, "c": c}, np.array(means), units=64)
    names = rng.integers(0, 9, 4)
    text = "near[i] = argmin(sum[d]((x[i,d] - c[k,d])**2)); Z[i] = names[near[i]]"
    check(text, {"x": x, "c": c, "names": names}, names[nearest])
    holes = np.where(x > 0.5, np.nan, x)
    text = "Z[d] = sum(where(isnan(x[i,d]), 0, x[i,d])) / count(~isnan(x[i,d]))"
    check(text, {"x": holes}, np.nanmean(holes, axis=0), units=64)


def test_argmin_of_complex_numbers_is_refused() -> None:
    with pytest.raises(InputError, match="does not take complex numbers"):
        einmpi.program("Z = argmin(x[i])", x=np.zeros(2, "complex64"))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_shape_on_any_number_of_ranks(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["argmin", "argmax", "std", "norm", "count"]))
    dtype = data.draw(st.sampled_from(["float64", "float32", "int32"]))
    shape = data.draw(st.tuples(*[st.integers(1, 7)] * 3))
    ranks = data.draw(st.integers(1, 9))
    seed = data.draw(st.integers(0, 99))
    bound = data.draw(st.sampled_from(["i", "j", "k", "ij", "kj", "ijk"]))
    x = np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)
    kept = [label for label in "ijk" if label not in bound]
    axes = ["ijk".index(label) for label in (*kept, *bound)]
    rows = x.transpose(axes).reshape(*(shape["ijk".index(label)] for label in kept), -1)
    target = f"Z[{','.join(kept)}]" if kept else "Z"
    text = f"{target} = {name}[{','.join(bound)}](x[i,j,k])"
    functions = {
        "argmin": lambda: rows.argmin(axis=-1),
        "argmax": lambda: rows.argmax(axis=-1),
        "std": lambda: rows.std(axis=-1),
        "norm": lambda: np.linalg.norm(rows, axis=-1),
        "count": lambda: np.count_nonzero(rows, axis=-1),
    }
    done = run_on_threads(einmpi.program(text, x=x), ranks, {"x": x})
    assert done.moved == done.plan.bytes_predicted
    wanted = functions[name]()
    np.testing.assert_allclose(done.outputs["Z"], wanted, rtol=1e-5, atol=1e-6)
