"""CuPy, imported here when it is first needed, and what an array of its library is."""

from __future__ import annotations

from typing import Any

from einmpi.errors import InputError

EXTRAS = "pip install 'einmpi[cuda13]', or 'einmpi[cuda12]' with an older driver; or backend numpy"


def cupy(place: str = "GPU") -> Any:
    """The module cupy; an error that says what to install where it does not work."""
    try:
        import cupy  # type: ignore[import-not-found]
    except ImportError as error:
        missing = (
            "is not installed"
            if isinstance(error, ModuleNotFoundError) and error.name == "cupy"
            else (f"does not load: {' '.join(str(error).split()):.200}")
        )
        raise InputError(place, f"backend cupy needs CuPy, which {missing}", EXTRAS) from None
    return cupy


def contiguous(array: Any) -> Any:
    """An array of CuPy's with its elements in order, one after another: itself where it is that. CuPy's own function
    would make a vector of a number."""
    return array if array.flags.c_contiguous else cupy().ascontiguousarray(array)


def is_device_array(array: Any) -> bool:
    """Whether an array lies on a GPU; cupy need not be there to tell."""
    return hasattr(
        type(array), "__cuda_array_interface__"
    )  # of the array itself it would be put together
