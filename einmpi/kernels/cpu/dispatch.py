"""One EinSum on the arrays of a rank: the first way that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Number
from einmpi.kernels.contraction import recognise
from einmpi.kernels.cpu import broadcast
from einmpi.kernels.cpu import compiled as fused
from einmpi.kernels.cpu import distance as fast_math
from einmpi.kernels.cpu.blas import contract
from einmpi.kernels.distances import recognise_distance

# Values that numpy has computed before a compiler has started. Only the extents decide, so that a run gives the same
# bits whether or not a kernel was compiled before.
WORTH_COMPILING = 2**18


def compute(
    einsum: EinSum,
    operands: Sequence[np.ndarray],
    out: np.ndarray,
    index: Mapping[str, np.ndarray],
    threads: int = 1,
    fast: bool = False,
) -> None:
    """Fill `out`. Extents are those of the arrays; `index` has the indices that a label's positions stand for. `fast`
    allows what rounds more."""
    contraction = recognise(einsum)
    distance = recognise_distance(einsum) if fast else None
    if distance is not None and fast_math.supports(distance, operands, out):
        fast_math.compute(distance, operands, out)
    elif contraction is not None and not _may_wrap(operands, contraction.scale):
        contract(contraction, operands, out)
    elif einsum.calls() >= WORTH_COMPILING and fused.supports(
        einsum, [array.dtype for array in operands]
    ):
        fused.compute(einsum, operands, out, index, threads)
    else:
        broadcast.compute(einsum, operands, out, index)


def _may_wrap(operands: Sequence[np.ndarray], scale: Number) -> bool:
    """Whether products of 32-bit integers may wrap around, which a contraction in 64 bits would not do."""
    if np.result_type(*operands) != np.int32 or not all(array.size for array in operands):
        return False
    largest = [max(abs(int(array.min())), abs(int(array.max()))) for array in operands]
    return prod(largest) * abs(scale) >= 2**31
