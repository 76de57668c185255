"""Operands with affine indices, such as x[i+k] or u[n-1-i], as views that labels alone index.

A view copies nothing: the labels step through the memory of the operand by its strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeAlias

from einmpi.graph.einsum import EinSum
from einmpi.graph.index_arithmetic import Affine, affine_of
from einmpi.graph.scalar import IndexEntries
from einmpi.kernels.operands import check_index_range
from einmpi.schedule.regions import Runs

Array: TypeAlias = Any  # of any library
# Makes a view of an array with this shape and these strides in bytes.
AsStrided: TypeAlias = Callable[[Array, tuple[int, ...], tuple[int, ...]], Array]


def view_operands(
    einsum: EinSum,
    operands: Sequence[Array],
    index: Sequence[tuple[str, Runs]],
    as_strided: AsStrided,
) -> tuple[EinSum, list[Array]]:
    """Return the EinSum and the operands with affine indices replaced by labels, where possible.

    `index` has the indices of labels that are used as numbers, where they do not start at 0.
    """
    starts: dict[str, int | None] = {}
    for label, runs in index:
        starts[label] = runs[0][0] if len(runs) == 1 else None
    indices = list(einsum.operands)
    arrays = list(operands)
    extent = einsum.extent
    for operand, entries in enumerate(einsum.operands):
        if not einsum.has_arithmetic(operand):
            continue
        found = affine_entries(entries, starts)
        if found is None:
            continue
        affine = tuple(found)
        labels = _labels_of(affine)
        indices[operand] = labels
        arrays[operand] = _view(arrays[operand], affine, labels, extent, as_strided)
    return replace(einsum, operands=tuple(indices)), arrays


def affine_entries(entries: IndexEntries, starts: Mapping[str, int | None]) -> list[Affine] | None:
    """Return the indices as functions of positions, which count from 0; None if one is not affine.

    A plain label already stands for positions, one in arithmetic for indices.
    """
    found = []
    for entry in entries:
        affine = affine_of(entry)
        if affine is None:
            return None
        constant = affine.constant
        if not isinstance(entry, str):
            for label, coefficient in affine.terms:
                start = starts.get(label, 0)
                if start is None:
                    return None
                constant += coefficient * start
        found.append(Affine(constant, affine.terms))
    return found


@lru_cache(maxsize=1024)
def _labels_of(affine: tuple[Affine, ...]) -> tuple[str, ...]:
    """Return the labels in the order in which they step through memory, the longest steps first."""
    found: dict[str, None] = {}
    for entry in affine:
        for label, _ in sorted(entry.terms, key=lambda term: -abs(term[1])):
            found[label] = None
    return tuple(found)


def _view(
    array: Array,
    affine: tuple[Affine, ...],
    labels: tuple[str, ...],
    extent: Mapping[str, int],
    as_strided: AsStrided,
) -> Array:
    shape = tuple(extent[label] for label in labels)
    if 0 in shape:
        return array.reshape(-1)[:0].reshape(shape)
    strides = dict.fromkeys(labels, 0)
    corner = []
    for entry, dimension_extent, stride in zip(affine, array.shape, array.strides, strict=True):
        low = high = entry.constant
        for label, coefficient in entry.terms:
            if extent[label] > 1:
                strides[label] += coefficient * stride
            reach = coefficient * (extent[label] - 1)
            low += min(reach, 0)
            high += max(reach, 0)
        check_index_range(low, high, dimension_extent)
        corner.append(slice(entry.constant, entry.constant + 1))
    return as_strided(array[tuple(corner)], shape, tuple(strides.values()))
