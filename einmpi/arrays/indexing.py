"""Elements of DistArrays by index: what a key selects, a selection of elements, an assignment."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from operator import index
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.dist_array import DistArray
from einmpi.arrays.elementwise import Number, in_one_memory, on_blocks
from einmpi.arrays.exchange import flat_indices
from einmpi.arrays.moving import (
    Chosen,
    block_indices,
    copy_selected,
    distributed,
    fetch,
    on_one_rank,
    select_elements,
)
from einmpi.arrays.shapes import (
    broadcast_to,
    rearranged,
    reshape,
    stack,
    view_in_shape,
    with_dimensions,
    with_one_axis,
)
from einmpi.arrays.views import Link, View, writing
from einmpi.comm.agreement import together
from einmpi.errors import InputError
from einmpi.kernels.reference import as_numpy

Integers: TypeAlias = npt.NDArray[np.int64]
Array: TypeAlias = npt.NDArray[Any]


_KEYS = "integers, slices, None, ..., lists of integers, or masks"
_INTEGER = (int, np.integer)
_SLICE = (slice, EllipsisType, type(None))


# ---- keys: which elements they select -----------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """The indices that a key selects: a vector for each dimension of the tensor.

    `result_extents` has, for each dimension of the tensor, the extents that it contributes to the
    shape of the result: none for an integer, several for a table of integers. `new_positions` are
    the positions of new dimensions, of extent 1, among those of the result.
    """

    chosen: list[Chosen]
    result_extents: list[tuple[int, ...]]
    new_positions: list[int]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many indices are selected in each dimension of the tensor."""
        return tuple(len(indices) for indices in self.chosen)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result. It has as many elements as an array of shape `counts`."""
        extents: list[int] = []
        for extents_of_dimension in self.result_extents:
            extents.extend(extents_of_dimension)
        for position in self.new_positions:
            extents.insert(position, 1)
        return tuple(extents)


def is_basic(key: Any) -> bool:
    """Return whether a key has integers, slices, None and ... only: it selects a view."""
    return all(map(_is_basic, key if isinstance(key, tuple) else (key,)))


def fixed_key(key: Any) -> tuple[Any, ...]:
    """Return a basic key with numbers in its slices, where there may be tensors that change."""
    parts: list[Any] = []
    for part in key if isinstance(key, tuple) else (key,):
        if isinstance(part, slice):
            ends = (part.start, part.stop, part.step)
            part = slice(*(None if end is None else index(end) for end in ends))
        parts.append(part)
    return tuple(parts)


def _is_basic(part: Any) -> bool:
    return isinstance(part, _INTEGER + _SLICE) and not isinstance(part, bool)


def mask_of_all(array: DistArray, key: Any) -> Any:
    """Return the mask of the tensor's own shape that a key consists of, None for other keys."""
    mask = key[0] if isinstance(key, tuple) and len(key) == 1 else key
    return mask if _is_mask(mask) and mask.shape == array.shape else None


@dataclass(frozen=True)
class Key:
    """A key with an index for each dimension of a tensor, and None for each new dimension.

    An index is an integer, a slice, or a table of integers. `are_together` says whether nothing is
    written between the integers and tables.
    """

    array: DistArray
    parts: list[Any]
    are_together: bool

    @property
    def tables(self) -> list[Any]:
        """The tables of integers."""
        return [part for part in self.parts if not _is_basic(part)]

    @property
    def is_by_element(self) -> bool:
        """Whether several tables, or a DistArray, and integers have all indices of elements."""
        if any(isinstance(part, _SLICE) for part in self.parts):
            return False
        return len(self.tables) > 1 or any(isinstance(table, DistArray) for table in self.tables)

    @property
    def is_by_dimension(self) -> bool:
        """Whether what it selects in one dimension does not depend on the others."""
        has_integers = any(isinstance(part, _INTEGER) for part in self.parts)
        is_in_place = self.are_together or not has_integers
        return not self.tables or (len(self.tables) == 1 and is_in_place)


