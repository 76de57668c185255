"""Operators, ufuncs and functions of numpy on DistArrays, compared with numpy on whole arrays."""

import numpy as np
import pytest
from array_cases import CASES, inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from refusals import error

from einmpi import DistArray
from einmpi.comm.threads import run_threads
from einmpi.graph.dtypes import numpy_dtypes
from einmpi.planner.mesh import Mesh
from einmpi.schedule.layout import Layout


def assert_same(found, expected, name=""):
    expected = np.asarray(expected)
    assert type(found.local) is np.ndarray
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
    whole = found.gather()
    if expected.dtype.kind in "fc":
        np.testing.assert_allclose(whole, expected, rtol=2e-12, atol=1e-12, err_msg=name)
    else:
        np.testing.assert_array_equal(whole, expected, name)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_functions(ranks):
    """Each operand in another layout: by rows, by columns, whole on every rank."""
    arrays = inputs()

    def on_rank(comm):
        cut = {name: DistArray.from_global(array, comm) for name, array in arrays.items()}
        cut["y"] = DistArray.from_global(arrays["y"], comm, parts=(1, 1))
        if ranks in (2, 3):
            cut["y"] = cut["y"].redistribute(Layout(Mesh(2), (6, 8), (1,)))
        for name, function in CASES.items():
            assert_same(function(**cut), function(**arrays), name)

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("shape", [(2, 4), (7, 5)])
def test_few_rows(shape):
    arrays = inputs(*shape)

    def on_rank(comm):
        cut = {name: DistArray.from_global(array, comm) for name, array in arrays.items()}
        for name in ("operators", "argmax", "slices", "mask", "concatenate", "matmul", "column"):
            assert_same(CASES[name](**cut), CASES[name](**arrays), name)

    run_threads(5, on_rank)


def test_arrays_and_numbers_with_distarrays():
    whole = np.arange(12.0, dtype="float32").reshape(3, 4)

    def on_rank(comm):
        x = DistArray.from_global(whole, comm)
        plain = np.linspace(0, 1, 4)
        assert_same(plain + x, plain + whole)
        assert_same(x * 2, whole * 2)  # stays float32
        assert_same(x + np.float64(1), whole + np.float64(1))
        assert_same(np.maximum([1, 2, 3, 4], x), np.maximum([1, 2, 3, 4], whole))
        assert_same(x @ np.ones((4, 2)), whole @ np.ones((4, 2)))

    run_threads(3, on_rank)


def test_aligned_operands_move_nothing():
    def on_rank(comm):
        x = DistArray.from_global(np.ones((6, 4)), comm, parts=(1, 2))
        y = DistArray.from_global(np.ones((6, 4)), comm, parts=(1, 2))
        before = comm.received
        z = np.exp(x * 2 + y) - np.arange(4.0)
        assert comm.received == before
        assert z.layout == x.layout
        assert z.T.layout.cuts == (0,) and comm.received == before

    run_threads(2, on_rank)


def test_a_slice_moves_what_other_ranks_have():
    """The number and the places of the elements that are asked for, and their values."""
    whole = np.arange(16.0)

    def on_rank(comm):
        x = DistArray.from_global(whole, comm)
        before = comm.received
        found = x[1:]
        received = comm.received - before
        assert_same(found, whole[1:])
        return found.region[0], received

    # The first rank has 0 to 7 and needs 1 to 8: one element of the other's.
    (first, received), (second, sent) = run_threads(2, on_rank)
    assert (first, second) == (((0, 8),), ((8, 15),))
    assert (received, sent) == (8, 0)


