"""The operations of the language: operators, functions, and casts, which are made here.

Other modules import the table of all operations from this one, so that it is complete.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import einmpi.graph.functions
import einmpi.graph.operators
import einmpi.graph.random_numbers  # noqa: F401  # all three add their records to the table
from einmpi.graph.derivatives.operations import Derivative, of_cast
from einmpi.graph.dtypes import DTYPES, DType, as_cast
from einmpi.graph.operation_records import (
    OPERATIONS,
    Operation,
    functions,
    register_operation,
    unregister_operation,
)

__all__ = [
    "OPERATIONS",
    "Derivative",
    "Operation",
    "cast_operation",
    "functions",
    "register_operation",
    "unregister_operation",
]


def _convert(values: Any, dtype: str) -> Any:
    """Return values in a dtype.

    What a float outside of an integer's range becomes would depend on the processor: here it is
    the nearest integer of that range, and 0 for nan.
    """
    array = np.asarray(values)
    converted = array.astype(dtype)
    if converted.dtype.kind not in "iu" or array.dtype.kind not in "fV":
        return converted
    limits = np.iinfo(converted.dtype)
    numbers = array.astype(np.float64)  # limits would be inf in half precision
    converted = np.where(numbers >= float(limits.max), limits.max, converted)
    converted = np.where(numbers <= float(limits.min), limits.min, converted)
    return np.where(np.isnan(numbers), 0, converted).astype(dtype)


def cast_operation(dtype: DType) -> Operation:
    """Return the cast to a dtype. Kernels write conversions themselves."""
    is_continuous = dtype.kind in "fc"
    return Operation(
        name=dtype.name,
        arity=1,
        documentation=f"conversion to {dtype.name}",
        function=partial(_convert, dtype=dtype.name),
        dtypes=as_cast(dtype),
        derivative=of_cast if is_continuous else None,
        is_flat=not is_continuous,
        is_reproducible=True,
    )


for _dtype in DTYPES.values():
    register_operation(cast_operation(_dtype))
