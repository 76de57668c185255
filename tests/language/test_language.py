"""The language against plain numpy and scipy: every construct, the design's examples, dtypes."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import scipy.special
from graph_helpers import as_written, build, result, results
from numpy.testing import assert_allclose, assert_array_equal

from einmpi.errors import EinmpiError
from einmpi.graph.dtypes import numpy_dtypes
from einmpi.graph.operations import functions
from einmpi.kernels.reference import evaluate
from einmpi.language.macros import MACROS

RANDOM = np.random.default_rng(20240607)
# Sums of a dozen products of numbers near 1, in another order than numpy's: a few roundings of
# 2**-53.
EXACT = {"rtol": 1e-13, "atol": 1e-13}
SINGLE = {"rtol": 1e-5, "atol": 1e-5}  # the same in float32, which rounds at 2**-24


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape)


def check(
    text: str,
    inputs: dict[str, np.ndarray],
    wanted: np.ndarray,
    sizes: dict[str, int] | None = None,
) -> None:
    """The one output has the wanted shape, dtype and values."""
    found = result(text, inputs, sizes)
    wanted = np.asarray(wanted)
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert_allclose(found, wanted, **EXACT)


# ---- the examples of the design ------------------------------------------------------------------


def test_chain_in_one_line() -> None:
    arrays = {
        "A": normal(2, 3),
        "B": normal(3, 4),
        "C": normal(2, 5),
        "D": normal(5, 6),
        "E": normal(6, 4),
    }
    text = (
        "Z[i,k]  = sum(A[i,j] * B[j,k]) + sum(C[i,j] * sum(D[j,l] * E[l,k]))   # the paper's chain"
    )
    check(text, arrays, arrays["A"] @ arrays["B"] + arrays["C"] @ (arrays["D"] @ arrays["E"]))


def test_squared_distances() -> None:
    x, y = normal(3, 4), normal(4, 2)
    check(
        "L2[i,k] = sum((X[i,j] - Y[j,k])**2)",
        {"X": x, "Y": y},
        ((x[:, :, None] - y[None]) ** 2).sum(axis=1),
    )


def test_largest_distance() -> None:
    x, y = normal(3, 4), normal(4, 2)
    check(
        "Li[i,k] = max(abs(X[i,j] - Y[j,k]))",
        {"X": x, "Y": y},
        np.abs(x[:, :, None] - y[None]).max(axis=1),
    )


def test_three_statements_on_a_line() -> None:
    x = normal(3, 4)
    found = results(
        "C[i]    = max(X[i,j]);  E[i,j] = exp(X[i,j] - C[i]);  S[i] = sum(E[i,j])", {"X": x}
    )
    assert list(found) == ["S"]
    assert_allclose(found["S"], np.exp(x - x.max(axis=1, keepdims=True)).sum(axis=1), **EXACT)


def test_causal_softmax() -> None:
    scores, d = normal(2, 4, 4), 16
    masked = np.where(np.arange(4)[None, :] <= np.arange(4)[:, None], scores / np.sqrt(d), -np.inf)
    text = "P[h,s,t] = softmax[t](where(t <= s, T[h,s,t] / sqrt(d), -inf))"
    check(text, {"T": scores}, scipy.special.softmax(masked, axis=2), {"d": d})


def test_gather_by_an_integer_tensor() -> None:
    w, tok = normal(5, 3), np.array([[0, 4, 4], [2, 1, 0]])
    check("Y[b,s,a] = W[tok[b,s], a]", {"W": w, "tok": tok}, w[tok])


def test_diagonal_and_tensor_without_dimensions() -> None:
    x = normal(4, 4)
    found = results("D[i]    = X[i,i];  n = sum(X[i,j]**2)", {"X": x})
    assert_array_equal(found["D"], np.diagonal(x))
    assert found["n"].shape == ()
    assert_allclose(found["n"], (x**2).sum(), **EXACT)


# ---- aggregations and labels ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sum", "prod", "max", "min", "mean"])
def test_each_aggregation(name: str) -> None:
    x = normal(3, 4)
    check(f"z[i] = {name}(X[i,j])", {"X": x}, getattr(np, name)(x, axis=1))
    check(f"z = {name}(X[i,j])", {"X": x}, getattr(np, name)(x))
    check(f"z[j] = {name}[i](X[i,j])", {"X": x}, getattr(np, name)(x, axis=0))
    check(f"z = {name}[i,j](X[i,j])", {"X": x}, getattr(np, name)(x))


@pytest.mark.parametrize("name", ["any", "all"])
def test_any_and_all(name: str) -> None:
    x = np.array([[True, True], [True, False], [False, False]])
    check(f"z[i] = {name}(X[i,j])", {"X": x}, getattr(np, name)(x, axis=1))
    check(f"z[i] = {name}(X[i,j])", {"X": x * 0.5}, getattr(np, name)(x, axis=1))
    check(f"z[i] = {name}(X[i,j])", {"X": x * 2j}, getattr(np, name)(x, axis=1))


def test_nested_aggregations() -> None:
    a, b, c = normal(2, 3), normal(3, 4), normal(4)
    wanted = (a * ((b + c).max(axis=1) * 2)[None, :]).sum(axis=1)
    check("Z[i] = sum(A[i,j] * (max(B[j,k] + C[k]) * 2))", {"A": a, "B": b, "C": c}, wanted)
    check(
        "z = prod(sum(B[j,k] * max[i](A[i,j])) + C[k])",
        {"A": a, "B": b, "C": c},
        np.prod((b * a.max(axis=0)[:, None]).sum(axis=0) + c),
    )


def test_explicit_label_leaves_the_others_to_an_outer_aggregation() -> None:
    x = normal(3, 4)
    check("z = sum(max[j](X[i,j]))", {"X": x}, x.max(axis=1).sum())
    check("z = sum[i](max[j](X[i,j]))", {"X": x}, x.max(axis=1).sum())
    check("z = max(sum[i](X[i,j]))", {"X": x}, x.sum(axis=0).max())


def test_sibling_sums_reuse_a_label_with_another_extent() -> None:
    a, b = normal(3), normal(5)
    check("z = sum(A[j]) * sum(B[j])", {"A": a, "B": b}, a.sum() * b.sum())


def test_inner_label_hides_the_outer_one() -> None:
    a, b, c = normal(3), normal(3), normal(3)
    check("Z[i] = sum[i](A[i]) + B[i]", {"A": a, "B": b}, a.sum() + b)
    check(
        "Z[j] = C[j] * sum[k](B[k] * sum[j](A[j] * B[k]))",
        {"A": a, "B": b, "C": c},
        c * (b * b * a.sum()).sum(),
    )
    check("z = sum(A[j] * max[j](B[j]))", {"A": a, "B": b}, a.sum() * b.max())
    check("z = sum(A[j] * max[j](B[j]))", {"A": a, "B": normal(5)[:5] * 0 + 2}, a.sum() * 2.0)


def test_explicit_label_with_an_extent() -> None:
    a = normal(3)
    check("Z[i] = sum[k:4](A[i] * k)", {"A": a}, a * 6)
    check("z = sum[i:3](A[i])", {"A": a}, a.sum())
    check("z = sum[i:n](A[i] * i)", {"A": a}, (a * np.arange(3)).sum(), {"n": 3})
    check("z = prod[i:5](i + 1)", {}, np.int64(120))


def test_label_that_only_repeats_is_counted() -> None:
    a, b = normal(3), normal(3)
    check("Z[i] = sum[k:4](A[i])", {"A": a}, 4 * a)
    check("Z[i] = sum[k:4](A[i] * B[i])", {"A": a, "B": b}, 4 * a * b)
    check("z = sum[i,k:4](A[i] * B[i])", {"A": a, "B": b}, 4 * (a * b).sum())
    check("z = prod[i,k:2](A[i] * B[i])", {"A": a, "B": b}, np.prod(a * b) ** 2)
    check("Z[i] = sum[k:0](A[i] * B[i])", {"A": a, "B": b}, 0 * a)
    check("Z[i] = max[k:4](A[i] + B[i])", {"A": a, "B": b}, a + b)


def test_label_used_as_a_number() -> None:
    a = normal(3, 4)
    i, j = np.arange(3)[:, None], np.arange(4)[None, :]
    check("Z[i,j] = A[i,j] * i + j", {"A": a}, a * i + j)
    check("Z[i,j] = where(i == j, A[i,j], 0)", {"A": a}, np.where(i == j, a, 0))
    check("z = sum(A[i,j] * (i - j))", {"A": a}, (a * (i - j)).sum())
    check("Z[i:3] = i", {}, np.arange(3))


def test_label_hides_a_size_of_the_same_name() -> None:
    check(
        "M[s,t] = where(t <= s, 0, -inf)",
        {},
        np.where(np.tri(3, 4, dtype=bool), 0, -np.inf),
        {"s": 3, "t": 4},
    )
    check("Z[i] = A[i] * s", {"A": np.ones(2)}, np.full(2, 3.0), {"s": 3})


def test_output_labels_in_another_order() -> None:
    a = normal(2, 3, 4)
    check("Z[k,i,j] = A[i,j,k]", {"A": a}, a.transpose(2, 0, 1))
    check("Z[k,i] = sum(A[i,j,k])", {"A": a}, a.sum(axis=1).T)


def test_broadcast_outputs() -> None:
    g, h = normal(3), normal(2)
    check("G[i,j:5] = g[i]", {"g": g}, np.repeat(g[:, None], 5, axis=1))
    check(
        "G[j:5,i] = sum(g[i] * h[k])", {"g": g, "h": h}, np.repeat((g * h.sum())[None], 5, axis=0)
    )
    check("G[i:3,j:2] = 7", {}, np.full((3, 2), 7))
    check("G[i,j] = g[i] * h[j]", {"g": g, "h": h}, np.outer(g, h))
    check("G[i:n+1,j:2*n] = 1.5", {}, np.full((4, 6), 1.5), {"n": 3})


# ---- gathers, diagonals, extents -----------------------------------------------------------------


def test_gather_by_constant() -> None:
    a = normal(3, 4)
    check("Z[i] = A[i,2]", {"A": a}, a[:, 2])
    check("z = A[0,n-1]", {"A": a}, a[0, 3], {"n": 4})
    check("Z[i] = sum(A[i,j] * A[1,j])", {"A": a}, a @ a[1])


def test_gather_by_label_arithmetic() -> None:
    a = normal(6)
    check("Z[i:5] = A[i+1]", {"A": a}, a[1:])
    check("Z[i:6] = A[5-i]", {"A": a}, a[::-1])
    check("Z[i:3,j:2] = A[2*i+j]", {"A": a}, a.reshape(3, 2))
    check("Z[i:5] = sum[k:2](A[i+k])", {"A": a}, a[1:] + a[:-1])
    check("Z[i:6] = A[i % 2]", {"A": a}, np.tile(a[:2], 3))


def test_gather_by_tensors() -> None:
    a, rows, columns = normal(4, 5), np.array([3, 0, 3]), np.array([4, 1, 0], np.int32)
    arrays = {"A": a, "R": rows, "C": columns}
    check("Z[k] = A[R[k], C[k]]", arrays, a[rows, columns])
    check("Z[k,l] = A[R[k], C[l]]", arrays, a[np.ix_(rows, columns)])
    check("z = sum(A[R[k], j] * A[R[k], j])", arrays, (a[rows] ** 2).sum())
    check("Z[j] = max(A[R[k], j] + k)", arrays, (a[rows] + np.arange(3)[:, None]).max(axis=0))
    check("Z[k] = A[R[R[k] % 3], k]", {**arrays, "A": a[:, :3]}, a[rows[rows % 3], np.arange(3)])
    check("Z[k] = A[(R[k] + C[k]) % 4, 1]", arrays, a[(rows + columns) % 4, 1])
    guarded = "Z[k] = where(k < 2, A[0, C[R[k] // 2]], 0)"  # R[2] may be anything
    check(guarded, {**arrays, "R": np.array([3, 0, 9])}, [a[0, 1], a[0, 4], 0.0])


def test_gather_from_a_computed_tensor() -> None:
    a, rows = normal(4, 5), np.array([3, 0, 3])
    check("E[i,j] = exp(A[i,j]); Z[k,j] = E[R[k], j]", {"A": a, "R": rows}, np.exp(a)[rows])
    check("S[i] = R[i] % 2; Z[i,j] = A[S[i], j]", {"A": a, "R": rows}, a[rows % 2])
    check("Z[k:3] = A[max(R[l]) - k, 0]", {"A": a, "R": rows}, a[3 - np.arange(3), 0])


def test_index_out_of_range_while_running() -> None:
    graph = build("Z[k] = A[R[k]]", {"A": ((3,), "float64"), "R": ((2,), "int64")})
    for bad in (3, -1):
        with pytest.raises(EinmpiError) as caught:
            evaluate(graph, {"A": np.ones(3), "R": np.array([0, bad])})
        low, high = sorted((0, bad))
        assert (
            str(caught.value)
            == f"p:1:1: Z: an index from {low} to {high} is out of range; expected 0 to 2"
        )


def test_diagonals() -> None:
    a, b = normal(3, 3), normal(3, 3, 3)
    check("t = sum(A[i,i])", {"A": a}, np.trace(a))
    check("Z[i] = sum(A[i,i] * A[i,j])", {"A": a}, np.diagonal(a) * a.sum(axis=1))
    check("Z[i,j] = B[i,j,i]", {"B": b}, np.einsum("iji->ij", b))
    check("z = sum(A[i,j] * A[j,i])", {"A": a}, np.trace(a @ a))


def test_tensors_without_dimensions() -> None:
    a, c = normal(3), np.array(2.5)
    check("Z[i] = A[i] * c", {"A": a, "c": c}, a * 2.5)
    check("n = c * c", {"c": c}, np.float64(6.25))
    check("n = sum(A[i] * c); Z[i] = A[i] / n", {"A": a, "c": c}, a / (a * 2.5).sum())
    check("pi2 = 2 * pi", {}, np.float64(2 * np.pi))
    check("x = 3; y = x + 1", {}, np.int64(4))


def test_extent_zero() -> None:
    a, b = np.zeros((2, 0)), np.zeros((0, 3))
    check("Z[i,k] = sum(A[i,j] * B[j,k])", {"A": a, "B": b}, np.zeros((2, 3)))
    check("Z[i] = prod(A[i,j])", {"A": a}, np.ones(2))
    check("Z[i] = any(A[i,j] > 0)", {"A": a}, np.zeros(2, bool))
    check("Z[i] = all(A[i,j] > 0)", {"A": a}, np.ones(2, bool))
    check("Z[j] = exp(B[j,0])", {"B": b}, np.zeros(0))
    check("Z[j] = max(B[j,k])", {"B": b}, np.zeros(0))
    check("Z[i] = mean(A[i,j])", {"A": a}, np.full(2, np.nan))
    check("z = sum(A[i,j] * B[j,k] * C[k])", {"A": a, "B": b, "C": np.ones(3)}, np.float64(0))
    check("Z[j] = max(B[j,k] + A[k2,j2] + C[k2])", {"B": b, "A": a, "C": np.ones(2)}, np.zeros(0))


def test_extent_one() -> None:
    a, b = normal(1, 3), normal(3, 1)
    check("Z[i,k] = sum(A[i,j] * B[j,k])", {"A": a, "B": b}, a @ b)
    check("Z[i] = max(A[j,i] + B[i,k])", {"A": a, "B": b}, a[0] + b[:, 0])
    check("Z[j,k] = B[j,k] / sum[k](B[j,k])", {"B": b}, b / b)


# ---- scalar functions ----------------------------------------------------------------------------

REAL = np.array([-2.5, -1.0, -0.3, -0.0, 0.0, 0.7, 1.0, 3.25, 20.0])
POSITIVE = np.array([1e-3, 0.5, 1.0, 2.0, 40.0])
COMPLEX = np.array([0.5 - 1j, -2 + 0.25j, 3j, 1.0, 0.1 + 0.1j])
BY_NAME = {
    "exp": (np.exp, REAL),
    "log": (np.log, POSITIVE),
    "log1p": (np.log1p, POSITIVE),
    "expm1": (np.expm1, REAL),
    "log2": (np.log2, POSITIVE),
    "log10": (np.log10, POSITIVE),
    "sqrt": (np.sqrt, POSITIVE),
    "rsqrt": (lambda x: x**-0.5, POSITIVE),
    "abs": (np.abs, REAL),
    "sign": (np.sign, REAL),
    "floor": (np.floor, REAL),
    "ceil": (np.ceil, REAL),
    "round": (np.round, REAL),
    "sinh": (np.sinh, REAL),
    "cosh": (np.cosh, REAL),
    "tanh": (np.tanh, REAL),
    "erf": (scipy.special.erf, REAL),
    "sin": (np.sin, REAL),
    "cos": (np.cos, REAL),
    "tan": (np.tan, REAL),
    "sigmoid": (scipy.special.expit, REAL),
    "conj": (np.conj, REAL),
    "real": (np.real, REAL),
    "imag": (np.imag, REAL),
}
BINARY = {"maximum": np.maximum, "minimum": np.minimum, "arctan2": np.arctan2}


def test_every_function_is_tested() -> None:
    assert set(functions()) == {
        *BY_NAME,
        *BINARY,
        "where",
        *("isnan", "isfinite", "clip"),  # in test_functions.py
        *("uniform", "uniform32", "normal", "bernoulli"),  # in test_random_numbers.py
        "stop",  # in tests/gradients
        *numpy_dtypes(),
        "bfloat16",
    }  # the last in test_bfloat16.py


@pytest.mark.parametrize("name", BY_NAME)
def test_function_of_a_tensor(name: str) -> None:
    function, x = BY_NAME[name]
    check(f"Z[i] = {name}(X[i])", {"X": x}, function(x))
    single = result(f"Z[i] = {name}(X[i])", {"X": x.astype(np.float32)})
    assert single.dtype == np.float32
    assert_allclose(single, function(x.astype(np.float32).astype(np.float64)), **SINGLE)


@pytest.mark.parametrize("name", BY_NAME)
def test_function_of_a_constant(name: str) -> None:
    function, x = BY_NAME[name]
    check(f"z = {name}({x[-2]})", {}, np.float64(function(x[-2])))


@pytest.mark.parametrize(
    "name",
    [
        "exp",
        "log",
        "log1p",
        "expm1",
        "log2",
        "log10",
        "sqrt",
        "rsqrt",
        "abs",
        "round",
        "sinh",
        "cosh",
        "tanh",
        "sin",
        "cos",
        "tan",
        "conj",
        "real",
        "imag",
    ],
)
def test_function_of_a_complex_tensor(name: str) -> None:
    wanted = COMPLEX**-0.5 if name == "rsqrt" else getattr(np, name)(COMPLEX)
    check(f"Z[i] = {name}(X[i])", {"X": COMPLEX}, wanted)


@pytest.mark.parametrize("name", ["real", "imag", "abs", "conj"])
def test_function_of_a_complex_constant(name: str) -> None:
    check(f"z = {name}(3 - 4j)", {}, getattr(np, name)(np.complex128(3 - 4j)))


@pytest.mark.parametrize("name", BINARY)
def test_function_of_two_tensors(name: str) -> None:
    x, y = np.array([1.0, -2.0, np.nan, np.inf]), np.array([0.5, 3.0, 1.0, -np.inf])
    check(f"Z[i] = {name}(X[i], Y[i])", {"X": x, "Y": y}, BINARY[name](x, y))
    check(f"Z[i] = {name}(X[i], 0)", {"X": x}, BINARY[name](x, 0))


def test_operators() -> None:
    x, y = normal(4), np.array([2.0, -3.0, 0.5, 1.5])
    check("Z[i] = X[i] + Y[i] - X[i] * Y[i] / Y[i]", {"X": x, "Y": y}, x + y - x * y / y)
    check("Z[i] = Y[i] ** 2 ** 1 - -Y[i]", {"Y": y}, y**2 + y)
    check("Z[i] = -Y[i] ** 2", {"Y": y}, -(y**2))
    check("Z[i] = +Y[i] % 2", {"Y": y}, y % 2)
    check("Z[i] = Y[i] % -2", {"Y": y}, y % -2)
    check("Z[i] = 2 * Y[i] // -2 % 2", {"Y": y}, 2 * y // -2 % 2)
    check(
        "Z[i] = 2 ** Y[i] - (Y[i] - 1 - 1) - (Y[i] - (1 - 1))",
        {"Y": y},
        2**y - (y - 1 - 1) - (y - (1 - 1)),
    )
    check("Z[i] = Y[i] / 2 / 2 * 8 / (2 / 4)", {"Y": y}, y / 2 / 2 * 8 / 0.5)


def test_integer_operators() -> None:
    x, y = np.array([7, -7, 0, 3]), np.array([3, 3, 5, -2])
    check("Z[i] = X[i] % Y[i]", {"X": x, "Y": y}, x % y)
    check("Z[i] = X[i] // Y[i]", {"X": x, "Y": y}, x // y)
    check("Z[i] = X[i] // (n // 2)", {"X": x}, x // 3, {"n": 7})
    check("Z[i] = X[i] ** 3", {"X": x}, x**3)
    check("Z[i] = X[i] & Y[i]", {"X": x, "Y": y}, x & y)
    check("Z[i] = X[i] | Y[i]", {"X": x, "Y": y}, x | y)
    check("Z[i] = ~X[i]", {"X": x}, ~x)
    check("Z[i] = X[i] ^ Y[i]", {"X": x, "Y": y}, x ^ y)
    check("Z[i] = X[i] << 2 >> 1 + i", {"X": x}, x << 2 >> 1 + np.arange(4))
    mixed = x << 1 & y | x ^ y & 3 << 1
    check("Z[i] = X[i] << 1 & Y[i] | X[i] ^ Y[i] & 3 << 1", {"X": x, "Y": y}, mixed)

    check("Z[i] = X[i] / Y[i]", {"X": x, "Y": y}, x / y)
    check("Z[i] = X[i] ** -1.0", {"X": y}, y**-1.0)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_shifts_by_all_counts(dtype: str) -> None:
    """Also by negative ones and by more than there are bits, in kernels of both kinds."""
    limits = np.iinfo(dtype)
    for repeats in (1, 5000):
        x = np.array([limits.min, limits.max, 1, 3, 0, limits.max // 3], dtype)
        x = np.repeat(x[:, None], repeats, axis=1)
        counts = np.array([-128, -1, 0, 1, 7, 8, 9, 15, 16, 31, 32, 63, 64, 127])
        counts = (counts if limits.min else abs(counts)).astype(dtype)
        arrays = {"X": x, "C": counts}
        for op, shifted in (("<<", np.left_shift), (">>", np.right_shift)):
            wanted = shifted(x[:, None, :], counts[None, :, None])
            check(f"Z[i,c,j] = X[i,j] {op} C[c]", arrays, wanted)


@pytest.mark.parametrize("op", ["<", "<=", ">", ">=", "==", "!="])
def test_comparisons(op: str) -> None:
    x, y = np.array([1.0, 2.0, np.nan, -1.0]), np.array([1.0, 3.0, 2.0, -2.0])
    check(f"Z[i] = X[i] {op} Y[i]", {"X": x, "Y": y}, eval(f"x {op} y"))
    check(f"Z[i] = X[i] {op} 1", {"X": x}, eval(f"x {op} 1"))


def test_chained_comparisons() -> None:
    x = np.array([-1.0, 0.0, 0.5, 1.0, 2.0])
    check("Z[i] = 0 <= X[i] < 1", {"X": x}, (x >= 0) & (x < 1))
    check(
        "Z[i] = 0 < X[i] <= i != 2", {"X": x}, (x > 0) & (x <= np.arange(5)) & (np.arange(5) != 2)
    )
    check("Z[i] = (X[i] > 0) == (X[i] > 1)", {"X": x}, (x > 0) == (x > 1))


def test_logic() -> None:
    a, b = np.array([True, True, False, False]), np.array([True, False, True, False])
    check("Z[i] = A[i] & ~B[i] | ~A[i] & B[i]", {"A": a, "B": b}, a ^ b)
    check("Z[i] = (A[i] == 1) | (B[i] > 2)", {"A": a, "B": b}, a)
    check("z = any(A[i] & B[j])", {"A": a, "B": b}, np.bool_(True))
    check("z = all(A[i] | B[i])", {"A": a, "B": b}, np.bool_(False))
    check("Z[i] = True & A[i]", {"A": a}, a)


def test_where() -> None:
    c, x, y = np.array([True, False, True]), normal(3), np.array([1, 2, 3])
    check("Z[i] = where(C[i], X[i], Y[i])", {"C": c, "X": x, "Y": y}, np.where(c, x, y))
    check("Z[i] = where(Y[i], X[i], inf)", {"X": x, "Y": y - 1}, np.where(y - 1, x, np.inf))
    check("Z[i] = where(C[i], 1, 2)", {"C": c}, np.where(c, 1, 2))
    check("Z[i] = where(C[i], 1, 2.5)", {"C": c}, np.where(c, 1, 2.5))
    check("Z[i] = where(C[i], C[i], ~C[i])", {"C": c}, np.ones(3, bool))
    check("Z[i] = where(C[i], 1j, Y[i])", {"C": c, "Y": y}, np.where(c, 1j, y))
    found = result("Z[i] = where(C[i], 0, X[i])", {"C": c, "X": x.astype(np.float32)})
    assert found.dtype == np.float32


def test_constants() -> None:
    check("z = inf", {}, np.float64(np.inf))
    check("z = -inf", {}, np.float64(-np.inf))
    check("z = nan", {}, np.float64(np.nan))
    check("z = 2 * 3 + 4 ** 2 - 7 % 4", {}, np.int64(19))
    check("z = 7 / 2", {}, np.float64(3.5))
    check("z = 2 ** -1", {}, np.float64(0.5))
    check("z = 1_000 + 0x10 + 0b11 + 1e3", {}, np.float64(2019))
    check("z = (1 + 2j) * (1 - 2j)", {}, np.complex128(5))
    check("z = 1 < 2", {}, np.bool_(True))
    check("z = where(1 > 2, 3, 4)", {}, np.int64(4))
    check("z = 9223372036854775807", {}, np.int64(2**63 - 1))
    check("z = -9223372036854775807 - 1", {}, np.int64(-(2**63)))
    check("z = -9223372036854775808", {}, np.int64(-(2**63)))
    check("z = 1 / 0", {}, np.float64(np.inf))


def test_awkward_constants_beside_a_tensor_read_back() -> None:
    """The helper compares each graph with what its text reads as."""
    x = np.array([1, 2])
    check("Z[i] = X[i] + (-2**62) * 2", {"X": x}, x + np.int64(-(2**63)))
    check("Z[i] = X[i] ** 2 * (-3) ** 2 - (-3)", {"X": x}, x**2 * 9 + 3)
    check("Z[i] = X[i] + 1e400", {"X": x}, x + np.inf)
    check("Z[i] = X[i] * 1e-320", {"X": x}, x * 1e-320)
    check("Z[i] = X[i] * -0.0", {"X": x}, x * -0.0)
    check("Z[i] = X[i] - 1j", {"X": x}, x - 1j)
    assert np.isnan(result("Z[i] = X[i] + 1j * inf", {"X": x}).real).all()


# ---- dtypes --------------------------------------------------------------------------------------


def sample(dtype: str) -> np.ndarray:
    return np.array([1, 0, 1], dtype)


def numpy_result(function: object, *args: object) -> np.ndarray | None:
    """numpy's result; None if it refuses, or if its dtype is not one of the language's."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found = np.asarray(function(*args))  # type: ignore[operator]
    except TypeError:
        return None
    return found if found.dtype.name in numpy_dtypes() else None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("op", ["+", "-", "*", "/", "**", "%", "==", "<", "&", "|"])
