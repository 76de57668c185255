"""Compiled kernels against the reference evaluator: operations, layouts, extents, exact sums; and
their cache on disk.
"""

import itertools
import json
import math
import os
import subprocess
import sys
import time
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, note
from paths import ROOT
from random_programs import arrays_of, graphs, programs, settled

import einmpi
from einmpi.graph.arithmetic import infer
from einmpi.graph.dtypes import numpy_dtypes
from einmpi.graph.einsum import EinSum
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Arg, Call, Const
from einmpi.kernels import reference
from einmpi.kernels.cpu import broadcast, compiled
from tests.soak.tree import program_text

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EINMPI_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        patch.setattr(compiled, "KERNELS", {})
        yield


def vertex(text, arrays):
    """Return the only EinSum of a statement, its dtype and its operands."""
    graph = einmpi.program(text, **arrays).graph
    (found,) = graph.computed
    return found.einsum, found.dtype, [arrays[name] for name in found.inputs]


def compute(einsum, dtype, operands, index=None, threads=1):
    assert compiled.supports_compiled_loops(einsum, [operand.dtype for operand in operands])
    out = np.full(einsum.bound, 1, dtype)
    compiled.compute_by_compiled_loops(einsum, operands, out, index, threads)
    return out


def close(found, wanted, dtypes=()):
    """Assert equality up to a few roundings of the largest number: sums are in another order."""
    single = {"float32", "complex64"} & {found.dtype.name, *map(str, dtypes)}
    rtol = 1e-5 if single else 1e-12
    finite = (
        np.abs(np.where(np.isfinite(wanted), wanted, 0))
        if wanted.dtype.kind in "fc"
        else np.zeros(1)
    )
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=rtol * float(finite.max(initial=0)))


# ---- kernels by name ----------------------------------------------------------------------------

# program, dtype, the labels of its inputs
NAMED = {
    "min-plus": ("Z[i,k] = min(A[i,j] + B[j,k])", "float64", {"A": "ij", "B": "jk"}),
    "max-times": ("Z[i,k] = max(A[i,j] * B[k,j])", "float32", {"A": "ij", "B": "kj"}),
    "max-min": ("Z[i,k] = max(minimum(A[i,j], B[j,k]))", "int32", {"A": "ij", "B": "jk"}),
    "or-and": ("Z[i,k] = any(A[i,j] & B[j,k])", "bool", {"A": "ij", "B": "jk"}),
    "farthest": ("Z[i,k] = max(abs(A[i,j] - B[j,k]))", "float64", {"A": "ij", "B": "jk"}),
    "distances": ("Z[i,k] = sum((A[i,j] - B[k,j])**2)", "float32", {"A": "ij", "B": "kj"}),
    "batched": ("Z[b,i,k] = sum(abs(A[b,i,j] - B[b,j,k]))", "float64", {"A": "bij", "B": "bjk"}),
    "complex": ("Z[i,k] = sum(A[i,j] * conj(B[j,k]) - 1)", "complex64", {"A": "ij", "B": "jk"}),
    "log-sum-exp": ("Z[i] = sum(exp(A[i,j] - m[i]))", "float64", {"A": "ij", "m": "i"}),
    "softmax": ("Z[i,j] = exp(A[i,j] - m[i]) / s[i]", "float32", {"A": "ij", "m": "i", "s": "i"}),
    "columns": ("Z[j] = sum(A[i,j])", "float32", {"A": "ij"}),
    "rows": ("Z[i] = prod(A[i,j] + 0.5)", "float64", {"A": "ij"}),
    "total": ("Z = sum(A[i,j] * B[j,i])", "float64", {"A": "ij", "B": "ji"}),
    "turned": ("Z[j,i] = A[i,j] * 2 + B[j,i]", "float64", {"A": "ij", "B": "ji"}),
    "diagonal": ("Z[i] = S[i,i] + A[i,0]", "int64", {"S": "ii", "A": "ij"}),
    "whole": ("Z[i] = sum(A[i,j] * (j - i))", "int32", {"A": "ij"}),
}
SIZES = [
    {"i": 131, "j": 7, "k": 130, "b": 2},
    {"i": 65, "j": 517, "k": 66, "b": 3},
    {"i": 64, "j": 128, "k": 257, "b": 2},
]


