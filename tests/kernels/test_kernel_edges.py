"""Kernels at the edges, through the function that a run calls: extents, layouts, sizes beyond
32 bits, special numbers.
"""

import itertools
import tracemalloc
from fractions import Fraction
from math import prod

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import einmpi
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg
from einmpi.kernels import reference
from einmpi.kernels.cpu import dispatch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EINMPI_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.fixture(params=["numpy", "compiled"])
def way(request, monkeypatch):
    """Compute all but contractions by broadcasting, or by compiled loops; a run uses both."""
    monkeypatch.setattr(dispatch, "WORTH_COMPILING", {"numpy": 2**62, "compiled": 0}[request.param])
    return request.param


def graph_of(text, arrays):
    """Return the graph of a program, and the arrays that it reads."""
    used = {name: array for name, array in arrays.items() if f"{name}[" in text}
    return einmpi.program(text, **used).graph, used


def compute(text, **arrays):
    """Compute every vertex by a kernel and return the last one."""
    graph, tensors = graph_of(text, arrays)
    for made in graph.computed:
        tensors[made.name] = out = np.full(made.bound, 77).astype(made.dtype)
        dispatch.compute_einsum(made.einsum, [tensors[name] for name in made.inputs], out, {}, 2)
    return tensors["Z"]


def expected(text, **arrays):
    return reference.evaluate(*graph_of(text, arrays))["Z"]


# ---- extents ------------------------------------------------------------------------------------

# A contraction, a batched one, a single operand, an aggregation over no label, elementwise work, a
# gather.
EXTENTS = [
    "Z[i,k] = sum(A[i,j] * B[j,k])",
    "Z[k,i] = sum(2 * A[i,j] * B[j,k])",
    "Z[i,j,k] = A[i,j] * B[j,k]",
    "Z[j] = sum(A[i,j])",
    "Z = sum(A[i,j] * B[j,k])",
    "Z[i,k] = sum(abs(A[i,j] - B[j,k]))",
    "Z[i] = prod(A[i,j])",
    "Z[i,k] = all(A[i,j] < B[j,k])",
    "Z[k,j,i] = A[i,j] + B[j,k]",
    "Z[i,k,m:2] = sum(A[i,j] * B[j,k])",
    "Z[m:0,i] = sum(A[i,j])",
    "Z[i] = sum[j,m:3](A[i,j])",
]


@pytest.mark.sampled(6, always=["Z[i,k] = sum(A[i,j] * B[j,k])"])
@pytest.mark.parametrize("text", EXTENTS)
def test_extents_of_zero_and_one(text):
    """Extents of 0 and 1; for compiled loops see cpu/test_compiled.py."""
    rng = np.random.default_rng(0)
    for i, j, k in itertools.product([0, 1, 3], repeat=3):
        arrays = {"A": rng.normal(size=(i, j)), "B": rng.normal(size=(j, k))}
        np.testing.assert_allclose(
            compute(text, **arrays), expected(text, **arrays), rtol=1e-13, atol=1e-15
        )


@pytest.mark.parametrize("dtype", ["float64", "int64", "bool"])
def test_greatest_of_nothing(dtype, way):
    """The language refuses such a program, and a kernel does not invent a number."""
    einsum = EinSum(("i",), (("i", "j"),), Arg(0), "max", ("j",), (("i", 2), ("j", 0)))
    with pytest.raises(ValueError, match="max of nothing has no value"):
        dispatch.compute_einsum(einsum, [np.zeros((2, 0), dtype)], np.zeros(2, dtype), {})
    nothing = EinSum(("i",), (("i", "j"),), Arg(0), "max", ("j",), (("i", 0), ("j", 0)))
    dispatch.compute_einsum(nothing, [np.zeros((0, 0), dtype)], np.zeros(0, dtype), {})


# ---- layouts ------------------------------------------------------------------------------------


def rows_apart(array):
    """Return an array whose row stride is not a multiple of the element size."""
    step = array.strides[0] + 1
    memory = np.zeros(step * len(array), np.int8)
    view = as_strided(
        memory[: array.itemsize].view(array.dtype), array.shape, (step, array.itemsize)
    )
    view[...] = array
    return view


