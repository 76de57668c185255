"""What the doctor says about launchers, and two ranks that send messages to each other."""

from __future__ import annotations

import os
import shutil
from typing import Any

from einmpi.cli.doctor.finding import Finding, read_answer, start_process
from einmpi.cli.doctor.libraries import INSTALL_MPI
from einmpi.cli.launch.mpirun import family_in, family_of, mpirun_command
from einmpi.errors import InputError
from einmpi.process.environment import python_command
from einmpi.process.variables import DEBUG_VARIABLE

NO_MPIRUN = "there is no mpirun"
_FAMILY_NAMES = {
    "mpich": "MPICH",
    "openmpi": "Open MPI",
    "intel": "Intel MPI",
    "other": "an unknown library",
}
_PMI_OF_FAMILY = {"mpich": "pmi2", "openmpi": "pmix"}


def examine_mpirun(mpi: dict[str, Any]) -> Finding:
    """Examine whether mpirun belongs to the MPI library that mpi4py has found."""
    try:
        path = mpirun_command(2)[0]
    except InputError:
        if shutil.which("srun"):
            advice = "start ranks with srun -n P python -m einmpi JOB.toml"
            return Finding("mpirun", "note", NO_MPIRUN, advice)
        return Finding("mpirun", "problem", NO_MPIRUN, INSTALL_MPI)
    family = family_of(path)
    library_family = family_in(mpi.get("library", ""))
    text = f"{path}, of {_FAMILY_NAMES[family]}"
    if family != library_family and "other" not in (family, library_family):
        library = _FAMILY_NAMES[library_family]
        problem = f"{text}, but mpi4py has found {library}"
        advice = f"use the mpirun of {library}: put its folder first on PATH, or load its module"
        return Finding("mpirun", "problem", problem, advice)
    first = shutil.which("mpirun")
    if first is not None and not os.path.samefile(first, path):
        problem = f"{text}; but the first on PATH is {first}, of {_FAMILY_NAMES[family_of(first)]}"
        advice = f"einmpi run JOB.toml -n P, or {path} -n P python -m einmpi JOB.toml"
        return Finding("mpirun", "note", problem, advice)
    return Finding("mpirun", "ok", text)


def examine_slurm(mpi: dict[str, Any]) -> Finding:
    commands = [name for name in ("srun", "sbatch") if shutil.which(name)]
    if not commands:
        return Finding("Slurm", "ok", "none; mpirun starts the ranks")
    job = os.environ.get("SLURM_JOB_ID")
    where = "outside a job"
    if job is not None:
        tasks = os.environ.get("SLURM_NTASKS", "?")
        nodes = os.environ.get("SLURM_JOB_NUM_NODES", "?")
        task_noun = "task" if tasks == "1" else "tasks"
        node_noun = "node" if nodes == "1" else "nodes"
        where = f"inside job {job}: {tasks} {task_noun} on {nodes} {node_noun}"
    pmi = _PMI_OF_FAMILY.get(family_in(mpi.get("library", "")))
    srun = f"srun --mpi={pmi}" if pmi else "srun"
    usage = f"{srun} -n P python -m einmpi JOB.toml"
    return Finding("Slurm", "ok", f"{', '.join(commands)}; {where}; {usage}")


def ping_ranks(seconds: float) -> Finding:
    """Let two ranks send messages to each other."""
    process = start_process([*python_command(), "-m", "einmpi.cli.doctor.ping", "start"])
    answer = read_answer(process, seconds)
    if "error" in answer:
        problem = f"two ranks cannot reach each other: {answer['error']}"
        advice = (
            f"{DEBUG_VARIABLE}=1 python -m einmpi.cli.doctor.ping start shows all output of mpirun"
        )
        return Finding("ping", "problem", problem, advice)
    latency = answer["latency"] * 1e6
    bandwidth = answer["bandwidth"] / 1e9
    text = f"two ranks: {latency:.1f} µs per message, {bandwidth:.1f} GB/s for 16 MiB"
    if answer["not_shared"]:
        advice = "exchanges inside a node go by messages, which is slower and takes more memory"
        return Finding(
            "ping", "note", f"{text}; they share no memory: {answer['not_shared']}", advice
        )
    return Finding("ping", "ok", f"{text}; they share memory")
