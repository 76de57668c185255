"""The namespace of the array API standard: its names, and some of each kind of its functions."""

import inspect
import runpy

import numpy as np
import pytest
from paths import ROOT

import einmpi
import einmpi.array_api as xp
from einmpi import DistArray
from einmpi.comm.threads import run_threads


def test_the_namespace_of_an_array():
    x = xp.ones((2, 3))
    assert x.__array_namespace__() is xp
    assert xp.__array_api_version__ == "2025.12"
    assert x.__array_namespace__(api_version="2025.12") is xp
    assert x.__array_namespace__(api_version="2024.12") is xp
    with pytest.raises(ValueError, match=r"follows version 2025\.12, not 1999\.12"):
        x.__array_namespace__(api_version="1999.12")
    assert x.device == "cpu" and x.to_device("cpu").shape == (2, 3)
    with pytest.raises(ValueError, match="there is no device 'gpu'"):
        xp.zeros(3, device="gpu")


@pytest.mark.parametrize("name", xp.__all__)
def test_functions_have_documentation(name):
    value = getattr(xp, name)
    if inspect.isfunction(value):
        assert value.__doc__ and value.__doc__.endswith(".")


def test_stubs_have_the_signatures_and_documentation_of_all_functions():
    script = runpy.run_path(str(ROOT / "docs" / "make_stubs.py"), run_name="make_stubs")
    stubs = script["stubs"]()
    assert {file.name for file in stubs} == {"__init__.pyi", "linalg.pyi", "fft.pyi", "methods.pyi"}
    for file, text in stubs.items():
        assert file.read_text() == text, "python docs/make_stubs.py writes it"


def test_arguments_by_position_and_by_name_are_those_of_the_standard():
    x = xp.ones((2, 3))
    with pytest.raises(TypeError, match=r"^sum\(\) .*positional"):
        xp.sum(x, 0)
    with pytest.raises(TypeError, match="positional-only"):
        xp.linalg.det(x=x)
    assert xp.reshape(x, shape=(3, 2)).shape == (3, 2)
    assert xp.expand_dims(x, axis=1).shape == (2, 1, 3)
    assert xp.linalg.matmul is xp.matmul and xp.sum.__module__ == "einmpi.array_api"


def test_creation():
    assert xp.asarray([1, 2]).dtype == xp.int64
    assert xp.asarray([1, 2], dtype=xp.float32).dtype == xp.float32
    x = xp.asarray([1.0, 2.0])
    assert xp.asarray(x) is x and xp.asarray(x, copy=True) is not x
    with pytest.raises(ValueError, match="needs a copy"):
        xp.asarray(x, dtype=xp.int64, copy=False)
    np.testing.assert_array_equal(xp.arange(2, 9, 3).gather(), np.arange(2, 9, 3))
    np.testing.assert_array_equal(xp.arange(0.5, -2, -0.5).gather(), np.arange(0.5, -2, -0.5))
    assert xp.arange(5, 2).shape == (0,)
    np.testing.assert_array_equal(xp.eye(3, 4, k=1).gather(), np.eye(3, 4, k=1))
    for k in (4, -3, 2**63, -(2**70)):
        assert not xp.any(xp.eye(3, 4, k=k))
    np.testing.assert_array_equal(xp.linspace(0, 1, 5).gather(), np.linspace(0, 1, 5))
    np.testing.assert_array_equal(xp.full((2, 2), 7).gather(), np.full((2, 2), 7))
    assert xp.from_dlpack(np.ones(3)).shape == (3,)


def test_dtypes():
    assert xp.isdtype(xp.uint8, "integral") and not xp.isdtype(xp.bool, "numeric")
    assert xp.isdtype(xp.float32, ("bool", xp.float32))
    with pytest.raises(ValueError, match="not a known kind"):
        xp.isdtype(xp.float32, "real")
    assert xp.result_type(xp.ones(2, dtype=xp.float32), 3, xp.int8) == xp.float32
    assert xp.can_cast(xp.int32, xp.float64) and not xp.can_cast(xp.float64, xp.int32)
    assert xp.finfo(xp.float32).eps == np.finfo("float32").eps
    assert xp.iinfo(xp.int64).max == 2**63 - 1
    info = xp.__array_namespace_info__()
    assert set(info.dtypes(kind="real floating")) == {"float32", "float64"}
    assert info.devices() == ("cpu",)


