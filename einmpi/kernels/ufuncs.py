"""What the operations of the scalar language and its aggregations mean: numpy's functions on arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from einmpi.graph.einsum import AGGREGATIONS
from einmpi.graph.scalar import CASTS, OPS, Arg, Const, Element, Index, Scalar

# Sums and products in single precision are accumulated in double: a reference may not lose digits.
_WIDE = {
    "float16": np.float64,
    "bfloat16": np.float64,
    "float32": np.float64,
    "complex64": np.complex128,
}


def reduce_block(aggregation: str, values: np.ndarray, axes: tuple[int, ...], dtype: str) -> Any:
    """Aggregate some axes of an array on the way to a tensor of this dtype."""
    ufunc = getattr(np, AGGREGATIONS[aggregation].ufunc)
    if aggregation in ("sum", "prod"):
        return ufunc.reduce(values, axis=axes, dtype=_WIDE.get(dtype, dtype))
    return ufunc.reduce(values, axis=axes)


def _erf(values: np.ndarray) -> Any:
    dtype = np.exp.resolve_dtypes((values.dtype, None))[-1]
    return np.vectorize(math.erf, otypes=[np.float64])(values).astype(dtype)


_OWN: dict[str, Callable[..., Any]] = {
    "where": np.where,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "erf": _erf,
    "real": np.real,
    "imag": np.imag,
    **{dtype: (lambda x, dtype=dtype: np.asarray(x).astype(dtype)) for dtype in CASTS},
}


def apply(node: Scalar, values: Sequence[Any], positions: Mapping[str, np.ndarray]) -> Any:
    """The value of an expression, given those of its operands and labels."""
    if isinstance(node, Const):
        return node.value
    if isinstance(node, Index):
        return positions[node.label]
    if isinstance(node, Arg):
        return values[node.position]
    assert not isinstance(node, Element), "a vertex's function reads operands, not names"
    function = _OWN.get(node.op) or getattr(np, OPS[node.op].ufunc)
    return function(*(apply(arg, values, positions) for arg in node.args))
