"""What a result is: integers as numpy computes the program as written, floats so if strict.

Every program is written twice, for einmpi and for numpy, and computed with values at the ends of
what a dtype holds by the reference, on one rank and on several.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from distributed import run_on_threads

import einmpi
from einmpi.api import options_of
from einmpi.errors import InputError
from einmpi.job.job import with_settings
from einmpi.kernels.cpu import dispatch

LABELS = {"A": "i", "B": "ij", "C": "jk", "D": "i", "E": "k"}
EXTENT = {"i": 4, "j": 3, "k": 5}
LETTERS = "ijk"
EXTREMES: dict[str, list[Any]] = {
    "bool": [True, False],
    "int32": [-(2**31), 2**31 - 1, 2**20, -(2**20), 3, -1, 0, 1],
    "int64": [-(2**63), 2**63 - 1, 2**40, 2**20, -3, -1, 0, 1],
    "float16": [np.inf, -np.inf, np.nan, 0.0, -0.0, 0.5, -3.0, 2.0],
    "float32": [np.inf, -np.inf, np.nan, 0.0, -0.0, 0.5, -3.0, 2.0**20],
    "float64": [np.inf, -np.inf, np.nan, 0.0, -0.0, 0.5, -3.0, 2.0**20],
    "complex128": [np.inf, complex(0, -np.inf), complex(np.nan, 1), 0.0, 1 - 2j, 2j],
}
SEEDS = 2  # of random tensors for each program and dtype
INTEGERS = ("bool", "int32", "int64")
FLOATS = ("float16", "float32", "float64", "complex128")
Arrays = dict[str, np.ndarray]
Meaning = Callable[..., Any]  # of the tensors, each with an axis for i, j and k


def extreme_arrays(dtypes: tuple[str, ...], seed: int) -> Arrays:
    """Tensors of these dtypes, in turn, with values at the ends of what a dtype holds."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for (name, labels), dtype in zip(LABELS.items(), itertools.cycle(dtypes), strict=False):
        shape = [EXTENT[label] for label in labels]
        places = rng.integers(0, len(EXTREMES[dtype]), shape)
        arrays[name] = np.array(EXTREMES[dtype], dtype)[places]
    return arrays


def spread(arrays: Arrays) -> Arrays:
    """The same tensors with an axis for each of i, j and k."""
    found = {}
    for name, array in arrays.items():
        shape = [EXTENT[label] if label in LABELS[name] else 1 for label in LETTERS]
        found[name] = array.reshape(shape)
    return found


def check(text: str, wanted: Any, arrays: Arrays, strict: bool = False) -> None:
    """Compare the reference, one rank and three ranks with what numpy gives."""
    used = {name: array for name, array in arrays.items() if f"{name}[" in text}
    job = with_settings(einmpi.program(text, **used), {"strict": strict})
    results = {
        "reference": einmpi.reference(job, used),
        "one rank": {name: array.gather() for name, array in einmpi.run(job, used).items()},
        "three ranks": run_on_threads(job, 3, used).outputs,
    }
    for path, outputs in results.items():
        found = outputs["Z"]
        wanted_array = np.asarray(wanted)
        assert found.dtype == wanted_array.dtype, (path, text)
        np.testing.assert_array_equal(found, wanted_array, err_msg=f"{path}: {text}\n{job.graph}")


# ---- integers -----------------------------------------------------------------------------------

