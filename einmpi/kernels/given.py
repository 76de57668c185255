"""Refuse arrays whose meaning numpy would drop: masks, sparse matrices, tables with row names."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.errors import InputError

# Other containers of numbers: the module of a class, what it is, and how it becomes an array. The
# packages are never imported.
_OTHER_CONTAINERS = (
    ("scipy.sparse", "a sparse array", ".toarray()"),
    ("cupyx.scipy.sparse", "a sparse array", ".toarray()"),
    ("pandas", "a pandas object", ".to_numpy()"),
    ("polars", "a polars object", ".to_numpy()"),
)


def check_plain_array(where: str, name: str, given: Any) -> None:
    """Refuse a masked array, a sparse array, a table, or a list that contains one."""
    if type(given) is np.ndarray:
        return
    if isinstance(given, list | tuple):
        for item in given:
            # Most lists hold numbers, perhaps many.
            if not isinstance(item, int | float | complex | str):
                check_plain_array(where, name, item)
        return
    # Without this module there are no masked arrays; to import it would take a while. Another
    # thread may be importing it at this moment.
    masked_array = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    if masked_array is not None and isinstance(given, masked_array):
        raise InputError(
            where,
            f"{name} is a masked array",
            "an array without a mask",
            "fill masked elements with filled(VALUE), or use where() with the mask as an input",
        )
    for base in type(given).__mro__:
        for module, description, method in _OTHER_CONTAINERS:
            if base.__module__ == module or base.__module__.startswith(f"{module}."):
                raise InputError(
                    where,
                    f"{name} is {description}, {type(given).__name__}",
                    "a numpy array",
                    f"convert it with {method}",
                )


def as_numpy(where: str, name: str, given: Any, dtype: Any = None) -> npt.NDArray[Any]:
    """Return what a caller gave as a numpy array, of a dtype if there is one."""
    check_plain_array(where, name, given)
    try:
        return np.asarray(given, dtype)
    except (ValueError, TypeError) as error:
        raise InputError(where, f"{name} is not an array: {error}", "an array of numbers") from None
