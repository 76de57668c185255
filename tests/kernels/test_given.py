"""Arrays of any kind, wherever arrays are given: values are taken, what means more is refused."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from refusals import error

import einmpi
import einmpi.array_api as xp
from einmpi.comm.threads import run_threads

VALUES = np.array([1.0, 2.0, 3.0])
MASKED = np.ma.masked_equal(VALUES, 1.0)


class OnlyDLPack:
    """An array of a library that speaks nothing else, such as torch's on the CPU."""

    def __init__(self, values):
        self.values = values

    @property
    def __cuda_array_interface__(self):
        raise AttributeError("it is not on a GPU")

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


class Tracked(OnlyDLPack):
    """One that does not give its values away, as tensors of torch that need a gradient."""

    def __dlpack__(self, **options):
        raise BufferError("use detach()")


class Series:
    """A column of pandas (`isna`), polars (`null_count`) or any other library."""

    __pandas_priority__ = 3000

    def __init__(self, values, dtype=None):
        self.values = np.asarray(values)
        self.shape = self.values.shape
        self.dtype = dtype or self.values.dtype
        self.missing = np.isnan(self.values)

    def __array_ufunc__(self, *arguments, **options):
        return NotImplemented

    def __array__(self, dtype=None, copy=None):
        return self.to_numpy()

    def to_numpy(self):
        return self.values

    def isna(self):
        return self.missing


class PolarsSeries(Series):
    def null_count(self):
        return int(self.missing.sum())


class ArrowArray(Series):
    @property
    def null_count(self):
        return int(self.missing.sum())


class DataFrame(Series):
    columns = ("a", "b")


class Interchanged:
    def __dataframe__(self):
        raise AssertionError("nobody asks")


class Quantity(np.ndarray):
    """As of astropy; those of unyt have `units`, set for each array."""

    @property
    def unit(self):
        return "m"


class WithUnits:
    """As of pint, no array of numpy."""

    units = "m"


def with_units_of_its_own():
    array = VALUES.view(type("unyt_array", (np.ndarray,), {}))
    array.units = "m"
    return array


# Where a vector of three numbers can be given, and what comes of it as an array.
JOB = einmpi.program("y[i] = X[i] * 1", X=(3,))
FIRST = einmpi.DistArray.from_global(np.arange(3.0))


def assigned(value):
    target = FIRST.copy()
    target[:] = value
    return target


def added_in_place(value):
    target = FIRST.copy()
    target += value
    return target


