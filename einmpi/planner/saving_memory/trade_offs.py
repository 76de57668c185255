"""Cuts that trade bytes moved for memory: the best at each price of memory, and mixtures of them.

They do not depend on the memory limit, so a higher limit never leads to a plan that moves more.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from einmpi.planner.cost_tables import MEMORY_PRICE_SCALE, Solution, Solver, States, bytes_of_blocks
from einmpi.planner.cut_search import CutSearch
from einmpi.planner.factor import Edge, Factored

# From here on memory is all that counts: a byte of it is worth 65536 bytes moved.
HIGHEST_PRICE = MEMORY_PRICE_SCALE << 16
# Prices that are tried: each takes as long as planning without a limit.
MOST_PRICES = 16
MOST_PRICES_OF_LARGE = 10  # of a graph with many vertices
MOST_MIXTURES = 32  # of two neighbours
# A price is tried between two neighbours if they differ by more than this share: a hundredth.
SMALLEST_DIFFERENCE = 100

Amounts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cuts:
    """States of all variables of a graph, and what they cost."""

    states: States  # of the variables of `TradeOffs.problem`
    cost: int  # of what moves, and with a measured machine of what is computed
    resident_bytes: int  # of resident inputs on a rank


@dataclass(frozen=True)
class PricedCuts:
    """The best cuts at one price of memory."""

    cuts: Cuts
    weighed_bytes: int  # of memory, as they are weighed in the search
    edge_costs: tuple[int, ...]


@dataclass
class TradeOffs:
    """The cuts of one graph on one mesh that need less memory and move more."""

    search: CutSearch
    first: Solution  # without a price of memory

    @property
    def problem(self) -> Factored:
        """The problem in which every layer has variables of its own."""
        return self.search.with_own_variables

    @cached_property
    def solver(self) -> Solver:
        """The solver that tells what given states cost."""
        return Solver(
            self.problem,
            self.search.mesh,
            prices=self.search.prices,
            rates=self.search.operation_rates(self.problem),
        )

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
            found.sort(key=lambda each: (each.cuts.cost, each.weighed_bytes))
            price = self._next_price(found, prices)
            if price is None:
                break
            prices.add(price)
            new = self._at_price(price)
            if all(new.cuts.states != known.cuts.states for known in found):
                found.append(new)
        return sorted(found, key=lambda each: (each.cuts.cost, each.weighed_bytes))

    def _next_price(self, found: Sequence[PricedCuts], prices: set[int]) -> int | None:
        """Return the price to try next; None if there is none."""
        candidates = []
        for cheap, dear in itertools.pairwise(found):
            saved_bytes = cheap.weighed_bytes - dear.weighed_bytes
            added_cost = dear.cuts.cost - cheap.cuts.cost
            if saved_bytes <= 0 or added_cost * SMALLEST_DIFFERENCE <= cheap.cuts.cost:
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
        return PricedCuts(
            Cuts(
                states,
                sum(edge_costs) + sum(self._work_costs(states)),
                sum(self._resident_bytes(states)),
            ),
            weighed_bytes,
            tuple(edge_costs),
        )

    def _work_costs(self, states: States) -> list[int]:
        """Return the cost of computing each variable; 0 where no machine was measured."""
        if not self.solver.rates:
            return [0] * len(states)
        return [self.solver.work_cost(number, state) for number, state in enumerate(states)]

    def _resident_bytes(self, states: States) -> list[int]:
        """Return the bytes of resident inputs that a rank has for each variable."""
        found = []
        for blocks, state in zip(self.problem.permanent, states, strict=True):
            found.append(bytes_of_blocks(self.search.mesh, blocks, state))
        return found

    # ---- mixtures -------------------------------------------------------------------------------

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

    def mixtures(self, cheap: PricedCuts, dear: PricedCuts) -> list[Cuts]:
        """Return cuts as in `cheap` up to a vertex and as in `dear` from there on.

        Layers need not be cut alike: the more of them are cut as in `cheap`, the fewer bytes move,
        and the more memory resident inputs take. Those that cost least are first. A mixture that
        costs as much as `dear` is left out.
        """
        costs, resident_bytes = self._of_mixtures(cheap, dear)
        vertices = len(costs) - 1
        borders = np.linspace(1, vertices, MOST_MIXTURES + 1).astype(np.int64)
        chosen = set()
        for first, last in itertools.pairwise(borders):
            if last > first:
                chosen.add(int(first + costs[first:last].argmin()))
        found = []
        for number in chosen:
            if cheap.cuts.cost < costs[number] < dear.cuts.cost:
                found.append((int(costs[number]), int(resident_bytes[number]), number))
        mixed = []
        for cost, nbytes, number in sorted(found):
            pairs = zip(self.positions, cheap.cuts.states, dear.cuts.states, strict=True)
            states = [first if place <= number else last for place, first, last in pairs]
            mixed.append(Cuts(states, cost, nbytes))
        return mixed

    def _of_mixtures(self, cheap: PricedCuts, dear: PricedCuts) -> tuple[Amounts, Amounts]:
        """Return the costs and the resident bytes of all mixtures.

        Of each by the number of vertices that are cut as in `cheap`, from none to all.
        """
        vertices = len(self.search.graph.computed)
        # What changes with each number, added up at the end.
        costs = np.zeros(vertices + 2, np.int64)
        resident_bytes = np.zeros(vertices + 2, np.int64)
        costs[0] = dear.cuts.cost
        resident_bytes[0] = dear.cuts.resident_bytes
        differences = [
            (costs, self._work_costs(cheap.cuts.states), self._work_costs(dear.cuts.states)),
            (
                resident_bytes,
                self._resident_bytes(cheap.cuts.states),
                self._resident_bytes(dear.cuts.states),
            ),
        ]
        for total, of_cheap, of_dear in differences:
            for place, first, last in zip(self.positions, of_cheap, of_dear, strict=True):
                total[place] += first - last
        edge_costs = zip(self.problem.edges, cheap.edge_costs, dear.edge_costs, strict=True)
        for edge, first, last in edge_costs:
            places = self._places_of(edge)
            if places[0] < places[1]:
                crossing = self._crossing_cost(edge, cheap.cuts.states, dear.cuts.states)
                costs[places[0]] += crossing - last
                costs[places[1]] += first - crossing
            else:
                costs[places[0]] += first - last
        return costs.cumsum()[: vertices + 1], resident_bytes.cumsum()[: vertices + 1]

    def _places_of(self, edge: Edge) -> tuple[int, int]:
        """Return the positions of an edge's ends, the earlier one first."""
        target = self.positions[edge.target]
        source = target if edge.source is None else self.positions[edge.source]
        return min(source, target), max(source, target)

    def _crossing_cost(self, edge: Edge, cheap: States, dear: States) -> int:
        """Return what an edge costs if its earlier end is as in `cheap`, the later as in `dear`."""
        assert edge.source is not None, "an input without a layout has one end"
        source_is_earlier = self.positions[edge.source] < self.positions[edge.target]
        source = cheap[edge.source] if source_is_earlier else dear[edge.source]
        target = dear[edge.target] if source_is_earlier else cheap[edge.target]
        return self.solver.edge_cost(edge, source, target)
