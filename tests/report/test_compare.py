"""`verify`: which results agree with those of the reference."""

import numpy as np
import pytest

import einmpi
from einmpi.api.running import reference_of_changed
from einmpi.report.describe import compare_with, with_other_last_digits

X = np.array([1.0, 2.0, 3.0])


def never():
    raise AssertionError("the reference is computed once")


def test_results_that_agree_need_one_reference():
    wrong, text = compare_with({"y": X}, {"y": X * (1 + 1e-15)}, never)
    assert wrong == [] and text == "  y  agrees: error 8.9e-16, allowed 1e-10".replace(
        "8.9e-16", f"{abs(X * (1 + 1e-15) - X).max() / 3:.1e}"
    )


def test_integers_are_equal_or_differ():
    whole = np.array([1, 2])
    assert compare_with({"n": whole}, {"n": whole}, never)[0] == []
    assert compare_with({"n": whole}, {"n": whole + 1}, never)[0] == ["n"]


@pytest.mark.parametrize(("rounding", "wrong"), [(1e-7, []), (1e-9, ["y"]), (0, ["y"])])
def test_what_rounding_changes_is_allowed(rounding, wrong):
    found, text = compare_with({"y": X}, {"y": X * (1 + 1e-6)}, lambda: {"y": X * (1 + rounding)})
    assert found == wrong
    assert ("DIFFERS" in text) == bool(wrong)
    assert ("as the last digits of the inputs change it by" in text) == bool(rounding)


def test_lost_and_infinite_numbers_differ_whatever_rounding_does():
    lost = np.array([1, np.nan, 3])
    assert compare_with({"y": X}, {"y": lost}, lambda: {"y": lost})[0] == ["y"]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_last_digits(dtype):
    rng = np.random.default_rng(0)
    whole = rng.standard_normal((5, 6)).astype(dtype)
    whole.flat[:3] = 0, np.inf, np.nan
    changed = with_other_last_digits(whole)
    assert changed.dtype == whole.dtype and changed.shape == whole.shape
    same = changed == whole
    assert same.flat[0] and not same.flat[3:].any()
    np.testing.assert_allclose(changed, whole, rtol=2 * np.finfo(dtype).eps)


def test_a_complex_number():
    assert with_other_last_digits(np.array(1 + 2j)) != 1 + 2j


def test_what_is_no_fraction_stays():
    for whole in (np.arange(3), np.array([True, False])):
        assert with_other_last_digits(whole) is whole


def test_the_reference_of_changed_inputs():
    job = einmpi.program("y[i] = (1 + x[i]) - 1; z[i] = 2 * x[i]", x=(3,))
    exact = reference_of_changed(job, {"x": 1e-9 * X})
    rounded = reference_of_changed(job, {"x": 1e-9 * X}, with_other_last_digits)
    assert not np.array_equal(exact["z"], rounded["z"])
    np.testing.assert_allclose(exact["z"], rounded["z"], rtol=1e-15)
