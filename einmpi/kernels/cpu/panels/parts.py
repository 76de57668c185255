"""Parts of functions of one matrix that many ranks share, on boxes of the arrays of one rank.

LAPACK computes panels, from copies in its own order; BLAS updates what is left in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from einmpi.graph.matrices import not_definite, singular
from einmpi.kernels.cpu.panels import pivoting, reflections
from einmpi.kernels.cpu.panels.lapack import blas, lapack
from einmpi.kernels.cpu.product_updates import subtract_product
from einmpi.kernels.operands import Array
from einmpi.kernels.prepared import PreparedCall
from einmpi.schedule.compute import Kernel
from einmpi.schedule.regions import Region, indices

LEAST_COLUMNS = 128  # of an update of a triangle

Part: TypeAlias = Callable[..., None]


def prepare_part(kernel: Kernel) -> PreparedCall:
    """Return a part as a function of the arrays of its operands and of its target."""
    compute = PARTS[kernel.part]
    places = [_slices(box) for box in kernel.boxes]
    index = [indices(runs) for _, runs in kernel.index]

    def call(operands: Sequence[Array], target: Array) -> None:
        out = target[places[-1]]
        if out.size:
            views = [array[place] for array, place in zip(operands, places, strict=False)]
            # A vector is a matrix of one column.
            columns = [view[:, None] if view.ndim == 1 else view for view in (*views, out)]
            compute(*index, *columns)

    return call


def _slices(box: Region) -> tuple[slice, ...]:
    return tuple(slice(runs[0][0], runs[-1][1]) if runs else slice(0) for runs in box)


# ---- status --------------------------------------------------------------------------------------


def _fill(value: float, out: Array) -> None:
    out[...] = value


def _note(is_wrong: Callable[[Array], Array], places: Array, diagonal: Array, out: Array) -> None:
    """Keep the first place at which a diagonal is wrong."""
    found = is_wrong(np.diagonal(diagonal))
    if found.any():
        out[...] = np.minimum(out, places[found.argmax()])


def _check(problem: Callable[[int], str], out: Array) -> None:
    first = out.min()
    if np.isfinite(first):
        raise np.linalg.LinAlgError(problem(int(first)))


# ---- triangles -----------------------------------------------------------------------------------


def _copy(source: Array, out: Array) -> None:
    out[...] = source


def _lower(rows: Array, columns: Array, out: Array) -> None:
    """Set what is above the diagonal to 0."""
    for row, first in enumerate(np.searchsorted(columns, rows, side="right").tolist()):
        out[row, first:] = 0


def _factor(out: Array) -> None:
    """Replace a block by its Cholesky factor; where there is none, by what is not a number."""
    factor, order = lapack("potrf", out)(out, lower=1, clean=1)
    if order:
        factor[order - 1 :, order - 1 :] = np.nan
    out[...] = np.tril(factor)


def _divide(diagonal: Array, out: Array) -> None:
    """Multiply rows by the inverse of the conjugate transpose of a triangular block."""
    right = np.asfortranarray(out)
    options = {"side": 1, "lower": 1, "trans_a": 2, "overwrite_b": 1}
    out[...] = blas("trsm", out)(1.0, diagonal, right, **options)


def _solve(lower: int, diagonal: Array, *arrays: Array) -> None:
    """Multiply the right-hand side, without what is known of it, by the inverse of a block."""
    *others, out = arrays
    if np.diagonal(diagonal).all():
        right = np.subtract(*others) if others else out
        out[...] = blas("trsm", out)(1.0, diagonal, right, lower=lower)


def _product(left: Array, right: Array, out: Array) -> None:
    out[...] = left @ right if left.size else 0


def _update(left: Array, right: Array, out: Array) -> None:
    subtract_product(left, right, out)


def _update_lower(rows: Array, columns: Array, left: Array, right: Array, out: Array) -> None:
    """Subtract L·Rᴴ where rows are not above columns, some columns at a time."""
    step = max(LEAST_COLUMNS, len(columns) // 8)
    for start in range(0, len(columns), step):
        some = slice(start, start + step)
        first = int(np.searchsorted(rows, columns[start]))
        if first < len(rows):
            subtract_product(left[first:], right[some].conj().T, out[first:, some])


PARTS: Mapping[str, Part] = {
    **pivoting.PARTS,
    **reflections.PARTS,
    "begin": partial(_fill, np.inf),
    "check_definite": partial(_check, lambda place: not_definite(place + 1)),
    "check_singular": partial(_check, singular),
    "clear": partial(_fill, 0),
    "copy": _copy,
    "divide": _divide,
    "factor": _factor,
    "lower": _lower,
    "note_nan": partial(_note, np.isnan),
    "note_zero": partial(_note, np.logical_not),
    "product": _product,
    "solve_lower": partial(_solve, 1),
    "solve_upper": partial(_solve, 0),
    "update": _update,
    "update_lower": _update_lower,
}
