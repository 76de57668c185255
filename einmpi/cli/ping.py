"""Two ranks send messages to each other, for the doctor."""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from einmpi.cli.launcher import launch
from einmpi.cli.main import print_error, run_alone
from einmpi.comm.base import Comm, sharing_nodes, sharing_problem
from einmpi.comm.mpi import comm_of
from einmpi.errors import EinmpiError
from einmpi.process.environment import python_command

_SMALL_BYTES = 1
_LARGE_BYTES = 2**24


def main() -> int:
    if sys.argv[1:] == ["start"]:
        return run_alone(lambda: launch(2, ["-m", "einmpi.cli.ping"], python_command()))
    try:
        comm = comm_of()
    except EinmpiError as error:
        return print_error(error)
    if comm.size != 2:  # a launcher of another library tells the ranks nothing
        problem = "the launcher does not belong to mpi4py's library"
        return print_error(EinmpiError(f"{comm.size} rank instead of 2: {problem}"))
    latency = _one_way_seconds(comm, _SMALL_BYTES, rounds=100)
    transfer = _one_way_seconds(comm, _LARGE_BYTES, rounds=3)
    sharing_nodes(comm)
    if comm.rank == 0:
        found = {
            "latency": latency,
            "bandwidth": _LARGE_BYTES / transfer,
            "not_shared": sharing_problem(comm),
        }
        print(json.dumps(found))
    return 0


def _one_way_seconds(comm: Comm, nbytes: int, rounds: int) -> float:
    """Return half the time of the fastest round trip of a message."""
    message = np.zeros(nbytes, np.uint8)
    other = 1 - comm.rank
    fastest = float("inf")
    for _ in range(rounds + 1):  # the first one makes the connection
        comm.barrier()
        start = time.perf_counter()
        if comm.rank == 0:
            comm.sendrecv(other, message, None, None)
            comm.sendrecv(None, None, other, message)
        else:
            comm.sendrecv(None, None, other, message)
            comm.sendrecv(other, message, None, None)
        fastest = min(fastest, time.perf_counter() - start)
    return fastest / 2


if __name__ == "__main__":
    sys.exit(main())
