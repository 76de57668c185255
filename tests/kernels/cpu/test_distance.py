"""Squared distances by BLAS: within the promised error bound, and only where they are wanted."""

import tracemalloc
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from distributed import run_on_threads
from hypothesis import given
from hypothesis import strategies as st
from random_programs import settled

import einmpi
from einmpi.api import options_of
from einmpi.cli.main import main
from einmpi.comm.threads import run_threads
from einmpi.compiled.program import Compiled
from einmpi.errors import EinmpiError
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, rebuild
from einmpi.kernels import distances, reference
from einmpi.kernels.cpu import compiled, dispatch, distance

FORMS = {
    "D**2": False,
    "D**2.0": False,
    "D*D": False,
    "abs(D)**2": True,
    "abs(D)*abs(D)": True,
    "D*conj(D)": True,
    "conj(D)*D": True,
}
# What each of these labels belongs to: x, y, output.
ROLES = {
    "b": "xyo",
    "i": "xo",
    "p": "xo",
    "k": "yo",
    "q": "yo",
    "j": "xy",
    "l": "xy",
    "u": "x",
    "v": "y",
    "w": "o",
    "z": "",
}


def vertex(form, x, y, **given):
    text = f"Z[i,k] = sum({form.replace('D', '(X[i,j] - Y[k,j])')})"
    return einmpi.program(text, X=x, Y=y, **given).graph["Z"]


def compute(einsum, operands, dtype, fast=True):
    out = np.full(einsum.bound, 7).astype(dtype)
    dispatch.compute_einsum(einsum, operands, out, {}, 1, fast)
    return out


def numbers(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(2, *shape)) + rng.normal() * 3
    return (
        (values[0] + 1j * values[1]).astype(dtype)
        if dtype.startswith("c")
        else values[0].astype(dtype)
    )


def aligned(array, index, labels):
    """Return a view with an axis for every label, of extent 1 for those that the array lacks."""
    order = [index.index(label) for label in labels if label in index]
    return array.transpose(order)[
        tuple(slice(None) if label in index else None for label in labels)
    ]


def assert_within_bound(found, einsum, operands, absolute):
    """Assert that the error is at most (n + 4) ε (|x|² + |y|²), or four times that if complex.

    Each of three sums of n products rounds n times, and there are four more roundings. The exact
    differences are computed in a wider dtype.
    """
    wide = (
        np.clongdouble if any(operand.dtype.kind == "c" for operand in operands) else np.longdouble
    )
    shape = [extent for _, extent in einsum.extents]
    x, y = (
        np.broadcast_to(aligned(operand.astype(wide), index, einsum.labels), shape)
        for operand, index in zip(operands, einsum.operands, strict=True)
    )
    axes = tuple(range(len(einsum.output), len(shape)))
    exact = (abs(x - y) ** 2 if absolute else (x - y) ** 2).sum(axis=axes)
    size = (abs(x) ** 2 + abs(y) ** 2).sum(axis=axes)
    terms = prod(einsum.extent[label] for label in einsum.aggregated) * (
        2 if wide is np.clongdouble else 1
    )
    allowed = (
        (terms + 4)
        * float(np.finfo(found.dtype).eps)
        * size
        * (4 if found.dtype.kind == "c" else 1)
    )
    assert (abs(found - exact) <= allowed).all()


@st.composite
def distance_einsums(draw):
    """Draw a distance with any batch, own, common and absent labels, in any order."""
    labels = [x for x in ROLES if x in "ikj" or draw(st.integers(0, 3)) == 0]
    extent = {label: draw(st.sampled_from([2, 3, 4, 5, 1, 0])) for label in labels}
    x, y, output = ([label for label in labels if role in ROLES[label]] for role in "xyo")
    operands = tuple(tuple(draw(st.permutations(index))) for index in (x, y))
    output = tuple(draw(st.permutations(output)))
    summed = tuple(label for label in labels if "o" not in ROLES[label])
    form = draw(st.sampled_from(list(FORMS)))
    function = vertex(form, (2, 2), (2, 2)).einsum.function
    if draw(st.booleans()):
        operands, function = (
            operands[::-1],
            rebuild(function, lambda x: Arg(1 - x.position) if isinstance(x, Arg) else x),
        )
    extents = tuple((label, extent[label]) for label in (*output, *summed))
    return EinSum(output, operands, function, "sum", summed, extents), FORMS[form]


