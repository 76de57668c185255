"""Results against the reference evaluator's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

# Relative to the largest element: sums are added up in another order, so digits at the end differ.
TOLERANCE = {
    "float64": 1e-10,
    "complex128": 1e-10,
    "float32": 1e-4,
    "complex64": 1e-4,
    "float16": 1e-2,
    "bfloat16": 8e-2,
}


def compare_with(
    reference: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]
) -> tuple[list[str], str]:
    """(outputs that differ, a line for each output)."""
    wrong, lines = [], []
    for name, expected in reference.items():
        allowed = TOLERANCE.get(expected.dtype.name, 0.0)
        error = relative_error(expected, found[name])
        fine = error <= allowed
        lines.append(
            f"  {name}  {'agrees' if fine else 'DIFFERS'}: error {error:.1e}, allowed {allowed:.0e}"
        )
        if not fine:
            wrong.append(name)
    return wrong, "\n".join(lines)


def relative_error(expected: np.ndarray, found: np.ndarray) -> float:
    """The largest difference, relative to the largest finite element; infinite where nan or infinities differ."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return np.inf
    finite = np.isfinite(expected)
    odd = ~finite
    same = (expected[odd] == found[odd]) | (
        (expected[odd] != expected[odd]) & (found[odd] != found[odd])
    )
    if not same.all() or not np.isfinite(found[finite]).all():
        return np.inf
    if not finite.any():
        return 0.0
    wide = (
        np.complex128
        if expected.dtype.kind == "c"
        else np.float64
        if expected.dtype.kind == "f"
        else object
    )
    difference = np.abs(expected[finite].astype(wide) - found[finite].astype(wide)).max()
    largest = np.abs(expected[finite].astype(wide)).max()
    return float(difference / largest) if largest else float(difference)
