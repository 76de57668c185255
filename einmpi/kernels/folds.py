"""What generated kernels of both kinds have in common: dtypes of arguments, powers, aggregations as operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from einmpi.graph.scalar import CASTS, COMPARISONS, OPS, Const, Scalar, Type

WIDE = {"float32": "float64", "complex64": "complex128"}  # of totals: long sums keep their digits
FOLDS = {"sum": "+", "prod": "*", "max": "maximum", "min": "minimum", "any": "|", "all": "&"}
MAX_POWER = {"i": 64, "f": 4, "c": 3}  # constant exponents up to these are written as products


def compute_types(op: str, types: Sequence[Type]) -> tuple[str, ...]:
    """The dtypes to which numpy converts the arguments of `op`."""
    if op == "where":
        parts = [
            kind(0) if isinstance(kind, type) and kind is not bool else np.dtype(kind)
            for kind in types[1:]
        ]
        return ("bool", *[np.result_type(*parts).name] * 2)
    if op in CASTS or op in ("real", "imag"):
        return (np.dtype(types[0]).name,)
    weak = [np.dtype(bool) if kind is bool else kind for kind in types]
    found = tuple(
        dtype.name for dtype in getattr(np, OPS[op].ufunc).resolve_dtypes((*weak, None))[:-1]
    )
    if op in COMPARISONS and found[0] in ("bool", "int32"):
        return ("int64", "int64")  # a constant need not fit into int32 to be compared with it
    return found


def whole_power(exponent: Scalar, kind: str) -> int | None:
    """A constant exponent, if the power is written as products."""
    if (
        not isinstance(exponent, Const)
        or isinstance(exponent.value, complex)
        or not math.isfinite(exponent.value)
    ):
        return None
    power = int(exponent.value)
    return power if power == exponent.value and 0 <= power <= MAX_POWER[kind] else None


def neutral(aggregation: str, dtype: str) -> Any:
    """What changes nothing in a dtype: −0 for sums, since 0 + −0 is 0."""
    kind = np.dtype(dtype).kind
    if aggregation in ("sum", "prod"):
        return {"sum": {"f": -0.0, "c": complex(-0.0, -0.0)}.get(kind, 0), "prod": 1}[aggregation]
    if kind == "b":
        return aggregation in ("all", "min")
    limits = (-np.inf, np.inf) if kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return limits[aggregation == "min"]
