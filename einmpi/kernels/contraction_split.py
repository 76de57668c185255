"""Split a contraction so that its temporaries fit into a set number of bytes: the output is cut
into parts, and where it is too small for that, the sums are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np

from einmpi.graph.labels import unique
from einmpi.kernels.contraction import (
    Contraction,
    Extent,
    Labels,
    dense_strides,
    drop_labels,
    keep_labels,
    size_of,
)
from einmpi.kernels.lowering import Lowering, StoredArray, cheapest_lowering

# With what else a kernel allocates, it stays below 64 MiB.
MAX_TEMPORARY_BYTES = 56 * 2**20
MIN_MATRIX_SIDE = 128  # rows or columns that splitting leaves to a matrix

Part: TypeAlias = Mapping[str, tuple[int, int]]  # start and stop of each label that was split


class LoweredPart(NamedTuple):
    """A part of a contraction's labels and the way to contract it."""

    lowering: Lowering
    part: Part


Summands: TypeAlias = tuple[LoweredPart, ...]  # that are added up to one part of the output


def split_to_fit_memory(
    contraction: Contraction, arrays: tuple[StoredArray, ...], dtype: str, part: Part
) -> Iterator[Summands]:
    """Yield parts of the output that each need at most MAX_TEMPORARY_BYTES of temporaries.

    Halving a label of the output that the largest copy has halves that copy. Where this would cut
    matrices into thin strips, other labels of the output are halved; and where the output itself
    is small, the contracted labels are, so that the part becomes a sum of several products.

    Parameters
    ----------
    contraction
        The contraction of the part; its extents are those of the part.
    arrays
        How the whole factors and the whole output are stored.
    dtype
        The dtype in which products are computed.
    part
        The part of each label that was split before; {} at first.
    """
    lowering = cheapest_lowering(contraction, arrays, dtype)
    if lowering.temporary_bytes <= MAX_TEMPORARY_BYTES:
        yield (LoweredPart(lowering, part),)
        return
    extent = dict(contraction.extents)
    output = contraction.indices[-1]
    itemsize = np.dtype(dtype).itemsize
    candidates = keep_labels(_largest_copy(lowering, extent), output)
    labels = [label for label in candidates if _leaves_large_matrices(lowering, label, extent)]
    is_large = size_of(output, extent) * itemsize > MAX_TEMPORARY_BYTES // 8
    if not labels and is_large:
        labels = [label for label in output if extent[label] > 1]
    if labels:
        for half, half_part in _halves(contraction, labels, part):
            yield from split_to_fit_memory(half, arrays, dtype, half_part)
    else:  # the output is small and the sums are long
        total = StoredArray(dtype, dense_strides(output, extent, itemsize))
        yield tuple(_split_sum(contraction, (*arrays[:-1], total), dtype, part))


def _split_sum(
    contraction: Contraction, arrays: tuple[StoredArray, ...], dtype: str, part: Part
) -> Iterator[LoweredPart]:
    """Yield parts of the contracted labels that are small enough to be copied.

    Half of the memory is left for the total and for the summand that is added to it next.
    """
    lowering = cheapest_lowering(contraction, arrays, dtype)
    copied = unique(*(order or () for order in lowering.copies[:-1]))
    contracted = drop_labels(copied, contraction.indices[-1])
    if lowering.temporary_bytes <= MAX_TEMPORARY_BYTES // 2 or not contracted:
        yield LoweredPart(lowering, part)
        return
    for half, half_part in _halves(contraction, contracted, part):
        yield from _split_sum(half, arrays, dtype, half_part)


def bytes_needed(summands: Summands) -> int:
    """Return the most bytes of temporaries that are needed at a time to compute some summands.

    A single product goes straight to the output. Several are added to a total, one by one, so the
    total and one product exist in addition to the copies.
    """
    results = 0 if len(summands) == 1 else 2
    return max(
        lowering.temporary_bytes + results * lowering.result_bytes for lowering, _ in summands
    )


def _halves(
    contraction: Contraction, labels: Sequence[str], part: Part
) -> Iterator[tuple[Contraction, Part]]:
    """Yield both halves of the longest of some labels."""
    extent = dict(contraction.extents)
    longest = max(labels, key=lambda label: extent[label])
    start, stop = part.get(longest, (0, extent[longest]))
    middle = (start + stop) // 2
    for half in ((start, middle), (middle, stop)):
        extents = {**extent, longest: half[1] - half[0]}
        yield replace(contraction, extents=tuple(extents.items())), {**part, longest: half}


def _largest_copy(lowering: Lowering, extent: Extent) -> Labels:
    """Return the labels of the largest temporary."""
    orders = [order for order in lowering.copies if order]
    return max(orders, key=lambda order: size_of(order, extent))


def _leaves_large_matrices(lowering: Lowering, label: str, extent: Extent) -> bool:
    """Return whether halving a label leaves matrices large enough for BLAS to be fast."""
    groups = [group for group in lowering.matrix if label in group]
    return all(size_of(group, extent) >= 2 * MIN_MATRIX_SIDE for group in groups)
