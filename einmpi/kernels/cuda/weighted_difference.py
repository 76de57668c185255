"""Weighted sums of differences by cuBLAS, where the user allows more rounding.

x·Σw is computed first, by generated kernels; then a matrix product subtracts w·y from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Call
from einmpi.kernels.contraction import required_contraction
from einmpi.kernels.contraction_split import MAX_TEMPORARY_BYTES
from einmpi.kernels.cuda import driver
from einmpi.kernels.cuda.blas import Generate, prepare_product
from einmpi.kernels.cuda.distance import MIN_TERMS
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.kernels.distances import DISTANCE_DTYPES
from einmpi.kernels.weighted_differences import recognise_weighted_difference


def prepare_weighted_difference(
    einsum: EinSum, operands: Sequence[DeviceArray], target: DeviceArray, generate: Generate
) -> Callable[[Sequence[DeviceArray], DeviceArray], None] | None:
    """Return a function that fills the target.

    Return None if the EinSum is not a weighted sum of differences, or if a generated kernel is the
    better way to compute it.
    """
    difference = recognise_weighted_difference(einsum)
    dtype = target.dtype
    if difference is None or dtype.name not in DISTANCE_DTYPES:
        return None
    if any(array.dtype != dtype for array in operands):
        return None
    if prod(einsum.extent[label] for label in einsum.aggregated) < MIN_TERMS:
        return None
    contraction = required_contraction(difference.product)
    scaled = difference.scaled
    if difference.is_positive:
        scaled = replace(scaled, function=Call("neg", (scaled.function,)))
    else:
        contraction = replace(contraction, scale=-contraction.scale)
    weights = difference.weights
    summed = difference.summed
    # No TF32: between near points, it would not leave enough digits.
    product = prepare_product(
        contraction, [operands[weights], operands[summed]], target, tf32=False, add_to_target=True
    )
    if product is None or product.copies_target or product.temporary_bytes > MAX_TEMPORARY_BYTES:
        return None
    multiply = product.with_copies(generate) if product.temporary_bytes else product
    cupy = driver.cupy()

    def call(operands: Sequence[DeviceArray], target: DeviceArray) -> None:
        sums = cupy.empty(difference.sums.bound, dtype)
        generate(difference.sums, [operands[weights]], sums)
        generate(scaled, [operands[difference.kept], sums], target)
        multiply([operands[weights], operands[summed]], target)

    return call