def test_promotion_is_numpys(op: str) -> None:
    for left, right in itertools.product(numpy_dtypes(), numpy_dtypes()):
        x, y = sample(left), sample(right)
        wanted = numpy_result(lambda a, b: eval(f"a {op} b"), x, y)
        complex_refused = (
            op == "<" and "complex" in left + right
        )  # numpy orders complex numbers; the language does not
        if wanted is None or complex_refused:
            with pytest.raises(EinmpiError):
                build(f"Z[i] = X[i] {op} Y[i]", {"X": x, "Y": y})
            continue
        found = result(f"Z[i] = X[i] {op} Y[i]", {"X": x, "Y": y})
        assert found.dtype == wanted.dtype, f"{left} {op} {right}"
        assert_array_equal(found, wanted, err_msg=f"{left} {op} {right}")


@pytest.mark.sampled(3, always=["1j"])
@pytest.mark.parametrize("constant", ["2", "2.5", "True", "1j"])
def test_constants_are_weak(constant: str) -> None:
    for dtype, op in itertools.product(numpy_dtypes(), ["+", "*", "/", "=="]):
        x = sample(dtype)
        for text in (f"x {op} {constant}", f"{constant} {op} x"):
            wanted = numpy_result(lambda x, text=text: eval(text), x)
            assert wanted is not None
            found = result(f"Z[i] = {text.replace('x', 'X[i]')}", {"X": x})
            assert found.dtype == wanted.dtype, f"{text} of {dtype}"
            assert_allclose(
                found, wanted, rtol=1e-3
            )  # the values are float16's at worst; the dtype is the point