def random_arrays(dtype, shapes, seed=0):
    rng = np.random.default_rng(seed)
    made = {name: rng.normal(size=shape) * 3 for name, shape in shapes.items()}
    if np.dtype(dtype).kind == "c":
        return {
            name: (array + 1j * rng.normal(size=array.shape)).astype(dtype)
            for name, array in made.items()
        }
    return {
        name: array > 1.0 if dtype == "bool" else array.astype(dtype)
        for name, array in made.items()
    }


@pytest.mark.sampled(2, always=["complex", "or-and"])
@pytest.mark.parametrize("name", NAMED)
def test_named(name):
    text, dtype, labels = NAMED[name]
    for size in SIZES:
        arrays = random_arrays(
            dtype, {x: tuple(size[label] for label in index) for x, index in labels.items()}
        )
        einsum, kind, operands = vertex(text, arrays)
        wanted = reference.evaluate_einsum(einsum, operands, kind)
        found = [compute(einsum, kind, operands, threads=threads) for threads in (1, 2)]
        close(found[0], wanted, [dtype])
        assert found[0].tobytes() == found[1].tobytes(), "the number of threads changes the result"


@pytest.mark.slow
def test_batches_of_every_size_without_new_kernels():
    """One kernel fits all extents: at the ends of tiles, blocks and strips nothing is lost."""
    before = compiled.STATISTICS.compiled
    rng = np.random.default_rng(3)
    for k in range(40):
        i, j, n = (int(rng.choice([2, 3, 33, 63, 64, 65, 127, 128, 129, 260])) for _ in range(3))
        arrays = random_arrays("float64", {"A": (i, j), "B": (j, n)}, seed=k)
        einsum, kind, operands = vertex(NAMED["farthest"][0], arrays)
        np.testing.assert_array_equal(
            compute(einsum, kind, operands), reference.evaluate_einsum(einsum, operands, kind)
        )
    assert compiled.STATISTICS.compiled - before <= 3


