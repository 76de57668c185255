"""Contractions against the reference evaluator, the copies they make, and the memory of these."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kept_results import kept
from random_programs import settled

from einmpi.graph.dtypes import numpy_dtypes
from einmpi.graph.einsum import EinSum, einsum_type
from einmpi.graph.scalar import Arg, Call, Const, Index, Scalar
from einmpi.kernels import lowering
from einmpi.kernels import lowering as contraction_split
from einmpi.kernels.contraction import recognise_contraction
from einmpi.kernels.cpu import blas
from einmpi.kernels.cpu import prepared_products as temporaries
from einmpi.kernels.cpu.blas import compute_by_blas, workspace_bytes
from einmpi.kernels.cpu.prepared_products import prepare_by_blas, temporary_arrays
from einmpi.kernels.prepared import NumpyCall, address_of
from einmpi.kernels.reference import evaluate_einsum

PRODUCT = Call("*", (Arg(0), Arg(1)))


def einsum_of(subscripts: str, function: Scalar | None = None, **extents: int) -> EinSum:
    """Return an EinSum from numpy's notation; labels without a given extent have extent 4."""
    inputs, output = subscripts.split("->")
    operands = tuple(tuple(index) for index in inputs.split(","))
    summed = tuple(dict.fromkeys(x for x in inputs.replace(",", "") if x not in output))
    function = function or (PRODUCT if len(operands) == 2 else Arg(0))
    sizes = tuple((label, extents.get(label, 4)) for label in (*output, *summed))
    return EinSum(tuple(output), operands, function, "sum" if summed else None, summed, sizes)


def arrays_of(einsum, dtypes):
    """Return random operands; integers are small, so that int32 products do not overflow."""
    random, arrays = np.random.default_rng(0), []
    for index, dtype in zip(einsum.operands, dtypes, strict=True):
        real, imaginary = random.standard_normal((2, *(einsum.extent[label] for label in index)))
        values = {
            "b": real > 0,
            "i": np.trunc(3 * real),
            "u": np.trunc(3 * abs(real)),
            "c": real + 1j * imaginary,
        }
        arrays.append(np.asarray(values.get(np.dtype(dtype).kind, real)).astype(dtype))
    return arrays


def check(einsum, arrays, out=None, scale=1):
    """Assert that a contraction agrees with the reference, up to rounding; return its result."""
    dtype = einsum_type(einsum, [array.dtype for array in arrays])
    out = np.full(einsum.bound, 77).astype(dtype) if out is None else out
    contraction = recognise_contraction(einsum)
    compute_by_blas(contraction, arrays, out)
    expected = evaluate_einsum(einsum, arrays, dtype.name)
    if dtype.kind in "biu":
        np.testing.assert_array_equal(out, expected)
        return out
    # Every product and every sum rounds, complex ones four times. The reference takes a constant
    # beside a float32 as float32 even if the result is wider, and rounds products of float16 to
    # float16, where the contraction rounds only their sum.
    narrow = [array.dtype for array in arrays if array.dtype.kind in "fc" and scale != 1]
    eps = max(float(np.finfo(kind).eps) for kind in (dtype, *narrow))
    terms = prod(einsum.extent[label] for label in einsum.aggregated)
    bound = eps * (4 * terms + 8) * abs(scale) * absolute(einsum, arrays)
    bound += float(np.finfo(dtype).smallest_subnormal) * terms
    assert (np.abs(out - expected) <= bound).all(), (
        f"{einsum} of {[array.dtype.name for array in arrays]}"
    )
    return out


def check_prepared_call(einsum, arrays, out):
    """Assert that a prepared call has the results of a contraction, which are in `out`."""
    expected = out.copy()
    out[...] = np.asarray(77).astype(out.dtype)
    prepare_by_blas(recognise_contraction(einsum), arrays, out)(arrays, out)
    np.testing.assert_array_equal(out, expected)


