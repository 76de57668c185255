"""Any EinSum by numpy's broadcasting, block by block over the joined index space of its labels:
slow, small in memory, always right.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import IndexEntries, Scalar, labels_in, walk
from einmpi.kernels.operands import (
    Array,
    Box,
    boxes,
    check_index_range,
    expressions_of,
    halve_step,
    part_of_array,
)
from einmpi.kernels.prepared import (
    NumpyCall,
    PreparedCall,
    apply,
    prepare_expression,
    reduce_block,
    view_maker,
)

BLOCK_ELEMENTS = 2**17  # of a temporary: a few MiB in all, so that they stay in the cache
# Longer expressions may hold more temporaries at once, so they are computed in smaller blocks.
FULL_BLOCK_NODES = 16


def compute_by_broadcasting(
    einsum: EinSum, operands: Sequence[Array], out: Array, index: Mapping[str, Array]
) -> None:
    """Compute an EinSum into `out`, block by block.

    Parameters
    ----------
    einsum
        What to compute; its extents are those of the arrays.
    operands, out
        The arrays. Operands are never written to.
    index
        The global indices of a label's positions, for labels that do not start at 0.

    Raises
    ------
    IndexError
        If an index of a gather is out of range.
    ValueError
        If an aggregation of no values has no result.
    """
    aggregated_axes = tuple(range(len(einsum.output), len(einsum.labels)))
    steps = _block_steps(einsum)
    with np.errstate(all="ignore"):
        for outer in _blocks(einsum, einsum.output, steps):
            target = tuple(outer[label] for label in einsum.output)
            if einsum.aggregation is None:
                out[target] = _compute_block(einsum, operands, index, outer)
                continue
            rule = AGGREGATIONS[einsum.aggregation]
            total: Any = None
            for inner in _blocks(einsum, einsum.aggregated, steps):
                values = _compute_block(einsum, operands, index, {**outer, **inner})
                part = reduce_block(einsum.aggregation, values, aggregated_axes, out.dtype.name)
                total = part if total is None else rule.combine(total, part)
            if total is None and rule.empty is None:  # an aggregated label has extent 0
                raise ValueError(f"{einsum.aggregation} of nothing has no value")
            out[target] = rule.empty if total is None else total


def prepare_by_broadcasting(
    einsum: EinSum, operands: Sequence[Array], out: Array, index: Mapping[str, Array]
) -> PreparedCall:
    """Return `compute_by_broadcasting` for arrays that are stored as these are.

    What is a single block, and gathers nothing, is prepared.
    """

    def compute(operands: Sequence[Array], out: Array) -> None:
        compute_by_broadcasting(einsum, operands, out, index)

    steps = _block_steps(einsum)
    is_one_block = all(steps[label] == extent for label, extent in einsum.extents)
    if not is_one_block:  # nor is one without elements
        return compute
    labels = einsum.labels
    box = {label: slice(0, extent) for label, extent in einsum.extents}
    views = []
    for operand, entries in zip(operands, einsum.operands, strict=True):
        plain = labels_in(entries)
        if len(set(plain)) < len(entries):  # a gather, or a diagonal
            return compute
        make_view = view_maker(operand, operand_view(operand, plain, labels, box))
        if make_view is None:
            return compute
        views.append(make_view)
    dtypes = [operand.dtype for operand in operands]
    evaluate = prepare_expression(einsum.function, dtypes, labels)
    if evaluate is None:
        return compute
    _, indices = label_values(labels, index, box)
    own_values = [indices[label] for label in labels]
    write = _prepare_writing(einsum, out)

    def compute_block(operands: Sequence[Array], out: Array) -> None:
        values = [make_view(operand) for make_view, operand in zip(views, operands, strict=True)]
        write(evaluate(values + own_values), out)

    def bind(operands: Sequence[Array], out: Array) -> Callable[[], None]:
        values = [make_view(operand) for make_view, operand in zip(views, operands, strict=True)]
        values += own_values
        return lambda: write(evaluate(values), out)

    return NumpyCall(compute_block, bind)


def _prepare_writing(einsum: EinSum, out: Array) -> Callable[[Any, Array], None]:
    """Return what aggregates the values of ⊗ on a single block, and writes them to the output."""

    def write_values(values: Any, out: Array) -> None:
        out[...] = values

    aggregation = einsum.aggregation
    if aggregation is None:
        return write_values
    shape = tuple(einsum.extent[label] for label in einsum.labels)
    axes = tuple(range(len(einsum.output), len(einsum.labels)))
    out_dtype = out.dtype.name
    record = AGGREGATIONS[aggregation]
    accumulator = np.dtype(DTYPES[out_dtype].accumulator)
    reduce = record.combine.reduce
    # numpy may sum in another order if it is given an output with dimensions.
    is_number = record.is_rounded and accumulator == out.dtype and out.ndim == 0

    def write_aggregates(values: Any, out: Array) -> None:
        if np.shape(values) != shape:
            values = np.broadcast_to(values, shape)
        if is_number:
            reduce(values, axes, accumulator, out)
        else:
            out[...] = reduce_block(aggregation, values, axes, out_dtype)

    return write_aggregates


def _block_steps(einsum: EinSum) -> dict[str, int]:
    """Return how far a block reaches along each label.

    The first labels are cut first: the last ones are contiguous in memory and stay long.
    """
    steps = {label: max(1, extent) for label, extent in einsum.extents}
    nodes = sum(len(walk(expression)) for expression in expressions_of(einsum))
    limit = BLOCK_ELEMENTS * FULL_BLOCK_NODES // max(FULL_BLOCK_NODES, nodes)
    for label in steps:
        halve_step(steps, label, limit)
    return steps


def _blocks(einsum: EinSum, labels: Sequence[str], steps: Mapping[str, int]) -> Iterator[Box]:
    """Yield the blocks of some labels."""
    return boxes(einsum.extent, {label: steps[label] for label in labels})


def _compute_block(
    einsum: EinSum, operands: Sequence[Array], index: Mapping[str, Array], box: Box
) -> Array:
    """Return ⊗ on a block, with one axis for each label: the output's, then the aggregated ones."""
    labels = einsum.labels
    positions, indices = label_values(labels, index, box)
    everything = range(len(operands))
    values = operand_values(operands, einsum.operands, everything, labels, box, positions, indices)
    result = apply(einsum.function, values, indices)
    return np.broadcast_to(result, [box[label].stop - box[label].start for label in labels])


