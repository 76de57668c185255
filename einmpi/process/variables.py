"""The environment variables that users set, one record each, and those that ranks inherit."""

from __future__ import annotations

import os
from dataclasses import dataclass

from einmpi.errors import InputError, one_of

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
