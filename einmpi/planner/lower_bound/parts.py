"""The problem of the search with parts in place of axes: its minimum is a lower bound.

A plan says which axes of the mesh cut a label. Here only the number of parts is known, and each
tensor moves the least that these numbers allow for. docs/lower_bound.md has the argument."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, comb, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from einmpi.graph.einsum import EinSum
from einmpi.planner.factor import Block, Edge
from einmpi.planner.mesh import divided, divisors, prime_factors
from einmpi.planner.solving.elimination import Table, largest_join, minimize

# ---- ways ----------------------------------------------------------------------------------------
#
# The ways to cut one vertex over a number of ranks, and the copies that each of them needs.


Ints = npt.NDArray[np.int64]

MOST_WAYS = 1 << 17  # with more, nothing is known of a vertex
MOST_WORDS = 1 << 62  # of a sum that fits into 64 bits, with a sign
ROOT_OF_FRACTIONS = 1 << 15
FRACTIONS = ROOT_OF_FRACTIONS**2  # of a copy


class Ways(NamedTuple):
    """What each way to cut a vertex asks for; one row or entry for each way."""

    copies: Ints  # of each operand, a column each: how many more than one the ranks need together
    words: Ints  # of partial results that are moved
    spare: Ints  # copies of the result, more than one, that ranks have computed themselves
    # Beside whole copies, these fractions of one, rounded down; None where there are only whole.
    fractions: Ints | None = None


class Work(NamedTuple):
    """How much of its work a vertex may repeat, and what that costs."""

    most: int  # times that it is repeated
    price: int  # words each time

    def allowed(self, grid: Ints) -> Ints:
        """Return the ways that repeat no more; the last column has who does the same."""
        return grid[grid[:, -1] - 1 <= self.most]


FREE_WORK = Work(MOST_WORDS, 0)  # may be repeated as often as one likes


class Role(NamedTuple):
    """What a label does in a vertex. Labels with the same role are cut as if they were one."""

    lacking: tuple[int, ...]  # the operands that are copied where the label is cut
    is_aggregated: bool


def ways_to_cut(einsum: EinSum, elements: int, ranks: int, work: Work = FREE_WORK) -> Ways:
    """Return the ways to cut a vertex whose result has so many elements.

    The parts of all labels, times the ranks that compute the same, make up the number of ranks.
    """
    extents: dict[Role, list[int]] = {}
    for label, extent in einsum.extents:
        extents.setdefault(role_of(einsum, label), []).append(extent)
    roles = [(role, tuple(sorted(found))) for role, found in extents.items()]
    return _ways(tuple(sorted(roles)), len(einsum.operands), elements, ranks, work)


def role_of(einsum: EinSum, label: str) -> Role:
    """Return what a label does in a vertex."""
    operands = range(len(einsum.operands))
    lacking = tuple(at for at in operands if einsum.dimension_cut_by(at, label) is None)
    return Role(lacking, label in einsum.aggregated)


@lru_cache(maxsize=1024)  # layers repeat
def _ways(
    roles: tuple[tuple[Role, tuple[int, ...]], ...],
    operands: int,
    elements: int,
    ranks: int,
    work: Work,
) -> Ways:
    if count_of_ways(ranks, len(roles) + 1) > MOST_WAYS:
        return least_ways(operands, ranks)
    grid = work.allowed(grids(ranks, [part_counts(extents, ranks) for _, extents in roles]))
    if not len(grid):
        return least_ways(operands, ranks)
    ways = ways_of_grid(grid, [role for role, _ in roles], operands, elements, work)
    distinct = np.unique(np.column_stack(ways[:3]), axis=0)
    return Ways(distinct[:, :operands], distinct[:, operands], distinct[:, operands + 1])


def least_ways(operands: int, ranks: int) -> Ways:
    """Return a single way, which asks for no more than any other."""
    return Ways(np.zeros((1, operands), np.int64), np.zeros(1, np.int64), np.array([ranks - 1]))


def ways_of_grid(
    grid: Ints, roles: Sequence[Role], operands: int, elements: int, work: Work = FREE_WORK
) -> Ways:
    """Return what each way asks for, given the parts for each role and, last, the repetitions."""
    repeated = grid[:, -1]
    copies = np.repeat(repeated[:, None], operands, axis=1)
    partials = np.ones(len(grid), np.int64)
    for role, parts in zip(roles, grid.T, strict=False):
        copies[:, list(role.lacking)] *= parts[:, None]
        if role.is_aggregated:
            partials *= parts
    # Where partial results are added up, ranks that compute the same share that work, and none of
    # them has a result of its own.
    spare = np.where(partials == 1, repeated - 1, 0)
    words = elements * (partials - 1) + work.price * (repeated - 1)
    return Ways(copies - 1, words, spare)


def part_counts(extents: Sequence[int], ranks: int) -> frozenset[int]:
    """Return into how many parts labels of these extents can be cut together."""
    found = {1}
    for extent in extents:
        fitting = [parts for parts in divisors(ranks) if parts <= extent]
        products = {known * parts for known in found for parts in fitting}
        found = {product for product in products if ranks % product == 0}
    return frozenset(found)


def grids(ranks: int, allowed: Sequence[Collection[int]]) -> Ints:
    """Return all ways to write the ranks as a product: an allowed number for each role, and a rest.

    Each way is a row, with the rest last.
    """
    grid = _factorizations(ranks, len(allowed) + 1)
    fits = np.ones(len(grid), bool)
    for column, counts in enumerate(allowed):
        fits &= np.isin(grid[:, column], sorted(counts))
    return grid[fits]


@lru_cache(maxsize=64)
def _factorizations(ranks: int, numbers: int) -> Ints:
    """Return all ways to write the ranks as an ordered product of so many numbers, as rows."""
    rows = np.ones((1, numbers), np.int64)
    primes = prime_factors(ranks)
    for prime in sorted(set(primes)):
        count = primes.count(prime)
        exponents = []
        for parts in divided(count, numbers):
            exponents.append([end - start for start, end in parts])
        powers = prime ** np.array(exponents, np.int64)
        rows = (rows[:, None] * powers).reshape(-1, numbers)
    return rows


def count_of_ways(ranks: int, numbers: int) -> int:
    """Return how many ways there are to write the ranks as a product of so many numbers."""
    primes = prime_factors(ranks)
    return prod(comb(primes.count(prime) + numbers - 1, numbers - 1) for prime in set(primes))


MOST_ELEMENTS = 1 << 61  # that are computed with; they fit into 64 bits, with a sign


def most_kept(
    before: Ints, after: Ints, bound: tuple[int, ...], ranks: int, one_copy: bool = False
) -> Ints:
    """Return, for each pair of layouts, the most elements that ranks have before and afterwards.

    A layout is a row: the parts of each dimension, then the copies. The best case: as many axes as
    possible stay without a dimension, and as many as possible stay on theirs. What an axis that
    must turn from a dimension to another leaves on its rank is a share of the tensor.

    Of a tensor whose partial results are added up, at most `one_copy` is kept. The axes along which
    they are added up are not among the parts before.
    """
    short = []  # and without digits that are independent and equal
    for dimension, extent in enumerate(bound):
        if extent < ranks and not _is_even(extent, ranks):
            short.append(dimension)
    # Places in the tables of what is kept: a digit for each length of axes.
    shape = len(before), len(after)
    by_turns = np.zeros(shape, np.int32)
    by_exponents = np.zeros(shape, np.int32)
    primes = prime_factors(ranks)
    for prime in sorted(set(primes)):
        most = primes.count(prime)
        exponents_before = _exponents(before.T, prime, ranks)[:, :, None]
        exponents_after = _exponents(after.T, prime, ranks)[:, None, :]
        copies_after = exponents_after[-1]
        leaving = np.zeros(shape, np.int8)  # at least so many axes leave their dimension
        for dimension in range(len(bound)):
            away = exponents_before[dimension] - exponents_after[dimension]
            leaving += np.maximum(away, 0)
        exponents = copies_after - leaving
        staying = np.minimum(exponents_before[-1], 0 if one_copy else copies_after)
        turns = exponents < staying
        if short:  # at most so many turn from a short dimension to another one
            exponents += np.minimum(
                exponents_before[short].sum(axis=0, dtype=np.int8),
                exponents_after[short].sum(axis=0, dtype=np.int8),
            )
        if one_copy:
            exponents = np.minimum(exponents, 0)
        by_turns = by_turns * (2 * most + 2) + (2 * staying + turns)
        by_exponents = by_exponents * (2 * most + 1) + (exponents + most)
    of_turns, of_exponents = _kept_by_axes(bound, ranks)
    kept: Ints = np.minimum(of_turns[by_turns], of_exponents[by_exponents])
    return kept


@lru_cache(maxsize=1024)
def _kept_by_axes(bound: tuple[int, ...], ranks: int) -> tuple[Ints, Ints]:
    """Return two tables of the most elements that ranks keep.

    The first has an entry for each number of axes that have copies before and afterwards, and for
    whether an axis must turn; the second one for the share that axes leave, as an exponent.
    """
    repeated = np.ones(1, np.int64)
    # Where an axis of some length must turn, a rank keeps no more than the longest share of a
    # dimension along such an axis.
    elements = np.full(1, prod(bound))
    # Every axis that turns leaves an equal share, if extents are rounded up to divide evenly.
    times = np.ones(1, np.int64)
    shares = np.ones(1, np.int64)
    primes = prime_factors(ranks)
    for prime in sorted(set(primes)):
        powers = prime ** np.arange(primes.count(prime) + 1)
        longest = [prod(bound), _elements_of_longest_share(bound, prime, ranks)]
        repeated = np.multiply.outer(repeated, np.repeat(powers, 2)).ravel()
        elements = np.minimum.outer(elements, np.tile(longest, len(powers))).ravel()
        ones = np.ones_like(powers[1:])
        times = np.multiply.outer(times, np.concatenate([ones, powers])).ravel()
        shares = np.multiply.outer(shares, np.concatenate([powers[:0:-1], ones, [1]])).ravel()
    # Extents as they would be if all fine blocks of a dimension were alike. How many fine blocks
    # there are depends on the axes; the worst case is taken.
    rounded = 1
    for extent in bound:
        rounded *= extent if extent < ranks else -(-extent // ranks) * ranks
    if rounded * ranks > MOST_ELEMENTS:
        return repeated * elements, np.full(len(times), np.iinfo(np.int64).max)
    return repeated * elements, rounded * times // shares


def _is_even(extent: int, ranks: int) -> bool:
    """Return whether a short dimension is cut into equal parts by digits of the same numbers.

    On several nodes, axes of different lengths may be in windows with digits of other numbers, such
    as 3·3 and 3·2, unless they fit together.
    """
    lengths = [length for length in prime_factors(ranks) if length <= extent]
    if len(set(lengths)) > 1 and prod(lengths) > extent:
        return False
    return not any(extent % parts for parts in divisors(ranks) if parts <= extent)


def _exponents(numbers: Ints, prime: int, ranks: int) -> npt.NDArray[np.int8]:
    """Return how often a prime divides each of the numbers, which divide the number of ranks."""
    known, exponents = _exponents_of_divisors(prime, ranks)
    return exponents[np.searchsorted(known, numbers)]


@lru_cache(maxsize=64)
def _exponents_of_divisors(prime: int, ranks: int) -> tuple[Ints, npt.NDArray[np.int8]]:
    """Return the divisors of a number of ranks, and how often a prime divides each of them."""
    known = divisors(ranks)
    exponents = [prime_factors(number).count(prime) for number in known]
    return np.array(known), np.array(exponents, np.int8)


@lru_cache(maxsize=1024)
def _elements_of_longest_share(bound: tuple[int, ...], length: int, ranks: int) -> int:
    """Return the most elements of a tensor that have one digit on an axis of this length.

    The axis slices a digit of the number of a fine block. How many fine blocks there are depends on
    the axis; the worst case is taken.
    """
    most = 0
    for extent in bound:
        for blocks in divisors(ranks):
            if blocks % length == 0 and blocks <= extent:
                indices = min(extent, blocks // length * -(-extent // blocks))
                most = max(most, prod(bound) // extent * indices)
    return most


# ---- parts in place of axes ----------------------------------------------------------------------
#
# The problem of the search with parts in place of axes: its minimum is a lower bound.
#
# A plan says which axes of the mesh cut a label. Here only the number of parts is known, and each
# tensor moves the least that these numbers allow for. docs/lower_bound.md has the argument.


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
            counts = [part_counts([extent], ranks) for extent in variable.extents]
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
            self.costs[variable] = self.costs[variable] + link.take(variable)
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