# Programs whose integers wrap around, or would if they were rewritten carelessly.
ON_INTEGERS: dict[str, Meaning] = {
    "Z = sum(A[i]*A[i])": lambda A, **_: (A * A).sum(),
    "Z = sum(A[i]*B[i,j])": lambda A, B, **_: (A * B).sum(),
    "Z[k] = sum(A[i]*B[i,j]*C[j,k])": lambda A, B, C, **_: (A * B * C).sum((0, 1)),
    "Z[i] = sum(A[i]*(B[i,j]*C[j,k]))": lambda A, B, C, **_: (A * (B * C)).sum((1, 2)),
    "Z = sum(2*A[i]*B[i,j])": lambda A, B, **_: (2 * A * B).sum(),
    "Z[i] = sum(0.5*(B[i,j]*B[i,j]))": lambda B, **_: (0.5 * (B * B)).sum((1, 2)),
    "Z[i,k] = 2.0*(A[i]*E[k])": lambda A, E, **_: (2.0 * (A * E))[:, 0, :],
    "Z[k] = sum(int64(A[i])*B[i,j]*C[j,k])": lambda A, B, C, **_: (A.astype("int64") * B * C).sum(
        (0, 1)
    ),
    "Z = max(A[i]+E[k])": lambda A, E, **_: (A + E).max(),
    "Z[i] = min(B[i,j]+C[j,k]+E[k])": lambda B, C, E, **_: (B + C + E).min((1, 2)),
    "Z[i] = max(minimum(B[i,j],C[j,k]))": lambda B, C, **_: np.minimum(B, C).max((1, 2)),
    "Z[j] = prod(B[i,j]*D[i])": lambda B, D, **_: (B * D).prod((0, 2)),
    "Z[j] = sum(B[i,j])": lambda B, **_: B.sum((0, 2)),
    "Z = sum((A[i]+1)*E[k])": lambda A, E, **_: ((A + 1) * E).sum(),
    "T[i,j] = A[i]*B[i,j]; Z[k] = sum(T[i,j]*C[j,k])": lambda A, B, C, **_: (A * B * C).sum((0, 1)),
}
ON_NUMBERS: dict[str, Meaning] = {  # not for bools, which have no sign
    "Z = sum(-A[i]*D[i])": lambda A, D, **_: (-A * D).sum(),
    "Z[k] = sum(-(A[i]*E[k]))": lambda A, E, **_: (-(A * E)).sum((0, 1)),
    "Z[i] = abs(A[i]) - D[i]": lambda A, D, **_: (np.abs(A) - D)[:, 0, 0],
    "Z[i] = A[i]**3 % D[i]": lambda A, D, **_: np.remainder(A**3, D)[:, 0, 0],
    "Z = max(-B[i,j])": lambda B, **_: (-B).max(),
}
ON_BOOLS: dict[str, Meaning] = {
    "Z[i] = any(B[i,j] & C[j,k])": lambda B, C, **_: (B & C).any((1, 2)),
    "Z[i] = all(B[i,j] | C[j,k])": lambda B, C, **_: (B | C).all((1, 2)),
    "Z[k] = sum(A[i]*B[i,j]*C[j,k])": lambda A, B, C, **_: (A & B & C).sum((0, 1)),
}
MIXTURES = [("bool", "int32"), ("int32", "int64"), ("int64", "int32", "bool")]


def integer_cases() -> list[tuple[str, tuple[str, ...], Meaning]]:
    cases = []
    for dtypes in [(dtype,) for dtype in INTEGERS] + MIXTURES:
        programs = dict(ON_INTEGERS)
        if dtypes == ("bool",):
            programs.update(ON_BOOLS)
        elif "bool" not in dtypes:
            programs.update(ON_NUMBERS)
        for text, meaning in programs.items():
            cases.append((text, dtypes, meaning))
    return cases


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("text", "dtypes", "meaning"), integer_cases())
def test_integers_are_those_of_numpy(text: str, dtypes: tuple[str, ...], meaning: Meaning) -> None:
    for seed in range(SEEDS):
        arrays = extreme_arrays(dtypes, seed)
        with np.errstate(all="ignore"):
            wanted = meaning(**spread(arrays))
        check(text, wanted, arrays)


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", [("int32",), ("int32", "int64")])
@pytest.mark.parametrize(
    "text", ["Z = sum(A[i]*A[i])", "Z[k] = sum(A[i]*B[i,j]*C[j,k])", "Z = max(A[i]+E[k])"]
)
def test_compiled_loops_wrap_too(
    text: str, dtypes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "WORTH_COMPILING", 0)
    arrays = extreme_arrays(dtypes, 1)
    with np.errstate(all="ignore"):
        check(text, ON_INTEGERS[text](**spread(arrays)), arrays)


def test_what_was_reported() -> None:
    many = np.full(2, 2**20, "int32")
    check("Z = sum(A[i]*A[i])", np.int64(0), {"A": many})
    table = np.full((2, 2), 2**20, "int32")
    check("Z = sum(A[i]*B[i,j])", np.int64(0), {"A": many, "B": table})
    greatest = np.array([2**63 - 1, -(2**63)])
    ones = np.array([1, 0])
    with np.errstate(all="ignore"):
        wanted = (greatest[:, None] + ones).max()
    check("Z = max(I[i]+J[j])", wanted, {"I": greatest, "J": ones})


