"""Expressions and aggregations on whole arrays, by the numpy functions of their records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import DTYPES
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
    """Return the value of an expression, given the values of its operands and labels."""
    if isinstance(node, Const):
        return node.value
    if isinstance(node, Index):
        return positions[node.label]
    if isinstance(node, Arg):
        return values[node.position]
    assert not isinstance(node, Element), "a vertex's function reads operands, not names"
    arguments = [apply(arg, values, positions) for arg in node.args]
    return OPERATIONS[node.op].function(*arguments)