def test_float32_times_a_python_number_stays_float32() -> None:
    x = np.array([1, 2], np.float32)
    for text in (
        "X[i] * 2.5",
        "X[i] * 2 + 1.0",
        "where(X[i] > 1, X[i], 0.0)",
        "maximum(X[i], 0)",
        "X[i] ** 2.0",
        "X[i] / d",
        "X[i] * pi",
        "X[i] * sqrt(2)",
    ):
        assert result(f"Z[i] = {text}", {"X": x}, {"d": 3}).dtype == np.float32, text


def test_label_is_int64_and_strong() -> None:
    assert result("Z[i] = X[i] * i", {"X": np.ones(2, np.float32)}).dtype == np.float64
    assert result("Z[i] = X[i] + i", {"X": np.ones(2, np.int32)}).dtype == np.int64


@pytest.mark.parametrize("dtype", numpy_dtypes())
def test_dtype_of_aggregates(dtype: str) -> None:
    x = sample(dtype)
    for name in ("sum", "prod"):
        found = result(f"z = {name}(X[i])", {"X": x})
        assert found.dtype == getattr(np, name)(x).dtype
        assert found == getattr(np, name)(x)
    for name in ("any", "all"):
        assert result(f"z = {name}(X[i])", {"X": x}).dtype == bool
    if "complex" not in dtype:
        assert result("z = max(X[i])", {"X": x}).dtype == x.dtype
        assert result("z = min(X[i])", {"X": x}) == x.min()


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 0.5, 1.0, 2.0, 2j])
@pytest.mark.parametrize("dtype", numpy_dtypes())
def test_dtype_of_a_power_does_not_depend_on_the_exponent(dtype: str, exponent: complex) -> None:
    """np.power is the rule. For a bool array, the operator of numpy has another dtype at 2."""
    x = np.array([1, 0], dtype)
    found = result(f"Z[i] = X[i] ** {exponent}", {"X": x})
    with np.errstate(invalid="ignore"):
        wanted = np.power(x, exponent)
    assert found.dtype == wanted.dtype
    assert_allclose(found, wanted)


