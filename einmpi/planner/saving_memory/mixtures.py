"""Mixtures of two cuts of a graph: some vertices, one after another, are cut as in the second.

Equal layers have equal costs, so that a price of memory cuts all of them alike. Mixtures cut some
of them, or parts of one, in another way, and lie between the cuts that two prices lead to.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from einmpi.graph.eingraph import EinGraph
from einmpi.planner.cut_search import CutSearch
from einmpi.planner.factor import Edge, Factored
from einmpi.planner.memory import bytes_of_blocks
from einmpi.planner.mesh import Mesh
from einmpi.planner.plan import Options
from einmpi.planner.solving.solver import MEMORY_PRICE_SCALE, SharedTables, Solution, Solver
from einmpi.planner.states import States

# ---- trade offs ----------------------------------------------------------------------------------
#
# Cuts that trade bytes moved for memory: the best at each price of memory, and mixtures of
# them.
#
# They do not depend on the memory limit, so a higher limit never leads to a plan that moves
# more.


# From here on memory is all that counts: a byte of it is worth 65536 bytes moved.
HIGHEST_PRICE = MEMORY_PRICE_SCALE << 16
# Prices that are tried: each takes as long as planning without a limit.
MOST_PRICES = 16
MOST_PRICES_OF_LARGE = 10  # of a graph with many vertices
# A price is tried between two neighbours if they differ by more than this share: a hundredth.
SMALLEST_DIFFERENCE = 100


@dataclass(frozen=True)
class PricedCuts:
    """The best cuts at one price of memory: states of all variables, and what they cost."""

    states: States  # of the variables of `Mixtures.problem`
    cost: int  # of what moves, and with a measured machine of what is computed
    resident_bytes: int  # of resident inputs on a rank
    weighed_bytes: int  # of memory, as they are weighed in the search
    edge_costs: tuple[int, ...]


# Vertices at which a part that is cut differently may begin: in a larger graph, half of these are
# its first vertices, which are several layers, and half its last ones.
MOST_STARTS = 256
# Of mixtures whose costs differ by less than this share, a thousandth, one is enough.
SMALLEST_STEP = 1000

Amounts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Mixture:
    """Cuts as in `cheap`, but after the vertex `start` and up to the vertex `end` as in `dear`."""

    cheap: PricedCuts
    dear: PricedCuts
    start: int  # vertices are counted from 1
    end: int
    cost: int
    resident_bytes: int


@dataclass
class Mixtures:
    """The cuts of one graph on one mesh that several prices of memory lead to, and mixtures."""

    search: CutSearch

    @cached_property
    def first(self) -> Solution:
        """The solution if memory costs nothing."""
        return self.search.solve(0)

    @property
    def problem(self) -> Factored:
        """The problem in which every layer has variables of its own."""
        return self.search.with_own_variables

    @cached_property
    def solver(self) -> Solver:
        """The solver that tells what given states cost."""
        return Solver(self.problem, self.search.mesh, prices=self.search.prices)

    @cached_property
    def without_price(self) -> PricedCuts:
        """The best cuts if memory costs nothing."""
        return self._with_costs(self.first, 0)

    @cached_property
    def priced(self) -> list[PricedCuts]:
        """The best cuts at several prices, those that cost least first.

        The next price is always the one at which the two neighbours that differ most would be
        equally good: whatever is better than both there lies between them.
        """
        found = [self.without_price, self._at_price(HIGHEST_PRICE)]
        prices = {0, HIGHEST_PRICE}
        most_prices = MOST_PRICES_OF_LARGE if self.search.is_large else MOST_PRICES
        while len(prices) < most_prices:
            found.sort(key=lambda each: (each.cost, each.weighed_bytes))
            price = self._next_price(found, prices)
            if price is None:
                break
            prices.add(price)
            new = self._at_price(price)
            if all(new.states != known.states for known in found):
                found.append(new)
        return sorted(found, key=lambda each: (each.cost, each.weighed_bytes))

    def _next_price(self, found: Sequence[PricedCuts], prices: set[int]) -> int | None:
        """Return the price to try next; None if there is none."""
        candidates = []
        for cheap, dear in itertools.pairwise(found):
            saved_bytes = cheap.weighed_bytes - dear.weighed_bytes
            added_cost = dear.cost - cheap.cost
            if saved_bytes <= 0 or added_cost * SMALLEST_DIFFERENCE <= cheap.cost:
                continue
            of_a_byte = self.search.mesh.ranks * self.search.prices.memory * saved_bytes
            price = added_cost * self.solver.unit * MEMORY_PRICE_SCALE // of_a_byte
            price = min(max(price, 1), HIGHEST_PRICE)
            if price not in prices:
                candidates.append((added_cost * saved_bytes, price))
        return max(candidates)[1] if candidates else None

    def _at_price(self, price: int) -> PricedCuts:
        """Return the best cuts at a price of memory."""
        return self._with_costs(self.search.solve(price), price)

    def _with_costs(self, found: Solution, price: int) -> PricedCuts:
        """Return the cuts that were found at a price, with what they cost."""
        solved = self.search.problem_at(price)
        weighed_bytes = 0
        for blocks, state in zip(solved.blocks, found.states, strict=True):
            weighed_bytes += bytes_of_blocks(self.search.mesh, blocks, state)
        states: States = [()] * len(self.problem.variables)
        for name, number in self.problem.number.items():
            states[number] = found.states[solved.number[name]]
        edge_costs = []
        for edge in self.problem.edges:
            source = None if edge.source is None else states[edge.source]
            edge_costs.append(self.solver.edge_cost(edge, source, states[edge.target]))
        resident_bytes = 0
        for blocks, state in zip(self.problem.permanent, states, strict=True):
            resident_bytes += bytes_of_blocks(self.search.mesh, blocks, state)
        cost = sum(edge_costs) + sum(self.work_costs(states))
        return PricedCuts(states, cost, resident_bytes, weighed_bytes, tuple(edge_costs))

    def work_costs(self, states: States) -> list[int]:
        """Return the cost of computing each variable; 0 where no machine was measured."""
        if not self.problem.rates:
            return [0] * len(states)
        return [self.solver.own_cost(number, state) for number, state in enumerate(states)]

    # ---- mixtures of two cuts -------------------------------------------------------------------

    @cached_property
    def positions(self) -> list[int]:
        """The computed vertex that each variable belongs to: its own, or the first that reads it.

        Counted from 1.
        """
        graph = self.search.graph
        place = {vertex.name: number for number, vertex in enumerate(graph.computed, 1)}
        found = []
        for variable in self.problem.variables:
            users = graph.consumers.get(variable.name, ())
            first_read = min((place[user] for user in users), default=1)
            found.append(place.get(variable.name, first_read))
        return found

    @cached_property
    def starts(self) -> Amounts:
        """The vertices after which a part that is cut differently may begin; 0 is the start."""
        vertices = np.arange(len(self.search.graph.computed))
        if len(vertices) <= MOST_STARTS:
            return vertices
        half = MOST_STARTS // 2
        return np.concatenate([vertices[:half], vertices[-half:]])

    def states(self, mixture: Mixture) -> States:
        """Return the states of all variables of a mixture."""
        cheap = mixture.cheap.states
        dear = mixture.dear.states
        found = []
        for place, first, second in zip(self.positions, cheap, dear, strict=True):
            is_dear = mixture.start < place <= mixture.end
            found.append(second if is_dear else first)
        return found

    def between(self, cheap: PricedCuts, dear: PricedCuts) -> list[Mixture]:
        """Return the mixtures that no other one beats, those that cost least first.

        Each costs more than `cheap` and less than `dear`. The more it costs, the less memory its
        resident inputs take.
        """
        cost = self._costs(cheap, dear)
        resident_bytes = self._resident_bytes(cheap, dear)
        is_between = (cheap.cost < cost) & (cost < dear.cost)
        is_between &= resident_bytes < cheap.resident_bytes
        rows, ends = np.nonzero(is_between)
        if not len(rows):
            return []
        costs = cost[rows, ends]
        sizes = resident_bytes[rows, ends]
        order = np.lexsort((ends, rows, sizes, costs))
        found: list[Mixture] = []
        for number in order[_records(sizes[order])].tolist():
            mixture = Mixture(
                cheap,
                dear,
                int(self.starts[rows[number]]),
                int(ends[number]),
                int(costs[number]),
                int(sizes[number]),
            )
            # Of mixtures that cost little more than another one, the last is enough.
            if len(found) > 1:
                close_cost = found[-2].cost
                if (mixture.cost - close_cost) * SMALLEST_STEP < close_cost:
                    found.pop()
            found.append(mixture)
        return found

    # ---- costs and bytes of all mixtures of two cuts ---------------------------------------------

    def _costs(self, cheap: PricedCuts, dear: PricedCuts) -> Amounts:
        """Return what all mixtures cost, by the number of their start and by their end."""
        last = len(self.search.graph.computed)
        areas = _Areas()
        of_work = zip(
            self.positions,
            self.work_costs(cheap.states),
            self.work_costs(dear.states),
            strict=True,
        )
        for place, first, second in of_work:
            areas.add(0, place, place, last + 1, second - first)
        edges = self.problem.edges
        for edge, first, second in zip(edges, cheap.edge_costs, dear.edge_costs, strict=True):
            early, late = self._places_of(edge)
            areas.add(0, early, late, last + 1, second - first)  # both ends as in `dear`
            if early < late and edge.source is not None:
                only_early, only_late = self._crossing_costs(edge, cheap, dear)
                areas.add(0, early, early, late, only_early - first)
                areas.add(early, late, late, last + 1, only_late - first)
        return areas.sums(self.starts, last) + cheap.cost

    def _resident_bytes(self, cheap: PricedCuts, dear: PricedCuts) -> Amounts:
        """Return the resident bytes of all mixtures, arranged as their costs."""
        problem = self.problem
        mesh = self.search.mesh
        last = len(self.search.graph.computed)
        areas = _Areas()
        for number, blocks in enumerate(problem.permanent):
            if blocks:
                first = bytes_of_blocks(mesh, blocks, cheap.states[number])
                second = bytes_of_blocks(mesh, blocks, dear.states[number])
                place = self.positions[number]
                areas.add(0, place, place, last + 1, second - first)
        return areas.sums(self.starts, last) + cheap.resident_bytes

    def _places_of(self, edge: Edge) -> tuple[int, int]:
        """Return the positions of an edge's ends, the earlier one first."""
        target = self.positions[edge.target]
        source = target if edge.source is None else self.positions[edge.source]
        return min(source, target), max(source, target)

    def _crossing_costs(self, edge: Edge, cheap: PricedCuts, dear: PricedCuts) -> tuple[int, int]:
        """Return what an edge costs if only its earlier end is as in `dear`, and only the later."""
        assert edge.source is not None, "an input without a layout has one end"
        source_in_dear = self.solver.edge_cost(
            edge, dear.states[edge.source], cheap.states[edge.target]
        )
        target_in_dear = self.solver.edge_cost(
            edge, cheap.states[edge.source], dear.states[edge.target]
        )
        if self.positions[edge.source] < self.positions[edge.target]:
            return source_in_dear, target_in_dear
        return target_in_dear, source_in_dear


