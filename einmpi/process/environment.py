"""What the environment says about a rank before MPI has started: its launcher, rank and cores."""

from __future__ import annotations

import os
import platform
import re
import stat
import sys
from collections.abc import Set
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, NamedTuple, TextIO

from einmpi.errors import InputError, on_one_line, one_of
from einmpi.version import __version__

# ---- variables -----------------------------------------------------------------------------------
#
# The environment variables that users set, one record each, and those that ranks inherit.


BLAS_VARIABLE = "EINMPI_BLAS"
CACHE_VARIABLE = "EINMPI_CACHE_DIR"
CHECK_VARIABLE = "EINMPI_CHECK"
DEBUG_VARIABLE = "EINMPI_DEBUG"
SCRATCH_VARIABLE = "EINMPI_SCRATCH"
START_TIMEOUT_VARIABLE = "EINMPI_START_TIMEOUT"
TRANSPORT_VARIABLE = "EINMPI_GPU_MESSAGES"
GRAPHS_VARIABLE = "EINMPI_CUDA_GRAPHS"
GRAPHS_SETTINGS = ("on", "off")
DATE_VARIABLE = "SOURCE_DATE_EPOCH"
# Set by the launcher for its ranks, and by nobody else.
NOTES_VARIABLE = "EINMPI_NOTES"  # the file in which each rank notes its current step
TERMINALS_VARIABLE = "EINMPI_TERMINALS"  # which standard streams are terminals, and their width
INTERNAL_VARIABLES = (NOTES_VARIABLE, TERMINALS_VARIABLE)

# The first of these that is set to a number says how many threads a rank uses.
THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "OMP_NUM_THREADS",
)


@dataclass(frozen=True)
class Variable:
    """An environment variable: its names, in order of precedence, its values and its meaning."""

    names: tuple[str, ...]
    values: str
    default: str
    documentation: str


VARIABLES = (
    Variable(
        (BLAS_VARIABLE,),
        "`auto`, `numpy`, the name of a [library](job_file.md#blas) or the path of one",
        "`blas` of the job, else `auto`",
        "which BLAS multiplies matrices",
    ),
    Variable(
        (CACHE_VARIABLE,),
        "a folder",
        "`einmpi/kernels` in the cache folder",
        "where [compiled kernels](failures.md#what-is-left-on-disk) are kept for later runs",
    ),
    Variable(
        (CHECK_VARIABLE,),
        "`1`",
        "off",
        "ranks compare [arrays](howto_python.md) that all of them should have alike",
    ),
    Variable(
        (DEBUG_VARIABLE,),
        "`1`",
        "off",
        "errors show their traceback, and `einmpi run -n` all that `mpirun` prints",
    ),
    Variable(
        (TRANSPORT_VARIABLE,),
        "`mpi`, `nccl` or `host`",
        "the fastest that works",
        "how messages travel [between GPUs](gpu.md#messages-between-gpus)",
    ),
    Variable(
        (GRAPHS_VARIABLE,),
        "`on` or `off`",
        "`on`",
        "whether repeated runs launch their kernels as [CUDA graphs](gpu.md#cuda-graphs)",
    ),
    Variable(
        (SCRATCH_VARIABLE,),
        "a folder",
        "`scratch` of the job, else the folder for temporary files",
        "where [what does not fit into memory](howto_memory.md#more-than-fits) is kept",
    ),
    Variable(
        (START_TIMEOUT_VARIABLE,),
        "a time such as `5min`; `0` for no limit",
        "`60s`",
        "how long ranks wait for [ranks that do not start](failures.md#ranks-that-do-not-start)",
    ),
    Variable(
        THREAD_VARIABLES,
        "a whole number",
        "its share of the cores",
        "threads of a rank; the first one that is set counts",
    ),
    Variable(
        (DATE_VARIABLE,),
        "seconds since 1970",
        "the time of the clock",
        "the date that results and reports have, so that two runs can write "
        "[the same bytes](job_file.md#where-a-result-comes-from)",
    ),
    Variable(("TMPDIR",), "a folder", "`/tmp`", "the folder for temporary files"),
    Variable(("XDG_CACHE_HOME",), "a folder", "`~/.cache`", "the cache folder"),
    Variable(
        ("NO_COLOR",), "anything", "not set", "tables and bars on a terminal are not coloured"
    ),
    Variable(
        ("HDF5_USE_FILE_LOCKING",),
        "`TRUE`, `BEST_EFFORT` or `FALSE`",
        "as HDF5 was built",
        "whether HDF5 [locks files](slurm.md#when-it-does-not-work) while they are open",
    ),
)


def is_debugging() -> bool:
    """Return whether errors show their traceback."""
    return os.environ.get(DEBUG_VARIABLE) == "1"


def graphs_are_on() -> bool:
    """Return whether the user leaves CUDA graphs on."""
    setting = os.environ.get(GRAPHS_VARIABLE, "") or "on"
    if setting not in GRAPHS_SETTINGS:
        raise InputError(
            GRAPHS_VARIABLE, f"there is no setting {setting!r}", one_of(GRAPHS_SETTINGS, setting)
        )
    return setting == "on"


