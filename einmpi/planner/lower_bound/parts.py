"""The problem of the search with parts in place of axes: its minimum is a lower bound.

A plan says which axes of the mesh cut a label. Here only the number of parts is known, and each
tensor moves the least that these numbers allow for. docs/lower_bound.md has the argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from einmpi.planner.factor import Block, Edge
from einmpi.planner.lower_bound.ways import (
    FREE_WORK,
    MOST_ELEMENTS,
    MOST_WORDS,
    Ints,
    Work,
    count_of_ways,
    grids,
    most_kept,
    part_counts,
)
from einmpi.planner.solving.elimination import Table, largest_join, minimize

# ---- edges ---------------------------------------------------------------------------------------
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
    weight: int = field(default=1, kw_only=True)  # by which all that it moves is multiplied

    @property
    def elements(self) -> int:
        return self.weight * prod(self.edge.bound)

    def before(self, parts: Ints) -> Ints:
        """Return the layout that each value of the source gives the tensor."""
        return self._layouts(parts, self.edge.source_symbols)

    def after(self, parts: Ints) -> Ints:
        """Return the layout in which each value of the target needs the tensor."""
        return self._layouts(parts, self.edge.target_symbols)

    def _layouts(self, parts: Ints, symbols: Sequence[int]) -> Ints:
        """Return a layout for each value; the symbols say which dimension is cut."""
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
        return self.weight * self.charge * (copies - 1)

    def charged_to_maker(self, before: Ints) -> Floats:
        """Return what the source pays for partial results, less what it has computed itself."""
        copies, partials = before[:, -2], before[:, -1]
        spare = np.where(partials == 1, copies - 1, 0)
        return self.elements * (partials - 1.0) - self.weight * self.charge * spare

    def words(self, before: Ints, after: Ints) -> Ints:
        """Return what moves at least, for each pair of layouts."""
        partials = before[:, -1]
        words = np.empty((len(before), len(after)), np.int64)
        for one_copy in (False, True):
            rows = (partials > 1) == one_copy
            if rows.any():
                layouts = before[rows, :-1], after[:, :-1]
                kept = most_kept(*layouts, self.edge.bound, self.ranks, one_copy)
                words[rows] = -self.weight * kept
        words += (self.elements * (partials - 1))[:, None]
        words += self.elements * after[:, -2]
        return words


def distinct_rows(rows: Ints) -> tuple[Ints, Ints]:
    """Return the different rows in order, and the number of each row among them.

    Numbers are positive. Each row is written as one number: these sort faster than rows do.
    """
    keys = np.zeros(len(rows), np.int64)
    count = 1  # more than any key
    for column in rows.T:
        base = int(column.max()) + 1
        if count * base > MOST_WORDS:
            found, keys = np.unique(keys, return_inverse=True)
            count = len(found)
        keys = keys * base + column
        count *= base
    _, first, numbers = np.unique(keys, return_index=True, return_inverse=True)
    return rows[first], numbers


class Link:
    """An edge between two variables: what moves for each pair of values beyond what is charged.

    Values that give the tensor the same layout are one row, or one column, of a table. Of what a
    pair costs, parts can be taken over by one of the two values, or given back.
    """

    def __init__(self, edge: PartsEdge, source: int, target: int, parts: Sequence[Ints]) -> None:
        self.edge = edge
        self.ends = source, target
        before = edge.before(parts[source])
        after = edge.after(parts[target])
        self.before, of_source = distinct_rows(before)
        self.after, of_target = distinct_rows(after)
        self.layout_of = [of_source, of_target]
        self.taken = [np.zeros(len(before)), np.zeros(len(after))]
        # Whether an end has taken all that there is, and nothing has changed since.
        self.is_settled = [False, False]

    @property
    def cells(self) -> int:
        """How many cells the table has."""
        return len(self.before) * len(self.after)

    def fill(self) -> None:
        """Make the table."""
        self.words = self.edge.words(self.before, self.after)
        maker = self.edge.charged_to_maker(self.before)
        reader = self.edge.charged_to_reader(self.after)
        self.uncharged = self.words - maker[:, None]
        self.uncharged -= reader

    def other(self, variable: int) -> int:
        """Return the variable at the other end."""
        return self.ends[1] if variable == self.ends[0] else self.ends[0]

    def take(self, variable: int) -> Floats | None:
        """Take all that pairs cost, whatever the other value is; return what each value takes.

        It is None where no value takes anything.
        """
        side = self.ends.index(variable)
        if self.is_settled[side]:
            return None
        other = 1 - side
        left = np.empty(self.uncharged.shape[other])  # of the best value with each layout
        left.fill(np.inf)
        np.minimum.at(left, self.layout_of[other], -self.taken[other])
        if side == 1:
            left = left[:, None]
        least = (self.uncharged + left).min(axis=other)
        taken = least[self.layout_of[side]]
        more: Floats = taken - self.taken[side]
        self.taken[side] = taken
        self.is_settled[side] = True
        self.is_settled[other] = False
        return more

    def give_back(self, variable: int, costs: Floats) -> None:
        """Add what each value of a variable costs to all its pairs."""
        side = self.ends.index(variable)
        self.taken[side] = self.taken[side] - costs
        self.is_settled = [False, False]

    def leave_out(self, variable: int, kept: npt.NDArray[np.bool_]) -> None:
        """Leave out some values of a variable."""
        side = self.ends.index(variable)
        self.taken[side] = self.taken[side][kept]
        self.layout_of[side] = self.layout_of[side][kept]
        self.is_settled[1 - side] = False


# ---- values of variables -------------------------------------------------------------------------


MOST_VALUES = 1 << 15  # of a variable, before those that cost too much are left out
MOST_CELLS = 1 << 22  # of the tables of all edges together
CELLS_OF_TABLES = (1 << 10, 1 << 14)  # those up to so many are made first, then up to so many
MOST_JOINED = 1 << 19  # cells of a table that elimination makes
MOST_ROUNDS = 6  # in which costs are passed on
SMALL_GAIN = 1 / 1000  # of what is still missing: another round is not worth its time


class PartsVariable(NamedTuple):
    """A variable, and what its values cost beside what moves along edges."""

    extents: tuple[int, ...]
    work: Work = FREE_WORK
    blocks: tuple[Block, ...] = ()  # what stays in memory: words if it is whole, what cuts it

    def times(self, weight: int) -> PartsVariable:
        """Return the variable with all costs multiplied."""
        blocks = tuple((weight * whole, symbols) for whole, symbols in self.blocks)
        work = self.work._replace(price=weight * self.work.price)
        return self._replace(work=work, blocks=blocks)

    def words(self, parts: Ints) -> Ints:
        """Return what each value costs, given the parts of each symbol."""
        words: Ints = self.work.price * (parts[:, -1] - 1)
        for whole, symbols in self.blocks:
            words = words + whole // parts[:, list(symbols)].prod(axis=1)
        return words


class Piece(NamedTuple):
    """Variables and the edges between them; those of a whole graph, or of some of its layers."""

    variables: tuple[PartsVariable, ...]
    edges: tuple[PartsEdge, ...]

    def words(self, values: Sequence[Ints]) -> int:
        """Return what one value of each variable costs: a single row for each."""
        total = 0
        for variable, parts in zip(self.variables, values, strict=True):
            total += int(variable.words(parts)[0])
        for edge in self.edges:
            source, target = edge.edge.source, edge.edge.target
            after = edge.after(values[target])
            if source is None:
                total += int(edge.words_of_input(after)[0])
            else:
                before = edge.before(values[source])
                total += int(edge.words(before, after)[0, 0])
        return total


class _NoPlan(Exception):
    """No plan moves fewer words than the one that is known."""


def least_words(piece: Piece, ranks: int, words: int) -> int:
    """Return what every choice of values costs, or less; at most the given words.

    `words` are those of a known choice: only those that cost less are looked at. If there are still
    too many, what each variable costs on its own is known.
    """
    sizes = [len(variable.extents) + 1 for variable in piece.variables]
    if any(count_of_ways(ranks, size) > MOST_VALUES for size in sizes):
        return 0
    if any(edge.elements * ranks > MOST_ELEMENTS for edge in piece.edges):
        return 0
    if words * len(piece.edges) > MOST_WORDS:
        return 0
    try:
        values = _Values(piece, ranks, words)
        values.connect()
        values.pass_on_costs(MOST_ROUNDS)
        return max(0, min(words, values.minimum()))
    except _NoPlan:
        return words


class _Values:
    """The values of each variable that are left: rows with the parts of each symbol.

    `costs` are what each value costs at least, beyond `least`, which every plan costs. Costs that
    two neighbouring variables have together are in their links.
    """

    def __init__(self, piece: Piece, ranks: int, words: int) -> None:
        self.words = words
        self.tolerance = 0.001 + 1e-11 * words  # more than all rounding errors together
        self.least = 0.0
        self.variables = piece.variables
        self.parts: list[Ints] = []
        self.costs: list[Floats] = []
        for variable in piece.variables:
            counts = tuple(part_counts([extent], ranks) for extent in variable.extents)
            parts = variable.work.allowed(grids(ranks, counts))
            self.parts.append(parts)
            self.costs.append(variable.words(parts).astype(np.float64))
        self.cells_left = MOST_CELLS
        self.links: list[Link] = []
        self.links_of: list[list[Link]] = [[] for _ in self.parts]
        self.input_edges: list[PartsEdge] = []
        self.edges: list[tuple[PartsEdge, int, int]] = []  # with source and target
        for edge in piece.edges:
            self._add(edge)
        for number in range(len(self.parts)):
            self._take_least(number)
        for number in range(len(self.parts)):
            self._leave_out(number)

    @property
    def known(self) -> int:
        """What every choice of values costs, as far as it is known."""
        return ceil(self.least - self.tolerance)

    def _add(self, edge: PartsEdge) -> None:
        """Add what the values at the ends of an edge cost each on its own."""
        source, target = edge.edge.source, edge.edge.target
        after = edge.after(self.parts[target])
        if source is None:
            self.input_edges.append(edge)
            self.costs[target] += edge.words_of_input(after)
        else:
            self.edges.append((edge, source, target))
            before = edge.before(self.parts[source])
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

    def connect(self) -> None:
        """Make the links between the values that are left: first those with small tables.

        What these cost leaves out values, and makes the other tables smaller. Links that are too
        large even so are left out: no less moves there than what is charged for it.
        """
        waiting = self.edges
        for most in (*CELLS_OF_TABLES, MOST_CELLS):
            if not waiting:
                break
            links = [Link(*edge, self.parts) for edge in waiting]
            waiting = []
            for link in sorted(links, key=lambda link: link.cells):
                if link.cells <= min(most, self.cells_left):
                    self.cells_left -= link.cells
                    self._join(link)
                else:
                    waiting.append((link.edge, *link.ends))
            self.pass_on_costs(rounds=1)

    def _join(self, link: Link) -> None:
        link.fill()
        self.links.append(link)
        for variable in link.ends:
            self.links_of[variable].append(link)

    def pass_on_costs(self, rounds: int) -> None:
        """Pass costs on along the links, forwards and backwards, until `least` hardly grows."""
        variables = range(len(self.parts))
        for _ in range(rounds):
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
            taken = link.take(variable)
            if taken is not None:
                self.costs[variable] = self.costs[variable] + taken
        self._take_least(variable)
        self._leave_out(variable)
        if later:
            share: Floats = self.costs[variable] / len(later)
            for link in later:
                link.give_back(variable, share)
            self.costs[variable] = np.zeros(len(share))

    def minimum(self) -> int:
        """Return the least words that the values that are left cost, or less."""
        sizes = [len(parts) for parts in self.parts]
        if len(self.links) < len(self.edges):
            return self.known
        if largest_join(sizes, [link.ends for link in self.links], MOST_JOINED) > MOST_JOINED:
            return self.known
        tables: list[Table] = []
        for number, (variable, parts) in enumerate(zip(self.variables, self.parts, strict=True)):
            words = np.minimum(variable.words(parts), self.words)
            tables.append(Table((number,), words, len(tables)))
        for edge in self.input_edges:
            target = edge.edge.target
            after = edge.after(self.parts[target])
            words = edge.words_of_input(after)
            tables.append(Table((target,), np.minimum(words, self.words), len(tables)))
        for link in self.links:
            of_source, of_target = link.layout_of
            words = np.minimum(link.words[of_source][:, of_target], self.words)
            tables.append(Table(link.ends, words, len(tables)))
        found = minimize(sizes, tables)
        return found.cost if found.exact else self.known
