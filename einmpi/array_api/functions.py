"""The functions of the array API standard that are more than a call of numpy's, and its dtypes.

All ranks call them together.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np

from einmpi.arrays.dist_array import DistArray, call
from einmpi.arrays.elementwise import as_complex, each_part
from einmpi.arrays.moving import distributed
from einmpi.kernels.reference import as_numpy

API_VERSION = "2025.12"
CPU = "cpu"  # the only device of new DistArrays: the memory of the ranks
DEFAULT_FLOAT = np.dtype("float64")


def check_device(device: Any) -> None:
    """Refuse devices other than the ranks' own memory."""
    if device is not None and device != CPU:
        raise ValueError(f"there is no device {device!r}; new DistArrays are on {CPU!r}")


# ---- dtypes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FloatInfo:
    """The limits of a floating-point dtype, as Python numbers."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class IntegerInfo:
    """The limits of an integer dtype, as Python numbers."""

    bits: int
    max: int
    min: int
    dtype: np.dtype[Any]


def _dtype_of(array_or_dtype: Any) -> np.dtype[Any]:
    if isinstance(array_or_dtype, DistArray):
        return array_or_dtype.dtype
    dtype: np.dtype[Any] = np.dtype(array_or_dtype)
    return dtype


def can_cast(from_: Any, to: Any, /) -> bool:
    """Return whether a dtype is converted to another one by the rules of promotion."""
    return np.can_cast(_dtype_of(from_), _dtype_of(to))


def finfo(type: Any, /) -> FloatInfo:
    """Return the limits of a floating-point dtype, or of the parts of a complex one."""
    limits = np.finfo(_dtype_of(type))
    return FloatInfo(
        bits=limits.bits,
        eps=float(limits.eps),
        max=float(limits.max),
        min=float(limits.min),
        smallest_normal=float(limits.smallest_normal),
        dtype=limits.dtype,
    )


def iinfo(type: Any, /) -> IntegerInfo:
    """Return the limits of an integer dtype."""
    limits = np.iinfo(_dtype_of(type))
    return IntegerInfo(
        bits=limits.bits, max=int(limits.max), min=int(limits.min), dtype=limits.dtype
    )


def isdtype(dtype: Any, kind: Any) -> bool:
    """Return whether a dtype is of a kind: a dtype, the name of a kind, or a tuple of these."""
    return np.isdtype(dtype, kind)


def result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    """Return the dtype of a result of tensors, dtypes and Python numbers."""
    return np.result_type(*arrays_and_dtypes)


# ---- the namespace -------------------------------------------------------------------------------


_numpy_info: Any = type(np.__array_namespace_info__())


class NamespaceInfo(_numpy_info):  # type: ignore[misc]  # numpy does not declare it
    """What `__array_namespace_info__()` returns: what numpy does, but for the dimensions."""

    def capabilities(self) -> dict[str, Any]:
        """Return what this namespace is able to do."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 32}

    def devices(self) -> tuple[str, ...]:
        """Return all devices."""
        return (CPU,)


def __array_namespace_info__() -> NamespaceInfo:
    """Return what this namespace has: dtypes, devices, abilities."""
    return NamespaceInfo()


def array_namespace(api_version: str | None) -> ModuleType:
    """Return this namespace, for a version of the standard that it follows."""
    if api_version is not None and api_version not in (
        "2021.12",
        "2022.12",
        "2023.12",
        "2024.12",
        API_VERSION,
    ):
        raise ValueError(f"einmpi.array_api follows version {API_VERSION}, not {api_version}")
    return importlib.import_module("einmpi.array_api")


# ---- new tensors ---------------------------------------------------------------------------------


def on_cpu(function: Callable[..., Any]) -> Callable[..., DistArray]:
    """Return a function of DistArrays that takes a device too, which is the ranks' own memory."""

    def call_on_cpu(*arguments: Any, device: Any = None, **options: Any) -> DistArray:
        check_device(device)
        return call(function, *arguments, **options)

    return call_on_cpu


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


def full(
    shape: int | Sequence[int], fill_value: Any, *, dtype: Any = None, device: Any = None
) -> DistArray:
    """Return a tensor of equal elements."""
    check_device(device)
    return DistArray.full(shape, fill_value, dtype)


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
    k = max(-n_rows, min(k, columns))  # beyond the matrix; an int64 may not hold a greater one
    return DistArray.from_function(lambda i, j: j == i + k, (n_rows, columns), wanted)


def meshgrid(*arrays: DistArray, indexing: Literal["xy", "ij"] = "xy") -> tuple[DistArray, ...]:
    """Return, for each vector of coordinates, its values at all points of the grid."""
    grids: Any = np.meshgrid(*arrays, indexing=indexing)
    return tuple(grids)


def fftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> DistArray:
    """Return the frequencies of a transform of `n` elements, a distance `d` apart."""
    return _frequencies(np.fft.fftfreq(n, d), dtype, device)


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> DistArray:
    """Return the frequencies of a transform of `n` real elements, a distance `d` apart."""
    return _frequencies(np.fft.rfftfreq(n, d), dtype, device)


def _frequencies(values: Any, dtype: Any, device: Any) -> DistArray:
    check_device(device)
    return DistArray.from_global(values.astype(DEFAULT_FLOAT if dtype is None else dtype))


# ---- functions of tensors ------------------------------------------------------------------------


def clip(x: DistArray, /, min: Any = None, max: Any = None) -> DistArray:
    """Limit the elements to the range from `min` to `max`; the dtype stays."""
    clipped = call(np.clip, x, min, max)
    return clipped.astype(x.dtype)


def broadcast_arrays(*arrays: DistArray) -> tuple[DistArray, ...]:
    """Return tensors with their elements repeated so that all have the same shape."""
    repeated: Any = np.broadcast_arrays(*arrays)
    return tuple(repeated)


def isin(x1: Any, x2: Any, /, *, invert: bool = False) -> DistArray:
    """Return whether each element of `x1` is one of `x2`."""
    if not isinstance(x1, DistArray):
        x1 = distributed(x1, x2.own_comm)
    return call(np.isin, x1, x2, invert=invert)


def sort(
    x: DistArray, /, *, axis: int = -1, descending: bool = False, stable: bool = True
) -> DistArray:
    """Return the elements in order along a dimension."""
    ascending = call(np.sort, x, axis=axis)
    if descending:
        return call(np.flip, ascending, axis)
    return ascending


def argsort(
    x: DistArray, /, *, axis: int = -1, descending: bool = False, stable: bool = True
) -> DistArray:
    """Return the indices that sort the elements; equal elements keep their order."""
    if not descending:
        return call(np.argsort, x, axis=axis)
    # The ascending order of the reversed elements, read backwards: equal ones keep their order.
    backwards = call(np.argsort, call(np.flip, x, axis), axis=axis)
    last_index = x.shape[axis] - 1
    descending_order: DistArray = last_index - call(np.flip, backwards, axis)
    return descending_order


def cross(x1: DistArray, x2: DistArray, /, *, axis: int = -1) -> DistArray:
    """Return the cross products of vectors of three elements."""
    if x1.shape[axis] != 3 or x2.shape[axis] != 3:
        raise ValueError("cross products are of vectors of three elements")
    left = call(np.moveaxis, x1, axis, -1)
    right = call(np.moveaxis, x2, axis, -1)
    components: list[DistArray] = []
    for first, second in ((1, 2), (2, 0), (0, 1)):
        positive = left[..., first] * right[..., second]
        negative = left[..., second] * right[..., first]
        components.append(positive - negative)
    return call(np.stack, components, axis=axis)


def eig(x: DistArray, /) -> Any:
    """Return the eigenvalues and eigenvectors of each matrix of a stack, as complex numbers."""
    return each_part(call(np.linalg.eig, x), as_complex)


def eigvals(x: DistArray, /) -> DistArray:
    """Return the eigenvalues of each matrix of a stack, as complex numbers."""
    return call(as_complex, call(np.linalg.eigvals, x))


def matrix_rank(x: DistArray, /, *, rtol: Any = None) -> DistArray:
    """Return the rank of each matrix of a stack; `rtol` may have a number for each."""
    if not isinstance(rtol, DistArray):
        return call(np.linalg.matrix_rank, x, rtol=rtol)
    return call(np.count_nonzero, _are_counted(call(np.linalg.svdvals, x), rtol), axis=-1)


def pinv(x: DistArray, /, *, rtol: Any = None) -> DistArray:
    """Return the pseudo-inverse of each matrix of a stack; `rtol` may have a number for each."""
    if not isinstance(rtol, DistArray) or not x.size:
        return call(np.linalg.pinv, x, rtol=None if isinstance(rtol, DistArray) else rtol)
    left, values, right = call(np.linalg.svd, x, full_matrices=False)
    is_counted = _are_counted(values, rtol)
    inverses = is_counted / call(np.where, is_counted, values, 1)
    # Of U S V the pseudo-inverse is the conjugate transpose of U S⁻¹ V.
    product = (left * inverses[..., None, :]) @ right
    return call(np.conj, call(np.matrix_transpose, product))


def _are_counted(values: DistArray, rtol: DistArray) -> DistArray:
    """Return which singular values are greater than `rtol` times the greatest of their matrix."""
    is_greater: DistArray = values > rtol[..., None] * call(np.max, values, axis=-1, keepdims=True)
    return is_greater