# Set for each rank by the launchers of MPICH, Open MPI and Slurm.
RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
_STEP_TASKS = "SLURM_STEP_NUM_TASKS"
# A Slurm step may be the one of mpirun's own helper processes, so its size is tried last.
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", _STEP_TASKS)
_NODE_SIZE_VARIABLES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
_PMI_PREFIXES = ("PMI_", "PMIX_", "PALS_")


def python_command() -> list[str]:
    """Return the command that starts Python again, for a module of this package.

    The current folder is on the search path of that process only if it is on the one of this
    process, as with `python -m einmpi`: other users may be able to put modules there.
    """
    if sys.path and sys.path[0] in ("", os.getcwd()):
        return [sys.executable]
    return [sys.executable, "-P"]


def is_launched() -> bool:
    """Return whether a launcher started this process as a rank. Otherwise MPI stays off."""
    for name in (*RANK_VARIABLES, "MPI_LOCALRANKID"):
        if name in os.environ:
            return True
    # The batch script of a Slurm job has SLURM_PROCID too; only srun sets PMI variables as well.
    if "SLURM_PROCID" not in os.environ:
        return False
    return any(name.startswith(_PMI_PREFIXES) for name in os.environ)


def launcher_rank() -> int:
    """Return the rank that the launcher gave to this process, or 0 without a launcher."""
    return _first_number(*RANK_VARIABLES, "SLURM_PROCID") or 0


def launcher_size() -> int:
    """Return how many processes the launcher started, or 1 where it does not say."""
    return _first_number(*_SIZE_VARIABLES) or 1


def launcher_size_on_node() -> int | None:
    """Return how many processes the launcher started on this machine, or None if unknown."""
    if "MPI_LOCALNRANKS" not in os.environ:
        tasks_per_node = _slurm_tasks_per_node()
        node = _first_number("SLURM_NODEID")
        if node is not None and node < len(tasks_per_node):
            return tasks_per_node[node]
    return _first_number(*_NODE_SIZE_VARIABLES)


def slurm_step_tasks() -> int:
    """Return how many processes srun started, or 1 without srun."""
    return _first_number(_STEP_TASKS) or 1


def available_cores() -> Set[int]:
    """Return the numbers of the cores this process may use. Hardware threads count separately."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return frozenset(range(os.cpu_count() or 1))


def _slurm_tasks_per_node() -> list[int]:
    """Expand Slurm's notation: 4(x3),2 is [4, 4, 4, 2]."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts: list[int] = []
    for tasks, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(repeats or 1)
    return counts


def _first_number(*names: str) -> int | None:
    """Return the value of the first of these variables that is a number."""
    for name in names:
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return None


# ---- software ------------------------------------------------------------------------------------
#
# The versions of what a result was computed with, for reports and for attributes of files.


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
        versions["mpi"] = library_name(mpi)
    return versions


def library_name(mpi: Any) -> str:
    """Return the name and version of the library that mpi4py has found."""
    first_line: str = mpi.Get_library_version().splitlines()[0]
    return " ".join(first_line.split(",")[0].split())


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


# ---- terminal ------------------------------------------------------------------------------------
#
# Whether anyone watches the output of this process: on its own terminal or on the launcher's.


# What a launcher tells its ranks about its terminal, see `_LauncherTerminal`.
CLEAR = "\r\x1b[2K"  # return to the start of the line and clear it
# Open MPI's mpirun gives its ranks terminals even if it has none itself.
_OPEN_MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK")
_DEFAULT_COLUMNS = 80


class _LauncherTerminal(NamedTuple):
    """The terminal of a launcher. The columns of a stream are 0 if it is not a terminal."""

    machine: str
    stdout_columns: int
    stderr_columns: int
    stderr_path: str

    def __str__(self) -> str:
        return " ".join(map(str, self))


def _launcher_terminal() -> _LauncherTerminal | None:
    """Return what the launcher of this rank says, or None without one."""
    fields = os.environ.get(TERMINALS_VARIABLE, "").split(" ", 3)
    if len(fields) != 4:
        return None
    machine, stdout_columns, stderr_columns, path = fields
    return _LauncherTerminal(machine, int(stdout_columns), int(stderr_columns), path)


