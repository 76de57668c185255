"""The operations of the language, one record each. A new one is one call of register_operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from einmpi.graph.dtypes import DTYPES, DType
from einmpi.graph.promotion import (
    DtypeRule,
    as_cast,
    as_comparison,
    as_real_part,
    as_ufunc,
    as_where,
)
from einmpi.graph.scalar import Scalar

# From the arguments and the result: the partial derivative by each argument.
Derivative: TypeAlias = Callable[[Sequence[Scalar], Scalar], tuple[Scalar, ...]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """One operation: an operator, a function or a cast.

    Attributes
    ----------
    name : str
        The name in expression trees. A function is called by it.
    arity : int
        The number of arguments.
    documentation : str
        One line for the language reference.
    function : callable
        The operation on numpy arrays. It defines the meaning: the reference evaluator calls it.
    dtypes : callable
        The rule for dtypes: as_ufunc(u) for the rule of a numpy ufunc.
    takes_complex : bool
        Whether complex arguments are accepted.
    symbol : str
        How an operator is printed, "" for a function.
    precedence : int
        How tightly an operator binds, 0 for a function.
    is_comparison : bool
        Whether the operation compares: a chain of comparisons is joined by &.
    cpu : mapping
        The text in compiled CPU kernels by kind of number (b, i, f, c; "" for all others).
        {0}, {1}, {2} are the arguments, {t} is their dtype, {r} the dtype of their real part,
        {n} a new name. Assignments may precede the last expression, each ended by "; ". A kind
        without text is computed by numpy.
    cpu_is_long : bool
        Whether the CPU text becomes many instructions: loops with it are unrolled less.
    cuda : str
        The C++ expression in CUDA kernels, with {0}, {1}, {2} for the arguments, which have the
        types bool, int, Long, float, double or Complex<…>.
    cuda_source : str
        C++ functions that `cuda` calls in addition to those of device_functions, "" for none.
    derivative : callable or None
        The partial derivatives, None if there are none.
    """

    name: str
    arity: int
    documentation: str
    function: Callable[..., Any]
    dtypes: DtypeRule
    takes_complex: bool = True
    symbol: str = ""
    precedence: int = 0
    is_comparison: bool = False
    cpu: Mapping[str, str] = field(default_factory=dict)
    cpu_is_long: bool = False
    cuda: str = ""
    cuda_source: str = ""
    derivative: Derivative | None = None

    @property
    def is_function(self) -> bool:
        return self.precedence == 0

    @property
    def is_cast(self) -> bool:
        return self.name in DTYPES

    def call_text(self) -> str:
        """Return how a function is called, such as "maximum(x, y)"."""
        names = "cxy" if self.arity == 3 else "xy"
        return f"{self.name}({', '.join(names[: self.arity])})"


OPERATIONS: dict[str, Operation] = {}


def register_operation(operation: Operation) -> None:
    """Add an operation to the language. The parser, dtypes, the reference and kernels see it."""
    if operation.name in OPERATIONS:
        raise ValueError(f"there is an operation {operation.name} already")
    if operation.is_function and not operation.name.isidentifier():
        raise ValueError(f"{operation.name!r} cannot be called: it is not a name")
    OPERATIONS[operation.name] = operation


def unregister_operation(name: str) -> None:
    """Remove an operation that register_operation has added."""
    del OPERATIONS[name]


def functions() -> tuple[str, ...]:
    """Return the names of the operations that are written as functions, casts included."""
    return tuple(name for name, operation in OPERATIONS.items() if operation.is_function)


# ---- operators, loosest first -------------------------------------------------------------------


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
        precedence=4,
        cpu={"": "{0} & {1}"},
        cuda="bit_and({0}, {1})",
    )
)
register_operation(
    Operation(
        name="+",
        arity=2,
        documentation="sum; or on bool",
        function=np.add,
        dtypes=as_ufunc(np.add),
        symbol="+",
        precedence=5,
        cpu={"b": "{0} | {1}", "": "{0} + {1}"},
        cuda="add({0}, {1})",
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
        precedence=5,
        cpu={"": "{0} - {1}"},
        cuda="sub({0}, {1})",
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
        precedence=6,
        cpu={"b": "{0} & {1}", "": "{0} * {1}"},
        cuda="mul({0}, {1})",
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
        precedence=6,
        cpu={"f": "{0} / {1}", "c": _SMITH},
        cuda="divide({0}, {1})",
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
        precedence=6,
        cpu={
            # The processor may trap on x % -1.
            "i": "{n}d = pick(({1} == 0) | ({1} == -1), {t}(1), {1}); {0} % {n}d",
            "f": (
                "{n}m = fmod({0}, {1}); "
                "{n}s = pick(({n}m < 0) != ({1} < 0), {n}m + {1}, {n}m); "
                "pick({n}m != 0, {n}s, math.copysign({n}m, {1}))"
            ),
        },
        cuda="remainder_({0}, {1})",
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
        precedence=7,
        cpu={"": "-{0}"},
        cuda="minus({0})",
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
        precedence=7,
        cpu={"b": "not {0}", "i": "~{0}"},
        cuda="invert({0})",
    )
)


def _power(base: Any, exponent: Any) -> Any:
    """Return powers; numpy has none of integers with a negative exponent.

    1 / x**n without its fraction is 1 for x = 1, 1 or −1 for x = −1, and else 0.
    """
    is_integer = np.result_type(base, exponent).kind == "i"
    if not is_integer or not np.any(np.less(exponent, 0)):
        return np.power(base, exponent)
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
        precedence=8,
        cpu={"f": "math.pow({0}, {1})"},
        cuda="power({0}, {1})",
    )
)

# ---- functions ----------------------------------------------------------------------------------


def _function(
    name: str,
    ufunc: np.ufunc,
    documentation: str,
    cpu: Mapping[str, str],
    takes_complex: bool = True,
    cpu_is_long: bool = False,
) -> None:
    """Register the function that a numpy ufunc computes."""
    arguments = ", ".join(f"{{{k}}}" for k in range(ufunc.nin))
    register_operation(
        Operation(
            name=name,
            arity=ufunc.nin,
            documentation=documentation,
            function=ufunc,
            dtypes=as_ufunc(ufunc),
            takes_complex=takes_complex,
            cpu=cpu,
            cpu_is_long=cpu_is_long,
            cuda=f"{name}_({arguments})",
        )
    )


def _rsqrt(values: Any) -> Any:
    return 1 / np.sqrt(values)


def _erf(values: Any) -> Any:
    if isinstance(values, int | float):
        return np.float64(math.erf(values))
    from scipy.special import erf  # slow to import, and few programs need it

    dtype = np.exp.resolve_dtypes((values.dtype, None))[-1]
    return erf(values.astype(np.float64)).astype(dtype)


register_operation(
    Operation(
        name="where",
        arity=3,
        documentation="x where c is not zero, else y",
        function=np.where,
        dtypes=as_where,
        cpu={"": "pick({0}, {1}, {2})"},
        cuda="pick({0}, {1}, {2})",
    )
)
_function("exp", np.exp, "e to the power x", {"f": "exp({0})"}, cpu_is_long=True)
_function("log", np.log, "natural logarithm", {"f": "math.log({0})"})
_function("log1p", np.log1p, "log(1 + x), precise near 0", {"f": "math.log1p({0})"})
_function("expm1", np.expm1, "exp(x) − 1, precise near 0", {"f": "math.expm1({0})"})
_function("sqrt", np.sqrt, "square root", {"f": "math.sqrt({0})"})
register_operation(
    Operation(
        name="rsqrt",
        arity=1,
        documentation="1 / sqrt(x)",
        function=_rsqrt,
        dtypes=as_ufunc(np.sqrt),
        cpu={"f": "{t}(1) / math.sqrt({0})"},
        cuda="rsqrt_({0})",
    )
)
_function(
    "abs",
    np.absolute,
    "absolute value, real for a complex x",
    {
        "b": "{0}",
        "i": "pick({0} < 0, {t}(-{0}), {0})",
        "f": "abs({0})",
        "c": "math.hypot({0}.real, {0}.imag)",
    },
)
_function(
    "sign",
    np.sign,
    "−1, 0 or 1",
    {"": "{n}s = {t}({0} > 0) - {t}({0} < 0); pick({0} == {0}, {t}({n}s), {0})"},
    takes_complex=False,
)
_function("tanh", np.tanh, "hyperbolic tangent", {"f": "tanh({0})"}, cpu_is_long=True)
register_operation(
    Operation(
        name="erf",
        arity=1,
        documentation="error function",
        function=_erf,
        dtypes=as_ufunc(np.exp),
        takes_complex=False,
        cpu={"f": "{t}(math.erf(float64({0})))"},
        cpu_is_long=True,
        cuda="erf_({0})",
    )
)
_function("sin", np.sin, "sine", {"f": "math.sin({0})"})
_function("cos", np.cos, "cosine", {"f": "math.cos({0})"})
_function(
    "maximum",
    np.maximum,
    "the greater of two",
    {"b": "{0} | {1}", "i": "pick({0} > {1}, {0}, {1})", "f": "fmax({0}, {1})"},
    takes_complex=False,
)
_function(
    "minimum",
    np.minimum,
    "the lesser of two",
    {"b": "{0} & {1}", "i": "pick({0} < {1}, {0}, {1})", "f": "fmin({0}, {1})"},
    takes_complex=False,
)
_function(
    "conj",
    np.conjugate,
    "complex conjugate",
    {"c": "complex({0}.real, -{0}.imag)", "": "{0}"},
)
register_operation(
    Operation(
        name="real",
        arity=1,
        documentation="real part",
        function=np.real,
        dtypes=as_real_part,
        cpu={"c": "{0}.real", "": "{0}"},
        cuda="real_({0})",
    )
)
register_operation(
    Operation(
        name="imag",
        arity=1,
        documentation="imaginary part",
        function=np.imag,
        dtypes=as_real_part,
        cpu={"c": "{0}.imag", "": "{t}(0)"},
        cuda="imag_({0})",
    )
)


# ---- casts --------------------------------------------------------------------------------------


def _convert(values: Any, dtype: str) -> Any:
    """Return values in a dtype.

    What a float outside of an integer's range becomes would depend on the processor: here it is
    the nearest integer of that range, and 0 for nan.
    """
    array = np.asarray(values)
    converted = array.astype(dtype)
    if converted.dtype.kind != "i" or array.dtype.kind not in "fV":
        return converted
    limits = np.iinfo(converted.dtype)
    numbers = array.astype(np.float64)  # limits would be inf in half precision
    converted = np.where(numbers >= float(limits.max), limits.max, converted)
    converted = np.where(numbers <= float(limits.min), limits.min, converted)
    return np.where(np.isnan(numbers), 0, converted).astype(dtype)


def cast_operation(dtype: DType) -> Operation:
    """Return the cast to a dtype. Kernels write conversions themselves."""
    return Operation(
        name=dtype.name,
        arity=1,
        documentation=f"conversion to {dtype.name}",
        function=partial(_convert, dtype=dtype.name),
        dtypes=as_cast(dtype),
    )


for _dtype in DTYPES.values():
    register_operation(cast_operation(_dtype))
