"""Everything that the doctor examines, in order."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib.util import find_spec

from einmpi.cli.doctor.finding import Finding, read_answer, start_process
from einmpi.cli.doctor.libraries import PROBES, examine_numpy, examine_packages
from einmpi.cli.doctor.machine import (
    examine_limits,
    examine_machine,
    examine_shared_memory,
    examine_temporary_folder,
)
from einmpi.cli.doctor.ranks import NO_MPIRUN, examine_mpirun, examine_slurm, ping_ranks
from einmpi.process.environment import python_command

_LOADING_SECONDS = 60.0  # for a library


def examine(ping_seconds: float, is_launched: bool = False) -> Iterator[Finding]:
    """Yield one finding after another.

    `is_launched` says that a launcher started this process, which then cannot start ranks itself.
    """
    # All libraries are loaded at the same time because that takes long.
    processes = {}
    for name in PROBES:
        if name == "cupy" and find_spec("cupy") is None:
            continue
        command = [*python_command(), "-m", "einmpi.cli.versions", name]
        processes[name] = start_process(command)
    yield Finding("Python", "ok", f"{platform.python_version()}, {sys.executable}")
    yield examine_numpy()
    yield from examine_packages()
    answers = {}
    for name, make_finding in PROBES.items():
        if name in processes:
            answers[name] = read_answer(processes[name], _LOADING_SECONDS)
        else:
            answers[name] = {"error": "it is not installed"}
        yield make_finding(answers[name])
    mpirun = examine_mpirun(answers["mpi"])
    yield mpirun
    yield examine_slurm(answers["mpi"])
    yield examine_machine()
    yield examine_limits()
    yield examine_shared_memory()
    yield examine_temporary_folder()
    can_start_ranks = mpirun.state != "problem" and mpirun.text != NO_MPIRUN
    if is_launched:
        reason = "skipped: a launcher started this process"
        yield Finding("ping", "note", reason, "run einmpi doctor without mpirun")
    elif "error" in answers["mpi"] or not can_start_ranks:
        yield Finding("ping", "note", "skipped: it needs mpi4py and mpirun")
    else:
        yield ping_ranks(ping_seconds)
