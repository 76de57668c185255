"""Rewrites of an EinGraph that keep its meaning: prune, share equal vertices, split, fuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from einmpi.graph.dtypes import DTYPES
from einmpi.graph.eingraph import EinGraph, Vertex, make_vertex
from einmpi.graph.einsum import EinSum, make_einsum, reopen
from einmpi.graph.labels import unique
from einmpi.graph.scalar import (
    Arg,
    Call,
    Element,
    Scalar,
    is_plain,
    labels_of,
    rebuild,
    relabel,
    size,
    walk,
)
from einmpi.graph.split import split

MAX_ROUNDS = 10
MAX_FUSED_NODES = 64  # of a fused expression: a tensor used twice doubles what computes it


def optimize(graph: EinGraph, strict: bool = False) -> EinGraph:
    """Apply all rewrites until nothing changes; if `strict`, only those exact for all values.

    What is fused may be split once more: several rounds can be needed.
    """
    split_graph = split(share(prune(graph)), strict)
    before = None
    for _ in range(MAX_ROUNDS):
        graph = fuse(share(split_graph), strict)
        if graph == before:
            return graph
        split_graph = split(graph, strict)
        if split_graph == graph:
            return graph
        before = graph
    return graph  # every round keeps the meaning: stopping early is safe


def prune(graph: EinGraph) -> EinGraph:
    """Leave out the vertices and inputs that no output needs."""
    needed = set(graph.outputs)
    for vertex in reversed(graph.vertices):
        if vertex.name in needed:
            needed.update(vertex.inputs)
    kept = tuple(vertex for vertex in graph.vertices if vertex.name in needed)
    return replace(graph, vertices=kept)


# ---- share --------------------------------------------------------------------------------------


def share(graph: EinGraph) -> EinGraph:
    """Make vertices that compute the same thing one; an output keeps its name.

    Y[i] ← exp(X[i]) and Z[k] ← exp(X[k]) are the same up to the name of the label.
    """
    first_with_meaning: dict[object, str] = {}
    representative: dict[str, str] = {}  # vertex → the first vertex that computes the same
    groups: dict[str, list[str]] = {}  # representative → all that compute the same
    for vertex in graph.vertices:
        meaning: object = vertex.name
        if vertex.einsum is not None:
            meaning = _meaning(vertex, vertex.einsum, representative)
        first = first_with_meaning.setdefault(meaning, vertex.name)
        representative[vertex.name] = first
        groups.setdefault(first, []).append(vertex.name)
    # The shared vertex takes the name of the first output among those that it stands for.
    final_name = {}
    for first, group in groups.items():
        outputs = [name for name in group if graph.is_output(name)]
        final_name[first] = outputs[0] if outputs else first
    known: dict[str, Vertex] = {}
    for vertex in graph.vertices:
        shared_name = final_name[representative[vertex.name]]
        if representative[vertex.name] == vertex.name:
            inputs = tuple(final_name[representative[name]] for name in vertex.inputs)
            known[shared_name] = _with_inputs(vertex, shared_name, inputs)
        elif graph.is_output(vertex.name) and shared_name != vertex.name:
            # A second output with the same meaning becomes a copy of the first.
            known[vertex.name] = copy_of(vertex, known[shared_name])
    return replace(graph, vertices=tuple(known.values()))


def _with_inputs(vertex: Vertex, name: str, inputs: tuple[str, ...]) -> Vertex:
    """Return the vertex under another name; operands that have become the same element are one."""
    origin = tuple(name if known == vertex.name else known for known in vertex.origin)
    einsum = vertex.einsum
    if einsum is not None and len(set(inputs)) < len(set(vertex.inputs)):
        einsum, inputs = _with_expression(einsum, reopen(einsum, inputs))
    return replace(vertex, name=name, inputs=inputs, origin=origin, einsum=einsum)


def _with_expression(einsum: EinSum, expression: Scalar) -> tuple[EinSum, tuple[str, ...]]:
    """Return the EinSum with another function, and the tensors that it reads."""
    return make_einsum(
        einsum.output, expression, einsum.aggregation, einsum.aggregated, einsum.extent
    )


def _meaning(vertex: Vertex, einsum: EinSum, representative: Mapping[str, str]) -> object:
    """Return a key that is equal for vertices that compute the same.

    Labels are numbered in it, and each operand is named after its `representative`, so neither the
    names of labels nor those of shared operands matter.
    """
    expression = reopen(einsum, [representative[name] for name in vertex.inputs])
    order = unique(labels_of(expression), einsum.labels)
    numbered = {label: f"l{k}" for k, label in enumerate(order)}
    output = tuple(numbered[label] for label in einsum.output)
    extents = tuple(einsum.extent[label] for label in order)
    return relabel(expression, numbered), einsum.aggregation, output, extents


def copy_of(vertex: Vertex, source: Vertex) -> Vertex:
    """Return a vertex of the same name that copies another tensor."""
    assert vertex.einsum is not None
    output = vertex.einsum.output
    element = Element(source.name, output)
    einsum, inputs = make_einsum(output, element, None, (), vertex.einsum.extent)
    return make_vertex(vertex.name, einsum, inputs, {source.name: source}, places=vertex.places)


# ---- fuse ---------------------------------------------------------------------------------------


def fuse(graph: EinGraph, strict: bool = False) -> EinGraph:
    """Move elementwise vertices into their only consumer if that repeats no work; drop copies.

    T[i,j] ← X[i,j] - 1 and Z[i] ← Σ[j](T[i,j] × Y[j]) become Z[i] ← Σ[j]((X[i,j] - 1) × Y[j]).
    GPUs compute half precision in single precision and round where a vertex ends, so if `strict`,
    its vertices stay.
    """
    while True:
        fused = prune(_fuse_once(graph, strict))
        if fused == graph:
            return graph
        graph = fused


def _fuse_once(graph: EinGraph, strict: bool) -> EinGraph:
    """Fuse each vertex with its inputs where possible; those that moved are left to `prune`."""
    known: dict[str, Vertex] = {}
    for vertex in graph.vertices:
        known[vertex.name] = vertex
        if vertex.einsum is None:
            continue
        for name in unique(vertex.inputs):
            is_only_consumer = graph.consumers[name] == (vertex.name,)
            fused = None
            if is_only_consumer:
                fused = _absorb_into_producer(vertex, known[name], graph)
            is_rounded = strict and DTYPES[known[name].dtype].is_half
            if fused is None and not is_rounded:
                fused = _inline(known[vertex.name], known[name], graph, is_only_consumer, known)
            if fused is not None:
                known[vertex.name] = fused
    return replace(graph, vertices=tuple(known.values()))


def _absorb_into_producer(vertex: Vertex, producer: Vertex, graph: EinGraph) -> Vertex | None:
    """Return the producer with the order of labels and the name of a vertex that transposes it.

    T[i,k] ← Σ[j](A[i,j] × B[j,k]) and Z[k,i] ← T[i,k] become Z[k,i] ← Σ[j](A[i,j] × B[j,k]).
    None if the vertex is not a copy or a transpose of the producer's whole result.
    """
    einsum = vertex.einsum
    produced = producer.einsum
    assert einsum is not None
    if produced is None or graph.is_output(producer.name):
        return None
    if einsum.function != Arg(0) or not einsum.is_elementwise:
        return None
    index = einsum.operands[0]
    if len(einsum.operands) != 1 or sorted(map(str, index)) != sorted(einsum.output):
        return None
    producer_label: dict[str, str] = {}
    for label, own in zip(index, produced.output, strict=True):
        assert isinstance(label, str)
        producer_label[label] = own
    output = tuple(producer_label[label] for label in einsum.output)
    extents = tuple((label, produced.extent[label]) for label in (*output, *produced.aggregated))
    transposed = replace(produced, output=output, extents=extents)
    origin = unique(producer.origin, vertex.origin)
    return Vertex(
        vertex.name,
        transposed.bound,
        producer.dtype,
        transposed,
        producer.inputs,
        origin,
        _joined_places(producer, vertex),
    )


def _inline(
    vertex: Vertex,
    producer: Vertex,
    graph: EinGraph,
    is_only_consumer: bool,
    known: Mapping[str, Vertex],
) -> Vertex | None:
    """Return the vertex with the producer's expression in place of its tensor.

    None if that would change the meaning, repeat work, or make the expression too long.
    """
    einsum = vertex.einsum
    produced = producer.einsum
    assert einsum is not None
    if produced is None or not produced.is_elementwise or graph.is_output(producer.name):
        return None
    if not is_only_consumer and not isinstance(produced.function, Arg):
        return None
    expression = reopen(einsum, vertex.inputs)
    body = reopen(produced, producer.inputs)
    uses = _uses(expression, producer.name)
    if uses is None or _scalar_tensors(expression, body) & set(einsum.labels):
        return None
    # A plain copy costs nothing to repeat; anything else must not be computed more often.
    if not is_plain(body):
        if not is_only_consumer or _repeats_work(einsum, uses):
            return None
        if len(uses) * size(body) + size(expression) > MAX_FUSED_NODES:
            return None
    if not isinstance(body, Element | Call):
        body = Call(producer.dtype, (body,))  # keeps the dtype that the constant had as a tensor

    def leaf(node: Scalar) -> Scalar:
        if not isinstance(node, Element) or node.tensor != producer.name:
            return node
        labels = {own: str(label) for own, label in zip(produced.output, node.index, strict=True)}
        return relabel(body, labels)

    joined_expression = rebuild(expression, leaf)
    has_all_labels = set(einsum.output) <= set(labels_of(joined_expression))
    if einsum.aggregation is not None and not has_all_labels:
        return None  # an aggregate that is the same for all values of a label is computed once
    joined, inputs = _with_expression(einsum, joined_expression)
    origin = unique(producer.origin, vertex.origin)
    places = _joined_places(producer, vertex)
    return make_vertex(vertex.name, joined, inputs, known, origin, places)


def _joined_places(producer: Vertex, vertex: Vertex) -> tuple[str, ...]:
    """Return the places of a vertex that the producer is fused into."""
    gathering = [part for part in (producer, vertex) if part.computed_einsum.is_gathering]
    return unique(*(part.places for part in gathering or (vertex,)))


def _uses(expression: Scalar, tensor: str) -> list[Element] | None:
    """Return the elements of a tensor in an expression.

    None if one of them is a gather, or is inside the index of another tensor.
    """
    uses = []
    for node in walk(expression):
        if not isinstance(node, Element):
            continue
        gathers = [entry for entry in node.index if not isinstance(entry, str)]
        if node.tensor == tensor:
            if gathers:
                return None
            uses.append(node)
        for gather in gathers:
            if any(isinstance(part, Element) and part.tensor == tensor for part in walk(gather)):
                return None
    return uses


def _scalar_tensors(*expressions: Scalar) -> set[str]:
    """Return the tensors without dimensions; text cannot tell them from labels of the same name."""
    names = set()
    for expression in expressions:
        for node in walk(expression):
            if isinstance(node, Element) and not node.index:
                names.add(node.tensor)
    return names


def _repeats_work(einsum: EinSum, uses: list[Element]) -> bool:
    """Return whether an operand used here would be computed more often than it has elements.

    Labels of extent 1 count under an aggregation: splitting takes factors out of aggregates by
    their labels, whatever the extents, and that must not be undone here.
    """
    repeated = set(einsum.labels)
    if not einsum.aggregated:
        repeated = {label for label in einsum.labels if einsum.extent[label] != 1}
    return not all(repeated <= set(use.index) for use in uses)