def test_sums_of_integers_widen() -> None:
    big = np.full(4, 2**30, np.int32)
    check("z = sum(X[i])", {"X": big}, np.int64(2**32))
    check("z = sum(X[i] > 0)", {"X": big}, np.int64(4))
    check("z = sum(X[i] * Y[j])", {"X": big, "Y": np.array([True, True])}, np.int64(2**33))


def test_rewriting_keeps_the_dtype_of_mixed_products() -> None:
    """The helper compares the dtype as written with the dtype rewritten."""
    b, f, h = np.array([True, False, True]), normal(3).astype(np.float32), np.ones(3, np.float16)
    assert result("z = sum(B[j] * F[k])", {"B": b, "F": f}).dtype == np.float32
    assert result("z = sum(B[j] * H[k])", {"B": b, "H": h}).dtype == np.float16
    assert (
        result(
            "Z[i] = sum(A[i,j] * B[j] * c)", {"A": np.outer(b, b), "B": b, "c": np.float32(0.5)}
        ).dtype
        == "f4"
    )


def test_rewriting_keeps_the_precision_of_mixed_products() -> None:
    """A float64 result has float64's digits whatever order its factors are taken in."""
    d, f, g = (
        normal(3),
        normal(3, 4).astype(np.float32),
        RANDOM.uniform(1, 2, (4, 2)).astype(np.float32),
    )
    check("Z[i] = sum(D[i] / G[j,k])", {"D": d, "G": g}, d * (1 / g.astype(float)).sum())
    check(
        "Z[k] = sum(D[i] * F[i,j] * G[j,k])",
        {"D": d, "F": f, "G": g},
        d @ f.astype(float) @ g.astype(float),
    )
    check(
        "z = sum(D[i] * F[i,j] * G[j,k])",
        {"D": d, "F": f, "G": g},
        d @ f.astype(float) @ g.astype(float).sum(axis=1),
    )