@settled(150)
@given(
    distance_einsums(),
    st.sampled_from(["float32", "float64", "complex64", "complex128"]),
    st.booleans(),
    st.data(),
)
def any_distance(case, dtype, turned, data):
    einsum, absolute = case
    other = data.draw(
        st.sampled_from([dtype, dtype, "complex128" if dtype.startswith("c") else "float64"])
    )
    operands = [
        numbers([einsum.extent[label] for label in index], kind, seed)
        for seed, (index, kind) in enumerate(zip(einsum.operands, (dtype, other), strict=True))
    ]
    if turned:
        operands = [
            np.asfortranarray(operands[0])[(..., *[slice(None, None, -1)] * operands[0].ndim)],
            operands[1],
        ]
    kind = np.result_type(*operands)
    if "abs" in str(einsum):
        kind = np.zeros(0, kind).real.dtype
    assert distance.supports_distance(
        distances.recognise_distance(einsum), operands, np.empty(0, kind)
    )
    found = compute(einsum, operands, kind)
    assert_within_bound(found, einsum, operands, absolute)
    if absolute:
        assert (found.real >= 0).all() and (found.imag == 0).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "limits", [{}, {"MAX_NORMS": 3, "BLOCK_ELEMENTS": 4}], ids=["whole", "boxes"]
)
def test_any_distance(limits, monkeypatch):
    for name, value in limits.items():
        monkeypatch.setattr(distance, name, value)
    any_distance()


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, dtype):
    x, y = numbers((40, 30), dtype, 0), numbers((25, 30), dtype, 1)
    made = vertex(form, x, y)
    assert distances.recognise_distance(made.einsum) == distances.Distance(
        replace(made.einsum, function=distances.PRODUCT), FORMS[form]
    )
    assert_within_bound(compute(made.einsum, [x, y], made.dtype), made.einsum, [x, y], FORMS[form])


def test_a_diagonal():
    x, y = numbers((6, 6, 5), "float64", 0), numbers((7, 5), "float64", 1)
    made = einmpi.program("Z[i,k] = sum((X[i,i,j] - Y[k,j])**2)", X=x, Y=y).graph["Z"]
    found = compute(made.einsum, [x, y], "float64")
    np.testing.assert_allclose(
        found, reference.evaluate_einsum(made.einsum, [x, y], "float64"), rtol=1e-13
    )


OTHERS = [
    "sum((X[i,j] - Y[k,j])**3)",
    "sum((X[i,j] - Y[k,j])**4)",
    "sum((X[i,j] + Y[k,j])**2)",
    "max((X[i,j] - Y[k,j])**2)",
    "sum((X[i,j] - Y[k,j]) * (Y[k,j] - X[i,j]))",
    "sum(abs(X[i,j] - Y[k,j]))",
    "sum((X[i,j] - 2)**2) * Y[k,0]",
    "sum((X[i,j] - Y[n[k],j])**2)",
    "sum((X[i,j] - Y[i,j])**2) + X[k,0]",
    "sum((X[i,j] - v[j])**2) + X[k,0]",
    "sum[j]((v[i] - v[k])**2 + 0 * X[i,j])",
]


@pytest.mark.parametrize("text", OTHERS)
def test_what_is_no_distance(text):
    tensors = {"X": (5, 5), "Y": (5, 5), "v": (5,), "n": np.zeros(5, int)}
    graph = einmpi.program(
        f"Z[i,k] = {text}", **{x: tensors[x] for x in tensors if f"{x}[" in text}
    ).graph
    assert [distances.recognise_distance(made.einsum) for made in graph.computed] == [None] * len(
        graph.computed
    )


@pytest.mark.parametrize("dtype, form", [("float16", "D**2"), ("int32", "D**2"), ("int64", "D*D")])
def test_other_dtypes_stay_exact(dtype, form):
    x, y = (np.arange(12).reshape(3, 4) * 3).astype(dtype), np.ones((2, 4), dtype)
    made = vertex(form, x, y)
    out = compute(made.einsum, [x, y], made.dtype)
    np.testing.assert_array_equal(out, ((x.astype(float)[:, None] - y) ** 2).sum(axis=2))


def test_complex_beside_real():
    x, y = numbers((6, 5), "complex128", 0), numbers((7, 5), "float64", 1)
    for form, absolute in FORMS.items():
        made = vertex(form, x, y)
        assert (
            distance.supports_distance(
                distances.recognise_distance(made.einsum), [x, y], np.empty(0, made.dtype)
            )
            is not absolute
        )
        assert_within_bound(compute(made.einsum, [x, y], made.dtype), made.einsum, [x, y], absolute)


def test_nothing_below_zero_and_nan_stays():
    x = numbers((200, 30), "float32", 0) + np.float32(1000)
    y = x.copy()
    made = vertex("D**2", x, y)
    near = compute(made.einsum, [x, y], "float32")
    assert (near >= 0).all() and (
        np.diag(near) <= 34 * np.finfo("float32").eps * 2 * (x**2).sum(axis=1)
    ).all()
    x[3, 4], x[5, 6], y[7, 8] = np.nan, np.inf, -np.inf
    found = compute(made.einsum, [x, y], "float32")
    assert np.isnan(found[3]).all()
    assert not np.isfinite(found[5]).any() and not np.isfinite(found[:, 7]).any()
    rest = np.ones_like(found, bool)
    rest[[3, 5]] = rest[:, 7] = False
    np.testing.assert_array_equal(found[rest], near[rest])


