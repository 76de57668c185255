"""What a program can ask about this namespace: dtypes, devices, abilities."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np

from einmpi.array_api.devices import CPU, check_device
from einmpi.array_api.dtypes import KINDS


class NamespaceInfo:
    """What `__array_namespace_info__()` returns."""

    def capabilities(self) -> dict[str, Any]:
        """Return what this namespace is able to do."""
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 32}

    def default_device(self) -> str:
        """Return the device of new tensors."""
        return CPU

    def devices(self) -> list[str]:
        """Return all devices."""
        return [CPU]

    def default_dtypes(self, *, device: Any = None) -> dict[str, np.dtype[Any]]:
        """Return the dtypes of new tensors, by kind."""
        check_device(device)
        return {
            "real floating": np.dtype("float64"),
            "complex floating": np.dtype("complex128"),
            "integral": np.dtype("int64"),
            "indexing": np.dtype("int64"),
        }

    def dtypes(
        self, *, device: Any = None, kind: str | tuple[str, ...] | None = None
    ) -> dict[str, np.dtype[Any]]:
        """Return the dtypes of some kinds by their names; by default all."""
        check_device(device)
        if kind is None:
            kind = ("bool", "numeric")
        kinds = (kind,) if isinstance(kind, str) else kind
        found: dict[str, np.dtype[Any]] = {}
        for one_kind in kinds:
            for dtype in KINDS[one_kind]:
                found[dtype.name] = dtype
        return found


def __array_namespace_info__() -> NamespaceInfo:
    """Return what this namespace has: dtypes, devices, abilities."""
    return NamespaceInfo()


API_VERSION = "2024.12"


def array_namespace(api_version: str | None) -> ModuleType:
    """Return this namespace, for a version of the standard that it follows."""
    if api_version is not None and api_version not in (
        "2021.12",
        "2022.12",
        "2023.12",
        API_VERSION,
    ):
        raise ValueError(f"einmpi.array_api follows version {API_VERSION}, not {api_version}")
    return importlib.import_module("einmpi.array_api")
