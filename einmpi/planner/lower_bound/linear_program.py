"""Linear programs with many columns, of which few are needed: the simplex method.

Only sums and products of single elements are used, so that results are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

TOLERANCE = 1e-9  # costs are about 1
PIVOTS_FOR_EACH_ROW = 30  # a search that takes longer ends before the minimum


class Columns(NamedTuple):
    """Columns of a program and their costs."""

    entries: Floats  # a column for each
    costs: Floats


class Basis:
    """A solution with one column for each row, and the prices of the rows that follow from it."""

    def __init__(self, inverse: Floats, right_side: Floats, costs: Floats) -> None:
        self.inverse = inverse  # of the matrix of the columns in use
        self.amounts = _times(inverse, right_side)  # of each of these columns
        self.prices = _times(inverse.T, costs)  # of the rows

    def reduced_costs(self, columns: Columns) -> Floats:
        """Return what one unit of each column costs, less the prices of what it gives."""
        found: Floats = columns.costs - (columns.entries * self.prices[:, None]).sum(axis=0)
        return found

    def enter(self, column: Floats, reduced_cost: float) -> None:
        """Use as much of a column as possible, in place of the one that is used up first."""
        direction = _times(self.inverse, column)
        usable = direction > TOLERANCE
        assert usable.any(), "the costs have a minimum"
        ratios = np.full(len(direction), np.inf)
        ratios[usable] = self.amounts[usable] / direction[usable]
        row = int(ratios.argmin())
        amount = ratios[row]
        self.amounts = np.maximum(0.0, self.amounts - amount * direction)
        self.amounts[row] = amount
        pivot_row = self.inverse[row] / direction[row]
        self.inverse = self.inverse - direction[:, None] * pivot_row
        self.inverse[row] = pivot_row
        self.prices = self.prices + reduced_cost * pivot_row


def find_prices(basis: Basis, columns: Columns, more: Callable[[Floats], Columns]) -> Floats:
    """Return the prices of the rows when the columns in use cost least.

    `more` returns columns that may be cheaper at the given prices, and none if there are none.
    """
    pivots = PIVOTS_FOR_EACH_ROW * len(basis.amounts)
    while True:
        while pivots:
            reduced = basis.reduced_costs(columns)
            cheapest = int(reduced.argmin())
            if reduced[cheapest] > -TOLERANCE:
                break
            basis.enter(columns.entries[:, cheapest], float(reduced[cheapest]))
            pivots -= 1
        new = more(basis.prices)
        if not pivots or not len(new.costs):
            return basis.prices
        entries = np.concatenate([columns.entries, new.entries], axis=1)
        columns = Columns(entries, np.concatenate([columns.costs, new.costs]))


def _times(matrix: Floats, vector: Floats) -> Floats:
    product: Floats = (matrix * vector).sum(axis=1)
    return product