# Functions of x, a tensor of 6×4×3 numbers, with numpy's of the same name or the one given.
CASES = {
    "concat": (lambda xp, x: xp.concat([x, x[:1]], axis=0)),
    "permute_dims": (lambda xp, x: xp.permute_dims(x, (2, 0, 1))),
    "sort descending": (lambda xp, x: -xp.sort(-x, axis=1)),
    "argsort": (lambda xp, x: xp.argsort(xp.round(x), axis=0, stable=True)),
    "var": (lambda xp, x: xp.var(x, axis=(0, 2), correction=1)),
    "argmax": (lambda xp, x: xp.argmax(x, keepdims=True)),
    "cumulative_prod": (lambda xp, x: xp.cumulative_prod(x, axis=2, include_initial=True)),
    "vecdot": (lambda xp, x: xp.vecdot(x, x + 1, axis=-2)),
    "tensordot": (lambda xp, x: xp.tensordot(x, x, axes=((0, 1), (0, 1)))),
    "clip": (lambda xp, x: xp.clip(x, min=-0.5)),
    "svdvals": (lambda xp, x: xp.linalg.svdvals(x)),
    "qr": (lambda xp, x: xp.matmul(*xp.linalg.qr(x))),
    "solve": (lambda xp, x: xp.linalg.solve(x[:, :3], x[:, 1:])),
    "solve a vector": (lambda xp, x: xp.linalg.solve(x[:, 1:], x[0, 0])),
    "det": (lambda xp, x: xp.linalg.det(x[:, :3])),
    "cross": (lambda xp, x: xp.linalg.cross(x, x[::-1])),
    "matrix_norm": (lambda xp, x: xp.linalg.matrix_norm(x, keepdims=True, ord=1)),
    "vector_norm": (lambda xp, x: xp.linalg.vector_norm(x, axis=0, ord=3)),
    "trace": (lambda xp, x: xp.linalg.trace(x, offset=-1)),
    "fft": (lambda xp, x: xp.fft.fft(x, axis=0, n=8)),
    "fftn": (lambda xp, x: xp.fft.ifftn(xp.fft.fftn(x)).real),
    "irfft": (lambda xp, x: xp.fft.irfft(xp.fft.rfft(x, axis=1), axis=1)),
    "fftshift": (lambda xp, x: xp.fft.fftshift(x) - xp.fft.ifftshift(x, axes=(1,))),
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_functions_against_numpy(ranks):
    whole = np.random.default_rng(0).standard_normal((6, 4, 3))

    def on_rank(comm):
        x = DistArray.from_global(whole, comm)
        for name, function in CASES.items():
            expected = function(np, whole)
            found = function(xp, x)
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
            np.testing.assert_allclose(found.gather(), expected, 1e-10, 1e-12, err_msg=name)

    run_threads(ranks, on_rank)


def test_tuples_and_numbers():
    x = xp.arange(3)
    grids = xp.meshgrid(x, x)
    repeated = xp.broadcast_arrays(x, xp.ones((2, 3)))
    assert (type(grids), type(repeated)) == (tuple, tuple)
    assert xp.expand_dims(x, axis=(0, -1)).shape == (1, 3, 1)
    assert xp.broadcast_shapes((2, 1), (3,)) == (2, 3) and xp.broadcast_shapes() == ()
    found = xp.isin(2, x)
    assert isinstance(found, DistArray) and found.shape == () and found.item() is True
    assert xp.isin(x, 2, invert=True).tolist() == [True, True, False]
    assert xp.searchsorted(x, 1).item() == 1


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_tolerance_for_each_matrix(ranks, dtype):
    random = np.random.default_rng(1)
    whole = random.standard_normal((5, 4, 3)) + 1j * random.standard_normal((5, 4, 3))
    whole = whole.real.astype(dtype) if dtype == "float32" else whole.astype(dtype)
    tolerances = np.array([0, 0.3, 0.5, 0.8, 0.99])

    def on_rank(comm):
        x = DistArray.from_global(whole, comm)
        for rtol in (tolerances, tolerances[2:3], tolerances[3]):
            given = DistArray.from_global(rtol, comm)
            ranks_found = xp.linalg.matrix_rank(x, rtol=given)
            expected = np.linalg.matrix_rank(whole, rtol=rtol)
            assert ranks_found.tolist() == expected.tolist()
            assert ranks_found.dtype == expected.dtype
            found = xp.linalg.pinv(x, rtol=given)
            expected = np.linalg.pinv(whole, rtol=rtol)
            assert found.dtype == expected.dtype
            # A few roundings of numbers that are not much greater than 1.
            np.testing.assert_allclose(found.gather(), expected, atol=1e-5)
        nothing = DistArray.from_global(whole[:, :0], comm)
        assert xp.linalg.pinv(nothing, rtol=given).shape == (5, 3, 0)

    run_threads(ranks, on_rank)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "int64"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_eigenvalues_are_complex_on_all_ranks(ranks, dtype):
    # Those of the first and the last matrix are real, those of the second are not.
    whole = np.array([[[2, 0], [0, 3]], [[0, 1], [-1, 0]], [[1, 1], [0, 2]]], dtype)

    def on_rank(comm):
        x = DistArray.from_global(whole, comm)
        eigenvalues, eigenvectors = xp.linalg.eig(x)
        expected = "complex64" if dtype in ("float32", "complex64") else "complex128"
        assert eigenvalues.local.dtype == eigenvectors.local.dtype == expected
        assert xp.linalg.eigvals(x[:1]).dtype == expected
        # numpy's are real if all are, and the ranks agree.
        for part, numpys in ((x, whole), (x[:1], whole[:1]), (x[::2], whole[::2])):
            assert np.linalg.eigvals(part).local.dtype == np.linalg.eigvals(numpys).dtype
        # A v = λ v; the matrices are small integers, so that a few roundings remain.
        left = x @ eigenvectors
        right = eigenvectors * eigenvalues[:, None, :]
        np.testing.assert_allclose(left.gather(), right.gather(), atol=1e-5)
        found = np.sort_complex(np.round(xp.linalg.eigvals(x).gather(), 4))
        np.testing.assert_allclose(found, [[2, 3], [-1j, 1j], [1, 2]], atol=1e-5)

    run_threads(ranks, on_rank)


def test_descending_order_keeps_equal_elements_in_order():
    x = xp.asarray([1, 3, 1, 3])
    assert xp.argsort(x, descending=True).tolist() == [1, 3, 0, 2]
    assert xp.sort(x, descending=True).tolist() == [3, 3, 1, 1]


def test_a_singular_matrix_is_an_error_on_all_ranks():
    whole = np.stack([np.eye(2), np.zeros((2, 2))])

    def on_rank(comm):
        with pytest.raises((np.linalg.LinAlgError, einmpi.EinmpiError), match="Singular matrix"):
            xp.linalg.inv(DistArray.from_global(whole, comm))
        return xp.linalg.det(DistArray.from_global(whole, comm)).tolist()

    assert run_threads(2, on_rank) == [[1, 0], [1, 0]]
