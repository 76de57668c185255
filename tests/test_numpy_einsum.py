"""numpy's own tests of einsum, with einmpi.einsum in its place."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi_helpers import environment
from paths import ROOT
from random_programs import settled

import einmpi
from einmpi.comm.threads import run_threads
from einmpi.errors import InputError

# The tests that fail, and why. All others of the file pass.
OBJECTS = "arrays of Python objects have no dtype of einmpi"
LONG_DOUBLES = "neither MPI nor GPUs have the long doubles of numpy"
ALLOWED_TO_FAIL = {
    "test_einsum_object_errors": OBJECTS,
    "test_einsum_sums_object": OBJECTS,
    "test_object_loop": OBJECTS,
    "test_einsum_sums_longdouble": LONG_DOUBLES,
    "test_einsum_sums_clongdouble": LONG_DOUBLES,
    "test_different_paths[g]": LONG_DOUBLES,
    "test_different_paths[G]": LONG_DOUBLES,
}
SUMS = (
    *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "longdouble", "cfloat64", "cfloat128", "clongdouble"),
    "object",
)
PLUGIN = """
import numpy as np
import einmpi
import einmpi.kernels.cpu.blas
np.einsum = einmpi.einsum
"""


def failed_tests(folder, selection):
    """Return the names of numpy's tests that fail, and how many were run."""
    (folder / "numpy_einsum_plugin.py").write_text(PLUGIN)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "numpy_einsum_plugin",
        "-p",
        "no:cacheprovider",
    ]
    command += ["--pyargs", "numpy._core.tests.test_einsum", "-k", selection, "-rfEp", "-q"]
    command += ["--no-header", "--tb=no", f"--rootdir={folder}"]
    path = os.pathsep.join((str(ROOT), str(folder)))
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment(PYTHONPATH=path)
    )
    failed = set()
    count = 0
    for line in done.stdout.splitlines():
        status, _, rest = line.partition(" ")
        if status in ("PASSED", "FAILED", "ERROR"):
            count += 1
            if status != "PASSED":
                failed.add(rest.split(" - ")[0].rpartition("::")[2])
    assert count, done.stdout + done.stderr
    return failed, count


def expected_failures(names):
    return {name for name in ALLOWED_TO_FAIL if name in names}


@pytest.mark.slow
def test_all_but_sums(tmp_path):
    skip_without_numpy_tests()
    failed, count = failed_tests(tmp_path, "not einsum_sums")
    assert failed == {name for name in ALLOWED_TO_FAIL if "_sums_" not in name}
    assert count >= 62


# Each takes several seconds, for hundreds of shapes: EVERY_DTYPE=1 runs them all.
@pytest.mark.slow
@pytest.mark.parametrize("dtype", SUMS)
def test_sums(dtype, tmp_path):
    if dtype not in ("int8", "object") and not os.environ.get("EVERY_DTYPE"):
        pytest.skip("EVERY_DTYPE=1 runs the sums of all dtypes")
    skip_without_numpy_tests()
    name = f"test_einsum_sums_{dtype}"
    failed, _ = failed_tests(tmp_path, f"{name}")
    assert failed == expected_failures({name})


def skip_without_numpy_tests():
    path = os.path.join(os.path.dirname(np.__file__), "_core", "tests", "test_einsum.py")
    if not os.path.exists(path):
        pytest.skip("numpy is installed without its tests")


# ---- what numpy's tests rely on, in short --------------------------------------------------------

WHOLE = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@settled(40)
@given(
    st.sampled_from(["ij,jk->ik", "ij,ij->", "i...,i...", "ij,j,i->ij", "ii->i", "ij->", "ji"]),
    st.lists(st.sampled_from([*WHOLE, "float64", "complex64"]), min_size=3, max_size=3),
)
def test_dtypes_are_those_of_numpy(subscripts, dtypes):
    count = subscripts.split("->")[0].count(",") + 1
    rng = np.random.default_rng(1)
    arrays = []
    for term, dtype in zip(subscripts.split("->")[0].split(","), dtypes, strict=False):
        ndim = len(term.replace("...", "x"))
        arrays.append(rng.integers(0, 100, (4,) * ndim).astype(dtype))
    found = einmpi.einsum(subscripts, *arrays[:count])
    wanted = np.einsum(subscripts, *arrays[:count])
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    if wanted.dtype.kind in "iu":
        np.testing.assert_array_equal(found, wanted)


