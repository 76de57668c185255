"""Rows that a kernel writes into one of its operands, such as a cache; the rest stays.

Each row goes to the index that another tensor gives. Devices differ in how they write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call, Const
from einmpi.kernels import updates
from einmpi.kernels.index_sets import LabelRuns
from einmpi.kernels.operands import apply_constant_indices, with_operands
from einmpi.kernels.prepared import PreparedCall
from einmpi.kernels.scalar_text import kind_of
from einmpi.kernels.updates import PlacedRows, find_placed_rows
from einmpi.schedule.compute import Kernel
from einmpi.schedule.regions import one_run

Array: TypeAlias = Any  # of any library
# Writes values to places from a start to a stop: places, values, target, start, stop.
Write: TypeAlias = Callable[[Array, Array, Array, int, int], None]


class RowDevice(NamedTuple):
    """What a device does for rows: makes arrays, prepares EinSums for arrays, writes."""

    empty: Callable[[tuple[int, ...], Any], Array]
    prepare: Callable[[EinSum, Sequence[Array], Array, LabelRuns], PreparedCall]
    # For places, values and a target that are stored as these are; None if there is no way.
    prepare_write: Callable[[PlacedRows, EinSum, Array, Array, Array], Write | None]


def prepare_row_writes(
    kernel: Kernel, operands: Sequence[Array], target: Array, device: RowDevice
) -> PreparedCall | None:
    """Return a kernel that is written over one of its operands as a write of some of its rows.

    It is for arrays that are stored as these are. None if it may change more than that.
    """
    einsum = kernel.einsum
    rows = find_placed_rows(einsum)
    if rows is None or kernel.select or 0 in einsum.bound:
        return None
    runs = dict(kernel.index).get(rows.label, one_run(0, einsum.extent[rows.label]))
    place_type = np.dtype(kind_of(rows.place, [array.dtype.name for array in operands]))
    if len(runs) != 1 or place_type.kind not in "biu":
        return None  # such as at[b] / 2, which may lie between two indices
    start, stop = runs[0]
    place = rows.place if place_type == np.int64 else Call("int64", (rows.place,))
    extents = tuple((label, einsum.extent[label]) for label in rows.place_labels)
    places = replace(einsum, output=rows.place_labels, function=place, extents=extents)
    places = with_operands(places, rows.place_operands)
    index = tuple((x, own) for x, own in kernel.index if x in rows.value.labels_as_numbers)
    sources = _Sources(operands, rows.operand, device)
    places_of = sources.array_of(places, rows.place_operands, np.dtype(np.int64), ())
    values_of = sources.array_of(rows.value, rows.value_operands, target.dtype, index)
    if places_of is None or values_of is None:
        return None
    examples = places_of(operands), values_of(operands)
    write = device.prepare_write(rows, einsum, *examples, target)
    if write is None:
        return None

    def write_rows(operands: Sequence[Array], target: Array) -> None:
        write(places_of(operands), values_of(operands), target, start, stop)

    return write_rows


class _Sources(NamedTuple):
    """Where the places and the values of rows come from."""

    operands: Sequence[Array]
    changed: int  # the operand that is written to
    device: RowDevice

    def array_of(
        self, einsum: EinSum, positions: Sequence[int], dtype: np.dtype[Any], index: LabelRuns
    ) -> Callable[[Sequence[Array]], Array] | None:
        """Return what gives an EinSum of some operands as an array, given all of them.

        It is a view of an operand, or computed; None if that would take too much memory. What
        reads the array that is written to has to be computed before.
        """
        chosen = [self.operands[position] for position in positions]
        if einsum.function == Arg(0) and positions[0] != self.changed and chosen[0].dtype == dtype:
            entries = einsum.operands[0]
            labels = [entry for entry in entries if not isinstance(entry, Const)]
            if sorted(map(str, labels)) == sorted(einsum.output):
                axes = [labels.index(label) for label in einsum.output]

                def view(operands: Sequence[Array]) -> Array:
                    array, _ = apply_constant_indices(operands[positions[0]], entries)
                    return array.transpose(axes)

                return view
        empty = self.device.empty
        if prod(einsum.bound) * dtype.itemsize > updates.MOST_VALUE_BYTES:
            return None
        compute = self.device.prepare(einsum, chosen, empty(einsum.bound, dtype), index)

        def computed(operands: Sequence[Array]) -> Array:
            found = empty(einsum.bound, dtype)
            compute([operands[position] for position in positions], found)
            return found

        return computed
