"""Assignment to elements of DistArrays, in place."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.elementwise import store
from einmpi.arrays.keys import (
    Selection,
    check_mask,
    indices_in_range,
    is_mask,
    is_table_for_each_dimension,
    parse_key,
    with_gathered_tables,
)
from einmpi.arrays.moving import block_indices, fetch
from einmpi.arrays.selected import copy_selected
from einmpi.arrays.shapes import broadcast_to, with_dimensions
from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.intervals import flat_indices
from einmpi.kernels.given import as_numpy

Integers: TypeAlias = npt.NDArray[np.int64]


def assign(array: DistArray, key: Any, value: Any) -> None:
    """Replace the elements that a key selects, in place. All ranks call it."""
    if is_mask(key):
        check_mask(array, key)
        if key.ndim < array.ndim:
            new_dimensions = (1,) * (array.ndim - key.ndim)
            key = key.reshape((*key.shape, *new_dimensions))
        changed: Any = np.where(key, value, array)
        store(array, changed.astype(array.dtype))
        return
    if not isinstance(value, DistArray):
        value = as_numpy("index", "the value", value)
    if is_table_for_each_dimension(array, key):
        _assign_at_indices(array, with_gathered_tables(key), value)
        return
    selection = parse_key(array, with_gathered_tables(key))
    # As numpy, drop dimensions of extent 1 that come before those of the selection.
    while value.ndim > len(selection.shape) and value.shape[0] == 1:
        value = value.reshape(value.shape[1:])
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
    if array.local.size:
        shape_in_block = [len(places) for places in places_in_block]
        array.local[np.ix_(*places_in_block)] = values.reshape(shape_in_block)


def _assign_at_indices(array: DistArray, key: Any, value: Any) -> None:
    """Replace the elements at tables of indices, one for each dimension, which are broadcast.

    Every rank has the tables and the values whole.
    """
    given_tables = key if isinstance(key, tuple) else (key,)
    tables = np.broadcast_arrays(*(np.asarray(table) for table in given_tables))
    if isinstance(value, DistArray):
        value = value.gather()
    values = np.broadcast_to(value, tables[0].shape)
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
    repeated = broadcast_to(value, selection.shape)
    # The dimensions of the value, one for each dimension of the tensor; None for an integer.
    kept = [number for number in range(repeated.ndim) if number not in selection.new_positions]
    order: list[int | None] = []
    for extents in selection.result_extents:
        order.append(kept.pop(0) if extents else None)
    values = with_dimensions(repeated, order)
    first = [chosen[0] if len(chosen) else 0 for chosen in selection.chosen]
    whole_value = [range(extent) for extent in values.shape]
    copy_selected(values, whole_value, array.layout, array.local, first)
