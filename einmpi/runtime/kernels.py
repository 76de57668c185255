"""One EinSum on the arrays of a rank: the first way that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from einmpi.graph.einsum import EinSum
from einmpi.runtime import broadcast


def compute(einsum: EinSum, operands: Sequence[np.ndarray], out: np.ndarray, index: Mapping[str, np.ndarray],
            threads: int = 1) -> None:  # fmt: skip
    """Fill `out`. Extents are those of the arrays; `index` has the indices that a label's positions stand for."""
    broadcast.compute(einsum, operands, out, index)
