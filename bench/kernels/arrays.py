"""Time calls that move elements of DistArrays, and count the bytes that a rank receives.

    mpirun -n 2 python -m bench arrays [--size 1000000] [--repeat 5]

A vector `x` and a square matrix `m` have `size` numbers each, in float64, cut along the first
dimension. Each time is the least of the repetitions on the slowest rank.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.lib.results import write_results
from einmpi import DistArray

CASES: dict[str, Callable[[Any, Any], Any]] = {
    "x[1:]": lambda x, m: x[1:],
    "x[::2]": lambda x, m: x[::2],
    "x[::-1]": lambda x, m: x[::-1],
    "x[x > 0.3]": lambda x, m: x[x > 0.3],
    "x[1:-1] = x[2:]": lambda x, m: x.__setitem__(slice(1, -1), x[2:]),
    "np.roll(x, 1)": lambda x, m: np.roll(x, 1),
    "np.concatenate([x, x])": lambda x, m: np.concatenate([x, x]),
    "x.reshape(m.shape)": lambda x, m: x.reshape(m.shape),
    "np.sort(x)": lambda x, m: np.sort(x),
    "np.argsort(x)": lambda x, m: np.argsort(x),
    "np.cumsum(x)": lambda x, m: np.cumsum(x),
    "m[1:-1, 1:-1]": lambda x, m: m[1:-1, 1:-1],
    "m[:, ::-1]": lambda x, m: m[:, ::-1],
    "m[5]": lambda x, m: m[5],
    "m.T": lambda x, m: m.T,
    "m.T.ravel()": lambda x, m: m.T.ravel(),
}


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=10**6)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    side = math.isqrt(options.size)
    x = DistArray.random(side * side)
    m = DistArray.random((side, side))
    comm = x.own_comm
    if comm.rank == 0:
        print("| call | milliseconds | bytes received, most of any rank |\n|---|---|---|")
    rows = []
    for name, case in CASES.items():
        case(x, m)  # plans what has to be planned
        times: list[float] = []
        received = 0
        for _ in range(options.repeat):
            comm.barrier()
            received_before = comm.received
            start = time.perf_counter()
            case(x, m)
            times.append(time.perf_counter() - start)
            received = comm.received - received_before
        slowest = max(map(float, comm.allgather_text(str(min(times)))))
        most = max(map(int, comm.allgather_text(str(received))))
        rows.append({"call": name, "milliseconds": slowest * 1e3, "bytes": most})
        if comm.rank == 0:
            print(f"| `{name}` | {slowest * 1e3:.1f} | {most} |")
    if options.json and comm.rank == 0:
        write_results(options.json, rows)


if __name__ == "__main__":
    main()