def test_products_of_int64_are_still_split() -> None:
    """Modulo 2⁶⁴ any order gives the same; a product of int32 is cast to be split."""
    shapes = {name: np.zeros((9, 9), "int64") for name in "ABC"}
    text = "Z[i,l] = sum(A[i,j] * B[j,k] * C[k,l])"
    assert len(einmpi.program(text, **shapes).graph.computed) == 2
    narrow = {name: array.astype("int32") for name, array in shapes.items()}
    assert len(einmpi.program(text, **narrow).graph.computed) == 1
    cast = "Z[i,l] = sum(int64(A[i,j]) * int64(B[j,k]) * int64(C[k,l]))"
    sums = [
        vertex
        for vertex in einmpi.program(cast, **narrow).graph.computed
        if vertex.computed_einsum.aggregation
    ]
    assert len(sums) == 2


@pytest.mark.parametrize(
    "dtypes", [("int32",), ("int32", "int32", "int64"), ("int32", "int32", "float64")]
)
def test_einsum_converts_before_it_multiplies(dtypes: tuple[str, ...]) -> None:
    arrays = [np.full(3, 2**20, dtype) for dtype, _ in zip(itertools.cycle(dtypes), range(4))]
    for subscripts in ("i,i,i->", "i,j,k,i->k", "i,j,k,i"):
        operands = arrays[: subscripts.count(",") + 1]
        wanted = np.einsum(subscripts, *operands)
        found = einmpi.einsum(subscripts, *operands)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


# ---- values that raise nothing ------------------------------------------------------------------


def test_negative_powers_of_integers() -> None:
    check("Z[i:4] = 2**(i-1)", np.array([0, 1, 2, 4]), {})
    for dtype in ("int32", "int64"):
        bases = np.array([-2, -1, -1, 0, 1, 2, np.iinfo(dtype).min, -1], dtype)
        exponents = np.array([-1, -1, -2, -3, -9, -1, -1, np.iinfo(dtype).min], dtype)
        wanted = np.array([0, -1, 1, 0, 1, 0, 0, 1], dtype)
        check("Z[i] = A[i]**D[i]", wanted, {"A": bases, "D": exponents})
    check("n = -1; Z[i] = A[i]**n", np.array([0, 1]), {"A": np.array([3, 1], "int64")})


