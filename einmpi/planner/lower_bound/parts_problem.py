"""The problem of the search with parts in place of axes: its minimum is a lower bound.

A plan says which axes of the mesh cut a label. Here only the number of parts is known, and each
tensor moves the least that these numbers allow for. docs/lower_bound.md has the argument.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import ceil
from typing import NamedTuple

import numpy as np

from einmpi.graph.eingraph import EinGraph
from einmpi.planner.elimination.eliminate import Table, largest_join, minimize
from einmpi.planner.factor import Edge, Factored, factor
from einmpi.planner.lower_bound.parts_edges import Floats, Link, PartsEdge
from einmpi.planner.lower_bound.ways import (
    MOST_WORDS,
    Ints,
    count_of_ways,
    grids,
    part_counts,
)

MOST_VARIABLES = 64
MOST_VALUES = 1 << 15  # of a variable, before those that cost too much are left out
MOST_CELLS = 1 << 21  # of the tables of all edges together
MOST_JOINED = 1 << 19  # cells of a table that elimination makes
MOST_ROUNDS = 6  # in which costs are passed on
SMALL_GAIN = 1 / 1000  # of what is still missing: another round is not worth its time


class Charges(NamedTuple):
    """What readers charge for a copy of each tensor, in words."""

    of_reads: Mapping[tuple[str, int], float]  # by reader and operand
    of_tensors: Mapping[str, float]  # of all readers together


class _NoPlan(Exception):
    """No plan moves fewer words than the one that is known."""


def least_words(
    graph: EinGraph, ranks: int, resident: Collection[str], charges: Charges, words: int
) -> int:
    """Return the words that every plan moves, or less; at most the given words.

    `words` are those that a known plan moves: only plans with fewer words are looked at. If there
    are still too many, nothing is known, and 0 is returned.
    """
    if len(graph.computed) > MOST_VARIABLES:
        return 0
    problem = factor(graph, resident)
    if any(0 in variable.extents for variable in problem.variables):
        return 0  # nothing can be cut into parts
    sizes = [len(variable.extents) + 1 for variable in problem.variables]
    many_values = any(count_of_ways(ranks, size) > MOST_VALUES for size in sizes)
    too_large = words * len(problem.edges) > MOST_WORDS
    if len(sizes) > MOST_VARIABLES or many_values or too_large:
        return 0
    try:
        values = _Values(problem, ranks, charges, words)
        if not values.connect():
            return 0
        values.pass_on_costs()
        return min(words, values.minimum())
    except _NoPlan:
        return words


class _Values:
    """The values of each variable that are left: rows with the parts of each symbol.

    `costs` are what each value costs at least, beyond `least`, which every plan costs. Costs that
    two neighbouring variables have together are in their links.
    """

    def __init__(self, problem: Factored, ranks: int, charges: Charges, words: int) -> None:
        self.words = words
        self.tolerance = 0.001 + 1e-11 * words  # more than all rounding errors together
        self.least = 0.0
        self.parts: list[Ints] = []
        for variable in problem.variables:
            counts = [part_counts([extent], ranks) for extent in variable.extents]
            self.parts.append(grids(ranks, counts))
        self.costs = [np.zeros(len(parts)) for parts in self.parts]
        self.links: list[Link] = []
        self.links_of: list[list[Link]] = [[] for _ in self.parts]
        self.input_edges: list[PartsEdge] = []
        self.edges: list[tuple[PartsEdge, int, int]] = []  # with source and target
        for edge in problem.edges:
            if edge.needed is None:
                self._add(PartsEdge(edge, _charge(edge, problem, charges), ranks))
        for number in range(len(self.parts)):
            self._take_least(number)
        for number in range(len(self.parts)):
            self._leave_out(number)

    def _add(self, edge: PartsEdge) -> None:
        """Add what the values at the ends of an edge cost each on its own."""
        source, target = edge.edge.source, edge.edge.target
        after = edge.layouts(self.parts[target], edge.edge.target_symbols)
        if source is None:
            self.input_edges.append(edge)
            self.costs[target] += edge.words_of_input(after)
        else:
            self.edges.append((edge, source, target))
            before = edge.layouts(self.parts[source], edge.edge.source_symbols)
            self.costs[target] += edge.charged_to_reader(after)
            self.costs[source] += edge.charged_to_maker(before)

    def _take_least(self, variable: int) -> None:
        """Move what all values of a variable cost to what every plan costs."""
        least = float(self.costs[variable].min())
        self.least += least
        self.costs[variable] = self.costs[variable] - least

    def _leave_out(self, variable: int) -> None:
        """Leave out the values of a variable that are in no plan with fewer words."""
        most = self.words - 1 + self.tolerance - self.least
        kept = self.costs[variable] <= most
        if not kept.any():
            raise _NoPlan
        if not kept.all():
            self.parts[variable] = self.parts[variable][kept]
            self.costs[variable] = self.costs[variable][kept]
            for link in self.links_of[variable]:
                link.leave_out(variable, kept)

    def connect(self) -> bool:
        """Make the links between the values that are left; return whether they are few enough."""
        self.links = [Link(*edge, self.parts) for edge in self.edges]
        if sum(link.cells for link in self.links) > MOST_CELLS:
            return False
        for link in self.links:
            link.fill()
            for variable in link.ends:
                self.links_of[variable].append(link)
        return True

    def pass_on_costs(self) -> None:
        """Pass costs on along the links, forwards and backwards, until `least` hardly grows."""
        variables = range(len(self.parts))
        for _ in range(MOST_ROUNDS):
            before = self.least
            for variable in variables:
                self._pass_on(variable, forwards=True)
            for variable in reversed(variables):
                self._pass_on(variable, forwards=False)
            if self.least - before < (self.words - before) * SMALL_GAIN:
                break

    def _pass_on(self, variable: int, forwards: bool) -> None:
        """Take costs from all links of a variable, and give them to those in one direction."""
        later = []
        for link in self.links_of[variable]:
            if (link.other(variable) > variable) == forwards:
                later.append(link)
            self.costs[variable] = self.costs[variable] + link.take(variable)
        self._take_least(variable)
        self._leave_out(variable)
        if later:
            share: Floats = self.costs[variable] / len(later)
            for link in later:
                link.give_back(variable, share)
            self.costs[variable] = np.zeros(len(share))

    def minimum(self) -> int:
        """Return the least words that the values that are left move, or less."""
        sizes = [len(parts) for parts in self.parts]
        known = ceil(self.least - self.tolerance)
        if largest_join(sizes, [link.ends for link in self.links], MOST_JOINED) > MOST_JOINED:
            return known
        tables: list[Table] = []
        for edge in self.input_edges:
            target = edge.edge.target
            after = edge.layouts(self.parts[target], edge.edge.target_symbols)
            words = edge.words_of_input(after)
            tables.append(Table((target,), np.minimum(words, self.words), len(tables)))
        for link in self.links:
            words = np.minimum(link.words_of_pairs(), self.words)
            tables.append(Table(link.ends, words, len(tables)))
        found = minimize(sizes, tables)
        return found.cost if found.exact else known


def _charge(edge: Edge, problem: Factored, charges: Charges) -> float:
    """Return what the target of an edge charges for a copy; a layout charges for all readers."""
    target = problem.variables[edge.target]
    if target.kind == "tensor":
        return charges.of_tensors.get(edge.tensor, 0.0)
    return charges.of_reads.get((target.name, edge.operand), 0.0)
