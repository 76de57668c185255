"""The doctor looks at what starts ranks, and lets two of them send messages to each other."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from einmpi.cli.doctor.finding import Finding, answer_of, start
from einmpi.cli.doctor.libraries import INSTALL_MPI
from einmpi.cli.launch.mpirun import family_in, family_of, mpirun_command
from einmpi.errors import InputError

_NAMES = {
    "mpich": "MPICH",
    "openmpi": "Open MPI",
    "intel": "Intel MPI",
    "other": "an unknown library",
}
NO_MPIRUN = "there is no mpirun"


def launcher(library: dict[str, Any]) -> Finding:
    try:
        path = mpirun_command(2)[0]
    except InputError:
        if shutil.which("srun"):
            return Finding(
                "mpirun",
                "note",
                NO_MPIRUN,
                "srun -n P python -m einmpi JOB.toml starts ranks as well",
            )
        return Finding("mpirun", "problem", NO_MPIRUN, INSTALL_MPI)
    family, wanted = family_of(path), family_in(library.get("library", ""))
    whose = f"{path}, of {_NAMES[family]}"
    if wanted not in (family, "other") and family != "other":
        advice = (
            f"use the mpirun of {_NAMES[wanted]}: put its folder first on PATH, or load its module"
        )
        return Finding(
            "mpirun", "problem", f"{whose}, but mpi4py has found {_NAMES[wanted]}", advice
        )
    first = shutil.which("mpirun")
    if first is not None and not os.path.samefile(first, path):
        return Finding(
            "mpirun",
            "note",
            f"{whose}; but the first on PATH is {first}, of {_NAMES[family_of(first)]}",
            f"einmpi run JOB.toml -n P, or {path} -n P python -m einmpi JOB.toml",
        )
    return Finding("mpirun", "ok", whose)


def slurm(library: dict[str, Any]) -> Finding:
    found = [name for name in ("srun", "sbatch") if shutil.which(name)]
    if not found:
        return Finding("Slurm", "ok", "none; mpirun starts the ranks")
    job, tasks, nodes = (
        os.environ.get(f"SLURM_{name}", "?") for name in ("JOB_ID", "NTASKS", "JOB_NUM_NODES")
    )
    inside = (
        f"inside job {job}: {tasks} tasks on {nodes} nodes" if job != "?" else "outside of a job"
    )
    plugin = {"mpich": "pmi2", "openmpi": "pmix"}.get(family_in(library.get("library", "")))
    how = f"srun {f'--mpi={plugin} ' if plugin else ''}-n P python -m einmpi JOB.toml"
    return Finding("Slurm", "ok", f"{', '.join(found)}; {inside}; {how}")


def ping(seconds: float) -> Finding:
    answer = answer_of(start([sys.executable, "-m", "einmpi.cli.doctor.ping", "start"]), seconds)
    if "error" in answer:
        return Finding(
            "ping",
            "problem",
            f"two ranks do not reach each other: {answer['error']}",
            "EINMPI_DEBUG=1 python -m einmpi.cli.doctor.ping start shows all that mpirun says",
        )
    latency, bandwidth = answer["latency"] * 1e6, answer["bandwidth"] / 1e9
    return Finding(
        "ping", "ok", f"two ranks: {latency:.1f} µs a message, {bandwidth:.1f} GB/s for 16 MiB"
    )