LAYOUTS = {
    "columns first": np.asfortranarray,
    "backwards": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
    "every other": lambda x: np.repeat(np.repeat(x, 2, axis=0), 3, axis=1)[::2, ::3],
    "unaligned": lambda x: (
        np.frombuffer(bytearray(b"." + x.tobytes()), np.int8)[1:].view(x.dtype).reshape(x.shape)
    ),
    "swapped bytes": lambda x: x.astype(x.dtype.newbyteorder()),
    "a field": lambda x: np.rec.fromarrays([x, x.astype("int32")], names="x,y").x,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    laid_out = LAYOUTS[layout]
    for text in ("Z[i,k] = min(A[i,j] + B[j,k])", "Z[k,j] = B[j,k] + 1"):
        arrays = random_arrays("float64", {"A": (37, 50), "B": (50, 70)})
        einsum, kind, operands = vertex(
            text, {name: array for name, array in arrays.items() if name in text}
        )
        wanted = reference.evaluate_einsum(einsum, operands, kind)
        out, operands = (
            laid_out(np.zeros(einsum.bound)),
            [laid_out(operand) for operand in operands],
        )
        for operand in operands:
            operand.flags.writeable = False
        compiled.compute_by_compiled_loops(einsum, operands, out)
        np.testing.assert_array_equal(out, wanted)


def test_repeated_rows():
    operand = np.broadcast_to(np.arange(50.0), (37, 50))  # stride 0
    einsum, kind, operands = vertex("Z[i] = sum(A[i,j])", {"A": operand})
    np.testing.assert_array_equal(compute(einsum, kind, operands), np.full(37, 1225.0))


@pytest.mark.slow
def test_extents_of_zero_and_one():
    for i, j, k in itertools.product([0, 1, 3], repeat=3):
        arrays = random_arrays("float64", {"A": (i, j), "B": (j, k)})
        einsum, kind, operands = vertex("Z[i,k] = sum(abs(A[i,j] - B[j,k]))", arrays)
        close(compute(einsum, kind, operands), reference.evaluate_einsum(einsum, operands, kind))
    einsum = EinSum(("i",), (("i", "j"),), Arg(0), "max", ("j",), (("i", 2), ("j", 0)))
    with pytest.raises(ValueError, match="max of nothing"):
        compiled.compute_by_compiled_loops(einsum, [np.zeros((2, 0))], np.zeros(2))


# ---- labels as numbers --------------------------------------------------------------------------

INDICES = {
    "from 0": None,
    "from another index": np.arange(1000, 1300),
    "with a gap": np.r_[10:160, 400:550],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", INDICES)
def test_labels_as_numbers(kind):
    """Values of labels that follow one another are counted, others are read."""
    x = np.random.default_rng(1).normal(size=(300, 200))
    rows = np.arange(300) if INDICES[kind] is None else INDICES[kind]
    columns = np.arange(200)
    index = {} if INDICES[kind] is None else {"i": INDICES[kind]}
    first = (1000 * rows[:, None] + columns)[x > 1].min()
    for text, wanted in (
        ("Z[j,i] = X[i,j] * i", (x * rows[:, None]).T),
        ("Z[j] = sum(abs(X[i,j] * i))", abs(x * rows[:, None]).sum(axis=0)),
        ("Z = min(where(X[i,j] > 1, 1000 * i + j, 10**9))", first),
        ("Z[i:300,j] = X[where(i % 2 == 0, 0, 1),j] + i", x[rows % 2] + rows[:, None]),
    ):
        einsum, dtype, operands = vertex(text, {"X": x})
        close(compute(einsum, dtype, operands, index, threads=2), np.asarray(wanted))


def test_values_of_a_label_take_no_memory():
    x = np.random.default_rng(1).normal(size=2**20)
    einsum, dtype, operands = vertex("Z = min(where(X[i] > 4, i, 2**20))", {"X": x})
    compute(einsum, dtype, operands)
    tracemalloc.start()
    found = compute(einsum, dtype, operands)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == np.flatnonzero(x > 4)[0]
    assert peak < x.nbytes // 8


# ---- many labels --------------------------------------------------------------------------------


def in_brackets(labels):
    return f"[{','.join(labels)}]" if labels else ""


def check_many_labels(extents, outputs, aggregation, threads=1):
    """Compare an EinSum over many labels, one operand transposed, with numpy.

    The first `outputs` labels are those of the output; all others are aggregated.
    """
    labels = [f"l{k}" for k in range(len(extents))]
    rng = np.random.default_rng(len(extents))
    # Whole numbers, so that every order of a sum gives the same.
    first = rng.integers(-99, 99, extents).astype(float)
    second = rng.integers(-99, 99, extents[::-1]).astype(float)
    terms = f"A{in_brackets(labels)} + abs(B{in_brackets(labels[::-1])})"
    target = f"Z{in_brackets(labels[:outputs][::-1])}"
    text = f"{target} = {aggregation}({terms})" if aggregation else f"{target} = {terms}"
    einsum, kind, operands = vertex(text, {"A": first, "B": second})
    wanted = first + np.abs(second.T)
    if aggregation:
        aggregated_axes = tuple(range(outputs, len(extents)))
        wanted = getattr(wanted, aggregation)(axis=aggregated_axes)
    np.testing.assert_array_equal(compute(einsum, kind, operands, threads=threads), wanted.T)


@pytest.mark.slow
def test_more_labels_than_python_nests_loops():
    """CPython refuses more than 20 loops one inside another."""
    check_many_labels([2] * 19, 0, "max")


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, 21, 25, 32, 40])
def test_up_to_forty_labels(count):
    wide = min(count, 18)
    extents = [2] * wide + [1] * (count - wide)
    extents[1] = 3
    check_many_labels(extents, 0, "sum")
    check_many_labels(extents, 9, "min", threads=2)
    check_many_labels(extents, count, "", threads=2)


@pytest.mark.slow
def test_many_labels_on_both_sides():
    """More loops of the output and more aggregated loops than are nested: both are counted."""
    check_many_labels([2] * 22, 11, "sum", threads=2)
    check_many_labels([3] + [2] * 18, 10, "max", threads=3)


