"""What einmpi runs on: libraries, compilers, GPUs. Missing things are reported, not raised.

`python -m einmpi.cli.versions NAME` prints one of PROBES as JSON, so that a library that crashes
takes only that process along.
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

from einmpi.process.environment import blas_name, loaded_blas
from einmpi.units import counted, show_bytes
from einmpi.version import __version__


def describe_versions() -> str:
    """Return the text of `einmpi --version`."""
    lines = [f"einmpi {__version__}"]
    for name, describe in _DESCRIPTIONS.items():
        try:
            text = describe()
        except Exception as error:
            reason = " ".join(str(error).split())
            text = f"none: {reason[:200]}"
        lines.append(f"{name:<8}{text}")
    return "\n".join(lines)


def visible_gpus() -> list[str]:
    """Return the models of the NVIDIA GPUs that this process can see, without any library."""
    models = []
    for file in sorted(glob("/proc/driver/nvidia/gpus/*/information")):
        try:
            text = Path(file).read_text()
        except OSError:
            continue
        for line in text.splitlines():
            if line.startswith("Model:"):
                models.append(line.partition(":")[2].strip())
    if models:
        return models
    devices = sorted(glob("/dev/nvidia[0-9]*"))
    return [f"NVIDIA GPU {Path(device).name.removeprefix('nvidia')}" for device in devices]


def cupy_version() -> str:
    """Return the name and version of the CuPy package, or an empty text."""
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):  # named after their CUDA
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return ""


def describe_blas() -> str:
    """Return the BLAS that numpy has loaded, or an empty text if it is unknown."""
    library = loaded_blas()
    if library is None:
        return ""
    return f"{blas_name(library)} ({counted(library['num_threads'], 'thread')})"


def _describe_numpy() -> str:
    return f"{metadata.version('numpy')}, BLAS {describe_blas() or 'unknown'}"


def _describe_mpi() -> str:
    found = _probe_mpi()
    return f"{found['library']}, mpi4py {found['mpi4py']}"


def _describe_hdf5() -> str:
    found = _probe_hdf5()
    kind = "parallel" if found["parallel"] else "serial"
    return f"{found['hdf5']} ({kind}), h5py {found['h5py']}"


def _describe_gpus() -> str:
    text = ", ".join(visible_gpus()) or "none found"
    cupy = cupy_version()
    return f"{text}, {cupy}" if cupy else text


_DESCRIPTIONS: dict[str, Callable[[], str]] = {
    "Python": platform.python_version,
    "numpy": _describe_numpy,
    "MPI": _describe_mpi,
    "HDF5": _describe_hdf5,
    "numba": lambda: metadata.version("numba"),
    "GPU": _describe_gpus,
}


# ---- in a process of its own ---------------------------------------------------------------------


def _probe_mpi() -> dict[str, Any]:
    from einmpi.comm.mpi_library import library

    return library()


def _probe_hdf5() -> dict[str, Any]:
    from einmpi.files.hdf5.datasets import build

    return build()


def _probe_blas() -> dict[str, Any]:
    from einmpi.kernels.cpu.blas_library.choice import use_blas

    choice = use_blas()
    path = "" if choice.library is None else choice.library.path
    return {"blas": str(choice), "path": path, "reason": choice.reason, "problem": choice.problem}


def _probe_numba() -> dict[str, Any]:
    from einmpi.kernels.cpu.cache import cache_folder  # loads numba

    found = cache_folder()
    folder = str(found.folder) if found.folder else ""
    return {"numba": metadata.version("numba"), "folder": folder, "problem": found.problem}


def _probe_cupy() -> dict[str, Any]:
    from einmpi.kernels.cuda import driver

    cupy = driver.cupy()
    devices = []
    for number in range(cupy.cuda.runtime.getDeviceCount()):
        properties = cupy.cuda.runtime.getDeviceProperties(number)
        name = properties["name"].decode()
        devices.append(f"{name} ({show_bytes(properties['totalGlobalMem'])})")
    return {"cupy": cupy.__version__, "devices": devices, "nccl": driver.nccl_version()}


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "blas": _probe_blas,
    "mpi": _probe_mpi,
    "hdf5": _probe_hdf5,
    "numba": _probe_numba,
    "cupy": _probe_cupy,
}


def main() -> None:
    try:
        answer = PROBES[sys.argv[1]]()
    except Exception as error:
        reason = " ".join(str(error).split())
        answer = {"error": reason[:300] or type(error).__name__}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