LAYOUTS = {
    "columns first": np.asfortranarray,
    "backwards": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
    "with gaps": lambda x: np.repeat(np.repeat(x, 2, axis=0), 3, axis=1)[::2, ::3],
    "unaligned": lambda x: (
        np.frombuffer(bytearray(b"." + x.tobytes()), np.int8)[1:].view(x.dtype).reshape(x.shape)
    ),
    "rows apart": rows_apart,
    "swapped bytes": lambda x: x.astype(x.dtype.newbyteorder()),
    "a field": lambda x: np.rec.fromarrays([x, np.zeros(x.shape, "int8")], names="x,y").x,
    "one row": lambda x: np.broadcast_to(x[:1], x.shape),
    "one column": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "one number": lambda x: np.broadcast_to(x[0, 0], x.shape),
}
PROGRAMS = [
    "Z[i,k] = sum(A[i,j] * B[j,k])",
    "Z[i] = sum(A[i,j])",
    "Z[j,i] = A[i,j] * 2",
    "Z[i,k] = A[i,2] * B[3,k]",
    "Z[i,k] = sum(abs(A[i,j] - B[j,k]))",
]


@pytest.mark.sampled(30)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex128", "int32", "bool"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dtype):
    """Results do not depend on the layout of operands, and operands are never written to.

    For compiled loops see cpu/test_compiled.py.
    """
    rng = np.random.default_rng(0)
    shapes = {"A": (11, 12), "B": (12, 13)}
    arrays = {
        name: LAYOUTS[layout]((4 * rng.normal(size=shape)).astype(dtype))
        for name, shape in shapes.items()
    }
    plain = {name: array.astype(dtype) for name, array in arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    near = {"float16": 2e-3, "float32": 1e-5}.get(dtype, 1e-13)
    for text in PROGRAMS[:2] if dtype == "bool" else PROGRAMS:
        wanted = expected(text, **plain)
        np.testing.assert_allclose(
            compute(text, **arrays), wanted, rtol=near, atol=near * np.abs(wanted).max()
        )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["rows apart", "one row", "one number"])
def test_layouts_of_compiled_loops(layout, monkeypatch):
    monkeypatch.setattr(dispatch, "WORTH_COMPILING", 0)
    rng = np.random.default_rng(0)
    A, B = (LAYOUTS[layout](rng.normal(size=shape)) for shape in ((11, 12), (12, 13)))
    text = PROGRAMS[-1]
    np.testing.assert_allclose(compute(text, A=A, B=B), expected(text, A=A, B=B), rtol=1e-13)


def test_the_same_array_twice():
    x = np.random.default_rng(0).normal(size=(20, 20))
    for text in (
        "Z[i,k] = sum(A[i,j] * B[j,k])",
        "Z[i,k] = sum(A[i,j] * B[k,j])",
        "Z[i] = max(A[i,j] - B[j,i])",
        "Z[i,k] = sum(A[i,j] * A[j,k])",
        "Z = sum(A[i,j] * A[i,j])",
        "Z[i] = sum(A[i,i] * A[i,j])",
    ):
        np.testing.assert_allclose(
            compute(text, A=x, B=x), expected(text, A=x, B=x), rtol=1e-13, atol=1e-14
        )


# ---- beyond 32 bits -----------------------------------------------------------------------------

HUGE = 2**31 + 7


COUNTS = {
    "Z = max(A[i])": 1,
    "Z = all(A[i])": 1,
    "Z = sum(A[i])": HUGE,
    "Z = sum(A[i] * A[i])": HUGE,
}


@pytest.mark.parametrize(
    "text", [pytest.param(x, marks=pytest.mark.slow) if "sum" in x else x for x in COUNTS]
)
def test_more_elements_than_32_bits_count(text):
    """One number, repeated HUGE times by a stride of 0: no memory, one pass."""
    A = np.broadcast_to(np.ones((), "bool" if "all" in text else "int32"), (HUGE,))
    assert compute(text, A=A) == COUNTS[text]


def test_places_that_32_bits_do_not_count(way):
    """A few elements of an array that is larger than memory: the rest of it is never touched."""
    large = np.zeros(2**32 + 100, np.int8).view(bool)
    large[[5, 2**31 + 5, 2**32 + 5]] = True
    spread = as_strided(large, (3, 10), (2**31, 1))  # rows of it, 2 GiB apart
    wanted = np.zeros((3, 10), int)
    wanted[:, 5] = 1
    np.testing.assert_array_equal(compute("Z[j,i] = A[i,j] | False", A=spread), wanted.T)
    np.testing.assert_array_equal(compute("Z[i] = sum(A[i,j])", A=spread), [1, 1, 1])
    np.testing.assert_array_equal(
        compute("Z[i,k] = sum(A[i,j] * B[k,j])", A=spread, B=spread), np.ones((3, 3))
    )
    places = np.array([5, 6, 2**31 + 5, 2**32 + 5, 2**31 + 6])
    np.testing.assert_array_equal(compute("Z[i] = W[t[i]]", W=large, t=places), [1, 0, 1, 1, 0])


