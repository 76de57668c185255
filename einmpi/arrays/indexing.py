"""Elements of DistArrays by index: what a key selects, a selection of elements, an assignment."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from types import EllipsisType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.dist_array import DistArray, Link, takes_symbols, writing
from einmpi.arrays.elementwise import Number, in_one_memory, on_blocks
from einmpi.arrays.exchange import flat_indices
from einmpi.arrays.moving import (
    Chosen,
    block_indices,
    copy_selected,
    distributed,
    fetch,
    positions_of,
    select_elements,
)
from einmpi.arrays.shapes import (
    broadcast_to,
    rearranged,
    reshape,
    stack,
    with_one_axis,
)
from einmpi.comm.agreement import together
from einmpi.errors import InputError
from einmpi.kernels.reference import as_numpy

Integers: TypeAlias = npt.NDArray[np.int64]
Array: TypeAlias = npt.NDArray[Any]


_KEYS = "integers, slices, None, ..., lists of integers, or masks"
_INTEGER = (int, np.integer)
_SLICE = (slice, EllipsisType, type(None))


# ---- keys: which elements they select -----------------------------------------------------------


def is_basic(key: Any) -> bool:
    """Return whether a key has integers, slices, None and ... only: it selects a view."""
    return all(map(_is_basic, key if isinstance(key, tuple) else (key,)))


def fixed_key(key: Any) -> tuple[Any, ...]:
    """Return a basic key with numbers in its slices, where there may be tensors that change."""
    parts: list[Any] = []
    for part in key if isinstance(key, tuple) else (key,):
        if isinstance(part, slice):
            ends = (part.start, part.stop, part.step)
            part = slice(*(None if end is None else operator.index(end) for end in ends))
        parts.append(part)
    return tuple(parts)


def _is_basic(part: Any) -> bool:
    return isinstance(part, _INTEGER + _SLICE) and not isinstance(part, bool)


def mask_of_all(array: DistArray, key: Any) -> Any:
    """Return the mask of the tensor's own shape that a key consists of, None for other keys."""
    mask = key[0] if isinstance(key, tuple) and len(key) == 1 else key
    return mask if _is_mask(mask) and mask.shape == array.shape else None


class Group(NamedTuple):
    """Dimensions of a tensor that are indexed together, and the extents that they have in a result.

    A new dimension of a result is a group without dimensions of the tensor.
    """

    dimensions: tuple[int, ...]
    extents: tuple[int, ...]


@dataclass(frozen=True)
class Key:
    """What a key selects of a tensor, and where that comes in the result.

    `indices` has a range, an integer or a table of integers for each dimension of the tensor.
    `groups` are in the order of the result: the dimension of each range alone, and those of all
    integers and tables, which are broadcast.
    """

    array: DistArray
    indices: list[Any]
    groups: list[Group]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return tuple(extent for group in self.groups for extent in group.extents)

    @property
    def is_by_dimension(self) -> bool:
        """Whether what it selects in one dimension does not depend on the others."""
        tables = [index for index in self.indices if not isinstance(index, range | int)]
        has_ranges = any(isinstance(index, range) for index in self.indices)
        return not tables or (
            len(tables) == 1 and (has_ranges or not isinstance(tables[0], DistArray))
        )

    @property
    def is_symbol(self) -> bool:
        """Whether it selects elements of a symbol, or by one."""
        return any(getattr(each, "is_symbol", False) for each in (self.array, *self.indices))

    def gathered(self) -> list[Any]:
        """Return the indices, with tables that every rank has whole."""
        found: list[Any] = []
        for index, extent in zip(self.indices, self.array.shape, strict=True):
            if isinstance(index, DistArray):
                index = indices_in_range(index.gather(), extent)
            found.append(index)
        return found