def test_rewriting_keeps_what_a_sum_of_bools_means() -> None:
    """2 + True + True is 4, and True + True is True: another order is another value."""
    b = np.array([True, False])
    check("z = max(2 + B[i] + B[j])", {"B": b}, np.int64(4))
    check("z = max(B[i] + B[j] + 2)", {"B": b}, np.int64(3))
    check(
        "Z[i] = max(A[i] + B[j] + B[k])", {"A": np.array([0.5, 1.5]), "B": b}, np.array([2.5, 3.5])
    )
    check("Z[i] = any[j:3]((2 * j) & B[i])", {"B": b}, np.zeros(2, bool))


def test_rewriting_keeps_integers_from_overflowing() -> None:
    """float64 times two int32 tensors multiplies in float64, in any order."""
    x = np.full(2, 2**20, np.int32)
    check(
        "Z[i] = sum(D[i] * X[j] * Y[j])", {"D": np.ones(3), "X": x, "Y": x}, np.full(3, 2 * 2.0**40)
    )


def test_float16() -> None:
    x, y = normal(2, 3).astype(np.float16), normal(3, 2).astype(np.float16)
    found = result("Z[i,k] = sum(X[i,j] * Y[j,k])", {"X": x, "Y": y})
    assert found.dtype == np.float16
    # float16 keeps 11 bits: each product and the sum round at 2**-11
    assert_allclose(found, x.astype(float) @ y.astype(float), rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("dtype", numpy_dtypes())
def test_casts(dtype: str) -> None:
    x = np.array([-1.5, 0.0, 2.75])
    # What numpy makes of a negative number as an unsigned one depends on the processor.
    wanted_values = np.maximum(x, 0) if np.dtype(dtype).kind == "u" else x
    check(f"Z[i] = {dtype}(X[i])", {"X": x}, wanted_values.astype(dtype))
    check(f"z = {dtype}(2)", {}, np.array(2, dtype))
    ones = np.ones(3, np.float32)
    wanted = (np.ones(3, dtype) * ones).dtype
    assert (
        result(f"Z[i] = {dtype}(1) * X[i]", {"X": ones}).dtype == wanted
    )  # a cast constant is not weak


def test_complex() -> None:
    a, b = normal(2, 3) + 1j * normal(2, 3), normal(3, 2) + 1j * normal(3, 2)
    check("Z[i,k] = sum(A[i,j] * B[j,k])", {"A": a, "B": b}, a @ b)
    check("Z[i] = sum(conj(A[i,j]) * A[i,j])", {"A": a}, (a.conj() * a).sum(axis=1))
    check("Z[i,j] = real(A[i,j]) + 1j * imag(A[i,j])", {"A": a}, a)
    check("Z[i] = prod(A[i,j])", {"A": a}, a.prod(axis=1))
    check("n = sqrt(sum(abs(A[i,j])**2))", {"A": a}, np.linalg.norm(a))
    check("Z[i,j] = A[i,j] == conj(A[i,j])", {"A": a.real + 0j}, np.ones((2, 3), bool))
    assert result("Z[i] = abs(X[i])", {"X": np.ones(2, np.complex64)}).dtype == np.float32


# ---- macros --------------------------------------------------------------------------------------


def test_every_macro_is_tested() -> None:
    tested = {
        "relu",
        "silu",
        *("gelu", "gelu_tanh"),
        "mean",
        "var",
        *("std", "norm", "count", "argmin", "argmax"),  # in test_functions.py
        "logsumexp",
        "softmax",
        "rmsnorm",
        "layernorm",
    }
    assert set(MACROS) == tested


def test_pointwise_macros() -> None:
    x = np.array([-800.0, -30.0, -1.5, -0.0, 0.3, 1.0, 30.0, 800.0])
    check("Z[i] = relu(X[i])", {"X": x}, np.where(x > 0, x, 0))
    check("Z[i] = sigmoid(X[i])", {"X": x}, scipy.special.expit(x))
    check("Z[i] = silu(X[i])", {"X": x}, x * scipy.special.expit(x))
    check("Z[i] = gelu(X[i])", {"X": x}, x * scipy.special.ndtr(x))
    approximated = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    check("Z[i] = gelu_tanh(X[i])", {"X": x}, approximated)
    for name in ("relu", "sigmoid", "silu", "gelu", "gelu_tanh"):
        assert result(f"Z[i] = {name}(X[i])", {"X": x.astype(np.float32)}).dtype == np.float32


def test_mean_and_var() -> None:
    x, n, z = normal(3, 4), RANDOM.integers(-5, 5, (3, 4)), normal(3, 4) + 1j * normal(3, 4)
    for array in (x, n, z):
        check("Z[i] = mean(X[i,j])", {"X": array}, array.mean(axis=1))
        check("Z[i] = var(X[i,j])", {"X": array}, array.var(axis=1))
        check("Z[j] = var[i](X[i,j] * 2)", {"X": array}, (array * 2).var(axis=0))
        check("z = mean[i,j](X[i,j])", {"X": array}, array.mean())
    check("Z[i] = mean(X[i,j] > 0)", {"X": x}, (x > 0).mean(axis=1))
    check(
        "Z[i] = X[i,0] - mean(X[i,j]) / var(X[i,j])",
        {"X": x},
        x[:, 0] - x.mean(axis=1) / x.var(axis=1),
    )
    assert result("z = var(X[i,j])", {"X": x.astype(np.float32)}).dtype == np.float32


def test_logsumexp() -> None:
    inf = np.inf
    x = np.array(
        [
            [1.0, 2.0, 3.0],
            [-inf, -inf, -inf],
            [inf, 1.0, 0.0],
            [-inf, 2.0, -inf],
            [1000.0, 999.0, -inf],
            [-1000.0, -1001.0, -1000.5],
            [inf, -inf, 0.0],
        ]
    )
    check("Z[i] = logsumexp(X[i,j])", {"X": x}, scipy.special.logsumexp(x, axis=1))
    check("Z[j] = logsumexp[i](X[i,j])", {"X": x[3:5]}, scipy.special.logsumexp(x[3:5], axis=0))
    check("z = logsumexp(N[i])", {"N": np.array([1, 2, 3])}, scipy.special.logsumexp([1, 2, 3]))


def test_softmax() -> None:
    x = normal(3, 4) * 300
    check("Z[i,j] = softmax[j](X[i,j])", {"X": x}, scipy.special.softmax(x, axis=1))
    check("Z[i,j] = softmax[i](X[i,j])", {"X": x}, scipy.special.softmax(x, axis=0))
    check("Z[i,j] = softmax[i,j](X[i,j])", {"X": x}, scipy.special.softmax(x))
    check(
        "Z[j,i] = softmax[j](2 * X[i,j] + 1)", {"X": x}, scipy.special.softmax(2 * x + 1, axis=1).T
    )
    check(
        "Z[i] = sum(softmax[j](X[i,j]) * Y[j])",
        {"X": x, "Y": x[0]},
        scipy.special.softmax(x, axis=1) @ x[0],
    )


def test_softmax_with_a_fully_masked_tail() -> None:
    x, valid = normal(3, 4), 2
    masked = np.where(np.arange(4) < valid, x, -np.inf)
    wanted = scipy.special.softmax(masked, axis=1)
    assert (wanted[:, valid:] == 0).all()
    check("Z[i,j] = softmax[j](where(j < n, X[i,j], -inf))", {"X": x}, wanted, {"n": valid})


def test_normalizations() -> None:
    x, g = normal(3, 4) + 2, normal(4)

    def rms(x: np.ndarray, eps: float) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + eps)

    def layer(x: np.ndarray, eps: float) -> np.ndarray:
        return (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + eps)

    check("Z[i,j] = rmsnorm[j](X[i,j])", {"X": x}, rms(x, 1e-6))
    check("Z[i,j] = rmsnorm[j](X[i,j], eps=0.25) * G[j]", {"X": x, "G": g}, rms(x, 0.25) * g)
    check("Z[i,j] = rmsnorm[j](X[i,j], eps=2**-4)", {"X": x}, rms(x, 0.0625))
    check("Z[i,j] = layernorm[j](X[i,j])", {"X": x}, layer(x, 1e-5))
    check("Z[i,j] = layernorm[j](X[i,j], eps=1)", {"X": x}, layer(x, 1.0))
    check("Z[i,j] = rmsnorm[j](X[i,j] + G[j])", {"X": x, "G": g}, rms(x + g, 1e-6))


