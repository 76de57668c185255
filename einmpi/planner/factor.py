"""A graph as a factor graph: variables (states and layouts), and edges that move tensors.

Repeated layers can share their variables (docs/planner.md, "The search").
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.forms.summed_blocks import blocks_of_labels
from einmpi.planner.grids import InnerWords, inner_words
from einmpi.planner.machine import BYTES, Prices
from einmpi.planner.mesh import Extent, sides
from einmpi.planner.moving.halo import Needed, needed_of
from einmpi.planner.orders import NO_ORDERS, Orders
from einmpi.planner.states import input_symbols, output_symbols, tensor_symbols

Name = tuple[str, str]  # ("vertex" or "tensor", name)
# Bytes of a tensor, and the symbols whose cuts make a rank's block of it smaller.
Block = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Variable:
    """The state of a vertex (its symbols are labels) or the layout of a tensor (dimensions).

    The symbol after the last one is R.
    """

    kind: str  # "vertex" or "tensor"
    name: str
    extents: tuple[int, ...]  # of the labels or dimensions
    orders: tuple[int, ...] = ()  # of their digits
    inner: InnerWords | None = None  # what the vertex moves inside of itself
    blocks: tuple[int, ...] = ()  # of labels that are summed in blocks

    @cached_property
    def sides(self) -> tuple[Extent, ...]:
        """The extents with the orders of their digits."""
        return sides(self.extents, self.orders, self.blocks)


@dataclass(frozen=True)
class Edge:
    """A tensor on its way from the variable `source` to the variable `target`."""

    tensor: str
    bound: tuple[int, ...]
    nbytes: int
    source: int | None  # None: an input, stored once
    target: int
    source_symbols: tuple[int, ...]  # symbol of the source → dimension of the tensor, R or P
    target_symbols: tuple[int, ...]  # symbol of the target → dimension of the tensor or R
    operand: int = -1  # of the target, if that is a vertex
    needed: Needed | None = None  # of the tensor, where that is not simply a block of it
    # How many equal edges of repeated layers it stands for, or steps of a recurrence.
    weight: int = 1
    orders: tuple[int, ...] = ()  # of the digits of each dimension

    @property
    def ndim(self) -> int:
        return len(self.bound)

    @cached_property
    def form(self) -> tuple[object, ...]:
        """What its costs depend on: edges of repeated layers differ in nothing else."""
        symbols = self.source_symbols, self.target_symbols
        return self.bound, self.nbytes, self.weight, symbols, self.needed, self.orders


@dataclass(frozen=True)
class Factored:
    """A graph as variables and edges."""

    variables: tuple[Variable, ...]
    edges: tuple[Edge, ...]
    number: Mapping[Name, int]  # the variable of every vertex, and of every tensor with a layout
    # What each variable keeps on a rank. Where inputs are resident, their bytes count fully, and
    # those of other tensors by the share of the vertices at which they are in memory.
    blocks: tuple[tuple[Block, ...], ...]
    permanent: tuple[tuple[Block, ...], ...]  # the blocks of resident inputs alone
    operations: tuple[int, ...]  # of each variable, repeated layers together
    rates: tuple[int, ...]  # attoseconds for an operation of each; nothing without a machine


def has_layout(graph: EinGraph, name: str, pinned: Collection[str]) -> bool:
    """Return whether a tensor has a layout of its own: outputs, pinned ones, those used twice.

    So have those that a recurrence carries from step to step.

    So have those that are read with index arithmetic: what a rank needs of them is no block of a
    layout. Other tensors go straight to their only user.
    """
    if graph.is_output(name) or name in pinned:
        return True
    if name in graph.carried or name in graph.carried.values():
        return True
    if any(needed_of(graph, graph[user], name) is not None for user in graph.consumers[name]):
        return True
    uses = sum(graph[user].inputs.count(name) for user in graph.consumers[name])
    return uses > 1


def factor(
    graph: EinGraph,
    resident: Collection[str] = (),
    pinned: Collection[str] = (),
    tie: Mapping[str, str] | None = None,
    same_layout: Mapping[str, str] | None = None,
    prices: Prices = BYTES,
    orders: Orders = NO_ORDERS,
    nodes: int = 1,
) -> Factored:
    """Return the variables and edges of a graph.

    A `resident` input is where it is needed and costs nothing to read. `tie` maps a vertex of a
    repeated layer to the same vertex of the first layer, whose variables it shares. `same_layout`
    maps a tensor to an earlier one whose layout it has.
    """
    builder = _Builder(
        graph, frozenset(resident), frozenset(pinned), tie or {}, same_layout or {}, orders, nodes
    )
    for vertex in graph.vertices:
        if vertex.einsum is not None:
            extents = tuple(extent for _, extent in vertex.einsum.extents)
            state = builder.variable("vertex", vertex, extents)
            builder.operations[state] += vertex.operations()
            for operand in () if vertex.computed_with else range(len(vertex.inputs)):
                builder.connect_operand(vertex, operand, state)
        if has_layout(graph, vertex.name, pinned):
            layout = builder.variable("tensor", vertex, vertex.bound)
            symbols = tensor_symbols(len(vertex.bound))
            builder.connect(vertex, layout, symbols, times=vertex.steps)
    edges = []
    for edge, count in builder.edges.items():
        edges.append(edge if count == 1 else replace(edge, weight=count))
    rates = []
    for variable in builder.variables if prices.machine is not None else ():
        is_vertex = variable.kind == "vertex"
        rates.append(prices.operation(graph[variable.name]) if is_vertex else 0)
    return Factored(
        tuple(builder.variables),
        tuple(edges),
        builder.number,
        tuple(tuple(blocks) for blocks in builder.blocks),
        tuple(tuple(blocks) for blocks in builder.permanent),
        tuple(builder.operations),
        tuple(rates),
    )


@dataclass
class _Builder:
    """The variables and edges found so far."""

    graph: EinGraph
    resident: frozenset[str]
    pinned: frozenset[str]
    tie: Mapping[str, str]
    same_layout: Mapping[str, str]
    orders: Orders
    nodes: int
    variables: list[Variable] = field(default_factory=list)
    blocks: list[list[Block]] = field(default_factory=list)
    permanent: list[list[Block]] = field(default_factory=list)
    operations: list[int] = field(default_factory=list)
    number: dict[Name, int] = field(default_factory=dict)
    edges: dict[Edge, int] = field(default_factory=dict)  # → how often it occurs

    def __post_init__(self) -> None:
        # Computed vertices in order, and the last one that reads each tensor.
        self.position = {vertex.name: place for place, vertex in enumerate(self.graph.computed)}
        self.last_read: dict[str, int] = {}
        if self.resident:
            for place, vertex in enumerate(self.graph.computed):
                for name in vertex.inputs:
                    self.last_read[name] = place

    def layout_name(self, name: str) -> str:
        """Return the tensor whose layout a tensor shares; itself if it shares none."""
        name = self.same_layout.get(name, name)
        return self.tie.get(name, name)

    def variable(self, kind: str, vertex: Vertex, extents: tuple[int, ...]) -> int:
        """Return the number of a vertex's or tensor's variable, made now if it is new."""
        if kind == "vertex":
            name = vertex.computed_with or vertex.name
            model = self.tie.get(name, name)
        else:
            model = self.layout_name(vertex.name)
        number = self.number.get((kind, model))
        if number is None:
            number = len(self.variables)
            orders = self.orders.get((kind, vertex.name), ())
            inner = inner_words(self.graph, vertex) if kind == "vertex" else None
            blocks = blocks_of_labels(vertex) if kind == "vertex" else ()
            if orders and self.nodes > 1:  # results of nodes are added last
                blocks = tuple(map(min, blocks, (1,) * len(blocks)))
            self.variables.append(Variable(kind, vertex.name, extents, orders, inner, blocks))
            self.blocks.append([])
            self.permanent.append([])
            self.operations.append(0)
            if not self.resident:
                self.blocks[number].append(_own_block(vertex))
                if kind == "vertex":
                    self.blocks[number] += _operand_blocks(self.graph, vertex)
        self.number[kind, vertex.name] = number
        if self.resident:
            self.weigh_blocks(number, kind, vertex)
        return number

    def weigh_blocks(self, number: int, kind: str, vertex: Vertex) -> None:
        """Add the blocks of a vertex or tensor to those that its variable keeps on a rank.

        Resident inputs are in memory all the time. Another block counts by the share of the
        vertices at which it is in memory, so that the sum is the average memory of a rank.
        """
        transient: list[tuple[Block, int]] = []  # and at how many vertices it is in memory
        permanent: list[Block] = []
        own_block = _own_block(vertex)
        vertices = len(self.graph.computed)
        if kind == "tensor" and vertex.name in self.resident:
            permanent.append(own_block)
        else:
            has_own_layout = kind == "vertex" and has_layout(self.graph, vertex.name, self.pinned)
            made = self.position.get(vertex.name, 0)
            last = self.last_read.get(vertex.name, made)
            if self.graph.is_output(vertex.name):
                last = vertices - 1
            transient.append((own_block, 1 if has_own_layout else 1 + last - made))
        if kind == "vertex":
            blocks = _operand_blocks(self.graph, vertex)
            for name, block in zip(vertex.inputs, blocks, strict=True):
                if name in self.resident and ("tensor", name) not in self.number:
                    permanent.append(block)
                else:
                    transient.append((block, 1))
        weighed = {symbols: nbytes for nbytes, symbols in self.blocks[number]}
        for nbytes, symbols in permanent:
            weighed[symbols] = weighed.get(symbols, 0) + nbytes
        for (nbytes, symbols), lifetime in transient:
            share = nbytes * lifetime // vertices
            weighed[symbols] = weighed.get(symbols, 0) + share
        self.blocks[number] = [(nbytes, symbols) for symbols, nbytes in weighed.items()]
        self.permanent[number] += permanent

    def connect_operand(self, vertex: Vertex, operand: int, state: int) -> None:
        """Add the edge that brings an operand to a vertex."""
        name = vertex.inputs[operand]
        tensor = self.graph[name]
        wanted = input_symbols(vertex.computed_einsum, operand)
        layout = self.number.get(("tensor", name))
        times = vertex.moves_of(tensor)
        if layout is None:
            self.connect(tensor, state, wanted, operand, times)
            return
        needed = needed_of(self.graph, vertex, name, self.orders)
        if needed is None or vertex.inputs.index(name) == operand:
            stored = tensor_symbols(len(tensor.bound))
            self.add_edge(tensor, layout, state, stored, wanted, operand, needed, times)

    def connect(
        self,
        tensor: Vertex,
        target: int,
        target_symbols: tuple[int, ...],
        operand: int = -1,
        times: int = 1,
    ) -> None:
        """Add the edge from where a tensor is made, or an input stored, to a variable.

        The tensor goes along it so many times.
        """
        if tensor.einsum is not None:
            source = self.number["vertex", tensor.name]
            first = self.graph[tensor.computed_with or tensor.name]
            made = output_symbols(tensor, first.computed_einsum.labels)
            self.add_edge(tensor, source, target, made, target_symbols, operand, times=times)
        elif tensor.name not in self.resident:
            self.add_edge(tensor, None, target, (), target_symbols, operand)

    def add_edge(
        self,
        tensor: Vertex,
        source: int | None,
        target: int,
        source_symbols: tuple[int, ...],
        target_symbols: tuple[int, ...],
        operand: int,
        needed: Needed | None = None,
        times: int = 1,
    ) -> None:
        edge = Edge(
            self.layout_name(tensor.name),
            tensor.bound,
            tensor.nbytes,
            source,
            target,
            source_symbols,
            target_symbols,
            operand,
            needed,
            orders=self.orders.get(("tensor", tensor.name), ()),
        )
        self.edges[edge] = self.edges.get(edge, 0) + times


def _own_block(vertex: Vertex) -> Block:
    """Return the block of a tensor, which the cuts of all its dimensions make smaller."""
    return vertex.nbytes, tuple(range(len(vertex.bound)))


def _operand_blocks(graph: EinGraph, vertex: Vertex) -> list[Block]:
    """Return the blocks of its operands that a vertex keeps on a rank."""
    einsum = vertex.computed_einsum
    blocks = []
    for operand, name in enumerate(vertex.inputs):
        cutting = []
        for number, label in enumerate(einsum.labels):
            if einsum.dimension_cut_by(operand, label) is not None:
                cutting.append(number)
        blocks.append((graph[name].nbytes, tuple(cutting)))
    return blocks
