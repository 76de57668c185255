"""The pieces of a contraction: none needs more than a set number of bytes of temporaries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from einmpi.kernels.contraction import Contraction, Extent, Labels, Strides, dense_strides, size_of
from einmpi.kernels.lowering import Lowering, cheapest_lowering

MAX_TEMPORARY_BYTES = (
    56 * 2**20
)  # bytes of temporaries at a time, at the most: kernels stay below 64 MiB, all in all
MIN_MATRIX_SIDE = 128  # rows or columns that a matrix keeps when it is halved for that

Part: TypeAlias = Mapping[str, tuple[int, int]]
PartialLowering: TypeAlias = tuple[Lowering, Part]
Summands: TypeAlias = tuple[PartialLowering, ...]


def split_to_fit_memory(
    contraction: Contraction, dtypes: Labels, strides: Strides, dtype: str, part: Part
) -> Iterator[Summands]:
    """The output in parts that need no more than MAX_TEMPORARY_BYTES bytes of temporaries, and what is added up for each of them."""
    plan, extent = cheapest_lowering(contraction, dtypes, strides, dtype), dict(contraction.extents)
    if plan.bytes <= MAX_TEMPORARY_BYTES:
        yield ((plan, part),)
        return
    output = contraction.indices[-1]
    largest = max((copy for copy in plan.copies if copy), key=lambda copy: size_of(copy, extent))
    usable = [label for label in largest if label in output and _is_thick(plan, label, extent)]
    if not usable and size_of(output, extent) * np.dtype(dtype).itemsize > MAX_TEMPORARY_BYTES // 8:
        usable = [label for label in output if extent[label] > 1]
    if usable:
        for half, place in _halves(contraction, usable, part):
            yield from split_to_fit_memory(half, dtypes, strides, dtype, place)
    else:  # the output is small, and the sums are long
        dense = dense_strides(output, extent, dtype)
        yield tuple(
            _summands(contraction, (*dtypes[:-1], dtype), (*strides[:-1], dense), dtype, part)
        )


def _summands(
    contraction: Contraction, dtypes: Labels, strides: Strides, dtype: str, part: Part
) -> Iterator[PartialLowering]:
    plan = cheapest_lowering(contraction, dtypes, strides, dtype)
    inner = [
        label
        for copy in plan.copies[:-1]
        for label in copy or ()
        if label not in contraction.indices[-1]
    ]
    if plan.bytes <= MAX_TEMPORARY_BYTES // 2 or not inner:
        yield plan, part
        return
    for half, place in _halves(contraction, inner, part):
        yield from _summands(half, dtypes, strides, dtype, place)


def bytes_needed(summands: Summands) -> int:
    """Bytes of temporaries: the copies, and where there are several summands the total and one of them."""
    return max(plan.bytes + (2 * plan.result if len(summands) > 1 else 0) for plan, _ in summands)


def _halves(
    contraction: Contraction, labels: Sequence[str], part: Part
) -> Iterator[tuple[Contraction, Part]]:
    """Both halves of the longest of some labels."""
    extent = dict(contraction.extents)
    label = max(labels, key=lambda x: extent[x])
    start, stop = part.get(label, (0, extent[label]))
    for half in ((start, (start + stop) // 2), ((start + stop) // 2, stop)):
        extents = tuple(
            (x, half[1] - half[0] if x == label else size) for x, size in contraction.extents
        )
        yield replace(contraction, extents=extents), {**part, label: half}


def _is_thick(plan: Lowering, label: str, extent: Extent) -> bool:
    """Whether a label can be halved without making thin matrices of those that BLAS gets."""
    groups = [group for group in plan.matrix if label in group]
    return all(size_of(group, extent) >= 2 * MIN_MATRIX_SIDE for group in groups)
