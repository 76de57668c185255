"""bfloat16, Google Brain's float: numpy knows it by the package ml_dtypes, imported where a job names it."""

from __future__ import annotations

from typing import Any

import numpy as np

from einmpi.errors import InputError
from einmpi.graph.scalar import BFLOAT16

_MISSING = "bfloat16 needs the package ml_dtypes"
_EXTRAS = "pip install 'einmpi[cuda13]' or 'einmpi[cuda12]', or another dtype"


def bfloat16() -> np.dtype[Any]:
    """The dtype; TypeError where the package is missing."""
    try:
        import ml_dtypes  # noqa: F401  # numpy knows the name from then on
    except ImportError:
        raise TypeError(f"{_MISSING}: {_EXTRAS}") from None
    return np.dtype(BFLOAT16)


def check_bfloat16(place: str, dtype: str) -> None:
    """Make numpy know bfloat16 where that is the dtype."""
    if dtype == BFLOAT16:
        try:
            bfloat16()
        except TypeError:
            raise InputError(place, _MISSING, _EXTRAS) from None


def is_bfloat16(kind: Any) -> bool:
    return isinstance(kind, np.dtype) and kind.name == BFLOAT16


def as_float16(kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """Types for numpy's rules: bfloat16 takes part as float16 does; beside that one as float32, which has both."""
    stand_in = np.dtype(np.float32 if np.dtype(np.float16) in kinds else np.float16)
    return tuple(stand_in if is_bfloat16(kind) else kind for kind in kinds)
