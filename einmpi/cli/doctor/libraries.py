"""The doctor looks at libraries. Those that may crash are loaded in a process of their own (einmpi.cli.versions)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from einmpi.cli.doctor.finding import Finding

INSTALL_MPI = (
    "pip install 'einmpi[mpich]', or load your site's MPI (module load …) and pip install mpi4py"
)


def numpy_and_blas() -> Finding:
    from einmpi.cli.versions import blas

    version = metadata.version("numpy")
    try:
        found = blas()
    except ImportError:  # threadpoolctl, which is missed below
        found = ""
    if found:
        return Finding("numpy", "ok", f"{version}, BLAS {found}")
    return Finding(
        "numpy",
        "note",
        f"{version}, its BLAS is unknown: ranks may use more threads than they have cores",
        "export OMP_NUM_THREADS=1",
    )


def packages() -> Iterator[Finding]:
    """Those that need no look inside."""
    missing = [
        name for name in ("scipy", "opt_einsum", "rich", "threadpoolctl") if find_spec(name) is None
    ]
    if missing:
        yield Finding(
            "packages",
            "problem",
            f"missing: {', '.join(missing)}",
            f"pip install {' '.join(missing)}",
        )


def _mpi(answer: dict[str, Any]) -> Finding:
    if "error" in answer:
        return Finding(
            "mpi4py",
            "problem",
            answer["error"].removeprefix("MPI: mpi4py: ").split("; pip")[0],
            INSTALL_MPI,
        )
    device = f" ({answer['device']})" if answer["device"] else ""
    return Finding(
        "mpi4py",
        "ok",
        f"{answer['mpi4py']}, built as {answer['built']}; found {answer['library']}{device}",
    )


def _hdf5(answer: dict[str, Any]) -> Finding:
    if "error" in answer:
        return Finding("h5py", "problem", answer["error"], "pip install h5py")
    kind = "parallel" if answer["parallel"] else "serial, which is enough"
    return Finding("h5py", "ok", f"{answer['h5py']}, HDF5 {answer['hdf5']}, {kind}")


def _numba(answer: dict[str, Any]) -> Finding:
    if "error" in answer:
        return Finding("numba", "problem", answer["error"], "pip install numba")
    if not answer["folder"]:
        return Finding(
            "numba",
            "note",
            f"{answer['numba']}; its kernels cannot be kept, each run compiles them again",
            "export EINMPI_CACHE_DIR=FOLDER, one that you may write to",
        )
    return Finding("numba", "ok", f"{answer['numba']}; kernels are kept in {answer['folder']}")


def _cupy(answer: dict[str, Any]) -> Finding:
    from einmpi.cli.versions import gpus

    seen = gpus()
    if "error" not in answer and answer["devices"]:
        nccl = f"NCCL {answer['nccl']}" if answer.get("nccl") else "no NCCL"
        return Finding(
            "GPU", "ok", f"{', '.join(answer['devices'])}; cupy {answer['cupy']}, {nccl}"
        )
    if not seen:
        return Finding("GPU", "ok", "none; everything runs on CPUs")
    return Finding(
        "GPU",
        "note",
        f"{', '.join(seen)}, but cupy does not work: {answer.get('error', 'it sees no GPU')}",
        "pip install 'einmpi[cuda13]', or 'einmpi[cuda12]' with an older driver",
    )


# Each library is loaded in a process of its own: one that crashes is a finding too.
PROBES: dict[str, Callable[[dict[str, Any]], Finding]] = {
    "mpi": _mpi,
    "hdf5": _hdf5,
    "numba": _numba,
    "cupy": _cupy,
}
