"""The special cases of elementwise functions, as the array API standard 2025.12 lists them.

The expected values are the standard's words, not what a library computes. Signs of zeros count.
"""

import math
import operator

import numpy as np
import pytest

import einmpi
import einmpi.array_api as xp
from einmpi import DistArray
from einmpi.comm.threads import run_threads

inf = math.inf
nan = math.nan
ANY_ZERO = (0.0, -0.0)  # the standard leaves the sign open
ANY_INFINITY = (inf, -inf)

# (x1, x2): the quotient, rounded down
FLOOR_DIVIDE = [
    *[((value, nan), nan) for value in (1.0, 0.0, inf)],
    *[((nan, value), nan) for value in (1.0, 0.0, inf, nan)],
    *[((x1, x2), nan) for x1 in (inf, -inf) for x2 in (inf, -inf)],
    *[((x1, x2), nan) for x1 in (0.0, -0.0) for x2 in (0.0, -0.0)],
    ((0.0, 2.0), 0.0),
    ((-0.0, 2.0), -0.0),
    ((0.0, -2.0), -0.0),
    ((-0.0, -2.0), 0.0),
    ((0.0, inf), 0.0),
    ((-0.0, inf), -0.0),
    ((0.0, -inf), -0.0),
    ((-0.0, -inf), 0.0),
    ((3.0, 0.0), inf),
    ((3.0, -0.0), -inf),
    ((-3.0, 0.0), -inf),
    ((-3.0, -0.0), inf),
    ((inf, 0.0), inf),
    ((inf, -0.0), -inf),
    ((-inf, 0.0), -inf),
    ((-inf, -0.0), inf),
    ((inf, 2.0), inf),
    ((inf, -2.0), -inf),
    ((-inf, 2.0), -inf),
    ((-inf, -2.0), inf),
    ((3.0, inf), 0.0),
    ((3.0, -inf), -0.0),
    ((-3.0, inf), -0.0),
    ((-3.0, -inf), 0.0),
    ((7.0, 2.0), 3.0),
    ((-7.0, 2.0), -4.0),
    ((7.0, -2.0), -4.0),
    ((-7.0, -2.0), 3.0),
]
# (x1, x2): the remainder, with the sign of x2
REMAINDER = [
    *[((value, nan), nan) for value in (1.0, 0.0, inf)],
    *[((x1, x2), nan) for x1 in (inf, -inf) for x2 in (inf, -inf, 2.0, -2.0)],
    *[((x1, x2), nan) for x1 in (0.0, -0.0, 3.0, -3.0) for x2 in (0.0, -0.0)],
    ((0.0, 2.0), 0.0),
    ((-0.0, 2.0), 0.0),
    ((0.0, -2.0), -0.0),
    ((-0.0, -2.0), -0.0),
    ((3.0, inf), 3.0),
    ((3.0, -inf), -inf),
    ((-3.0, inf), inf),
    ((-3.0, -inf), -3.0),
]
REAL_EXPM1 = [(nan, nan), (0.0, 0.0), (-0.0, -0.0), (inf, inf), (-inf, -1.0)]
REAL_TANH = [(nan, nan), (0.0, 0.0), (-0.0, -0.0), (inf, 1.0), (-inf, -1.0)]
# (real part, imaginary part): the same of the result. That of a conjugate is the conjugate.
EXPM1 = [
    ((0.0, 0.0), (0.0, 0.0)),
    ((-0.0, 0.0), (0.0, 0.0)),
    *[((a, inf), (nan, nan)) for a in (0.0, 1.5, -1.5)],
    *[((a, nan), (nan, nan)) for a in (0.0, 1.5, -1.5)],
    ((inf, 0.0), (inf, 0.0)),
    # +0 * cis(b) - 1 and inf * cis(b) - 1, with b in each quadrant
    ((-inf, 0.0), (-1.0, 0.0)),
    ((-inf, 1.0), (-1.0, 0.0)),
    ((-inf, 2.0), (-1.0, 0.0)),
    ((-inf, 4.0), (-1.0, -0.0)),
    ((-inf, 5.0), (-1.0, -0.0)),
    ((inf, 1.0), (inf, inf)),
    ((inf, 2.0), (-inf, inf)),
    ((inf, 4.0), (-inf, -inf)),
    ((inf, 5.0), (inf, -inf)),
    ((-inf, inf), (-1.0, ANY_ZERO)),
    ((inf, inf), (ANY_INFINITY, nan)),
    ((-inf, nan), (-1.0, ANY_ZERO)),
    ((inf, nan), (ANY_INFINITY, nan)),
    ((nan, 0.0), (nan, 0.0)),
    ((nan, 1.5), (nan, nan)),
    ((nan, inf), (nan, nan)),
    ((nan, nan), (nan, nan)),
]
# As above; and that of -x is the negative. The standard lets old C libraries return nan + nan j
# where the real part is 0 and the imaginary part not finite: these two are not here.
TANH = [
    ((0.0, 0.0), (0.0, 0.0)),
    ((1.5, inf), (nan, nan)),
    ((1.5, nan), (nan, nan)),
    *[((inf, b), (1.0, 0.0)) for b in (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 1e300)],
    ((inf, inf), (1.0, ANY_ZERO)),
    ((inf, nan), (1.0, ANY_ZERO)),
    ((nan, 0.0), (nan, 0.0)),
    ((nan, 1.5), (nan, nan)),
    ((nan, inf), (nan, nan)),
    ((nan, nan), (nan, nan)),
]


def is_expected(found, expected):
    """Return whether a number is the expected one, or one of several; no number is equal to nan."""
    if isinstance(expected, tuple):
        return any(is_expected(found, each) for each in expected)
    if math.isnan(expected):
        return math.isnan(found)
    return found == expected and math.copysign(1, found) == math.copysign(1, expected)


