"""One EinSum on the arrays of a rank: the first way that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Number
from einmpi.kernels.contraction import recognise_contraction
from einmpi.kernels.cpu import broadcast, compiled, distance
from einmpi.kernels.cpu.blas import compute_by_blas
from einmpi.kernels.distances import recognise_distance

# Values that numpy has computed before a compiler has started. Only the extents decide, so that a run gives the same
# bits whether or not a kernel was compiled before.
WORTH_COMPILING = 2**18


def compute_einsum(
    einsum: EinSum,
    operands: Sequence[np.ndarray],
    out: np.ndarray,
    index: Mapping[str, np.ndarray],
    threads: int = 1,
    fast: bool = False,
) -> None:
    """Fill `out`. Extents are those of the arrays; `index` has the indices that a label's positions stand for. `fast`
    allows what rounds more."""
    contraction = recognise_contraction(einsum)
    squared_distance = recognise_distance(einsum) if fast else None
    if squared_distance is not None and distance.supports_distance(squared_distance, operands, out):
        distance.compute_distance(squared_distance, operands, out)
    elif contraction is not None and not _may_wrap(operands, contraction.scale):
        compute_by_blas(contraction, operands, out)
    elif einsum.calls() >= WORTH_COMPILING and compiled.supports_compiled_loops(
        einsum, [array.dtype for array in operands]
    ):
        compiled.compute_by_compiled_loops(einsum, operands, out, index, threads)
    else:
        broadcast.compute_by_broadcasting(einsum, operands, out, index)


def _may_wrap(operands: Sequence[np.ndarray], scale: Number) -> bool:
    """Whether products of 32-bit integers may wrap around, which a contraction in 64 bits would not do."""
    if np.result_type(*operands) != np.int32 or not all(array.size for array in operands):
        return False
    largest = [max(abs(int(array.min())), abs(int(array.max()))) for array in operands]
    return prod(largest) * abs(scale) >= 2**31
