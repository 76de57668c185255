"""Calls of numpy's functions on DistArrays, which come back through numpy's protocols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from einmpi.compiled.dist_array import DistArray


def call(function: Any, *arguments: Any, **options: Any) -> DistArray:
    """Call a function of numpy that returns a DistArray."""
    result: DistArray = function(*arguments, **options)
    return result


def unary(ufunc: Any) -> Callable[[DistArray], DistArray]:
    """Return a function of one tensor, computed by a ufunc of numpy."""

    def function(x: DistArray, /) -> DistArray:
        return call(ufunc, x)

    function.__name__ = ufunc.__name__
    function.__doc__ = f"Compute `numpy.{ufunc.__name__}` of each element."
    return function


def binary(ufunc: Any) -> Callable[[Any, Any], DistArray]:
    """Return a function of two tensors, or of one and a number, computed by a ufunc of numpy."""

    def function(x1: Any, x2: Any, /) -> DistArray:
        return call(ufunc, x1, x2)

    function.__name__ = ufunc.__name__
    function.__doc__ = f"Compute `numpy.{ufunc.__name__}` of each pair of elements."
    return function
