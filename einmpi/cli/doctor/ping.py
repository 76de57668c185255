"""Two ranks that send messages to each other, timed: `python -m einmpi.cli.doctor.ping start` starts them with mpirun.

Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from einmpi.cli.launch.launcher import launch
from einmpi.cli.rank import print_error, run_alone
from einmpi.comm.base import Comm
from einmpi.comm.mpi import comm_of
from einmpi.errors import EinmpiError

SMALL, LARGE = 1, 2**24  # bytes
_TURNS = {SMALL: 100, LARGE: 3}


def main() -> int:
    if sys.argv[1:] == ["start"]:
        return run_alone(lambda: launch(2, ["-m", "einmpi.cli.doctor.ping"], [sys.executable]))
    try:
        comm = comm_of()
    except EinmpiError as error:
        return print_error(error)
    if comm.size != 2:  # the launcher is of another library, which has told the ranks nothing
        return print_error(
            EinmpiError(
                f"{comm.size} rank instead of 2: the launcher is not that of mpi4py's library"
            )
        )
    seconds = {size: _one_way(comm, size, turns) for size, turns in _TURNS.items()}
    if comm.rank == 0:
        print(json.dumps({"latency": seconds[SMALL], "bandwidth": LARGE / seconds[LARGE]}))
    return 0


def _one_way(comm: Comm, size: int, turns: int) -> float:
    """Seconds that a message of so many bytes takes: the quickest of some turns there and back, halved."""
    message, other = np.zeros(size, np.uint8), 1 - comm.rank
    best = float("inf")
    for _ in range(turns + 1):  # the first makes the connection
        comm.barrier()
        start = time.perf_counter()
        if comm.rank == 0:
            comm.sendrecv(other, message, None, None)
            comm.sendrecv(None, None, other, message)
        else:
            comm.sendrecv(None, None, other, message)
            comm.sendrecv(other, message, None, None)
        best = min(best, time.perf_counter() - start)
    return best / 2


if __name__ == "__main__":
    sys.exit(main())
