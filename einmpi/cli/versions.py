"""What einmpi runs on: libraries, compilers, GPUs. Nothing is started, and what is missing is said, not raised.

`python -m einmpi.cli.versions NAME` prints one of PROBES as JSON: a library that crashes takes only that process along.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from glob import glob
from importlib import metadata
from pathlib import Path
from typing import Any

from einmpi.units import counted, show_bytes
from einmpi.version import __version__


def about() -> str:
    """What `einmpi --version` prints."""
    lines = [f"einmpi {__version__}"]
    for name, tell in _ABOUT.items():
        try:
            text = tell()
        except Exception as error:
            text = f"none: {' '.join(str(error).split()):.200}"
        lines.append(f"{name:<8}{text}")
    return "\n".join(lines)


def gpus() -> list[str]:
    """The models of NVIDIA's GPUs that this machine lets us see, without any library."""
    found = []
    for file in sorted(glob("/proc/driver/nvidia/gpus/*/information")):
        try:
            text = Path(file).read_text()
        except OSError:
            continue
        found += [
            line.partition(":")[2].strip()
            for line in text.splitlines()
            if line.startswith("Model:")
        ]
    return found or [
        f"NVIDIA GPU {Path(device).name[6:]}" for device in sorted(glob("/dev/nvidia[0-9]*"))
    ]


def cupy_version() -> str:
    """Its packages are named after the CUDA they are for; empty where there is none."""
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return ""


def blas() -> str:
    """The BLAS that numpy has loaded."""
    import numpy  # noqa: F401  # loads it
    from threadpoolctl import threadpool_info

    for library in threadpool_info():
        if library["user_api"] == "blas":
            threads = counted(library["num_threads"], "thread")
            return f"{library['internal_api']} {library['version'] or ''} ({threads})".replace(
                "  ", " "
            )
    return ""


def _numpy() -> str:
    return f"{metadata.version('numpy')}, BLAS {blas() or 'unknown'}"


def _mpi() -> str:
    from einmpi.comm.mpi import library

    found = library()
    return f"{found['library']}, mpi4py {found['mpi4py']}"


def _hdf5() -> str:
    from einmpi.files.hdf5 import build

    found = build()
    return (
        f"{found['hdf5']} ({'parallel' if found['parallel'] else 'serial'}), h5py {found['h5py']}"
    )


def _gpu() -> str:
    return ", ".join(filter(None, [", ".join(gpus()) or "none found", cupy_version()]))


_ABOUT: dict[str, Callable[[], str]] = {
    "Python": platform.python_version,
    "numpy": _numpy,
    "MPI": _mpi,
    "HDF5": _hdf5,
    "numba": lambda: metadata.version("numba"),
    "GPU": _gpu,
}


# ---- in a process of its own ----------------------------------------------------------------------------------------


def _probe_mpi() -> Any:
    from einmpi.comm.mpi import library

    return library()


def _probe_hdf5() -> Any:
    from einmpi.files.hdf5 import build

    return build()


def _probe_numba() -> Any:
    from einmpi.kernels.cpu.cache import cache_folder  # loads numba

    folder = cache_folder()
    return {"numba": metadata.version("numba"), "folder": str(folder) if folder else ""}


def _probe_cupy() -> Any:
    from einmpi.kernels.cuda import driver

    cupy = driver.cupy()
    seen = [
        cupy.cuda.runtime.getDeviceProperties(number)
        for number in range(cupy.cuda.runtime.getDeviceCount())
    ]
    names = [f"{found['name'].decode()} ({show_bytes(found['totalGlobalMem'])})" for found in seen]
    return {"cupy": cupy.__version__, "devices": names, "nccl": driver.nccl_version()}


PROBES: dict[str, Callable[[], Any]] = {
    "mpi": _probe_mpi,
    "hdf5": _probe_hdf5,
    "numba": _probe_numba,
    "cupy": _probe_cupy,
}


def main() -> None:
    try:
        answer = PROBES[sys.argv[1]]()
    except Exception as error:
        answer = {"error": " ".join(str(error).split())[:300] or type(error).__name__}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