def read_key(array: DistArray, key: Any) -> Key:
    """Return what the parts of a key are; refuse those that DistArrays do not support.

    A mask becomes tables of the indices at which it is True, one for each of its dimensions. For a
    single truth value, the tensor gets a dimension of extent 1.
    """
    given: list[Any] = []
    places: list[int] = []  # of integers and tables
    for part in key if isinstance(key, tuple) else (key,):
        if not isinstance(part, _SLICE):
            places.append(len(given))
        if not _is_basic(part):
            is_distributed = isinstance(part, DistArray)
            table = part if is_distributed else as_numpy("index", "an index", part)
            if isinstance(part, list) and not table.size:
                table = table.astype(np.int64)  # numpy has no integers to tell the dtype by
            if table.dtype.kind not in "biu":
                raise InputError("index", f"{type(part).__name__} is not supported here", _KEYS)
            part = table
        given.append(part)
    are_together = not places or places[-1] - places[0] < len(places)
    parts: list[Any] = []
    dimension = 0
    for part in _without_ellipsis(given, array.ndim):
        if not _is_mask(part):
            parts.append(part)
            dimension += part is not None
            continue
        if not part.ndim:
            array = array[(slice(None),) * dimension + (None,)]
            part = part.reshape(1)
        _check_mask(array.shape[dimension:], part)
        parts.extend(np.nonzero(part))
        dimension += part.ndim
    return Key(array, parts, are_together)


def parse_key(key: Key) -> Selection:
    """Return what a key selects that has at most one table."""
    chosen: list[Chosen] = []
    result_extents: list[tuple[int, ...]] = []
    new_positions: list[int] = []
    result_ndim = 0
    for part in key.parts:
        if part is None:
            new_positions.append(result_ndim)
            result_ndim += 1
            continue
        extent = key.array.shape[len(chosen)]
        indices: Chosen
        extents: tuple[int, ...]
        if isinstance(part, slice):
            indices = range(extent)[part]
            extents = (len(indices),)
        elif isinstance(part, _INTEGER):
            place = _index_in_range(int(part), extent)
            indices = range(place, place + 1)
            extents = ()
        else:
            table = gathered(part)
            indices = indices_in_range(table.reshape(-1), extent)
            extents = table.shape
        chosen.append(indices)
        result_extents.append(extents)
        result_ndim += len(extents)
    return Selection(chosen, result_extents, new_positions)


def _is_mask(part: Any) -> bool:
    return isinstance(part, DistArray | np.ndarray) and part.dtype.kind == "b"


@dataclass(frozen=True)
class Merged:
    """A view of a tensor in which one table has the place of several, in the first dimension.

    `order` are the dimensions of what the table selects there, as the key has them.
    """

    array: DistArray
    table: Integers
    order: list[int]


def merge_tables(key: Key) -> Merged:
    """Return a view in which the dimensions of all tables and integers are one.

    As numpy, put their dimensions where they are in the key, or first if they are not together.
    """
    slices: list[slice | None] = []
    places: list[int] = []  # of the tables and integers, which numpy broadcasts
    for place, part in enumerate(key.parts):
        is_table = not isinstance(part, _SLICE)
        slices.append(slice(None) if is_table else part)
        if is_table:
            places.append(place)
    sliced = key.array[tuple(slices)]
    others = [place for place in range(sliced.ndim) if place not in places]
    ordered = with_dimensions(sliced, [*places, *others])
    table = np.zeros((), np.int64)
    length = 1
    for place in places:
        extent = sliced.shape[place]
        length *= extent
        table = table * extent + indices_in_range(gathered(key.parts[place]), extent)
    merged = view_in_shape(ordered, (length, *ordered.shape[len(places) :]))
    order = list(range(table.ndim, table.ndim + len(others)))
    first = places[0] if key.are_together else 0
    order[first:first] = range(table.ndim)
    return Merged(merged, table, order)


def gathered(table: Any) -> Any:
    """Return a table of integers that every rank has whole."""
    return table.gather() if isinstance(table, DistArray) else np.asarray(table)


