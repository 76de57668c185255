"""All dtypes: operators, casts and aggregations against numpy on whole arrays, on several ranks,
in compiled kernels, in files; casts of inputs.
"""

from __future__ import annotations

import itertools
from typing import Any

import h5py
import numpy as np
import pytest
from distributed import run_on_threads
from hypothesis import given
from hypothesis import strategies as st
from in_process import einmpi_here
from mpi_helpers import needs_mpirun, run_mpi
from random_programs import settled

import einmpi
from einmpi.errors import InputError
from einmpi.graph.operations import OPERATIONS
from einmpi.kernels.cpu import compiled, dispatch

SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
WHOLE = (*SIGNED, *UNSIGNED, "bool")
OPERATORS = ("+", "-", "*", "/", "//", "%", "<", "<=", "==", "!=", "|", "&", "^", "<<", ">>")
OPERATORS += ("maximum", "minimum")
FUNCTIONS = ("abs", "sign", "floor", "isnan", "neg", "~", "conj")
AGGREGATIONS = ("sum", "prod", "max", "min", "any", "all")


def numbers(dtype: str, shape: Any, seed: int = 1) -> np.ndarray:
    """Return small numbers and the ends of the range, in random order."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape))
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    limits = np.iinfo(dtype)
    values = rng.integers(limits.min, limits.max, count, dtype=dtype, endpoint=True)
    values[: count // 3] = rng.integers(0, 5, count // 3)
    values[count // 3 : count // 2] = limits.max
    values[count // 2 : 2 * count // 3] = limits.min
    rng.shuffle(values)
    return values.reshape(shape)


def by_numpy(op: str, *arrays: Any) -> np.ndarray | None:
    """Return numpy's result; None if numpy has none."""
    with np.errstate(all="ignore"):
        try:
            return np.asarray(OPERATIONS[op].function(*arrays))
        except TypeError:
            return None


def assert_same(found: np.ndarray, wanted: np.ndarray, message: str) -> None:
    assert found.dtype == wanted.dtype, message
    np.testing.assert_array_equal(found, wanted, err_msg=message)


def check_operation(op: str, text: str, arrays: dict[str, np.ndarray]) -> None:
    wanted = by_numpy(op, *arrays.values())
    if wanted is None:
        with pytest.raises(InputError):
            einmpi.program(text, **arrays)
        return
    message = f"{text} {[array.dtype.name for array in arrays.values()]}"
    job = einmpi.program(text, **arrays)
    assert_same(einmpi.reference(job, arrays)["Z"], wanted, message)
    assert_same(einmpi.run(job, arrays)["Z"].gather(), wanted, message)


# ---- operations ---------------------------------------------------------------------------------


@settled(60)
@given(st.sampled_from(OPERATORS), st.sampled_from(WHOLE), st.sampled_from(WHOLE))
def test_operators(op: str, first: str, second: str) -> None:
    text = f"Z[i] = {op}(x[i], y[i])" if op.isidentifier() else f"Z[i] = x[i] {op} y[i]"
    check_operation(op, text, {"x": numbers(first, 40), "y": numbers(second, 40, seed=2)})


@pytest.mark.parametrize("dtype", WHOLE)
def test_functions_and_casts(dtype: str) -> None:
    x = numbers(dtype, 40)
    for op in FUNCTIONS:
        symbol = {"neg": "-"}.get(op, op)
        check_operation(op, f"Z[i] = {symbol}(x[i])", {"x": x})
    for target in (*WHOLE, "float32", "float64"):
        check_operation(target, f"Z[i] = {target}(x[i])", {"x": x})


@pytest.mark.sampled(4, always=["int8", "bool"])
@pytest.mark.parametrize("dtype", WHOLE)
def test_constants_adapt_and_are_compared_as_they_are(dtype: str) -> None:
    x = numbers(dtype, 40)
    for constant in (-1, 0, 3, 300, 70000, 2**40):
        for op in ("+", "*", "<", ">=", "=="):
            text = f"Z[i] = x[i] {op} {constant}"
            try:
                with np.errstate(all="ignore"):
                    wanted = OPERATIONS[op].function(x, constant)
            except OverflowError:
                with pytest.raises(InputError, match=f"{constant} does not fit into {dtype}"):
                    einmpi.program(text, x=x)
                continue
            job = einmpi.program(text, x=x)
            assert_same(einmpi.run(job, {"x": x})["Z"].gather(), wanted, f"{text} {dtype}")
            assert_same(einmpi.reference(job, {"x": x})["Z"], wanted, f"{text} {dtype}")


