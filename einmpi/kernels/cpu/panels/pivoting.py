"""Parts of Gaussian elimination on a grid of ranks: which rows are chosen, and what that changes.

`order` has the numbers of a rank's rows as they lie, and last how many of them are left. `chosen`
has a panel's rows that were chosen, as triangular factors, and two columns: the number of each row
plus one, and that of the rank, in its column of the grid, that has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from einmpi.kernels.cpu.panels.lapack import blas, lapack
from einmpi.kernels.cpu.product_updates import subtract_product
from einmpi.kernels.operands import Array


def _begin_order(rows: Array, out: Array) -> None:
    out[:-1, 0] = rows
    out[-1] = len(rows)


def _factored(panel: Array) -> tuple[Array, Array]:
    """Return triangular factors of a panel, and its rows in the order of the pivots."""
    factors, pivots, _ = lapack("getrf", panel)(panel)
    rows = np.arange(len(panel))
    for place, pivot in enumerate(pivots.tolist()):
        rows[[place, pivot]] = rows[[pivot, place]]
    return factors, rows


def _propose(me: Array, order: Array, panel: Array, out: Array) -> None:
    width = panel.shape[1]
    left = panel[: order[-1, 0]]
    out[...] = 0
    if left.size:
        rows = _factored(left)[1][:width]
        out[: len(rows), :width] = left[rows]
        out[: len(rows), -2] = order[rows, 0] + 1
        out[: len(rows), -1] = me


def _choose(proposed: Array, out: Array) -> None:
    width = len(out)
    real = proposed[proposed[:, -2] != 0]
    factors, rows = _factored(real[:, :width])
    out[:, :width] = factors[:width]
    out[:, width:] = real[rows[:width], width:]


def _owners(chosen: Array) -> Array:
    owners: Array = chosen[:, -1].real.astype(np.int64)
    return owners


def _own_places(me: Array, order: Array, chosen: Array) -> Array:
    """Return where the chosen rows of a rank are, in the order in which they were chosen."""
    numbers = chosen[_owners(chosen) == me, -2].real.astype(np.int64) - 1
    left = order[: order[-1, 0], 0]
    in_order = np.argsort(left)
    places: Array = in_order[np.searchsorted(left, numbers, sorter=in_order)]
    return places


def _take(me: Array, order: Array, chosen: Array, left: Array, out: Array) -> None:
    """Copy the chosen rows of a rank to their place among those of all ranks."""
    first = np.count_nonzero(_owners(chosen) < me)
    places = _own_places(me, order, chosen)
    out[first : first + len(places)] = left[places]


def _compact(me: Array, order: Array, chosen: Array, out: Array) -> None:
    """Move the last rows that are left to the places of those that were chosen."""
    places = _own_places(me, order, chosen)
    before = order[-1, 0]
    after = before - len(places)
    moved = np.setdiff1d(np.arange(after, before), places)
    out[np.sort(places[places < after])] = out[moved]


def _forget(me: Array, chosen: Array, out: Array) -> None:
    count = len(_own_places(me, out, chosen))
    _compact(me, out.copy(), chosen, out)
    out[-1] -= count


def _count_left(owner: Array, order: Array, out: Array) -> None:
    out[...] = 0
    out[owner] = order[-1]


def _count_chosen(chosen: Array, out: Array) -> None:
    out[:, 0] = np.bincount(_owners(chosen), minlength=len(out))


def _divide_left(order: Array, chosen: Array, panel: Array, out: Array) -> None:
    """Divide the rows that are left of a panel by the upper factor of the chosen ones."""
    width = out.shape[1]
    count = order[-1, 0]
    square = chosen[:, :width]
    if count and np.diagonal(square).all():
        right = np.asfortranarray(panel[:count])
        out[:count] = blas("trsm", out)(1.0, square, right, side=1, overwrite_b=1)


def _sort(chosen: Array, out: Array) -> None:
    """Bring the chosen rows into their order, and divide them by the lower factor."""
    square = chosen[:, : len(out)]
    rows = np.argsort(np.argsort(_owners(chosen), kind="stable"))
    out[...] = blas("trsm", out)(1.0, square, out[rows], lower=1, diag=1)


def _update_left(order: Array, lower: Array, upper: Array, out: Array) -> None:
    count = order[-1, 0]
    if count:
        subtract_product(lower[:count], upper, out[:count])


def _triangle(chosen: Array, out: Array) -> None:
    out[...] = np.triu(chosen[:, : len(out)])


def _store_diagonal(chosen: Array, out: Array) -> None:
    out[:, 0] = np.diagonal(chosen)


def _store_numbers(chosen: Array, out: Array) -> None:
    out[:, 0] = chosen[:, -2].real - 1


def _sign(numbers: Array, out: Array) -> None:
    """Multiply the first element by the sign of the order of the rows."""
    following = numbers[:, 0].tolist()
    swaps = 0
    for place in range(len(following)):
        while following[place] != place:
            other = following[place]
            following[place], following[other] = following[other], other
            swaps += 1
    out[:1] *= (-1) ** swaps


def _identity(rows: Array, columns: Array, out: Array) -> None:
    out[...] = 0
    _, places, others = np.intersect1d(rows, columns, return_indices=True)
    out[places, others] = 1


PARTS: Mapping[str, Any] = {
    "begin_order": _begin_order,
    "choose": _choose,
    "compact": _compact,
    "count_chosen": _count_chosen,
    "count_left": _count_left,
    "divide_left": _divide_left,
    "forget": _forget,
    "identity": _identity,
    "propose": _propose,
    "sign": _sign,
    "sort": _sort,
    "store_diagonal": _store_diagonal,
    "store_numbers": _store_numbers,
    "take": _take,
    "triangle": _triangle,
    "update_left": _update_left,
}
