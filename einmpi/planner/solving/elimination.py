"""Values of variables that cost more than another value whatever the other variables are."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import prod

import numpy as np
import numpy.typing as npt

# ---- eliminate -----------------------------------------------------------------------------------
#
# Minimise a sum of tables over discrete variables by bucket elimination.
#
# Exact as long as the tables stay small. docs/planner.md, "The search", has an example.


Ints = npt.NDArray[np.int64]

CHUNK_CELLS = 1 << 18  # joined at a time, so that they stay in the cache
JOIN_OVERHEAD_CELLS = 3000  # cells that take as long as the fixed part of a join
MOST_NEIGHBOURS = 40  # of a variable whose table could be joined within any limit
TOO_MANY_CELLS = 1 << MOST_NEIGHBOURS


@dataclass(frozen=True)
class Table:
    """Costs over the variables in `scope`; tables with the same key have the same costs."""

    scope: tuple[int, ...]
    costs: Ints  # one array axis for each variable in the scope
    key: int


@dataclass(frozen=True)
class Eliminated:
    """A table without one variable: the least cost over its values."""

    costs: Ints  # above `least`
    # The tables that were joined, with the eliminated variable on the first array axis. An axis has
    # the size 1 where a table does not depend on its variable.
    joined: tuple[Ints, ...]
    key: int  # of these costs
    least: int

    def best_value(self, values: Sequence[int]) -> int:
        """Return the value that costs least, given those of the other variables.

        It is asked for once, so that this takes less time than to find it for all values of the
        other variables.
        """
        total = np.zeros(1, np.int64)
        for table in self.joined:
            place: list[int | slice] = [slice(None)]
            for value, size in zip(values, table.shape[1:], strict=True):
                place.append(value if size > 1 else 0)
            total = total + table[tuple(place)]
        return int(total.argmin())


@dataclass
class Memo:
    """Eliminations done before: repeated layers have equal tables and are solved once."""

    numbers: dict[object, int] = field(default_factory=dict)
    results: dict[object, Eliminated] = field(default_factory=dict)
    cells: int = 0  # joined so far: a measure of work that does not depend on the machine

    def number(self, key: object) -> int:
        """Return a small number that stands for the key of a table."""
        return self.numbers.setdefault(key, len(self.numbers))


@dataclass(frozen=True)
class Minimum:
    """The least sum, and the value of each variable that reaches it."""

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
    """Return the least sum of the tables and the values that reach it.

    `sizes` has the number of values of each variable. Ties go to the smallest value. Where a
    joined table would be too large, the variable in it with the most neighbours is fixed: to its
    value in `fallback`, so that the result is never worse than that, or, without a fallback, to
    the value that looks best on its own.
    """
    elimination = _Elimination(sizes, tables, memo or Memo(), limits or Limits(), fallback)
    elimination.eliminate_all()
    # Backwards: the variable eliminated last depends on none, the one before on the last, …
    values = elimination.values
    for variable, scope, result in reversed(elimination.steps):
        values[variable] = result.best_value([values[other] for other in scope])
    return Minimum(elimination.total, values, elimination.exact)


def largest_join(sizes: Sequence[int], scopes: Iterable[Sequence[int]], limit: int) -> int:
    """Return the cells of the largest table that elimination would join, or one above `limit`.

    `scopes` are the variables of each table. No table is made.
    """
    order = _Order(sizes, scopes)
    largest = 1  # of variables with one value
    while largest <= limit:
        variable = order.next()
        if variable is None:
            break
        largest = max(largest, order.joined_cells(variable))
        order.remove(variable, is_joined=True)
    return largest


class _Order:
    """The order in which variables are eliminated: the smallest joined table is always next."""

    def __init__(self, sizes: Sequence[int], scopes: Iterable[Sequence[int]]) -> None:
        self.sizes = sizes
        # For each variable that is left, those that share a table with it, and itself.
        self.neighbours = [{variable} for variable in range(len(sizes))]
        for scope in scopes:
            varying = {variable for variable in scope if sizes[variable] > 1}
            for variable in varying:
                self.neighbours[variable] |= varying
        self.queue: list[tuple[int, int]] = []  # a heap; entries that are outdated stay in it
        for variable, size in enumerate(sizes):
            if size > 1:  # one value: nothing to choose, in no table
                self.queue.append((self.joined_cells(variable), variable))
        heapq.heapify(self.queue)

    def joined_cells(self, variable: int) -> int:
        """Return the size of the table that eliminating this variable would make.

        All sizes are two or more. So it is not counted for many neighbours: a tensor may have
        thousands of readers, and is asked about whenever one of them is eliminated.
        """
        neighbours = self.neighbours[variable]
        if len(neighbours) > MOST_NEIGHBOURS:
            return TOO_MANY_CELLS
        return prod([self.sizes[other] for other in neighbours])

    def scope(self, variable: int) -> tuple[int, ...]:
        """Return the variables that share a table with this one."""
        return tuple(sorted(self.neighbours[variable] - {variable}))

    def next(self) -> int | None:
        """Return the variable to eliminate next; None if none is left."""
        while self.queue:
            cells, variable = heapq.heappop(self.queue)
            if self.neighbours[variable] and cells == self.joined_cells(variable):
                return variable
        return None

    def remove(self, variable: int, is_joined: bool) -> None:
        """Remove a variable; its neighbours may be joined in one table."""
        others = self.neighbours[variable] - {variable}
        self.neighbours[variable] = set()
        for other in others:
            if is_joined:
                self.neighbours[other] |= others
            self.neighbours[other].discard(variable)
        for other in others:
            heapq.heappush(self.queue, (self.joined_cells(other), other))


class _Elimination:
    """The tables that are left while variables are eliminated one after another."""

    def __init__(
        self,
        sizes: Sequence[int],
        tables: Sequence[Table],
        memo: Memo,
        limits: Limits,
        fallback: Sequence[int] | None,
    ) -> None:
        self.sizes = sizes
        self.memo = memo
        self.limits = limits
        self.fallback = fallback
        self.order = _Order(sizes, [table.scope for table in tables])
        # The tables that contain each variable, by number: a table is in several buckets.
        self.buckets: list[dict[int, Table]] = [{} for _ in sizes]
        self.table_count = 0
        self.total = 0
        self.exact = True
        self.values = [0] * len(sizes)  # of the variables that are fixed
        # (variable, the variables that its value depends on, what was left without it)
        self.steps: list[tuple[int, tuple[int, ...], Eliminated]] = []
        self.cells_at_start = memo.cells
        for table in tables:
            self.add(table)

    def add(self, table: Table) -> None:
        """Put a table into the buckets of its variables."""
        # Variables with one value are dropped: many vertices may read one tensor, and a numpy
        # array has at most 64 dimensions.
        single = tuple(axis for axis, v in enumerate(table.scope) if self.sizes[v] == 1)
        if single:
            scope = tuple(variable for variable in table.scope if self.sizes[variable] > 1)
            key = self.memo.number(("single", table.key, single))
            table = Table(scope, table.costs.squeeze(single), key)
        if not table.scope:
            self.total += int(table.costs)
        for variable in table.scope:
            self.buckets[variable][self.table_count] = table
        self.table_count += 1

    def take(self, variable: int) -> list[Table]:
        """Remove and return all tables that contain a variable."""
        taken = list(self.buckets[variable].items())
        for number, table in taken:
            for other in table.scope:
                self.buckets[other].pop(number, None)
        return [table for _, table in taken]

    def most_cells(self) -> int:
        """Return how many cells a joined table may have now."""
        spent = self.memo.cells - self.cells_at_start
        return self.limits.first if spent < self.limits.budget else self.limits.then

    def eliminate_all(self) -> None:
        """Eliminate all variables; where a joined table would be too large, fix one first."""
        order = self.order
        while (variable := order.next()) is not None:
            scope = order.scope(variable)
            if scope and order.joined_cells(variable) > self.most_cells():
                self.fix(max(scope, key=lambda other: (len(order.neighbours[other]), -other)))
            else:
                self.eliminate(variable, scope)

    def eliminate(self, variable: int, scope: tuple[int, ...]) -> None:
        """Replace all tables with a variable by one over its neighbours: the minimum over it."""
        self.order.remove(variable, is_joined=True)
        result = _eliminate(variable, scope, self.take(variable), self.sizes, self.memo)
        self.total += result.least
        self.steps.append((variable, scope, result))
        if scope:
            self.add(Table(scope, result.costs, result.key))

    def fix(self, variable: int) -> None:
        """Give a variable its value now, which makes its tables smaller."""
        self.exact = False
        self.order.remove(variable, is_joined=False)
        tables = self.take(variable)
        if self.fallback is None:
            value = self.looks_best(variable, tables)
        else:
            value = self.fallback[variable]
        self.values[variable] = value
        for table in tables:
            axis = table.scope.index(variable)
            scope = table.scope[:axis] + table.scope[axis + 1 :]
            key = self.memo.number(("slice", table.key, axis, value))
            self.add(Table(scope, np.asarray(table.costs.take(value, axis=axis)), key))

    def looks_best(self, variable: int, tables: Sequence[Table]) -> int:
        """Return the value with the least cost if every other variable suits it."""
        total = np.zeros(self.sizes[variable], np.int64)
        for table in tables:
            axis = table.scope.index(variable)
            others = tuple(other for other in range(len(table.scope)) if other != axis)
            total += table.costs.min(axis=others)
        return int(total.argmin())


def _eliminate(
    variable: int, scope: tuple[int, ...], tables: Sequence[Table], sizes: Sequence[int], memo: Memo
) -> Eliminated:
    """Return the sum of the tables, minimised over `variable`."""
    joined_scope = (variable, *scope)
    position = {other: axis for axis, other in enumerate(joined_scope)}
    # The sizes belong to the key: a table may have size 1 on an axis, or there may be no table.
    shape = tuple(sizes[other] for other in joined_scope)
    table_keys = []
    for table in tables:
        axes_of_table = [position[variable] for variable in table.scope]
        table_keys.append((table.key, *axes_of_table))
    key = (shape, *sorted(table_keys))
    found = memo.results.get(key)
    if found is not None:
        return found
    memo.cells += prod(shape) + JOIN_OVERHEAD_CELLS
    aligned = tuple(_align(table, position, len(shape)) for table in tables)
    costs = _minimum_over_first(aligned, shape)
    least = int(costs.min())
    costs = costs - least
    # Above their minimum, costs soon repeat from layer to layer. So the key is made from what they
    # are, not from how they came about.
    content_key = memo.number((costs.shape, blake2b(costs.tobytes()).digest()))
    memo.results[key] = Eliminated(costs, aligned, content_key, least)
    return memo.results[key]


def _minimum_over_first(aligned: Sequence[Ints], shape: tuple[int, ...]) -> Ints:
    """Return the minimum over the first axis of the sum of the tables.

    The sum is never made as a whole: a few rows of the second axis at a time stay in the cache.
    """
    if len(shape) == 1:
        return np.array(sum(aligned, np.zeros(1, np.int64)).min())
    # What is small is added first, so that few sums are large.
    tables = sorted(aligned, key=lambda table: table.size)
    step = max(1, CHUNK_CELLS * shape[1] // prod(shape))
    costs = np.empty(shape[1:], np.int64)
    for start in range(0, shape[1], step):
        rows = slice(start, start + step)
        pieces = [table[:, rows] if table.shape[1] > 1 else table for table in tables]
        total = pieces[0]
        chunk_shape = (shape[0], min(step, shape[1] - start), *shape[2:])
        for piece in pieces[1:]:
            if total.shape == chunk_shape and total is not pieces[0]:
                total += piece
            else:
                total = total + piece
        # Where no table has all variables, the minimum is that of several rows.
        costs[rows] = total.min(axis=0)
    return costs


def _align(table: Table, position: Mapping[int, int], ndim: int) -> Ints:
    """Return a table with one axis for each variable of the joined scope, of size 1 if not its."""
    order = sorted(range(len(table.scope)), key=lambda axis: position[table.scope[axis]])
    costs = table.costs.transpose(order)
    shape = [1] * ndim
    for axis, source_axis in enumerate(order):
        shape[position[table.scope[source_axis]]] = costs.shape[axis]
    return costs.reshape(shape)


# A row for each value, a column for each value: how much more the first costs at least.
Excess = npt.NDArray[np.int64]
MOST_VALUES = 40  # of a variable that is looked at: more would take longer than they save


def minimize_without_dominated(
    sizes: Sequence[int],
    tables: Sequence[Table],
    memo: Memo,
    limits: Limits,
    fallback: Sequence[int],
) -> Minimum:
    """Return what `minimize` returns, after values that are in no solution were left out.

    The tables have one or two variables.
    """
    values = _Values(sizes, tables)
    values.leave_out_dominated()
    small_tables = [values.smaller(table, memo) for table in tables]
    small_sizes = [len(kept) for kept in values.kept]
    small_fallback = []
    for variable, value in enumerate(fallback):
        small_fallback.append(values.kept[variable].index(values.replacement(variable, value)))
    found = minimize(small_sizes, small_tables, memo, limits, small_fallback)
    chosen = []
    for variable, value in enumerate(found.values):
        chosen.append(values.kept[variable][value])
    return Minimum(found.cost, chosen, found.exact)


class _Values:
    """The values of each variable that are left."""

    def __init__(self, sizes: Sequence[int], tables: Sequence[Table]) -> None:
        self.kept = [list(range(size)) for size in sizes]
        self.better: list[dict[int, int]] = [{} for _ in sizes]  # value → one that costs less
        self.tables_of: list[list[Table]] = [[] for _ in sizes]
        for table in tables:
            for variable in table.scope:
                self.tables_of[variable].append(table)

    def leave_out_dominated(self) -> None:
        """Leave out values until nothing changes: fewer values dominate more of the others."""
        waiting = dict.fromkeys(range(len(self.kept)))
        while waiting:
            variable = next(iter(waiting))
            del waiting[variable]
            if not 1 < len(self.kept[variable]) <= MOST_VALUES:
                continue
            if self._leave_out(variable):
                for table in self.tables_of[variable]:
                    waiting.update(dict.fromkeys(table.scope))

    def _leave_out(self, variable: int) -> bool:
        """Leave out the dominated values of a variable; return whether there were any."""
        kept = self.kept[variable]
        excess: Excess = np.zeros((len(kept), len(kept)), np.int64)
        for table in self.tables_of[variable]:
            costs = self._costs(table, variable)
            excess += (costs[:, None, :] - costs[None, :, :]).min(axis=2)
        # Equal values stay: which of them is chosen is not decided here.
        rows, _ = np.nonzero(excess > 0)
        for row in rows.tolist():
            self.better[variable][kept[row]] = kept[int(excess[row].argmax())]
        left = [value for value in kept if value not in self.better[variable]]
        self.kept[variable] = left
        return len(left) < len(kept)

    def _costs(self, table: Table, variable: int) -> Ints:
        """Return the costs of a variable's values, a column for each value of the other one."""
        if len(table.scope) == 1:
            return table.costs[self.kept[variable]][:, None]
        axis = table.scope.index(variable)
        costs = table.costs if axis == 0 else table.costs.T
        return costs[np.ix_(self.kept[variable], self.kept[table.scope[1 - axis]])]

    def replacement(self, variable: int, value: int) -> int:
        """Return a value that is left and costs no more than a value that may be left out."""
        while value in self.better[variable]:
            value = self.better[variable][value]
        return value

    def smaller(self, table: Table, memo: Memo) -> Table:
        """Return a table of the values that are left."""
        kept = [self.kept[variable] for variable in table.scope]
        if all(len(values) == size for values, size in zip(kept, table.costs.shape, strict=True)):
            return table
        key = memo.number(("values", table.key, *map(tuple, kept)))
        return Table(table.scope, table.costs[np.ix_(*kept)], key)