class _Areas:
    """Amounts that many mixtures have in common: those that start and end in certain ranges."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, int]] = []

    def add(
        self, first_start: int, after_starts: int, first_end: int, after_ends: int, amount: int
    ) -> None:
        """Add an amount to the mixtures with these starts and ends. The last ones are excluded."""
        if amount:
            self.rows.append((first_start, after_starts, first_end, after_ends, amount))

    def sums(self, starts: Amounts, last: int) -> Amounts:
        """Return the sums for these starts and all ends from 0 to `last`."""
        # Each amount is put at the corners of its area, and then added up in both directions.
        corners = np.zeros((len(starts) + 1, last + 2), np.int64)
        if self.rows:
            areas = np.array(self.rows, np.int64)
            amounts = areas[:, 4]
            top, bottom = np.searchsorted(starts, areas[:, 0]), np.searchsorted(starts, areas[:, 1])
            left, right = areas[:, 2], areas[:, 3]
            np.add.at(corners, (top, left), amounts)
            np.add.at(corners, (bottom, left), -amounts)
            np.add.at(corners, (top, right), -amounts)
            np.add.at(corners, (bottom, right), amounts)
        return corners.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]


def _records(sizes: Amounts) -> npt.NDArray[np.bool_]:
    """Return which of these are less than all before."""
    least = np.minimum.accumulate(sizes)
    is_record = np.ones(len(sizes), np.bool_)
    is_record[1:] = sizes[1:] < least[:-1]
    return is_record


# ---- searches ------------------------------------------------------------------------------------
#
# What is searched for one graph on one mesh whatever the memory limit, and kept if asked for.


# The searches to use again, while they are kept.
_kept: ContextVar[list[Mixtures] | None] = ContextVar("kept searches", default=None)


@contextmanager
def searches_kept() -> Iterator[None]:
    """Keep searches as long as the context lasts, for plans under several memory limits."""
    token = _kept.set([])
    try:
        yield
    finally:
        _kept.reset(token)


def searches_of(graph: EinGraph, mesh: Mesh, options: Options, tables: SharedTables) -> Mixtures:
    """Return the searches of a graph on a mesh: those that were kept, or new ones."""
    without_limit = replace(options, memory=None)
    kept = _kept.get()
    for known in kept or ():
        search = known.search
        if (search.graph, search.mesh, search.options) == (graph, mesh, without_limit):
            return known
    searches = Mixtures(CutSearch(graph, mesh, without_limit, tables))
    if kept is not None:
        kept.append(searches)
    return searches
