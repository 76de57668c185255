"""The operators of the language, one record each, loosest first."""

from __future__ import annotations

from typing import Any

import numpy as np

from einmpi.graph.derivatives import operations as derivatives
from einmpi.graph.dtypes import as_comparison, as_ufunc
from einmpi.graph.operation_records import Operation, register_operation


def _comparison(name: str, ufunc: np.ufunc, cuda: str, documentation: str) -> None:
    register_operation(
        Operation(
            name=name,
            arity=2,
            documentation=documentation,
            function=ufunc,
            dtypes=as_comparison(ufunc),
            takes_complex=name in ("==", "!="),
            symbol=name,
            precedence=2,
            is_comparison=True,
            cpu={"": f"{{0}} {name} {{1}}"},
            cuda=f"{cuda}({{0}}, {{1}})",
            is_flat=True,
            is_reproducible=True,
        )
    )


_comparison("<", np.less, "less", "less than; gives bool")
_comparison("<=", np.less_equal, "less_equal", "at most; gives bool")
_comparison(">", np.greater, "greater", "greater than; gives bool")
_comparison(">=", np.greater_equal, "greater_equal", "at least; gives bool")
_comparison("==", np.equal, "equal", "equal; gives bool")
_comparison("!=", np.not_equal, "not_equal", "not equal; gives bool")
register_operation(
    Operation(
        name="|",
        arity=2,
        documentation="or; bitwise on integers",
        function=np.bitwise_or,
        dtypes=as_ufunc(np.bitwise_or),
        takes_complex=False,
        symbol="|",
        precedence=3,
        cpu={"": "{0} | {1}"},
        cuda="bit_or({0}, {1})",
        is_flat=True,
        is_reproducible=True,
    )
)
register_operation(
    Operation(
        name="^",
        arity=2,
        documentation="exclusive or; bitwise on integers",
        function=np.bitwise_xor,
        dtypes=as_ufunc(np.bitwise_xor),
        takes_complex=False,
        symbol="^",
        precedence=4,
        cpu={"b": "{0} != {1}", "": "{0} ^ {1}"},
        cuda="bit_xor({0}, {1})",
        is_flat=True,
        is_reproducible=True,
    )
)
register_operation(
    Operation(
        name="&",
        arity=2,
        documentation="and; bitwise on integers",
        function=np.bitwise_and,
        dtypes=as_ufunc(np.bitwise_and),
        takes_complex=False,
        symbol="&",
        precedence=5,
        cpu={"": "{0} & {1}"},
        cuda="bit_and({0}, {1})",
        is_flat=True,
        is_reproducible=True,
    )
)


def _shift(name: str, ufunc: np.ufunc, cpu: dict[str, str], cuda: str, documentation: str) -> None:
    """Add a shift. A count outside of 0 to the bits of the dtype shifts everything out."""
    register_operation(
        Operation(
            name=name,
            arity=2,
            documentation=documentation,
            function=ufunc,
            dtypes=as_ufunc(ufunc),
            takes_complex=False,
            symbol=name,
            precedence=6,
            cpu=cpu,
            cuda=f"{cuda}({{0}}, {{1}})",
            is_flat=True,
            is_reproducible=True,
        )
    )