def test_no_array_as_large_as_an_operand():
    """Only the norms are allocated: 8 bytes per row, and fewer if there are very many rows."""
    for shape, order in (((3000, 400), "C"), ((3000, 400), "F"), ((600_000, 2), "C")):
        x, y = np.ones(shape, order=order), np.ones((3, shape[1]))
        made = vertex("D**2", x, y)
        out = np.empty(made.einsum.bound)
        dispatch.compute_einsum(made.einsum, [x, y], out, {}, 1, True)
        tracemalloc.start()
        dispatch.compute_einsum(made.einsum, [x, y], out, {}, 1, True)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (out == 0).all() and peak < 8 * distance.MAX_NORMS + 300_000


# ---- only where it is wanted --------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    made, real = [], distance.compute_distance
    monkeypatch.setattr(distance, "compute_distance", lambda *given: (made.append(1), real(*given)))
    return made


def test_off_by_default(calls):
    x, y = numbers((90, 70), "float64", 0), numbers((80, 70), "float64", 1)
    einsum = vertex("D**2", x, y).einsum
    found, exact = np.empty((90, 80)), np.empty((90, 80))
    dispatch.compute_einsum(einsum, [x, y], found, {})
    compiled.compute_by_compiled_loops(einsum, [x, y], exact)
    assert found.tobytes() == exact.tobytes() and not calls


JOB = """
program = "D[i,k] = sum((X[i,j] - Y[k,j])**2)"
[inputs]
X = { shape = [24, 30], random = "normal", seed = 1 }
Y = { shape = [36, 30], random = "normal", seed = 2 }
[run]
fast_math = %s
"""


def test_from_the_job_file_to_the_kernel(tmp_path, calls):
    (tmp_path / "fast.toml").write_text(JOB % "true")
    (tmp_path / "exact.toml").write_text(JOB % "false")
    fast, exact = einmpi.load(tmp_path / "fast.toml"), einmpi.load(tmp_path / "exact.toml")
    wanted = einmpi.reference(exact)["D"]
    for job, option, used in (
        (fast, None, True),
        (exact, None, False),
        (fast, False, False),
        (exact, True, True),
    ):
        calls.clear()
        found = einmpi.run(job, fast_math=option)["D"].gather()
        assert bool(calls) is used
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
    for flags in ([], ["--fast-math"]):
        calls.clear()
        assert main(["verify", str(tmp_path / "exact.toml"), "--quiet", *flags]) == 0
        assert bool(calls) is bool(flags)


@pytest.mark.parametrize("pin", [(4, 1), (1, 4), (2, 2), (1, 1)])
def test_on_ranks(tmp_path, pin, calls):
    """Where ranks have parts of the sums, each part is a sum of squares, so none is negative."""
    (tmp_path / "fast.toml").write_text(JOB % "true")
    job = einmpi.load(tmp_path / "fast.toml")
    found = run_on_threads(job, 4, pin={"D": pin}).outputs["D"]
    np.testing.assert_allclose(found, einmpi.reference(job)["D"], rtol=1e-12)
    assert len(calls) == 4


def test_ranks_must_agree(tmp_path):
    (tmp_path / "fast.toml").write_text(JOB % "true")
    job = einmpi.load(tmp_path / "fast.toml")

    def on_rank(comm):
        with pytest.raises(EinmpiError, match=r"fast_math=True.*fast_math=False.*same calls"):
            Compiled(replace(job, fast_math=comm.rank == 0), comm, options_of(job))()

    run_threads(2, on_rank)


# ---- large results: norms by a compiled kernel ---------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_compiled_norms_give_the_same_bits(monkeypatch, dtype, order):
    x = numbers((700, 9), dtype, 0)
    y = numbers((400, 9), dtype, 1)
    x[3] = np.nan
    x[4] = np.inf
    y[5] = x[6]
    einsum = vertex("D**2", x, y).einsum
    operands = [np.array(x, order=order), y]
    assert prod(einsum.bound) >= dispatch.WORTH_COMPILING
    by_loops = compute(einsum, operands, dtype)
    monkeypatch.setattr(dispatch, "WORTH_COMPILING", 2**62)
    by_numpy = compute(einsum, operands, dtype)
    np.testing.assert_array_equal(by_loops.view(f"i{x.itemsize}"), by_numpy.view(f"i{x.itemsize}"))


@pytest.mark.parametrize("fast", [False, True])
def test_distances_are_no_part_of_a_group_with_fast_math(calls, fast):
    """Y[j,k] could be read in blocks of rows, and the loops of a group would take its place."""
    program = "near[i] = min[k](sum((X[i,j] - Y[j,k])**2))"
    job = einmpi.program(program, X=(100_000, 3), Y=(3, 40))
    x, y = numbers((100_000, 3), "float64", 0), numbers((3, 40), "float64", 1)
    found = einmpi.run(job, {"X": x, "Y": y}, fast_math=fast)["near"].gather()
    assert bool(calls) == fast
    wanted = sum(np.square(x[:, j, None] - y[j]) for j in range(3)).min(axis=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