def open_closed_streams() -> None:
    """Connect standard streams that were closed, as by `>&-` in a shell, to /dev/null.

    Otherwise the next file that is opened takes the number of the stream, and everything that
    libraries print goes into that file.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it takes the lowest number, which is this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def columns(stream: TextIO) -> int:
    """Return the width of the terminal behind a stream, 0 if there is none."""
    try:
        descriptor = stream.fileno()
        is_terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        launcher = _launcher_terminal()
        if launcher is not None:
            by_descriptor = {1: launcher.stdout_columns, 2: launcher.stderr_columns}
            return by_descriptor.get(descriptor, 0)
        is_open_mpi = any(name in os.environ for name in _OPEN_MPI_VARIABLES)
        if is_terminal and not is_open_mpi:
            return os.get_terminal_size(descriptor).columns or _DEFAULT_COLUMNS
    except (OSError, ValueError):  # not a file, or closed
        pass
    return 0


def screen() -> tuple[TextIO, int]:
    """Return a stream for a progress bar and its width; the width is 0 if no bar can be shown.

    A rank writes to its launcher's terminal directly: mpirun may hold back incomplete lines.
    """
    width = columns(sys.stderr)
    launcher = _launcher_terminal()
    if launcher is None or not launcher.stderr_path:
        return sys.stderr, width
    try:
        if width and launcher.machine == os.uname().nodename:
            # O_NOCTTY: the terminal must not become the one that sends signals to this process.
            descriptor = os.open(launcher.stderr_path, os.O_WRONLY | os.O_NOCTTY)
            return open(descriptor, "w", encoding="utf-8", errors="replace"), width
    except OSError:
        pass
    return sys.stderr, 0


def clear_line(stream: TextIO) -> str:
    """Return what removes a progress bar before a line is written; empty without a terminal."""
    return CLEAR if columns(stream) else ""


def print_notice(text: str) -> None:
    """Print one whole line to standard error, in place of a progress bar."""
    if sys.stderr is None:  # it was closed when the process started
        return
    if sys.stdout is not None:
        sys.stdout.flush()  # keep the order if both streams go to one file
    line = on_one_line(text)
    print(f"{clear_line(sys.stderr)}{line}\n", end="", file=sys.stderr, flush=True)


def terminal_environment() -> dict[str, str]:
    """Return the variable by which a launcher describes its terminal to its ranks."""
    stderr_columns = columns(sys.stderr)
    path = ""
    if stderr_columns:
        try:
            path = os.ttyname(sys.stderr.fileno())
        except OSError:
            stderr_columns = 0
    machine = os.uname().nodename
    terminal = _LauncherTerminal(machine, columns(sys.stdout), stderr_columns, path)
    return {TERMINALS_VARIABLE: str(terminal)}


# ---- trust ---------------------------------------------------------------------------------------
#
# Whether other users of the machine can change a folder or a file of this user's.
#
# Root is trusted: it can change everything anyway. Access control lists show in the mode's
# group bits, so the mode is enough.


OWN_FOLDER_MODE = 0o755  # others may look into it at most, whatever the user's umask is
_OWN_FILE_MODE = 0o644
_OTHERS_CAN_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedFileError(Exception):
    """A file that other users could have written."""


def why_not_trusted(path: str | os.PathLike[str]) -> str:
    """Return how other users could change what is at a path, or "" if they cannot.

    The path and every folder above it, up to the home folder or else the root, must belong to this
    user or to root and be writable by nobody else, as ssh demands it of its keys. A folder above
    may have the sticky bit instead, as /tmp has: others cannot rename there what is not theirs.
    Parts of the path that do not exist yet are skipped. Symbolic links are resolved first, so the
    caller must go on with the resolved path.
    """
    home = os.path.realpath(os.path.expanduser("~"))
    target = os.path.realpath(path)
    here = target
    while True:
        if os.path.lexists(here):
            problem = why_not_own(os.stat(here), sticky_is_safe=here != target)
            if problem:
                return f"{here}: {problem}"
        if here in (home, os.path.dirname(here)):
            return ""
        here = os.path.dirname(here)


def why_not_own(status: os.stat_result, sticky_is_safe: bool = False) -> str:
    """Return how other users could change a file or folder with this status, or ""."""
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to another user (uid {status.st_uid})"
    return why_open_to_others(status, sticky_is_safe)


def why_open_to_others(status: os.stat_result, sticky_is_safe: bool) -> str:
    """Return that other users than the owner can write to a file or folder, or ""."""
    if not status.st_mode & _OTHERS_CAN_WRITE:
        return ""
    if sticky_is_safe and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return ""
    return f"other users can write to it (mode {stat.S_IMODE(status.st_mode):o})"


def open_own_file(path: str) -> int:
    """Open a regular file for reading; raise UntrustedFileError if others could have written it.

    The open file is checked, not its name: nobody can exchange it between the check and the use.
    """
    # A named pipe would wait for a writer without O_NONBLOCK. Regular files ignore it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "it is not a regular file")
        problem = why_not_own(status)
        if problem:
            raise UntrustedFileError(problem)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_for_own_writing(path: str, flags: int) -> int:
    """Open a file that only this user can write, whatever the umask is: an `opener` for `open`."""
    return os.open(path, flags, _OWN_FILE_MODE)


def make_private_folders(path: str) -> None:
    """Create a folder and the missing ones above it, for this user only whatever the umask is."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent != path:
        make_private_folders(parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:  # another process was faster, or it is a file
        if not os.path.isdir(path):
            raise
