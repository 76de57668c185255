"""Rewrites of an EinGraph that keep its meaning: prune, share equal vertices, split, fuse."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from einmpi.graph.dtypes import DTYPES
from einmpi.graph.eingraph import EinGraph, Vertex, make_vertex
from einmpi.graph.einsum import EinSum, close, make_einsum, reopen
from einmpi.graph.index_arithmetic import affine_of
from einmpi.graph.recurrence_steps import with_steps
from einmpi.graph.recurrences import until_stable
from einmpi.graph.scalar import (
    Arg,
    Call,
    Element,
    Scalar,
    is_plain,
    labels_of,
    rebuild,
    relabel,
    unique,
    walk,
)
from einmpi.graph.split_gathers import split_scattered
from einmpi.graph.split_products import split

MAX_ROUNDS = 10
MAX_FUSED_NODES = 64  # of a fused expression: a tensor used twice doubles what computes it


def optimize(graph: EinGraph, strict: bool = False) -> EinGraph:
    """Apply all rewrites until nothing changes; if `strict`, only those exact for all values.

    Vertices that depend on each other along a label become the steps of a recurrence.
    """
    return with_steps(prune(graph), lambda part: _optimize(part, strict))


def _optimize(graph: EinGraph, strict: bool) -> EinGraph:
    """Rewrite a graph without recurrences.

    What is fused may be split once more: several rounds can be needed.
    """
    split_graph = split(split_scattered(share(prune(graph)), strict), strict)
    before = None
    for _ in range(MAX_ROUNDS):
        graph = fuse(share(split_graph), strict)
        if graph == before:
            return graph
        split_graph = split(split_scattered(graph, strict), strict)
        if split_graph == graph:
            return graph
        before = graph
    return graph  # every round keeps the meaning: stopping early is safe


def prune(graph: EinGraph) -> EinGraph:
    """Leave out the vertices and inputs that no output needs."""
    needed = set(graph.outputs)
    for _ in until_stable(needed):
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
    function, operands, tensors = close(expression)
    return replace(einsum, function=function, operands=operands), tensors


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
    output = vertex.computed_einsum.output
    element = Element(source.name, output)
    einsum, inputs = make_einsum(output, element, None, (), vertex.computed_einsum.extent)
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
        consumer: _Consumer | None = None
        for name in unique(vertex.inputs):
            producer = known[name]
            is_only_consumer = graph.consumers[name] == (vertex.name,)
            if is_only_consumer:
                transposed = _absorb_into_producer(vertex, producer, graph)
                if transposed is not None:
                    known[vertex.name] = transposed
                    break  # the producer was all that the vertex read
            is_rounded = strict and DTYPES[producer.dtype].is_half
            if is_rounded or not _may_move(producer, graph, is_only_consumer):
                continue
            if vertex.einsum.matrix is not None and not _is_copy(producer):
                continue
            if consumer is None:
                consumer = _Consumer(vertex)
            consumer.inline(producer, is_only_consumer)
        if consumer is not None and consumer.has_changed:
            known[vertex.name] = consumer.fused_vertex(known)
    return replace(graph, vertices=tuple(known.values()))


def _may_move(producer: Vertex, graph: EinGraph, is_only_consumer: bool) -> bool:
    """Return whether a vertex may move into a consumer, as far as it decides that alone."""
    if producer.einsum is None or not producer.einsum.is_elementwise:
        return False
    if graph.is_output(producer.name):
        return False
    return is_only_consumer or isinstance(producer.einsum.function, Arg)


def _is_copy(vertex: Vertex) -> bool:
    """Return whether a vertex is all of a tensor with its dimensions in the same order."""
    einsum = vertex.computed_einsum
    return einsum.function == Arg(0) and einsum.operands == (einsum.output,)


def _absorb_into_producer(vertex: Vertex, producer: Vertex, graph: EinGraph) -> Vertex | None:
    """Return the producer with the order of labels and the name of a vertex that transposes it.

    T[i,k] ← Σ[j](A[i,j] × B[j,k]) and Z[k,i] ← T[i,k] become Z[k,i] ← Σ[j](A[i,j] × B[j,k]).
    None if the vertex is not a copy or a transpose of the producer's whole result.
    """
    einsum = vertex.computed_einsum
    produced = producer.einsum
    if produced is None or graph.is_output(producer.name) or produced.matrix is not None:
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
        _joined_places(producer, vertex.places, einsum.is_gathering),
    )


def _joined_places(
    producer: Vertex, places: tuple[str, ...], is_gathering: bool
) -> tuple[str, ...]:
    """Return the places of a vertex that the producer is fused into, given its own."""
    if not producer.computed_einsum.is_gathering:
        return places
    if not is_gathering:
        return producer.places
    return unique(producer.places, places)


def _is_view(expression: Scalar) -> bool:
    """Return whether an expression reads elements of a tensor in another order, or fewer."""
    if not isinstance(expression, Element):
        return False
    return all(isinstance(entry, str) or affine_of(entry) for entry in expression.index)


class _Consumer:
    """A vertex into which others move. What is known of its expression is kept until it changes."""

    def __init__(self, vertex: Vertex) -> None:
        self.vertex = vertex
        self.einsum = vertex.computed_einsum
        self.origin = vertex.origin
        self.places = vertex.places
        self.is_gathering = vertex.computed_einsum.is_gathering
        self.has_changed = False
        self._set_expression(reopen(vertex.computed_einsum, vertex.inputs))

    def _set_expression(self, expression: Scalar) -> None:
        self.expression = expression
        nodes = walk(expression)
        self.size = len(nodes)
        self.scalar_tensors = _scalar_tensors(nodes)
        # tensor → its elements; None if one is a gather or in the index of another tensor
        self.uses: dict[str, list[Element] | None] = {}
        for node in nodes:
            if isinstance(node, Element):
                self._add_use(node)

    def _add_use(self, node: Element) -> None:
        gathers = [entry for entry in node.index if not isinstance(entry, str)]
        found = self.uses.setdefault(node.tensor, [])
        if gathers:
            self.uses[node.tensor] = None
        elif found is not None:
            found.append(node)
        for gather in gathers:
            for part in walk(gather):
                if isinstance(part, Element):
                    self.uses[part.tensor] = None

    def inline(self, producer: Vertex, is_only_consumer: bool) -> None:
        """Put the producer's expression in place of its tensor.

        Not if that would change the meaning, repeat work, or make the expression too long.
        """
        einsum = self.einsum
        produced = producer.einsum
        assert produced is not None
        uses = self.uses.get(producer.name, [])
        if uses is None:
            return
        body = reopen(produced, producer.inputs)
        nodes = walk(body)
        scalar_tensors = self.scalar_tensors | _scalar_tensors(nodes)
        if not scalar_tensors.isdisjoint(einsum.labels):
            return
        # A plain copy costs nothing to repeat; anything else must not be computed more often.
        if not is_plain(body) and not _is_view(body):
            if not is_only_consumer or _repeats_work(einsum, uses):
                return
            if einsum.segments is not None and produced.is_gathering:
                return  # a value that goes nowhere would not be guarded
            if len(uses) * len(nodes) + self.size > MAX_FUSED_NODES:
                return
        if not isinstance(body, Element | Call):
            body = Call(producer.dtype, (body,))  # keeps the dtype of the constant as a tensor

        def leaf(node: Scalar) -> Scalar:
            if not isinstance(node, Element) or node.tensor != producer.name:
                return node
            pairs = zip(produced.output, node.index, strict=True)
            return relabel(body, {own: str(label) for own, label in pairs})

        joined = rebuild(self.expression, leaf)
        has_all_labels = set(einsum.output) <= set(labels_of(joined))
        if einsum.aggregation is not None and not has_all_labels:
            return  # an aggregate that is the same for all values of a label is computed once
        self._set_expression(joined)
        self.origin = unique(producer.origin, self.origin)
        self.places = _joined_places(producer, self.places, self.is_gathering)
        self.is_gathering = self.is_gathering or produced.is_gathering
        self.has_changed = True

    def fused_vertex(self, known: Mapping[str, Vertex]) -> Vertex:
        """Return the vertex with what has moved into it."""
        einsum, inputs = _with_expression(self.einsum, self.expression)
        return make_vertex(self.vertex.name, einsum, inputs, known, self.origin, self.places)


def _scalar_tensors(nodes: Sequence[Scalar]) -> set[str]:
    """Return the tensors without dimensions; text cannot tell them from labels of the same name."""
    found = set()
    for node in nodes:
        if isinstance(node, Element) and not node.index:
            found.add(node.tensor)
    return found


def _repeats_work(einsum: EinSum, uses: list[Element]) -> bool:
    """Return whether an operand used here would be computed more often than it has elements.

    Labels of extent 1 count under an aggregation: splitting takes factors out of aggregates by
    their labels, whatever the extents, and that must not be undone here.
    """
    repeated = set(einsum.labels)
    if einsum.segments is not None:
        repeated -= set(einsum.segments.labels)  # a value is computed once, for one place
    if not einsum.aggregated:
        repeated = {label for label in einsum.labels if einsum.extent[label] != 1}
    return not all(repeated <= set(use.index) for use in uses)


# ---- remainder -----------------------------------------------------------------------------------
#
# What remains of a graph when its first vertices are computed, for a run that resumes another.


def in_order(graph: EinGraph, names: Sequence[str]) -> EinGraph:
    """Return the graph with its computed vertices in this order; ValueError if it is not one."""
    if sorted(names) != sorted(vertex.name for vertex in graph.computed):
        raise ValueError("other vertices")
    known = {vertex.name for vertex in graph.inputs}
    for name in names:
        if not known.issuperset(graph[name].inputs):
            raise ValueError(name)
        known.add(name)
    return replace(graph, vertices=(*graph.inputs, *(graph[name] for name in names)))


def needed(graph: EinGraph, done: int) -> tuple[str, ...]:
    """Return those of the first `done` computed tensors that are outputs or are read later."""
    read_later: set[str] = set()
    for vertex in graph.computed[done:]:
        read_later.update(vertex.inputs)
    kept = []
    for vertex in graph.computed[:done]:
        if vertex.name in graph.outputs or vertex.name in read_later:
            kept.append(vertex.name)
    return tuple(kept)


def saved_name(name: str) -> str:
    """Return the name of the input that holds a saved tensor; no program can use this name."""
    return f"saved {name}"


def rest(graph: EinGraph, done: int) -> EinGraph:
    """Return the graph without its first `done` computed vertices.

    Their tensors become inputs, and copies of these inputs come first: outputs stay computed
    tensors, and what is needed later is on the ranks from the start, not in files.
    """
    saved = []
    copies = []
    for name in needed(graph, done):
        vertex = graph[name]
        source = Vertex(saved_name(name), vertex.bound, vertex.dtype)
        saved.append(source)
        copies.append(copy_of(vertex, source))
    vertices = (*graph.inputs, *saved, *copies, *graph.computed[done:])
    return prune(EinGraph(vertices, graph.outputs))


# ---- hoist ---------------------------------------------------------------------------------------
#
# Split the graph of a loop's step: what is the same in every step is computed once, before.


@dataclass(frozen=True)
class Hoisted:
    """The graph that is computed once, and the graph of a step, which reads results of it."""

    once: EinGraph | None  # None if there is nothing to compute before the first step
    step: EinGraph
    names: tuple[str, ...]  # tensors that the first graph computes for the second


def hoist(graph: EinGraph, changing: Collection[str]) -> Hoisted:
    """Split a graph, given the inputs that change from step to step.

    A tensor that is computed from labels and numbers alone stays in the step: fusing it costs
    nothing there, and keeping it would take memory.
    """
    changed = set(changing)
    for _ in until_stable(changed):
        for vertex in graph.vertices:
            if not changed.isdisjoint(vertex.inputs):
                changed.add(vertex.name)
    inputs = {vertex.name for vertex in graph.inputs}
    from_tensors: set[str] = set()  # unchanged results that depend on an input
    for _ in until_stable(from_tensors):
        for vertex in graph.computed:
            if vertex.name in changed:
                continue
            reads_input = not inputs.isdisjoint(vertex.inputs)
            reads_result = not from_tensors.isdisjoint(vertex.inputs)
            if reads_input or reads_result:
                from_tensors.add(vertex.name)

    once_outputs = [name for name in graph.outputs if name not in changed]
    step_outputs = tuple(name for name in graph.outputs if name in changed)
    needed: dict[str, None] = {}  # hoisted tensors that a step reads
    for vertex in graph.computed:
        if vertex.name in from_tensors:
            continue
        for name in vertex.inputs:
            if name in from_tensors:
                needed[name] = None
    step = prune(replace(graph, vertices=_with_hoisted(graph, needed), outputs=step_outputs))
    names = tuple(name for name in needed if name in step.by_name)
    once_outputs += [name for name in names if name not in once_outputs]
    if not once_outputs:
        return Hoisted(None, step, ())
    once = prune(replace(graph, outputs=tuple(once_outputs)))
    return Hoisted(once, step, names)


def _with_hoisted(graph: EinGraph, names: Collection[str]) -> tuple[Vertex, ...]:
    """Return the vertices of a graph in which these computed tensors are inputs."""
    inputs = list(graph.inputs)
    computed = []
    for vertex in graph.computed:
        if vertex.name in names:
            inputs.append(Vertex(vertex.name, vertex.bound, vertex.dtype))
        else:
            computed.append(vertex)
    return (*inputs, *computed)
