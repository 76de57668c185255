"""Functions of whole rows of DistArrays, matrices and transforms: other dimensions are cut."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from einmpi.arrays.creation import layout_for
from einmpi.arrays.dist_array import DistArray
from einmpi.arrays.elementwise import raise_alike
from einmpi.arrays.moving import distributed, layout_cutting
from einmpi.arrays.shapes import concatenate, expand_dims, roll, squeeze
from einmpi.comm.agreement import together
from einmpi.schedule.layout import Layout


def with_whole_axes(array: DistArray, axes: Collection[int]) -> DistArray:
    """Return the tensor in a layout that does not cut these dimensions.

    Ranks that cut them cut others instead. If no other is long enough, they hold copies.
    """
    layout = array.layout
    comm = array.own_comm
    if layout.mesh.ranks != comm.size:
        layout = layout_for(comm, array.shape)
    other_dimensions = [dimension for dimension in range(array.ndim) if dimension not in axes]
    return array._in_layout(layout_cutting(layout, array.shape, other_dimensions))


def along_axes(
    function: Callable[[Any], Any], array: DistArray, axes: int | Sequence[int]
) -> DistArray:
    """Apply a function to blocks in which some dimensions are whole.

    The function keeps the other dimensions; of these it may change the extents.
    """
    whole_axes = normalize_axis_tuple(axes, array.ndim)
    source = with_whole_axes(array, whole_axes)
    local = together(array.own_comm, lambda: np.ascontiguousarray(function(source.host)))
    bound = list(array.shape)
    for axis in whole_axes:
        bound[axis] = local.shape[axis]
    layout = Layout(source.layout.mesh, tuple(bound), source.layout.cuts)
    return array._with_block(local, layout)


def of_matrices(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of `numpy.linalg` that takes a stack of matrices as a DistArray."""

    def apply_to_stack(array: DistArray, /, **options: Any) -> Any:
        def apply_to_block(block: Any) -> Any:
            return function(block, **options)

        return _on_blocks_of_matrices(apply_to_block, array)

    return apply_to_stack


def _on_blocks_of_matrices(function: Callable[[Any], Any], array: DistArray) -> Any:
    """Apply a function to stacks of whole matrices.

    It returns a stack of matrices, vectors or numbers, or a named tuple of such.
    """
    if array.ndim < 2:
        raise ValueError(f"a tensor of {array.ndim} dimensions is not a stack of matrices")
    stack_shape = array.shape[:-2]
    source = with_whole_axes(array, (array.ndim - 2, array.ndim - 1))

    def as_stack(block: Any) -> DistArray:
        local = np.array(block, order="C")
        bound = (*stack_shape, *local.shape[len(stack_shape) :])
        layout = Layout(source.layout.mesh, bound, source.layout.cuts)
        return array._with_block(local, layout)

    # A matrix of one rank may be singular: then all ranks raise an error.
    found = raise_alike(array.own_comm, np.linalg.LinAlgError, lambda: function(source.host))
    if isinstance(found, tuple):
        return type(found)(*(as_stack(block) for block in found))
    return as_stack(found)


def solve(matrices: Any, sides: Any, /) -> DistArray:
    """Return the solutions of systems of linear equations, as `numpy.linalg.solve`.

    A vector is the right-hand side of all systems.
    """
    if np.ndim(sides) == 1:
        return squeeze(solve(matrices, expand_dims(distributed(sides, matrices.own_comm), -1)), -1)
    stack_shape = np.broadcast_shapes(matrices.shape[:-2], sides.shape[:-2])
    all_matrices = np.broadcast_to(matrices, (*stack_shape, *matrices.shape[-2:]))
    all_sides = np.broadcast_to(sides, (*stack_shape, *sides.shape[-2:]))
    # Both in one tensor, so that a rank has the matrices and their right-hand sides.
    single = [np.ones((1, 1), array.dtype) for array in (matrices, sides)]
    dtype = np.linalg.solve(single[0], single[1]).dtype
    systems = concatenate([all_matrices, all_sides], -1, dtype)
    size = matrices.shape[-1]

    def solve_block(block: Any) -> Any:
        return np.linalg.solve(block[..., :size], block[..., size:])

    solutions: DistArray = _on_blocks_of_matrices(solve_block, systems)
    return solutions


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