# ---- labels as numbers, gathers -----------------------------------------------------------------


def test_labels_stand_for_given_indices():
    """Rows 4, 6, 8 and columns 10 to 14 of a causal mask, as a rank may hold them."""
    text = "Z[i,j] = where(j <= 2 * i, A[i,j] + j, -inf)"
    einsum, kind, operands = vertex(text, random_arrays("float64", {"A": (3, 5)}))
    index = {"i": np.array([4, 6, 8]), "j": np.arange(10, 15)}
    wanted = np.empty(einsum.bound)
    broadcast.compute_by_broadcasting(einsum, operands, wanted, index)
    np.testing.assert_array_equal(compute(einsum, kind, operands, index), wanted)
    assert (wanted == -np.inf).any()
    broadcast.compute_by_broadcasting(einsum, operands, wanted, {"i": index["i"]})
    np.testing.assert_array_equal(compute(einsum, kind, operands, {"i": index["i"]}), wanted)


GATHERS = [
    "Z[b,s,a] = W[tok[b,s], a]",
    "Z[i:5] = v[i+1] - v[4]",
    "Z[b] = sum(abs(W[tok[b,s], tok[s,b]] - s))",
    "Z[a] = max(W[t[t[i]], a])",
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", GATHERS)
def test_gathers(text):
    rng = np.random.default_rng(0)
    tensors = {
        "W": rng.normal(size=(9, 9)),
        "v": rng.normal(size=6),
        "tok": rng.integers(0, 9, (3, 3)),
        "t": np.array([2, 0, 1], "int32"),
    }
    einsum, kind, operands = vertex(
        text, {name: array for name, array in tensors.items() if f"{name}[" in text}
    )
    close(compute(einsum, kind, operands), reference.evaluate_einsum(einsum, operands, kind))


@pytest.mark.parametrize("bad", [-1, 4, -(2**63), 2**63 - 1])
def test_index_out_of_range(bad):
    for text in ("Z[i,j] = W[t[i], j]", "Z[i] = W[t[i], t[i]]"):
        einsum, kind, operands = vertex(text, {"W": np.zeros((4, 4)), "t": np.array([0, 3, 1])})
        operands = [np.array([0, bad, 1]) if operand.ndim == 1 else operand for operand in operands]
        with pytest.raises(IndexError) as wanted:
            reference.evaluate_einsum(einsum, operands, kind)
        with pytest.raises(IndexError) as found:
            compute(einsum, kind, operands)
        assert str(found.value) == str(wanted.value)
    einsum = EinSum(("i",), (("i",), (Arg(0),)), Arg(1), None, (), (("i", 2),))
    with pytest.raises(IndexError):
        compiled.compute_by_compiled_loops(einsum, [np.zeros(2, "int64"), np.zeros(0)], np.zeros(2))


# ---- values -------------------------------------------------------------------------------------

FLOATS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -2.5,
    3.0,
    np.inf,
    -np.inf,
    np.nan,
    5e-324,
    1e-310,
    1.7e308,
    -1.7e308,
    0.1,
    700.0,
]


def awkward(dtype):
    if dtype == "bool":
        return np.array([True, False])
    if np.dtype(dtype).kind in "iu":
        limits = np.iinfo(dtype)
        values = [0, 1, -1, 2, -2, 3, 7, -7, limits.min, limits.max, limits.min + 1, 100_000]
        fitting = [value for value in values if limits.min <= value <= limits.max]
        return np.array(fitting, dtype)
    if np.dtype(dtype).kind == "f":
        return np.array(FLOATS).astype(dtype)
    parts = np.array([0, 1, -1, 0.5, -2.5, 3, np.inf, np.nan])
    return (parts[:, None] + 1j * parts).ravel().astype(dtype)


