"""How many threads a rank's BLAS and kernels use: the cores that are its own, unless the user has said."""

from __future__ import annotations

import os
from dataclasses import dataclass

from einmpi.comm.base import Comm
from einmpi.units import counted

_SET_BY_USER = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Threads:
    count: int
    reason: str

    def __str__(self) -> str:
        return f"{counted(self.count, 'thread')} a rank ({self.reason})"


_limit: list[int] = []  # what BLAS was set to last


def threads_of(comm: Comm) -> Threads:
    """Decide, and set BLAS to it. A process that works for itself leaves BLAS as it is."""
    for name in _SET_BY_USER:
        if os.environ.get(name, "").isdecimal() and int(os.environ[name]) > 0:
            return Threads(int(os.environ[name]), name)
    if comm.size == 1:
        return Threads(_limit[-1] if _limit else comm.cores, "its share of the cores")
    from threadpoolctl import threadpool_limits

    threadpool_limits(limits=comm.cores, user_api="blas")
    _limit[:] = [comm.cores]
    return Threads(comm.cores, "its share of the cores")
