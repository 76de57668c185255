"""Symmetric results, such as distances of the points of one set: one half is computed, in tiles of
rows up to the diagonal, and copied to the other half."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod

import numpy as np

from einmpi.graph.einsum import EinSum
from einmpi.graph.forms.symmetry import Symmetry, find_symmetry
from einmpi.kernels.contraction import Contraction
from einmpi.kernels.cpu.blas import LabelledArray, stack, view_without_ones
from einmpi.kernels.cpu.blas_library.choice import prepare_product_with_own
from einmpi.kernels.operands import Array, part_of_array
from einmpi.kernels.prepared import PreparedCall, address_of

# With t tiles, (t + 1) / 2t of the work is done. Shorter tiles are slower than that gains.
MOST_TILES = 8
MIN_ROWS = 128  # of a tile
MIN_SUMMED = 32  # values for each element of the result: fewer take no longer than the copy

Prepare = Callable[[EinSum, Sequence[Array], Array, Mapping[str, Array]], PreparedCall]


def prepare_symmetric(
    einsum: EinSum,
    operands: Sequence[Array],
    out: Array,
    index: Mapping[str, Array],
    prepare: Prepare,
) -> PreparedCall:
    """Prepare an EinSum by half of its work, if its result is symmetric and that takes less time.

    `prepare` prepares an EinSum without regard to symmetry. On arrays that are stored like these,
    but of which others are the same, everything is computed.
    """
    whole = prepare(einsum, operands, out, index)
    symmetry = _symmetry_worth_using(einsum, operands, index)
    if symmetry is None:
        return whole
    halves = _prepare_halves(einsum, operands, out, index, prepare, symmetry)
    same = _same_arrays(operands)

    def compute(operands: Sequence[Array], out: Array) -> None:
        chosen = halves if _same_arrays(operands) == same else whole
        chosen(operands, out)

    return compute


def prepare_own_product(
    contraction: Contraction, operands: Sequence[Array], out: Array, whole: PreparedCall
) -> PreparedCall:
    """Prepare the product of complex numbers and their conjugates by half of its work.

    `whole` computes all other products. Of those without conjugates BLAS computes one half itself.
    """
    positions, conj, indices = contraction.positions, contraction.conj, contraction.indices
    scale = contraction.scale

    def is_own(operands: Sequence[Array]) -> bool:
        return _same_arrays([operands[position] for position in positions]) == [0, 0]

    def views(operands: Sequence[Array], out: Array) -> list[LabelledArray]:
        arrays = [*(operands[position] for position in positions), out]
        return [view_without_ones(*pair, {}) for pair in zip(arrays, indices, strict=True)]

    if out.dtype.kind != "c" or sum(conj) != 1 or isinstance(scale, complex):
        return whole
    if not is_own(operands):
        return whole
    left, right, target = views(operands, out)
    rows, columns, depth = _sides_of_own(left, right)
    if sorted(target.labels) != sorted(rows + columns):
        return whole

    def matrices(operands: Sequence[Array], out: Array) -> tuple[Array, Array]:
        left, _, target = views(operands, out)
        return stack(left, (), rows, depth), stack(target, (), rows, columns)

    factor, product = matrices(operands, out)
    are_views = np.may_share_memory(factor, left.array) and np.may_share_memory(product, out)
    multiply = prepare_product_with_own(factor, product, conj[0]) if are_views else None
    if multiply is None:
        return whole

    def compute(operands: Sequence[Array], out: Array) -> None:
        if is_own(operands):
            multiply(*matrices(operands, out), scale)
        else:
            whole(operands, out)

    return compute


def _sides_of_own(left: LabelledArray, right: LabelledArray) -> tuple[tuple[str, ...], ...]:
    """Return the labels of the rows, of the columns, and of the sum, given views of one array."""
    swapped = [pair for pair in zip(left.labels, right.labels, strict=True) if pair[0] != pair[1]]
    rows, columns = (tuple(pair[number] for pair in swapped) for number in (0, 1))
    stride = dict(zip(left.labels, left.array.strides, strict=True))
    depth = sorted(stride.keys() - set(rows), key=lambda label: (-stride[label], label))
    return rows, columns, tuple(depth)


def _same_arrays(operands: Sequence[Array]) -> list[int]:
    """Return for each operand the first one that is the same array."""
    stored: list[Hashable] = []
    for array in operands:
        stored.append((address_of(array), array.shape, array.strides, array.dtype))
    return list(map(stored.index, stored))


def _symmetry_worth_using(
    einsum: EinSum, operands: Sequence[Array], index: Mapping[str, Array]
) -> Symmetry | None:
    if einsum.calls() < MIN_SUMMED * prod(einsum.bound):
        return None
    dtypes = [array.dtype.name for array in operands]
    symmetry = find_symmetry(einsum, _same_arrays(operands), dtypes)
    if symmetry is None:
        return None
    for first, second in symmetry.swap:
        if not np.array_equal(index.get(first, ()), index.get(second, ())):
            return None
    return symmetry if einsum.extent[symmetry.swap[0][0]] >= 2 * MIN_ROWS else None


def _prepare_halves(
    einsum: EinSum,
    operands: Sequence[Array],
    out: Array,
    index: Mapping[str, Array],
    prepare: Prepare,
    symmetry: Symmetry,
) -> PreparedCall:
    """Prepare the rows of each tile up to the diagonal, and the copy of what lies before it."""
    swap, conjugates = symmetry
    rows, columns = swap[0]
    extent = einsum.extent[rows]
    tiles = min(MOST_TILES, extent // MIN_ROWS)
    partner = dict(chain(swap, (pair[::-1] for pair in swap)))
    mirror = [einsum.output.index(partner.get(label, label)) for label in einsum.output]
    boxes = []
    calls = []
    for tile in range(tiles):
        start = extent * tile // tiles
        stop = extent * (tile + 1) // tiles
        box = {rows: slice(start, stop), columns: slice(0, stop)}
        extents = einsum.extent | {rows: stop - start, columns: stop}
        positions = dict(index)
        for label in box:
            if label in einsum.labels_as_numbers:
                positions[label] = index.get(label, np.arange(extent))[box[label]]
        part = replace(einsum, extents=tuple(extents.items()))
        boxes.append(box)
        calls.append(prepare(part, *_parts(einsum, operands, out, box), positions))

    def compute(operands: Sequence[Array], out: Array) -> None:
        for box, call in zip(boxes, calls, strict=True):
            call(*_parts(einsum, operands, out, box))
            before = {rows: box[rows], columns: slice(0, box[rows].start)}
            after = {rows: before[columns], columns: before[rows]}
            below = part_of_array(out, einsum.output, before).transpose(mirror)
            above = part_of_array(out, einsum.output, after)
            if conjugates and out.dtype.kind == "c":
                np.conjugate(below, out=above)
            else:
                above[...] = below

    return compute


def _parts(
    einsum: EinSum, operands: Sequence[Array], out: Array, box: Mapping[str, slice]
) -> tuple[list[Array], Array]:
    """Return views of the operands and of the output at some indices of two labels."""
    views = []
    for array, entries in zip(operands, einsum.operands, strict=True):
        labels = [entry if isinstance(entry, str) else "" for entry in entries]
        views.append(part_of_array(array, labels, box))
    return views, part_of_array(out, einsum.output, box)
