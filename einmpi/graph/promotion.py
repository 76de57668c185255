"""Dtype rules of operations: the dtypes in which numpy computes, and the dtype of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from einmpi.errors import OperationError
from einmpi.graph.dtypes import DTYPES, DType, Type

# From the types of the arguments: the dtype to which each argument is converted, then the dtype
# of the result. Raises TypeError if there is none.
DtypeRule: TypeAlias = Callable[[tuple[Type, ...]], tuple[np.dtype[Any], ...]]


def as_ufunc(ufunc: np.ufunc) -> DtypeRule:
    """The rule of a numpy ufunc."""

    def rule(types: tuple[Type, ...]) -> tuple[np.dtype[Any], ...]:
        # numpy takes int, float and complex as weak types, but not bool.
        given = [np.dtype(bool) if kind is bool else kind for kind in types]
        return ufunc.resolve_dtypes((*given, None))

    return rule


def as_comparison(ufunc: np.ufunc) -> DtypeRule:
    """The rule of a comparison: integers that int64 holds are compared as int64.

    So a constant that does not fit into the other dtype can still be compared with it. numpy
    compares uint64 with int64 as the numbers that they are.
    """
    resolve = as_ufunc(ufunc)
    int64 = np.dtype(np.int64)

    def rule(types: tuple[Type, ...]) -> tuple[np.dtype[Any], ...]:
        first, second, result = resolve(types)
        if first.kind in "biu" and (first.name != "uint64" or types[0] is int):
            first = int64
        if second.kind in "biu" and (second.name != "uint64" or types[1] is int):
            second = int64
        return first, second, result

    return rule


def as_where(types: tuple[Type, ...]) -> tuple[np.dtype[Any], ...]:
    """The rule of where(condition, x, y)."""
    result = as_common_type(types[1:])[-1]
    return np.dtype(bool), result, result, result


def as_common_type(types: tuple[Type, ...]) -> tuple[np.dtype[Any], ...]:
    """The rule of functions whose arguments and result have one dtype, which holds them all."""
    samples: list[Any] = []
    for kind in types:
        if isinstance(kind, type) and kind is not bool:
            samples.append(kind(0))  # a Python number is weak
        else:
            samples.append(np.dtype(kind))
    result = np.result_type(*samples)
    return (result,) * (len(types) + 1)


def as_rounding(ufunc: np.ufunc) -> DtypeRule:
    """The rule of functions that round: integers and bools stay what they are."""
    resolve = as_ufunc(ufunc)

    def rule(types: tuple[Type, ...]) -> tuple[np.dtype[Any], ...]:
        dtype = np.dtype(types[0])
        return (dtype, dtype) if dtype.kind in "biu" else resolve(types)

    return rule


def as_argument(types: tuple[Type, ...]) -> tuple[np.dtype[Any], ...]:
    """The rule of a function that returns its argument."""
    dtype = np.dtype(types[0])
    return dtype, dtype


def as_real_part(types: tuple[Type, ...]) -> tuple[np.dtype[Any], ...]:
    """The rule of real(x) and imag(x)."""
    dtype = np.dtype(types[0])
    return dtype, np.dtype(DTYPES[dtype.name].real)


def as_cast(target: DType) -> DtypeRule:
    """The rule of a cast to a dtype."""

    def rule(types: tuple[Type, ...]) -> tuple[np.dtype[Any], ...]:
        source = np.dtype(types[0])
        if source.kind == "c" and target.kind != "c":
            raise OperationError(
                f"{target.name} does not take complex numbers",
                "a real argument",
                "use real or imag first",
            )
        return source, np.dtype(target.name)

    return rule
