"""Minimum of a sum of tables over discrete variables: bucket elimination, exact while tables stay small.

(docs/planner.md)
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import prod

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_CHUNK = 1 << 18  # cells joined at a time: stays in cache
OVERHEAD = 3000  # cells that take as long as what surrounds a join


@dataclass(frozen=True)
class Table:
    """Costs over the variables in `scope`; tables with the same key have the same costs."""

    scope: tuple[int, ...]
    costs: Ints
    key: int


@dataclass(frozen=True)
class Eliminated:
    """Costs over the remaining variables above `least`, where the minimum is, the key of these costs."""

    costs: Ints
    best: npt.NDArray[np.intp]
    key: int
    least: int


@dataclass
class Memo:
    """Eliminations done before: repeated layers have equal tables, and cost nothing the second time."""

    numbers: dict[object, int] = field(default_factory=dict)
    results: dict[object, Eliminated] = field(default_factory=dict)
    cells: int = 0  # joined so far: a measure of work that does not depend on the machine

    def number(self, key: object) -> int:
        """A small number for the key of a table."""
        return self.numbers.setdefault(key, len(self.numbers))


@dataclass(frozen=True)
class Minimum:
    cost: int
    values: list[int]
    exact: bool


@dataclass(frozen=True)
class Limits:
    """Cells a joined table may have: `first` until `budget` cells were joined, then `then`."""

    first: int = 1 << 25
    budget: int = 1 << 62
    then: int = 1 << 16


def minimize(
    sizes: Sequence[int],
    tables: Sequence[Table],
    memo: Memo | None = None,
    limits: Limits | None = None,
    fallback: Sequence[int] | None = None,
) -> Minimum:
    """The least sum and the value of every variable that reaches it; ties go to the smallest value.

    Where a joined table would be too large, the variable in it with the most neighbours is fixed: to its value in
    `fallback`, so that the result is never worse than that, or without it to the value that looks best by itself.
    """
    state = _State(sizes, memo or Memo(), limits or Limits(), fallback)
    for table in tables:
        state.add(table)
    state.run()
    values = [0] * len(sizes)
    for variable, scope, best in reversed(state.steps):
        values[variable] = int(best[tuple(values[other] for other in scope)])
    return Minimum(state.total, values, state.exact)


class _State:
    def __init__(
        self, sizes: Sequence[int], memo: Memo, limits: Limits, fallback: Sequence[int] | None
    ) -> None:
        self.sizes, self.memo, self.limits, self.fallback = sizes, memo, limits, fallback
        self.buckets: list[dict[int, Table]] = [{} for _ in sizes]
        self.count = self.total = 0
        self.exact = True
        self.done = [size == 1 for size in sizes]  # nothing to choose: they are in no table
        self.steps: list[tuple[int, tuple[int, ...], npt.NDArray[np.intp]]] = []
        self.start = memo.cells

    def add(self, table: Table) -> None:
        single = tuple(
            axis for axis, variable in enumerate(table.scope) if self.sizes[variable] == 1
        )
        if (
            single
        ):  # a numpy array has 64 dimensions at the most, and many vertices may read one tensor
            scope = tuple(variable for variable in table.scope if self.sizes[variable] > 1)
            table = Table(
                scope, table.costs.squeeze(single), self.memo.number(("single", table.key, single))
            )
        if not table.scope:
            self.total += int(table.costs)
        for variable in table.scope:
            self.buckets[variable][self.count] = table
        self.count += 1

    def take(self, variable: int) -> list[Table]:
        """All tables with the variable, removed."""
        joined = list(self.buckets[variable].items())
        for number, table in joined:
            for other in table.scope:
                self.buckets[other].pop(number, None)
        return [table for _, table in joined]

    def neighbours(self, variable: int) -> set[int]:
        found: set[int] = set()
        for table in self.buckets[variable].values():
            found.update(table.scope)
        found.discard(variable)
        return found

    def width(self, variable: int) -> int:
        cells = self.sizes[variable]
        for other in self.neighbours(variable):
            cells *= self.sizes[other]
        return cells

    def limit(self) -> int:
        spent = self.memo.cells - self.start
        return self.limits.first if spent < self.limits.budget else self.limits.then

    def run(self) -> None:
        queue = [
            (self.width(variable), variable) for variable, done in enumerate(self.done) if not done
        ]
        heapq.heapify(queue)
        while queue:
            cells, variable = heapq.heappop(queue)
            if self.done[variable]:
                continue
            if (now := self.width(variable)) != cells:
                heapq.heappush(queue, (now, variable))
                continue
            scope = tuple(sorted(self.neighbours(variable)))
            if scope and cells > self.limit():
                crowded = max(scope, key=lambda other: (len(self.neighbours(other)), -other))
                scope = tuple(sorted(self.neighbours(crowded)))
                self.fix(crowded)
            else:
                self.done[variable] = True
                result = _eliminate(variable, scope, self.take(variable), self.sizes, self.memo)
                self.total += result.least
                self.steps.append((variable, scope, result.best))
                if scope:
                    self.add(Table(scope, result.costs, result.key))
            for other in (*scope, variable):
                if not self.done[other]:
                    heapq.heappush(queue, (self.width(other), other))

    def fix(self, variable: int) -> None:
        """Give a variable its value now; its tables become smaller."""
        self.exact, self.done[variable] = False, True
        tables = self.take(variable)
        value = (
            self.looks_best(variable, tables) if self.fallback is None else self.fallback[variable]
        )
        self.steps.append((variable, (), np.array(value, np.intp)))
        for table in tables:
            axis = table.scope.index(variable)
            scope = table.scope[:axis] + table.scope[axis + 1 :]
            key = self.memo.number(("slice", table.key, axis, value))
            self.add(Table(scope, np.asarray(table.costs.take(value, axis=axis)), key))

    def looks_best(self, variable: int, tables: Sequence[Table]) -> int:
        total = np.zeros(self.sizes[variable], np.int64)
        for table in tables:
            axis = table.scope.index(variable)
            total += table.costs.min(axis=tuple(k for k in range(len(table.scope)) if k != axis))
        return int(total.argmin())


def _eliminate(
    variable: int, scope: tuple[int, ...], tables: Sequence[Table], sizes: Sequence[int], memo: Memo
) -> Eliminated:
    """The sum of the tables, minimised over `variable`, and where the minimum is."""
    place: Mapping[int, int] = {other: k for k, other in enumerate((*scope, variable))}
    # The sizes matter where a table of size 1 stands for a whole axis or there is no table at all.
    shape = tuple(sizes[v] for v in (*scope, variable))
    key = (shape, *sorted((table.key, *(place[v] for v in table.scope)) for table in tables))
    found = memo.results.get(key)
    if found is not None:
        return found
    memo.cells += prod(shape) + OVERHEAD
    aligned = [_align(table, place, len(shape)) for table in tables]
    costs, best = _minimum_over_last(aligned, shape)
    lowest = int(costs.min())
    costs = costs - lowest
    # Above their minimum, costs soon repeat from layer to layer: the key is what they are, not how they came about.
    content = memo.number((costs.shape, blake2b(costs.tobytes()).digest()))
    memo.results[key] = Eliminated(costs, best, content, lowest)
    return memo.results[key]


def _minimum_over_last(
    aligned: Sequence[Ints], shape: tuple[int, ...]
) -> tuple[Ints, npt.NDArray[np.intp]]:
    """The minimum over the last axis of the sum, a piece of the first axis at a time."""
    if len(shape) == 1:
        total = np.broadcast_to(sum(aligned, np.zeros(1, np.int64)), shape)
        return np.array(total.min()), np.array(total.argmin())
    step = max(1, _CHUNK // max(1, prod(shape[1:])))
    costs = np.empty(shape[:-1], np.int64)
    best = np.empty(shape[:-1], np.intp)
    for start in range(0, shape[0], step):
        rows = slice(start, start + step)
        pieces = [table[rows] if table.shape[0] > 1 else table for table in aligned]
        total = sum(pieces[1:], pieces[0])
        wanted = (min(step, shape[0] - start), *shape[1:])
        if total.shape != wanted:
            total = np.broadcast_to(total, wanted)
        total.argmin(axis=-1, out=best[rows])
        total.min(axis=-1, out=costs[rows])
    return costs, best


def _align(table: Table, place: Mapping[int, int], ndim: int) -> Ints:
    """The table with one axis for each variable of the joined scope."""
    order = sorted(range(len(table.scope)), key=lambda k: place[table.scope[k]])
    costs = table.costs.transpose(order)
    shape = [1] * ndim
    for k, source in enumerate(order):
        shape[place[table.scope[source]]] = costs.shape[k]
    return costs.reshape(shape)
