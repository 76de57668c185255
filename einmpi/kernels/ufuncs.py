"""Expressions and aggregations on whole arrays, by the numpy functions of their records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.arithmetic import compute_types
from einmpi.graph.dtypes import DTYPES, Type, computed_dtype
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Arg, Const, Element, Index, Scalar


def reduce_block(
    aggregation: str, values: npt.NDArray[Any], axes: tuple[int, ...], dtype: str
) -> Any:
    """Aggregate some axes of an array on the way to a tensor of this dtype.

    Rounded totals are kept in the accumulator of the dtype: a reference may not lose digits.
    """
    record = AGGREGATIONS[aggregation]
    if record.is_rounded:
        return record.combine.reduce(values, axis=axes, dtype=DTYPES[dtype].accumulator)
    return record.combine.reduce(values, axis=axes)


def apply(
    node: Scalar, values: Sequence[Any], positions: Mapping[str, npt.NDArray[np.int64]]
) -> Any:
    """Return the value of an expression, given the values of its operands and labels.

    Half precision is computed in float32; only a cast to it rounds. The caller rounds the result
    to the dtype of the tensor.
    """
    if isinstance(node, Const):
        return node.value
    if isinstance(node, Index):
        return positions[node.label]
    if isinstance(node, Arg):
        return in_float32(values[node.position])
    assert not isinstance(node, Element), "a vertex's function reads operands, not names"
    arguments = [apply(arg, values, positions) for arg in node.args]
    operation = OPERATIONS[node.op]
    if not operation.is_cast and _gives_float16(node.op, arguments):
        arguments = [np.asarray(argument).astype(np.float32) for argument in arguments]
    return in_float32(operation.function(*arguments))


def in_float32(values: Any) -> Any:
    """Return numbers in half precision as float32, all others unchanged."""
    dtype = getattr(values, "dtype", None)
    if dtype is None or computed_dtype(dtype) is dtype:
        return values
    return values.astype(np.float32)


def _gives_float16(op: str, arguments: Sequence[Any]) -> bool:
    """Return whether numpy would compute small integers or bools in float16, as sqrt does."""
    types: list[Type] = []
    for argument in arguments:
        if not isinstance(argument, np.ndarray | np.generic):
            types.append(type(argument))
            continue
        if argument.dtype.itemsize > 1:
            return False
        types.append(argument.dtype)
    return "float16" in compute_types(op, types)
