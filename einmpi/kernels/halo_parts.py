"""The parts of a kernel in which each operand is read from one place: from the rank's own block, or
from what one other rank has sent. The inside of a stencil is one such part."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

from einmpi.caches import bounded_cache
from einmpi.graph.arithmetic import call
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.einsum import EinSum
from einmpi.graph.index_arithmetic import Affine, affine_of
from einmpi.graph.scalar import Call, Const, Index, IndexEntries, Scalar, walk
from einmpi.kernels.index_sets import MIN_SPLIT_VALUES, Part, split_index_sets
from einmpi.kernels.operands import check_index_range
from einmpi.schedule.compute import Compute, HaloBlock, Kernel
from einmpi.schedule.regions import Runs, Slot, length, one_run

# ---- views ---------------------------------------------------------------------------------------
#
# Operands with affine indices, such as x[i+k] or u[n-1-i], as views that labels alone index.
#
# A view copies nothing: the labels step through the memory of the operand by its strides.


Array: TypeAlias = Any  # of any library
# Makes a view of an array with this shape and these strides in bytes.
AsStrided: TypeAlias = Callable[[Array, tuple[int, ...], tuple[int, ...]], Array]


def view_operands(
    einsum: EinSum,
    operands: Sequence[Array],
    index: Sequence[tuple[str, Runs]],
    as_strided: AsStrided,
) -> tuple[EinSum, list[Array]]:
    """Return the EinSum and the operands with affine indices replaced by labels, where possible.

    `index` has the indices of labels that are used as numbers, where they do not start at 0.
    """
    starts: dict[str, int | None] = {}
    for label, runs in index:
        starts[label] = runs[0][0] if len(runs) == 1 else None
    indices = list(einsum.operands)
    arrays = list(operands)
    extent = einsum.extent
    for operand, entries in enumerate(einsum.operands):
        if not einsum.has_arithmetic(operand):
            continue
        found = affine_entries(entries, starts)
        if found is None:
            continue
        affine = tuple(found)
        labels = _labels_of(affine)
        indices[operand] = labels
        arrays[operand] = _view(arrays[operand], affine, labels, extent, as_strided)
    return replace(einsum, operands=tuple(indices)), arrays


def affine_entries(entries: IndexEntries, starts: Mapping[str, int | None]) -> list[Affine] | None:
    """Return the indices as functions of positions, which count from 0; None if one is not affine.

    A plain label already stands for positions, one in arithmetic for indices.
    """
    found = []
    for entry in entries:
        affine = affine_of(entry)
        if affine is None:
            return None
        constant = affine.constant
        if not isinstance(entry, str):
            for label, coefficient in affine.terms:
                start = starts.get(label, 0)
                if start is None:
                    return None
                constant += coefficient * start
        found.append(Affine(constant, affine.terms))
    return found


@bounded_cache(1024)
def _labels_of(affine: tuple[Affine, ...]) -> tuple[str, ...]:
    """Return the labels in the order in which they step through memory, the longest steps first."""
    found: dict[str, None] = {}
    for entry in affine:
        for label, _ in sorted(entry.terms, key=lambda term: -abs(term[1])):
            found[label] = None
    return tuple(found)


def _view(
    array: Array,
    affine: tuple[Affine, ...],
    labels: tuple[str, ...],
    extent: Mapping[str, int],
    as_strided: AsStrided,
) -> Array:
    shape = tuple(extent[label] for label in labels)
    if 0 in shape:
        return array.reshape(-1)[:0].reshape(shape)
    strides = dict.fromkeys(labels, 0)
    corner = []
    for entry, dimension_extent, stride in zip(affine, array.shape, array.strides, strict=True):
        low = high = entry.constant
        for label, coefficient in entry.terms:
            if extent[label] > 1:
                strides[label] += coefficient * stride
            reach = coefficient * (extent[label] - 1)
            low += min(reach, 0)
            high += max(reach, 0)
        check_index_range(low, high, dimension_extent)
        corner.append(slice(entry.constant, entry.constant + 1))
    return as_strided(array[tuple(corner)], shape, tuple(strides.values()))


MAX_PARTS = 128
# Numpy and compiled loops give the same bits for these, except for complex and half precision.
_EXACT_OPERATIONS = {"+", "-", "*", "/", "neg", "abs", "sqrt", "maximum", "minimum", "where"}
_EXACT_OPERATIONS |= {"<", "<=", ">", ">=", "==", "!=", "&", "|", "^", "~", "<<", ">>"}

Positions: TypeAlias = dict[str, tuple[int, int]]  # the start and the stop of each label


@dataclass(frozen=True)
class HaloPart:
    """A part of a kernel, and the slot in which it finds each operand that it takes."""

    part: Part
    slots: tuple[Slot, ...]


@bounded_cache(256)
def split_at_halos(step: Compute) -> tuple[HaloPart, ...] | None:
    """Return the parts of a kernel; None if there is an operand that no part finds in one place.

    No bit of the results depends on it. Sums are not cut, since the order of their values could
    change. Nor are functions such as exp: numpy computes thin parts, and might round otherwise.
    """
    kernel = step.kernels[0]
    einsum = kernel.einsum
    dtypes = kernel.operand_dtypes
    if not step.halos:
        whole = []
        for part in split_index_sets(einsum, kernel.index, dtypes):
            whole.append(HaloPart(part, tuple([kernel.operands[k] for k in part.taken])))
        return tuple(whole)
    if not einsum.is_elementwise or einsum.calls() < MIN_SPLIT_VALUES or einsum.is_gathering:
        return None
    if not is_exact(kernel) or any(len(runs) != 1 for _, _, runs in kernel.select):
        return None
    starts: dict[str, int] = {}  # the index of the first position of each label
    for label, runs in kernel.index:
        if len(runs) != 1:
            return None
        starts[label] = runs[0][0]
    found: list[HaloPart] = []
    for part in split_index_sets(einsum, kernel.index, dtypes):
        cutter = _Cutter(kernel, step.halos, part, starts)
        pieces = cutter.pieces()
        if pieces is None or len(found) + len(pieces) > MAX_PARTS:
            return None
        found += pieces
    return tuple(found)


@dataclass(frozen=True)
class _Cutter:
    """A part of a kernel that is cut where an operand has to be read from another place."""

    kernel: Kernel
    halos: Sequence[HaloBlock]
    part: Part
    starts: Mapping[str, int]

    def pieces(self) -> list[HaloPart] | None:
        """Return the pieces of the part; None if one of them finds an operand in no one place."""
        cuts = []
        borders = self._borders()
        if borders is None:
            return None
        for label, (start, stop) in self._positions().items():
            inside = sorted(border for border in borders[label] if start < border < stop)
            between = itertools.pairwise([start, *inside, stop])
            cuts.append([(label, positions) for positions in between])
        found = []
        if prod(map(len, cuts)) > MAX_PARTS:
            return None
        for chosen in itertools.product(*cuts):
            piece = self._piece(dict(chosen))
            if piece is None:
                return None
            found.append(piece)
        return found

    def _positions(self) -> Positions:
        """Return the positions of all labels of the part."""
        cut = dict(self.part.positions)
        found = {}
        for label, extent in self.kernel.einsum.extents:
            found[label] = cut.get(label, (0, extent))
        return found

    def _block(self, operand: int) -> HaloBlock | None:
        """Return the block with a halo that an operand of the kernel is, if it is one."""
        slot = self.kernel.operands[operand]
        for block in self.halos:
            if block.whole == slot:
                return block
        return None

    def _places(self, operand: int, entries: IndexEntries) -> list[Affine] | None:
        """Return the place in a block that each index has, as a function of positions."""
        found = affine_entries(entries, self.starts)
        if found is None:
            return None
        for chosen, dimension, runs in self.kernel.select:
            if chosen == operand and isinstance(entries[dimension], str):
                constant, terms = found[dimension].constant, found[dimension].terms
                found[dimension] = Affine(constant + runs[0][0], terms)
        return found

    def _borders(self) -> dict[str, set[int]] | None:
        """Return for each label the positions from which on a place is in another source."""
        borders: dict[str, set[int]] = {label: set() for label in self._positions()}
        for operand, entries in self._halo_operands():
            block = self._block(operand)
            assert block is not None
            places = self._places(operand, entries)
            if places is None:
                return None
            for dimension, affine in enumerate(places):
                if len(affine.terms) != 1:
                    continue
                ((label, factor),) = affine.terms
                for region in block.places:
                    for border in region[dimension][0]:
                        borders[label].add(_first_position_at(border, affine.constant, factor))
        return borders

    def _halo_operands(self) -> Iterator[tuple[int, IndexEntries]]:
        """Yield the operands of the part that have halos, with their indices."""
        for operand, entries in zip(self.part.taken, self.part.einsum.operands, strict=True):
            if self._block(operand) is not None:
                yield operand, entries

    def _piece(self, positions: Positions) -> HaloPart | None:
        """Return the part for some positions of the labels, as far as operands are in one place."""
        einsum = self.part.einsum
        slots = []
        indices: list[IndexEntries] = []
        for operand, entries in zip(self.part.taken, einsum.operands, strict=True):
            block = self._block(operand)
            if block is None:
                slots.append(self.kernel.operands[operand])
                indices.append(entries)
                continue
            places = self._places(operand, entries)
            assert places is not None
            source = _source_of(block, places, positions)
            if source is None:
                return None
            slots.append(block.sources[source])
            indices.append(self._in_source(block, source, places))
        runs = {}
        for label, (start, stop) in positions.items():
            first = self.starts.get(label, 0)
            runs[label] = one_run(first + start, first + stop)
        extents = tuple((label, length(runs[label])) for label, _ in einsum.extents)
        local = replace(einsum, operands=tuple(indices), extents=extents)
        index = tuple((label, runs[label]) for label in local.labels_as_numbers)
        part = Part(local, self.part.taken, tuple(positions.items()), index)
        return HaloPart(part, tuple(slots))

    def _in_source(self, block: HaloBlock, source: int, places: Sequence[Affine]) -> IndexEntries:
        """Return the indices of an operand in the array of one source."""
        found: list[str | Scalar] = []
        for dimension, affine in enumerate(places):
            first = block.places[source][dimension][0][0]
            constant = affine.constant - first + block.starts[source][dimension]
            index: Scalar | None = None
            for label, factor in affine.terms:
                constant -= factor * self.starts.get(label, 0)
                term: Scalar = Index(label)
                if factor != 1:
                    term = call("*", Const(factor), term)
                index = term if index is None else call("+", index, term)
            if index is None:
                index = Const(constant)
            elif constant != 0:
                index = call("+", index, Const(constant))
            found.append(index)
        return tuple(found)


def _first_position_at(border: int, constant: int, factor: int) -> int:
    """Return the first position from which on constant + factor · position is past a border.

    Places from the border on are past it, or those before it if they decrease.
    """
    if factor > 0:
        return -((constant - border) // factor)
    return (constant - border) // -factor + 1


def _source_of(block: HaloBlock, places: Sequence[Affine], positions: Positions) -> int | None:
    """Return which source of a block has all places that some positions need."""
    needed = []
    for affine in places:
        low = high = affine.constant
        for label, factor in affine.terms:
            start, stop = positions[label]
            ends = factor * start, factor * (stop - 1)
            low += min(ends)
            high += max(ends)
        needed.append((low, high))
    for source, region in enumerate(block.places):
        is_inside = True
        for (low, high), runs in zip(needed, region, strict=True):
            first, end = runs[0]
            is_inside = is_inside and first <= low and high < end
        if is_inside:
            return source
    return None


def is_exact(kernel: Kernel) -> bool:
    """Return whether numpy and compiled loops give the same bits."""
    dtypes = [slot.dtype for slot in (*kernel.operands, kernel.target)]
    if any(DTYPES[dtype].kind == "c" or DTYPES[dtype].is_half for dtype in dtypes):
        return False
    calls = [node for node in walk(kernel.einsum.function) if isinstance(node, Call)]
    return all(node.op in _EXACT_OPERATIONS for node in calls)
