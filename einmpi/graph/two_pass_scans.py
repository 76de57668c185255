"""Scans in two passes: totals of blocks, a scan of these totals, then a scan inside of each block.

The blocks of a dimension are the shares of ranks that cut it, so that only totals move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.eingraph import EinGraph, Vertex, make_vertex
from einmpi.graph.einsum import EinSum, Scan, make_einsum
from einmpi.graph.forms.scan_blocks import (
    Blocks,
    block_before,
    place_in_block,
    position_up_to,
    value_up_to,
)
from einmpi.graph.scalar import Call, Const, Element, Index, Scalar, unlike


def can_be_blocked(vertex: Vertex, count: int) -> bool:
    """Return whether a vertex is a scan with at least one value in each of so many blocks."""
    einsum = vertex.einsum
    if einsum is None or einsum.scan is None or count < 2:
        return False
    scan = einsum.scan
    extent = einsum.extent
    if extent[scan.along] != extent[scan.scanned] or extent[scan.along] < count:
        return False
    record = AGGREGATIONS[einsum.required_aggregation]
    # What takes the place of later values must not change an aggregate, however often it is taken.
    return scan.masked in (record.empty, record.neutral(_dtype_of_totals(vertex)))


def _dtype_of_totals(vertex: Vertex) -> np.dtype[np.generic]:
    """Return the dtype of totals, in which sums keep their digits."""
    record = AGGREGATIONS[vertex.computed_einsum.required_aggregation]
    dtype = DTYPES[vertex.dtype]
    if record.is_rounded or dtype.is_half:
        return np.dtype(dtype.accumulator)
    return np.dtype(vertex.dtype)


def in_blocks(vertex: Vertex, known: Mapping[str, Vertex], count: int) -> list[Vertex]:
    """Return the vertices that compute a scan in two passes over blocks; it is the last of them."""
    einsum = vertex.computed_einsum
    scan = einsum.scan
    assert scan is not None
    blocks = Blocks(count, einsum.extent[scan.along])
    (source,) = vertex.inputs
    writer = _Writer(vertex, einsum, scan, blocks, known[source])
    totals = writer.totals(unlike(f"{vertex.name}_totals", known))
    offsets = writer.offsets(unlike(f"{vertex.name}_offsets", known), totals)
    return [totals, offsets, writer.result(offsets)]


@dataclass(frozen=True)
class _Writer:
    """Writes the vertices of one scan."""

    vertex: Vertex
    einsum: EinSum
    scan: Scan
    blocks: Blocks
    source: Vertex

    def new_label(self, suffix: str) -> str:
        return unlike(f"{self.scan.along}_{suffix}", self.einsum.labels)

    @property
    def lines(self) -> list[str]:
        """The labels of the output without the one along which values are scanned."""
        return [label for label in self.einsum.output if label != self.scan.along]

    def value(self, position: Scalar) -> Element:
        """Return the value at this position of a line."""
        index: list[str | Scalar] = []
        for entry in self.einsum.operands[0]:
            index.append(position if entry == self.scan.scanned else entry)
        return Element(self.source.name, tuple(index))

    def made(
        self,
        name: str,
        output: Sequence[str],
        expression: Scalar,
        aggregated: str,
        extents: Mapping[str, int],
        known: Mapping[str, Vertex],
    ) -> Vertex:
        einsum, inputs = make_einsum(
            output, expression, self.einsum.aggregation, (aggregated,), extents
        )
        vertex = make_vertex(name, einsum, inputs, known, (), self.vertex.places)
        if name == self.vertex.name:
            return replace(vertex, origin=self.vertex.origin)
        return replace(vertex, is_auxiliary=True)

    def totals(self, name: str) -> Vertex:
        """Return the vertex with the total of each block."""
        block = self.new_label("block")
        inside = self.new_label("inside")
        dtype = _dtype_of_totals(self.vertex).name
        position, is_inside = place_in_block(self.blocks, block, inside)
        value: Scalar = self.value(position)
        if dtype != self.source.dtype:
            value = Call(dtype, (value,))
        expression = Call("where", (is_inside, value, Const(self.scan.masked)))
        extents = {
            **self.einsum.extent,
            block: self.blocks.count,
            inside: self.blocks.longest,
        }
        known = {self.source.name: self.source}
        return self.made(name, [*self.lines, block], expression, inside, extents, known)

    def offsets(self, name: str, totals: Vertex) -> Vertex:
        """Return the vertex with the totals of all blocks up to each: a short scan."""
        block = self.new_label("block")
        earlier = self.new_label("earlier")
        is_earlier = Call("<=", (Index(earlier), Index(block)))
        total = Element(totals.name, (*self.lines, earlier))
        expression = Call("where", (is_earlier, total, Const(self.scan.masked)))
        extents = {
            **self.einsum.extent,
            block: self.blocks.count,
            earlier: self.blocks.count,
        }
        known = {totals.name: totals}
        return self.made(name, [*self.lines, block], expression, earlier, extents, known)

    def result(self, offsets: Vertex) -> Vertex:
        """Return the vertex with the scan itself."""
        inside = self.new_label("inside")
        along = self.scan.along
        value = self.value(position_up_to(self.blocks, along, inside))
        index = (*self.lines, block_before(self.blocks, along))
        joined: Scalar = Call(
            AGGREGATIONS[self.einsum.required_aggregation].operation,
            (Element(offsets.name, index), self.truth(value)),
        )
        if offsets.dtype != self.vertex.dtype:
            joined = Call(self.vertex.dtype, (joined,))
        expression = value_up_to(
            self.blocks, along, inside, joined, self.truth(value), self.scan.masked
        )
        extents = {**self.einsum.extent, inside: self.blocks.longest}
        known = {self.source.name: self.source, offsets.name: offsets}
        return self.made(self.vertex.name, self.einsum.output, expression, inside, extents, known)

    def truth(self, value: Scalar) -> Scalar:
        """Return the value as a bool where a number stands for one."""
        if self.vertex.dtype == "bool" and self.source.dtype != "bool":
            return Call("bool", (value,))
        return value


def with_scans_in_blocks(graph: EinGraph, names: Sequence[str], count: int) -> EinGraph:
    """Return the graph with these scans computed in two passes, over so many blocks each."""
    known = dict(graph.by_name)
    vertices: list[Vertex] = []
    for vertex in graph.vertices:
        if vertex.name not in names:
            vertices.append(vertex)
            continue
        for part in in_blocks(vertex, known, count):
            known[part.name] = part
            vertices.append(part)
    return EinGraph(tuple(vertices), graph.outputs)
