"""States of vertices and layouts of tensors: which label or dimension each mesh axis cuts (docs/planner.md)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from einmpi.graph.einsum import EinSum
from einmpi.planner.mesh import Mesh, allowed_masks

Symbols = npt.NDArray[np.int64]


def input_symbols(einsum: EinSum, operand: int) -> tuple[int, ...]:
    """For each label of the EinSum and R: the dimension of the operand that it cuts, or ndim for R.

    A dimension that is gathered is needed whole. A diagonal is cut along its first dimension.
    """
    index = einsum.operands[operand]
    return (
        *(index.index(label) if label in index else len(index) for label in einsum.labels),
        len(index),
    )


def output_symbols(einsum: EinSum) -> tuple[int, ...]:
    """For each label of the EinSum and R: the dimension of the result, ndim + 1 for P, ndim for R."""
    ndim = len(einsum.output)
    return (*range(ndim), *(ndim + 1 for _ in einsum.aggregated), ndim)


def tensor_symbols(ndim: int) -> tuple[int, ...]:
    return tuple(range(ndim + 1))


MAX_SYMBOLS = 8  # labels of one vertex, or dimensions of one tensor, that may be cut: the longest


def choices(
    mesh: Mesh, extents: Sequence[int], groups: Sequence[Sequence[int]], fixed: Sequence[int]
) -> Symbols:
    """Every way to give each group of axes to a symbol (a label or dimension, or R = len(extents)), as rows.

    `fixed` holds the symbols of all axes; those of axes in no group stay. A symbol takes only axes that fit its extent.
    What stays as it is, is among the rows.
    """
    free = {axis for group in groups for axis in group}
    longest = sorted(range(len(extents)), key=lambda symbol: (-extents[symbol], symbol))[
        :MAX_SYMBOLS
    ]
    kept = {fixed[axis] for axis in free}
    every = list(itertools.product(sorted({*longest, *kept, len(extents)}), repeat=len(groups)))
    rows = np.array(every, np.int64).reshape(len(every), len(groups))
    fits = np.ones(len(rows), bool)
    for symbol, extent in enumerate(extents):
        mask = np.full(
            len(rows),
            sum(1 << a for a, s in enumerate(fixed) if s == symbol and a not in free),
            np.int64,
        )
        for column, group in enumerate(groups):
            mask += (rows[:, column] == symbol) * sum(1 << axis for axis in group)
        fits &= allowed_masks(mesh.factors, extent)[mask]
    return rows[fits]


def distinct_layouts(
    rows: Symbols, symbols: Sequence[int], ndim: int
) -> tuple[Symbols, npt.NDArray[np.intp]]:
    """(layouts that the choices in `rows` give a tensor, each once or so; which of them each choice gives)."""
    mapped = np.array(symbols, np.int64)[rows]
    if len(rows) <= 64:  # too few to be worth the search
        return mapped, np.arange(len(rows))
    code = np.zeros(len(rows), np.int64)
    for column in range(rows.shape[1]):
        code = code * (ndim + 2) + mapped[:, column]
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return mapped[first], which
