"""Products under a scattered ⊕: values are scattered before or after a matrix product, whichever
takes fewer operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.eingraph import EinGraph, Vertex, make_vertex
from einmpi.graph.einsum import EinSum, inside_segments, make_einsum, reopen
from einmpi.graph.index_arithmetic import arithmetic_labels
from einmpi.graph.scalar import (
    Call,
    Const,
    Element,
    Index,
    Names,
    Scalar,
    labels_of,
    rebuild,
    unique,
    unlike,
)
from einmpi.graph.segments import Segments, with_other_guard, without_guard
from einmpi.graph.split_products import ProductSplitter, constants_and_tensors

# ---- picked --------------------------------------------------------------------------------------
#
# Gathers from a dimension that ranks cut: each rank picks what it has, and the parts are
# summed.
#
# Z[b,y[b]] becomes P[b] ← Σ[l](where(y[b] == l, Z[b,l], 0)). Where Z is large and cut along l,
# this moves P instead of Z.


@dataclass(frozen=True)
class PickedGather:
    """A gather that a vertex of its own can compute: an element, and its gathered dimension."""

    element: Element
    dimension: int


def picked_gathers(vertex: Vertex, known: Mapping[str, Vertex]) -> tuple[PickedGather, ...]:
    """Return the gathers of a vertex that can be picked.

    These are elements of floating-point tensors with one gathered dimension; their other indices
    are different labels.
    """
    if vertex.einsum is None or not vertex.einsum.is_gathering:
        return ()
    if vertex.einsum.segments is not None:
        return ()  # a value that goes nowhere may have any index
    found: dict[PickedGather, None] = {}

    def leaf(node: Scalar) -> Scalar:
        if isinstance(node, Element):
            dimension = _gathered_dimension(node)
            is_rounded = np.dtype(known[node.tensor].dtype).kind in "fc"
            if dimension is not None and is_rounded:
                found[PickedGather(node, dimension)] = None
        return node

    rebuild(reopen(vertex.einsum, vertex.inputs), leaf)
    return tuple(found)


def _gathered_dimension(element: Element) -> int | None:
    """Return the only dimension that is gathered; None if another index is not a plain label."""
    gathered = []
    labels = []
    for dimension, entry in enumerate(element.index):
        if isinstance(entry, str):
            labels.append(entry)
        elif arithmetic_labels(entry) is None:
            gathered.append(dimension)
        else:
            return None
    if len(gathered) != 1 or len(set(labels)) < len(labels):
        return None
    return gathered[0]


def with_picked_gathers(
    graph: EinGraph, names: Sequence[str]
) -> tuple[EinGraph, dict[str, list[str]]]:
    """Return the graph in which these vertices read picked values, and the vertices that pick."""
    known = dict(graph.by_name)
    taken = Names(known)
    vertices: list[Vertex] = []
    added: dict[str, list[str]] = {}
    for vertex in graph.vertices:
        if vertex.name in names:
            picks: dict[Scalar, Vertex] = {}
            for gather in picked_gathers(vertex, known):
                picks[gather.element] = _pick_vertex(vertex, gather, known, taken)
            for pick in picks.values():
                known[pick.name] = pick
            vertices.extend(picks.values())
            added[vertex.name] = [pick.name for pick in picks.values()]
            vertex = _reading(vertex, picks, known)
            known[vertex.name] = vertex
        vertices.append(vertex)
    return EinGraph(tuple(vertices), graph.outputs), added


def _pick_vertex(
    vertex: Vertex, gather: PickedGather, known: Mapping[str, Vertex], taken: Names
) -> Vertex:
    """Return the vertex that picks the values of a gather."""
    einsum = vertex.computed_einsum
    element = gather.element
    index = element.index[gather.dimension]
    assert not isinstance(index, str)
    whole = known[element.tensor].bound[gather.dimension]
    label = unlike(f"{element.tensor}_at", einsum.labels)
    entries = list(element.index)
    entries[gather.dimension] = label
    output = unique(labels_of(element))
    is_picked = Call("==", (index, Index(label)))
    expression = Call("where", (is_picked, Element(element.tensor, tuple(entries)), Const(0)))
    extents = {**einsum.extent, label: whole}
    picking, inputs = make_einsum(output, expression, "sum", (label,), extents)
    picking = replace(picking, picked_extent=whole)
    pick = make_vertex(
        taken.take_new(f"{vertex.name}_picked"), picking, inputs, known, places=vertex.places
    )
    return replace(pick, is_auxiliary=True)


def _reading(vertex: Vertex, picks: Mapping[Scalar, Vertex], known: Mapping[str, Vertex]) -> Vertex:
    """Return a vertex that reads picked values in place of the gathers."""
    einsum = vertex.computed_einsum

    def leaf(node: Scalar) -> Scalar:
        pick = picks.get(node)
        if pick is None:
            return node
        return Element(pick.name, pick.computed_einsum.output)

    expression = rebuild(reopen(einsum, vertex.inputs), leaf)
    changed, inputs = make_einsum(
        einsum.output, expression, einsum.aggregation, einsum.aggregated, einsum.extent
    )
    made = make_vertex(vertex.name, changed, inputs, known, vertex.origin, vertex.places)
    return replace(made, is_auxiliary=vertex.is_auxiliary)


# A matrix product may take this many times the operations of scattered values: it is faster.
MATRIX_PRODUCT_ALLOWANCE = 1.125


def split_scattered(graph: EinGraph, strict: bool = False) -> EinGraph:
    """Take factors out of scattered aggregates where that saves operations.

    Y[k,g] ← Σ[e,f](where(dst[e] == k, X[e,f] × W[f,g], 0)) becomes one of

        Y_1[k,f] ← Σ[e](where(dst[e] == k, X[e,f], 0))     Y_1[e,g] ← Σ[f](X[e,f] × W[f,g])
        Y[k,g] ← Σ[f](Y_1[k,f] × W[f,g])                   Y[k,g] ← Σ[e](where(dst[e] == k, …, 0))

    As in `split`, integers stay the same bit for bit; if `strict`, so do all other numbers.
    """
    names = Names(vertex.name for vertex in graph.vertices)
    known: dict[str, Vertex] = {}
    for vertex in graph.vertices:
        einsum = vertex.einsum
        if einsum is not None and einsum.segments is not None:
            _ScatterSplitter(vertex, einsum, einsum.segments, known, names, strict).split()
        else:
            known[vertex.name] = vertex
    return replace(graph, vertices=tuple(known.values()))


@dataclass
class _ScatterSplitter:
    """Splits one vertex. `known` receives the vertices, `names` has those in use."""

    vertex: Vertex
    einsum: EinSum
    segments: Segments
    known: dict[str, Vertex]
    names: Names
    strict: bool

    def __post_init__(self) -> None:
        expression = reopen(self.einsum, self.vertex.inputs)
        assert isinstance(expression, Call)
        self.condition, self.chosen, self.masked = expression.args
        # The aggregated labels of indices, such as e in dst[e], and the others.
        self.sent: list[str] = []
        self.summed: list[str] = []
        for label in self.einsum.aggregated:
            if label in self.segments.index_labels:
                self.sent.append(label)
            else:
                self.summed.append(label)

    def split(self) -> None:
        """Add the vertex, or the two vertices that take the fewest operations."""
        product = self._product()
        chosen = [self.vertex]
        if product is not None:
            fewest = self.einsum.operations() * MATRIX_PRODUCT_ALLOWANCE
            for candidate in self._candidates(product):
                operations = self._operations_of(candidate)
                if operations < fewest:
                    fewest = operations
                    chosen = candidate
        for vertex in chosen:
            self.names.add(vertex.name)
            self.known[vertex.name] = vertex

    def _product(self) -> ProductSplitter | None:
        """Return what tells the factors of the values; None if they may not be reordered."""
        body = without_guard(self.chosen, self.condition)
        output = [label for label in self.einsum.output if label in labels_of(body)]
        vertex = self._vertex(self.vertex.name, output, body, self.einsum.aggregated)
        einsum = vertex.computed_einsum
        product = ProductSplitter(vertex, einsum, self.known, self.names, self.strict)
        factors: list[Scalar] = []
        if product.op:
            factors = product.factors(body)
        _, tensors = constants_and_tensors(factors)
        if not product.is_valid(factors, tensors) or not product.may_reorder(factors):
            return None
        return product

    def _candidates(self, product: ProductSplitter) -> Iterator[list[Vertex]]:
        """Yield the ways to compute this in two vertices."""
        sent_factors = []
        other_factors = []
        for factor in product.factors(self.chosen):
            plain = without_guard(factor, self.condition)
            labels = labels_of(plain)
            if not labels or not set(self.sent).isdisjoint(labels):
                sent_factors.append(factor)
            elif plain == factor:
                other_factors.append(factor)
            else:
                return  # it may read only what a value with a place needs
        if other_factors and any(map(labels_of, sent_factors)) and self._has_neutral(product):
            yield self._scattered_first(product, sent_factors, other_factors)
        labels = labels_of(without_guard(self.chosen, self.condition))
        if other_factors and self.summed and set(labels).isdisjoint(self.segments.labels):
            yield self._scattered_last()

    def _has_neutral(self, product: ProductSplitter) -> bool:
        """Return whether empty segments have the neutral element: its products are neutral too."""
        record = AGGREGATIONS[str(self.einsum.aggregation)]
        masked = self.segments.masked
        if masked == record.empty:
            return True
        return product.dtype.kind != "c" and masked == record.neutral(product.dtype)

    def _scattered_first(
        self, product: ProductSplitter, sent: list[Scalar], others: list[Scalar]
    ) -> list[Vertex]:
        """Return the vertex that scatters factors with a place, and their product with others."""
        other = product.product(others)
        value = product.product(sent)
        own_labels = labels_of(without_guard(value, self.condition))
        aggregated = list(self.sent)
        for label in self.summed:
            if label in own_labels and label not in labels_of(other):
                aggregated.append(label)
        output = []
        for label in unique(self.segments.labels, self.segments.index_labels, own_labels):
            if label not in aggregated:
                output.append(label)
        name = self._new_name()
        masked = Call("where", (self.condition, self._holding_masked(value, product), self.masked))
        first = self._vertex(name, output, masked, aggregated)
        remaining = [label for label in self.einsum.aggregated if label not in aggregated]
        joined = product.product([Element(name, tuple(output)), other])
        last = self._vertex(self.vertex.name, self.einsum.output, joined, remaining, first)
        return [first, last]

    def _holding_masked(self, value: Scalar, product: ProductSplitter) -> Scalar:
        """Return a factor in a dtype that holds what takes the place of values, and their sum.

        The neutral element of max and min is that of the product, which a small integer may not
        hold. A sum of integers would be int64, and its product with float32 float64.
        """
        if np.dtype(product.type(value)) == product.dtype:
            return value
        is_neutral_of_all = self.segments.masked == AGGREGATIONS[str(self.einsum.aggregation)].empty
        if is_neutral_of_all and product.dtype.kind in "iu":
            return value
        return Call(product.dtype.name, (value,))

    def _scattered_last(self) -> list[Vertex]:
        """Return the vertex that sums labels without a place, and one that scatters the sums.

        A value that goes nowhere may have indices out of range; these are not used.
        """
        inside = inside_segments(self.einsum, self.vertex.inputs)
        body = with_other_guard(self.chosen, self.condition, inside)
        output = [label for label in labels_of(body) if label not in self.summed]
        name = self._new_name()
        first = self._vertex(name, output, body, self.summed)
        element = Element(name, tuple(output))
        masked = Call("where", (self.condition, element, self.masked))
        last = self._vertex(self.vertex.name, self.einsum.output, masked, self.sent, first)
        return [first, last]

    def _new_name(self) -> str:
        """Return a name for the first of two vertices; it is not taken before one is added."""
        number = 1
        while f"{self.vertex.name}_{number}" in self.names:
            number += 1
        return f"{self.vertex.name}_{number}"

    def _vertex(
        self,
        name: str,
        output: Sequence[str],
        expression: Scalar,
        aggregated: Sequence[str],
        first: Vertex | None = None,
    ) -> Vertex:
        """Return a vertex, which may read the first of two."""
        aggregation = self.einsum.aggregation if aggregated else None
        extent = self.einsum.extent
        einsum, inputs = make_einsum(output, expression, aggregation, aggregated, extent)
        known = self.known if first is None else {**self.known, first.name: first}
        return make_vertex(name, einsum, inputs, known, places=self.vertex.places)

    def _operations_of(self, vertices: Sequence[Vertex]) -> int:
        """Return the operations of vertices once products among them are split."""
        known = dict(self.known)
        before = set(known)
        for vertex in vertices:
            einsum = vertex.computed_einsum
            if einsum.aggregation is None or einsum.segments is not None:
                known[vertex.name] = vertex
            else:
                names = Names([*known, vertex.name])
                ProductSplitter(vertex, einsum, known, names, self.strict).split()
        total = 0
        for name, vertex in known.items():
            if name not in before and vertex.einsum is not None:
                total += vertex.einsum.operations()
        return total
