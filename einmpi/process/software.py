"""The versions of what a result was computed with, for reports and for attributes of files."""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from typing import Any

from einmpi.version import __version__

PACKAGES = ("numpy", "scipy", "numba", "h5py", "mpi4py")


def software_versions() -> dict[str, str]:
    """Return the versions of einmpi, Python and the packages that compute, by name."""
    versions = {"einmpi": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None:  # not loaded only to be named
        first_line = mpi.Get_library_version().splitlines()[0]
        versions["mpi"] = " ".join(first_line.split(",")[0].split())
    return versions


def loaded_blas() -> dict[str, Any] | None:
    """Return what threadpoolctl knows of the BLAS that numpy uses; None if it is unknown."""
    import numpy  # noqa: F401  # loads it
    from threadpoolctl import threadpool_info

    found = [library for library in threadpool_info() if library["user_api"] == "blas"]
    for library in found:
        if "numpy" in library["filepath"]:  # scipy may have loaded another one
            return dict(library)
    return dict(found[0]) if found else None


def blas_name(library: dict[str, Any] | None) -> str:
    """Return the name and version of a BLAS; an empty text without one."""
    if library is None:
        return ""
    words = [library["internal_api"], library["version"] or ""]
    return " ".join(word for word in words if word)
