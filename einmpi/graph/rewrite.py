"""Rewrites of an EinGraph that keep its meaning: prune, share equal vertices, split products, fuse elementwise work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from einmpi.graph.eingraph import EinGraph, Vertex, make_vertex
from einmpi.graph.einsum import make_einsum, reopen
from einmpi.graph.labels import fresh, unique
from einmpi.graph.scalar import (
    Arg,
    Call,
    Const,
    Element,
    Scalar,
    Type,
    call,
    infer,
    labels_of,
    rebuild,
    relabel,
    size,
    walk,
)

# (⊕, ⊗) with a ⊗ (b ⊕ c) = (a ⊗ b) ⊕ (a ⊗ c): their products may be split and reordered.
DISTRIBUTIVE = frozenset({("sum", "*"), ("min", "+"), ("max", "+"), ("any", "&"), ("all", "|"),
                          ("max", "minimum"), ("min", "maximum")})  # fmt: skip
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
    final = {name: next((n for n in group if n in graph.outputs), name) for name, group in alike.items()}
    known: dict[str, Vertex] = {}
    for vertex in graph.vertices:
        if chosen[vertex.name] == vertex.name:
            inputs = tuple(final[chosen[name]] for name in vertex.inputs)
            name = final[vertex.name]
            known[name] = _with_inputs(vertex, name, inputs)
        elif vertex.name in graph.outputs and final[chosen[vertex.name]] != vertex.name:
            known[vertex.name] = _copy(vertex, known[final[chosen[vertex.name]]])
    return replace(graph, vertices=tuple(known.values()))


def _with_inputs(vertex: Vertex, name: str, inputs: tuple[str, ...]) -> Vertex:
    """The vertex under another name; operands that have become the same element are one."""
    origin = tuple(name if known == vertex.name else known for known in vertex.origin)
    einsum = vertex.einsum
    if einsum is not None and len(set(inputs)) < len(set(vertex.inputs)):
        einsum, inputs = make_einsum(einsum.output, reopen(einsum, inputs), einsum.aggregation, einsum.aggregated,
                                     einsum.extent)  # fmt: skip
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


def _copy(vertex: Vertex, of: Vertex) -> Vertex:
    assert vertex.einsum is not None
    output = vertex.einsum.output
    einsum, inputs = make_einsum(output, Element(of.name, output), None, (), vertex.einsum.extent)
    return make_vertex(vertex.name, einsum, inputs, {of.name: of})


# ---- split ----------------------------------------------------------------------------------------------------------


def split(graph: EinGraph) -> EinGraph:
    """Products of many tensors under a distributive ⊕ become binary vertices, in opt_einsum's order."""
    taken = {vertex.name for vertex in graph.vertices}
    known: dict[str, Vertex] = {}
    for vertex in graph.vertices:
        if vertex.einsum is not None and vertex.einsum.aggregation is not None:
            _Splitter(vertex, known, taken).split()
        else:
            known[vertex.name] = vertex
    return replace(graph, vertices=tuple(known.values()))


