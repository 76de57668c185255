"""DistArrays that are split, joined and padded, and sets of their elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from einmpi.arrays.elementwise import on_blocks
from einmpi.arrays.indexing import take
from einmpi.arrays.places import nonzero
from einmpi.arrays.reductions import as_dist_array
from einmpi.arrays.reshaping import reshape
from einmpi.arrays.shapes import concatenate, flip, stack, swapaxes
from einmpi.arrays.sorting import unique_all
from einmpi.compiled.dist_array import DistArray

# ---- splitting ----------------------------------------------------------------------------------


def split(array: DistArray, sections: Any, /, axis: int = 0) -> list[DistArray]:
    """Return equal parts along a dimension, or those between some indices."""
    return _parts(np.split, array, sections, axis)


def array_split(array: DistArray, sections: Any, /, axis: int = 0) -> list[DistArray]:
    """Return nearly equal parts along a dimension, or those between some indices."""
    return _parts(np.array_split, array, sections, axis)


def hsplit(array: DistArray, sections: Any, /) -> list[DistArray]:
    """Return equal parts along the second dimension; of a vector, along its only one."""
    return _parts(np.split, array, sections, min(1, array.ndim - 1))


def vsplit(array: DistArray, sections: Any, /) -> list[DistArray]:
    """Return equal parts along the first of several dimensions."""
    if array.ndim < 2:
        raise ValueError("vsplit takes a tensor of at least two dimensions")
    return _parts(np.split, array, sections, 0)


def _parts(
    split_indices: Callable[..., Any], array: DistArray, sections: Any, axis: int
) -> list[DistArray]:
    """Return the parts into which numpy splits the indices of a dimension."""
    dimension = normalize_axis_index(axis, array.ndim)
    before = (slice(None),) * dimension
    parts: list[DistArray] = []
    for indices in split_indices(np.arange(array.shape[dimension]), sections):
        start = int(indices[0]) if len(indices) else 0
        parts.append(array[(*before, slice(start, start + len(indices)))])
    return parts


# ---- joining ------------------------------------------------------------------------------------


def column_stack(arrays: Sequence[Any], /) -> DistArray:
    """Join tensors along the second dimension; a vector is a column."""
    columns = []
    for array in arrays:
        if np.ndim(array) > 1:
            columns.append(array)
        else:
            columns.append(np.reshape(array, (-1, 1)))
    return concatenate(columns, 1)


def dstack(arrays: Sequence[Any], /) -> DistArray:
    """Join tensors along the third dimension."""
    return concatenate([_at_least(3, array) for array in arrays], 2)


def append(array: Any, values: Any, /, axis: int | None = None) -> DistArray:
    """Join a tensor and values along a dimension; without one, both as vectors."""
    if axis is None:
        return concatenate([np.reshape(array, (-1,)), np.reshape(values, (-1,))])
    return concatenate([array, values], axis)


def at_least(ndim: int) -> Callable[..., Any]:
    """Return numpy's function atleast_1d, atleast_2d or atleast_3d for DistArrays."""

    def give_dimensions(*arrays: Any) -> Any:
        found = tuple(_at_least(ndim, array) for array in arrays)
        return found[0] if len(found) == 1 else found

    return give_dimensions


def _at_least(ndim: int, array: Any) -> Any:
    """Return a tensor with dimensions of extent 1 added where numpy adds them."""
    shape = np.shape(array)
    if len(shape) >= ndim:
        return array
    if not shape:
        return np.reshape(array, (1,) * ndim)
    if len(shape) == 1:
        extents = (1, *shape)  # a row, in a single layer
        return np.reshape(array, extents if ndim == 2 else (*extents, 1))
    return np.reshape(array, (*shape, 1))


def pad(
    array: DistArray, pad_width: Any, /, mode: str = "constant", constant_values: Any = 0
) -> DistArray:
    """Return the tensor with a border: of a constant, or of elements as `mode` says."""
    if mode not in ("constant", "edge", "reflect", "symmetric", "wrap"):
        raise TypeError(f"pad of a DistArray does not take mode={mode!r}")
    if np.ndim(constant_values):
        raise TypeError("pad of a DistArray takes one constant value")
    widths = np.broadcast_to(np.asarray(pad_width), (array.ndim, 2)).tolist()
    padded = array
    for dimension, (before, after) in enumerate(widths):
        if before < 0 or after < 0:
            raise ValueError("a border is not negative")
        if mode != "constant":
            all_indices = np.arange(padded.shape[dimension])
            indices = _pad_vector(all_indices, (before, after), mode=mode)
            padded = take(padded, indices, axis=dimension)
            continue
        parts: list[DistArray] = []
        for width, part in ((before, None), (0, padded), (after, None)):
            extents = list(padded.shape)
            extents[dimension] = width
            if part is not None:
                parts.append(part)
            elif width:
                parts.append(
                    DistArray.full(extents, constant_values, padded.dtype, padded.own_comm)
                )
        padded = concatenate(parts, dimension)
    return array.copy() if padded is array else padded


def rot90(array: DistArray, /, k: int = 1, axes: tuple[int, int] = (0, 1)) -> DistArray:
    """Return the tensor turned by right angles in the plane of two dimensions."""
    first, second = (normalize_axis_index(axis, array.ndim) for axis in axes)
    if first == second:
        raise ValueError("axes must be two different dimensions")
    turns = k % 4
    if turns == 2:
        return flip(array, (first, second))
    if turns == 1:
        return swapaxes(flip(array, second), first, second)
    if turns == 3:
        return flip(swapaxes(array, first, second), second)
    return array[...]


_pad_vector: Any = np.pad  # numpy declares only literal names of modes


# ---- sets ---------------------------------------------------------------------------------------


def argwhere(array: DistArray, /) -> DistArray:
    """Return the indices of the elements that are not zero, one in each row."""
    return stack(nonzero(array), axis=1)


def isin(
    elements: Any, test_elements: Any, /, assume_unique: bool = False, invert: bool = False
) -> Any:
    """Return whether each element is one of some others, which every rank gets whole."""
    if isinstance(test_elements, DistArray):
        test_elements = test_elements.gather()

    def look_up(block: Any) -> Any:
        return np.isin(block, test_elements, invert=invert)

    if not isinstance(elements, DistArray):
        return look_up(elements)
    return on_blocks("isin", look_up, (elements,))


def unique(
    array: DistArray,
    /,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    equal_nan: bool = True,
) -> Any:
    """Return the different elements in ascending order; nans are equal to each other."""
    found = unique_all(array)
    values = found.values
    places = found.indices
    inverse = found.inverse_indices
    counts = found.counts
    nan_count = 0
    if array.dtype.kind in "fc":
        nan_count = int(np.isnan(values).sum())
    if equal_nan and nan_count > 1:
        length = len(values) - nan_count + 1
        nans = DistArray.full(1, nan_count, counts.dtype, array.own_comm)
        values = values[:length]
        places = places[:length]
        limited: Any = np.minimum(inverse, length - 1)
        inverse = as_dist_array(limited)
        counts = concatenate([counts[: length - 1], nans])
    results: list[DistArray] = [values]
    if return_index:
        results.append(places)
    if return_inverse:
        results.append(reshape(inverse, array.shape))
    if return_counts:
        results.append(counts)
    return results[0] if len(results) == 1 else tuple(results)
