"""What readers charge for copies of tensors: the linear program whose solution is the best charges.

docs/lower_bound.md, "Charges", has the argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from einmpi.planner.lower_bound.ways import FRACTIONS, Ints, Ways

# ---- linear program ------------------------------------------------------------------------------
#
# Linear programs with many columns, of which few are needed: the simplex method.
#
# Only sums and products of single elements are used, so that results are the same on every
# machine.


Floats = npt.NDArray[np.float64]

TOLERANCE = 1e-9  # costs are about 1
PIVOTS_FOR_EACH_ROW = 30  # a search that takes longer ends before the minimum


class Columns(NamedTuple):
    """Columns of a program, by their entries that are not 0.

    A column with fewer of them than others has zeros after them.
    """

    rows: Ints  # of the entries of each column
    entries: Floats
    costs: Floats  # of each column

    def and_more(self, more: Columns) -> Columns:
        """Return these columns with more of them."""
        return Columns(
            _side_by_side(self.rows, more.rows),
            _side_by_side(self.entries, more.entries),
            np.concatenate([self.costs, more.costs]),
        )


def _side_by_side(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the columns of both, with zeros after those that are shorter."""
    longest = max(len(first), len(second))
    padded = [np.pad(each, ((0, longest - len(each)), (0, 0))) for each in (first, second)]
    return np.concatenate(padded, axis=1)


def columns_of(matrix: Floats, costs: Floats) -> Columns:
    """Return the columns of a matrix."""
    used = matrix != 0
    longest = int(used.sum(axis=0).max(initial=0))
    rows = np.argsort(~used, axis=0, kind="stable")[:longest]
    return Columns(rows, np.take_along_axis(matrix, rows, axis=0), costs)


class Basis:
    """A solution with one column for each row, and the prices of the rows that follow from it."""

    def __init__(self, inverse: Floats, right_side: Floats, costs: Floats) -> None:
        self.inverse = inverse  # of the matrix of the columns in use
        self.amounts = _times(inverse, right_side)  # of each of these columns
        self.prices = _times(inverse.T, costs)  # of the rows

    def enter(self, rows: Ints, entries: Floats, reduced_cost: float) -> None:
        """Use as much of a column as possible, in place of the one that is used up first."""
        direction = _times(self.inverse[:, rows], entries)
        usable = direction > TOLERANCE
        assert usable.any(), "the costs have a minimum"
        ratios = np.divide(
            self.amounts, direction, out=np.full_like(direction, np.inf), where=usable
        )
        row = int(ratios.argmin())
        amount = ratios[row]
        self.amounts = np.maximum(0.0, self.amounts - amount * direction)
        self.amounts[row] = amount
        pivot_row = self.inverse[row] / direction[row]
        changed = direction.nonzero()[0]
        self.inverse[changed] -= direction[changed, None] * pivot_row
        self.inverse[row] = pivot_row
        self.prices = self.prices + reduced_cost * pivot_row


def find_prices(basis: Basis, columns: Columns, more: Callable[[Floats], Columns]) -> Floats:
    """Return the prices of the rows when the columns in use cost least.

    `more` returns columns that may be cheaper at the given prices, and none if there are none.
    """
    pivots = PIVOTS_FOR_EACH_ROW * len(basis.amounts)
    while True:
        rows, entries, costs = columns
        while pivots:
            # What one unit of each column costs, less the prices of what it gives.
            reduced = costs - (entries * basis.prices[rows]).sum(axis=0)
            cheapest = int(reduced.argmin())
            if reduced[cheapest] > -TOLERANCE:
                break
            basis.enter(rows[:, cheapest], entries[:, cheapest], float(reduced[cheapest]))
            pivots -= 1
        new = more(basis.prices)
        if not pivots or not len(new.costs):
            return basis.prices
        columns = columns.and_more(new)


def _times(matrix: Floats, vector: Floats) -> Floats:
    product: Floats = (matrix * vector).sum(axis=1)
    return product


# ---- charges -------------------------------------------------------------------------------------


# Amounts that could be zero get a little, each a different one: otherwise the search could go round
# in circles.
PERTURBATION = 1e-7


class Part(NamedTuple):
    """A vertex of a graph, or two that are taken as one."""

    charges: tuple[int | None, ...]  # the number of the charge for each operand; None: no charge
    charges_for_result: tuple[int, ...]  # those of the readers of its result
    ways: Ways
    times: int  # that it occurs


class Limit(NamedTuple):
    """The charges for one tensor: together they are at most its elements."""

    charges: tuple[int, ...]
    elements: int


@dataclass(frozen=True)
class Charging:
    """The parts of a graph, and the limits of what they charge."""

    parts: Sequence[Part]
    limits: Sequence[Limit]
    charges: int  # how many there are

    def bound(self, words: Sequence[int], fraction: int) -> int:
        """Return the least that moves, given what each charge is, all in fractions of a word."""
        total = 0
        for part in self.parts:
            total += part.times * int(_moved(part, words, part.ways.words * fraction).min())
        return total

    def best(self, fraction: int) -> list[int]:
        """Return charges, in fractions of a word, with which the bound is highest or nearly so."""
        if not self.charges:
            return []
        program = _Program(self)
        prices = find_prices(program.start(), program.fixed_columns(), program.cheaper_ways)
        wanted = prices[len(self.parts) :] * program.scale * fraction
        return self._within_limits([max(0, round(charge)) for charge in wanted.tolist()], fraction)

    def _within_limits(self, wanted: Sequence[int], fraction: int) -> list[int]:
        """Return charges that keep the limits: rounding may have made them a little too high."""
        words = list(wanted)
        for limit in self.limits:
            for charge, times in Counter(limit.charges).items():
                others = sum(words[other] for other in limit.charges if other != charge)
                most = (limit.elements * fraction - others) // times
                words[charge] = max(0, min(words[charge], most))
        return words


