"""The MPI library: its start and its end. Only this module imports mpi4py, and only when needed."""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import os
import re
import sys
import termios
import time
import warnings
from functools import cache
from typing import Any, NoReturn

from einmpi.errors import EinmpiError, failure
from einmpi.process.environment import (
    is_launched,
    launcher_size,
    library_name,
    slurm_step_tasks,
)
from einmpi.process.names import NAMES, stale_segments

_PMI_ADVICE = "use srun --mpi=pmi2 for MPICH and its relatives, --mpi=pmix for Open MPI"
# The longest wait for the launcher to read the last line of a rank.
_FORWARDING_SECONDS = 0.5


def import_mpi() -> Any:
    """Import mpi4py, which starts MPI."""
    imported = sys.modules.get("mpi4py.MPI")
    if hasattr(imported, "COMM_WORLD"):  # the usual case; others wait until it is complete
        return imported
    try:
        with warnings.catch_warnings():
            # The warning is about a foreign launcher, for which `world` has an error.
            warnings.filterwarnings("ignore", "suspicious MPI")
            from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise EinmpiError(
            f"MPI: mpi4py: {reason[:300]}; pip install 'einmpi[mpich]', or load your site's MPI"
        ) from error
    return MPI


def world() -> Any | None:
    """Return the world communicator if a launcher started this process, else None."""
    if _is_alone():
        return None
    is_started = "mpi4py.MPI" in sys.modules
    if not is_started and NAMES.claim("cleaning"):  # one rank of a machine is enough
        stale_segments(remove=True)
    comm = import_mpi().COMM_WORLD
    if comm.size == 1 and launcher_size() > 1:
        message = (
            f"MPI: the launcher started {launcher_size()} processes, but each is alone; "
            f"the launcher must belong to mpi4py's library, {library_name(import_mpi())}"
        )
        if slurm_step_tasks() > 1:
            message += f"; under Slurm, {_PMI_ADVICE}"
        raise failure(message)
    return comm


@cache  # the environment of a rank stays as it is, and reading it takes longer than a small call
def _is_alone() -> bool:
    """Return whether no launcher started this process."""
    if is_launched():
        return False
    if slurm_step_tasks() > 1:
        raise failure(
            f"MPI: srun started {slurm_step_tasks()} processes without PMI, and each is "
            f"alone; {_PMI_ADVICE}"
        )
    return True


# A process that is forked may be given the environment of a rank before it goes on.
os.register_at_fork(after_in_child=_is_alone.cache_clear)


def mpi_has_ended() -> bool:
    """Return whether the program has ended MPI, which nobody can use then."""
    return bool(import_mpi().Is_finalized())


def abort(comm: Any, status: int) -> NoReturn:
    """End all ranks at once, after this one has printed why.

    That line stays the only one where MPI allows it.
    """
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
                stream.flush()
        _wait_for_reader()
        # Hides MPICH's own report of the abort; that of Open MPI's mpirun remains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        comm.Abort(status)
    finally:
        os._exit(status)


def _wait_for_reader() -> None:
    """Wait until standard error is read: launchers drop unread output when a rank aborts."""
    unread = array.array("i", [0])
    deadline = time.monotonic() + _FORWARDING_SECONDS
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            fcntl.ioctl(2, termios.FIONREAD, unread)
            if not unread[0]:
                return
            time.sleep(0.01)


def library() -> dict[str, Any]:
    """Return the versions of mpi4py and of the MPI library it has found. MPI is not started."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
    mpi = import_mpi()
    built = mpi4py.get_config().get("mpicc")
    if not built:
        extension = os.path.basename(mpi.__file__).partition(".cpython")[0]
        built = f"a wheel, as {extension}"
    device = re.search(r"Device: *(.*)", mpi.Get_library_version())
    return {
        "mpi4py": mpi4py.__version__,
        "built": built,
        "library": library_name(mpi).replace(" Version:", ""),
        "device": device[1] if device else "",
    }


def cuda_aware() -> bool:
    """Return whether the MPI library in this process says that it takes buffers on a GPU.

    Nothing is tried out: a library that does not take them crashes. MPICH also ends a process that
    asks before MPI is started.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized():
        return False
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            loaded = {line.split()[-1] for line in file if re.search(r"/lib\w*mpi\w*\.so", line)}
    except OSError:
        return False
    # Open MPI, MPICH and their relatives have this function. Some answer by the environment.
    for path in sorted(loaded):
        query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None)
        if query is not None and query() == 1:
            return True
    return False