@pytest.mark.parametrize("dtype", WHOLE)
def test_casts_of_floats_outside_of_the_range(dtype: str) -> None:
    x = np.array([-1e30, -300.5, -1.5, -0.5, 0.0, 127.9, 256.0, 7e4, 5e9, 1e19, 1e30, np.nan])
    if dtype == "bool":
        wanted = x != 0
    else:
        limits = np.iinfo(dtype)
        exact = [0 if np.isnan(value) else int(value) for value in x]
        wanted = np.array([min(max(value, limits.min), limits.max) for value in exact], dtype)
    job = einmpi.program(f"Z[i] = {dtype}(x[i])", x=x)
    assert_same(einmpi.reference(job, {"x": x})["Z"], wanted, dtype)
    assert_same(einmpi.run(job, {"x": x})["Z"].gather(), wanted, dtype)


SLOW = [pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("int8", "uint16", "uint64")]


@pytest.mark.parametrize("dtype", ["uint8", *SLOW])
def test_compiled_kernels(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation in one kernel, so that few are compiled."""
    monkeypatch.setattr(dispatch, "WORTH_COMPILING", 1)
    x = numbers(dtype, (9, 40))
    y = numbers(dtype, (9, 40), seed=2)
    text = (
        "Z[i,j] = (x[i,j] * y[i,j] - ~x[i,j] // (y[i,j] | 1)) % 7 + abs(y[i,j]) * sign(x[i,j])"
        " + maximum(x[i,j], y[i,j])**3 - where(x[i,j] < y[i,j], -x[i,j], y[i,j] & 3)"
    )
    with np.errstate(all="ignore"):
        product = (x * y - ~x // (y | 1)) % 7 + abs(y) * np.sign(x)
        wanted = product + np.maximum(x, y) ** 3 - np.where(x < y, -x, y & 3)
    before = compiled.STATISTICS.compiled + compiled.STATISTICS.loaded
    job = einmpi.program(text + "; t[j] = min(x[i,j]); s[i] = sum(x[i,j] + y[i,j])", x=x, y=y)
    found = einmpi.run(job, {"x": x, "y": y})
    assert_same(found["Z"].gather(), wanted, text)
    assert_same(found["t"].gather(), x.min(axis=0), "min")
    with np.errstate(all="ignore"):
        assert_same(found["s"].gather(), (x + y).sum(axis=1), "sum")
    assert compiled.STATISTICS.compiled + compiled.STATISTICS.loaded >= before + 2


def test_compiled_comparisons_of_signed_with_unsigned_are_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As floats, 2**53 and 2**53 + 1 are equal."""
    monkeypatch.setattr(dispatch, "WORTH_COMPILING", 1)
    ends = [0, 1, 2**53, 2**53 + 1, 2**63 - 1]
    x, y = np.meshgrid(
        np.array([*ends, 2**63, 2**64 - 1], np.uint64), np.array([*ends, -1, -(2**63)], np.int64)
    )
    statements = []
    wanted = {}
    for number, op in enumerate(("<", "<=", ">", ">=", "==", "!=")):
        compare = OPERATIONS[op].function
        statements.append(f"a{number}[i,j] = int8(x[i,j] {op} y[i,j]) + 2 * (y[i,j] {op} x[i,j])")
        wanted[f"a{number}"] = compare(x, y).astype(np.int8) + 2 * compare(y, x)
        statements.append(f"b{number}[i,j] = where(x[i,j] {op} {2**53}, x[i,j], 7)")
        wanted[f"b{number}"] = np.where(compare(x, 2**53), x, np.uint64(7))
    job = einmpi.program("; ".join(statements), x=x, y=y)
    found = einmpi.run(job, {"x": x, "y": y})
    for name, values in wanted.items():
        assert_same(found[name].gather(), values, name)


# ---- ranks --------------------------------------------------------------------------------------


@settled(12)
@given(
    st.sampled_from(WHOLE),
    st.sampled_from(AGGREGATIONS),
    st.integers(1, 9),
    st.tuples(st.integers(1, 7), st.integers(1, 11)),
)
def test_aggregations_on_ranks(dtype: str, name: str, ranks: int, shape: tuple[int, int]) -> None:
    x = numbers(dtype, shape)
    job = einmpi.program(f"Z[i] = {name}(x[i,j]); n = {name}(x[i,j])", x=x)
    done = run_on_threads(job, ranks, {"x": x})
    with np.errstate(all="ignore"):
        assert_same(done.outputs["Z"], getattr(np, name)(x, axis=1), name)
        assert_same(done.outputs["n"], np.asarray(getattr(np, name)(x)), name)
    assert done.moved == done.plan.bytes_predicted


@settled(10)
@given(st.sampled_from(WHOLE), st.sampled_from(WHOLE), st.integers(1, 9))
def test_products_on_ranks(first: str, second: str, ranks: int) -> None:
    """As numpy on the program as written: small integers wrap around before they are summed."""
    a = numbers(first, (6, 10))
    b = numbers(second, (10, 7), seed=2)
    job = einmpi.program("Z[i,k] = sum(A[i,j] * B[j,k])", A=a, B=b)
    done = run_on_threads(job, ranks, {"A": a, "B": b})
    with np.errstate(all="ignore"):
        wanted = (a[:, :, None] * b[None]).sum(axis=1)
    assert done.outputs["Z"].dtype == wanted.dtype
    if wanted.dtype.kind == "f":  # int64 and uint64
        np.testing.assert_allclose(done.outputs["Z"], wanted, rtol=1e-14, atol=1e25)
    else:
        np.testing.assert_array_equal(done.outputs["Z"], wanted)
    assert done.moved == done.plan.bytes_predicted


def test_negative_products_of_unsigned_integers() -> None:
    a = numbers("uint64", (6, 10))
    b = numbers("uint64", (10, 7), seed=2) % 5
    job = einmpi.program("Z[i,k] = sum(-A[i,j] * B[j,k]); s[k] = sum(-(B[j,k] * B[j,k]))", A=a, B=b)
    found = einmpi.run(job, {"A": a, "B": b})
    np.testing.assert_array_equal(found["Z"].gather(), (-a) @ b)
    np.testing.assert_array_equal(found["s"].gather(), (-(b * b)).sum(axis=0))


@pytest.mark.parametrize("dtype", ["uint8", "uint64", "int16"])
def test_gathers_by_any_integer(dtype: str) -> None:
    w = np.arange(12.0).reshape(6, 2)
    t = np.array([5, 0, 3, 3], dtype)
    job = einmpi.program("Z[i,a] = W[t[i],a]", W=w, t=t)
    np.testing.assert_array_equal(run_on_threads(job, 3, {"W": w, "t": t}).outputs["Z"], w[t])
    t[1] = 6
    with pytest.raises(einmpi.EinmpiError, match="out of range"):
        einmpi.run(job, {"W": w, "t": t})


@pytest.mark.slow
@pytest.mark.mpirun
@needs_mpirun
def test_sums_by_mpi() -> None:
    done = run_mpi(
        2,
        """
import numpy as np
import einmpi
from mpi4py import MPI
for dtype in ("int8", "int16", "uint8", "uint16", "uint32", "uint64", "bfloat16"):
    x = (np.arange(60).reshape(6, 10) % 7).astype(dtype)
    array = einmpi.DistArray.from_global(x, MPI.COMM_WORLD)
    job = einmpi.program("Z[j] = sum(X[i,j]); m[i] = max(X[i,j])", X=x)
    found = einmpi.run(job, {"X": array}, comm=MPI.COMM_WORLD)
    total = found["Z"].gather()
    greatest = found["m"].gather()
    np.testing.assert_array_equal(total.astype(float), x.astype(float).sum(axis=0))
    np.testing.assert_array_equal(greatest.astype(float), x.astype(float).max(axis=1))
if MPI.COMM_WORLD.rank == 0:
    print("equal")
""",
    )
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


# ---- files --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED])
def test_files_keep_dtypes(dtype: str) -> None:
    """Through HDF5 (plain, and swapped with chunks) and .npy."""
    x = numbers(dtype, (6, 5))
    swapped = x.astype(x.dtype.newbyteorder(">"))
    with h5py.File("in.h5", "w") as file:
        file["x"] = x
        file.create_dataset("y", data=swapped, chunks=(2, 2), compression="gzip")
    np.save("z.npy", swapped)
    with open("job.toml", "w") as file:
        file.write(f"""
program = "a[i,j] = x[i,j]; b[i,j] = y[j,i] + z[j,i] - z[j,i]; g[i] = u[i] + 1"
[inputs]
x = "in.h5:/x"
y = "in.h5:/y"
z = "z.npy"
u = {{ shape = [40], random = "uniform", low = 3, high = 100, dtype = "{dtype}", seed = 1 }}
[outputs]
a = "out.h5:/a"
b = "b.npy"
g = {{ file = "out.h5", dataset = "/g", dtype = "{dtype}" }}
""")
    assert einmpi_here(".", ["job.toml", "--quiet"]).returncode == 0
    with h5py.File("out.h5") as file:
        assert_same(file["a"][...], x, "HDF5")
        generated = file["g"][...]
    assert_same(np.load("b.npy"), x.T, ".npy")
    assert generated.dtype == dtype and generated.min() >= 4 and generated.max() <= 100
    assert len(set(generated.tolist())) > 10


# ---- inputs -------------------------------------------------------------------------------------


def test_safe_casts_of_inputs() -> None:
    """What numpy calls safe: integers for a float64 input, small integers for a float32 one."""
    job = einmpi.program("Z[i] = X[i] / 2", X=(3,))
    for given_values in ([1, 2, 3], np.array([1, 2, 3], "uint8"), np.array([1, 2, 3], "float32")):
        for found in (
            einmpi.run(job, {"X": given_values})["Z"].gather(),
            einmpi.reference(job, {"X": given_values})["Z"],
            run_on_threads(job, 2, {"X": np.asarray(given_values)}).outputs["Z"],
        ):
            assert_same(found, np.array([0.5, 1.0, 1.5]), repr(given_values))
    single = einmpi.program("Z[i] = X[i] / 2", X=(3,), dtype="float32")
    array = einmpi.DistArray.from_global(np.array([1, 2, 3], "int16"))
    assert_same(einmpi.run(single, {"X": array})["Z"].gather(), np.float32([0.5, 1, 1.5]), "")


def test_unsafe_casts_are_refused() -> None:
    job = einmpi.program("Z[i] = X[i]", X=np.zeros(3, "float32"))
    with pytest.raises(InputError) as error:
        einmpi.run(job, {"X": np.zeros(3)})
    assert str(error.value) == (
        "inputs: X is float64[3]; expected X: float32[3]; "
        'convert it with .astype("float32"), which may change values'
    )
    job = einmpi.program("Z[i] = X[i]", X=np.zeros(3, "uint8"))
    for unsafe in (np.zeros(3, "int8"), np.zeros(3, "uint16"), np.zeros(3, "float64")):
        with pytest.raises(InputError, match=r'convert it with .astype\("uint8"\)'):
            einmpi.run(job, {"X": unsafe})


def test_numbers_of_python_adapt() -> None:
    """An integer is a real number, and both are complex ones."""
    kinds: list[Any] = [True, 2, 0.5, 1j]
    for declared, value in itertools.product(kinds, kinds):
        job = einmpi.program("Z[i] = rate * X[i]", X=(3,), rate=declared)
        if type(declared) is int and type(value) is int:
            continue  # a size, not a parameter
        x = np.arange(3.0)
        if kinds.index(value) > kinds.index(declared) and type(declared) is not int:
            with pytest.raises(InputError):
                einmpi.run(job, {"X": x}, rate=value)
        elif type(declared) is not int:
            found = einmpi.run(job, {"X": x}, rate=value)["Z"].gather()
            np.testing.assert_array_equal(found, value * x)
    job = einmpi.program("Z[i] = X[i] + n", X=np.zeros(2, "uint8"), n=np.zeros((), "uint8"))
    x = np.array([1, 2], "uint8")
    assert_same(einmpi.run(job, {"X": x, "n": 100})["Z"].gather(), x + 100, "")
    with pytest.raises(InputError, match="n is 300, which does not fit into uint8"):
        einmpi.run(job, {"X": x, "n": 300})
