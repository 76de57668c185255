"""Rows that are written into a tensor in place, each at the index that another tensor gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod

import numpy as np

from einmpi.graph.scalar import Arg, Const
from einmpi.kernels.cpu.broadcast import operand_view
from einmpi.kernels.cpu.dispatch import prepare_einsum
from einmpi.kernels.operands import Array, apply_constant_indices
from einmpi.kernels.prepared import PreparedCall
from einmpi.kernels.ufuncs import apply
from einmpi.kernels.updates import placed_rows
from einmpi.kernels.updates.placed_rows import PlacedRows, find_placed_rows
from einmpi.schedule.regions import indices, one_run
from einmpi.schedule.steps import Kernel


def prepare_row_writes(
    kernel: Kernel, operands: Sequence[Array], target: Array, strict: bool, repetition: int
) -> PreparedCall | None:
    """Return a kernel that is written over one of its operands as a write of some of its rows.

    It is for arrays that are stored as these are. None if it may change more than that.
    """
    rows = find_placed_rows(kernel.einsum)
    if rows is None or kernel.select or 0 in kernel.einsum.bound:
        return None
    if any(operands[position].dtype.kind not in "biu" for position in rows.place_operands):
        return None
    known = dict(kernel.index)
    runs = known.get(rows.label, one_run(0, kernel.einsum.extent[rows.label]))
    if len(runs) != 1:
        return None
    start, stop = runs[0]
    places_of = _prepare_places(rows, kernel)
    if places_of(operands).dtype.kind not in "biu":
        return None  # such as at[b] / 2, which may lie between two indices
    values_of = _prepare_values(rows, kernel, operands, target, strict, repetition)
    if values_of is None:
        return None
    output = kernel.einsum.output
    others = [label for label in output if label != rows.label]
    own = [label for label in others if label not in rows.place_labels]
    target_axes = [output.index(label) for label in (*rows.place_labels, rows.label, *own)]
    value_axes = [others.index(label) for label in (*rows.place_labels, *own)]
    shape = [kernel.einsum.extent[label] for label in rows.place_labels]
    positions = list(product(*map(range, shape)))

    def write(operands: Sequence[Array], target: Array) -> None:
        places = places_of(operands)
        by_place = target.transpose(target_axes)
        values = values_of(operands).transpose(value_axes)
        for position in positions:
            place = int(places[position])
            if start <= place < stop:
                by_place[(*position, place - start)] = values[position]

    return write


def _prepare_places(rows: PlacedRows, kernel: Kernel) -> Callable[[Sequence[Array]], Array]:
    """Return what gives the index of each row, given the operands."""
    entries = kernel.einsum.operands
    if isinstance(rows.place, Arg) and entries[rows.place.position] == rows.place_labels:
        number = rows.place.position
        return lambda operands: operands[number]
    extent = kernel.einsum.extent
    labels = rows.place_labels
    box = {label: slice(0, extent[label]) for label in labels}
    shape = [extent[label] for label in labels]

    def places(operands: Sequence[Array]) -> Array:
        values: list[Array | None] = [None] * len(operands)
        for position in rows.place_operands:
            plain = tuple(str(label) for label in entries[position])
            values[position] = operand_view(operands[position], plain, labels, box)
        with np.errstate(all="ignore"):
            return np.broadcast_to(np.asarray(apply(rows.place, values, {})), shape)

    return places


def _prepare_values(
    rows: PlacedRows,
    kernel: Kernel,
    operands: Sequence[Array],
    target: Array,
    strict: bool,
    repetition: int,
) -> Callable[[Sequence[Array]], Array] | None:
    """Return what gives the values of all rows, given the operands of the kernel.

    None if they have to be computed and take too much memory.
    """
    einsum = rows.value
    chosen = [operands[position] for position in rows.value_operands]
    if isinstance(einsum.function, Arg):
        (entries,) = einsum.operands if len(einsum.operands) == 1 else ((),)
        labels = [entry for entry in entries if not isinstance(entry, Const)]
        if sorted(map(str, labels)) == sorted(einsum.output):
            (number,) = rows.value_operands
            axes = [labels.index(label) for label in einsum.output]

            def view(operands: Sequence[Array]) -> Array:
                array, _ = apply_constant_indices(operands[number], entries)
                found: Array = array.transpose(axes)
                return found

            return view
    dtype = target.dtype
    shape = einsum.bound
    if prod(shape) * dtype.itemsize > placed_rows.MOST_VALUE_BYTES:
        return None
    numbers = einsum.labels_as_numbers
    index = {label: indices(runs) for label, runs in kernel.index if label in numbers}
    example = np.empty(shape, dtype)
    compute = prepare_einsum(einsum, chosen, example, index, strict=strict, repetition=repetition)

    def values(operands: Sequence[Array]) -> Array:
        found = np.empty(shape, dtype)
        compute([operands[position] for position in rows.value_operands], found)
        return found

    return values
