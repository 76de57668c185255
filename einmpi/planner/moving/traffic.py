"""What a plan moves along every edge, and what every vertex costs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import prod

import numpy as np

from einmpi.planner.factor import Edge, Variable, factor
from einmpi.planner.memory import Cuts
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.halo import Needed
from einmpi.planner.moving.halo_counts import HALO_NEIGHBOURS, halo_words
from einmpi.planner.moving.volume import axes_factors, moved_words
from einmpi.planner.paper.costs import Cost
from einmpi.planner.prices import ATTOSECONDS_OF_A_PICOSECOND, Prices


@dataclass(frozen=True)
class Traffic:
    """What moves along an edge: words over all ranks, and the ranks that exchange something."""

    words: Cost  # copies for a join, partial results, and what is cut along other dimensions
    between: tuple[int, int] = (0, 0)  # words between nodes: of the combined ones, of the others
    peers: tuple[int, int] = (1, 1)  # ranks in an exchange: inside a node, between nodes


def edge_traffic(mesh: Mesh, edge: Edge, cuts: Sequence[Sequence[int]]) -> Traffic:
    """Return what an edge moves, given the symbols of each axis at its ends, the source first."""
    targets = [edge.target_symbols[symbol] for symbol in cuts[-1]]
    if edge.source is None:
        return _input_traffic(mesh, edge, targets)
    sources = [edge.source_symbols[symbol] for symbol in cuts[0]]
    if edge.needed is not None:
        return _halo_traffic(mesh, edge.needed, tuple(sources), tuple(cuts[-1]))
    return _computed_traffic(mesh, edge.bound, tuple(sources), tuple(targets))


@lru_cache(maxsize=4096)  # layers repeat
def _computed_traffic(
    mesh: Mesh, bound: tuple[int, ...], sources: tuple[int, ...], targets: tuple[int, ...]
) -> Traffic:
    """Return what a computed tensor moves, given the symbols of each axis before and after."""
    ndim = len(bound)
    elements = prod(bound)
    # Whether an axis goes from one dimension to another.
    turns = any(
        source != target and max(source, target) < ndim
        for source, target in zip(sources, targets, strict=True)
    )
    axes = tuple(zip(mesh.factors, sources, targets, strict=True))
    every = axes_factors(axes, ndim)
    between = axes_factors(axes[: mesh.node_axes], ndim)
    total, crossing = moved_words(mesh, bound, sources, targets)
    combined = min(total, (every.partials - 1) * elements)
    rest = total - combined
    crossing_combined = min(crossing, (between.partials - 1) * elements)
    return Traffic(
        Cost(0 if turns else rest, combined, rest if turns else 0),
        between=(crossing_combined, crossing - crossing_combined),
        peers=(every.peers // between.peers, between.peers),
    )


def _input_traffic(mesh: Mesh, edge: Edge, targets: Sequence[int]) -> Traffic:
    """Return what an input moves that is stored once: every copy but the first."""
    elements = prod(edge.bound)
    copies = []
    for length, target in zip(mesh.factors, targets, strict=True):
        copies.append(length if target == edge.ndim else 1)
    across = prod(copies[: mesh.node_axes])
    inside = prod(copies[mesh.node_axes :])
    return Traffic(
        Cost((across * inside - 1) * elements, 0, 0),
        between=(0, (across - 1) * elements),
        peers=(inside, across),
    )


@lru_cache(maxsize=4096)  # layers repeat
def _halo_traffic(
    mesh: Mesh, needed: Needed, sources: tuple[int, ...], target_state: tuple[int, ...]
) -> Traffic:
    """Return what an operand with index arithmetic moves: what ranks need and do not have."""
    dimension_or_none = (*range(len(needed.bound)), None)
    label_or_none = (*(label for label, _ in needed.extents), None)
    layout = [dimension_or_none[symbol] for symbol in sources]
    state = [label_or_none[symbol] for symbol in target_state]
    words, between = halo_words(mesh, needed, layout, state)
    inside = HALO_NEIGHBOURS if words else 1
    across = HALO_NEIGHBOURS if between else 1
    return Traffic(Cost(words, 0, 0), between=(0, between), peers=(inside, across))


NOTHING = Cost(0, 0, 0)


@dataclass
class Bill:
    """What a vertex moves, and how long it takes where a machine was measured.

    Times are picoseconds of all ranks together.
    """

    words: Cost = NOTHING
    nbytes: int = 0
    between: int = 0  # bytes between nodes
    computing: int = 0
    moving_inside: int = 0
    moving_between: int = 0

    @property
    def time(self) -> int:
        return self.computing + self.moving_inside + self.moving_between

    def add(self, words: Cost, words_between: int, itemsize: int, prices: Prices) -> None:
        """Add words that move, some of them between nodes."""
        if words.total == 0 and words_between == 0:
            return
        nbytes = words.total * itemsize
        nbytes_between = words_between * itemsize
        self.words += words
        self.nbytes += nbytes
        self.between += nbytes_between
        if prices.machine is not None:
            self.moving_inside += (nbytes - nbytes_between) * prices.inside
            self.moving_between += nbytes_between * prices.between


def total_bill(bills: Collection[Bill]) -> Bill:
    """Return what several vertices move, and how long they take."""
    words = sum((bill.words for bill in bills), NOTHING)
    names = [field.name for field in fields(Bill)[1:]]
    return Bill(words, *(sum(getattr(bill, name) for bill in bills) for name in names))


EdgeOfPlan = tuple[Edge, Variable, list[tuple[int, ...]], Traffic]


def edges_of_plan(cut: Cuts, resident: Collection[str]) -> Iterator[EdgeOfPlan]:
    """Yield each edge of a graph with its target, the symbols of its ends, and what it moves.

    The symbols of the source come first, if there is a source.
    """
    problem = factor(cut.graph, resident, cut.layouts)
    for edge in problem.edges:
        target = problem.variables[edge.target]
        cuts = [cut.symbols(target.kind, target.name)]
        if edge.source is not None:
            source = problem.variables[edge.source]
            cuts.insert(0, cut.symbols(source.kind, source.name))
        yield edge, target, cuts, edge_traffic(cut.mesh, edge, cuts)


def bills(cut: Cuts, resident: Collection[str], prices: Prices) -> dict[str, Bill]:
    """Return what each vertex costs. Repeated layers are counted one by one.

    Copies and new cuts are paid by the vertex that needs them, partial results by the vertex that
    made them.
    """
    graph, mesh = cut.graph, cut.mesh
    found = {vertex.name: Bill() for vertex in graph.computed}
    for edge, target, _, traffic in edges_of_plan(cut, resident):
        tensor = graph[edge.tensor]
        itemsize = np.dtype(tensor.dtype).itemsize
        user = edge.tensor
        if target.kind == "vertex" or tensor.is_input:
            user = target.name
        if user not in found:  # an input in a layout of its own: its first reader pays
            user = graph.consumers[user][0]
        between_combined, between_rest = traffic.between
        found[user].add(replace(traffic.words, aggregate=0), between_rest, itemsize, prices)
        payer = found[user]
        combined = traffic.words.aggregate
        if combined:
            payer = found[edge.tensor]
            payer.add(Cost(0, combined, 0), between_combined, itemsize, prices)
        inside, across = traffic.peers
        payer.moving_inside += mesh.ranks * prices.messages(inside, 1)
        payer.moving_between += mesh.ranks * prices.messages(1, across)

    if prices.machine is not None:
        for vertex in graph.computed:
            replicas = mesh.parts(cut.states[vertex.name], [None])[0]
            attoseconds = vertex.operations() * prices.operation(vertex)
            found[vertex.name].computing = attoseconds // ATTOSECONDS_OF_A_PICOSECOND * replicas
    return found
