"""Sparse arrays in operators and functions of numpy, beside DistArrays, scipy and numpy."""

import numpy as np
import pytest
import scipy.sparse

import einmpi
from einmpi.api.tracing import _jitted
from einmpi.arrays.methods import METHODS

RNG = np.random.default_rng(3)
DENSE = np.where(RNG.random((9, 7)) < 0.3, RNG.uniform(0.1, 2, (9, 7)), 0)
OTHER = np.where(RNG.random((9, 7)) < 0.3, RNG.standard_normal((9, 7)), 0)
FULL = RNG.standard_normal((9, 7))
X = RNG.standard_normal(7)
EXACT = {"rtol": 1e-13, "atol": 1e-13}  # sums of at most 63 numbers near 1, in another order


def stored(dense):
    return einmpi.SparseArray.from_sparse(scipy.sparse.csr_array(dense))


def as_dense(found):
    whole = found.gather() if hasattr(found, "gather") else found
    for name in ("toarray", "todense"):
        whole = getattr(whole, name, lambda whole=whole: whole)()
    return np.asarray(whole)


# Functions of two matrices S and T, a matrix F and a vector x, and whether the result is sparse.
EXPRESSIONS = {
    "S @ x": (lambda S, T, F, x: S @ x, False),
    "x @ S.T": (lambda S, T, F, x: x @ S.T, False),
    "S @ F.T": (lambda S, T, F, x: S @ F.T, False),
    "F @ S.T": (lambda S, T, F, x: F @ S.T, False),
    "S @ T.T": (lambda S, T, F, x: S @ T.T, True),
    "S + T": (lambda S, T, F, x: S + T, True),
    "S - T": (lambda S, T, F, x: S - T, True),
    "S * T": (lambda S, T, F, x: S * T, True),
    "S * F": (lambda S, T, F, x: S * F, True),
    "F * S": (lambda S, T, F, x: F * S, True),
    "S * x": (lambda S, T, F, x: S * x, True),
    "S + x": (lambda S, T, F, x: S + x, False),
    "2 * S": (lambda S, T, F, x: 2 * S, True),
    "S / 4": (lambda S, T, F, x: S / 4, True),
    "S // 0.3": (lambda S, T, F, x: S // 0.3, True),
    "1 + S": (lambda S, T, F, x: 1 + S, True),
    "-S": (lambda S, T, F, x: -S, True),
    "abs(T)": (lambda S, T, F, x: abs(T), True),
    "S ** 2": (lambda S, T, F, x: S**2, True),
    "S > 0.5": (lambda S, T, F, x: S > 0.5, True),
    "T <= 0.1": (lambda S, T, F, x: T <= 0.1, True),
    "T != 0": (lambda S, T, F, x: T != 0, True),
    "sqrt": (lambda S, T, F, x: np.sqrt(S), True),
    "exp": (lambda S, T, F, x: np.exp(T), True),
    "maximum": (lambda S, T, F, x: np.maximum(S, T), True),
    "where": (lambda S, T, F, x: np.where(S > 1, S, 0), True),
    "logical_and": (lambda S, T, F, x: np.logical_and(S, T), True),
    "sum": (lambda S, T, F, x: S.sum(), False),
    "sum of rows": (lambda S, T, F, x: S.sum(axis=1), False),
    "sum of columns": (lambda S, T, F, x: np.sum(S, axis=0, keepdims=True), False),
    "reduce": (lambda S, T, F, x: np.add.reduce(S), False),
    "prod": (lambda S, T, F, x: (1 + S).prod(axis=0), False),
    "max": (lambda S, T, F, x: T.max(axis=0), False),
    "min": (lambda S, T, F, x: T.min(), False),
    "mean": (lambda S, T, F, x: S.mean(axis=1), False),
    "std": (lambda S, T, F, x: S.std(axis=0), False),
    "any": (lambda S, T, F, x: (S > 1).any(axis=1), False),
    "transpose": (lambda S, T, F, x: np.transpose(S), True),
    "swapaxes": (lambda S, T, F, x: S.swapaxes(0, 1), True),
    "einsum": (lambda S, T, F, x: np.einsum("ij,j->i", S, x), False),
    "tensordot": (lambda S, T, F, x: np.tensordot(S, x, 1), False),
    "outer": (lambda S, T, F, x: np.multiply.outer(S, x), True),
    "norm": (lambda S, T, F, x: np.linalg.norm(S), False),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions(name):
    function, is_sparse = EXPRESSIONS[name]
    wanted = function(DENSE, OTHER, FULL, X)
    dist = einmpi.DistArray.from_global
    csr = scipy.sparse.csr_array(OTHER)
    for arguments in (
        (stored(DENSE), stored(OTHER), FULL, X),
        (stored(DENSE), stored(OTHER), dist(FULL), dist(X)),
        (stored(DENSE), csr if "S" in name and "T" in name else stored(OTHER), FULL, X),
    ):
        found = function(*arguments)
        assert isinstance(found, einmpi.SparseArray) == is_sparse
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(as_dense(found), wanted, **EXACT)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions_in_traced_functions(name):
    """As arguments, and as arrays that the function has from elsewhere."""
    function, is_sparse = EXPRESSIONS[name]
    wanted = function(DENSE, OTHER, FULL, X)
    S, T = stored(DENSE), stored(OTHER)
    found = einmpi.jit(function)(S, T, FULL, X)
    assert isinstance(found, einmpi.SparseArray) == is_sparse
    np.testing.assert_allclose(as_dense(found), wanted, **EXACT)
    found = einmpi.jit(lambda F, x: function(S, T, F, x))(FULL, X)
    np.testing.assert_allclose(as_dense(found), wanted, **EXACT)


def test_scipy_and_dist_arrays():
    csr, F, x = scipy.sparse.csr_array(DENSE), *map(einmpi.DistArray.from_global, (FULL, X))
    np.testing.assert_allclose(as_dense(F @ csr.T), FULL @ DENSE.T, **EXACT)
    np.testing.assert_allclose(as_dense(F * csr), FULL * DENSE, **EXACT)
    np.testing.assert_allclose(as_dense(np.dot(x, csr.T)), X @ DENSE.T, **EXACT)
    np.testing.assert_allclose(as_dense(csr - stored(OTHER)), DENSE - OTHER, **EXACT)
    found = einmpi.jit(lambda x: x @ csr.T)(X)
    np.testing.assert_allclose(as_dense(found), X @ DENSE.T, **EXACT)


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "lil", "dok", "bsr", "dia"])
def test_traced_functions_take_all_forms_of_scipy(form):
    """Those of form DOK are dicts, too; they are arrays here, not containers of arguments."""
    matrix = scipy.sparse.csr_matrix(DENSE).asformat(form)
    for given in (matrix, scipy.sparse.csr_array(DENSE).asformat(form)):
        found = einmpi.jit(lambda S, x: S @ x)(given, X)
        np.testing.assert_allclose(as_dense(found), DENSE @ X, **EXACT)
        found = einmpi.jit(lambda both: both["S"] @ both["x"])({"S": given, "x": X})
        np.testing.assert_allclose(as_dense(found), DENSE @ X, **EXACT)


