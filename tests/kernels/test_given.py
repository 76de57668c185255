"""Masked and sparse arrays and tables are refused wherever arrays are given."""

import numpy as np
import pytest
import scipy.sparse
from refusals import error

import einmpi

MASKED = np.ma.masked_equal([1.0, 2.0], 1.0)
END = (
    " is a masked array; expected an array without a mask; fill masked elements with "
    "filled(VALUE), or use where() with the mask as an input"
)


@pytest.mark.parametrize("given", [MASKED, [MASKED[0:1], MASKED[1:2]], np.ma.array([1.0, 2.0])])
def test_masked_inputs(given):
    job = einmpi.program("n = sum(X[i])", X=np.shape(given)[:1])
    for function in (einmpi.run, einmpi.reference, lambda job, inputs: einmpi.compile(job)(inputs)):
        assert error(function, job, {"X": given}) == f"inputs: X{END}"
    assert error(einmpi.einsum, "i->", given) == f"einsum: operand 0{END}"
    assert error(einmpi.DistArray.from_global, given) == f"from_global: array{END}"


def test_arrays_without_a_mask():
    job = einmpi.program("n = sum(X[i])", X=(2,))
    assert float(einmpi.run(job, {"X": MASKED.filled(0)})["n"].gather()) == 2


class DataFrame:
    """Stands for a table of pandas, which is not needed to test this."""

    __module__ = "pandas.core.frame"


@pytest.mark.parametrize(
    "given, kind, method",
    [
        (scipy.sparse.eye(3, format="csr"), "a sparse array, dia_matrix", ".toarray()"),
        (scipy.sparse.coo_array(np.eye(3)), "a sparse array, coo_array", ".toarray()"),
        ([scipy.sparse.coo_array(np.eye(3))], "a sparse array, coo_array", ".toarray()"),
        (DataFrame(), "a pandas object, DataFrame", ".to_numpy()"),
    ],
)
def test_other_containers_are_refused(given, kind, method):
    job = einmpi.program("n = sum(X[i,j])", X=(3, 3))
    kind = kind.replace("dia_matrix", type(given).__name__)
    end = f" is {kind}; expected a numpy array; convert it with {method}"
    for function in (einmpi.run, einmpi.reference, lambda job, inputs: einmpi.compile(job)(inputs)):
        assert error(function, job, {"X": given}) == f"inputs: X{end}"
    assert error(einmpi.einsum, "ij->", given) == f"einsum: operand 0{end}"
    assert error(einmpi.DistArray.from_global, given) == f"from_global: array{end}"


def test_pandas_itself():
    pandas = pytest.importorskip("pandas")
    job = einmpi.program("n = sum(X[i])", X=(2,))
    for given in (pandas.Series([1.0, 2.0]), pandas.Index([1.0, 2.0])):
        assert "convert it with .to_numpy()" in error(einmpi.run, job, {"X": given})
