"""How many threads a rank's BLAS and kernels use: its share of the cores, unless the user has set
a number."""

from __future__ import annotations

import os
from dataclasses import dataclass

from einmpi.comm.base import Comm
from einmpi.kernels.cpu.blas_library.choice import set_blas_threads
from einmpi.process.environment import THREAD_VARIABLES
from einmpi.units import counted

SHARE = "its share of the cores"


@dataclass(frozen=True)
class Threads:
    """A number of threads, and where it comes from."""

    count: int
    reason: str

    def __str__(self) -> str:
        return f"{counted(self.count, 'thread')} a rank ({self.reason})"


_blas_limit: list[int] = []  # the number that BLAS was last set to, if any


def threads_of(comm: Comm) -> Threads:
    """Decide how many threads a rank uses, and set BLAS to it.

    A process that works alone leaves numpy's BLAS as it is.
    """
    threads = _threads_of(comm)
    set_blas_threads(threads.count)
    return threads


def _threads_of(comm: Comm) -> Threads:
    """Decide how many threads a rank uses, and set numpy's BLAS to it."""
    for name in THREAD_VARIABLES:
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) > 0:
            return Threads(int(value), name)
    if comm.size == 1:
        count = _blas_limit[-1] if _blas_limit else comm.cores
        return Threads(count, SHARE)
    from threadpoolctl import threadpool_limits

    threadpool_limits(limits=comm.cores, user_api="blas")
    _blas_limit[:] = [comm.cores]
    return Threads(comm.cores, SHARE)