def test_macros_nest() -> None:
    x = normal(3, 4)
    wanted = np.log(scipy.special.softmax(np.maximum(x, 0), axis=1)).mean(axis=1)
    check("Z[i] = mean(log(softmax[j](relu(X[i,j]))))", {"X": x}, wanted)


# ---- text ----------------------------------------------------------------------------------------


def test_statements_in_any_order() -> None:
    x = normal(3)
    text = ["Z[i] = B[i] + C[i]", "B[i] = 2 * A[i]", "C[i] = A[i] * B[i]", "A[i] = X[i] + 1"]
    for order in itertools.permutations(text):
        check("\n".join(order), {"X": x}, 2 * (x + 1) + 2 * (x + 1) ** 2)


def test_layout_of_the_text() -> None:
    x = normal(3)
    text = """
        # a comment
        A[i] = X[i] + 1;  B[i] = A[i] * 2   # two on a line

            Z[i] = (B[i]
      + A[i]
                # inside brackets
          + 1
        )
    \t
    """
    check(text, {"X": x}, 3 * (x + 1) + 1)
    check("A[i] = X[i] + 1;\nZ[i] = sum(\nA[i] *\nX[j]\n)", {"X": x}, (x + 1) * x.sum())
    check("Z[i] = X[i] \\\n   + 1", {"X": x}, x + 1)
    check("A[i] = X[i]\r\nZ[i] = A[i] + 1\r\n", {"X": x}, x + 1)


