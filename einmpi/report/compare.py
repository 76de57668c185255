"""The comparison of results with those of the reference evaluator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.graph.dtypes import kind_of

Array: TypeAlias = npt.NDArray[Any]

# Relative to the largest element. Sums are added up in another order, so the last digits differ.
TOLERANCE = {
    "float64": 1e-10,
    "complex128": 1e-10,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float16": 1e-2,
    "bfloat16": 8e-2,
}


def compare_with(
    reference: Mapping[str, Array], found: Mapping[str, Array]
) -> tuple[list[str], str]:
    """Return the names of the outputs that differ, and a line of text for each output."""
    wrong = []
    lines = []
    for name, expected in reference.items():
        allowed = TOLERANCE.get(expected.dtype.name, 0.0)
        error = relative_error(expected, found[name])
        verdict = "agrees"
        if not error <= allowed:
            verdict = "DIFFERS"
            wrong.append(name)
        lines.append(f"  {name}  {verdict}: error {error:.1e}, allowed {allowed:.0e}")
    return wrong, "\n".join(lines)


def relative_error(expected: Array, found: Array) -> float:
    """Return the largest difference, relative to the largest finite element.

    It is infinite if shapes, dtypes, infinities or the places of nan differ.
    """
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return np.inf
    finite = np.isfinite(expected)
    expected_odd = expected[~finite]
    found_odd = found[~finite]
    both_nan = (expected_odd != expected_odd) & (found_odd != found_odd)
    same = (expected_odd == found_odd) | both_nan
    if not same.all() or not np.isfinite(found[finite]).all():
        return np.inf
    if not finite.any():
        return 0.0
    wide = _wide_dtype(expected.dtype)
    expected_finite = expected[finite].astype(wide)
    difference = np.abs(expected_finite - found[finite].astype(wide)).max()
    largest = np.abs(expected_finite).max()
    return float(difference / largest) if largest else float(difference)


def _wide_dtype(dtype: np.dtype[Any]) -> Any:
    """Return a dtype in which differences neither overflow nor lose digits."""
    if dtype.kind == "c":
        return np.complex128
    if kind_of(dtype) == "f":
        return np.float64
    return object
