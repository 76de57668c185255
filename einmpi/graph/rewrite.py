"""Rewrites of an EinGraph that keep its meaning: prune, share equal vertices, fuse elementwise work; all together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from einmpi.graph.eingraph import EinGraph, Vertex, make_vertex
from einmpi.graph.einsum import make_einsum, reopen
from einmpi.graph.labels import unique
from einmpi.graph.scalar import Arg, Call, Element, Scalar, labels_of, rebuild, relabel, size, walk
from einmpi.graph.split import is_plain, split

MAX_ROUNDS = 10
MAX_FUSED = 64  # nodes of a fused expression: a tensor used twice doubles what made it


def optimize(graph: EinGraph) -> EinGraph:
    """All rewrites, until nothing changes or for MAX_ROUNDS: what is fused may be split once more."""
    parted = split(share(prune(graph)))
    before = None
    for _ in range(MAX_ROUNDS):
        graph = fuse(share(parted))
        if graph == before or (parted := split(graph)) == graph:
            return graph
        before = graph
    return graph  # every round keeps the meaning: stopping early is safe


def prune(graph: EinGraph) -> EinGraph:
    """Leave out what no output needs."""
    needed = set(graph.outputs)
    for vertex in reversed(graph.vertices):
        if vertex.name in needed:
            needed.update(vertex.inputs)
    return replace(graph, vertices=tuple(v for v in graph.vertices if v.name in needed))


# ---- share ----------------------------------------------------------------------------------------------------------


def share(graph: EinGraph) -> EinGraph:
    """Vertices that compute the same thing become one; an output keeps its name."""
    first: dict[object, str] = {}  # what is computed → the first vertex that does
    alike: dict[str, list[str]] = {}  # that vertex → all that do
    chosen: dict[str, str] = {}
    for vertex in graph.vertices:
        key = vertex.name if vertex.einsum is None else _meaning(vertex, chosen)
        chosen[vertex.name] = first.setdefault(key, vertex.name)
        alike.setdefault(chosen[vertex.name], []).append(vertex.name)
    # An output lends its name to the vertex it shares; a second output becomes a copy of the first.
    final = {
        name: next((n for n in group if n in graph.outputs), name) for name, group in alike.items()
    }
    known: dict[str, Vertex] = {}
    for vertex in graph.vertices:
        if chosen[vertex.name] == vertex.name:
            inputs = tuple(final[chosen[name]] for name in vertex.inputs)
            name = final[vertex.name]
            known[name] = _with_inputs(vertex, name, inputs)
        elif vertex.name in graph.outputs and final[chosen[vertex.name]] != vertex.name:
            known[vertex.name] = copy_of(vertex, known[final[chosen[vertex.name]]])
    return replace(graph, vertices=tuple(known.values()))


def _with_inputs(vertex: Vertex, name: str, inputs: tuple[str, ...]) -> Vertex:
    """The vertex under another name; operands that have become the same element are one."""
    origin = tuple(name if known == vertex.name else known for known in vertex.origin)
    einsum = vertex.einsum
    if einsum is not None and len(set(inputs)) < len(set(vertex.inputs)):
        einsum, inputs = make_einsum(
            einsum.output,
            reopen(einsum, inputs),
            einsum.aggregation,
            einsum.aggregated,
            einsum.extent,
        )
    return replace(vertex, name=name, inputs=inputs, origin=origin, einsum=einsum)


def _meaning(vertex: Vertex, chosen: Mapping[str, str]) -> object:
    """Equal for two vertices that differ only in the names of labels and of shared operands."""
    einsum = vertex.einsum
    assert einsum is not None
    expression = reopen(einsum, [chosen[name] for name in vertex.inputs])
    order = unique(labels_of(expression), einsum.labels)
    number = {label: f"l{k}" for k, label in enumerate(order)}
    output = tuple(number[label] for label in einsum.output)
    extents = tuple(einsum.extent[label] for label in order)
    return relabel(expression, number), einsum.aggregation, output, extents


def copy_of(vertex: Vertex, of: Vertex) -> Vertex:
    """A vertex of the same name that copies another tensor."""
    assert vertex.einsum is not None
    output = vertex.einsum.output
    einsum, inputs = make_einsum(output, Element(of.name, output), None, (), vertex.einsum.extent)
    return make_vertex(vertex.name, einsum, inputs, {of.name: of})


# ---- fuse -----------------------------------------------------------------------------------------------------------


def fuse(graph: EinGraph) -> EinGraph:
    """Elementwise vertices with one consumer move into it, where that repeats no work; copies disappear."""
    while True:
        fused = prune(_fuse_once(graph))
        if fused == graph:
            return graph
        graph = fused


def _fuse_once(graph: EinGraph) -> EinGraph:
    known: dict[str, Vertex] = {}
    for vertex in graph.vertices:
        known[vertex.name] = vertex
        if vertex.einsum is None:
            continue
        for name in unique(vertex.inputs):
            only = graph.consumers[name] == (vertex.name,)
            made = _absorb_into_producer(vertex, known[name], graph) if only else None
            made = made or _inline(known[vertex.name], known[name], graph, only, known)
            if made is not None:
                known[vertex.name] = made
    return replace(graph, vertices=tuple(known.values()))


def _absorb_into_producer(vertex: Vertex, producer: Vertex, graph: EinGraph) -> Vertex | None:
    """A copy or transpose of an aggregate: the aggregate writes its result in this order, under this name."""
    einsum, made = vertex.einsum, producer.einsum
    assert einsum is not None
    if (
        made is None
        or producer.name in graph.outputs
        or einsum.function != Arg(0)
        or not einsum.is_elementwise
    ):
        return None
    index = einsum.operands[0]
    if len(einsum.operands) != 1 or sorted(map(str, index)) != sorted(einsum.output):
        return None
    back = {
        label: own for label, own in zip(index, made.output, strict=True) if isinstance(label, str)
    }
    output = tuple(back[label] for label in einsum.output)
    extent = made.extent
    turned = replace(
        made, output=output, extents=tuple((x, extent[x]) for x in (*output, *made.aggregated))
    )
    origin = unique(producer.origin, vertex.origin)
    return Vertex(vertex.name, turned.bound, producer.dtype, turned, producer.inputs, origin)


def _inline(
    vertex: Vertex, producer: Vertex, graph: EinGraph, only: bool, known: Mapping[str, Vertex]
) -> Vertex | None:
    """The vertex with the producer's expression in place of its tensor, or None."""
    einsum, made = vertex.einsum, producer.einsum
    assert einsum is not None
    if made is None or not made.is_elementwise or producer.name in graph.outputs:
        return None
    if not only and not isinstance(made.function, Arg):
        return None
    expression, body = reopen(einsum, vertex.inputs), reopen(made, producer.inputs)
    uses = [
        node
        for node in walk(expression)
        if isinstance(node, Element) and node.tensor == producer.name
    ]
    if any(not isinstance(entry, str) for use in uses for entry in use.index) or _indexes(
        expression, producer.name
    ):
        return None
    scalars = {
        node.tensor
        for node in (*walk(expression), *walk(body))
        if isinstance(node, Element) and not node.index
    }
    if scalars & set(einsum.labels):
        return None  # a label with the name of a tensor without dimensions: the text would not tell them apart
    # A plain copy costs nothing to repeat; anything else must not be computed more often than before.
    copy = is_plain(body)
    # Splitting takes factors out of aggregates by their labels, whatever the extents: it must not be undone here.
    wide = {label for label in einsum.labels if einsum.aggregated or einsum.extent[label] != 1}
    if not copy and not (only and all(wide <= set(use.index) for use in uses)):
        return None
    if not copy and len(uses) * size(body) + size(expression) > MAX_FUSED:
        return None
    if not isinstance(body, (Element, Call)):
        body = Call(producer.dtype, (body,))  # keeps the dtype that the constant had as a tensor

    def leaf(node: Scalar) -> Scalar:
        if not isinstance(node, Element) or node.tensor != producer.name:
            return node
        labels = {own: str(label) for own, label in zip(made.output, node.index, strict=True)}
        return relabel(body, labels)

    whole = rebuild(expression, leaf)
    if einsum.aggregation is not None and not set(einsum.output) <= set(labels_of(whole)):
        return None  # an aggregate that is the same for every value of a label is not computed for each of them
    joined, inputs = make_einsum(
        einsum.output, whole, einsum.aggregation, einsum.aggregated, einsum.extent
    )
    return make_vertex(vertex.name, joined, inputs, known, unique(producer.origin, vertex.origin))


def _indexes(expression: Scalar, tensor: str) -> bool:
    """Whether the tensor stands inside the index of another one."""
    return any(
        isinstance(part, Element) and part.tensor == tensor
        for node in walk(expression)
        if isinstance(node, Element)
        for entry in node.index
        if not isinstance(entry, str)
        for part in walk(entry)
    )
