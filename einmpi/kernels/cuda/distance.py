"""Sums of squared differences by cuBLAS, where the user allows more rounding.

|x|² + |y|² is computed first, by generated kernels; then a matrix product adds −2 x·y to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call
from einmpi.kernels.contraction import required_contraction
from einmpi.kernels.contraction_split import MAX_TEMPORARY_BYTES
from einmpi.kernels.cuda import driver
from einmpi.kernels.cuda.blas import Generate, prepare_product
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.kernels.distances import DISTANCE_DTYPES, recognise_distance, squared_norms

# With fewer terms, a kernel that adds up the differences is faster: it writes the output once.
MIN_TERMS = 64


def prepare_distance(
    einsum: EinSum, operands: Sequence[DeviceArray], target: DeviceArray, generate: Generate
) -> Callable[[Sequence[DeviceArray], DeviceArray], None] | None:
    """Return a function that fills the target.

    Return None if the EinSum is not a sum of squared differences, or if a generated kernel is the
    better way to compute it.
    """
    distance = recognise_distance(einsum)
    dtype = target.dtype
    if distance is None or dtype.name not in DISTANCE_DTYPES:
        return None
    if any(array.dtype != dtype for array in operands):
        return None
    is_real = dtype.kind == "f"
    if distance.absolute and not is_real:
        return None
    if prod(einsum.extent[label] for label in einsum.aggregated) < MIN_TERMS:
        return None
    contraction = required_contraction(distance.product)
    contraction = replace(contraction, scale=-2 * contraction.scale)
    # No TF32: between near points, it would not leave enough digits.
    product = prepare_product(contraction, operands, target, tf32=False, add_to_target=True)
    if product is None or product.copies_target or product.temporary_bytes > MAX_TEMPORARY_BYTES:
        return None
    multiply = product.with_copies(generate) if product.temporary_bytes else product
    norm_einsums = [squared_norms(distance.product, operand) for operand in (0, 1)]
    sum_of_norms = EinSum(
        einsum.output,
        tuple(norm.output for norm in norm_einsums),
        Call("+", (Arg(0), Arg(1))),
        None,
        (),
        tuple((label, einsum.extent[label]) for label in einsum.output),
    )
    cupy = driver.cupy()

    def call(operands: Sequence[DeviceArray], target: DeviceArray) -> None:
        norms = [cupy.empty(norm.bound, dtype) for norm in norm_einsums]
        for norm_einsum, array, norm in zip(norm_einsums, operands, norms, strict=True):
            generate(norm_einsum, [array, array], norm)
        generate(sum_of_norms, norms, target)
        multiply(operands, target)
        if is_real:
            cupy.maximum(target, 0, out=target)  # rounding may leave less than 0; nan stays

    return call
