"""Matrix products whose bits do not depend on how many rows and columns there are, nor on which.

BLAS may compute an element otherwise in a smaller matrix, at an edge, or where columns are stored
one after another instead of rows. What counts here is a product of tiles of one shape, whatever the
matrices are. Larger ones are multiplied in one call if a trial gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.kernels.contraction import SummedBlocks
from einmpi.kernels.cpu.blas_library.choice import one_blas_thread
from einmpi.kernels.cpu.compiled import pool
from einmpi.kernels.operands import Array

MOST_EDGE = 1024  # rows and columns of a call
LEAST_EDGE = 16
MOST_COPIED = 2**23  # values of the factors of a call, which may be copied
MOST_RESULTS = 2**21  # of a call, those of all blocks together
RESULTS_OF_TRIAL = 4096  # at least: so many would not be equal by chance
MIN_THREADED = 2**18  # multiplications; BLAS uses one thread for fewer of them

Shape = tuple[int, int]


def multiply_blocks(blocks: SummedBlocks, left: Array, right: Array, out: Array) -> None:
    """Multiply stacks of matrices.

    The products of all blocks of the contracted label are added in pairs, and pairs of pairs.
    """
    stack = prod(out.shape[:-2])
    edge = MOST_EDGE
    while edge > LEAST_EDGE:
        results = len(blocks.ends) * stack * edge**2
        if results <= MOST_RESULTS and 2 * stack * edge * left.shape[-1] <= MOST_COPIED:
            break
        edge //= 2
    calls = []
    for rows in _ranges(out.shape[-2], blocks.units[0], edge):
        for columns in _ranges(out.shape[-1], blocks.units[1], edge):
            parts = left[..., rows, :], right[..., columns], out[..., rows, columns]
            calls.append(partial(_multiply, blocks, *parts))
    if blocks.threads == 1 or left.size * out.shape[-1] < MIN_THREADED:
        room = np.empty(0, out.dtype)
        for call in calls:
            room = call(room)
        return
    with one_blas_thread():
        list(pool(blocks.threads).map(lambda call: call(np.empty(0, out.dtype)), calls))


def _ranges(extent: int, unit: int, most: int) -> Iterator[slice]:
    """Yield equal parts of a range, none of them longer than `most`."""
    size = _rounded(-(-extent // -(-extent // most)), unit)
    for start in range(0, extent, size):
        yield slice(start, min(start + size, extent))


def _rounded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _multiply(blocks: SummedBlocks, left: Array, right: Array, out: Array, room: Array) -> Array:
    """Multiply matrices, with room for products; return that, which is larger if need be."""
    depth = left.shape[-1] // blocks.ends[-1] * blocks.length
    count = len(blocks.ends)
    shape = left.shape[-2], right.shape[-1]
    stored = _order(left) + _order(right) if left.shape[-1] == count * depth else ""
    padded = _rounded(shape[0], blocks.units[0]), _rounded(shape[1], blocks.units[1])
    is_alike = is_like_tiles(left.dtype.name, shape, depth, stored, blocks.units)
    if not is_alike:
        left = _filled_up(blocks, left, -1, padded[0])
        right = _filled_up(blocks, right, -2, padded[1])
        is_padded_alike = is_like_tiles(left.dtype.name, padded, depth, "CC", blocks.units)
    elif np.may_share_memory(left, right):
        right = right.copy("K")  # numpy would compute half of a matrix times its own transpose
    left = left.reshape(*left.shape[:-1], count, depth).swapaxes(-2, -3)
    right = right.reshape(*right.shape[:-2], count, depth, right.shape[-1])
    if is_alike and count == 1 and _order(out) == "C":
        np.matmul(left, right, out=out[..., None, :, :])
        return room
    if is_alike or is_padded_alike:
        size = (
            *np.broadcast_shapes(left.shape[:-2], right.shape[:-2]),
            left.shape[-2],
            right.shape[-1],
        )
        room = room if room.size >= prod(size) else np.empty(prod(size), out.dtype)
        products = np.matmul(left, right, out=room[: prod(size)].reshape(size))
    else:
        products = _by_tiles(left, right, blocks.units)
    products = products[..., : shape[0], : shape[1]]
    while products.shape[-3] > 2:
        even = products[..., ::2, :, :]
        products = np.add(even, products[..., 1::2, :, :], out=even)
    np.add.reduce(products, axis=-3, out=out)
    return room


def _order(array: Array) -> str:
    """Return C if the rows of matrices are contiguous, F if the columns are, else nothing."""
    (rows, columns), (down, along) = array.shape[-2:], array.strides[-2:]
    if along == array.itemsize and down >= columns * along:
        return "C"
    return "F" if down == array.itemsize and along >= rows * down else ""


def _filled_up(blocks: SummedBlocks, matrix: Array, axis: int, lines: int) -> Array:
    """Return a copy of a matrix in which all blocks along an axis are as long as the longest.

    There are zeros after each block, and up to so many lines along the other axis.
    """
    each = matrix.shape[axis] // blocks.ends[-1]
    shape = [*matrix.shape[:-2], lines, lines]
    shape[axis] = len(blocks.ends) * blocks.length * each
    copy = np.zeros(shape, matrix.dtype)
    along, source = copy.swapaxes(axis, -1), matrix.swapaxes(axis, -1)
    start = 0
    for number, end in enumerate(blocks.ends):
        own = source[..., start * each : end * each]
        first = number * blocks.length * each
        along[..., : own.shape[-2], first : first + own.shape[-1]] = own
        start = end
    return copy


def _by_tiles(left: Array, right: Array, units: Shape) -> Array:
    """Return products of matrices whose rows and columns are multiples of those of tiles."""
    lefts = left.reshape(*left.shape[:-2], -1, 1, units[0], left.shape[-1])
    rights = right.reshape(*right.shape[:-2], 1, right.shape[-2], -1, units[1])
    tiles = np.matmul(lefts, np.ascontiguousarray(rights.swapaxes(-2, -3))).swapaxes(-2, -3)
    products: Array = tiles.reshape(*tiles.shape[:-4], left.shape[-2], right.shape[-1])
    return products


# ---- trials --------------------------------------------------------------------------------------


@bounded_cache(4096)
def is_like_tiles(
    dtype: str, shape: Shape, depth: int, orders: str, units: Shape, moved: Shape = (0, 0)
) -> bool:
    """Return whether BLAS multiplies matrices of a shape and storage as it multiplies tiles.

    Rows and columns are moved by so many places: this must not change their bits either.
    """
    if 1 in shape or len(orders) < 2:
        return False
    random = np.random.default_rng(0)
    trials = -(-RESULTS_OF_TRIAL // prod(shape))
    factors = []
    for lines, unit in zip(shape, units, strict=True):
        size = trials, _rounded(lines, unit), depth, 2
        values: Array = random.standard_normal(size)
        if np.dtype(dtype).kind == "c":
            values = values.view(complex)
        factors.append(values[..., 0].astype(dtype))
    left, right = factors[0], factors[1].swapaxes(-1, -2).copy()
    with one_blas_thread():
        expected = _by_tiles(left, right, units)[..., : shape[0], : shape[1]]
        rows = _stored(np.roll(left[:, : shape[0]], moved[0], -2), orders[0])
        columns = _stored(np.roll(right[..., : shape[1]], moved[1], -1), orders[1])
        found = np.matmul(rows, columns)
    return bool((found == np.roll(expected, moved, (-2, -1))).all())


def _stored(matrices: Array, order: str) -> Array:
    """Return copies of matrices, with contiguous rows (C) or columns (F)."""
    if order == "C":
        return matrices.copy()
    return matrices.swapaxes(-1, -2).copy().swapaxes(-1, -2)
