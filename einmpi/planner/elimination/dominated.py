"""Values of variables that cost more than another value whatever the other variables are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from einmpi.planner.elimination.eliminate import Ints, Limits, Memo, Minimum, Table, minimize

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
