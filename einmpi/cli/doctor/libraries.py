"""What the doctor says about libraries. Each is loaded in a process of its own, as it may crash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from einmpi.cli.doctor.finding import Finding
from einmpi.errors import InputError
from einmpi.process.variables import (
    BLAS_VARIABLE,
    CACHE_VARIABLE,
    GRAPHS_VARIABLE,
    graphs_are_on,
)

INSTALL_MPI = (
    "pip install 'einmpi[mpich]', or load your site's MPI (module load …) and pip install mpi4py"
)
_OTHER_PACKAGES = ("scipy", "opt_einsum", "rich", "threadpoolctl")


def examine_numpy() -> Finding:
    from einmpi.cli.versions import describe_blas

    version = metadata.version("numpy")
    try:
        blas = describe_blas()
    except ImportError:  # of threadpoolctl, which `examine_packages` reports
        blas = ""
    if blas:
        return Finding("numpy", "ok", f"{version}, BLAS {blas}")
    problem = f"{version}, unknown BLAS: ranks may use more threads than they have cores"
    return Finding("numpy", "note", problem, "export OMP_NUM_THREADS=1")


def examine_packages() -> Iterator[Finding]:
    """Report required packages that are not installed."""
    missing = [name for name in _OTHER_PACKAGES if find_spec(name) is None]
    if missing:
        problem = f"missing: {', '.join(missing)}"
        yield Finding("packages", "problem", problem, f"pip install {' '.join(missing)}")


def _examine_blas(answer: dict[str, Any]) -> Finding:
    if "error" in answer:
        advice = f"export {BLAS_VARIABLE}=numpy, or the name or path of a library that works"
        return Finding("BLAS", "problem", answer["error"], advice)
    if answer["path"]:
        return Finding("BLAS", "ok", f"{answer['blas']}, {answer['path']}")
    text = f"{answer['blas']}; {answer['reason']}"
    if answer["problem"]:
        advice = f"mend it, or export {BLAS_VARIABLE}=numpy"
        return Finding("BLAS", "note", f"{text}: {answer['problem']}", advice)
    return Finding("BLAS", "ok", text)


def _examine_mpi(answer: dict[str, Any]) -> Finding:
    if "error" in answer:
        problem = answer["error"].removeprefix("MPI: mpi4py: ").split("; pip")[0]
        return Finding("mpi4py", "problem", problem, INSTALL_MPI)
    text = f"{answer['mpi4py']}, built as {answer['built']}; found {answer['library']}"
    if answer["device"]:
        text += f" ({answer['device']})"
    return Finding("mpi4py", "ok", text)


def _examine_hdf5(answer: dict[str, Any]) -> Finding:
    if "error" in answer:
        return Finding("h5py", "problem", answer["error"], "pip install h5py")
    kind = "parallel" if answer["parallel"] else "serial (sufficient)"
    return Finding("h5py", "ok", f"{answer['h5py']}, HDF5 {answer['hdf5']}, {kind}")


def _examine_numba(answer: dict[str, Any]) -> Finding:
    if "error" in answer:
        return Finding("numba", "problem", answer["error"], "pip install numba")
    if not answer["folder"]:
        consequence = "kernels cannot be cached, so each run compiles them again"
        problem = f"{answer['numba']}; {consequence}: {answer['problem']}"
        advice = f"export {CACHE_VARIABLE}=FOLDER, with a folder that only you can write to"
        return Finding("numba", "note", problem, advice)
    return Finding("numba", "ok", f"{answer['numba']}; kernels are cached in {answer['folder']}")


def _examine_cupy(answer: dict[str, Any]) -> Finding:
    from einmpi.cli.versions import visible_gpus

    if "error" not in answer and answer["devices"]:
        nccl = f"NCCL {answer['nccl']}" if answer.get("nccl") else "no NCCL"
        devices = ", ".join(answer["devices"])
        text = f"{devices}; cupy {answer['cupy']}, {nccl}"
        try:
            return Finding("GPU", "ok", text if graphs_are_on() else f"{text}, no CUDA graphs")
        except InputError as error:
            return Finding("GPU", "problem", f"{text}; {error}", f"unset {GRAPHS_VARIABLE}")
    gpus = visible_gpus()
    if not gpus:
        return Finding("GPU", "ok", "none; everything runs on CPUs")
    reason = answer.get("error", "it sees no GPU")
    problem = f"{', '.join(gpus)}, but cupy does not work: {reason}"
    advice = "pip install 'einmpi[cuda13]', or 'einmpi[cuda12]' with an older driver"
    return Finding("GPU", "note", problem, advice)


# How to turn the answer of einmpi.cli.versions into a finding.
PROBES: dict[str, Callable[[dict[str, Any]], Finding]] = {
    "blas": _examine_blas,
    "mpi": _examine_mpi,
    "hdf5": _examine_hdf5,
    "numba": _examine_numba,
    "cupy": _examine_cupy,
}