def test_indices_that_32_bits_do_not_hold(way):
    graph, tensors = graph_of("Z[i] = A[i] + i", {"A": np.arange(3)})
    out = np.zeros(3, int)
    dispatch.compute_einsum(graph["Z"].einsum, [tensors["A"]], out, {"i": HUGE + np.arange(3)})
    np.testing.assert_array_equal(out, HUGE + np.array([0, 2, 4]))


# ---- numbers ------------------------------------------------------------------------------------

SPECIAL = np.array([0.0, -0.0, 1.0, -2.0, np.inf, -np.inf, np.nan, 5e-324, -1e-310, 1.7e308])


COMPARED = [
    "Z[i] = max(A[i,j])",
    "Z[i] = min(A[i,j])",
    "Z[i] = sum(A[i,j])",
    "Z[i] = prod(A[i,j])",
    "Z[i,k] = A[i,k] - A[k,i]",
    "Z[i,k] = maximum(A[i,k], A[k,i])",
    "Z[i,k] = sum(abs(A[i,j] - A[k,j]))",
    "Z[i,k] = max(A[i,j] - A[k,j])",
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", COMPARED)
def test_special_numbers_as_in_numpy(text, way):
    """All pairs of special numbers, and rows of ones with one of them.

    nan wins, inf − inf is nan, denormal numbers stay.
    """
    rows = [np.full(len(SPECIAL), x) for x in SPECIAL]
    for k in range(len(SPECIAL)):
        rows[k][k] = 1.0
    array = np.array(rows)
    np.testing.assert_array_equal(compute(text, A=array), expected(text, A=array))


PRODUCTS = {
    "Z[i,k] = sum(A[i,j] * B[j,k])": "ij,jk->ik",
    "Z[i] = sum(A[i,j] * v[j])": "ij,j->i",
    "Z[j] = sum(A[i,j] * B[i,j])": "ij,ij->j",
    "Z = sum(A[i,j] * B[j,i])": "ij,ji->",
}


@pytest.mark.parametrize("text", PRODUCTS)
def test_products_by_BLAS_keep_nan_and_infinity(text):
    """0 · inf is nan, however sparse the operands are; denormals are not flushed to 0."""
    for x, y in itertools.product([np.inf, -np.inf, np.nan, 1e-310, 0.0], [0.0, 1.0, np.inf]):
        A, B = np.zeros((24, 24)), np.ones((24, 24))
        A[3, 4], B[4, :], B[3, 5] = x, y, -y
        wanted = np.einsum(PRODUCTS[text], A, B[:, 7] if "v[" in text else B, optimize=False)
        np.testing.assert_array_equal(compute(text, A=A, B=B, v=B[:, 7]), wanted)


def numbers(name, count, dtype):
    rng = np.random.default_rng(1)
    half = rng.normal(size=count // 2) * 1e3
    return {
        "normal": rng.normal(size=count),
        "cancelling": np.concatenate([half, -half + rng.normal(size=count // 2) * 1e-3]),
        "wide": rng.normal(size=count) * 10.0 ** rng.integers(-6, 6, count),
        "denormal": rng.normal(size=count) * float(np.finfo(dtype).tiny) / 64,
    }[name].astype(dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["normal", "cancelling", "wide", "denormal"])
def test_sums_keep_their_digits(kind, dtype):
    """The error against rational numbers is at most 2 ulp times √n.

    It is relative to the sum of the magnitudes.
    """
    count = 6000
    x, ones = (
        numbers(kind, count, dtype),
        np.random.default_rng(2).choice([-1.0, 1.0], (count, 3)).astype(dtype),
    )
    terms = [
        [Fraction(float(a)) * Fraction(float(b)) for a, b in zip(x, column, strict=True)]
        for column in ones.T
    ]
    wanted, size = (
        np.array([float(sum(f(t) for t in column)) for column in terms]) for f in (lambda t: t, abs)
    )
    bound = 2 * np.sqrt(count) * np.spacing(size.astype(dtype)).astype("float64")
    wide = np.ascontiguousarray(x[:, None] * ones)  # exact
    found = {
        "vector": compute("Z[k] = sum(A[j] * B[j,k])", A=x, B=ones),
        "matrix": compute("Z[k,l] = sum(A[j,l] * B[j,k])", A=np.stack([x] * 4, axis=1), B=ones)[
            :, 2
        ],
        "rows": compute("Z[k] = sum(A[k,j])", A=np.ascontiguousarray(wide.T)),
        "columns": compute("Z[k] = sum(A[j,k])", A=wide),
        "other": compute("Z[k] = sum(A[j,k] + 0)", A=wide),
        "pairs": compute("Z[k] = sum(A[j,k] * B[j,k])", A=np.stack([x] * 3, axis=1), B=ones),
    }
    for name, sums in found.items():
        assert (np.abs(sums.astype("float64") - wanted) <= bound).all(), name


HALF = [
    "Z[i] = sum(A[i,j])",
    "Z[i] = sum(B[j,i])",
    "Z[i] = sum(A[i,j] * B[j,i])",
    "Z[i,k] = sum(A[i,j] * B[j,k])",
    "Z[i] = sum(A[i,j] + 0)",
]


@pytest.mark.parametrize("text", HALF)
def test_half_precision_is_summed_in_single(text):
    """float16 stops counting ones at 2048."""
    ones = np.ones((4, 5000), "float16")
    found = compute(text, A=ones, B=ones.T.copy())
    assert found.dtype == np.float16 and (found == 5000).all()


# ---- memory -------------------------------------------------------------------------------------

LONG = " + ".join(f"(A[i,j] + {k}) * (B[j,k] - {k})" for k in range(12))
PACKED = "Z[i,k] = max(D[j,i] - C[k,j])"
MEMORY = [
    ("Z[i,k] = sum(abs(A[i,j] - B[j,k]))", (300, 300, 300)),
    ("Z[k,i] = max(A[i,j] - B[j,k])", (30, 4000, 300)),
    ("Z = sum(abs(A[i,j] - B[j,k]))", (300, 300, 300)),
    ("Z[j] = min(A[i,j] / B[j,k])", (300, 300, 300)),
    ("Z[i,k] = max(A[i,j] - C[k,j])", (400, 100, 400)),
    (PACKED, (400, 100, 400)),
    ("Z[i,k] = sum(erf(A[i,j] - B[j,k]))", (60, 60, 60)),
    (f"Z[i,k] = max({LONG})", (100, 100, 100)),
    ("Z[j,i] = A[i,j] * 2 + 1", (2000, 1, 2000)),
    ("Z[i,k] = max(B[t[j],k] * A[i,j])", (200, 200, 200)),
    ("Z[i,j] = where(j <= i, A[i,j], -inf)", (2000, 2000, 1)),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text, extents", MEMORY, ids=lambda case: str(case)[:30])
def test_no_temporary_of_the_whole_label_space(text, extents, monkeypatch):
    """Kernels allocate far less than 64 MiB beside their output.

    For contractions see cpu/test_blas.py.
    """
    monkeypatch.setattr(dispatch, "WORTH_COMPILING", 2**62)
    assert (
        peak_of(text, (extents[0] // (4 if prod(extents) > 2**23 else 1), *extents[1:]))
        < 12 * 2**20
    )


@pytest.mark.parametrize(
    "text, extents",
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] != PACKED)) for case in MEMORY],
    ids=lambda case: str(case)[:30],
)
def test_no_temporary_in_compiled_loops(text, extents, monkeypatch):
    """Only packed operands, and the values of labels that are used as numbers, are allocated."""
    monkeypatch.setattr(dispatch, "WORTH_COMPILING", 0)
    assert peak_of(text, extents) < 12 * 2**20


def peak_of(text, extents):
    """Return the bytes that a kernel allocates beside its output."""
    i, j, k = extents
    rng = np.random.default_rng(0)
    arrays = {
        "A": rng.random((i, j)),
        "B": rng.random((j, k)) + 1,
        "C": rng.random((k, j)),
        "D": rng.random((j, i)),
        "t": rng.integers(0, j, j),
    }
    graph, tensors = graph_of(text, arrays)
    (made,) = graph.computed
    operands, out = [tensors[name] for name in made.inputs], np.empty(made.bound, made.dtype)
    dispatch.compute_einsum(made.einsum, operands, out, {}, 2)
    tracemalloc.start()
    dispatch.compute_einsum(made.einsum, operands, out, {}, 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak
