"""Elements of DistArrays by index: integers, slices, None, one list of integers, or a mask."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.elementwise import store
from einmpi.arrays.moving import block_indices, fetch, flat_indices, on_one_rank, rearranged
from einmpi.arrays.shapes import broadcast_to, reshape
from einmpi.compiled.dist_array import DistArray
from einmpi.errors import InputError
from einmpi.kernels.given import as_numpy
from einmpi.schedule.layout import Layout

Integers: TypeAlias = npt.NDArray[np.int64]
_KEYS = "integers, slices, None, ..., one list of integers, or a mask of the tensor's shape"


@dataclass(frozen=True)
class _Selection:
    """The indices that a key selects: a vector for each dimension of the tensor.

    `kept` are the extents of the result that each dimension gives: none for an integer. `new` are
    the positions of new dimensions among those of the result.
    """

    chosen: list[Integers]
    kept: list[tuple[int, ...]]
    new: list[int]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        extents = [extent for part in self.kept for extent in part]
        for position in self.new:
            extents.insert(position, 1)
        return tuple(extents)


def _selection(array: DistArray, key: Any) -> _Selection:
    keys = list(key) if isinstance(key, tuple) else [key]
    consuming = [part for part in keys if part is not None and part is not Ellipsis]
    if len(consuming) > array.ndim:
        raise IndexError(f"{len(consuming)} indices for a tensor of {array.ndim} dimensions")
    if not any(part is Ellipsis for part in keys):
        keys.append(Ellipsis)
    chosen: list[Integers] = []
    kept: list[tuple[int, ...]] = []
    new: list[int] = []
    lists = 0
    for part in keys:
        if part is Ellipsis:
            for _ in range(array.ndim - len(consuming)):
                extent = array.shape[len(chosen)]
                chosen.append(np.arange(extent))
                kept.append((extent,))
            consuming = consuming + [None] * (array.ndim - len(consuming))
            continue
        if part is None:
            new.append(sum(len(extents) for extents in kept) + len(new))
            continue
        extent = array.shape[len(chosen)]
        if isinstance(part, slice):
            indices = np.arange(extent)[part]
            kept.append((indices.size,))
        elif isinstance(part, int | np.integer) and not isinstance(part, bool):
            indices = np.array([_in_range(int(part), extent)])
            kept.append(())
        else:
            lists += 1
            found = as_numpy("index", "an index", part)
            is_list = found.dtype.kind in "iu" or not found.size
            if lists > 1 or not is_list:
                raise InputError("index", f"{type(part).__name__} is not supported here", _KEYS)
            if found.size:
                _in_range(int(found.min()), extent)
                _in_range(int(found.max()), extent)
            indices = found.reshape(-1).astype(np.int64) % max(extent, 1)
            kept.append(found.shape)
        chosen.append(indices)
    _refuse_moved_list(keys)
    return _Selection(chosen, kept, new)


def _refuse_moved_list(keys: list[Any]) -> None:
    """Refuse x[0, :, [1, 2]]: numpy would move the dimension of the list to the front."""
    single = [number for number, part in enumerate(keys) if isinstance(part, int | np.integer)]
    lists = []
    for number, part in enumerate(keys):
        is_basic = part is None or part is Ellipsis or isinstance(part, slice | int | np.integer)
        if not is_basic:
            lists.append(number)
    advanced = sorted((*single, *lists))
    is_together = not advanced or advanced[-1] - advanced[0] + 1 == len(advanced)
    if lists and single and not is_together:
        raise InputError("index", "an integer and a list with a slice between them", _KEYS)


def _in_range(index: int, extent: int) -> int:
    if not -extent <= index < extent:
        raise IndexError(f"index {index} is out of range for a dimension of extent {extent}")
    return index % extent


def select(array: DistArray, key: Any) -> DistArray:
    """Return the elements that a key selects. All ranks call it."""
    if _is_mask(key):
        return _select_by_mask(array, key)
    selection = _selection(array, key)
    shape = selection.shape
    if array.is_alone():  # a copy, as on several ranks
        chosen: Any = array.local[key]
        is_on_host = isinstance(chosen, np.ndarray | np.generic)
        return on_one_rank(array, np.array(chosen) if is_on_host else chosen.copy())
    whole = tuple(len(indices) for indices in selection.chosen)
    strides = [prod(array.shape[number + 1 :]) for number in range(array.ndim)]
    rank = array.own_comm.rank

    def places(layout: Layout) -> Integers:
        # The block of the result, as indices into the vectors of chosen indices.
        flat = flat_indices(block_indices(layout, rank), shape)
        found = np.zeros(flat.size, np.int64)
        if flat.size:
            positions = np.unravel_index(flat, whole) if whole else ()
            for position, indices, stride in zip(positions, selection.chosen, strides, strict=True):
                found += indices[position] * stride
        return found

    return rearranged(array, shape, places)


def _is_mask(key: Any) -> bool:
    is_bool = isinstance(key, np.ndarray) and key.dtype.kind == "b"
    return is_bool or isinstance(key, DistArray)


def _select_by_mask(array: DistArray, mask: Any) -> DistArray:
    """Return the elements, in row-major order, where a mask of the tensor's shape is True."""
    if mask.dtype != bool or mask.shape != array.shape:
        raise InputError("index", f"a mask {mask.dtype}{list(mask.shape)}", _KEYS)
    if not isinstance(mask, DistArray):
        mask = DistArray.from_global(mask, array.own_comm)
    values = reshape(array, (-1,))
    chosen = reshape(mask, (-1,)).local
    own = values.host[chosen] if values.local.size else np.empty(0, array.dtype)
    if not values.layout.owns(array.own_comm.rank):  # another rank has the same elements
        own = np.empty(0, array.dtype)
    return DistArray.from_local(own, comm=array.own_comm)


def assign(array: DistArray, key: Any, value: Any) -> None:
    """Replace the elements that a key selects, in place. All ranks call it."""
    if _is_mask(key):
        changed: Any = np.where(key, value, array)
        store(array, changed.astype(array.dtype))
        return
    selection = _selection(array, key)
    region = block_indices(array.layout, array.own_comm.rank)
    here: list[Integers] = []  # places in this rank's block
    there: list[Integers] = []  # the same in the vectors of chosen indices
    for held, chosen in zip(region, selection.chosen, strict=True):
        positions = np.nonzero(np.isin(chosen, held))[0]
        here.append(np.searchsorted(held, chosen[positions]))
        there.append(positions)
    whole = tuple(len(indices) for indices in selection.chosen)
    flat = flat_indices(there, whole)
    if isinstance(value, DistArray):
        values = fetch(broadcast_to(value, selection.shape), flat)
    else:
        plain = as_numpy("index", "the value", value)
        values = np.broadcast_to(plain, selection.shape).reshape(-1)[flat]
    if array.local.size:
        array.local[np.ix_(*here)] = values.reshape([len(part) for part in here])


def take(array: DistArray, indices: Any, axis: int | None = None, **_: Any) -> DistArray:
    """Return the elements at some indices along a dimension; without one, of all elements."""
    if axis is None:
        return select(reshape(array, (-1,)), indices)
    place = range(array.ndim)[axis]
    return select(array, (slice(None),) * place + (indices,))