def test_views():
    a = np.arange(24).reshape(2, 3, 4)
    for subscripts in ("...", "ijk->kji", "jik->ijk"):
        view = einmpi.einsum(subscripts, a)
        assert view.base is a.base
        np.testing.assert_array_equal(view, np.einsum(subscripts, a))
    square = np.arange(9).reshape(3, 3)
    einmpi.einsum("ii->i", square)[...] = 0
    assert np.trace(square) == 0
    square.flags.writeable = False
    assert not einmpi.einsum("ji", square).flags.writeable


def test_an_einsum_that_was_computed_before():
    """Later calls with arrays in C order take less time; any others are like the first."""
    random = np.random.default_rng(3)
    for _ in range(4):
        a = random.normal(size=(4, 4))
        b = random.normal(size=(4, 4))
        whole = random.integers(0, 9, (4, 4))
        operands = [(a, b), (a.T, b), (whole, whole), (a[:, ::-1], b), (a.tolist(), b), (a, b.T)]
        operands.append((a.astype(">f8"), b))
        for left, right in operands:
            found = einmpi.einsum("ij,jk->ik", left, right)
            wanted = np.einsum("ij,jk->ik", left, right)
            assert type(found) is np.ndarray and found.dtype == wanted.dtype
            assert found.strides == wanted.strides
            np.testing.assert_allclose(found, wanted, rtol=1e-13)
            np.testing.assert_allclose(einmpi.einsum("ij,jk->", left, right), wanted.sum())
        with pytest.raises(InputError):
            einmpi.einsum("ij,jk->ik", a, b[:3])
        view = einmpi.einsum("ij->ji", a)
        assert np.shares_memory(view, a)
        distributed = einmpi.DistArray.from_global(a)
        product = einmpi.einsum("ij,jk->ik", distributed, b)
        np.testing.assert_allclose(product.gather(), a @ b)


def test_casts():
    a = np.arange(6.0).reshape(2, 3)
    assert einmpi.einsum("ij->", a, dtype="complex128").dtype == np.complex128
    with pytest.raises(TypeError, match="operand 0 is float64, which is not cast to int8"):
        einmpi.einsum("ij->", a, dtype="int8")
    assert einmpi.einsum("ij->", a, dtype="int8", casting="unsafe") == 15
    out = np.zeros((), "int64")
    with pytest.raises(TypeError, match="out is int64, which does not hold float64"):
        einmpi.einsum("ij->", a, out=out)
    assert einmpi.einsum("ij->", a, out=out, casting="unsafe") is out and out == 15
    for arguments in ({"casting": "any"}, {"order": "W"}, {"optimize": "best"}):
        with pytest.raises(InputError):
            einmpi.einsum("ij->", a, **arguments)


@pytest.mark.parametrize("order", ["C", "F", "A", "K"])
def test_order(order):
    rng = np.random.default_rng(1)
    a = np.asfortranarray(rng.normal(size=(2, 3, 5)))
    b = np.asfortranarray(rng.normal(size=(4, 3)))
    for first, second in ((a, b), (a.copy("C"), b), (a, b.copy("C"))):
        found = einmpi.einsum("...ft,mf->...mt", first, second, order=order)
        wanted = np.einsum("...ft,mf->...mt", first, second, order=order)
        assert found.strides == wanted.strides
        np.testing.assert_allclose(found, wanted, rtol=1e-14)


def test_the_order_of_a_dist_array_is_not_promised():
    array = einmpi.DistArray.from_global(np.ones((2, 3)))
    np.testing.assert_array_equal(einmpi.einsum("ij->ji", array, order="C"), np.ones((3, 2)))
    with pytest.raises(InputError, match="einsum: order F is given with a DistArray"):
        einmpi.einsum("ij->ji", array, order="F")


def test_dtype_with_a_dist_array():
    a = np.arange(6).reshape(2, 3).astype("uint8")

    def on_rank(comm):
        array = einmpi.DistArray.from_global(a, comm)
        return einmpi.einsum("ij,kj->ik", array, a, dtype="float32").gather()

    for found in run_threads(2, on_rank):
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, a.astype("float32") @ a.T)