@dataclass
class _Splitter:
    vertex: Vertex
    known: dict[str, Vertex]
    taken: set[str]

    def __post_init__(self) -> None:
        assert self.vertex.einsum is not None
        self.einsum = self.vertex.einsum
        self.aggregation = self.einsum.aggregation
        self.expression = reopen(self.einsum, self.vertex.inputs)
        self.op = _distributed(self.aggregation, self.expression)

    def type(self, expression: Scalar) -> Type:
        def leaf(node: Scalar) -> Type:
            assert isinstance(node, Element)
            return np.dtype(self.known[node.tensor].dtype)

        return infer(expression, leaf)

    def split(self) -> None:
        factors = _factors(self.expression, self.op)
        constants = [factor for factor in factors if not labels_of(factor)]
        tensors = [factor for factor in factors if labels_of(factor)]
        if not self.pays(constants, tensors):
            self.known[self.vertex.name] = self.vertex
            return
        # In any order the product is computed in the dtype that it has as written.
        dtype = np.dtype(self.type(self.expression))
        tensors = [factor if np.dtype(self.type(factor)) == dtype else _cast(factor, dtype.name) for factor in tensors]
        before = len(self.known)
        tensors, left = self.reduce_alone(tensors)
        product = self.contract(tensors, left, None if constants else self.vertex.name)
        if constants:
            self.emit(self.product([product, *constants]), self.einsum.output, (), self.vertex.name)
        if len(self.known) == before + 1:
            self.known[self.vertex.name] = self.vertex  # one vertex after all: as it was written

    def pays(self, constants: Sequence[Scalar], tensors: Sequence[Scalar]) -> bool:
        """Whether splitting keeps the meaning and does anything."""
        einsum, kinds = self.einsum, {np.dtype(self.type(factor)).kind for factor in (*constants, *tensors)}
        used = unique(*(labels_of(factor) for factor in tensors))
        if not self.op or 0 in einsum.bound or set(used) != set(einsum.labels) or 0 in dict(einsum.extents).values():
            return False
        if (self.op in ("&", "|") and kinds != {"b"}) or (self.op == "+" and "b" in kinds):
            return False  # bits of integers do not distribute; a sum of bools is another bool
        if all(set(labels_of(factor)) == set(einsum.labels) for factor in tensors):
            return False  # one pass over the operands does it all
        alone = any(sum(x in labels_of(factor) for factor in tensors) == 1 for x in einsum.aggregated)
        plain = all(_is_plain(factor) for factor in tensors)
        return bool(constants or alone or len(tensors) > 2 or not plain)

    def reduce_alone(self, tensors: list[Scalar]) -> tuple[list[Scalar], list[str]]:
        """A label in one factor only is aggregated there, before the product."""
        left = list(self.einsum.aggregated)
        if len(tensors) == 1:
            return tensors, left
        counts = {label: sum(label in labels_of(factor) for factor in tensors) for label in left}
        reduced = []
        for factor in tensors:
            alone = [label for label in left if counts[label] == 1 and label in labels_of(factor)]
            if alone:
                output = [label for label in labels_of(factor) if label not in alone]
                factor = self.emit(factor, output, alone)
            reduced.append(factor)
        return reduced, [label for label in left if counts[label] != 1]

    def contract(self, tensors: list[Scalar], left: list[str], name: str | None) -> Scalar:
        """The product of the factors with `left` aggregated, two factors at a time."""
        output = self.einsum.output
        if not left or len(tensors) == 1:
            return self.emit(self.product(tensors), output, left, name)
        order = contraction_order([labels_of(factor) for factor in tensors], output, self.einsum.extent)
        queue = list(enumerate(tensors))  # with the place in the program of the first factor in it
        for pair in order:
            sides = sorted((queue[k] for k in pair), key=lambda entry: entry[0])
            queue = [entry for k, entry in enumerate(queue) if k not in pair]
            joined = unique(*(labels_of(side) for _, side in sides))
            later = set(output).union(*(labels_of(factor) for _, factor in queue))
            done = [label for label in joined if label in left and label not in later]
            wanted = [label for label in joined if label not in done] if queue else output
            product = self.product([self.materialise(side, joined) for _, side in sides])
            # A product that no later factor adds a label to is part of the vertex that aggregates it.
            inline = queue and not done and all(set(labels_of(factor)) <= set(joined) for _, factor in queue)
            made = product if inline else self.emit(product, wanted, done, None if queue else name)
            queue.append((sides[0][0], made))
        return queue[0][1]

    def materialise(self, factor: Scalar, joined: Sequence[str]) -> Scalar:
        """A computed factor is computed once, not once for every combination of the other factor's labels."""
        if _is_plain(factor) or set(labels_of(factor)) == set(joined):
            return factor
        return self.emit(factor, labels_of(factor), ())

    def product(self, factors: Sequence[Scalar]) -> Scalar:
        result = factors[0]
        for factor in factors[1:]:
            result = call(self.op, result, factor)
        return result

    def emit(
        self, expression: Scalar, output: Sequence[str], aggregated: Sequence[str], name: str | None = None
    ) -> Scalar:
        if name is None:
            name = fresh(self.vertex.name, self.taken)
            self.taken.add(name)
        aggregation = self.aggregation if aggregated else None
        einsum, inputs = make_einsum(output, expression, aggregation, aggregated, self.einsum.extent)
        self.known[name] = make_vertex(name, einsum, inputs, self.known)
        return Element(name, tuple(output))