def test_patterns_may_differ_from_call_to_call():
    for number in range(1, 4):
        dense = np.where(np.arange(63).reshape(9, 7) % (number + 1) == 0, 1.0 + number, 0)
        np.testing.assert_allclose(as_dense(stored(dense) @ X), dense @ X, **EXACT)


def test_numbers_are_part_of_the_implicit_value():
    S = stored(DENSE.astype("float32"))
    for number in (0.5, 0.25, -0.0):
        found = S + number
        assert found.implicit == number and found.dtype == "float32"
        assert isinstance(number < S, einmpi.SparseArray)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(as_dense(1.5 / S), np.float32(1.5) / S.gather().toarray())


def test_factors_are_not_part_of_the_program():
    S = stored(DENSE)
    for number in (0.5, 2.0):
        np.testing.assert_allclose(as_dense(S * number), DENSE * number, **EXACT)
    assert len(_jitted(np.multiply, ()).traces) >= 1
    before = len(_jitted(np.multiply, ()).traces)
    S * 0.125
    assert len(_jitted(np.multiply, ()).traces) == before


def test_attributes():
    S = stored(DENSE)
    assert (S.ndim, S.size, S.shape, S.T.shape) == (2, 63, (9, 7), (7, 9))
    assert S.nnz == np.count_nonzero(DENSE)


def test_from_sparse_takes_sparse_arrays_only():
    S = stored(DENSE)
    assert einmpi.SparseArray.from_sparse(S).digest == S.digest
    with pytest.raises(einmpi.InputError, match="from_sparse: array is a ndarray; expected"):
        einmpi.SparseArray.from_sparse(DENSE)


# What a sparse array cannot do: a call, and a part of the error.
REFUSED = {
    "asarray": (lambda S: np.asarray(S), "gather() returns one of scipy"),
    "condition": (bool, "use any() or all()"),
    "out": (lambda S: np.add(S, S, out=S), "add cannot write into a SparseArray"),
    "sort": (lambda S: np.sort(S), "sort takes no sparse arrays"),
    "svd": (lambda S: np.linalg.svd(S), "svd takes no sparse arrays"),
    "cumsum": (lambda S: np.cumsum(S, axis=1), "is a scan along a key of"),
    "ravel": (lambda S: S.ravel(), "by a gather or index arithmetic, and it is sparse"),
    "truth": (lambda S: np.allclose(S, S), "depends on the values of a tensor"),
    "extents": (lambda S: S @ S, "matmul: extents 7 and 9 differ"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    function, part = REFUSED[name]
    with pytest.raises((TypeError, ValueError)) as error:
        function(stored(DENSE))
    assert part in str(error.value)


def test_in_place_operators_say_what_to_write():
    S = stored(DENSE)
    with pytest.raises(TypeError, match=r"S = S \+ T for S \+= T"):
        S += S


@pytest.mark.parametrize("name", METHODS)
def test_all_methods_compute_or_say_why_not(name):
    """They are those of DistArrays."""
    method = getattr(stored(DENSE), name)
    try:
        found = method()
    except (TypeError, ValueError) as error:
        assert str(error)
    else:
        wanted = np.linalg.norm(DENSE) if name == "norm" else getattr(DENSE, name)()
        np.testing.assert_allclose(as_dense(found), wanted, **EXACT)
