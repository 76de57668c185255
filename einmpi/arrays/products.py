"""Products of DistArrays: matmul, dot, tensordot and the like, each as an einsum."""

from __future__ import annotations

from typing import Any

import numpy as np

from einmpi.arrays.einsums import product

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def matmul(left: Any, right: Any) -> Any:
    """Return the matrix product, as `numpy.matmul`."""
    left_ndim = np.ndim(left)
    right_ndim = np.ndim(right)
    if min(left_ndim, right_ndim) == 0:
        raise ValueError("matmul: a number is not a matrix; use * instead")
    _check_extents("matmul", np.shape(left)[-1], np.shape(right)[-min(2, right_ndim)])
    if left_ndim == 1 and right_ndim == 1:
        subscripts = "a,a->"
    elif left_ndim == 1:
        subscripts = "a,...ac->...c"
    elif right_ndim == 1:
        subscripts = "...ba,a->...b"
    else:
        subscripts = "...ba,...ac->...bc"
    return product("matmul", subscripts, left, right)


def _check_extents(where: str, left_extent: int, right_extent: int) -> None:
    """Refuse dimensions of different extents in a sum of products, where 1 is not repeated."""
    if left_extent != right_extent:
        raise ValueError(f"{where}: extents {left_extent} and {right_extent} differ")


def dot(left: Any, right: Any, /) -> Any:
    """Return the sum of products over the last dimension of `left`, as `numpy.dot`.

    Its counterpart is the last dimension but one of `right`, or the only one of a vector.
    """
    right_ndim = np.ndim(right)
    if np.ndim(left) == 0 or right_ndim == 0:
        return np.multiply(left, right)
    right_axis = -min(2, right_ndim)
    return tensordot(left, right, axes=([-1], [right_axis]))


def inner(left: Any, right: Any, /) -> Any:
    """Return the sum of products over the last dimensions of both."""
    if np.ndim(left) == 0 or np.ndim(right) == 0:
        return np.multiply(left, right)
    return tensordot(left, right, axes=([-1], [-1]))


def tensordot(left: Any, right: Any, /, axes: Any = 2) -> Any:
    """Return the sum of products over pairs of dimensions, as `numpy.tensordot`.

    An integer `axes` pairs that many of the last dimensions of `left` with the first of `right`.
    """
    left_shape = np.shape(left)
    right_shape = np.shape(right)
    left_ndim = len(left_shape)
    right_ndim = len(right_shape)
    if isinstance(axes, int):
        left_axes = list(range(left_ndim - axes, left_ndim))
        right_axes = list(range(axes))
    else:
        left_axes = list(np.atleast_1d(axes[0]))
        right_axes = list(np.atleast_1d(axes[1]))
    if len(left_axes) != len(right_axes):
        raise ValueError("tensordot: the number of axes differs between the two tensors")

    # Every dimension has its own label, except that those of a pair share the one of the left.
    left_labels = list(_LETTERS[:left_ndim])
    right_labels = list(_LETTERS[left_ndim : left_ndim + right_ndim])
    for left_axis, right_axis in zip(left_axes, right_axes, strict=True):
        _check_extents("tensordot", left_shape[left_axis], right_shape[right_axis])
        right_labels[right_axis] = left_labels[left_axis]
    summed = set(left_labels) & set(right_labels)
    result_labels = [label for label in left_labels + right_labels if label not in summed]

    operand_subscripts = f"{''.join(left_labels)},{''.join(right_labels)}"
    subscripts = f"{operand_subscripts}->{''.join(result_labels)}"
    return product("tensordot", subscripts, left, right)


def outer(left: Any, right: Any, /) -> Any:
    """Return the products of all pairs of elements."""
    return product("outer", "a,b->ab", np.ravel(left), np.ravel(right))


def vdot(left: Any, right: Any, /) -> Any:
    """Return the sum of the products of the conjugate elements of `left` and those of `right`."""
    _check_extents("vdot", np.size(left), np.size(right))
    return product("vdot", "a,a->", _conjugates(np.ravel(left)), np.ravel(right))


def _conjugates(array: Any) -> Any:
    """Return the conjugates of complex numbers; numpy would make int8 of bools."""
    return np.conjugate(array) if np.iscomplexobj(array) else array


def vecdot(left: Any, right: Any, /, axis: int = -1) -> Any:
    """Return the sum of products over one dimension; elements of `left` are conjugated."""
    left_last = np.moveaxis(left, axis, -1)
    right_last = np.moveaxis(right, axis, -1)
    _check_extents("vecdot", left_last.shape[-1], right_last.shape[-1])
    return product("vecdot", "...a,...a->...", _conjugates(left_last), right_last)


def trace(array: Any, /, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None) -> Any:
    """Return the sum of a diagonal of a matrix, or of two dimensions."""
    return np.sum(diagonal(array, offset, axis1, axis2), axis=-1, dtype=dtype)


def diagonal(array: Any, /, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    """Return a diagonal of a matrix, or of two dimensions."""
    matrices = np.moveaxis(array, (axis1, axis2), (0, 1))
    first_row = max(-offset, 0)
    first_column = max(offset, 0)
    extent = min(matrices.shape[0] - first_row, matrices.shape[1] - first_column)
    extent = max(extent, 0)
    rows = slice(first_row, first_row + extent)
    columns = slice(first_column, first_column + extent)
    return product("diagonal", "aa...->...a", matrices[rows, columns])
