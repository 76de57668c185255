"""One EinSum on the arrays of a rank, by the first kernel that supports it."""

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
from einmpi.kernels.operands import Array

# Applications of ⊗ that numpy completes before a compiler has even started. Only the extents
# decide, so that a run gives the same bits whether or not a kernel was compiled before.
WORTH_COMPILING = 2**18


def compute_einsum(
    einsum: EinSum,
    operands: Sequence[Array],
    out: Array,
    index: Mapping[str, Array],
    threads: int = 1,
    fast: bool = False,
) -> None:
    """Compute an EinSum into `out`.

    Parameters
    ----------
    einsum
        What to compute; its extents are those of the arrays.
    operands, out
        The arrays. Operands are never written to.
    index
        The global indices of a label's positions, for labels that do not start at 0.
    threads
        How many threads a compiled kernel may use.
    fast
        Allow kernels that are faster but round more.
    """
    squared_distance = recognise_distance(einsum) if fast else None
    if squared_distance is not None and distance.supports_distance(squared_distance, operands, out):
        distance.compute_distance(squared_distance, operands, out)
        return
    contraction = recognise_contraction(einsum)
    if contraction is not None and not _may_wrap(operands, contraction.scale):
        compute_by_blas(contraction, operands, out)
        return
    dtypes = [array.dtype for array in operands]
    if einsum.calls() >= WORTH_COMPILING and compiled.supports_compiled_loops(einsum, dtypes):
        compiled.compute_by_compiled_loops(einsum, operands, out, index, threads)
        return
    broadcast.compute_by_broadcasting(einsum, operands, out, index)


def _may_wrap(operands: Sequence[Array], scale: Number) -> bool:
    """Return whether products of 32-bit integers may wrap around.

    BLAS would compute the exact product, and so differ from the definition of the operation.
    """
    if np.result_type(*operands) != np.int32:
        return False
    if not all(array.size for array in operands):
        return False
    largest = [max(abs(int(array.min())), abs(int(array.max()))) for array in operands]
    return prod(largest) * abs(scale) >= 2**31
