"""Any EinSum by numpy's broadcasting over blocks of the joined index space: slow, small in memory, always right."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import walk
from einmpi.kernels.ufuncs import apply, reduce_block

BLOCK_ELEMENTS = (
    2**17
)  # elements of a temporary: a MiB or two, so that a handful of them stay in the cache
FULL_BLOCK_NODES = 16  # of the expressions: longer ones, which may hold many temporaries at once, go in smaller blocks


def compute_by_broadcasting(
    einsum: EinSum, operands: Sequence[np.ndarray], out: np.ndarray, index: Mapping[str, np.ndarray]
) -> None:
    """Fill `out`, block by block; `index` gives the indices that a label's positions stand for, where not 0, 1, …"""
    axes = tuple(range(len(einsum.output), len(einsum.labels)))
    steps = _steps(einsum)
    with np.errstate(all="ignore"):
        for outer in _boxes(einsum, einsum.output, steps):
            target = tuple(outer[label] for label in einsum.output)
            if einsum.aggregation is None:
                out[target] = _block(einsum, operands, index, outer)
                continue
            rule = AGGREGATIONS[einsum.aggregation]
            total: Any = None
            for inner in _boxes(einsum, einsum.aggregated, steps):
                values = _block(einsum, operands, index, {**outer, **inner})
                part = reduce_block(einsum.aggregation, values, axes, out.dtype.name)
                total = part if total is None else rule.combine(total, part)
            if total is None and rule.empty is None:  # an aggregated label has extent 0
                raise ValueError(f"{einsum.aggregation} of nothing has no value")
            out[target] = rule.empty if total is None else total


def _steps(einsum: EinSum) -> dict[str, int]:
    """How far a block reaches along each label; the last labels, which lie together in memory, stay long."""
    steps = {label: max(1, extent) for label, extent in einsum.extents}
    gathers = (entry for index in einsum.operands for entry in index if not isinstance(entry, str))
    nodes = sum(len(walk(expression)) for expression in (einsum.function, *gathers))
    size, limit = (
        prod(steps.values()),
        BLOCK_ELEMENTS * FULL_BLOCK_NODES // max(FULL_BLOCK_NODES, nodes),
    )
    for label in steps:
        while size > limit and steps[label] > 1:
            size = size // steps[label] * (half := -(-steps[label] // 2))
            steps[label] = half
    return steps


def _boxes(
    einsum: EinSum, labels: Sequence[str], steps: Mapping[str, int]
) -> Iterator[dict[str, slice]]:
    extent = einsum.extent
    cuts = [
        [slice(k, min(k + steps[x], extent[x])) for k in range(0, extent[x], steps[x])]
        for x in labels
    ]
    for box in itertools.product(*cuts):
        yield dict(zip(labels, box, strict=True))


def _block(
    einsum: EinSum,
    operands: Sequence[np.ndarray],
    index: Mapping[str, np.ndarray],
    box: Mapping[str, slice],
) -> np.ndarray:
    """⊗ on a block, with one axis a label: the output's first, then the aggregated ones."""
    labels = einsum.labels
    positions, numbers = {}, {}
    for axis, label in enumerate(labels):
        shape = [-1 if other == axis else 1 for other in range(len(labels))]
        positions[label] = np.arange(box[label].start, box[label].stop).reshape(shape)
        numbers[label] = (
            index[label][box[label]].reshape(shape) if label in index else positions[label]
        )
    values: list[Any] = []
    for operand, entries in zip(operands, einsum.operands, strict=True):
        plain = all(isinstance(entry, str) for entry in entries) and len(set(entries)) == len(
            entries
        )
        values.append(
            _view(operand, entries, labels, box)
            if plain  # type: ignore[arg-type]
            else _gather(operand, entries, values, positions, numbers)
        )
    result = apply(einsum.function, values, numbers)
    return np.broadcast_to(result, [box[label].stop - box[label].start for label in labels])


def _view(
    operand: np.ndarray, entries: Sequence[str], labels: Sequence[str], box: Mapping[str, slice]
) -> np.ndarray:
    """The operand's part of a block, without a copy, its axes in the order of the labels."""
    part = operand[tuple(box[label] for label in entries)]
    order = [entries.index(label) for label in labels if label in entries]
    ordered = part.transpose(order)
    return ordered[tuple(slice(None) if label in entries else None for label in labels)]


def _gather(
    operand: np.ndarray,
    entries: Sequence[Any],
    values: Sequence[Any],
    positions: Mapping[str, np.ndarray],
    numbers: Mapping[str, np.ndarray],
) -> Any:
    places = [
        positions[entry] if isinstance(entry, str) else apply(entry, values, numbers)
        for entry in entries
    ]
    for place, extent in zip(places, operand.shape, strict=True):
        if np.size(place) and (np.min(place) < 0 or np.max(place) >= extent):
            raise IndexError(
                f"an index from {np.min(place)} to {np.max(place)} is out of range; expected 0 to {extent - 1}"
            )
    return operand[tuple(places)]
