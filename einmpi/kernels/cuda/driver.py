"""The only module that imports CuPy, and only when a GPU is first needed.

The rest of the package asks here for CuPy, for NCCL, and whether an array is in GPU memory.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeAlias

from einmpi.errors import InputError

DeviceArray: TypeAlias = Any  # a cupy.ndarray; CuPy has no type annotations

WORKING_CUPY = "a working installation of CuPy, or backend numpy"
HOW_TO_INSTALL = "pip install 'einmpi[cuda13]', or 'einmpi[cuda12]' for an older driver"


def cupy(place: str = "GPU") -> Any:
    """Return the module cupy.

    Raise an InputError at `place` that says what to install if CuPy is missing or does not load.
    """
    try:
        import cupy
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            problem = "is not installed"
        else:
            message = " ".join(str(error).split())
            problem = f"does not load: {message:.200}"
        raise InputError(
            place, f"backend cupy needs CuPy, which {problem}", WORKING_CUPY, HOW_TO_INSTALL
        ) from None
    return cupy


def nccl() -> Any | None:
    """Return CuPy's NCCL module, or None if CuPy finds no NCCL library."""
    cupy()
    with warnings.catch_warnings(action="ignore"):  # CuPy warns at length if NCCL is missing
        from cupy.cuda import nccl

    return nccl if nccl.available else None


def nccl_version() -> str:
    """Return the version of the NCCL library that CuPy has found, or "" if there is none."""
    module = nccl()
    if module is None:
        return ""
    number = int(module.get_version())  # 22809 is 2.28.9
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def contiguous(array: DeviceArray) -> DeviceArray:
    """Return a C-contiguous GPU array with the same values: the array itself if it is contiguous.

    Unlike cupy.ascontiguousarray, this keeps an array without dimensions as it is.
    """
    if array.flags.c_contiguous:
        return array
    return cupy().ascontiguousarray(array)


# Whether all arrays of a type are in GPU memory; None if each has to be asked.
_TYPES_ON_DEVICE: dict[type, bool | None] = {}


def is_device_array(array: Any) -> bool:
    """Tell whether an array is in GPU memory. CuPy need not be installed for this."""
    kind = type(array)
    if kind not in _TYPES_ON_DEVICE:
        _TYPES_ON_DEVICE[kind] = _is_on_device(kind)
    is_on_device = _TYPES_ON_DEVICE[kind]
    return hasattr(array, "__cuda_array_interface__") if is_on_device is None else is_on_device


def _is_on_device(kind: type) -> bool | None:
    # Asking the type is cheap; on an instance the attribute would be assembled on every access.
    if not hasattr(kind, "__cuda_array_interface__"):
        return False
    # Arrays of torch and JAX have it only if they are on a GPU.
    return True if kind.__module__.startswith("cupy") else None
