"""Fourier transforms: the transformed dimensions are whole on a rank, others are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from einmpi.arrays.shapes import roll
from einmpi.arrays.whole_axes.layout import along_axes
from einmpi.compiled.dist_array import DistArray


def of_one_dimension(function: Callable[..., Any]) -> Callable[..., DistArray]:
    """Return a transform of `numpy.fft` along one dimension of a DistArray."""

    def transform(
        array: DistArray, /, n: int | None = None, axis: int = -1, norm: Any = None
    ) -> DistArray:
        def transform_block(block: Any) -> Any:
            return function(block, n=n, axis=axis, norm=norm)

        return along_axes(transform_block, array, axis)

    return transform


def of_several_dimensions(function: Callable[..., Any]) -> Callable[..., DistArray]:
    """Return a transform of `numpy.fft` along several dimensions of a DistArray."""

    def transform(
        array: DistArray,
        /,
        s: Sequence[int] | None = None,
        axes: Sequence[int] | None = None,
        norm: Any = None,
    ) -> DistArray:
        if axes is None:
            count = array.ndim if s is None else len(s)
            axes = range(array.ndim - count, array.ndim)
        transformed_axes = tuple(axes)

        def transform_block(block: Any) -> Any:
            return function(block, s=s, axes=transformed_axes, norm=norm)

        return along_axes(transform_block, array, transformed_axes)

    return transform


def fftshift(array: DistArray, /, axes: int | Sequence[int] | None = None) -> DistArray:
    """Return the tensor with frequency zero in the middle of its dimensions."""
    return _shifted(array, axes, 1)


def ifftshift(array: DistArray, /, axes: int | Sequence[int] | None = None) -> DistArray:
    """Return the tensor with frequency zero at the start of its dimensions."""
    return _shifted(array, axes, -1)


def _shifted(array: DistArray, axes: int | Sequence[int] | None, direction: int) -> DistArray:
    """Shift dimensions by half of their extents, up (1) or down (-1)."""
    if axes is None:
        axes = range(array.ndim)
    elif isinstance(axes, int):
        axes = (axes,)
    shifted = array
    for axis in axes:
        shifted = roll(shifted, direction * (array.shape[axis] // 2), axis)
    return shifted