def _is_plain(expression: Scalar) -> bool:
    """An element indexed by labels alone, each once: no gather, no diagonal."""
    if not isinstance(expression, Element):
        return False
    return len({entry for entry in expression.index if isinstance(entry, str)}) == len(expression.index)


def _distributed(aggregation: str | None, expression: Scalar) -> str:
    """The ⊗ at the root that the aggregation distributes over, or ""."""
    op = expression.op if isinstance(expression, Call) else ""
    op = "*" if op in ("/", "neg") else op
    return op if (aggregation, op) in DISTRIBUTIVE else ""


def _cast(factor: Scalar, dtype: str) -> Scalar:
    if isinstance(factor, Call) and factor.op == "/" and factor.args[0] == Const(1.0):
        return Call("/", (Const(1.0), Call(dtype, (factor.args[1],))))
    return Call(dtype, (factor,))


def _factors(expression: Scalar, op: str) -> list[Scalar]:
    if isinstance(expression, Call) and op:
        if expression.op == op:
            return [factor for arg in expression.args for factor in _factors(arg, op)]
        if op == "*" and expression.op == "/":
            over, under = expression.args
            if isinstance(over, Const) and over.value == 1:
                return [expression]  # a reciprocal is a factor already
            return [*_factors(over, op), call("/", Const(1.0), under)]
        if op == "*" and expression.op == "neg":
            return [Const(-1), *_factors(expression.args[0], op)]
    return [expression]


def contraction_order(
    factors: Sequence[Sequence[str]], output: Sequence[str], extent: Mapping[str, int]
) -> list[tuple[int, ...]]:
    """opt_einsum's pairs of positions, each pair replaced by one factor at the end of the list."""
    if len(factors) == 2:
        return [(0, 1)]
    from opt_einsum import paths  # costs start-up time, and few programs need it

    # Numbers instead of labels: the order of a set of strings differs from run to run.
    number = {label: k for k, label in enumerate(unique(*factors, output))}
    inputs = [frozenset(number[label] for label in labels) for labels in factors]
    sizes = {number[label]: max(1, extent[label]) for label in number}
    pairs = paths.auto(inputs, frozenset(number[label] for label in output), sizes, None)
    return [tuple(pair) for pair in pairs]


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
    if made is None or producer.name in graph.outputs or einsum.function != Arg(0) or not einsum.is_elementwise:
        return None
    index = einsum.operands[0]
    if len(einsum.operands) != 1 or sorted(map(str, index)) != sorted(einsum.output):
        return None
    back = {label: own for label, own in zip(index, made.output, strict=True) if isinstance(label, str)}
    output = tuple(back[label] for label in einsum.output)
    extent = made.extent
    turned = replace(made, output=output, extents=tuple((x, extent[x]) for x in (*output, *made.aggregated)))
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
    uses = [node for node in walk(expression) if isinstance(node, Element) and node.tensor == producer.name]
    if any(not isinstance(entry, str) for use in uses for entry in use.index) or _indexes(expression, producer.name):
        return None
    scalars = {node.tensor for node in (*walk(expression), *walk(body)) if isinstance(node, Element) and not node.index}
    if scalars & set(einsum.labels):
        return None  # a label with the name of a tensor without dimensions: the text would not tell them apart
    # A plain copy costs nothing to repeat; anything else must not be computed more often than before.
    copy = _is_plain(body)
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
    joined, inputs = make_einsum(einsum.output, whole, einsum.aggregation, einsum.aggregated, einsum.extent)
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