@pytest.mark.parametrize("count", [7, pytest.param(2**18 + 7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("target", ["int32", "int64"])
def test_floats_out_of_range_become_the_nearest_integer(
    count: int, dtype: str, target: str
) -> None:
    """Numpy gives what the processor gives; a long tensor is computed by compiled loops."""
    limits = np.iinfo(target)
    large = np.inf if dtype == "float16" else 1e30
    values = np.array([np.nan, np.inf, -np.inf, large, -large, 3.75, -3.75], dtype)
    integers = [0, limits.max, limits.min, limits.max, limits.min, 3, -3]
    arrays = {"A": np.resize(values, count)}
    wanted = np.resize(np.array(integers, target), count)
    check(f"Z[i] = {target}(A[i])", wanted, arrays)


# ---- floats -------------------------------------------------------------------------------------

ON_FLOATS: dict[str, Meaning] = {
    "Z = sum(A[i]*E[k])": lambda A, E, **_: (A * E).sum(),
    "Z = sum(A[i]*B[i,j])": lambda A, B, **_: (A * B).sum(),
    "Z[k] = sum(A[i]*B[i,j]*C[j,k])": lambda A, B, C, **_: (A * B * C).sum((0, 1)),
    "Z[i,k] = sum(B[i,j]*C[j,k])": lambda B, C, **_: (B * C).sum(1),
    "Z[i,k] = sum(2*B[i,j]*C[j,k])": lambda B, C, **_: (2 * B * C).sum(1),
    "Z = sum(0*A[i]*D[i])": lambda A, D, **_: (0 * A * D).sum(),
    "Z[k] = sum(-A[i]*C[j,k])": lambda A, C, **_: (-A * C).sum((0, 1)),
}
ON_REALS: dict[str, Meaning] = {
    "Z = max(A[i]+E[k])": lambda A, E, **_: (A + E).max(),
    "Z = min(A[i]+E[k])": lambda A, E, **_: (A + E).min(),
    "Z[i] = max(B[i,j]+C[j,k]+1)": lambda B, C, **_: (B + C + 1).max((1, 2)),
    "Z[i] = max(minimum(B[i,j],C[j,k]))": lambda B, C, **_: np.minimum(B, C).max((1, 2)),
    "Z[i,k] = sum(abs(B[i,j])*C[j,k])": lambda B, C, **_: (np.abs(B) * C).sum(1),
    "Z = sum(A[i]/B[i,j])": lambda A, B, **_: (A / B).sum(),
}


def float_cases() -> list[tuple[str, str, Meaning]]:
    cases = []
    for dtype in FLOATS:
        programs = dict(ON_FLOATS)
        if dtype != "complex128":
            programs.update(ON_REALS)
        for text, meaning in programs.items():
            cases.append((text, dtype, meaning))
    return cases


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("text", "dtype", "meaning"), float_cases())
def test_strict_gives_inf_and_nan_where_numpy_does(text: str, dtype: str, meaning: Meaning) -> None:
    for seed in range(SEEDS):
        arrays = extreme_arrays((dtype,), seed)
        operands = spread(arrays)
        with np.errstate(all="ignore"):
            wanted = meaning(**operands)
        check(text, wanted, arrays, strict=True)


def test_without_strict_inf_may_hide_nan() -> None:
    """The price that the page on the language names, and what strict gives instead."""
    arrays = {"P": np.array([np.inf, 0.0]), "Q": np.array([-np.inf, 0.0])}
    for text, rewritten in (
        ("Z = max(P[i]+Q[j])", np.inf),
        ("Z = min(P[i]+Q[j])", -np.inf),
        ("Z = sum(P[i]*Q[j])", -np.inf),
    ):
        job = einmpi.program(text, P=(2,), Q=(2,))
        assert einmpi.run(job, arrays)["Z"].gather() == rewritten
        assert np.isnan(einmpi.run(job, arrays, strict=True)["Z"].gather())
        assert np.isnan(einmpi.reference(job, arrays)["Z"])


def test_strict_changes_the_graph_and_the_digest() -> None:
    job = einmpi.program("Z[i,l] = sum(A[i,j]*B[j,k]*C[k,l])", A=(9, 9), B=(9, 9), C=(9, 9))
    usual = einmpi.plan(job, 4)
    strict = einmpi.plan(job, 4, strict=True)
    assert usual.digest != strict.digest
    assert [vertex.name for vertex in strict.graph.computed] == ["Z"]
    strict = with_settings(job, {"strict": True})
    assert with_settings(strict, {"strict": False}) == job
    assert options_of(job) == options_of(strict)
    with pytest.raises(InputError, match="strict and fast_math are both true"):
        einmpi.compile(job, strict=True, fast_math=True)
    with pytest.raises(InputError, match="strict: 'no' is not a truth value"):
        einmpi.plan(job, 4, strict="no")


def test_strict_keeps_what_is_exact() -> None:
    """Functions of one factor are computed once, and matrices multiplied by BLAS."""
    text = "Z[i,k] = sum(exp(A[i,j])*B[j,k])"
    job = einmpi.program(text, A=(3, 4), B=(4, 5), strict=True)
    assert [str(vertex) for vertex in job.graph.computed] == [
        "Z_1[i,j] ← exp(A[i,j])",
        "Z[i,k] ← Σ[j](Z_1[i,j] × B[j,k])",
    ]


# ---- the reference ------------------------------------------------------------------------------


def test_the_reference_does_not_see_rewrites() -> None:
    """If a rewrite were wrong, the reference would differ."""
    job = einmpi.program("Z = sum(A[i]*B[i])", A=(3,), B=(3,))
    wrong = einmpi.program("Z = sum(A[i]+B[i])", A=(3,), B=(3,))
    mistaken = replace(job, graph=wrong.graph)
    arrays = {"A": np.array([1.0, 2.0, 3.0]), "B": np.array([4.0, 5.0, 6.0])}
    assert einmpi.run(mistaken, arrays)["Z"].gather() == 21
    assert einmpi.reference(mistaken, arrays)["Z"] == 32


def test_a_long_product_is_evaluated_quickly() -> None:
    """As written it would take 60⁵ steps."""
    rng = np.random.default_rng(5)
    arrays = {name: rng.normal(size=(60, 60)) for name in "ABCD"}
    job = einmpi.program(
        "Z[i,m] = sum(A[i,j]*B[j,k]*C[k,l]*D[l,m])", **dict.fromkeys("ABCD", (60, 60))
    )
    found = einmpi.reference(job, arrays)["Z"]
    wanted = np.linalg.multi_dot(list(arrays.values()))
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
