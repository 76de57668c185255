"""The functions of the language, one record each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from einmpi.graph.derivatives import operations as derivatives
from einmpi.graph.derivatives.operations import Derivative
from einmpi.graph.dtypes import (
    as_argument,
    as_common_type,
    as_real_part,
    as_rounding,
    as_ufunc,
    as_where,
)
from einmpi.graph.operation_records import Operation, register_operation
from einmpi.special_functions import special_function


def _function(
    name: str,
    ufunc: np.ufunc,
    documentation: str,
    cpu: Mapping[str, str],
    derivative: Derivative | None,
    takes_complex: bool = True,
    cpu_is_long: bool = False,
    parameters: str = "",
    is_reproducible: bool = False,
) -> None:
    """Register the function that a numpy ufunc computes. It is flat if it has no derivative."""
    arguments = ", ".join(f"{{{k}}}" for k in range(ufunc.nin))
    register_operation(
        Operation(
            name=name,
            arity=ufunc.nin,
            documentation=documentation,
            parameters=parameters,
            function=ufunc,
            dtypes=as_ufunc(ufunc),
            takes_complex=takes_complex,
            cpu=cpu,
            cpu_is_long=cpu_is_long,
            cuda=f"{name}_({arguments})",
            derivative=derivative,
            is_flat=derivative is None,
            is_reproducible=is_reproducible,
        )
    )


def _rsqrt(values: Any) -> Any:
    return 1 / np.sqrt(values)


def _erf(values: Any) -> Any:
    if isinstance(values, int | float):
        return np.float64(math.erf(values))
    dtype = np.exp.resolve_dtypes((values.dtype, None))[-1]
    return special_function("erf")(values.astype(np.float64)).astype(dtype)


def _sigmoid(values: Any) -> Any:
    """Return 1 / (1 + exp(−x)) by the exponential that does not overflow."""
    numbers = np.asarray(values)
    dtype = np.exp.resolve_dtypes((numbers.dtype, None))[-1]
    # Half precision is rounded once; integers could not be negated.
    numbers = numbers.astype(np.float32 if dtype == np.float16 else dtype)
    is_positive = np.real(numbers) >= 0
    exponential = np.exp(np.where(is_positive, -numbers, numbers))
    return (np.where(is_positive, 1, exponential) / (1 + exponential)).astype(dtype)


def _itself(values: Any) -> Any:
    return values


def _clip(values: Any, low: Any, high: Any) -> Any:
    return np.minimum(np.maximum(values, low), high)


register_operation(
    Operation(
        name="where",
        arity=3,
        documentation="x where c is not zero, else y",
        parameters="c, x, y",
        function=np.where,
        dtypes=as_where,
        cpu={"": "pick({0}, {1}, {2})"},
        cuda="pick({0}, {1}, {2})",
        derivative=derivatives.of_where,
        is_reproducible=True,
    )
)
_function(
    "exp", np.exp, "e to the power x", {"f": "exp({0})"}, derivatives.of_exp, cpu_is_long=True
)
_function("log", np.log, "natural logarithm", {"f": "math.log({0})"}, derivatives.of_log)
_function(
    "log1p", np.log1p, "log(1 + x), precise near 0", {"f": "math.log1p({0})"}, derivatives.of_log1p
)
_function(
    "expm1", np.expm1, "exp(x) − 1, precise near 0", {"f": "math.expm1({0})"}, derivatives.of_expm1
)
_function("log2", np.log2, "logarithm to the base 2", {"f": "math.log2({0})"}, derivatives.of_log2)
_function(
    "log10", np.log10, "logarithm to the base 10", {"f": "math.log10({0})"}, derivatives.of_log10
)
_function(
    "sqrt",
    np.sqrt,
    "square root",
    {"f": "math.sqrt({0})"},
    derivatives.of_sqrt,
    is_reproducible=True,
)
register_operation(
    Operation(
        name="rsqrt",
        arity=1,
        documentation="1 / sqrt(x)",
        function=_rsqrt,
        dtypes=as_ufunc(np.sqrt),
        cpu={"f": "{t}(1) / math.sqrt({0})"},
        cuda="rsqrt_({0})",
        derivative=derivatives.of_rsqrt,
    )
)
_function(
    "abs",
    np.absolute,
    "absolute value, real for a complex x",
    {
        "b": "{0}",
        "i": "pick({0} < 0, {t}(-{0}), {0})",
        "u": "{0}",
        "f": "abs({0})",
        "c": "math.hypot({0}.real, {0}.imag)",
    },
    derivatives.of_abs,
    is_reproducible=True,
)
_function(
    "sign",
    np.sign,
    "−1, 0 or 1",
    {"": "{n}s = {t}({0} > 0) - {t}({0} < 0); pick({0} == {0}, {t}({n}s), {0})"},
    None,
    takes_complex=False,
    is_reproducible=True,
)


def _rounding(name: str, ufunc: np.ufunc, documentation: str, cpu: Mapping[str, str]) -> None:
    """Register a function that rounds floats; integers and bools are whole already."""

    def function(values: Any) -> Any:
        if np.asarray(values).dtype.kind in "biu":
            return values
        return ufunc(values)

    register_operation(
        Operation(
            name=name,
            arity=1,
            documentation=documentation,
            function=function,
            dtypes=as_rounding(ufunc),
            takes_complex="c" in cpu,
            cpu={"b": "{0}", "i": "{0}", **cpu},
            cuda=f"{name}_({{0}})",
            is_flat=True,
            is_reproducible=True,
        )
    )


_rounding("floor", np.floor, "the greatest integer that is at most x", {"f": "floor({0})"})
_rounding("ceil", np.ceil, "the least integer that is at least x", {"f": "ceil({0})"})
_rounding(
    "round",
    np.rint,
    "the nearest integer; halves go to the even one",
    {"f": "rint({0})", "c": "complex(rint({0}.real), rint({0}.imag))"},
)
_function(
    "isnan",
    np.isnan,
    "whether x, or a part of it, is nan",
    {"c": "({0}.real != {0}.real) | ({0}.imag != {0}.imag)", "": "{0} != {0}"},
    None,
)
_function(
    "isfinite",
    np.isfinite,
    "whether x is neither inf nor nan",
    {
        "f": "{0} - {0} == {t}(0)",
        "c": "({0}.real - {0}.real == {r}(0)) & ({0}.imag - {0}.imag == {r}(0))",
        "": "{0} == {0}",
    },
    None,
)
_function("sinh", np.sinh, "hyperbolic sine", {"f": "math.sinh({0})"}, derivatives.of_sinh)
_function("cosh", np.cosh, "hyperbolic cosine", {"f": "math.cosh({0})"}, derivatives.of_cosh)
_function(
    "tanh", np.tanh, "hyperbolic tangent", {"f": "tanh({0})"}, derivatives.of_tanh, cpu_is_long=True
)
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
        derivative=derivatives.of_erf,
    )
)
_function("sin", np.sin, "sine", {"f": "math.sin({0})"}, derivatives.of_sin)
_function("cos", np.cos, "cosine", {"f": "math.cos({0})"}, derivatives.of_cos)
_function("tan", np.tan, "tangent", {"f": "math.tan({0})"}, derivatives.of_tan)
_function(
    "arctan2",
    np.arctan2,
    "the angle of the point (x, y), from −π to π",
    {"f": "math.atan2({0}, {1})"},
    derivatives.of_arctan2,
    takes_complex=False,
    parameters="y, x",
)
register_operation(
    Operation(
        name="sigmoid",
        arity=1,
        documentation="1 / (1 + exp(−x)), precise for every x",
        function=_sigmoid,
        dtypes=as_ufunc(np.exp),
        cpu={
            "f": "{n}e = exp(-abs({0})); pick({0} >= 0, {t}(1), {n}e) / ({t}(1) + {n}e)",
        },
        cpu_is_long=True,
        cuda="sigmoid_({0})",
        derivative=derivatives.of_sigmoid,
    )
)
_function(
    "maximum",
    np.maximum,
    "the greater of two",
    {"b": "{0} | {1}", "i": "pick({0} > {1}, {0}, {1})", "f": "fmax({0}, {1})"},
    derivatives.of_maximum,
    takes_complex=False,
    is_reproducible=True,
)
_function(
    "minimum",
    np.minimum,
    "the lesser of two",
    {"b": "{0} & {1}", "i": "pick({0} < {1}, {0}, {1})", "f": "fmin({0}, {1})"},
    derivatives.of_minimum,
    takes_complex=False,
    is_reproducible=True,
)
register_operation(
    Operation(
        name="clip",
        arity=3,
        documentation="x, but at least low and at most high",
        parameters="x, low, high",
        function=_clip,
        dtypes=as_common_type,
        takes_complex=False,
        cpu={
            "b": "({0} | {1}) & {2}",
            "i": "{n}m = pick({0} > {1}, {0}, {1}); pick({n}m < {2}, {n}m, {2})",
            "f": "fmin(fmax({0}, {1}), {2})",
        },
        cuda="minimum_(maximum_({0}, {1}), {2})",
        derivative=derivatives.of_clip,
        is_reproducible=True,
    )
)
_function(
    "conj",
    np.conjugate,
    "complex conjugate",
    {"c": "complex({0}.real, -{0}.imag)", "": "{0}"},
    derivatives.of_conj,
    is_reproducible=True,
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
        derivative=derivatives.of_cast,
        is_reproducible=True,
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
        derivative=derivatives.of_imag,
        is_reproducible=True,
    )
)
register_operation(
    Operation(
        name="stop",
        arity=1,
        documentation="x itself, which `grad` takes for a constant",
        function=_itself,
        dtypes=as_argument,
        cpu={"": "{0}"},
        cuda="{0}",
        is_flat=True,
        is_reproducible=True,
    )
)