def test_in_place():
    whole = np.arange(12.0).reshape(3, 4)

    def on_rank(comm):
        x = DistArray.from_global(whole, comm)
        same = x
        x += 1
        x *= DistArray.from_global(whole, comm, parts=(1, 1))
        assert x is same
        assert_same(x, (whole + 1) * whole)
        with pytest.raises(TypeError, match="Cannot cast"):
            counts = DistArray.zeros(3, "int64", comm)
            counts += 0.5

    run_threads(3, on_rank)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_assignment(ranks):
    whole = np.arange(20.0).reshape(5, 4)
    cases = [
        ((slice(1, 4), 2), 7.0),
        ((slice(None, None, -2),), np.arange(12.0).reshape(3, 4)),
        (2, [1, 2, 3, 4]),
        ((Ellipsis, [0, 3]), np.arange(2.0)),
        ((slice(1, 3), None, slice(1, 4)), np.arange(3.0)),
        ((3, slice(2, None)), np.array([[5.0, 6.0]])),
        ((slice(2, 2),), np.ones((0, 4))),
        (([0, -1, 0], [1, 2, 3]), np.arange(3.0)),
        (([[0], [4]], [1, 2]), 9.0),
    ]

    def on_rank(comm):
        for key, value in cases:
            for spread in (False, True):
                expected = whole.copy()
                expected[key] = value
                x = DistArray.from_global(whole, comm)
                x[key] = DistArray.from_global(value, comm) if spread else value
                assert_same(x, expected, str(key))
        square = DistArray.from_global(whole[:4], comm)
        square[...] = square.T
        assert_same(square, whole[:4].T)
        expected = whole.copy()
        expected[whole > 7] = -1
        x = DistArray.from_global(whole, comm)
        x[x > 7] = -1
        assert_same(x, expected)

    run_threads(ranks, on_rank)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    shape=hnp.array_shapes(min_dims=1, max_dims=3, max_side=7),
    ranks=st.sampled_from([1, 2, 3, 4, 6]),
)
def test_any_basic_index(data, shape, ranks):
    key = data.draw(hnp.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
    whole = np.arange(float(np.prod(shape))).reshape(shape)
    run_threads(
        ranks, lambda comm: assert_same(DistArray.from_global(whole, comm)[key], whole[key])
    )


@settings(max_examples=60, deadline=None)
@given(
    shapes=hnp.mutually_broadcastable_shapes(num_shapes=3, max_dims=3, max_side=5),
    ranks=st.sampled_from([1, 2, 3, 4, 6]),
)
def test_any_shapes_that_broadcast(shapes, ranks):
    one, two, three = (
        np.random.default_rng(k).random(s) for k, s in enumerate(shapes.input_shapes)
    )

    def on_rank(comm):
        x, y = DistArray.from_global(one, comm), DistArray.from_global(two, comm)
        assert_same(x + y * three, one + two * three)

    run_threads(ranks, on_rank)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    shape=hnp.array_shapes(min_dims=0, max_dims=3, max_side=6),
    ranks=st.sampled_from([1, 2, 4, 5]),
    data=st.data(),
)
def test_any_aggregation_and_reshape(shape, ranks, data):
    axes = st.integers(-len(shape), len(shape) - 1) if shape else st.none()
    axis = data.draw(st.none() | axes)
    whole = np.random.default_rng(3).integers(-5, 5, shape).astype(float)
    if whole.size > 2:
        whole.reshape(-1)[1] = np.nan

    def on_rank(comm):
        x = DistArray.from_global(whole, comm)
        for name in ("sum", "max", "argmax", "argmin", "all"):
            function = getattr(np, name)
            assert_same(function(x, axis=axis), function(whole, axis=axis), name)
        assert_same(x.reshape(-1), whole.reshape(-1))
        assert_same(x.reshape(*shape[::-1]), whole.reshape(shape[::-1]))

    run_threads(ranks, on_rank)


def test_programs_are_compiled_once():
    def on_rank(comm):
        x = DistArray.from_global(np.ones((6, 4)), comm)
        for _ in range(3):
            x.sum(0)
            x @ x.T
        return len(comm.kept["programs"])

    assert run_threads(2, on_rank) == [2, 2]


def test_the_dtype_of_a_maximum():
    x = DistArray.ones((3, 4))
    assert np.maximum.reduce(x, dtype="float32").dtype == np.float32
    assert np.max(x).dtype == np.float64


