"""States of vertices and layouts of tensors: the label or dimension that each mesh axis cuts.

Both are rows of symbols, one for each axis; a symbol is the number of a label or dimension, or R.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from einmpi.graph.eingraph import Vertex
from einmpi.graph.einsum import EinSum
from einmpi.planner.mesh import Extent, Mesh, may_cut

Symbols = npt.NDArray[np.int64]  # a row for each choice, a column for each group of axes

Name = TypeVar("Name")  # of a label, or the number of a dimension

MAX_SYMBOLS = 8  # labels of one vertex, or dimensions of one tensor, that may be cut: the longest
FEW_ROWS = 64  # too few to be worth looking for equal layouts


def input_symbols(einsum: EinSum, operand: int) -> tuple[int, ...]:
    """Return, for each label and R, the operand's dimension that it cuts, or ndim (R) for none.

    A gathered dimension is needed whole. A diagonal is cut along its first dimension.
    For X[i,j]·Y[j,k] summed over j, the labels are i, k, j: X has the symbols (0, 2, 1, 2).
    """
    ndim = len(einsum.operands[operand])
    symbols = []
    for label in einsum.labels:
        dimension = einsum.dimension_cut_by(operand, label)
        symbols.append(ndim if dimension is None else dimension)
    return (*symbols, ndim)


def output_symbols(vertex: Vertex, labels: Iterable[str]) -> tuple[int, ...]:
    """Return, for each label and R, the result's dimension; ndim + 1 (P) for partial results.

    The labels are those of the variable: of the vertex that it is computed with, if there is one.
    """
    ndim = len(vertex.bound)
    found = []
    for label in labels:
        without = ndim + 1 if label in vertex.partial_labels else ndim
        found.append(vertex.dimension_made.get(label, without))
    return (*found, ndim)


def tensor_symbols(ndim: int) -> tuple[int, ...]:
    """Return the symbols of a tensor's layout: each dimension, and R, stands for itself."""
    return tuple(range(ndim + 1))


def named(symbols: Iterable[int], names: Iterable[Name]) -> tuple[Name | None, ...]:
    """Return the label or dimension that each symbol stands for; None for R."""
    name_or_none = (*names, None)
    return tuple([name_or_none[symbol] for symbol in symbols])


def numbered(cuts: Iterable[Name | None], names: Iterable[Name]) -> tuple[int, ...]:
    """Return the symbol of each label or dimension; R, past the last one, for None."""
    symbols = {name: symbol for symbol, name in enumerate((*names, None))}
    return tuple([symbols[cut] for cut in cuts])


def symbols_to_cut(
    extents: Sequence[int], current: Sequence[int], prescribed: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the symbols that free axes may be given to, in their order.

    A symbol is the number of a label or dimension, or R = len(extents). Of many labels the longest
    are tried; those in `current`, and those whose prescribed parts are more than one, always are.
    """
    if len(extents) <= MAX_SYMBOLS:
        return tensor_symbols(len(extents))
    longest_first = sorted(range(len(extents)), key=lambda symbol: (-extents[symbol], symbol))
    symbols = {len(extents), *longest_first[:MAX_SYMBOLS], *current}
    if prescribed is not None:
        symbols |= {symbol for symbol, parts in enumerate(prescribed) if parts > 1}
    return tuple(sorted(symbols))


def choices(
    mesh: Mesh,
    extents: Sequence[Extent],
    groups: Sequence[Sequence[int]],
    current: Sequence[int],
    symbols: Sequence[int],
    across_windows: bool = False,
) -> Symbols:
    """Return every way to give each group of axes to one of the symbols, as rows.

    Axes in no group keep their symbol in `current`. A row is left out if a label would be cut by
    axes that do not lie in one of its windows; with `across_windows`, only if they do not slice
    different digits of the same numbers. The row that keeps everything as in `current` is among
    them if `symbols` has all symbols of the free axes.
    """
    free_axes = set(itertools.chain(*groups))
    every = list(itertools.product(symbols, repeat=len(groups)))
    rows = np.array(every, np.int64).reshape(len(every), len(groups))

    fits = np.ones(len(rows), bool)
    for symbol, extent in enumerate(extents):
        # The axes that cut this symbol, as a bit mask: first those that stay, the same in all rows.
        staying = 0
        for axis, cut in enumerate(current):
            if cut == symbol and axis not in free_axes:
                staying += 1 << axis
        masks = np.full(len(rows), staying, np.int64)
        for column, group in enumerate(groups):
            group_mask = sum(1 << axis for axis in group)
            masks += (rows[:, column] == symbol) * group_mask
        fits &= may_cut(mesh.factors, extent, masks, across_windows)
    return rows[fits]


def distinct_layouts(
    rows: Symbols, symbols: Sequence[int], ndim: int
) -> tuple[Symbols, npt.NDArray[np.intp]]:
    """Return (the layouts that the choices in `rows` give a tensor, the layout of each choice).

    `symbols` maps a symbol of the choices to one of the tensor. Different states of a vertex often
    give a tensor the same layout; a table over layouts is smaller than one over states. Where
    there are few rows, equal layouts are not looked for.
    """
    layouts = np.array(symbols, np.int64)[rows]
    if len(rows) <= FEW_ROWS:
        return layouts, np.arange(len(rows))
    codes = np.zeros(len(rows), np.int64)
    for column in range(rows.shape[1]):
        codes = codes * (ndim + 2) + layouts[:, column]
    _, first, which = np.unique(codes, return_index=True, return_inverse=True)
    return layouts[first], which


# ---- moves ---------------------------------------------------------------------------------------
#
# A move of the search: some groups of mesh axes are given to symbols, the other axes stay.


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

    def parts(self, rows: Symbols, symbols: int, state: Sequence[int]) -> Symbols:
        """Return the number of parts of each symbol (the last column: R) for each choice."""
        parts = np.ones((len(rows), symbols + 1), np.int64)
        staying = zip(self.staying_lengths, self.staying_symbols(state), strict=True)
        for length, symbol in staying:
            parts[:, symbol] *= length
        every_row = np.arange(len(rows))
        for column, length in enumerate(self.lengths):
            parts[every_row, rows[:, column]] *= length
        return parts
