"""Changes of shape, joins and selections, by the names of the array API standard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from einmpi.array_api.calls import call
from einmpi.compiled.dist_array import DistArray

Axis: TypeAlias = int | tuple[int, ...] | None


def broadcast_arrays(*arrays: DistArray) -> list[DistArray]:
    """Return tensors with their elements repeated so that all have the same shape."""
    repeated: Any = np.broadcast_arrays(*arrays)
    return list(repeated)


def broadcast_to(x: DistArray, /, shape: tuple[int, ...]) -> DistArray:
    """Return the tensor with its elements repeated along dimensions of extent 1."""
    return call(np.broadcast_to, x, shape)


def concat(arrays: Sequence[DistArray], /, *, axis: int | None = 0) -> DistArray:
    """Join tensors along a dimension; without one, their elements as vectors."""
    return call(np.concatenate, arrays, axis=axis)


def expand_dims(x: DistArray, /, axis: int = 0) -> DistArray:
    """Return the tensor with a new dimension of extent 1."""
    return call(np.expand_dims, x, axis)


def flip(x: DistArray, /, *, axis: Axis = None) -> DistArray:
    """Return the tensor with the order of elements reversed along some dimensions."""
    return call(np.flip, x, axis)


def moveaxis(
    x: DistArray, source: int | tuple[int, ...], destination: int | tuple[int, ...], /
) -> DistArray:
    """Return the tensor with some dimensions at other positions."""
    return call(np.moveaxis, x, source, destination)


def permute_dims(x: DistArray, /, axes: tuple[int, ...]) -> DistArray:
    """Return the tensor with its dimensions in another order."""
    return call(np.transpose, x, axes)


def repeat(x: DistArray, repeats: int | DistArray, /, *, axis: int | None = None) -> DistArray:
    """Return each element repeated along a dimension; without one, in row-major order."""
    return call(np.repeat, x, repeats, axis=axis)


def reshape(x: DistArray, /, shape: tuple[int, ...], *, copy: bool | None = None) -> DistArray:
    """Return the elements, in row-major order, in another shape."""
    return call(np.reshape, x, shape, copy=copy)


def roll(x: DistArray, /, shift: int | tuple[int, ...], *, axis: Axis = None) -> DistArray:
    """Return the tensor with elements shifted along dimensions; the last become the first."""
    return call(np.roll, x, shift, axis=axis)


def squeeze(x: DistArray, /, axis: int | tuple[int, ...]) -> DistArray:
    """Return the tensor without some dimensions of extent 1."""
    return call(np.squeeze, x, axis)


def stack(arrays: Sequence[DistArray], /, *, axis: int = 0) -> DistArray:
    """Join tensors of the same shape along a new dimension."""
    return call(np.stack, arrays, axis=axis)


def tile(x: DistArray, repetitions: tuple[int, ...], /) -> DistArray:
    """Return the whole tensor repeated along its dimensions."""
    return call(np.tile, x, repetitions)


def unstack(x: DistArray, /, *, axis: int = 0) -> tuple[DistArray, ...]:
    """Return the parts of a tensor along a dimension, without that dimension."""
    parts: Any = np.unstack(x, axis=axis)
    return tuple(parts)


def take(x: DistArray, indices: DistArray, /, *, axis: int | None = None) -> DistArray:
    """Return the elements at some indices along a dimension."""
    return call(np.take, x, indices, axis=axis)


def take_along_axis(x: DistArray, indices: DistArray, /, *, axis: int = -1) -> DistArray:
    """Return elements by indices along one dimension, different ones for each row."""
    return call(np.take_along_axis, x, indices, axis=axis)
