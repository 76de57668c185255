"""The reference evaluator: an EinGraph in one process, by broadcasting over blocks of the joined index space.

Slow and plain on purpose: it is what everything else is compared with. numpy only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from einmpi.errors import EinmpiError
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.einsum import EinSum
from einmpi.kernels.ufuncs import apply, reduce_block

BLOCK = 2**21  # elements of a temporary


Block = Mapping[str, range]


def evaluate(graph: EinGraph, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of a graph, in one process."""
    tensors = {vertex.name: np.asarray(inputs[vertex.name]) for vertex in graph.inputs}
    for vertex in graph.computed:
        assert vertex.einsum is not None
        operands = [tensors[name] for name in vertex.inputs]
        try:
            tensors[vertex.name] = compute(vertex.einsum, operands, vertex.dtype)
        except (ValueError, IndexError, MemoryError) as error:
            raise EinmpiError(f"{vertex.name}: {error}") from error
        for name in graph.last_reads[vertex.name]:
            del tensors[name]
    return {name: tensors[name] for name in graph.outputs}


def memory_needed(graph: EinGraph) -> int:
    """The most bytes of tensors `evaluate` holds at once."""
    held = peak = sum(vertex.nbytes for vertex in graph.inputs)
    for vertex in graph.computed:
        held += vertex.nbytes
        peak = max(peak, held)
        held -= sum(graph[name].nbytes for name in graph.last_reads[vertex.name])
    return peak


def compute(einsum: EinSum, operands: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """One EinSum: for every block of the output, ⊕ over blocks of the aggregated labels of ⊗."""
    result = np.empty(einsum.bound, dtype)
    axes = tuple(range(len(einsum.output), len(einsum.labels)))
    with np.errstate(all="ignore"):
        for outer in blocks(einsum, einsum.output):
            total: Any = None
            for inner in blocks(einsum, einsum.aggregated):
                part = evaluate_block(einsum, operands, {**outer, **inner})
                if einsum.aggregation is not None:
                    part = reduce_block(einsum.aggregation, part, axes, dtype)
                    ufunc = AGGREGATIONS[einsum.aggregation].combine
                    part = part if total is None else ufunc(total, part)
                total = part
            if total is None:  # an aggregated label has extent 0
                assert einsum.aggregation is not None
                total = AGGREGATIONS[einsum.aggregation].empty
            result[tuple(slice(index.start, index.stop) for index in outer.values())] = total
    return result


def blocks(einsum: EinSum, labels: Sequence[str]) -> Iterator[Block]:
    """Boxes that cover the labels' ranges, each of at most BLOCK elements over all labels of the EinSum."""
    step = {label: max(1, extent) for label, extent in einsum.extents}
    while math.prod(step.values()) > BLOCK:
        widest = max(step, key=lambda label: step[label])
        step[widest] = -(-step[widest] // 2)
    whole = [range(einsum.extent[label]) for label in labels]
    cuts = [
        [index[start : start + step[label]] for start in index[:: step[label]]]
        for label, index in zip(labels, whole, strict=True)
    ]
    for box in itertools.product(*cuts):
        yield dict(zip(labels, box, strict=True))


def evaluate_block(einsum: EinSum, operands: Sequence[np.ndarray], block: Block) -> np.ndarray:
    """⊗ on a block, with one axis a label: the output's first, then the aggregated ones."""
    positions = {
        label: np.arange(index.start, index.stop).reshape(
            [-1 if other == label else 1 for other in einsum.labels]
        )
        for label, index in block.items()
    }
    values: list[Any] = []
    for operand, index in zip(operands, einsum.operands, strict=True):
        places = [
            positions[e] if isinstance(e, str) else apply(e, values, positions) for e in index
        ]
        for place, extent in zip(places, operand.shape, strict=True):
            if np.size(place) and (np.min(place) < 0 or np.max(place) >= extent):
                raise IndexError(
                    f"an index from {np.min(place)} to {np.max(place)} is out of range; expected 0 to {extent - 1}"
                )
        values.append(operand[tuple(places)])
    result = apply(einsum.function, values, positions)
    return np.broadcast_to(result, [len(block[label]) for label in einsum.labels])