def test_what_is_refused():
    x = DistArray.ones((3, 4))
    with pytest.raises(TypeError, match=r"numpy\.unwrap does not take a DistArray; gather\(\)"):
        np.unwrap(x)
    with pytest.raises(ValueError, match="where is given without initial"):
        np.max(x, where=[True] * 4)
    with pytest.raises(TypeError, match=r"numpy\.take of a DistArray does not take mode"):
        np.take(x, [0], mode="wrap")
    with pytest.raises(ValueError, match="vecdot: extents 4 and 1 differ"):
        np.vecdot(x, np.ones(1))
    with pytest.raises(ValueError, match="matmul: extents 1 and 5 differ"):
        x[:, :1] @ np.ones((5, 3))
    with pytest.raises(ValueError, match="matmul: extents 4 and 1 differ"):
        x @ np.ones(1)
    with pytest.raises(ValueError, match="vdot: extents 12 and 1 differ"):
        np.vdot(x, np.ones(1))
    for empty in (np.min, np.max, np.argmin):
        assert "there are no elements along axis 0; expected" in error(empty, x[:0], 0)
    assert np.max(x[:0], axis=1).shape == np.argmin(x[:0], axis=1).shape == (0,)
    with pytest.raises(IndexError, match="index 3 is out of range for a dimension of extent 3"):
        x[3]
    with pytest.raises(IndexError, match="index 5 is out of range for a dimension of extent 4"):
        x[[0, 1], [5, 0]] = 1
    with pytest.raises(IndexError, match="3 indices for a tensor of 2 dimensions"):
        x[0, 0, 0]
    with pytest.raises(IndexError, match="single ellipsis"):
        x[..., ..., 1]
    with pytest.raises(IndexError, match=r"the mask has shape \[4\]; expected"):
        x[np.ones(4, bool)] = 5
    with pytest.raises(ValueError, match=r"could not be broadcast|shape mismatch"):
        x + np.ones(3)
    with pytest.raises(ValueError, match="cannot reshape a tensor of shape"):
        x.reshape(5, 5)
    with pytest.raises(ValueError, match="truth value of a tensor with several elements"):
        bool(x)
    assert x[[]].shape == (0, *x.shape[1:])
    assert error(lambda: x[[0.5]]).startswith("index: list is not supported here")
    masked = np.ma.masked_equal(np.ones(4), 1)
    assert "is a masked array" in error(lambda: np.add(x, [masked]))
    other = run_threads(1, lambda comm: DistArray.ones((3, 4), comm=comm))[0]
    assert "different communicators" in error(lambda: x + other)


def test_formats_and_methods_that_change_an_array():
    whole = np.array([[3.0, 1.0, 2.0], [9.0, 8.0, 7.0], [5.0, 4.0, 6.0]])

    def on_rank(comm):
        x = DistArray.from_global(whole, comm)
        total = x.sum()
        if comm.rank == 0:  # formatting waits for nobody
            assert f"{total:.2f} {total:8.1e}" == "45.00  4.5e+01"
        assert f"{x}" == str(x)
        x.sort()
        np.testing.assert_array_equal(x.gather(), np.sort(whole))
        (places,) = (x[0] > 1).nonzero()
        assert places.tolist() == [1, 2]
        assert x[0].searchsorted([2.5]).tolist() == [2]
        x.fill(4)
        assert x.tolist() == [[4.0] * 3] * 3

    run_threads(3, on_rank)