PLACES = {
    "run": lambda given: einmpi.run(JOB, {"X": given})["y"],
    "text": lambda given: einmpi.run("y[i] = X[i] * 1", X=given)["y"],
    "compiled": lambda given: einmpi.compile(JOB)(X=given)["y"],
    "reference": lambda given: einmpi.reference(JOB, {"X": given})["y"],
    "program": lambda given: einmpi.run(einmpi.program("y[i] = X[i] * 1", X=given), {"X": given})[
        "y"
    ],
    "einsum": lambda given: einmpi.einsum("i->i", given),
    "from_global": einmpi.DistArray.from_global,
    "from_local": einmpi.DistArray.from_local,
    "asarray": xp.asarray,
    "from_dlpack": xp.from_dlpack,
    "assignment": assigned,
    "+": lambda given: FIRST + given - FIRST,
    "+=": lambda given: added_in_place(given) - FIRST,
    "left of +": lambda given: given + FIRST - FIRST,
    "where": lambda given: np.where(FIRST < 9, given, FIRST),
    "@": lambda given: np.eye(3) @ (FIRST * 0 + given),
    "concatenate": lambda given: np.concatenate([FIRST, given])[3:],
}
NOT_LEFT = {"left of +"}  # the other type must know what to do with what it does not know
TAKEN = {
    "list": [1.0, 2.0, 3.0],
    "subclass": VALUES.view(type("Own", (np.ndarray,), {})),
    "nothing masked": np.ma.array(VALUES),
    "DLPack": OnlyDLPack(VALUES),
    "JAX": jnp.array(VALUES, "float32"),
    "JAX bfloat16": jnp.array(VALUES, "bfloat16"),
    "pandas": Series(VALUES),
    "pandas with a mask": Series(VALUES, "Float64"),
    "polars": PolarsSeries(VALUES, "Float64"),
    "pyarrow": ArrowArray(VALUES, "double"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", TAKEN)
def test_taken(kind, place):
    given = TAKEN[kind]
    if place in NOT_LEFT and not kind.startswith(("list", "sub", "JAX")):
        pytest.skip("its type has no + here")
    if place == "program" and kind in ("list", "DLPack"):
        pytest.skip("it has no shape and dtype, so it is no array")
    result = PLACES[place](given)
    if isinstance(result, einmpi.DistArray):
        assert type(result.local) is np.ndarray
        result = result.gather()
    assert type(result) is np.ndarray
    np.testing.assert_array_equal(result, VALUES)


ALONE = "expected an array of numbers alone; "
UNITS = "give its numbers in a unit that you choose, .to_value(UNIT)"
COLUMNS = "give its columns one by one, or all of them with .to_numpy()"
FILLED = "replace them by fillna(VALUE), fill_null(VALUE)"
NAN = [1.0, np.nan, 3.0]
MASK = "fill masked elements with filled(VALUE), or use where() with the mask as an input"
REFUSED = {
    "masked": (MASKED, f"a masked array, MaskedArray; {ALONE}{MASK}"),
    "all masked": (np.ma.masked, f"a masked array, MaskedConstant; {ALONE}{MASK}"),
    "in a list": ([MASKED[0:1], MASKED[1:2]], f"a masked array, MaskedArray; {ALONE}{MASK}"),
    "astropy": (VALUES.view(Quantity), f"an array with units, Quantity; {ALONE}{UNITS}"),
    "unyt": (with_units_of_its_own(), f"an array with units, unyt_array; {ALONE}{UNITS}"),
    "pint": (WithUnits(), f"an array with units, WithUnits; {ALONE}{UNITS}"),
    "sparse": (
        scipy.sparse.coo_array(VALUES),
        f"a sparse array, coo_array; {ALONE}convert it with .toarray()",
    ),
    "pandas": (Series(NAN, "Int64"), f"a column with missing values, Series; {ALONE}{FILLED}"),
    "polars": (PolarsSeries(NAN), f"a column with missing values, PolarsSeries; {ALONE}{FILLED}"),
    "pyarrow": (ArrowArray(NAN), f"a column with missing values, ArrowArray; {ALONE}{FILLED}"),
    "table": (DataFrame(VALUES), f"a table, DataFrame; {ALONE}{COLUMNS}"),
    "another table": (Interchanged(), f"a table, Interchanged; {ALONE}{COLUMNS}"),
    "gradient": (Tracked(VALUES), "not an array: use detach(); expected an array of numbers"),
}
# Those that numpy or the other type would answer for, and a shape in place of an array.
UNASKED = {"left of +", "@"}
BY_SHAPE = {"in a list", "pint", "another table", "gradient"}
TAKES_SPARSE = {"+", "compiled", "einsum", "program", "reference", "run", "text", "where"}


@pytest.mark.parametrize("place", sorted({*PLACES} - UNASKED))
@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind, place):
    given, end = REFUSED[kind]
    if place == "program" and kind in BY_SHAPE:
        pytest.skip("it has no shape and dtype, so it is no array")
    if place in TAKES_SPARSE and kind == "sparse":
        pytest.skip("it is an input, as tests/sparse shows")
    if place in ("+", "+=") and kind in ("sparse", "pint", "another table"):
        with pytest.raises((TypeError, ValueError)):
            PLACES[place](given)
        return
    assert error(PLACES[place], given).endswith(f" is {end}")


def test_nan_is_a_value_of_a_column():
    np.testing.assert_array_equal(einmpi.einsum("i->i", Series(NAN)), NAN)


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_matrices_multiply_by_elements():
    matrix = np.matrix([[1.0, 2.0], [3.0, 4.0]])
    x = einmpi.DistArray.from_global(matrix)
    assert type(x.local) is np.ndarray
    for product in (x * matrix, matrix * x):
        np.testing.assert_array_equal(product.gather(), np.asarray(matrix) ** 2)
    found = einmpi.run("y[j] = sum[i](X[i,j])", X=matrix)["y"].gather()
    np.testing.assert_array_equal(found, [4.0, 6.0])


def test_memory_maps_are_arrays(tmp_path):
    mapped = np.memmap(tmp_path / "x", "float64", "w+", shape=(3,))
    mapped[:] = VALUES
    for place in PLACES.values():
        np.testing.assert_array_equal(place(mapped), VALUES)


def test_bfloat16_of_torch(monkeypatch):
    class Tensor(OnlyDLPack):
        dtype = "torch.bfloat16"
        requires_grad = False

        def view(self, dtype):
            return OnlyDLPack(self.values.view(dtype))

    monkeypatch.setitem(sys.modules, "torch", np)
    found = einmpi.einsum("i->i", Tensor(VALUES.astype("bfloat16")))
    assert found.dtype.name == "bfloat16"
    np.testing.assert_array_equal(found.astype(float), VALUES)


@pytest.mark.parametrize("dtype", [object, "U3", "datetime64[s]", "i4,f8"])
def test_other_dtypes(dtype):
    # Elements move as bytes: those of objects would be addresses of nothing.
    values = np.zeros(3, dtype)
    shown = "its dtype would be"
    for place in (einmpi.DistArray.from_global, einmpi.DistArray.from_local, xp.asarray):
        assert shown in error(place, values)
    if dtype is object:
        assert shown in error(FIRST.astype, dtype)
        assert shown in error(lambda: FIRST + values)


def test_on_two_ranks():
    def work(comm):
        whole = einmpi.DistArray.from_global(OnlyDLPack(np.arange(4.0)), comm)
        # Blocks in another byte order, of a library other than numpy.
        blocks = einmpi.DistArray.from_local(whole.local.astype(">f8"), comm=comm)
        step = einmpi.compile(einmpi.program("y[i] = X[i] + 1", X=(4,)), comm=comm)
        results = [step(X=OnlyDLPack(np.arange(4.0)))["y"] for _ in range(3)]
        refused = ""
        if comm.rank == 1:  # a rank alone has a wrong input: all of them say so
            refused = error(step, {"X": MASKED})
        else:
            refused = error(step, {"X": np.arange(4.0)})
        sums = whole + Series(np.ones(4)) + blocks
        return [array.gather() for array in (*results, sums)], refused

    for found, refused in run_threads(2, work):
        for result in found[:3]:
            np.testing.assert_array_equal(result, np.arange(4.0) + 1)
        np.testing.assert_array_equal(found[3], 2 * np.arange(4.0) + 1)
        assert "X is a masked array" in refused


def test_calls_with_other_arrays_are_prepared():
    step = einmpi.compile(JOB)
    for _ in range(3):
        step(X=OnlyDLPack(VALUES))
    (known,) = step.known_calls.calls.values()
    assert known.prepared is not None


def test_pandas_itself():
    pandas = pytest.importorskip("pandas")
    for given in (
        pandas.Series(VALUES),
        pandas.Index(VALUES),
        pandas.Series([1, 2, 3], dtype="Int64"),
    ):
        for name, place in PLACES.items():
            if name not in NOT_LEFT:
                np.testing.assert_array_equal(place(given), VALUES)
    assert "a table" in error(einmpi.run, JOB, {"X": pandas.DataFrame({"a": VALUES})})
