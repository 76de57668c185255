"""Cuts that trade bytes moved for memory: the best at each price of memory, and mixtures of them.

They do not depend on the memory limit, so a higher limit never leads to a plan that moves more.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from einmpi.planner.cut_search import CutSearch
from einmpi.planner.factor import Factored
from einmpi.planner.memory import bytes_of_blocks
from einmpi.planner.solving.move import States
from einmpi.planner.solving.solver import MEMORY_PRICE_SCALE, Solution, Solver

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

    states: States  # of the variables of `TradeOffs.problem`
    cost: int  # of what moves, and with a measured machine of what is computed
    resident_bytes: int  # of resident inputs on a rank
    weighed_bytes: int  # of memory, as they are weighed in the search
    edge_costs: tuple[int, ...]


@dataclass
class TradeOffs:
    """The cuts of one graph on one mesh that need less memory and move more."""

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
        return [self.solver.work_cost(number, state) for number, state in enumerate(states)]