def absolute(einsum, arrays):
    """Return the sum of the absolute values of the products, without the constants."""
    factors = tuple(Arg(position) for position in leaves(einsum.function))
    function = Call("*", factors) if len(factors) == 2 else factors[0]
    return evaluate_einsum(
        replace(einsum, function=function),
        [np.abs(array.astype(complex)) for array in arrays],
        "float64",
    )


def leaves(node):
    return (
        [node.position]
        if isinstance(node, Arg)
        else [x for arg in getattr(node, "args", ()) for x in leaves(arg)]
    )


@st.composite
def contractions(draw):
    """Draw an EinSum that is a contraction, and the product of its constants."""
    labels = "abcdef"[: draw(st.integers(1, 6))]
    sizes = draw(st.sampled_from([[2, 3, 4], [2, 3, 5, 1, 1, 0]]))
    extent = {label: draw(st.sampled_from(sizes)) for label in labels}
    count = draw(st.sampled_from([2, 2, 2, 1]))
    operands = tuple(
        tuple(draw(st.lists(st.sampled_from(labels), max_size=4))) for _ in range(count)
    )
    output = tuple(draw(st.lists(st.sampled_from(labels), max_size=4, unique=True)))
    used = [label for index in operands for label in index]
    summed = tuple(x for x in labels if x not in output and (x in used or draw(st.booleans())))
    scale, factors = 1, []
    for k in draw(st.sampled_from([(0, 1), (1, 0)] if count == 2 else [(0,), (0, 0)])):
        factor: Scalar = Call("conj", (Arg(k),)) if draw(st.booleans()) else Arg(k)
        if draw(st.integers(0, 3)) == 0:
            value = draw(st.sampled_from([2, -3, 0.5, 1 + 2j, True, 1e-3, 0]))
            factor, scale = Call("*", (Const(value), factor)), scale * value
        factors.append(factor)
    function = Call("*", tuple(factors)) if len(factors) == 2 else factors[0]
    if draw(st.integers(0, 5)) == 0:
        function = Call("conj", (function,))
    extents = tuple((label, extent[label]) for label in (*output, *summed))
    return EinSum(output, operands, function, "sum" if summed else None, summed, extents), scale


@st.composite
def views(draw, array):
    """Draw a view with the same values: permuted, with gaps, or reversed; and all of its memory."""
    order = draw(st.permutations(range(array.ndim)))
    steps = [draw(st.sampled_from([1, 1, 1, 2, -1, -2])) for _ in order]
    shape = [array.shape[axis] * abs(step) for axis, step in zip(order, steps, strict=True)]
    memory = np.full(shape, 55).astype(array.dtype)
    view = memory[(..., *(slice(None, None, step) for step in steps))].transpose(np.argsort(order))
    view[...] = array
    return view, memory


