"""Expressions and aggregations on whole arrays, by the numpy functions of their records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.arithmetic import compute_types
from einmpi.graph.dtypes import DTYPES, Type, computed_dtype
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Arg, Const, Element, Index, Scalar

# An expression as a function of the values of its operands and labels.
Evaluate: TypeAlias = Callable[[Sequence[Any]], Any]


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


def prepare_expression(
    node: Scalar, dtypes: Sequence[np.dtype[Any]], labels: Sequence[str]
) -> Evaluate | None:
    """Return a function that computes what `apply` does for operands of these dtypes.

    It takes the values of the operands, then those of the labels. Return None if half precision
    occurs on the way, which `apply` computes in float32.
    """
    # Arrays without elements tell which dtype numpy gives to each value on the way.
    samples = [np.empty(0, dtype) for dtype in dtypes]
    samples += [np.empty(0, np.int64) for _ in labels]
    with np.errstate(all="ignore"):
        prepared = _prepare(node, len(dtypes), list(labels), samples)
    return None if prepared is None else prepared[0]


def _prepare(
    node: Scalar, operands: int, labels: list[str], samples: Sequence[Any]
) -> tuple[Evaluate, Any] | None:
    """Return a function for an expression, and what it gives for the samples."""
    if isinstance(node, Const):
        constant = node.value
        return lambda values: constant, constant
    if isinstance(node, Arg | Index):
        number = node.position if isinstance(node, Arg) else operands + labels.index(node.label)
        sample = samples[number]
        if in_float32(sample) is not sample:
            return None
        return itemgetter(number), sample
    assert not isinstance(node, Element), "a vertex's function reads operands, not names"
    arguments = []
    for argument in node.args:
        prepared = _prepare(argument, operands, labels, samples)
        if prepared is None:
            return None
        arguments.append(prepared)
    own_samples = [sample for _, sample in arguments]
    operation = OPERATIONS[node.op]
    if not operation.is_cast and _gives_float16(node.op, own_samples):
        return None
    result = operation.function(*own_samples)
    if in_float32(result) is not result:
        return None
    return _call(operation.function, [evaluate for evaluate, _ in arguments]), result


def _call(function: Callable[..., Any], arguments: Sequence[Evaluate]) -> Evaluate:
    """Return a function that calls another one with the values of expressions."""
    if len(arguments) == 1:
        only = arguments[0]
        return lambda values: function(only(values))
    if len(arguments) == 2:
        first, second = arguments
        return lambda values: function(first(values), second(values))
    return lambda values: function(*[argument(values) for argument in arguments])


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