def label_values(
    labels: Sequence[str], index: Mapping[str, Array], box: Box
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the positions of labels in a block, and the indices that these stand for.

    They are arrays along the label's own axis, so that broadcasting combines them.
    """
    positions: dict[str, Array] = {}
    indices: dict[str, Array] = {}
    for axis, label in enumerate(labels):
        shape = [1] * len(labels)
        shape[axis] = -1
        positions[label] = _numbers(box[label].start, box[label].stop).reshape(shape)
        indices[label] = positions[label]
        if label in index:
            indices[label] = index[label][box[label]].reshape(shape)
    return positions, indices


@bounded_cache(4)
def _numbers(start: int, stop: int) -> Array:
    """Return the numbers of a range, which many blocks may share."""
    numbers = np.arange(start, stop)
    numbers.setflags(write=False)
    return numbers


def operand_values(
    operands: Sequence[Array],
    indices: Sequence[IndexEntries],
    needed: Container[int],
    labels: Sequence[str],
    box: Box | None,
    positions: Mapping[str, Array],
    numbers: Mapping[str, Array],
) -> list[Any]:
    """Return the values of those operands that are needed, None for the others.

    With a box, operands indexed by labels alone are views. `positions` and `numbers` are those of
    `label_values`, by which the others are gathered.
    """
    values: list[Any] = []
    for number, (operand, entries) in enumerate(zip(operands, indices, strict=True)):
        plain = labels_in(entries)
        if number not in needed:
            values.append(None)
        elif box is not None and len(set(plain)) == len(entries):
            values.append(operand_view(operand, plain, labels, box))
        else:  # a gather, or a diagonal
            values.append(_gathered_operand(operand, entries, values, positions, numbers))
    return values


def operand_view(operand: Array, index: Sequence[str], labels: Sequence[str], box: Box) -> Array:
    """Return an operand's part of a block as a view, with its axes in the order of the labels."""
    part: Array = part_of_array(operand, index, box)
    order = [index.index(label) for label in labels if label in index]
    new_axes = tuple(slice(None) if label in index else None for label in labels)
    return part.transpose(order)[(..., *new_axes)]  # a view, even without dimensions


def _gathered_operand(
    operand: Array,
    entries: Sequence[str | Scalar],
    values: Sequence[Any],
    positions: Mapping[str, Array],
    indices: Mapping[str, Array],
) -> Any:
    """Return an operand's elements on a block at positions that are computed.

    An index expression may use the values of the operands before this one.
    """
    places: list[Any] = []
    for entry, extent in zip(entries, operand.shape, strict=True):
        place = positions[entry] if isinstance(entry, str) else apply(entry, values, indices)
        if np.size(place):
            check_index_range(np.min(place), np.max(place), extent)
        places.append(place)
    return operand[tuple(places)]