def test_glyphs() -> None:
    a, b = normal(2, 3), normal(3, 2)
    check("Z[i,k] ← Σ[j](A[i,j] × B[j,k])", {"A": a, "B": b}, a @ b)
    check("Z[i] ← Π(A[i,j]) × 2", {"A": a}, a.prod(axis=1) * 2)
    check("α[i] ← Σ(A[i,j])", {"A": a}, a.sum(axis=1))


def test_declared_inputs() -> None:
    a = normal(2, 3)
    check(
        "A: float64[2, n+1]\nc: float64\nZ[i] = sum(A[i,j]) * c",
        {"A": a, "c": np.array(2.0)},
        a.sum(axis=1) * 2,
        {"n": 2},
    )


def test_outputs_are_the_tensors_no_statement_uses_or_those_listed() -> None:
    text = "A[i] = X[i] + 1; B[i] = A[i] * 2; C[i] = A[i] * 3"
    x = normal(3)
    assert list(results(text, {"X": x})) == ["B", "C"]
    assert list(results(text, {"X": x}, outputs=["C", "A"])) == ["C", "A"]
    assert [vertex.name for vertex in build(text, {"X": x}, outputs=["A"]).vertices] == ["X", "A"]


def test_a_label_with_the_name_of_a_tensor_does_not_use_it() -> None:
    x = normal(2)
    found = results("n = sum(X[i]); Z[n] = X[n] + 1", {"X": x})
    assert list(found) == ["n", "Z"]
    check("A[k] = X[k] * sum(X[i]); Z[A] = A[A] + 1", {"X": x}, x * x.sum() + 1)
    check("n = sum(X[i]); A[k] = X[k] * n; Z[n] = A[n] + 1", {"X": x}, x * x.sum() + 1)
    check("Z[Z_1] = X[Z_1] / sum(X[j])", {"X": x}, x / x.sum())


