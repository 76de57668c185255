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
from einmpi.arrays.shapes import concatenate, expand_dims, roll
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


def along_axes(function: Callable[[Any], Any], array: DistArray, axes: int | Sequence[int]) -> Any:
    """Apply a function to blocks in which some dimensions are whole.

    The function may change their extents, or leave out those that are last. It returns an array, or
    a named tuple of such.
    """
    whole_axes = normalize_axis_tuple(axes, array.ndim)
    source = with_whole_axes(array, whole_axes)

    def as_tensor(block: Any) -> DistArray:
        local = np.array(block, order="C")
        bound = [
            local.shape[axis] if axis in whole_axes else array.shape[axis]
            for axis in range(local.ndim)
        ]
        return array._with_block(
            local, Layout(source.layout.mesh, tuple(bound), source.layout.cuts)
        )

    # A matrix of one rank may be singular: then all ranks raise an error.
    found = raise_alike(array.own_comm, np.linalg.LinAlgError, lambda: function(source.host))
    if isinstance(found, tuple):
        return type(found)(*map(as_tensor, found))
    return as_tensor(found)


def of_matrices(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of `numpy.linalg` that takes a stack of matrices as a DistArray."""

    def apply_to_stack(array: DistArray, /, **options: Any) -> Any:
        return _along_matrices(lambda block: function(block, **options), array)

    return apply_to_stack


def _along_matrices(function: Callable[[Any], Any], array: DistArray) -> Any:
    if array.ndim < 2:
        raise ValueError(f"a tensor of {array.ndim} dimensions is not a stack of matrices")
    return along_axes(function, array, (-2, -1))


def solve(matrices: Any, sides: Any, /) -> DistArray:
    """Return the solutions of systems of linear equations, as `numpy.linalg.solve`.

    A vector is the right-hand side of all systems.
    """
    if np.ndim(sides) == 1:
        columns = expand_dims(distributed(sides, matrices.own_comm), -1)
        return solve(matrices, columns).squeeze(-1)
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

    solutions: DistArray = _along_matrices(solve_block, systems)
    return solutions


def transform_of(function: Callable[..., Any]) -> Callable[..., DistArray]:
    """Return a transform of `numpy.fft` along one dimension of a DistArray, or along several."""

    def transform(
        array: DistArray,
        /,
        n: int | None = None,
        axis: int = -1,
        s: Sequence[int] | None = None,
        axes: Sequence[int] | None = None,
        norm: Any = None,
    ) -> DistArray:
        options: dict[str, Any] = {"n": n, "axis": axis}
        whole_axes: Any = axis
        if function.__name__.endswith("n"):
            first = 0 if s is None else array.ndim - len(s)
            whole_axes = tuple(range(first, array.ndim) if axes is None else axes)
            options = {"s": s, "axes": whole_axes}
        transformed: DistArray = along_axes(
            lambda block: function(block, norm=norm, **options), array, whole_axes
        )
        return transformed

    return transform


def fftshift(array: DistArray, /, axes: int | Sequence[int] | None = None) -> DistArray:
    """Return the tensor with frequency zero in the middle of its dimensions."""
    return _shifted(array, axes, 1)


def ifftshift(array: DistArray, /, axes: int | Sequence[int] | None = None) -> DistArray:
    """Return the tensor with frequency zero at the start of its dimensions."""
    return _shifted(array, axes, -1)


def _shifted(array: DistArray, axes: int | Sequence[int] | None, direction: int) -> DistArray:
    """Shift dimensions by half of their extents, up (1) or down (-1)."""
    shifted_axes = range(array.ndim) if axes is None else np.atleast_1d(axes).tolist()
    shifts = [direction * (array.shape[axis] // 2) for axis in shifted_axes]
    return roll(array, shifts, shifted_axes)