def _without_ellipsis(keys: list[Any], ndim: int) -> list[Any]:
    """Return an index for each dimension of a tensor, and None for each new dimension.

    Slices of whole dimensions take the place of `...`, which is at the end if it is not written.
    """
    if sum(part is Ellipsis for part in keys) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    indexed = 0
    for part in keys:
        if _is_mask(part):
            indexed += part.ndim
        elif not isinstance(part, EllipsisType | None):
            indexed += 1
    if indexed > ndim:
        raise IndexError(f"{indexed} indices for a tensor of {ndim} dimensions")
    whole_dimensions = [slice(None)] * (ndim - indexed)
    complete: list[Any] = []
    for part in keys:
        if part is Ellipsis:
            complete.extend(whole_dimensions)
            whole_dimensions = []
        else:
            complete.append(part)
    return complete + whole_dimensions


def _index_in_range(index: int, extent: int) -> int:
    """Return an index counted from the start of a dimension; negative ones count from its end."""
    if not -extent <= index < extent:
        raise IndexError(f"index {index} is out of range for a dimension of extent {extent}")
    return index % extent


def indices_in_range(indices: Integers, extent: int) -> Integers:
    """Return indices counted from the start of a dimension."""
    if not indices.size:
        return indices.astype(np.int64)
    _index_in_range(int(indices.min()), extent)
    _index_in_range(int(indices.max()), extent)
    return indices.astype(np.int64) % extent


def _check_mask(shape: tuple[int, ...], mask: Any) -> None:
    """Refuse a mask of other extents than those of a tensor; as numpy's, they may be 0."""
    for mask_extent, extent in zip(mask.shape, shape, strict=False):
        if mask_extent not in (extent, 0):
            raise IndexError(
                f"the mask has shape {list(mask.shape)}; expected the first extents of "
                f"{list(shape)}"
            )


# ---- selections ---------------------------------------------------------------------------------


def select(array: DistArray, key: Any) -> DistArray:
    """Return the elements that a key selects: a view, or a copy as numpy's. All ranks call it."""
    if is_basic(key):
        return _view_of_part(array, fixed_key(key))
    mask = mask_of_all(array, key)
    if mask is not None:
        return _select_by_mask(array, mask)
    read = read_key(array, key)
    if read.is_by_element:
        return elements_at_indices(read.array, read.parts)
    if read.is_by_dimension:
        return _selected_by_dimension(read)
    merged = merge_tables(read)
    selected = select(merged.array, merged.table)
    return rearranged(selected, merged.order)


def _view_of_part(array: DistArray, key: tuple[Any, ...]) -> DistArray:
    def read(base: DistArray) -> DistArray:
        return _selected_by_dimension(read_key(base, key))

    def write(base: DistArray, values: DistArray) -> None:
        base[key] = values

    if len(key) == array.ndim and all(isinstance(part, int | np.integer) for part in key):
        return deepcopy(read(array))  # one element, which is no view in numpy either
    return View(array, Link(read, write, lambda block: block[key], array.is_alone()), key)


def _selected_by_dimension(key: Key) -> DistArray:
    array = key.array
    selection = parse_key(key)
    if array.is_alone():
        parts = [part if is_basic(part) else gathered(part) for part in key.parts]
        return on_one_rank(array, array.local[(*parts, ...)])  # an array, never a number
    return _with_result_shape(select_elements(array, selection.chosen), selection)


def _with_result_shape(selected: DistArray, selection: Selection) -> DistArray:
    """Return selected elements without the dimensions of integers, and with new dimensions."""
    order: list[int | None] = []
    has_table = False
    for dimension, extents in enumerate(selection.result_extents):
        if extents:
            order.append(dimension)
        has_table = has_table or len(extents) > 1
    if has_table:
        return reshape(selected, selection.shape)
    for position in selection.new_positions:
        order.insert(position, None)
    return rearranged(selected, order)


def _select_by_mask(array: DistArray, mask: Any) -> DistArray:
    """Return the elements, in row-major order, where a mask of the same shape is True."""
    comm = array.own_comm
    mask_vector = reshape(distributed(mask, comm), (-1,))
    values = reshape(array, (-1,))
    if mask_vector.layout != values.layout:
        mask_vector = mask_vector.redistribute(values.layout)
    is_selected = mask_vector.host
    # Of ranks that hold the same elements, only one contributes them.
    if values.local.size and values.layout.owns(comm.rank):
        own_values = values.host[is_selected]
    else:
        own_values = np.empty(0, array.dtype)
    return DistArray.from_local(own_values, comm=comm)


