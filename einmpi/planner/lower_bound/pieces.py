"""Lower bounds of graphs by the problem with parts: of a whole graph, or as a sum over its layers.

They may hold for few plans only: those that repeat no more operations, or fit into memory."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.planner.factor import Edge, Factored, Name, factor
from einmpi.planner.lower_bound.halos import HaloEdge, Reading, readings_of
from einmpi.planner.lower_bound.parts import PartsEdge, PartsVariable, Piece, least_words
from einmpi.planner.lower_bound.ways import FREE_WORK, Ints, Work
from einmpi.planner.memory import Cuts
from einmpi.planner.repetition import find_layers

MOST_VARIABLES = 64  # of a graph that is looked at as a whole, whatever its plans repeat
VARIABLES_OF_GROUP = 16  # at least; two groups make a piece
HALVES = 2
# What a byte of resident inputs costs, as sixteenths of a word: from 1/16 word to 64 words.
MEMORY_FRACTIONS = 16
PRICES_OF_MEMORY = tuple(2**exponent for exponent in range(11))
# What a repeated operation costs, as a fraction of a word. Of large graphs only the first is tried.
PRICES_OF_OPERATIONS = (1024, 256, 64)


class Charges(NamedTuple):
    """What readers charge for a copy of each tensor, in words."""

    of_reads: Mapping[tuple[str, int], float]  # by reader and operand
    of_tensors: Mapping[str, float]  # of all readers together


NO_CARRY: Mapping[str, str] = {}


class KnownPlan(NamedTuple):
    """A plan whose words are compared with the bound."""

    words: int
    parts: Mapping[Name, tuple[int, ...]]  # of each symbol of a variable, and the repetitions
    memory: int | None = None  # bytes that a rank may have
    carry: Mapping[str, str] = NO_CARRY  # input of the next step → the tensor that it becomes

    def repeated_operations(self, graph: EinGraph) -> int:
        """Return the operations that are done by one rank and again by another."""
        repeated = 0
        for vertex in graph.computed:
            repeated += vertex.operations() * (self.parts["vertex", vertex.name][-1] - 1)
        return repeated


def known_plan(
    cut: Cuts, words: int, memory: int | None, carry: Mapping[str, str] = NO_CARRY
) -> KnownPlan:
    """Return what the bound has to know of a plan with these cuts."""
    parts = {}
    for name, state in cut.states.items():
        labels = cut.graph[name].computed_einsum.labels
        parts["vertex", name] = cut.mesh.parts(state, (*labels, None))
    for name, layout in cut.layouts.items():
        dimensions = range(len(cut.graph[name].bound))
        parts["tensor", name] = cut.mesh.parts(layout, (*dimensions, None))
    return KnownPlan(words, parts, memory, carry)


# Which plans a lower bound holds for.
CUTS_OF_MESH = "cuts on this mesh"
ALL_CUTS = "all cuts"
REPEATING_NO_MORE = "plans that repeat no more operations"
WITHIN_MEMORY = "plans within this memory that repeat no more operations"


class Bound(NamedTuple):
    """A lower bound on the words of some plans."""

    words: int
    among: str


@dataclass(frozen=True)
class PartsProblem:
    """The problem of the search with parts in place of axes."""

    graph: EinGraph
    ranks: int
    factored: Factored
    charges: Charges

    @cached_property
    def edges(self) -> tuple[PartsEdge, ...]:
        """The edges; without those that move halos of which nothing is known."""
        edges: list[PartsEdge] = []
        for edge in self.factored.edges:
            known = edge, self._charge(edge), self.ranks
            if edge.needed is None:
                edges.append(PartsEdge(*known, weight=edge.weight))
            elif (reading := self._reading(edge)) is not None:
                labels = self._target(edge).computed_einsum.labels
                edges.append(HaloEdge(*known, reading, labels, weight=edge.weight))
        return tuple(edges)

    def _target(self, edge: Edge) -> Vertex:
        return self.graph[self.factored.variables[edge.target].name]

    def _reading(self, edge: Edge) -> Reading | None:
        """Return how the target reads a tensor with index arithmetic, if that is known."""
        return readings_of(self.graph, self._target(edge))[edge.operand]

    def _charge(self, edge: Edge) -> float:
        """Return what the target charges for a copy; a layout charges for all readers."""
        target = self.factored.variables[edge.target]
        if target.kind == "tensor":
            return self.charges.of_tensors.get(edge.tensor, 0.0)
        return self.charges.of_reads.get((target.name, edge.operand), 0.0)

    @property
    def is_empty(self) -> bool:
        """Whether a label or dimension has no index: nothing can be cut into parts."""
        return any(0 in variable.extents for variable in self.factored.variables)

    def bound_of_all(self, words: int) -> int:
        """Return the words that every plan moves, or less; at most the given words.

        Large graphs are not looked at: for them it is 0.
        """
        count = max(len(self.graph.computed), len(self.factored.variables))
        if count > MOST_VARIABLES or self.is_empty:
            return 0
        variables = [PartsVariable(variable.extents) for variable in self.factored.variables]
        return least_words(Piece(tuple(variables), self.edges), self.ranks, words)

    def bound_by_groups(
        self, plan: KnownPlan, work: Mapping[str, Work], price_of_memory: int = 0, unit: int = 1
    ) -> int:
        """Return what every plan moves and pays for repeated operations and memory, or less.

        The price is that of a byte of resident inputs, in fractions of a word. What is returned,
        and the price of work, is in units, of which a word has so many.
        """
        if self.is_empty or any(name not in plan.parts for name in self.factored.number):
            return 0
        values: list[Ints] = []
        variables = []
        for variable, kept in zip(self.factored.variables, self.factored.permanent, strict=True):
            values.append(np.array([plan.parts[variable.kind, variable.name]]))
            own = work.get(variable.name, FREE_WORK) if variable.kind == "vertex" else FREE_WORK
            blocks = []
            for nbytes, symbols in kept if price_of_memory else ():
                blocks.append((price_of_memory * nbytes // MEMORY_FRACTIONS, symbols))
            variables.append(PartsVariable(variable.extents, own, tuple(blocks)))
        total = 0
        solved: dict[Piece, int] = {}
        for numbers, piece in self.pieces(variables, unit):
            if piece not in solved:
                limit = piece.words([values[number] for number in numbers])
                solved[piece] = least_words(piece, self.ranks, limit)
            total += solved[piece]
        return -(-total // HALVES)

    @cached_property
    def groups(self) -> list[range]:
        """Neighbouring variables: a few layers each; all variables where no layers repeat."""
        count = len(self.factored.variables)
        layers = find_layers(self.graph)
        borders = [0]
        for number in range(layers.layers):
            vertex = self.graph.computed[layers.start + number * layers.vertices]
            start = self.factored.number["vertex", vertex.name]
            if start - borders[-1] >= VARIABLES_OF_GROUP:
                borders.append(start)
        if len(borders) > 1 and count - borders[-1] < VARIABLES_OF_GROUP:
            borders.pop()  # what is left at the end belongs to the last group
        return list(itertools.starmap(range, itertools.pairwise([*borders, count])))

    def pieces(
        self, variables: Sequence[PartsVariable], unit: int = 1
    ) -> list[tuple[range, Piece]]:
        """Return the pieces with the numbers of their variables; costs are in halves of a unit.

        A word has so many units; the costs of variables are in units already.

        Each is two neighbouring groups. The costs of a group, and of edges in it, count half in
        both of its pieces, those of edges between the groups of a piece count fully.
        """
        groups = self.groups
        group_of = [number for number, group in enumerate(groups) for _ in group]
        edges_to: list[list[PartsEdge]] = [[] for _ in variables]
        for edge in self.edges:
            edges_to[edge.edge.target].append(edge)
        found = []
        last = len(groups) - 1
        for number in range(max(1, last)):
            together = range(groups[number].start, groups[min(number + 1, last)].stop)
            own = []
            edges = []
            for target in together:
                # The first and the last group are in one piece only.
                weight = 1 if 0 < group_of[target] < last else HALVES
                own.append(variables[target].times(weight))
                for edge in edges_to[target]:
                    source = edge.edge.source
                    if source is None or group_of[source] == group_of[target]:
                        edges.append((edge, weight * unit))
                    elif source in together:
                        edges.append((edge, HALVES * unit))
            piece = Piece(tuple(own), _moved_to(edges, together.start))
            found.append((together, piece))
        return found


def _moved_to(edges: Sequence[tuple[PartsEdge, int]], first: int) -> tuple[PartsEdge, ...]:
    """Return the edges of a piece with their weights; equal layers have equal ones.

    What readers of a layout charge is paid by what brings the tensor into it, as far as that is in
    the piece.
    """
    weights = {edge.edge.target: weight for edge, weight in edges if edge.edge.operand < 0}
    found = []
    for edge, weight in edges:
        source = edge.edge.source
        charge = edge.charge
        if source is not None and edge.edge.operand >= 0:
            charge *= min(weight, weights.get(source, weight)) / weight
        moved = replace(
            edge.edge,
            tensor="",
            source=None if source is None else source - first,
            target=edge.edge.target - first,
        )
        found.append(replace(edge, edge=moved, charge=charge, weight=weight * edge.weight))
    return tuple(found)


def factored_with_carry(
    graph: EinGraph, resident: Collection[str], carry: Mapping[str, str]
) -> Factored:
    """Return the variables and edges of a graph; what a loop carries has one layout."""
    same_layout = {output: name for name, output in carry.items()}
    return factor(graph, resident, carry, same_layout={**same_layout, **graph.carried})