def operation_agrees(op, dtypes):
    """One operation on all combinations of awkward numbers gives the results of numpy."""
    node = Call(op, tuple(Arg(k) for k in range(len(dtypes))))
    try:
        kind = np.dtype(infer(node, lambda leaf: np.dtype(dtypes[leaf.position])))
    except TypeError:
        return
    grid = np.meshgrid(*(awkward(dtype) for dtype in dtypes), indexing="ij")
    operands = [np.ascontiguousarray(part.ravel()) for part in grid]
    einsum = EinSum(("i",), (("i",),) * len(dtypes), node, None, (), (("i", operands[0].size),))
    if not compiled.supports_compiled_loops(einsum, dtypes):
        without_numba = {"float16", "bfloat16"} & {*dtypes, kind.name}
        assert without_numba or kind.kind == "c" or op == "**"
        return
    found, wanted = (
        compute(einsum, kind, operands),
        reference.evaluate_einsum(einsum, operands, kind.name),
    )
    if kind.kind == "c":  # a part of it may be nan in one and infinite in the other
        plain = np.isfinite(wanted)
        assert (np.isnan(found) | ~np.isnan(wanted)).all()
        found, wanted = found[plain], wanted[plain]
    rtol = 8 * float(np.finfo(kind).eps) if kind.kind in "fc" else 0
    np.testing.assert_allclose(found, wanted, rtol=rtol, err_msg=f"{op} {dtypes}")