# Compiled loops shift in 64 bits and keep the last ones, so only counts from 64 on are special.
_UNSIGNED = (
    "{n}c = uint64({1}); pick({n}c < uint64(64), uint64({0}) %s ({n}c & uint64(63)), uint64(0))"
)
_shift(
    "<<",
    np.left_shift,
    {"i": _UNSIGNED % "<<"},
    "shift_left",
    "bits shifted to the left; 0 for a count that is negative or too large",
)
_shift(
    ">>",
    np.right_shift,
    {
        "i": "{n}c = uint64({1}); int64({0}) >> pick({n}c < uint64(64), {n}c, uint64(63))",
        "u": _UNSIGNED % ">>",
    },
    "shift_right",
    "bits shifted to the right; 0 or −1 for a count that is negative or too large",
)
register_operation(
    Operation(
        name="+",
        arity=2,
        documentation="sum; or on bool",
        function=np.add,
        dtypes=as_ufunc(np.add),
        symbol="+",
        precedence=7,
        cpu={"b": "{0} | {1}", "": "{0} + {1}"},
        cuda="add({0}, {1})",
        derivative=derivatives.of_sum,
        is_reproducible=True,
    )
)
register_operation(
    Operation(
        name="-",
        arity=2,
        documentation="difference",
        function=np.subtract,
        dtypes=as_ufunc(np.subtract),
        symbol="-",
        precedence=7,
        cpu={"": "{0} - {1}"},
        cuda="sub({0}, {1})",
        derivative=derivatives.of_difference,
        is_reproducible=True,
    )
)
register_operation(
    Operation(
        name="*",
        arity=2,
        documentation="product; and on bool",
        function=np.multiply,
        dtypes=as_ufunc(np.multiply),
        symbol="×",
        precedence=8,
        cpu={"b": "{0} & {1}", "": "{0} * {1}"},
        cuda="mul({0}, {1})",
        derivative=derivatives.of_product,
        is_reproducible=True,
    )
)
# numpy divides complex numbers by Smith's method.
_SMITH = (
    "{n}s = abs({1}.real) >= abs({1}.imag); "
    "{n}p = pick({n}s, {1}.real, {1}.imag); "
    "{n}q = pick({n}s, {1}.imag, {1}.real); "
    "{n}r = {n}q / {n}p; "
    "{n}d = {r}(1) / ({n}p + {n}q * {n}r); "
    "{n}a = {0}.real; "
    "{n}b = {0}.imag; "
    "{n}z = {n}s & ({n}p == 0); "
    "{n}p = abs({n}p); "
    "{n}x = pick({n}s, {n}a + {n}b * {n}r, {n}a * {n}r + {n}b) * {n}d; "
    "{n}y = pick({n}s, {n}b - {n}a * {n}r, {n}b * {n}r - {n}a) * {n}d; "
    "complex(pick({n}z, {n}a / {n}p, {n}x), pick({n}z, {n}b / {n}p, {n}y))"
)
register_operation(
    Operation(
        name="/",
        arity=2,
        documentation="quotient; float64 for integers",
        function=np.true_divide,
        dtypes=as_ufunc(np.true_divide),
        symbol="/",
        precedence=8,
        cpu={"f": "{0} / {1}", "c": _SMITH},
        cuda="divide({0}, {1})",
        derivative=derivatives.of_quotient,
        is_reproducible=True,
    )
)
register_operation(
    Operation(
        name="//",
        arity=2,
        documentation="quotient, rounded down; of integers an integer",
        function=np.floor_divide,
        dtypes=as_ufunc(np.floor_divide),
        takes_complex=False,
        symbol="//",
        precedence=8,
        cpu={
            # The processor may trap on x // -1.
            "i": (
                "{n}d = pick(({1} == 0) | ({1} == -1), {t}(1), {1}); "
                "{n}q = pick({1} == -1, {t}(-{0}), {t}({0} // {n}d)); "
                "pick({1} == 0, {t}(0), {n}q)"
            ),
            "u": ("{n}d = pick({1} == 0, {t}(1), {1}); pick({1} == 0, {t}(0), {t}({0} // {n}d))"),
            # numpy subtracts the remainder first, so that the quotient is whole up to rounding.
            "f": (
                "{n}m = fmod({0}, {1}); "
                "{n}q = ({0} - {n}m) / {1}; "
                "{n}s = ({n}m != 0) & (({1} < 0) != ({n}m < 0)); "
                "{n}q = pick({n}s, {n}q - {t}(1), {n}q); "
                "{n}f = floor({n}q); "
                "{n}f = pick({n}q - {n}f > {t}(0.5), {n}f + {t}(1), {n}f); "
                "{n}z = {0} / {1}; "
                "{n}f = pick({n}q == 0, math.copysign({t}(0), {n}z), {n}f); "
                "pick({1} == 0, {n}z, {n}f)"
            ),
        },
        cuda="floor_divide({0}, {1})",
        is_flat=True,
    )
)
register_operation(
    Operation(
        name="%",
        arity=2,
        documentation="remainder, with the sign of the divisor",
        function=np.remainder,
        dtypes=as_ufunc(np.remainder),
        takes_complex=False,
        symbol="%",
        precedence=8,
        cpu={
            # The processor may trap on x % -1.
            "i": "{n}d = pick(({1} == 0) | ({1} == -1), {t}(1), {1}); {0} % {n}d",
            "u": "{n}d = pick({1} == 0, {t}(1), {1}); {0} % {n}d",
            "f": (
                "{n}m = fmod({0}, {1}); "
                "{n}s = pick(({n}m < 0) != ({1} < 0), {n}m + {1}, {n}m); "
                "pick({n}m != 0, {n}s, math.copysign({n}m, {1}))"
            ),
        },
        cuda="remainder_({0}, {1})",
        derivative=derivatives.of_remainder,
    )
)
register_operation(
    Operation(
        name="neg",
        arity=1,
        documentation="negative",
        function=np.negative,
        dtypes=as_ufunc(np.negative),
        symbol="-",
        precedence=9,
        cpu={"u": "{t}(0) - {0}", "": "-{0}"},
        cuda="minus({0})",
        derivative=derivatives.of_negative,
        is_reproducible=True,
    )
)
register_operation(
    Operation(
        name="~",
        arity=1,
        documentation="not; bitwise on integers",
        function=np.invert,
        dtypes=as_ufunc(np.invert),
        takes_complex=False,
        symbol="~",
        precedence=9,
        cpu={"b": "not {0}", "i": "~{0}"},
        cuda="invert({0})",
        is_flat=True,
        is_reproducible=True,
    )
)