def take(array: DistArray, indices: Any, /, axis: int | None = None) -> DistArray:
    """Return the elements at some indices along a dimension.

    Without an axis, the indices count all elements in row-major order.
    """
    if not isinstance(indices, DistArray):
        indices = as_numpy("take", "indices", indices)
    if axis is None:
        return select(reshape(array, (-1,)), indices)
    dimension = range(array.ndim)[axis]
    key = (slice(None),) * dimension + (indices,)
    return select(array, key)


# ---- assignments, in place ----------------------------------------------------------------------


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
    mask = distributed(mask, array.own_comm)
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


# ---- indices that are elements of DistArrays ----------------------------------------------------


def elements_at(array: DistArray, places: DistArray) -> DistArray:
    """Return the elements at some places in row-major order. All ranks call it.

    Each rank asks the others for the elements that belong to its block of places.
    """
    own_places = places.host.reshape(-1).astype(np.int64)
    values = fetch(array, own_places)
    return DistArray(values.reshape(places.local.shape), places.layout, array.own_comm)


def elements_at_indices(array: DistArray, keys: Sequence[Any]) -> DistArray:
    """Return the elements at tables of indices, one for each dimension, which are broadcast."""
    comm = array.own_comm
    tables = [distributed(key, comm, "index", "an index") for key in keys]

    def find_places(*blocks: Array) -> Array:
        places = np.zeros(np.broadcast_shapes(*(block.shape for block in blocks)), np.int64)
        for block, extent in zip(blocks, array.shape, strict=True):
            places = places * extent + indices_in_range(block, extent)
        return places

    def check_indices() -> None:
        for table, extent in zip(tables, array.shape, strict=True):
            indices_in_range(table.host, extent)

    together(comm, check_indices)
    places: DistArray = on_blocks("index", find_places, tables)
    return elements_at(array, places)


def take_along_axis(array: DistArray, indices: Any, /, axis: int | None = -1) -> DistArray:
    """Return elements by indices along one dimension, as `numpy.take_along_axis`."""
    array, dimension = with_one_axis(array, axis)
    indices = distributed(indices, array.own_comm, "take_along_axis", "indices")
    if indices.ndim != array.ndim:
        raise ValueError(f"indices have {indices.ndim} dimensions, the tensor {array.ndim}")
    keys: list[Any] = []
    for number, extent in enumerate(array.shape):
        if number == dimension:
            keys.append(indices)
        else:
            shape = [1] * array.ndim
            shape[number] = extent
            keys.append(np.arange(extent).reshape(shape))
    return elements_at_indices(array, keys)


def nonzero(array: DistArray, /) -> tuple[DistArray, ...]:
    """Return the indices of the elements that are not zero, in row-major order."""
    if not array.ndim:
        raise ValueError("nonzero of a tensor without dimensions")
    comm = array.own_comm
    is_nonzero: Any = np.not_equal(array, 0)
    vector = reshape(is_nonzero, (-1,))
    # Of ranks that hold the same elements, only one contributes them.
    own_places = np.empty(0, np.int64)
    if vector.region is not None and vector.layout.owns(comm.rank):
        own_indices = block_indices(vector.layout, comm.rank)
        own_places = flat_indices(own_indices, vector.shape)[vector.host]
    places = DistArray.from_local(own_places, comm=comm)
    strides = [prod(array.shape[number + 1 :]) for number in range(array.ndim)]
    found: list[DistArray] = []
    for stride, extent in zip(strides, array.shape, strict=True):
        indices = places if stride <= 1 else places // stride
        found.append(indices if array.ndim == 1 else indices % max(extent, 1))
    return tuple(found)


def where(condition: Any, x: Any = None, y: Any = None, /) -> Any:
    """Choose elements of x or y; without them, return the indices where the condition is true."""
    if x is None and y is None:
        return nonzero(condition)
    if x is None or y is None:
        raise ValueError("where takes a condition and two values, or a condition alone")
    return on_blocks("where", np.where, (condition, x, y))


def argwhere(array: DistArray, /) -> DistArray:
    """Return the indices of the elements that are not zero, one in each row."""
    return stack(nonzero(array), axis=1)
