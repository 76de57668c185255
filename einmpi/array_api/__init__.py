"""The namespace of the Python array API standard, whose arrays are DistArrays.

All ranks make these calls together. New tensors are on all ranks of the world.
"""

import math
from typing import Any

import numpy as np

from einmpi.array_api import fft, functions, linalg, table
from einmpi.arrays.methods import make_functions

# The functions that are written out.
_WRITTEN = (
    "__array_namespace_info__ arange argsort asarray broadcast_arrays can_cast clip eye finfo "
    "from_dlpack full iinfo isdtype isin linspace meshgrid result_type sort"
)
# Functions beyond the standard that libraries expect of any namespace: those of numpy.
_MORE = "bool_ concatenate cross einsum gradient lib pad quantile transpose"
_NAMES = {
    "__array_api_version__": functions.API_VERSION,
    "e": math.e,
    "fft": fft,
    "inf": math.inf,
    "linalg": linalg,
    "nan": math.nan,
    "newaxis": None,
    "pi": math.pi,
    **functions.__array_namespace_info__().dtypes(),
    **{name: getattr(functions, name) for name in _WRITTEN.split()},
    **{name: getattr(linalg, name) for name in table.PRODUCTS},
    **make_functions(table.MAIN, __name__),
}
globals().update(_NAMES)
__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name in _MORE.split():
        return getattr(np, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