X_OF_NAMES = np.arange(30.0).reshape(6, 5)
V_OF_NAMES = np.array([2.0, 9.0, 4.0, 1.0, 0.0, 5.0])  # the greatest is number 1


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # The name of a tensor without dimensions is its value in brackets, as p+0 is.
        ("Z = sum(X[p,i])", X_OF_NAMES[1].sum()),
        ("Z[i] = X[p,i]", X_OF_NAMES[1]),
        ("Z[i] = X[p,i] * v[p] + mean(X[p,j])", X_OF_NAMES[1] * 9 + X_OF_NAMES[1].mean()),
        ("Z[i] = sum(X[k[p],j] * X[i,j])", X_OF_NAMES @ X_OF_NAMES[5]),
        ("Z = sum(X[p, i] * sum[p](v[p]))", X_OF_NAMES[1].sum() * V_OF_NAMES.sum()),
        ("Z[j] = cumsum[j](X[p,j]) + max(X[i,j])", X_OF_NAMES[1].cumsum() + X_OF_NAMES[5]),
        ("Z[i] = grad(sum(X[p,j]**2), X[p,i])", 2 * X_OF_NAMES[1]),
        ("Z[k[p]+i:9] = sum(v[i])", np.r_[np.zeros(5), V_OF_NAMES[:4]]),
        # Listed as a label, it is one: left of =, or in the brackets of an aggregation.
        ("Z[p] = sum(X[p,i])", X_OF_NAMES.sum(1)),
        ("Z[i] = sum[p](X[p,i])", X_OF_NAMES.sum(0)),
        ("Z = sum(softmax[p](v[p]))", 1.0),
    ],
)
def test_a_name_in_brackets_that_is_a_value(text: str, wanted: np.ndarray) -> None:
    program = f"{text}\np = argmax(v[i])"
    arrays = {"X": X_OF_NAMES, "v": V_OF_NAMES, "k": np.array([0, 5, 2, 3, 4, 1])}
    used = {name: array for name, array in arrays.items() if f"{name}[" in program}
    assert_allclose(results(program, used, outputs=["Z"])["Z"], wanted, **EXACT)


def test_a_tensor_twice_in_one_vertex() -> None:
    a = normal(3, 3)
    check("Z[i,j] = A[i,j] + A[j,i]", {"A": a}, a + a.T)
    check("Z[i,j] = A[i,j] * A[i,j]", {"A": a}, a * a)
    check("Z[i,k] = sum(A[i,j] * A[j,k])", {"A": a}, a @ a)
    check("Z[i,k] = sum(A[i,j] * A[k,j])", {"A": a}, a @ a.T)
    vertex = build("Z[i,j] = A[i,j] * A[i,j] + A[j,i]", {"A": a})["Z"]
    assert vertex.inputs == (
        "A",
        "A",
    )  # the same element twice is one operand, a transposed one another


def test_one_vertex_an_aggregation_as_written() -> None:
    graph = as_written(
        "Z[i,k] = sum(A[i,j] * B[j,k]) + max(A[i,j])", {"A": normal(2, 3), "B": normal(3, 4)}
    )
    assert (
        str(graph)
        == "A: float64[2, 3]\nB: float64[3, 4]\nZ_1[i,k] ← Σ[j](A[i,j] × B[j,k])\nZ_2[i] ←"
        " max[j](A[i,j])\nZ[i,k] ← Z_1[i,k] + Z_2[i]\noutputs: Z"
    )
