"""Which mpirun there is, which MPI it belongs to, and how to call it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

from einmpi.errors import InputError
from einmpi.process.environment import available_cores
from einmpi.process.terminal import terminal_environment
from einmpi.process.variables import NOTES_VARIABLE

# A word in the output of `mpirun --version`, and the family of the launcher. Intel's launcher calls
# itself Hydra as well, so it comes first.
_FAMILIES = {"Open MPI": "openmpi", "Intel": "intel", "HYDRA": "mpich", "MPICH": "mpich"}


def mpirun_command(ranks: int) -> list[str]:
    """Return the path of mpirun and its options for this many ranks."""
    path = _find_mpirun()
    family = family_of(path)
    if family == "openmpi" and ranks > _slots():
        return [path, "--oversubscribe", "--bind-to", "none"]
    if family == "mpich":
        # Hydra's banner confuses who failed and who was killed because of it; this list does not.
        return [path, "-print-all-exitcodes"]
    return [path]


@functools.cache
def family_of(path: str) -> str:
    """Return the family of a launcher: mpich, openmpi, intel or other."""
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=launcher_environment(),
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "other"
    return family_in(done.stdout + done.stderr)


def family_in(version: str) -> str:
    """Return the family of a launcher or a library from its version text."""
    for word, family in _FAMILIES.items():
        if word in version:
            return family
    return "other"


def launcher_environment(notes_path: str = "") -> dict[str, str]:
    """Return the environment for mpirun, which its ranks inherit."""
    environment = {**os.environ, NOTES_VARIABLE: notes_path, **terminal_environment()}
    if os.geteuid() == 0:
        # Open MPI refuses to run as root, which is the usual user in a container.
        environment["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
        environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return environment


def _find_mpirun() -> str:
    """Return the mpirun of this Python's environment, or else the one on PATH."""
    own = Path(sys.executable).with_name("mpirun")
    if os.access(own, os.X_OK):
        return str(own)
    path = shutil.which("mpirun") or shutil.which("mpiexec")
    if path is None:
        hint = "pip install 'einmpi[mpich]', or load your site's MPI"
        raise InputError("einmpi", "there is no mpirun", hint=hint)
    return path


def _slots() -> int:
    """Return how many ranks Open MPI places here without oversubscribing.

    It counts cores, not their hardware threads. Slurm may provide slots on other machines too.
    """
    threads = available_cores()
    try:
        cores = set()
        for thread in threads:
            topology = Path(f"/sys/devices/system/cpu/cpu{thread}/topology")
            cores.add((topology / "thread_siblings_list").read_text())
        slots = len(cores)
    except OSError:
        slots = len(threads)
    slurm_tasks = os.environ.get("SLURM_NTASKS", "")
    if slurm_tasks.isdecimal():
        slots = max(slots, int(slurm_tasks))
    return slots
