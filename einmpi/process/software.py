"""The versions of what a result was computed with, for reports and for attributes of files."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from einmpi.process.variables import DATE_VARIABLE
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


def current_date() -> str:
    """Return date and time in UTC as ISO 8601 writes them.

    SOURCE_DATE_EPOCH in the environment, in seconds since 1970, replaces the time of the clock, so
    that two runs can give the same bytes.
    """
    fixed = os.environ.get(DATE_VARIABLE, "")
    if fixed.isdecimal() and len(fixed) <= 11:
        return datetime.fromtimestamp(int(fixed), UTC).isoformat(timespec="seconds")
    return datetime.now(UTC).isoformat(timespec="seconds")


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
