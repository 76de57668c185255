"""The dtypes of the array API standard, and its functions of dtypes."""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from typing import Any

import numpy as np

from einmpi.array_api.calls import call
from einmpi.array_api.devices import check_device
from einmpi.compiled.dist_array import DistArray

bool = np.dtype("bool")
int8 = np.dtype("int8")
int16 = np.dtype("int16")
int32 = np.dtype("int32")
int64 = np.dtype("int64")
uint8 = np.dtype("uint8")
uint16 = np.dtype("uint16")
uint32 = np.dtype("uint32")
uint64 = np.dtype("uint64")
float32 = np.dtype("float32")
float64 = np.dtype("float64")
complex64 = np.dtype("complex64")
complex128 = np.dtype("complex128")

SIGNED_INTEGERS = (int8, int16, int32, int64)
UNSIGNED_INTEGERS = (uint8, uint16, uint32, uint64)
REAL_FLOATS = (float32, float64)
COMPLEX_FLOATS = (complex64, complex128)
# The dtypes of each kind that the standard names.
KINDS: dict[str, tuple[np.dtype[Any], ...]] = {
    "bool": (bool,),
    "signed integer": SIGNED_INTEGERS,
    "unsigned integer": UNSIGNED_INTEGERS,
    "integral": SIGNED_INTEGERS + UNSIGNED_INTEGERS,
    "real floating": REAL_FLOATS,
    "complex floating": COMPLEX_FLOATS,
    "numeric": SIGNED_INTEGERS + UNSIGNED_INTEGERS + REAL_FLOATS + COMPLEX_FLOATS,
}


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


def astype(
    x: DistArray, dtype: Any, /, *, copy: builtins.bool = True, device: Any = None
) -> DistArray:
    """Return the elements converted to another dtype."""
    check_device(device)
    return call(np.astype, x, np.dtype(dtype), copy=copy)


def can_cast(from_: Any, to: Any, /) -> builtins.bool:
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


def isdtype(dtype: Any, kind: Any) -> builtins.bool:
    """Return whether a dtype is of a kind: a dtype, the name of a kind, or a tuple of these."""
    if isinstance(kind, tuple):
        return any(isdtype(dtype, one_kind) for one_kind in kind)
    if isinstance(kind, str):
        if kind not in KINDS:
            raise ValueError(f"unknown kind of dtypes {kind!r}; there are {', '.join(KINDS)}")
        return np.dtype(dtype) in KINDS[kind]
    return builtins.bool(np.dtype(dtype) == np.dtype(kind))


def result_type(*arrays_and_dtypes: Any) -> np.dtype[Any]:
    """Return the dtype of a result of tensors, dtypes and Python numbers."""
    return np.result_type(*arrays_and_dtypes)
