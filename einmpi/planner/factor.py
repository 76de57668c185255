"""A graph as variables (states of vertices, layouts of tensors) and edges that move tensors (docs/planner.md)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.planner.states import input_symbols, output_symbols, tensor_symbols

Name = tuple[str, str]  # ("vertex" or "tensor", name)
Block = tuple[
    int, tuple[int, ...]
]  # bytes of a tensor, and the symbols whose cuts make a rank's block of it smaller


@dataclass(frozen=True)
class Variable:
    """A vertex's state (symbols are its labels) or a tensor's layout (symbols are its dimensions); the last is R."""

    kind: str
    name: str
    extents: tuple[int, ...]


@dataclass(frozen=True)
class Edge:
    """A tensor on its way to the variable `target`, from the variable `source`; None is an input, stored once."""

    tensor: str
    bound: tuple[int, ...]
    nbytes: int
    source: int | None
    target: int
    source_symbols: tuple[int, ...]
    target_symbols: tuple[int, ...]
    operand: int = -1  # of the target, when that is a vertex
    weight: int = 1  # how many equal edges of repeated layers it stands for

    @property
    def ndim(self) -> int:
        return len(self.bound)


@dataclass(frozen=True)
class Factored:
    variables: tuple[Variable, ...]
    edges: tuple[Edge, ...]
    number: Mapping[Name, int]  # of every vertex and every tensor that has a layout of its own
    blocks: tuple[tuple[Block, ...], ...]  # what each variable keeps on a rank
    operations: tuple[int, ...]  # of each variable, repeated layers together


def has_layout(graph: EinGraph, name: str, pinned: Collection[str]) -> bool:
    """A tensor used more than once, an output or a pinned one has a layout; others go straight to their user."""
    return (
        name in graph.outputs
        or name in pinned
        or sum(user.count(name) for user in _inputs(graph, name)) > 1
    )


def _inputs(graph: EinGraph, name: str) -> list[tuple[str, ...]]:
    return [graph[user].inputs for user in graph.consumers[name]]


def factor(
    graph: EinGraph,
    resident: Collection[str] = (),
    pinned: Collection[str] = (),
    tie: Mapping[str, str] | None = None,
) -> Factored:
    """The variables and edges of a graph.

    A `resident` input lies where it is wanted and costs nothing to read. `tie` maps a vertex of a repeated layer to
    that of the first one.
    """
    tie = tie or {}
    variables: list[Variable] = []
    blocks: list[tuple[Block, ...]] = []
    operations: list[int] = []
    number: dict[Name, int] = {}
    edges: dict[Edge, int] = {}

    def add(kind: str, vertex: Vertex, extents: tuple[int, ...]) -> int:
        name = vertex.name
        known = number.get((kind, name if name in pinned else tie.get(name, name)))
        if known is None:
            known = len(variables)
            variables.append(Variable(kind, name, extents))
            own: Block = (vertex.nbytes, tuple(range(len(vertex.bound))))
            blocks.append((own,) if kind == "tensor" else (own, *_operand_blocks(graph, vertex)))
            operations.append(0)
        number[kind, name] = known
        return known

    def connect(edge: Edge) -> None:
        if edge.tensor not in pinned:
            edge = replace(edge, tensor=tie.get(edge.tensor, edge.tensor))
        edges[edge] = edges.get(edge, 0) + 1

    for vertex in graph.vertices:
        if vertex.einsum is not None:
            here = add("vertex", vertex, tuple(extent for _, extent in vertex.einsum.extents))
            operations[here] += vertex.einsum.operations()
            for operand in range(len(vertex.inputs)):
                _read(graph, vertex, operand, here, number, resident, connect)
        if has_layout(graph, vertex.name, pinned):
            tensor = add("tensor", vertex, vertex.bound)
            wanted = tensor_symbols(len(vertex.bound))
            if vertex.einsum is not None:
                made = output_symbols(vertex.einsum)
                connect(Edge(vertex.name, vertex.bound, vertex.nbytes, here, tensor, made, wanted))
            elif vertex.name not in resident:
                connect(Edge(vertex.name, vertex.bound, vertex.nbytes, None, tensor, (), wanted))
    weighted = tuple(replace(edge, weight=count) for edge, count in edges.items())
    return Factored(tuple(variables), weighted, number, tuple(blocks), tuple(operations))


def _operand_blocks(graph: EinGraph, vertex: Vertex) -> list[Block]:
    assert vertex.einsum is not None
    labels = vertex.einsum.labels
    return [
        (
            graph[name].nbytes,
            tuple(labels.index(entry) for entry in dict.fromkeys(index) if isinstance(entry, str)),
        )
        for name, index in zip(vertex.inputs, vertex.einsum.operands, strict=True)
    ]


def _read(
    graph: EinGraph,
    vertex: Vertex,
    operand: int,
    here: int,
    number: Mapping[Name, int],
    resident: Collection[str],
    connect: Callable[[Edge], None],
) -> None:
    """The edge that brings an operand to a vertex."""
    assert vertex.einsum is not None
    name = vertex.inputs[operand]
    source = graph[name]
    size = source.bound, source.nbytes
    wanted = input_symbols(vertex.einsum, operand)
    if ("tensor", name) in number:
        connect(
            Edge(
                name,
                *size,
                number["tensor", name],
                here,
                tensor_symbols(len(source.bound)),
                wanted,
                operand,
            )
        )
    elif source.einsum is not None:
        connect(
            Edge(
                name,
                *size,
                number["vertex", name],
                here,
                output_symbols(source.einsum),
                wanted,
                operand,
            )
        )
    elif name not in resident:
        connect(Edge(name, *size, None, here, (), wanted, operand))


# ---- repeated layers ------------------------------------------------------------------------------------------------


SHARED = 8  # an input with more users is no part of a layer


def repeated_layers(graph: EinGraph) -> dict[str, str]:
    """Vertices and inputs of repeated layers → those of the first of them; empty where nothing repeats three times."""
    computed = graph.computed
    position = {vertex.name: k for k, vertex in enumerate(computed)}
    kinds: dict[object, int] = {}
    kind = np.array(
        [kinds.setdefault(_kind(graph, v, position), len(kinds)) for v in computed], np.int64
    )
    best = (0, 0, 0)  # vertices saved, minus the period, start
    for period in range(1, len(kind) // 3 + 1):
        same = np.concatenate([[False], kind[:-period] == kind[period:], [False]])
        steps = np.flatnonzero(same[1:] != same[:-1])
        starts, lengths = steps[::2], steps[1::2] - steps[::2]
        if len(lengths) and (longest := int(lengths.max())) >= 2 * period:
            start = int(starts[lengths.argmax()])
            best = max(best, (longest // period * period, -period, -start))
    saved, period, start = best[0], -best[1], -best[2]
    tie: dict[str, str] = {}
    for k in range(start + period, start + period + saved):
        model, copy = computed[start + (k - start) % period], computed[k]
        for ours, theirs in zip(
            (*copy.inputs, copy.name), (*model.inputs, model.name), strict=True
        ):
            own = graph[ours].is_input or ours == copy.name
            if own and ours != theirs and tie.setdefault(ours, theirs) != theirs:
                return {}
    return tie


def _kind(graph: EinGraph, vertex: Vertex, position: Mapping[str, int]) -> object:
    """Equal for vertices that do the same at the same place of their layers."""
    here = position[vertex.name]

    def users(name: str) -> tuple[int, ...]:
        return tuple(position[user] - here for user in graph.consumers[name])

    def read(name: str) -> object:
        if not graph[name].is_input:
            return here - position[name]
        if len(graph.consumers[name]) > SHARED:  # a mask, say, that every layer reads
            return name
        return graph[name].bound, graph[name].dtype, users(name)

    reads = tuple(read(name) for name in vertex.inputs)
    return vertex.einsum, vertex.dtype, reads, users(vertex.name), vertex.name in graph.outputs
