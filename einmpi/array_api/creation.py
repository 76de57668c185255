"""New tensors, by the functions of the array API standard. All ranks call them together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from einmpi.array_api.calls import call
from einmpi.array_api.devices import check_device
from einmpi.compiled.dist_array import DistArray
from einmpi.kernels.given import as_numpy

DEFAULT_FLOAT = np.dtype("float64")


def asarray(
    obj: Any, /, *, dtype: Any = None, device: Any = None, copy: bool | None = None
) -> DistArray:
    """Return a tensor of numbers, nested lists of numbers or an array that every rank has."""
    check_device(device)
    if isinstance(obj, DistArray):
        return _converted(obj, dtype, copy)
    if copy is False:
        raise ValueError("a new tensor has copies of the elements; copy=False is not possible")
    return DistArray.from_global(as_numpy("asarray", "obj", _with_numbers(obj), dtype))


def _with_numbers(obj: Any) -> Any:
    """Return nested lists with numbers in place of tensors without dimensions."""
    if isinstance(obj, list | tuple):
        return [_with_numbers(part) for part in obj]
    if isinstance(obj, DistArray):
        return obj.gather()
    return obj


def _converted(array: DistArray, dtype: Any, copy: bool | None) -> DistArray:
    is_same_dtype = dtype is None or array.dtype == dtype
    if copy is False and not is_same_dtype:
        raise ValueError("another dtype needs a copy of the elements")
    if not is_same_dtype:
        return array.astype(dtype)
    if copy:
        return array.copy()
    return array


def from_dlpack(x: Any, /, *, device: Any = None, copy: bool | None = None) -> DistArray:
    """Return the tensor of an object of another library, which every rank has."""
    check_device(device)
    if isinstance(x, DistArray):
        return _converted(x, None, copy)
    return DistArray.from_global(x)


def empty(shape: int | Sequence[int], *, dtype: Any = None, device: Any = None) -> DistArray:
    """Return a tensor of zeros: no element is left to chance."""
    return zeros(shape, dtype=dtype, device=device)


def zeros(shape: int | Sequence[int], *, dtype: Any = None, device: Any = None) -> DistArray:
    """Return a tensor of zeros."""
    check_device(device)
    return DistArray.zeros(shape, DEFAULT_FLOAT if dtype is None else dtype)


def ones(shape: int | Sequence[int], *, dtype: Any = None, device: Any = None) -> DistArray:
    """Return a tensor of ones."""
    check_device(device)
    return DistArray.ones(shape, DEFAULT_FLOAT if dtype is None else dtype)


def full(
    shape: int | Sequence[int], fill_value: Any, *, dtype: Any = None, device: Any = None
) -> DistArray:
    """Return a tensor of equal elements."""
    check_device(device)
    return DistArray.full(shape, fill_value, dtype)


def empty_like(x: DistArray, /, *, dtype: Any = None, device: Any = None) -> DistArray:
    """Return a tensor of zeros of the shape, and in the layout, of another one."""
    return full_like(x, 0, dtype=dtype, device=device)


def zeros_like(x: DistArray, /, *, dtype: Any = None, device: Any = None) -> DistArray:
    """Return a tensor of zeros of the shape, and in the layout, of another one."""
    return full_like(x, 0, dtype=dtype, device=device)


def ones_like(x: DistArray, /, *, dtype: Any = None, device: Any = None) -> DistArray:
    """Return a tensor of ones of the shape, and in the layout, of another one."""
    return full_like(x, 1, dtype=dtype, device=device)


def full_like(
    x: DistArray, /, fill_value: Any, *, dtype: Any = None, device: Any = None
) -> DistArray:
    """Return a tensor of equal elements of the shape, and in the layout, of another one."""
    check_device(device)
    return call(np.full_like, x, fill_value, dtype=dtype)


def arange(
    start: float,
    /,
    stop: float | None = None,
    step: float = 1,
    *,
    dtype: Any = None,
    device: Any = None,
) -> DistArray:
    """Return numbers from `start` up to `stop`, which is not among them."""
    check_device(device)
    if stop is None:
        stop = start
        start = 0
    if step == 0:
        raise ValueError("arange: the step is 0")
    count = max(math.ceil((stop - start) / step), 0)
    if dtype is None:
        dtype = np.result_type(type(start), type(stop), type(step))

    def value(index: Any) -> Any:
        return start + index * step

    return DistArray.from_function(value, count, dtype)


def linspace(
    start: complex,
    stop: complex,
    /,
    num: int,
    *,
    dtype: Any = None,
    device: Any = None,
    endpoint: bool = True,
) -> DistArray:
    """Return evenly spaced numbers from `start` to `stop`."""
    check_device(device)
    return DistArray.from_global(np.linspace(start, stop, num, endpoint=endpoint, dtype=dtype))


def eye(
    n_rows: int,
    n_cols: int | None = None,
    /,
    *,
    k: int = 0,
    dtype: Any = None,
    device: Any = None,
) -> DistArray:
    """Return a matrix with ones on its k-th diagonal and zeros elsewhere."""
    check_device(device)
    columns = n_rows if n_cols is None else n_cols
    wanted = DEFAULT_FLOAT if dtype is None else dtype
    return DistArray.from_function(lambda i, j: j == i + k, (n_rows, columns), wanted)


def meshgrid(*arrays: DistArray, indexing: Literal["xy", "ij"] = "xy") -> list[DistArray]:
    """Return, for each vector of coordinates, its values at all points of the grid."""
    grids: Any = np.meshgrid(*arrays, indexing=indexing)
    return list(grids)


def tril(x: DistArray, /, *, k: int = 0) -> DistArray:
    """Return the tensor with zeros above the k-th diagonal of its last two dimensions."""
    return call(np.tril, x, k=k)


def triu(x: DistArray, /, *, k: int = 0) -> DistArray:
    """Return the tensor with zeros below the k-th diagonal of its last two dimensions."""
    return call(np.triu, x, k=k)
