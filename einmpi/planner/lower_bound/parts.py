"""The problem of the search with parts in place of axes: its minimum is a lower bound.

A plan says which axes of the mesh cut a label. Here only the number of parts is known, and each
tensor moves the least that these numbers allow for. docs/lower_bound.md has the argument.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from einmpi.graph.eingraph import EinGraph
from einmpi.planner.factor import Edge, Factored, factor
from einmpi.planner.lower_bound.kept import (
    MOST_WORDS,
    Ints,
    count_of_ways,
    grids,
    most_kept,
    part_counts,
)
from einmpi.planner.solving.elimination import Table, largest_join, minimize

# ---- parts edges ---------------------------------------------------------------------------------
#
# What a tensor moves at least, given into how many parts the labels at both ends are cut.


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PartsEdge:
    """A tensor on its way from one variable to another, or from where an input is stored.

    A layout is a row: the parts of each dimension, the copies, and the partial results.
    """

    edge: Edge
    charge: float  # of the target for a copy, in words
    ranks: int

    @property
    def elements(self) -> int:
        return prod(self.edge.bound)

    def layouts(self, parts: Ints, symbols: Sequence[int]) -> Ints:
        """Return the layout that each value of a variable gives the tensor, or needs it in.

        The symbols of the edge say which dimension each symbol of the variable cuts.
        """
        layouts = np.ones((len(parts), self.edge.ndim + 2), np.int64)
        for column, symbol in zip(parts.T, symbols, strict=True):
            layouts[:, symbol] *= column
        return layouts

    def words_of_input(self, after: Ints) -> Ints:
        """Return what moves of an input, which is stored once."""
        words: Ints = self.elements * (after[:, -2] - 1)
        return words

    def charged_to_reader(self, after: Ints) -> Floats:
        """Return what the target pays for all copies but one."""
        copies: Floats = after[:, -2].astype(np.float64)
        return self.charge * (copies - 1)

    def charged_to_maker(self, before: Ints) -> Floats:
        """Return what the source pays for partial results, less what it has computed itself."""
        copies, partials = before[:, -2], before[:, -1]
        spare = np.where(partials == 1, copies - 1, 0)
        return self.elements * (partials - 1.0) - self.charge * spare

    def words(self, before: Ints, after: Ints) -> Ints:
        """Return what moves at least, for each pair of layouts."""
        partials = before[:, -1]
        kept = np.empty((len(before), len(after)), np.int64)
        for one_copy in (False, True):
            rows = (partials > 1) == one_copy
            if rows.any():
                layouts = before[rows, :-1], after[:, :-1]
                kept[rows] = most_kept(*layouts, self.edge.bound, self.ranks, one_copy)
        words: Ints = self.elements * (partials[:, None] - 1 + after[:, -2]) - kept
        return words


class Link:
    """An edge between two variables: what moves for each pair of values beyond what is charged.

    Values that give the tensor the same layout are one row, or one column, of a table. Of what a
    pair costs, parts can be taken over by one of the two values, or given back.
    """

    def __init__(self, edge: PartsEdge, source: int, target: int, parts: Sequence[Ints]) -> None:
        self.edge = edge
        self.ends = source, target
        before = edge.layouts(parts[source], edge.edge.source_symbols)
        after = edge.layouts(parts[target], edge.edge.target_symbols)
        self.before, of_source = np.unique(before, axis=0, return_inverse=True)
        self.after, of_target = np.unique(after, axis=0, return_inverse=True)
        self.layout_of = [of_source.reshape(-1), of_target.reshape(-1)]
        self.taken = [np.zeros(len(before)), np.zeros(len(after))]

    @property
    def cells(self) -> int:
        """How many cells the table has."""
        return len(self.before) * len(self.after)

    def fill(self) -> None:
        """Make the table."""
        self.words = self.edge.words(self.before, self.after)
        maker = self.edge.charged_to_maker(self.before)
        reader = self.edge.charged_to_reader(self.after)
        self.uncharged = self.words - maker[:, None] - reader

    def other(self, variable: int) -> int:
        """Return the variable at the other end."""
        return self.ends[1] if variable == self.ends[0] else self.ends[0]

    def take(self, variable: int) -> Floats:
        """Take all that pairs cost, whatever the other value is; return what each value takes."""
        side = self.ends.index(variable)
        other = 1 - side
        left = np.full(self.uncharged.shape[other], np.inf)  # of the best value with each layout
        np.minimum.at(left, self.layout_of[other], -self.taken[other])
        if side == 1:
            left = left[:, None]
        least = (self.uncharged + left).min(axis=other)
        taken = least[self.layout_of[side]]
        more: Floats = taken - self.taken[side]
        self.taken[side] = taken
        return more

    def give_back(self, variable: int, costs: Floats) -> None:
        """Add what each value of a variable costs to all its pairs."""
        side = self.ends.index(variable)
        self.taken[side] = self.taken[side] - costs

    def leave_out(self, variable: int, kept: npt.NDArray[np.bool_]) -> None:
        """Leave out some values of a variable."""
        side = self.ends.index(variable)
        self.taken[side] = self.taken[side][kept]
        self.layout_of[side] = self.layout_of[side][kept]

    def words_of_pairs(self) -> Ints:
        """Return what moves at least, for each pair of the values that are left."""
        words: Ints = self.words[self.layout_of[0]][:, self.layout_of[1]]
        return words


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