def _power(base: Any, exponent: Any) -> Any:
    """Return powers as the kernels compute them, where numpy differs or refuses."""
    if isinstance(exponent, int | float) and exponent >= 0 and exponent != 0.5:
        return np.power(base, exponent)  # by far the most, and at once
    is_integer = np.result_type(base, exponent).kind == "i"
    if is_integer and np.any(np.less(exponent, 0)):
        return _integer_powers(base, exponent)
    powers = np.power(base, exponent)
    is_half = np.equal(exponent, 0.5)
    if powers.dtype.kind != "f" or not np.any(is_half):
        return powers
    # Where one exponent 0.5 serves many bases numpy takes square roots: nan of -inf and -0.0 of
    # -0.0, where the powers, here as in kernels, are inf and 0.0.
    is_special = np.equal(base, -np.inf) | np.equal(base, 0)
    return np.where(is_half & is_special, np.abs(base), powers).astype(powers.dtype)


def _integer_powers(base: Any, exponent: Any) -> Any:
    """Return powers of integers with some negative exponents, which numpy refuses.

    1 / x**n without its fraction is 1 for x = 1, 1 or −1 for x = −1, and else 0.
    """
    powers = np.asarray(np.power(base, np.maximum(exponent, 0)))
    sign = np.where(np.bitwise_and(exponent, 1) == 1, -1, 1)
    inverse = np.where(np.equal(base, -1), sign, np.equal(base, 1))
    return np.where(np.less(exponent, 0), inverse, powers).astype(powers.dtype)


register_operation(
    Operation(
        name="**",
        arity=2,
        documentation="power",
        function=_power,
        dtypes=as_ufunc(np.power),
        symbol="**",
        precedence=10,
        cpu={"f": "math.pow({0}, {1})"},
        cuda="power({0}, {1})",
        derivative=derivatives.of_power,
    )
)