def test_numpy_chooses_the_same_quantiles_of_a_single_value():
    x = DistArray.from_global(np.array([[2.0]]))
    assert np.median(x).item() == 2.0
    assert np.quantile(x, 0.3, axis=0, keepdims=True).shape == (1, 1)
    assert np.isnan(np.median(x[:0]).item())
    assert np.isnan(np.nanmax(x * np.nan).item())
    counts, edges = np.histogram(x, 2)
    assert counts.tolist() == [0, 1]
    np.testing.assert_array_equal(edges, np.histogram([2.0], 2)[1])


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda x: x + None, "add of a DistArray and NoneType"),
        (lambda x: "a" * x, "multiply of a DistArray and str"),
        (lambda x: np.add.reduceat(x, [0]), "add.reduceat does not take a DistArray"),
        (lambda x: np.exp(x, where=[True]), "exp of a DistArray does not take where"),
        (lambda x: np.add(np.ones(3), x, out=np.ones(3)), "add of a DistArray cannot be stored in"),
    ],
)
def test_what_ufuncs_refuse(call, says):
    """In one line: not with the elements of the operands."""
    message = error(call, DistArray.from_global(np.arange(3.0)), kind=TypeError)
    assert message.startswith(says)
    assert message.endswith("; expected DistArrays, arrays and numbers")


@pytest.mark.parametrize(
    "call, kind",
    [
        (lambda x: np.quantile(x, 1.5), ValueError),
        (lambda x: np.quantile(x, 0.5, method="nearest"), TypeError),
        (lambda x: np.quantile(x + 1j, 0.5), TypeError),
        (lambda x: np.percentile(x[:0], 50), IndexError),
        (lambda x: np.average(x, weights=x - x), ZeroDivisionError),
        (lambda x: np.average(x, axis=0, weights=[0, 1, -1]), ZeroDivisionError),
        (lambda x: np.linalg.norm(x, "nuc", axis=0), ValueError),
        (lambda x: np.var(x, dtype="int64"), TypeError),
        (lambda x: np.std(x + 1j, dtype="float64"), TypeError),
        (lambda x: np.bincount([0, 1, 2] * x[0].astype(int), weights=1j * x[0]), TypeError),
        (lambda x: np.median(x, axis=(0, 1)), TypeError),
        (lambda x: np.bincount(x), TypeError),
        (lambda x: np.bincount(x[0].astype("int64") - 5), ValueError),
        (lambda x: np.histogram(x, "auto"), TypeError),
        (lambda x: np.average(x, axis=0, weights=[1.0]), TypeError),
        (lambda x: np.pad(x, 1, mode="mean"), TypeError),
        (lambda x: np.pad(x, -1), ValueError),
        (lambda x: np.split(x, 2), ValueError),
        (lambda x: np.rot90(x, axes=(1, 1)), ValueError),
    ],
)
def test_what_statistics_and_joins_refuse(call, kind):
    x = DistArray.from_global(np.arange(9.0).reshape(3, 3))
    with pytest.raises(kind):
        call(x)


# ---- numbers at the ends of their range ---------------------------------------------------------

WEIGHTS = np.arange(1, 13, dtype="float32").reshape(6, 2)
# Functions of a matrix x, and of v, its first column.
STATISTICS = {
    "mean": lambda x, v: np.mean(x, axis=0),
    "mean of all": lambda x, v: x.mean(),
    "var": lambda x, v: np.var(x, axis=1, ddof=1),
    "std": lambda x, v: x.std(),
    "var of one": lambda x, v: np.var(x, ddof=12),
    "nanmean": lambda x, v: np.nanmean(x, axis=0),
    "nanstd": lambda x, v: np.nanstd(x, axis=0),
    "average": lambda x, v: np.average(x),
    "weights": lambda x, v: np.average(x, axis=0, weights=WEIGHTS),
    "own weights": lambda x, v: np.average(x, weights=x),
    "median": lambda x, v: np.median(x, axis=1),
    "norm": lambda x, v: np.linalg.norm(x),
    "norm of rows": lambda x, v: np.linalg.norm(x, axis=1),
    "norms": lambda x, v: np.stack(
        [np.linalg.norm(v, ord) for ord in (0, 1, 2, 3, np.inf, -np.inf, -1)]
    ),
    "vector norm": lambda x, v: np.linalg.vector_norm(x, ord=1, keepdims=True),
    "norm of nothing": lambda x, v: np.linalg.norm(v[:0], np.inf),
    "histogram": lambda x, v: np.histogram(x, 3, weights=x)[0],
    "clip": lambda x, v: np.clip(x, -1, 300),
    "clip below": lambda x, v: np.clip(x, v[:, None], None),
    "products": lambda x, v: np.stack([np.vdot(x, x), np.dot(v, v), np.inner(v, v), v @ v]),
    "vecdot": lambda x, v: np.vecdot(x, v[:, None], axis=0),
    "matmul": lambda x, v: x.T @ x,
    "tensordot": lambda x, v: np.tensordot(x, x, axes=([0], [0])),
    "einsum": lambda x, v: np.einsum("ij,ij->j", x, x),
}
QUANTILES = {
    "a number": lambda x, v: np.quantile(x, 0.3),
    "a list": lambda x, v: np.quantile(x, [0.1, 0.5, 1.0], axis=0),
    "float32": lambda x, v: np.percentile(x, np.float32(30), axis=1),
    "percentile": lambda x, v: np.percentile(x, 75),
    "whole": lambda x, v: np.quantile(x, [0, 1]),
}


