"""A move of the search: some groups of mesh axes are given to symbols, the other axes stay."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod

import numpy as np

from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.volume import Ints
from einmpi.planner.states import Symbols

Groups = Sequence[Sequence[int]]  # of axes
States = list[tuple[int, ...]]  # for every variable the symbol of every axis


class Move:
    """The groups of axes that are free, and the axes that stay as they are."""

    def __init__(self, mesh: Mesh, groups: Groups) -> None:
        self.groups = tuple(map(tuple, groups))
        free_axes = set(itertools.chain(*groups))
        self.lengths = []  # of each group: the product of its axes
        self.lengths_between = []  # the product of its axes between nodes
        for group in groups:
            self.lengths.append(prod(mesh.factors[axis] for axis in group))
            between = [axis for axis in group if axis < mesh.node_axes]
            self.lengths_between.append(prod(mesh.factors[axis] for axis in between))
        self.staying = [axis for axis in range(len(mesh.factors)) if axis not in free_axes]
        self.staying_lengths = [mesh.factors[axis] for axis in self.staying]
        # How many of the staying axes are between nodes: the first ones.
        self.staying_between = sum(axis < mesh.node_axes for axis in self.staying)

    def staying_symbols(self, state: Sequence[int]) -> tuple[int, ...]:
        """Return the symbols of the axes that stay."""
        return tuple(state[axis] for axis in self.staying)

    def row_of(self, rows: Symbols, state: Sequence[int]) -> int:
        """Return the number of the choice that leaves everything as it is."""
        current = np.array([state[group[0]] for group in self.groups], np.int64)
        same = (rows == current).all(axis=1)
        assert same.any(), "the current state is not among the choices"
        return int(same.argmax())

    def expand(self, row: Symbols, state: Sequence[int]) -> tuple[int, ...]:
        """Return a state whose free axes are as in the row."""
        symbols = list(state)
        for symbol, group in zip(row.tolist(), self.groups, strict=True):
            for axis in group:
                symbols[axis] = symbol
        return tuple(symbols)

    def parts(self, rows: Symbols, symbols: int, state: Sequence[int]) -> Ints:
        """Return the number of parts of each symbol (the last column: R) for each choice."""
        parts = np.ones((len(rows), symbols + 1), np.int64)
        staying = zip(self.staying_lengths, self.staying_symbols(state), strict=True)
        for length, symbol in staying:
            parts[:, symbol] *= length
        every_row = np.arange(len(rows))
        for column, length in enumerate(self.lengths):
            parts[every_row, rows[:, column]] *= length
        return parts