@settings(settled(70), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(contractions(), st.data())
def random_contractions(case, data):
    einsum, scale = case
    assume(recognise_contraction(einsum) is not None)
    arrays = []
    for array in arrays_of(
        einsum,
        [data.draw(st.sampled_from(["complex128", *numpy_dtypes()])) for _ in einsum.operands],
    ):
        arrays.append(data.draw(views(array))[0])
        arrays[-1].flags.writeable = data.draw(st.booleans())
    try:
        dtype = einsum_type(einsum, [array.dtype for array in arrays])
    except TypeError:
        assume(False)
    said = workspace_bytes(
        recognise_contraction(einsum), [array.dtype.name for array in arrays], dtype.name
    )
    assert said <= max(contraction_split.MAX_TEMPORARY_BYTES, 1024)
    out, memory = data.draw(views(np.full(einsum.bound, 77).astype(dtype)))
    check(einsum, arrays, out, scale)
    check_prepared_call(einsum, arrays, out)
    out[...] = np.asarray(55).astype(dtype)
    assert (memory == np.asarray(55).astype(dtype)).all(), "written beside the output"


@pytest.fixture(autouse=True)
def empty_cache():
    kept(lowering.cheapest_lowering).clear()


def set_constants(monkeypatch, values):
    """Replace cost constants and limits, so that other lowerings win."""
    for name, value in values.items():
        module = contraction_split if hasattr(contraction_split, name) else lowering
        monkeypatch.setattr(module, name, value)


CONSTANTS = {
    "measured": {},
    "BLAS": {"DIRECT_NS": 1e9},
    "BLAS and loops": {"DIRECT_NS": 1e9, "COPY_NS": 1e6, "TRANSPOSE_NS": 1e6},
    "BLAS in pieces": {"DIRECT_NS": 1e9, "MAX_TEMPORARY_BYTES": 32, "MIN_MATRIX_SIDE": 1},
    "sums of pieces": {"MAX_TEMPORARY_BYTES": 1024, "MIN_MATRIX_SIDE": 1000},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("belief", CONSTANTS)
def test_random(belief, monkeypatch):
    set_constants(monkeypatch, CONSTANTS[belief])
    random_contractions()


LARGE = {"b": 3, "h": 3, "i": 30, "j": 32, "k": 34, "l": 4, "m": 36, "s": 38, "t": 40, "d": 32}
# The kernel, how many copies it needs of the operands and the output, and the subscripts.
NAMED = {
    ("matmul", 0): (
        "ij,jk->ik ji,jk->ik ij,kj->ki ji,kj->ki ijb,jbk->ik abij,ijkl->abkl bij,bjk->bik "
        "hij,jk->hki bshd,bthd->bhst bhst,bthd->bshd ij,j->i ij,i->j i,ij->j bij,bj->bi "
        "ijb,ijb-> ijlt,jltm->mi iij,jk->ik"
    ),
    ("matmul", 1): "ijlt,jmtl->im itj,tmjk->imk",
    ("einsum", 0): "ts,ts->s ijb,jb->ib",
    ("einsum", 1): "ijk,jk->",
    ("multiply", 0): "i,j->ij bi,bj->jib",
    ("reduce", 1): "ij->i ij-> ijk->ki iij->j",
}


@pytest.fixture
def filled(monkeypatch):
    """Record every copy from one array to another."""
    calls = []
    copy = blas._call_copy

    def recorded(*parts):
        calls.append(parts)
        return copy(*parts)

    monkeypatch.setattr(blas, "_call_copy", recorded)
    return calls


@pytest.mark.parametrize(
    "kernel, copies, subscripts", [(*key, x) for key, text in NAMED.items() for x in text.split()]
)
def test_copies(kernel, copies, subscripts, filled, monkeypatch):
    kernels = []
    product = blas._call_product

    def recorded(lowering, *parts):
        kernels.append(lowering.kernel)
        return product(lowering, *parts)

    monkeypatch.setattr(blas, "_call_product", recorded)
    einsum = einsum_of(subscripts, **LARGE)
    check(einsum, arrays_of(einsum, ["float64"] * len(einsum.operands)))
    assert (kernels, len(filled)) == ([kernel], copies)


@pytest.mark.parametrize("subscripts", " ".join(NAMED.values()).split())
@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "complex64", "complex128", "int32", "int64", "bool"]
)
def test_dtypes(subscripts, dtype):
    einsum = einsum_of(subscripts, **{label: extent // 5 + 1 for label, extent in LARGE.items()})
    arrays = arrays_of(einsum, [dtype] * len(einsum.operands))
    check_prepared_call(einsum, arrays, check(einsum, arrays))


def test_no_copy_of_an_operand_for_views_that_BLAS_takes(filled):
    random = np.random.default_rng(0)
    a, b, out = (
        random.random((50, 90))[:, 20:80],
        random.random((70, 120))[:, ::2].copy().T,
        np.zeros((100, 100)),
    )
    einsum = einsum_of("ij,jk->ki", i=50, j=60, k=70)
    check(einsum, [a, b], out[20:90, 10:60])
    assert not filled
    check(einsum, [a[:, ::-1], b], out[20:90, 10:60])  # BLAS knows no negative strides
    assert len(filled) == 1
    check(einsum, [a, b], out[20:90, :100:2])
    assert len(filled) == 2


def test_constants_go_to_what_is_small(filled):
    function = Call("*", (Const(3), PRODUCT))
    einsum = einsum_of("ij,jk->ik", function, i=1000, j=4, k=300)
    arrays = arrays_of(einsum, ["float64", "float64"])
    check(einsum, arrays, scale=3)
    assert [parts[0][0].size for parts in filled] == [1200]
    einsum = einsum_of("ij,jk->ik", function, i=30, j=400, k=300)
    check(einsum, arrays_of(einsum, ["float64", "float64"]), scale=3)
    assert len(filled) == 1


def test_integers_are_exact_and_wrap_around():
    einsum = einsum_of("ij,jk->ik", i=30, j=40, k=50)
    near = 2**53 // 40
    for value in (
        1,
        2**20,
        near,
        near + 1,
        2**62 + 1,
        -(2**63),
    ):  # BLAS while 40 products stay below 2⁵³
        a, b = np.full((30, 40), value), np.ones((40, 50), np.int64)
        a[::2] //= 2
        check(einsum, [a, b])
    scaled = einsum_of("ij,jk->ik", Call("*", (Const(2**62 + 3), PRODUCT)), i=30, j=40, k=50)
    check(scaled, arrays_of(scaled, ["int64", "int64"]))


def test_accumulates_in_a_wider_dtype():
    out, many = np.zeros((), np.int64), np.full(10, 46340, np.int32)
    compute_by_blas(
        recognise_contraction(einsum_of("i,i->", i=10)), [many, many], out
    )  # each square is below 2³¹, their sum is not
    assert out == 10 * 46340**2
    compute_by_blas(recognise_contraction(einsum_of("i->", i=10)), [many * 46340], out)
    assert out == 10 * 46340**2
    ones = np.ones((20, 4000), np.float16)
    assert (check(einsum_of("ij,jk->ik", i=20, j=4000, k=20), [ones, ones.T]) == 4000).all()
    assert (check(einsum_of("ij->i", i=20, j=4000), [ones]) == 4000).all()


def test_no_contraction():
    inf, label, plus = Const(float("inf")), Index("i"), Call("+", (Arg(0), Arg(1)))
    products = [Call("*", (PRODUCT, factor)) for factor in (inf, label, Arg(1), plus)]
    gather = EinSum(("i",), (("i",), (Arg(0), "j")), Arg(1), "sum", ("j",), (("i", 3), ("j", 3)))
    most = replace(einsum_of("ij,jk->ik"), aggregation="max")
    others = [
        einsum_of("ij->i", Call("exp", (Arg(0),))),
        *map(einsum_of, ("ij,ij->ij", "ij,j->ij", "ij->ji")),
    ]
    for einsum in (*(einsum_of("ij,jk->ik", x) for x in (*products, plus)), gather, most, *others):
        assert recognise_contraction(einsum) is None, str(einsum)


SMALL = {"MAX_TEMPORARY_BYTES": 2**17, "MIN_MATRIX_SIDE": 16}
MEMORY = [
    ("ij,jk->ik", "float64 float64", {}),
    ("ijlt,jmtl->im", "float64 float64", {}),
    ("itj,tmjk->imk", "complex64 complex64", {}),
    ("ijt,jkm->ik", "float64 float64", {}),
    ("ij,jk->ik", "float16 float16", SMALL),
    ("ij,jk->ik", "int32 int64", {}),
    ("bij,bkj->bki", "float32 float64", SMALL),
    ("ijlt,jmtl->im", "float64 float64", SMALL),
    ("ltij,mjtl->mi", "complex128 float32", SMALL),
    ("mijk,tkji->mt", "float16 float16", SMALL),  # the sums are cut: there is nothing else
    ("mijk,tkji->mt", "int32 int64", SMALL),
    ("tijk,ijk->", "float32 float32", SMALL),
    ("jik,mk->jmi", "float32 float64", SMALL),
    ("ijk->ki", "float16", SMALL),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("subscripts, dtypes, limits", MEMORY)
def test_workspace(subscripts, dtypes, limits, monkeypatch):
    """The bytes announced are those allocated, except for numpy's buffers and small objects."""
    set_constants(monkeypatch, limits)
    dtypes = dtypes.split()
    extents = {"i": 60, "j": 60, "k": 50} if "ijk" in subscripts else {}
    einsum = einsum_of(
        subscripts, **{"i": 150, "j": 160, "k": 170, "m": 10, "b": 8, "t": 7, "l": 8, **extents}
    )
    arrays = arrays_of(einsum, dtypes)
    out = np.empty(einsum.bound, einsum_type(einsum, [np.dtype(dtype) for dtype in dtypes]))
    said = workspace_bytes(recognise_contraction(einsum), dtypes, out.dtype.name)
    peak = peak_of(einsum, arrays, out)
    assert said <= peak < said + 600_000  # a piece is described in 400 bytes
    assert said <= limits.get("MAX_TEMPORARY_BYTES", peak)
    if limits:
        check(einsum, arrays)


def peak_of(einsum, arrays, out):
    """Return the peak of what a contraction allocates, once its lowerings are cached."""
    contraction = recognise_contraction(einsum)
    compute_by_blas(contraction, arrays, out)
    tracemalloc.start()
    compute_by_blas(contraction, arrays, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


# Each needs copies: of a factor, of both and the output, of a conjugated one, of one to scale.
WITH_COPIES = {
    "klcd,acik->ldai": PRODUCT,
    "kbcj,acik->abij": PRODUCT,
    "ij,jk->ki": Call("*", (Call("conj", (Arg(0),)), Arg(1))),
    "jil,kj->lik": Call("*", (Const(2.5), PRODUCT)),
}


@pytest.mark.parametrize("subscripts", WITH_COPIES)
def test_prepared_copies_belong_to_no_arrays(subscripts):
    """A call that is prepared with one array for both operands computes with others, too."""
    einsum = einsum_of(subscripts, WITH_COPIES[subscripts], **dict.fromkeys("abcdijkl", 12))
    dtypes = ["complex128" if "conj" in str(einsum.function) else "float64"] * 2
    same = len(einsum.operands[0]) == len(einsum.operands[1])
    arrays = arrays_of(einsum, dtypes)
    out = np.empty(einsum.bound, dtypes[0])
    prepared = prepare_by_blas(
        recognise_contraction(einsum), [arrays[0]] * 2 if same else arrays, out
    )
    assert isinstance(prepared, NumpyCall)  # nothing is chosen again
    for factor in (1, -3):
        scaled = [factor * array for array in arrays]
        prepared(scaled, out)
        np.testing.assert_allclose(out, evaluate_einsum(einsum, scaled, dtypes[0]), 1e-12, 1e-12)
        bound = np.empty_like(out)
        prepared.bind(scaled, bound)()
        np.testing.assert_array_equal(bound, out)


def test_prepared_copies_take_no_new_memory():
    einsum = einsum_of("kbcj,acik->abij", **dict.fromkeys("abcijk", 12))
    arrays = arrays_of(einsum, ["float64"] * 2)
    out = np.empty(einsum.bound)
    prepared = prepare_by_blas(recognise_contraction(einsum), arrays, out)
    prepared(arrays, out)
    tracemalloc.start()
    prepared(arrays, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < min(array.nbytes for array in arrays) // 8


def test_prepared_copies_on_many_threads():
    einsum = einsum_of("kbcj,acik->abij", **dict.fromkeys("abcijk", 12))
    arrays = arrays_of(einsum, ["float64"] * 2)
    out = np.empty(einsum.bound)
    prepared = prepare_by_blas(recognise_contraction(einsum), arrays, out)
    expected = evaluate_einsum(einsum, arrays, "float64")

    def compute(factor):
        own = np.empty_like(out)
        prepared([factor * arrays[0], arrays[1]], own)
        return own / factor

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(compute, range(1, 41)):
            np.testing.assert_allclose(found, expected, 1e-12, 1e-11)


def test_temporary_arrays():
    shapes = [(3, 5), (), (7,)]
    first = temporary_arrays(shapes, np.dtype("float64"))
    for number, (array, shape) in enumerate(zip(first, shapes, strict=True)):
        assert array.shape == shape and array.dtype == "float64"
        assert address_of(array) % 64 == 0
        array[...] = number
    assert [float(array.max()) for array in first] == [0, 1, 2]  # they do not overlap
    again = temporary_arrays(shapes[:2], np.dtype("complex64"))
    assert address_of(again[0]) == address_of(first[0])
    large = temporary_arrays([(temporaries.MOST_KEPT_BYTES,)], np.dtype("float64"))
    del large
    assert address_of(temporary_arrays([(8,)], np.dtype("uint8"))[0]) == address_of(first[0])


ODD = {
    "backwards": lambda x: x[::-1, ::-1],
    "swapped bytes": lambda x: x.astype(x.dtype.newbyteorder()),
    "unaligned": lambda x: (
        np.frombuffer(bytearray(b"." + x.tobytes()), np.int8)[1:].view(x.dtype).reshape(x.shape)
    ),
}


@pytest.mark.parametrize("layout", ODD)
def test_workspace_of_what_BLAS_does_not_take(layout, monkeypatch):
    """numpy would silently copy all of it."""
    set_constants(monkeypatch, SMALL)
    einsum = einsum_of("ij,jk->ik", i=300, j=310, k=320)
    arrays = [ODD[layout](array) for array in arrays_of(einsum, ["float64", "float64"])]
    check(einsum, arrays)
    assert peak_of(einsum, arrays, np.empty(einsum.bound)) < SMALL["MAX_TEMPORARY_BYTES"] + 100_000


@pytest.mark.slow
def test_workspace_of_large_operands():
    """At most 64 MiB, as documented, for operands of 256 MiB in an unfavourable layout."""
    for subscripts, extents in (
        ("ij,kj->ik", {"i": 4096, "j": 8192, "k": 64}),
        ("ijk,kij->", {"k": 128}),
        ("aijk,bkji->ab", {"a": 16, "b": 16, "i": 64, "j": 64, "k": 256}),
    ):
        einsum = einsum_of(subscripts, **{"i": 512, "j": 512, **extents})
        arrays = [
            np.ones([einsum.extent[x] for x in index])[(..., slice(None, None, -1))]
            for index in einsum.operands
        ]
        assert peak_of(einsum, arrays, np.empty(einsum.bound)) < 64 * 2**20


def test_same_bits():
    einsum = einsum_of("ijlt,jmtl->im", i=20, j=30, m=40, l=8, t=9)
    arrays = arrays_of(einsum, ["float32", "float32"])
    assert len({check(einsum, [array.copy() for array in arrays]).tobytes() for _ in range(5)}) == 1


def test_same_lowering_for_every_hash_seed():
    code = (
        "from einmpi.kernels.contraction import Contraction;"
        "from einmpi.kernels.lowering import StoredArray, cheapest_lowering;"
        "indices = tuple(map(tuple, ('aibjc', 'jbkcl', 'kail')));"
        "c = Contraction((0, 1), (False, False), indices, tuple((x, 9) for x in 'aibjckl'), 1);"
        "s = tuple(tuple(8 * 9**k for k in range(len(index))) for index in indices);"
        "print([cheapest_lowering(c, tuple(StoredArray(d, x) for x in s), d)"
        " for d in ('float64', 'int64')])"
    )
    shown = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(shown) == 1
