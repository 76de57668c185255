"""Weighted sums of differences by BLAS, as x·Σw − w·y: many times faster than to sum differences,
and less exact where x and y are close to each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from einmpi.kernels.contraction import required_contraction
from einmpi.kernels.cpu.distance import row_blocks, rows_of, spread
from einmpi.kernels.cpu.prepared_products import prepare_by_blas
from einmpi.kernels.distances import DISTANCE_DTYPES
from einmpi.kernels.operands import Array
from einmpi.kernels.prepared import PreparedCall
from einmpi.kernels.weighted_differences import WeightedDifference


def prepare_weighted_difference(
    difference: WeightedDifference, operands: Sequence[Array], out: Array
) -> PreparedCall | None:
    """Return a function that fills the output; None if it does not support these dtypes."""
    if out.dtype.name not in DISTANCE_DTYPES:
        return None
    if any(array.dtype != out.dtype for array in operands):
        return None
    contraction = required_contraction(difference.product)
    multiply = prepare_by_blas(
        contraction, [operands[difference.weights], operands[difference.summed]], out
    )

    def call(operands: Sequence[Array], out: Array) -> None:
        with np.errstate(all="ignore"):
            multiply([operands[difference.weights], operands[difference.summed]], out)
            _add_kept(difference, operands, out)

    return call


def _add_kept(difference: WeightedDifference, operands: Sequence[Array], out: Array) -> None:
    """Combine the products w·y in the output with x·Σw."""
    output = difference.scaled.output
    kept = spread(operands[difference.kept], difference.scaled.operands[0], output)
    (index,) = difference.sums.operands
    axes = tuple(index.index(label) for label in difference.sums.aggregated)
    remaining = [label for label in index if label in output]
    sums = spread(operands[difference.weights].sum(axis=axes), remaining, output)
    for part in row_blocks(out):
        block = out[part]
        scaled = rows_of(kept, part) * rows_of(sums, part)
        if difference.is_positive:
            block -= scaled
        else:
            np.subtract(scaled, block, out=block)
