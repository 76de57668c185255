"""Assignment to elements of DistArrays, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.elementwise import Number, in_one_memory
from einmpi.arrays.keys import (
    Selection,
    fixed_key,
    gathered,
    indices_in_range,
    is_basic,
    mask_of_all,
    merge_tables,
    parse_key,
    read_key,
)
from einmpi.arrays.moving import block_indices, fetch
from einmpi.arrays.reshaping import reshape
from einmpi.arrays.selected import copy_selected
from einmpi.arrays.shapes import broadcast_to, rearranged
from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.intervals import flat_indices
from einmpi.compiled.views import View, writing
from einmpi.kernels.given import as_numpy

Integers: TypeAlias = npt.NDArray[np.int64]


def assign(array: DistArray, key: Any, value: Any) -> None:
    """Replace the elements that a key selects, in place. All ranks call it."""
    is_own_view = isinstance(value, View) and value.base is array
    if is_own_view and is_basic(key) and value.key == fixed_key(key):
        return  # x[1:] += 1 has written into the view already
    is_number = isinstance(value, Number | list | tuple | str)
    if isinstance(value, np.generic) and not is_basic(key):
        is_number = False  # numpy casts it beside masks and tables
    if is_number:
        # numpy casts arrays, but refuses numbers that the dtype does not hold.
        stored = np.empty(as_numpy("index", "the value", value).shape, array.dtype)
        stored[...] = value
        value = stored
    elif not isinstance(value, DistArray):
        value = as_numpy("index", "the value", value)
        if value.dtype.kind not in "biufc":  # what cannot be stored is an error of all ranks
            value = value.astype(array.dtype)
    mask = mask_of_all(array, key)
    if mask is not None:
        with writing(array) as changed:
            _assign_by_mask(changed, mask, value)
        return
    read = read_key(array, key)
    if read.is_by_element:
        with writing(read.array) as changed:
            _assign_at_indices(changed, read.parts, value)
    elif read.is_by_dimension:
        selection = parse_key(read)
        with writing(read.array) as changed:
            _assign_by_dimension(changed, selection, value)
    else:
        merged = merge_tables(read)
        selected_shape = (*merged.table.shape, *merged.array.shape[1:])
        shape = [selected_shape[dimension] for dimension in merged.order]
        values: Any = np.broadcast_to(_without_first_ones(value, len(shape)), shape)
        assign(merged.array, merged.table, values.transpose(np.argsort(merged.order).tolist()))


def _without_first_ones(value: Any, ndim: int) -> Any:
    """Return values without dimensions of extent 1 before those that a selection has, as numpy."""
    while value.ndim > ndim and value.shape[0] == 1:
        value = value.reshape(value.shape[1:])
    return value


def _assign_by_mask(array: DistArray, mask: Any, value: Any) -> None:
    """Replace the elements at which a mask is True by a number, or by values in row-major order."""
    if value.ndim > 1:
        raise TypeError(f"a mask takes a number or a vector of values, not {value.ndim} dimensions")
    if not isinstance(mask, DistArray):
        mask = DistArray.from_global(mask, array.own_comm)
    chosen = _block_in_layout(mask, array)
    places: Any = np.zeros((), np.int64)  # in the values, of those for this rank
    if value.shape not in ((), (1,)):
        numbers: Any = np.cumsum(reshape(mask, (-1,)))
        count = int(numbers[-1]) if mask.size else 0
        if value.shape != (count,):
            raise ValueError(
                f"cannot assign {value.size} values to the {count} elements where the mask is True"
            )
        places = _block_in_layout(reshape(numbers, array.shape), array)[chosen] - 1
    if isinstance(value, DistArray):
        values = fetch(value, places.reshape(-1))
    else:
        values = value.reshape(-1)[places]
    _, chosen, values = in_one_memory([array.local, chosen, values])
    array.local[chosen] = values


def _block_in_layout(values: DistArray, array: DistArray) -> Any:
    """Return the block of a tensor in the layout of another one."""
    if values.layout != array.layout:
        values = values.redistribute(array.layout)
    return values.host


def _assign_by_dimension(array: DistArray, selection: Selection, value: Any) -> None:
    """Replace the elements at all combinations of indices, one from each dimension."""
    value = _without_first_ones(value, len(selection.shape))
    if isinstance(value, DistArray) and _is_box(selection):
        _assign_box(array, selection, value)
        return
    own_block = block_indices(array.layout, array.own_comm.rank)
    places_in_block: list[Integers] = []
    places_in_selection: list[Integers] = []  # of the same elements, in the chosen indices
    for own_indices, chosen_indices in zip(own_block, selection.chosen, strict=True):
        chosen = np.asarray(chosen_indices)
        positions = np.nonzero(np.isin(chosen, own_indices))[0]
        places_in_block.append(np.searchsorted(own_indices, chosen[positions]))
        places_in_selection.append(positions)

    flat_places = flat_indices(places_in_selection, selection.counts)
    if isinstance(value, DistArray):
        values = fetch(broadcast_to(value, selection.shape), flat_places)
    else:
        all_values = np.broadcast_to(value, selection.shape)
        values = all_values.reshape(-1)[flat_places]
    if values.size:  # numpy warns of a cast even if there is nothing to cast
        shape_in_block = [len(places) for places in places_in_block]
        array.local[np.ix_(*places_in_block)] = values.reshape(shape_in_block)


def _assign_at_indices(array: DistArray, key: Sequence[Any], value: Any) -> None:
    """Replace the elements at tables of indices, one for each dimension, which are broadcast.

    Every rank has the tables and the values whole.
    """
    tables = np.broadcast_arrays(*map(gathered, key))
    if isinstance(value, DistArray):
        value = value.gather()
    values = np.broadcast_to(_without_first_ones(value, tables[0].ndim), tables[0].shape)
    own_block = block_indices(array.layout, array.own_comm.rank)
    is_own = np.ones(tables[0].shape, bool)
    places_in_block: list[Integers] = []
    for table, own_indices, extent in zip(tables, own_block, array.shape, strict=True):
        indices = indices_in_range(table.reshape(-1), extent).reshape(table.shape)
        is_own &= np.isin(indices, own_indices)
        places_in_block.append(np.searchsorted(own_indices, indices))
    if array.local.size:
        array.local[tuple(places[is_own] for places in places_in_block)] = values[is_own]


def _is_box(selection: Selection) -> bool:
    """Return whether consecutive indices of every dimension are selected."""
    for chosen in selection.chosen:
        if not isinstance(chosen, range) or chosen.step != 1:
            return False
    return True


def _assign_box(array: DistArray, selection: Selection, value: DistArray) -> None:
    """Replace the elements of a box by those of a tensor, which is broadcast."""
    if np.may_share_memory(value.host, array.host):
        value = value.copy()  # x[...] = x.T
    repeated = value if value.shape == selection.shape else broadcast_to(value, selection.shape)
    # The dimensions of the value, one for each dimension of the tensor; None for an integer.
    kept = [number for number in range(repeated.ndim) if number not in selection.new_positions]
    order: list[int | None] = []
    for extents in selection.result_extents:
        order.append(kept.pop(0) if extents else None)
    values = rearranged(repeated, order)
    first = [chosen[0] if len(chosen) else 0 for chosen in selection.chosen]
    whole_value = [range(extent) for extent in values.shape]
    copy_selected(values, whole_value, array.layout, array.local, first)
