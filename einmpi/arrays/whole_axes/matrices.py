"""Functions of matrices: a stack of them is cut over the ranks, and each is whole on a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from einmpi.arrays.programs import raise_alike
from einmpi.arrays.shapes import concatenate, expand_dims, squeeze
from einmpi.arrays.whole_axes.layout import with_whole_axes
from einmpi.compiled.dist_array import DistArray
from einmpi.schedule.layout import Layout


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
        return DistArray(local, layout, array.own_comm)

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
        return squeeze(solve(matrices, _as_column(matrices, sides)), -1)
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


def _as_column(matrices: Any, vector: Any) -> DistArray:
    """Return a vector as a matrix of one column, distributed over the ranks."""
    if not isinstance(vector, DistArray):
        vector = DistArray.from_global(vector, matrices.own_comm)
    return expand_dims(vector, -1)
