"""Powers with a small constant exponent, which generated kernels write as products."""

from __future__ import annotations

import math

from einmpi.graph.scalar import Const, Scalar

MAX_EXPONENT = {"i": 64, "u": 64, "f": 4, "c": 3}  # by kind of number; numpy's results are the same


def whole_power(exponent: Scalar, kind: str) -> int | None:
    """Return a constant exponent if the power is written as products, else None."""
    if not isinstance(exponent, Const) or isinstance(exponent.value, complex):
        return None
    if not math.isfinite(exponent.value):
        return None
    power = int(exponent.value)
    if power != exponent.value or not 0 <= power <= MAX_EXPONENT[kind]:
        return None
    return power
