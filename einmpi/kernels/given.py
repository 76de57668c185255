"""Arrays that are only values become numpy arrays; those that mean more are refused."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.errors import InputError


def plain_array(where: str, name: str, given: Any) -> Any:
    """Return an array or column of any library in host memory as a plain numpy array.

    One that would lose something is refused, also in a list: units, masked or missing elements,
    names of columns, the form of a sparse array. All else is returned as it is.
    """
    if type(given) in (np.ndarray, np.memmap):
        return given
    if isinstance(given, list | tuple):
        for item in given:
            # Most lists hold numbers, perhaps many.
            if not isinstance(item, int | float | complex | str):
                plain_array(where, name, item)
        return given
    more, hint = _more_than_values(given)
    if more:
        what = f"{name} is {more}, {type(given).__name__}"
        raise InputError(where, what, "an array of numbers alone", hint)
    if isinstance(given, np.ndarray) or is_of_other_library(given):
        return _as_numpy(where, name, given)
    return given


def as_numpy(where: str, name: str, given: Any, dtype: Any = None) -> npt.NDArray[Any]:
    """Return what a caller gave as a numpy array, of a dtype if there is one."""
    return _as_numpy(where, name, plain_array(where, name, given), dtype)


def is_of_other_library(given: Any) -> bool:
    """Return whether this is another library's array in host memory, or a column of a table."""
    kind = type(given)
    if hasattr(kind, "__dlpack__"):  # torch and JAX have it on any device
        return not hasattr(given, "__cuda_array_interface__")
    return hasattr(kind, "to_numpy") and not hasattr(kind, "dims")  # xarray's are read by boxes


def _as_numpy(where: str, name: str, given: Any, dtype: Any = None) -> npt.NDArray[Any]:
    try:
        # Neither numpy's DLPack nor torch's arrays of numpy know bfloat16. To view a tensor as
        # integers would drop its gradient without a word, where torch refuses all others.
        if str(getattr(given, "dtype", "")) == "torch.bfloat16" and not given.requires_grad:
            bits = given.view(sys.modules["torch"].uint16)
            return np.asarray(np.from_dlpack(bits).view("bfloat16"), dtype)
        if hasattr(type(given), "__dlpack__") and not hasattr(type(given), "__array__"):
            given = np.from_dlpack(given)
        return np.asarray(given, dtype)
    except (ValueError, TypeError, RuntimeError, BufferError) as error:
        raise InputError(where, f"{name} is not an array: {error}", "an array of numbers") from None


def _more_than_values(given: Any) -> tuple[str, str]:
    """Return what an array is that has more than values, and what to write instead; else "".

    Packages are never imported for this: their types are known by what they have.
    """
    kind = type(given)
    if hasattr(kind, "toarray"):
        return "a sparse array", "convert it with .toarray()"
    if hasattr(kind, "columns") or hasattr(kind, "__dataframe__"):
        return "a table", "give its columns one by one, or all of them with .to_numpy()"
    if hasattr(kind, "to_numpy"):
        if _missing_values(given):
            return "a column with missing values", "replace them by fillna(VALUE), fill_null(VALUE)"
        return "", ""
    is_array = isinstance(given, np.ndarray)
    if is_array and np.any(getattr(given, "mask", False)):
        hint = "fill masked elements with filled(VALUE), or use where() with the mask as an input"
        return "a masked array", hint
    has_units = given if is_array else kind  # attributes of a file's data may have these names
    if hasattr(has_units, "unit") or hasattr(has_units, "units"):
        return "an array with units", "give its numbers in a unit that you choose, .to_value(UNIT)"
    return "", ""


def _missing_values(column: Any) -> int:
    """Return how many elements are missing; nan is a value, unless pandas keeps a mask."""
    nulls = getattr(column, "null_count", 0)  # a method of polars, a number of pyarrow
    if hasattr(column, "isna") and not isinstance(column.dtype, np.dtype):
        nulls = column.isna().sum()
    return int(nulls() if callable(nulls) else nulls)
