"""What a tensor moves at least, given into how many parts the labels at both ends are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from einmpi.planner.factor import Edge
from einmpi.planner.lower_bound.kept import most_kept
from einmpi.planner.lower_bound.ways import Ints

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PartsEdge:
    """A tensor on its way from one variable to another, or from where an input is stored.

    A layout is a row: the parts of each dimension, the copies, and the partial results.
    """

    edge: Edge
    charge: float  # of the target for a copy, in words
    ranks: int

    @property
    def elements(self) -> int:
        return prod(self.edge.bound)

    def layouts(self, parts: Ints, symbols: Sequence[int]) -> Ints:
        """Return the layout that each value of a variable gives the tensor, or needs it in.

        The symbols of the edge say which dimension each symbol of the variable cuts.
        """
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
        return self.charge * (copies - 1)

    def charged_to_maker(self, before: Ints) -> Floats:
        """Return what the source pays for partial results, less what it has computed itself."""
        copies, partials = before[:, -2], before[:, -1]
        spare = np.where(partials == 1, copies - 1, 0)
        return self.elements * (partials - 1.0) - self.charge * spare

    def words(self, before: Ints, after: Ints) -> Ints:
        """Return what moves at least, for each pair of layouts."""
        partials = before[:, -1]
        kept = np.empty((len(before), len(after)), np.int64)
        for one_copy in (False, True):
            rows = (partials > 1) == one_copy
            if rows.any():
                layouts = before[rows, :-1], after[:, :-1]
                kept[rows] = most_kept(*layouts, self.edge.bound, self.ranks, one_copy)
        words: Ints = self.elements * (partials[:, None] - 1 + after[:, -2]) - kept
        return words


class Link:
    """An edge between two variables: what moves for each pair of values beyond what is charged.

    Values that give the tensor the same layout are one row, or one column, of a table. Of what a
    pair costs, parts can be taken over by one of the two values, or given back.
    """

    def __init__(self, edge: PartsEdge, source: int, target: int, parts: Sequence[Ints]) -> None:
        self.edge = edge
        self.ends = source, target
        before = edge.layouts(parts[source], edge.edge.source_symbols)
        after = edge.layouts(parts[target], edge.edge.target_symbols)
        self.before, of_source = np.unique(before, axis=0, return_inverse=True)
        self.after, of_target = np.unique(after, axis=0, return_inverse=True)
        self.layout_of = [of_source.reshape(-1), of_target.reshape(-1)]
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
        self.uncharged = self.words - maker[:, None] - reader

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

    def words_of_pairs(self) -> Ints:
        """Return what moves at least, for each pair of the values that are left."""
        words: Ints = self.words[self.layout_of[0]][:, self.layout_of[1]]
        return words