def negative(expected):
    return tuple(map(operator.neg, expected)) if isinstance(expected, tuple) else -expected


def with_conjugates(cases):
    conjugates = [((a, -b), (real, negative(imag))) for (a, b), (real, imag) in cases]
    return [*cases, *conjugates]


def with_negatives(cases):
    negatives = [((-a, -b), (negative(real), negative(imag))) for (a, b), (real, imag) in cases]
    return [*cases, *negatives]


def floor_divide_in_place(x1, x2):
    quotient = x1.copy()
    quotient //= x2
    return quotient


OF_PAIRS = [
    (xp.floor_divide, FLOOR_DIVIDE),
    (operator.floordiv, FLOOR_DIVIDE),
    (floor_divide_in_place, FLOOR_DIVIDE),
    (einmpi.jit(operator.floordiv), FLOOR_DIVIDE),
    (xp.remainder, REMAINDER),
    (operator.mod, REMAINDER),
]
OF_NUMBERS = [(xp.expm1, REAL_EXPM1), (xp.tanh, REAL_TANH)]
OF_COMPLEX_NUMBERS = [
    (xp.expm1, with_conjugates(EXPM1)),
    (einmpi.jit(lambda x: xp.expm1(x)), with_conjugates(EXPM1)),
    (xp.tanh, with_negatives(with_conjugates(TANH))),
    (einmpi.jit(lambda x: xp.tanh(x)), with_negatives(with_conjugates(TANH))),
]


def complex_array(parts, dtype):
    """Return an array by its real and imaginary parts: 1j * -0.0 would lose a sign."""
    array = np.empty(len(parts), dtype)
    array.real = [real for real, _ in parts]
    array.imag = [imag for _, imag in parts]
    return array


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("bits", [32, 64])
def test_special_cases(ranks, bits):
    def on_rank(comm):
        wrong = []

        def compare(function, arguments, found, expected):
            for argument, value, wanted in zip(arguments, found, expected, strict=True):
                if not is_expected(value, wanted):
                    wrong.append(f"{function}{argument} is {value}, not {wanted}")

        for function, cases in OF_PAIRS:
            pairs = [pair for pair, _ in cases]
            columns = [np.array(column, f"float{bits}") for column in zip(*pairs, strict=True)]
            x1, x2 = (DistArray.from_global(column, comm) for column in columns)
            found = function(x1, x2)
            assert found.dtype == x1.dtype
            compare(function, pairs, found.tolist(), [value for _, value in cases])
        for function, cases in OF_NUMBERS:
            numbers = [number for number, _ in cases]
            x = DistArray.from_global(np.array(numbers, f"float{bits}"), comm)
            compare(function, numbers, function(x).tolist(), [value for _, value in cases])
        for function, cases in OF_COMPLEX_NUMBERS:
            # float32 has no 1e300: there the imaginary part is infinite, with any zero.
            cases = [case for case in cases if bits == 64 or abs(case[0][1]) != 1e300]
            parts = [argument for argument, _ in cases]
            array = complex_array(parts, f"complex{2 * bits}")
            found = function(DistArray.from_global(array, comm))
            assert found.dtype == array.dtype
            expected = [value for _, value in cases]
            compare(function, parts, found.real.tolist(), [real for real, _ in expected])
            compare(function, parts, found.imag.tolist(), [imag for _, imag in expected])
        return wrong

    def without_warnings(comm):
        with np.errstate(all="ignore"):
            return on_rank(comm)

    for wrong in run_threads(ranks, without_warnings):
        assert not wrong, "\n".join(wrong)


def test_numpys_functions_and_programs_keep_numpys_values():
    x1 = np.array([inf, -inf, 3.0, -3.0, 7.0])
    x2 = np.array([2.0, -2.0, -inf, inf, 2.0])
    z = complex_array([(inf, 0.0), (-inf, inf), (inf, 2.0), (0.5, 0.5)], "complex128")
    with np.errstate(all="ignore"):
        given = [DistArray.from_global(each) for each in (x1, x2, z)]
        found = [
            np.floor_divide(given[0], given[1]).gather(),
            einmpi.run("c[i] = x[i] // y[i]", x=x1, y=x2)["c"],
            np.expm1(given[2]).gather(),
            np.tanh(given[2]).gather(),
        ]
        expected = [np.floor_divide(x1, x2), np.floor_divide(x1, x2), np.expm1(z), np.tanh(z)]
    for computed, numpys in zip(found, expected, strict=True):
        np.testing.assert_array_equal(computed, numpys)


@np.errstate(invalid="ignore")  # of inf // 2, which numpy says is nan
def test_operands_of_the_quotient():
    x = xp.asarray([7.0, -7.0, inf])
    assert (x // 2).tolist() == [3, -4, inf]
    assert (x // 10**30).tolist() == [0, -1, inf]  # greater than any integer dtype holds
    assert (8 // x[:2]).tolist() == [1, -2]
    assert (x // np.array([2.0, 2.0, 2.0])).tolist() == [3, -4, inf]
    assert (xp.asarray([7, -7]) // 2).dtype == xp.int64
    assert (xp.asarray([7, -7], dtype=xp.float32) // 2).dtype == xp.float32
    odd = x[::2]  # a view
    odd //= 2
    assert x.tolist() == [3, -7, inf]
    with pytest.raises(TypeError, match="Cannot cast"):
        whole = xp.asarray([7])
        whole //= 2.5
    with pytest.raises(TypeError, match="expected DistArrays, arrays and numbers"):
        x // "2"