def near_the_limits(dtype):
    """Numbers from the upper half of the range of integers, and the least one."""
    rng = np.random.default_rng(5)
    kind = np.dtype(dtype).kind
    if kind in "iu":
        limits = np.iinfo(dtype)
        x = rng.integers(limits.max // 2, limits.max, (6, 2), dtype)
        x[1, 0] = limits.min
        return x
    x = rng.uniform(1, 3, (6, 2))
    return (x > 2 if kind == "b" else x + 1j if kind == "c" else x).astype(dtype)


@pytest.mark.sampled(3, always=["bool", "int8", "int64"])
@pytest.mark.parametrize("dtype", numpy_dtypes())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_statistics_of_every_dtype(dtype):
    """Sums of integers would wrap around. Sums of floats differ by their order."""
    whole = near_the_limits(dtype)
    cases = [(name, whole, function) for name, function in STATISTICS.items()]
    if whole.dtype.kind == "c":
        cases = [case for case in cases if case[0] not in ("histogram", "clip", "clip below")]
    else:
        # numpy's own quantiles of signed integers far apart wrap around, and those of bools fail.
        close = abs(whole // 2) if whole.dtype.kind == "i" else whole
        chosen = ["whole"] if dtype == "bool" else QUANTILES
        cases += [(name, close, QUANTILES[name]) for name in chosen]

    def on_rank(comm):
        for name, array, function in cases:
            expected = np.asarray(function(array, array[:, 0]))
            x = DistArray.from_global(array, comm)
            found = function(x, x[:, 0])
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
            if expected.dtype.kind not in "fc":
                np.testing.assert_array_equal(found.gather(), expected, name)
                continue
            tolerance = 32 * float(np.finfo(expected.dtype).eps)
            np.testing.assert_allclose(
                found.gather(), expected, tolerance, tolerance * abs(expected).max(), err_msg=name
            )

    run_threads(3, on_rank)


def test_quantiles_of_signed_integers_do_not_wrap():
    x = DistArray.from_global(np.array([-128, 127], "int8"))
    assert np.quantile(x, [0.25, 0.5]).tolist() == [-64.25, -0.5]


def test_statistics_of_infinite_numbers():
    with np.errstate(invalid="ignore"):
        x = DistArray.from_global([1.0, np.inf, np.nan, 2.0])
        assert np.isnan(np.nanvar(x).item())
    assert np.quantile(DistArray.from_global([-np.inf, 1.0]), 0.75).item() == -np.inf


@pytest.mark.parametrize("ranks", [1, 3])
def test_numbers_that_a_dtype_does_not_hold(ranks):
    """All ranks refuse them, also those that have none of the elements."""
    refused = [
        ("int64", np.nan, ValueError),
        ("int64", [np.inf], OverflowError),
        ("uint8", 300, OverflowError),
        ("uint8", [-1], OverflowError),
        ("float64", 1j, TypeError),
        ("float64", 10**400, OverflowError),
        ("int64", "a", ValueError),
    ]

    def on_rank(comm):
        for dtype, value, kind in refused:
            for key in (1, slice(0, 2), ..., [0, 1], np.arange(5) < 1):
                x = DistArray.zeros(5, dtype, comm)
                with pytest.raises(kind):
                    x[key] = value
                assert not x.any()
        x = DistArray.zeros(5, "int64", comm)
        for key in (1, slice(0, 2), ...):
            with pytest.raises(ValueError):
                x[key] = np.float64(np.nan)
        x = DistArray.zeros(5, "uint8", comm)
        x[[0, 1]] = np.float64(300)  # beside tables and masks, numbers of numpy are arrays
        x[np.arange(5) == 1] = np.int64(-1)
        assert x.tolist() == [44, 255, 0, 0, 0]
        x[:2] = np.array([300, -1])  # arrays are cast
        x[2:3] = 2.7
        assert x.tolist() == [44, 255, 2, 0, 0]
        with pytest.raises(OverflowError):
            x += 300
        with pytest.raises(OverflowError):
            DistArray.full(5, 300, "uint8", comm)
        with pytest.raises(ValueError, match="broadcast"):
            np.full_like(x, [1, 2])
        for made in (lambda: DistArray.full(5, 2**70, None, comm), lambda: x.astype(object)):
            assert "its dtype would be object" in error(made)

    run_threads(ranks, on_rank)


def test_full_of_a_nan_warns_as_in_numpy():
    with pytest.warns(RuntimeWarning, match="invalid value"):
        DistArray.full(2, np.nan, "int64")
    with pytest.warns(np.exceptions.ComplexWarning):
        assert DistArray.full(2, 1 + 1j, "float64").tolist() == [1, 1]


# ---- results that go into another tensor, and calls with vectors and arrays of numpy ------------

OUT_CASES = {
    "only numbers": lambda D, x: np.add(2, 3, out=x),
    "only arrays": lambda D, x: np.multiply(np.arange(4), [[1], [2], [3]], out=x),
    "a smaller result": lambda D, x: np.exp(D(np.arange(4.0)), out=x),
    "other layouts": lambda D, x: np.subtract(D(np.ones((3, 4)), (1, 1)), x, out=x),
    "cast": lambda D, x: np.add(D(np.arange(4)), 0.75, out=D(np.zeros(4, int)), casting="unsafe"),
    "two": lambda D, x: np.modf(D(np.arange(4) / 4), out=(D(np.zeros(4)), None))[1],
    "into a wider dtype": lambda D, x: np.less(D(np.arange(4)), 2, out=x),
}


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_out(ranks):
    def plain(values, parts=None):
        return np.array(values)

    def on_rank(comm):
        def cut(values, parts=None):
            return DistArray.from_global(values, comm, parts)

        for name, function in OUT_CASES.items():
            expected = np.zeros((3, 4))
            found = cut(expected)
            assert_same(function(cut, found), function(plain, expected), name)
            assert_same(found, expected, name)
        x = cut(np.zeros(4, int))
        with pytest.raises(TypeError, match="Cannot cast"):
            np.add(1, 0.5, out=x)
        with pytest.raises(ValueError, match="does not fit"):
            np.add(cut(np.zeros((2, 4), int)), 1, out=x)
        assert_same(x, np.zeros(4, int))

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("ranks", [1, 3])
def test_negative_powers_of_integers(ranks):
    """All ranks refuse them, also those that have none."""

    def on_rank(comm):
        def cut(values):
            return DistArray.from_global(values, comm)

        x = cut(np.arange(5))
        for exponent in (cut([2, 1, 0, 3, -1]), [2, 1, 0, 3, -1], -1):
            with pytest.raises(ValueError, match="negative integer powers"):
                x**exponent
            with pytest.raises(ValueError, match="negative integer powers"):
                x **= exponent
        assert_same(x, np.arange(5))
        assert_same(x ** cut(np.arange(5)), np.arange(5) ** np.arange(5))
        assert_same([2] ** x, [2] ** np.arange(5))
        assert_same((x + 1.0) ** -1, np.arange(1, 6.0) ** -1)
        assert_same(x[:0] ** -1, np.arange(0) ** -1)

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("ranks", [1, 3])
def test_vectors_numbers_and_arrays_of_numpy(ranks):
    vector = np.array([3, 1, 2], "int16")
    single = np.array([[4, 1, 0], [1, 3, 1], [0, 1, 2]], "float32")

    def on_rank(comm):
        def cut(values):
            return DistArray.from_global(values, comm)

        v = cut(vector)
        assert_same(np.tril(v), np.tril(vector))
        assert_same(np.triu(v, 1), np.triu(vector, 1))
        with pytest.raises(ValueError, match="2 or more dimensions"):
            np.vsplit(v, 3)
        assert_same(np.hstack([cut(5), v]), np.hstack([5, vector]))
        for found, expected in zip(
            np.broadcast_arrays(v, single), np.broadcast_arrays(vector, single), strict=True
        ):
            assert_same(found, expected)
        # Integers are float64 in numpy.linalg, also beside float32; float16 is refused.
        integers = single.astype("int8")
        found = np.linalg.solve(cut(integers), cut(single))
        assert_same(found, np.linalg.solve(integers, single))
        with pytest.raises(TypeError, match="float16"):
            np.linalg.solve(cut(single), cut(single.astype("float16")))
        # Sums of weights have the dtype of the weights; of no elements, there are counts alone.
        weights = np.array([1, 5, 7], "int32")
        expected, _ = np.histogram(vector, 2, weights=weights)
        assert_same(np.histogram(v, 2, weights=weights)[0], expected)
        assert_same(np.sum(v, axis=(), dtype="int8"), np.sum(vector, axis=(), dtype="int8"))
        # What moves nothing is a copy all the same, and an element is cast as arrays are.
        number = cut(300)
        for changed, original in ((np.roll(v, 3), v), (np.pad(number, 0), number)):
            before = original.gather()
            changed[...] = 0
            assert_same(original, before)
        small = cut(np.zeros((), "uint8"))
        small[...] = number
        assert_same(small, np.array(300).astype("uint8"))
        nothing = np.zeros(0, int)
        expected = np.bincount(nothing, weights=np.zeros(0), minlength=3)
        assert_same(np.bincount(cut(nothing), weights=np.zeros(0), minlength=3), expected)

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_refuse_values_that_one_of_them_would(ranks):
    def on_rank(comm):
        exponents = DistArray.from_global(np.array([1, 2, -1]), comm)
        for base in (2, exponents, np.int8(2)):
            with pytest.raises(ValueError, match="negative integer powers"):
                base**exponents
        assert (exponents ** exponents.astype(float)).tolist() == [1, 4, -1]
        matrices = DistArray.from_global(np.stack([np.eye(2), np.ones((2, 2)), np.eye(2)]), comm)
        with pytest.raises(np.linalg.LinAlgError, match="Singular"):
            np.linalg.inv(matrices)

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("ranks", [1, 4])
def test_calls_that_change_nothing_return_copies(ranks):
    def on_rank(comm):
        x = DistArray.from_global(np.arange(6.0).reshape(2, 3), comm)
        number = DistArray.from_global(np.array(1.0), comm)
        copies = [np.roll(x, 2, axis=()), np.pad(x, 0), np.pad(number, 2)]
        before = [copy.gather() for copy in copies]
        x[...] = 7
        number[...] = 7
        for copy, expected in zip(copies, before, strict=True):
            np.testing.assert_array_equal(copy.gather(), expected)
        assert np.quantile(x, [], axis=0).shape == (0, 3)
        assert np.linalg.vector_norm(x, ord=None).item() == np.sqrt(6 * 49)
        with pytest.raises(ValueError, match="axes"):
            np.linalg.norm(x[None], axis=(0, 1, 2))
        with pytest.raises(ValueError, match="number of dimensions"):
            np.concatenate([x, x[0]])

    run_threads(ranks, on_rank)