COMMON = [
    ("%", "float64", "float64"),
    ("%", "int32", "int32"),
    ("/", "complex128", "complex128"),
    ("sign", "float32"),
    ("maximum", "float64", "float32"),
    ("<", "int32", "float64"),
    ("**", "float64", "float64"),
    ("exp", "float64"),
    ("exp", "float32"),
    ("tanh", "float64"),
    ("erf", "float32"),
    ("int32", "float64"),
    ("abs", "int32"),
    ("where", "float64", "int32", "float32"),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", COMMON, ids=" ".join)
def test_operations(case):
    operation_agrees(case[0], case[1:])


SOME_DTYPES = ("float32", "float64", "complex64", "int32", "int64", "uint64", "bool")


@pytest.mark.slow
@pytest.mark.parametrize("op", OPERATIONS)
def test_every_operation_in_every_dtype(op):
    """All dtypes with one another would be thousands of kernels: every operation has each dtype
    with itself, and a third of the others; the next operation has the next third.
    """
    arity = OPERATIONS[op].arity
    for dtype in numpy_dtypes():
        operation_agrees(op, (dtype,) * arity)
    turn = list(OPERATIONS).index(op)
    for places in itertools.product(range(len(SOME_DTYPES)), repeat=arity):
        dtypes = tuple(SOME_DTYPES[place] for place in places)
        if op == "where" and dtypes[0] not in ("bool", "float64"):
            continue
        if op == "clip" and dtypes[1] != dtypes[2]:
            continue
        weighted = sum((k + 1) * place for k, place in enumerate(places))
        if len(set(places)) > 1 and (weighted + turn) % 3 == 0:
            operation_agrees(op, dtypes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float64", "float32", "int32"])
def test_constants_take_the_dtype_beside_them(dtype):
    x = awkward(dtype)
    powers = "x[i]**2 + x[i]**0 + x[i]**3 + " + (
        "x[i]**7" if dtype == "int32" else "x[i]**0.5 + x[i]**-1 + x[i]**2.5"
    )
    for text in (
        powers,
        "where(x[i] < 3000000000, x[i] * 3 - 1, 2) + True",
        "x[i] * 0.1 + inf * (x[i] == -inf)",
    ):
        einsum, kind, operands = vertex(f"Z[i] = {text}", {"x": x})
        wanted = reference.evaluate_einsum(einsum, operands, kind)
        np.testing.assert_allclose(
            compute(einsum, kind, operands), wanted, rtol=1e-6 if kind == "float32" else 1e-14
        )


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("exponent", ["0.5", "h", "w[i]"])
def test_powers_of_one_half_are_no_roots_of_special_numbers(exponent, dtype):
    """IEEE 754 and the array API say inf and 0.0, where the roots are nan and -0.0."""
    half = np.full(5, 0.5, dtype)
    given = {
        "x": np.array([-np.inf, -0.0, 4, -1, np.inf], dtype),
        "h": np.array(0.5, dtype),
        "w": half,
    }
    used = {name: given[name] for name in "xhw" if name in "x" + exponent}
    einsum, kind, operands = vertex(f"Z[i] = x[i] ** {exponent}", used)
    for powers in (
        compute(einsum, kind, operands),
        reference.evaluate_einsum(einsum, operands, kind),
    ):
        np.testing.assert_array_equal(powers, [np.inf, 0, 2, np.nan, np.inf])
        assert not np.signbit(powers[1])


def test_what_is_not_supported():
    def supported(op, dtypes, *args):
        node = Call(op, (Arg(0), *args))
        return compiled.supports_compiled_loops(
            EinSum(("i",), (("i",),) * len(dtypes), node, None, (), (("i", 2),)), dtypes
        )

    assert supported("**", ["int64"], Const(5))
    assert not supported(
        "**", ["int64", "int64"], Arg(1)
    )  # a negative exponent is an error in numpy
    assert not supported("**", ["complex128"], Const(0.5))
    assert not supported("exp", ["complex64"])
    assert not supported("float32", ["float16"])
    assert not supported("float16", ["float32"])
    assert not supported("exp", ["bool"])  # float16 in numpy


@pytest.mark.parametrize(
    "dtype, low, high", [("float64", -745, 709.7), ("float32", -103, 88.7), ("float64", -2, 2)]
)
def test_exp_and_tanh_to_the_last_place(dtype, low, high):
    x = np.random.default_rng(0).uniform(low, high, 50_000).astype(dtype)
    for name, units in (("exp", 1.0), ("tanh", 2.0)):
        einsum, kind, operands = vertex(f"Z[i] = {name}(x[i])", {"x": x})
        wanted = getattr(np, name)(x.astype(np.longdouble))
        allowed = units * np.spacing(np.abs(wanted.astype(dtype)))
        assert (np.abs(compute(einsum, kind, operands) - wanted) <= allowed).all()


# ---- sums ---------------------------------------------------------------------------------------


def exact(values):
    return [float(sum(map(Fraction, row))) for row in values.astype("float64").tolist()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("text", ["Z[i] = sum(A[i,j])", "Z[j] = sum(A[i,j])"])
def test_sums_keep_their_digits(dtype, text):
    """The error is at most 2 ulp times √n, relative to the sum of the magnitudes."""
    rng = np.random.default_rng(0)
    count = 30_000
    rows = {
        "equal": np.full(count, 0.1),
        "small after large": np.concatenate([[1e7], np.full(count - 1, 0.3)]),
        "cancelling": np.concatenate(
            [x := rng.normal(size=count // 2) * 1e6, -x + rng.normal(size=count // 2)]
        ),
        "denormal": np.full(count, float(np.finfo(dtype).tiny) / 64),
        "wide": rng.normal(size=count) * 10.0 ** rng.integers(-8, 8, count),
    }
    values = np.array(list(rows.values()), dtype)
    einsum, kind, operands = vertex(text, {"A": values if "Z[i]" in text else values.T})
    found = compute(einsum, kind, operands).astype("float64")
    bound = (
        2 * np.sqrt(count) * np.spacing(np.abs(values).astype("float64").sum(axis=1).astype(dtype))
    )
    for name, sum_, wanted, allowed in zip(rows, found, exact(values), bound, strict=True):
        assert abs(sum_ - wanted) <= allowed, name
        assert abs(sum_ - math.fsum(values[list(rows).index(name)])) <= allowed


@pytest.mark.slow
def test_long_sums_do_not_depend_on_threads():
    """A sum to one number is cut into chunks, which do not depend on the number of threads."""
    rng = np.random.default_rng(0)
    for dtype, shape in (
        ("float64", (1100, 1003)),
        ("float32", (3_000_000,)),
        ("int32", (1 << 20, 2)),
    ):
        array = (rng.normal(size=shape) * 100).astype(dtype)
        labels = "ij"[: len(shape)]
        for text in (f"Z = sum(A[{','.join(labels)}])", f"Z = min(A[{','.join(labels)}])"):
            einsum, kind, operands = vertex(text, {"A": array})
            found = {
                compute(einsum, kind, operands, threads=threads).tobytes() for threads in (1, 2, 5)
            }
            assert len(found) == 1
            wanted = reference.evaluate_einsum(einsum, operands, kind)
            close(np.frombuffer(found.pop(), kind)[0], wanted, [dtype])


@pytest.mark.sampled(2, always=["sum", "max"])
@pytest.mark.parametrize("name", ["max", "min", "sum", "prod"])
def test_nan_and_infinity_go_through(name):
    values = np.random.default_rng(0).normal(size=(7, 300))
    for row, number in enumerate([np.nan, np.inf, -np.inf, -0.0, 5e-324]):
        values[row, 17 * row] = number
    values[5, [3, 200]] = np.inf, -np.inf
    values[6] = -np.inf
    for text, array in ((f"Z[i] = {name}(A[i,j])", values), (f"Z[j] = {name}(A[i,j])", values.T)):
        einsum, kind, operands = vertex(text, {"A": array})
        close(compute(einsum, kind, operands), reference.evaluate_einsum(einsum, operands, kind))


# ---- random programs ----------------------------------------------------------------------------


def vertices_of(program):
    """Yield every vertex of a random program, as written and rewritten.

    Each comes with its operands and the result of the reference evaluator.
    """
    note(program_text(program))
    for graph in graphs(program).values():
        tensors = arrays_of(program)
        for made in graph.computed:
            operands = [tensors[name] for name in made.inputs]
            wanted = reference.evaluate_einsum(made.einsum, operands, made.dtype)
            tensors[made.name] = wanted
            # numpy, C and CUDA divide complex numbers by zero in different ways.
            if wanted.dtype.kind != "c" or np.isfinite(wanted).all():
                yield made, operands, wanted


def vertices_agree(program):
    for made, operands, wanted in vertices_of(program):
        dtypes = [operand.dtype for operand in operands]
        if compiled.supports_compiled_loops(made.einsum, dtypes):
            close(compute(made.einsum, made.dtype, operands), wanted, dtypes)


@pytest.mark.slow
@settled(6)
@given(programs())
def test_random_programs(program):
    vertices_agree(program)


@pytest.mark.slow
@settled(20)
@given(programs())
def test_more_random_programs(program):
    vertices_agree(program)


# ---- the cache ----------------------------------------------------------------------------------

RUN = """
import json, sys, time
import numpy as np
import einmpi
from einmpi.kernels.cpu import compiled
assert "numba" not in sys.modules, "numba is imported when the first kernel is needed"
while time.time() < float(sys.argv[1]):
    pass
for text in ("Z[i] = X[i] * 2 + 1", "Z[i] = exp(X[i])"):
    graph = einmpi.program(text, X=(5,)).graph
    out = np.empty(5)
    compiled.compute_by_compiled_loops(graph["Z"].einsum, [np.arange(5.0)], out)
kept = compiled.STATISTICS
print(json.dumps({"compiled": kept.compiled, "loaded": kept.loaded, "sum": float(out.sum())}))
"""


def processes(folder, count=1):
    """Return the statistics of kernels of processes that start at the same time."""
    start = time.time() + (1.0 if count > 1 else 0.0)
    environment = {**os.environ, "EINMPI_CACHE_DIR": str(folder)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(start)],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
        )
        for _ in range(count)
    ]
    told = [json.loads(process.communicate(timeout=120)[0]) for process in running]
    assert all(math.isclose(one["sum"], np.exp(np.arange(5.0)).sum()) for one in told)
    return sum(one["compiled"] for one in told), sum(one["loaded"] for one in told)


@pytest.mark.slow
def test_one_of_many_processes_compiles(tmp_path):
    assert processes(tmp_path, 4) == (2, 6)
    assert processes(tmp_path) == (0, 2)


@pytest.mark.slow
def test_damaged_files_are_compiled_again(tmp_path):
    assert processes(tmp_path) == (2, 0)
    for file in tmp_path.rglob("*.nbc"):
        file.write_bytes(file.read_bytes()[:-100])
    next(tmp_path.rglob("*.sum")).write_text("{")
    assert processes(tmp_path) == (2, 0)
    assert processes(tmp_path) == (0, 2)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert processes(tmp_path / "file" / "below") == (2, 0)
