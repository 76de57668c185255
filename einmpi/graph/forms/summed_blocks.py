"""Sums in blocks: what is summed in which order, so that bits do not depend on how labels are cut.

The first aggregated label is divided into blocks: index i of n is in block ⌊i·blocks/n⌋. The sums
of blocks are added in pairs, pairs of pairs, and so on: a binary tree. Axes that halve the label
give each rank all of a branch (`Side.blocks`), and ranks add up their branches pair by pair.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.einsum import EinSum, Reproducible
from einmpi.graph.scalar import labels_in

MOST_BLOCKS = 64
RANKS = 64  # a plan for so many may cut values into cubes
FEW_BLOCKS = 8  # of sums of few values
VALUES_OF_BLOCK = 2**15  # at least, of sums of many values


def with_summed_blocks(graph: EinGraph) -> EinGraph:
    """Return the graph in which EinSums know the extents of the program, and blocks of sums."""
    vertices = []
    for vertex in graph.vertices:
        if vertex.einsum is not None:
            einsum = replace(vertex.einsum, reproducible=None)
            record = Reproducible(einsum.extents, _blocks(vertex, einsum))
            vertex = replace(vertex, einsum=replace(einsum, reproducible=record))
        vertices.append(vertex)
    return replace(graph, vertices=tuple(vertices))


def _blocks(vertex: Vertex, einsum: EinSum) -> int:
    """Return into how many blocks the first aggregated label is divided; 0 if nothing is rounded.

    That is as many parts as a plan cuts it into that cuts the values into cubes, one a rank. Where
    there are many sums of few values, such as those of the rows of a matrix, others labels are cut.
    """
    if not einsum.aggregated or DTYPES[vertex.dtype].kind not in "fc":
        return 0
    if not AGGREGATIONS[einsum.required_aggregation].is_rounded:
        return 0
    extent = einsum.extent
    has_own_order = einsum.scan is not None or einsum.pick is not None
    if has_own_order or DTYPES[vertex.dtype].is_half or 0 in extent.values():
        return 1
    segments = einsum.segments
    scattered = () if segments is None else segments.labels
    labels = [label for label in einsum.labels if label not in scattered]
    values = prod(extent[label] for label in labels)
    summed = prod(extent[label] for label in einsum.aggregated)
    results = prod(einsum.bound)
    in_all = [set(einsum.output) <= set(labels_in(index)) for index in einsum.operands]
    if all(in_all) and summed <= results:
        return 1
    most = min(extent[einsum.aggregated[0]], max(FEW_BLOCKS, values // VALUES_OF_BLOCK))
    most = min(most, MOST_BLOCKS, values // results)
    blocks = 1
    while 2 * blocks <= most and (2 * blocks) ** 3 * values <= RANKS * summed**3:
        blocks *= 2
    return blocks


def blocks_of_labels(vertex: Vertex) -> tuple[int, ...]:
    """Return for each label of a vertex into how many halves of halves it may be cut; 0: any cut.

    Where values go to the ranks that have their places, each sum is complete.
    """
    einsum = vertex.computed_einsum
    record = einsum.reproducible
    if record is None or not record.blocks:
        return ()
    found = []
    for label in einsum.labels:
        blocks = 0
        if label in vertex.partial_labels:
            blocks = record.blocks if label == einsum.aggregated[0] else 1
        found.append(blocks)
    return tuple(found)
