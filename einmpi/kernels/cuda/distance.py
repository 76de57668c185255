"""Sums of squared differences by cuBLAS, where the user allows what rounds more: −2 x·y added to |x|² + |y|²."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call
from einmpi.kernels.contraction import recognise_contraction
from einmpi.kernels.contraction_split import MAX_TEMPORARY_BYTES
from einmpi.kernels.cuda import driver
from einmpi.kernels.cuda.blas import Generate, prepare_product
from einmpi.kernels.distances import DISTANCE_DTYPES, recognise_distance, squared_norms

LONG = 64  # terms of a sum from which on this takes less than the differences: it goes over the output more often


def prepare_distance(
    einsum: EinSum, operands: Sequence[Any], target: Any, generate: Generate
) -> Callable[[Sequence[Any], Any], None] | None:
    """What fills the target; None where the EinSum is no such sum, or a generated kernel does it better."""
    found, dtype = recognise_distance(einsum), target.dtype
    if (
        found is None
        or dtype.name not in DISTANCE_DTYPES
        or any(array.dtype != dtype for array in operands)
    ):
        return None
    is_real = dtype.kind == "f"
    if prod(einsum.extent[label] for label in einsum.aggregated) < LONG or (
        found.absolute and not is_real
    ):
        return None
    contraction = recognise_contraction(found.product)
    assert contraction is not None
    # Without TF32: where points are near, what it leaves of the digits of a product is not enough.
    contraction = replace(contraction, scale=-2 * contraction.scale)
    product = prepare_product(contraction, operands, target, tf32=False, onto=True)
    if product is None or product.copies[2] is not None or product.bytes > MAX_TEMPORARY_BYTES:
        return None
    multiply = product.with_copies(generate) if product.bytes else product
    squares = [squared_norms(found.product, k) for k in (0, 1)]
    extents = tuple((label, einsum.extent[label]) for label in einsum.output)
    both = EinSum(
        einsum.output,
        tuple(e.output for e in squares),
        Call("+", (Arg(0), Arg(1))),
        None,
        (),
        extents,
    )
    cupy = driver.cupy()

    def run(operands: Sequence[Any], target: Any) -> None:
        norms = [cupy.empty(each.bound, dtype) for each in squares]
        for each, array, norm in zip(squares, operands, norms, strict=True):
            generate(each, [array, array], norm)
        generate(both, norms, target)
        multiply(operands, target)
        if is_real:
            cupy.maximum(target, 0, out=target)  # what rounding leaves below 0; nan stays

    return run