def _moved(part: Part, charged: Sequence[Any] | Floats, words: npt.NDArray[Any]) -> Any:
    """Return what a part moves in each way to cut it: `words`, and what it is charged for copies.

    Copies of the result that ranks have computed themselves are subtracted: readers charge for all
    copies but one.
    """
    moved = words - sum(charged[charge] for charge in part.charges_for_result) * part.ways.spare
    fractions = part.ways.fractions
    for operand, charge in enumerate(part.charges):
        if charge is None:
            continue
        moved = moved + charged[charge] * part.ways.copies[:, operand]
        if fractions is not None:
            moved = moved + _fraction_of(charged[charge], fractions[:, operand])
    return moved


def _fraction_of(charge: Any, fractions: Ints) -> Any:
    """Return these fractions of a charge, rounded down if it is a whole number."""
    if isinstance(charge, float):
        return charge * (fractions / FRACTIONS)
    high, low = divmod(charge, FRACTIONS)  # whose products fit into 64 bits
    return high * fractions + low * fractions // FRACTIONS


class _Program:
    """The linear program in its dual form.

    Each part has a mixture of ways to be cut: one row says that its shares add up. Of each tensor
    an amount moves: for each charge, a row says that this is enough for the copies that the
    reader's mixture needs, less those that the maker's mixture has to spare. The words that move
    are minimised, and the price of a row of the second kind is the charge.
    """

    def __init__(self, charging: Charging) -> None:
        self.charging = charging
        self.parts = len(charging.parts)
        self.rows = self.parts + charging.charges
        self.scale = float(max(1, *(limit.elements for limit in charging.limits)))

    def column(self, number: int, way: int) -> Floats:
        """Return the column of one way to cut a part."""
        part = self.charging.parts[number]
        column = np.zeros(self.rows)
        column[number] = 1
        copies = part.ways.copies[way].astype(np.float64)
        if part.ways.fractions is not None:
            copies += part.ways.fractions[way] / FRACTIONS
        for charge, number_of_copies in zip(part.charges, copies.tolist(), strict=True):
            if charge is not None:
                column[self.parts + charge] -= number_of_copies
        for charge in part.charges_for_result:
            column[self.parts + charge] += part.ways.spare[way]
        return column

    def start(self) -> Basis:
        """Return the solution in which all ranks compute everything, so that only inputs move.

        For the start, each charge has a column of its own for the amount that moves. Its cost is
        the highest charge, so that it changes nothing.
        """
        parts = self.parts
        ways = [int(part.ways.spare.argmax()) for part in self.charging.parts]
        computing = np.column_stack([self.column(number, way) for number, way in enumerate(ways)])
        counts = np.array([part.times for part in self.charging.parts], float)
        little = PERTURBATION * (1 + np.arange(self.charging.charges) / self.charging.charges)
        missing = little - (computing[parts:] * counts).sum(axis=1)
        signs = np.where(missing > 0, 1.0, -1.0)

        inverse = np.eye(self.rows)
        inverse[parts:, :parts] = -signs[:, None] * computing[parts:]
        inverse[parts:, parts:] = np.diag(signs)
        costs = np.zeros(self.rows)
        for number, way in enumerate(ways):
            costs[number] = self.charging.parts[number].ways.words[way] / self.scale
        highest = np.ones(self.charging.charges)  # each charge if it were the only one
        for limit in self.charging.limits:
            for charge in limit.charges:
                highest[charge] = min(highest[charge], limit.elements / self.scale)
        costs[parts:] = np.where(signs > 0, highest, 0.0)
        return Basis(inverse, np.concatenate([counts, little]), costs)

    def fixed_columns(self) -> Columns:
        """Return a column for the amount that moves of each tensor, and one for each surplus."""
        amounts = np.zeros((self.rows, len(self.charging.limits)))
        costs = np.zeros(len(self.charging.limits) + self.charging.charges)
        for number, limit in enumerate(self.charging.limits):
            costs[number] = limit.elements / self.scale
            for charge in limit.charges:
                amounts[self.parts + charge, number] += 1
        surplus = -np.eye(self.rows)[:, self.parts :]
        return columns_of(np.concatenate([amounts, surplus], axis=1), costs)

    def cheaper_ways(self, prices: Floats) -> Columns:
        """Return, for each part, the way that costs least at these prices, if that is less."""
        columns = [np.zeros((self.rows, 0))]
        costs = []
        for number, part in enumerate(self.charging.parts):
            moved = _moved(part, prices[self.parts :], part.ways.words / self.scale)
            way = int(moved.argmin())
            if moved[way] < prices[number] - TOLERANCE:
                columns.append(self.column(number, way)[:, None])
                costs.append(part.ways.words[way] / self.scale)
        return columns_of(np.concatenate(columns, axis=1), np.array(costs))
