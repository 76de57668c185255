"""Sums of differences by cuBLAS, where the user allows more rounding: sums that contain a product.

Squared distances are |x|² + |y|² − 2 x·y, weighted sums of differences are x·Σw − w·y. Generated
kernels compute what comes before the matrix product, which is then added to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call
from einmpi.kernels.contraction import Contraction, required_contraction
from einmpi.kernels.contraction_split import MAX_TEMPORARY_BYTES
from einmpi.kernels.cuda import driver
from einmpi.kernels.cuda.blas import Generate, prepare_product
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.kernels.cuda.launch import PreparedCall
from einmpi.kernels.distances import DISTANCE_DTYPES, recognise_distance, squared_norms
from einmpi.kernels.weighted_differences import recognise_weighted_difference

# With fewer terms, a kernel that adds up the differences is faster: it writes the output once.
MIN_TERMS = 64


class _SumWithProduct(NamedTuple):
    """An EinSum as other EinSums, of which the last gives the target, plus a matrix product."""

    # Each with the numbers of its operands: those of the whole EinSum, then earlier results.
    before: tuple[tuple[EinSum, tuple[int, ...]], ...]
    product: Contraction
    factors: tuple[int, int]  # of the product
    is_positive: bool  # rounding may leave less than 0, which becomes 0


def prepare_sum_with_product(
    einsum: EinSum, operands: Sequence[DeviceArray], target: DeviceArray, generate: Generate
) -> PreparedCall | None:
    """Return a function that fills the target.

    Return None if the EinSum is not such a sum, or if a generated kernel is the better way to
    compute it.
    """
    dtype = target.dtype
    if dtype.name not in DISTANCE_DTYPES or any(array.dtype != dtype for array in operands):
        return None
    form = _as_distance(einsum, dtype.kind == "f") or _as_weighted_difference(einsum)
    if form is None or prod(einsum.extent[label] for label in einsum.aggregated) < MIN_TERMS:
        return None
    factors = [operands[number] for number in form.factors]
    # No TF32: between near points, it would not leave enough digits.
    product = prepare_product(form.product, factors, target, tf32=False, add_to_target=True)
    if product is None or product.copies[2] or product.temporary_bytes > MAX_TEMPORARY_BYTES:
        return None
    multiply = product.prepared(generate)
    cupy = driver.cupy()

    def call(operands: Sequence[DeviceArray], target: DeviceArray) -> None:
        arrays = list(operands)
        *sums, (last, last_numbers) = form.before
        for each, numbers in sums:
            result = cupy.empty(each.bound, dtype)
            generate(each, [arrays[number] for number in numbers], result)
            arrays.append(result)
        generate(last, [arrays[number] for number in last_numbers], target)
        multiply([operands[number] for number in form.factors], target)
        if form.is_positive:
            cupy.maximum(target, 0, out=target)  # nan stays

    return call


def _as_distance(einsum: EinSum, is_real: bool) -> _SumWithProduct | None:
    distance = recognise_distance(einsum)
    if distance is None or (distance.absolute and not is_real):
        return None
    x, y = [squared_norms(distance.product, operand) for operand in (0, 1)]
    extents = tuple((label, einsum.extent[label]) for label in einsum.output)
    function = Call("+", (Arg(0), Arg(1)))
    total = EinSum(einsum.output, (x.output, y.output), function, None, (), extents)
    product = required_contraction(distance.product)
    product = replace(product, scale=-2 * product.scale)
    return _SumWithProduct(((x, (0, 0)), (y, (1, 1)), (total, (2, 3))), product, (0, 1), is_real)


def _as_weighted_difference(einsum: EinSum) -> _SumWithProduct | None:
    difference = recognise_weighted_difference(einsum)
    if difference is None:
        return None
    product = required_contraction(difference.product)
    scaled = difference.scaled
    if difference.is_positive:
        scaled = replace(scaled, function=Call("neg", (scaled.function,)))
    else:
        product = replace(product, scale=-product.scale)
    weights = difference.weights
    before = ((difference.sums, (weights,)), (scaled, (difference.kept, 3)))
    return _SumWithProduct(before, product, (weights, difference.summed), is_positive=False)
