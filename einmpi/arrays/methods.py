"""Functions that are calls of numpy's, made of a table: here the methods of DistArrays."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeAlias

import numpy as np

# numpy's function, the signature, and the documentation.
Row: TypeAlias = tuple[Callable[..., Any], str, str]


def make_functions(rows: Mapping[str, Row], module: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of a table by name. numpy calls the DistArrays back by its protocols."""
    functions: dict[str, Callable[..., Any]] = {}
    for name, (numpy_function, signature, documentation) in rows.items():
        function = _maker(signature)(numpy_function)
        function.__name__ = function.__qualname__ = name
        function.__module__ = module
        function.__doc__ = documentation
        functions[name] = function
    return functions


@cache
def _maker(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes functions with a signature, given the function of numpy to call.

    Parameters that have no name for callers, and `self`, are passed by position, others by name.
    """
    header = f"def function{signature}:"
    (definition,) = ast.parse(f"{header} ...").body
    assert isinstance(definition, ast.FunctionDef)
    parameters = definition.args
    passed = [each.arg for each in parameters.posonlyargs]
    for each in (*parameters.args, *parameters.kwonlyargs):
        passed.append("self" if each.arg == "self" else f"{each.arg}={each.arg}")
    if parameters.vararg is not None:
        passed.append(f"*{parameters.vararg.arg}")
    text = f"""
from __future__ import annotations
def make(numpy_function):
    {header}
        return numpy_function({", ".join(passed)})
    return function
"""
    scope: dict[str, Any] = {}
    exec(text, scope)
    make: Callable[[Callable[..., Any]], Callable[..., Any]] = scope["make"]
    return make


class ArrayMethods:
    """The methods of DistArrays that are calls of numpy's functions."""


_PLAIN = "(self) -> DistArray"
_OVER_AXES = "(self, axis: Axis = None, keepdims: bool = False) -> DistArray"
_TRUTH = "(self, axis: Axis = None, keepdims: bool = False, *, where: Any = True) -> DistArray"
_EXTREME = (
    "(self, axis: Axis = None, keepdims: bool = False, *, initial: Any = None, where: Any = True)"
    " -> DistArray"
)
_TOTAL = (
    "(self, axis: Axis = None, dtype: Any = None, keepdims: bool = False, *, initial: Any = None,"
    " where: Any = True) -> DistArray"
)
_DEVIATION = (
    "(self, axis: Axis = None, ddof: float = 0, keepdims: bool = False, *, where: Any = True)"
    " -> DistArray"
)
_PLACE = "(self, axis: int | None = None, keepdims: bool = False) -> DistArray"
_RUNNING_TOTAL = "(self, axis: int | None = None, dtype: Any = None) -> DistArray"
METHODS: dict[str, Row] = {
    # shapes, elements and their order
    "ravel": (
        np.ravel,
        _PLAIN,
        "Return the elements as a vector, in row-major order: a view, where numpy has one.",
    ),
    "swapaxes": (
        np.swapaxes,
        "(self, axis1: int, axis2: int) -> DistArray",
        "Return the tensor with two dimensions exchanged. Nothing moves.",
    ),
    "diagonal": (
        np.diagonal,
        "(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> DistArray",
        "Return the elements whose two indices are equal, or differ by `offset`.",
    ),
    "take": (
        np.take,
        "(self, indices: Any, axis: int | None = None) -> DistArray",
        "Return the elements at some indices of a dimension; without one, in row-major order.",
    ),
    "repeat": (
        np.repeat,
        "(self, repeats: Any, axis: int | None = None) -> DistArray",
        "Return each element repeated along a dimension; without one, in row-major order.",
    ),
    "nonzero": (
        np.nonzero,
        "(self) -> tuple[DistArray, ...]",
        "Return the indices of the elements that are not zero, in row-major order.",
    ),
    "argsort": (
        np.argsort,
        "(self, axis: int | None = -1) -> DistArray",
        "Return the indices that sort the elements; equal elements keep their order.",
    ),
    "searchsorted": (
        np.searchsorted,
        "(self, v: Any, side: str = 'left') -> DistArray",
        "Return where elements would be inserted to keep this vector sorted.",
    ),
    "squeeze": (
        np.squeeze,
        "(self, axis: Axis = None) -> DistArray",
        "Return the tensor without dimensions of extent 1. Nothing moves.",
    ),
    "copy": (
        np.copy,
        _PLAIN,
        "Return a copy whose elements can be changed without changing this tensor.",
    ),
    "conj": (np.conjugate, _PLAIN, "Return the complex conjugates."),
    "round": (
        np.round,
        "(self, decimals: int = 0) -> DistArray",
        "Return the elements rounded to this many decimals.",
    ),
    "clip": (
        np.clip,
        "(self, min: Any = None, max: Any = None) -> DistArray",
        "Return the elements limited to the range from `min` to `max`.",
    ),
    # aggregations
    "sum": (np.sum, _TOTAL, "Return the sum over some dimensions, by default over all."),
    "prod": (np.prod, _TOTAL, "Return the product over some dimensions, by default over all."),
    "max": (
        np.max,
        _EXTREME,
        "Return the greatest element along some dimensions, by default of all.",
    ),
    "min": (
        np.min,
        _EXTREME,
        "Return the least element along some dimensions, by default of all.",
    ),
    "any": (
        np.any,
        _TRUTH,
        "Return whether any element along some dimensions is not zero, by default of all.",
    ),
    "all": (
        np.all,
        _TRUTH,
        "Return whether all elements along some dimensions are not zero, by default of all.",
    ),
    "mean": (
        np.mean,
        "(self, axis: Axis = None, keepdims: bool = False, *, dtype: Any = None, where: Any = True)"
        " -> DistArray",
        "Return the mean along some dimensions, by default of all elements.",
    ),
    "var": (
        np.var,
        _DEVIATION,
        "Return the variance along some dimensions, by default of all elements.",
    ),
    "std": (
        np.std,
        _DEVIATION,
        "Return the standard deviation along some dimensions, by default of all elements.",
    ),
    "argmax": (
        np.argmax,
        _PLACE,
        "Return the index of the first greatest element; in row-major order without `axis`.",
    ),
    "argmin": (
        np.argmin,
        _PLACE,
        "Return the index of the first least element; in row-major order without `axis`.",
    ),
    "cumsum": (
        np.cumsum,
        _RUNNING_TOTAL,
        "Return the sums of all elements up to each one; without `axis`, in row-major order.",
    ),
    "cumprod": (
        np.cumprod,
        _RUNNING_TOTAL,
        "Return the products of all elements up to each; without `axis`, in row-major order.",
    ),
    "trace": (np.trace, "(self, offset: int = 0) -> DistArray", "Return the sum of the diagonal."),
    "norm": (
        np.linalg.norm,
        _OVER_AXES,
        "Return the square root of the sum of squares along some dimensions, by default of all.",
    ),
}
for _name, _method in make_functions(METHODS, __name__).items():
    _method.__qualname__ = f"DistArray.{_name}"
    setattr(ArrayMethods, _name, _method)