def read_key(array: DistArray, key: Any) -> Key:
    """Return what a key selects; refuse what DistArrays do not support.

    A mask becomes tables of the indices at which it is True, one for each of its dimensions. For a
    single truth value, the tensor gets a dimension of extent 1. As numpy, put the dimensions of
    integers and tables where they are in the key, or first if something is written between them.
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

    indices: list[Any] = []
    groups: list[Group] = []
    indexed: list[int] = []  # dimensions with integers and tables
    extents: tuple[int, ...] = ()  # of integers and tables
    place_of_indexed = 0
    for part in _without_ellipsis(given, array.ndim):
        parts: Sequence[Any] = (part,)
        if _is_mask(part):
            if not part.ndim:
                array = array[(slice(None),) * len(indices) + (None,)]
                part = part.reshape(1)
            _check_mask(array.shape[len(indices) :], part)
            parts = np.nonzero(part)
        for index in parts:
            if index is None:
                groups.append(Group((), (1,)))
                continue
            dimension = len(indices)
            extent = array.shape[dimension]
            if isinstance(index, slice):
                chosen = range(extent)[index]
                indices.append(chosen)
                groups.append(Group((dimension,), (len(chosen),)))
                continue
            if are_together and not indexed:
                place_of_indexed = len(groups)
            indexed.append(dimension)
            if isinstance(index, _INTEGER):
                index = _index_in_range(int(index), extent)
            else:
                extents = np.broadcast_shapes(extents, index.shape)
                if not isinstance(index, DistArray):
                    index = indices_in_range(index, extent)
            indices.append(index)
    groups.insert(place_of_indexed, Group(tuple(indexed), extents))
    return Key(array, indices, groups)


def _is_mask(part: Any) -> bool:
    return isinstance(part, DistArray | np.ndarray) and part.dtype.kind == "b"


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
    return _selected(read_key(array, key))


def _view_of_part(array: DistArray, key: tuple[Any, ...]) -> DistArray:
    def read(base: DistArray) -> DistArray:
        return _selected(read_key(base, key))

    def write(base: DistArray, values: DistArray) -> None:
        base[key] = values

    if len(key) == array.ndim and all(isinstance(part, int | np.integer) for part in key):
        return deepcopy(read(array))  # one element, which is no view in numpy either
    return array._view(Link(read, write, lambda block: block[key], array.is_alone()), key)


@takes_symbols
def _selected(key: Key) -> DistArray:
    if not key.is_by_dimension:
        return _elements_at_key(key)
    chosen: list[Chosen] = []
    without_integers: list[int] = []  # dimensions
    for dimension, index in enumerate(key.gathered()):
        if isinstance(index, int):
            index = range(index, index + 1)
        elif isinstance(index, range) or index.ndim:
            without_integers.append(dimension)
        chosen.append(index if isinstance(index, range) else index.reshape(-1))
    order: list[int | None] = []
    for group in key.groups:
        if group.extents and not group.dimensions:
            order.append(None)
        order += [dimension for dimension in group.dimensions if dimension in without_integers]
    selected = rearranged(select_elements(key.array, chosen), order)
    return selected if selected.shape == key.shape else reshape(selected, key.shape)


def _elements_at_key(key: Key) -> DistArray:
    """Return elements by tables for all dimensions."""
    return elements_at_indices(key.array, tables_of(key), len(key.shape))


def tables_of(key: Key) -> list[Any]:
    """Return tables for all dimensions: a range is one along a dimension of its own."""
    tables: dict[int, Any] = {}
    dimensions_after = len(key.shape)
    for group in key.groups:
        dimensions_after -= len(group.extents)
        new_axes = tuple(range(-dimensions_after, 0))
        for dimension in group.dimensions:
            index = key.indices[dimension]
            table = index if isinstance(index, DistArray) else np.asarray(index)
            tables[dimension] = np.expand_dims(table, new_axes)
    return [tables[dimension] for dimension in range(key.array.ndim)]


@takes_symbols
def _select_by_mask(array: DistArray, mask: Any) -> DistArray:
    """Return the elements, in row-major order, where a mask of the same shape is True."""
    values = reshape(array, (-1,))
    mask_vector = reshape(distributed(mask, array.own_comm), (-1,))
    return _chosen_by_mask(values.host, mask_vector._in_layout(values.layout))


def _chosen_by_mask(own_values: Array, mask: DistArray) -> DistArray:
    """Return the values of all ranks at which a vector is True, given those of this rank."""
    chosen = own_values[:0]
    # Of ranks that hold the same elements, only one contributes them.
    if mask.local.size and mask.layout.owns(mask.own_comm.rank):
        chosen = own_values[mask.host]
    return DistArray.from_local(chosen, comm=mask.own_comm)


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
    value_links = getattr(value, "links", ())
    is_own_view = len(value_links) == 1 and value.base is array
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
        _assign_by_mask(array, mask, value)
    else:
        _assign_by_key(read_key(array, key), value)


def _without_first_ones(value: Any, ndim: int) -> Any:
    """Return values without dimensions of extent 1 before those that a selection has, as numpy."""
    while value.ndim > ndim and value.shape[0] == 1:
        value = value.reshape(value.shape[1:])
    return value


@takes_symbols
def _assign_by_mask(array: DistArray, mask: Any, value: Any) -> None:
    """Replace the elements at which a mask is True by a number, or by values in row-major order."""
    if value.ndim > 1:
        raise TypeError(f"a mask takes a number or a vector of values, not {value.ndim} dimensions")
    mask = distributed(mask, array.own_comm)
    chosen = mask._in_layout(array.layout).host
    places: Any = np.zeros((), np.int64)  # in the values, of those for this rank
    if value.shape not in ((), (1,)):
        numbers: Any = np.cumsum(reshape(mask, (-1,)))
        count = int(numbers[-1]) if mask.size else 0
        if value.shape != (count,):
            raise ValueError(
                f"cannot assign {value.size} values to the {count} elements where the mask is True"
            )
        places = reshape(numbers, array.shape)._in_layout(array.layout).host[chosen] - 1
    if isinstance(value, DistArray):
        values = fetch(value, places.reshape(-1))
    else:
        values = value.reshape(-1)[places]
    with writing(array) as changed:
        _, chosen, values = in_one_memory([changed.local, chosen, values])
        changed.local[chosen] = values


@takes_symbols
def _assign_by_key(key: Key, value: Any) -> None:
    """Replace the elements at the combinations of the indices of all groups of dimensions."""
    value = _without_first_ones(value, len(key.shape))
    indices = key.gathered()
    if isinstance(value, DistArray) and _is_box(indices):
        with writing(key.array) as changed:
            _assign_box(changed, key, value)
        return
    own_block = block_indices(key.array.layout, key.array.own_comm.rank)
    counts: list[int] = []
    positions: list[Integers] = []  # for each group, those of the combinations that this rank has
    places_in_block: dict[int, Integers] = {}
    for number, group in enumerate(key.groups):
        is_own = np.ones(group.extents, bool)
        for dimension in group.dimensions:
            is_own &= np.isin(indices[dimension], own_block[dimension])
        along_group = (-1, *[1] * (len(key.groups) - 1 - number))
        for dimension in group.dimensions:
            own_indices = np.broadcast_to(indices[dimension], group.extents)[is_own]
            places = np.searchsorted(own_block[dimension], own_indices)
            places_in_block[dimension] = places.reshape(along_group)
        counts.append(prod(group.extents))
        positions.append(np.flatnonzero(is_own))

    with writing(key.array) as changed:
        flat_places = flat_indices(positions, tuple(counts))
        if isinstance(value, DistArray):
            values = fetch(broadcast_to(value, key.shape), flat_places)
        else:
            values = np.broadcast_to(value, key.shape).reshape(-1)[flat_places]
        if values.size:  # numpy warns of a cast even if there is nothing to cast
            places_of_all: list[Any] = [places_in_block[number] for number in range(changed.ndim)]
            shape_in_block = [len(own_positions) for own_positions in positions]
            changed.local[(*places_of_all, ...)] = values.reshape(shape_in_block)


def _is_box(indices: Sequence[Any]) -> bool:
    """Return whether one index, or consecutive ones, of every dimension are selected."""
    for index in indices:
        if not isinstance(index, int) and (not isinstance(index, range) or index.step != 1):
            return False
    return True


def _assign_box(array: DistArray, key: Key, value: DistArray) -> None:
    """Replace the elements of a box by those of a tensor, which is broadcast."""
    if np.may_share_memory(value.host, array.host):
        value = value.copy()  # x[...] = x.T
    repeated = value if value.shape == key.shape else broadcast_to(value, key.shape)
    # The dimensions of the value, one for each dimension of the tensor; None for an integer.
    kept = [group.dimensions for group in key.groups if group.extents]
    order = [kept.index((number,)) if (number,) in kept else None for number in range(array.ndim)]
    values = rearranged(repeated, order)
    first: list[int] = []
    for index in key.indices:
        first.append(index if isinstance(index, int) else index.start)
    whole_value = [range(extent) for extent in values.shape]
    copy_selected(values, whole_value, array.layout, array.local, first)


# ---- indices that are elements of DistArrays ----------------------------------------------------


def elements_at(array: DistArray, places: DistArray) -> DistArray:
    """Return the elements at some places in row-major order. All ranks call it.

    Each rank asks the others for the elements that belong to its block of places.
    """
    own_places = places.host.reshape(-1).astype(np.int64)
    values = fetch(array, own_places)
    return places._with_block(values.reshape(places.local.shape))


def elements_at_indices(array: DistArray, keys: Sequence[Any], ndim: int) -> DistArray:
    """Return the elements at tables of indices, one for each dimension, which are broadcast.

    The result has at least `ndim` dimensions.
    """
    comm = array.own_comm
    in_first_row = np.zeros((1,) * ndim, np.int64)
    tables = [distributed(key, comm, "index", "an index") for key in keys]

    def find_places(places: Array, *blocks: Array) -> Array:
        for block, extent in zip(blocks, array.shape, strict=True):
            places = places * extent + indices_in_range(block, extent)
        return places

    def check_indices() -> None:
        for table, extent in zip(tables, array.shape, strict=True):
            indices_in_range(table.host, extent)

    together(comm, check_indices)
    places: DistArray = on_blocks("index", find_places, [in_first_row, *tables])
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
    return elements_at_indices(array, keys, array.ndim)


def nonzero(array: DistArray, /) -> tuple[DistArray, ...]:
    """Return the indices of the elements that are not zero, in row-major order."""
    if not array.ndim:
        raise ValueError("nonzero of a tensor without dimensions")
    is_nonzero: Any = np.not_equal(array, 0)
    vector = reshape(is_nonzero, (-1,))
    (own_places,) = block_indices(vector.layout, array.own_comm.rank)
    places = _chosen_by_mask(own_places, vector)
    found: tuple[DistArray, ...] = on_blocks(
        "nonzero", lambda block: positions_of(block, array.shape), (places,)
    )
    return found


def where(condition: Any, x: Any = None, y: Any = None, /) -> Any:
    """Choose elements of x or y; without them, return the indices where the condition is true."""
    if x is None and y is None:
        return np.nonzero(condition)
    if x is None or y is None:
        raise ValueError("where takes a condition and two values, or a condition alone")
    return on_blocks("where", np.where, (condition, x, y))


def argwhere(array: DistArray, /) -> DistArray:
    """Return the indices of the elements that are not zero, one in each row."""
    return stack(nonzero(array), axis=1)
