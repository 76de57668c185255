"""Masked arrays are refused wherever arrays are given."""

import numpy as np
import pytest
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
