"""Factorisations of one matrix on all ranks, beside scipy with as many threads as there are ranks.

    OPENBLAS_NUM_THREADS=1 mpirun -n 2 python -m bench factorisations --size 4000

Both take turns, with the same matrix. Times are medians of repeats, in seconds; that of einmpi is
the slowest rank's. The inputs of einmpi are on the ranks as the plan wants them. Other ranks sleep
while scipy computes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import scipy.linalg
from mpi4py import MPI
from threadpoolctl import threadpool_limits

import einmpi
from bench.lib.results import write_results

CASES: dict[str, tuple[str, Callable[[np.ndarray], object]]] = {
    "cholesky": (
        "L[i,j] = cholesky(A[i,j])",
        lambda a: scipy.linalg.cholesky(a, lower=True, check_finite=False),
    ),
    "lu": ("D[i] = lu_diagonal(A[i,j])", lambda a: scipy.linalg.lu_factor(a, check_finite=False)),
    "solve": ("x[j] = solve(A[i,j], b[i])", lambda a: scipy.linalg.solve(a, a[0])),
    "qr": (
        "Q[i,k], R[k,j] = qr(A[i,j])",
        lambda a: scipy.linalg.qr(a, mode="economic", check_finite=False),
    ),
}


def asleep_until_all_are_here(comm: MPI.Comm) -> None:
    """Wait without using the processor."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.01)


def measured(name: str, extent: int, repeat: int, comm: MPI.Comm) -> dict[str, float]:
    """Return the median seconds of einmpi and of scipy, and the words that einmpi moves."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((extent, extent))
    if name == "cholesky":
        a = a @ a.T + extent * np.eye(extent)
    statement, compute = CASES[name]
    given = {"A": a, "b": a[0]} if "b[" in statement else {"A": a}
    step = einmpi.compile(einmpi.program(statement, **given), comm)
    inputs = {key: einmpi.DistArray.from_global(array, comm) for key, array in given.items()}
    plan, _, inputs = step.prepare(inputs)
    found: dict[str, list[float]] = {"einmpi": [], "scipy": []}
    for number in range(repeat + 1):
        comm.Barrier()
        start = time.perf_counter()
        step(inputs)
        seconds = comm.allreduce(time.perf_counter() - start, MPI.MAX)
        found["einmpi"].append(seconds)
        if comm.rank == 0:
            with threadpool_limits(comm.size):
                start = time.perf_counter()
                compute(a)
                found["scipy"].append(time.perf_counter() - start)
        asleep_until_all_are_here(comm)
        if number == 0:  # the first ones prepare what follows
            found = {"einmpi": [], "scipy": []}
    medians = {key: statistics.median(values or [0.0]) for key, values in found.items()}
    return {**medians, "words": plan.words_predicted}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=2000, help="rows and columns")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    rows = []
    for name in options.cases:
        row = {"case": name, **measured(name, options.size, options.repeat, comm)}
        row["ratio"] = row["einmpi"] / row["scipy"] if comm.rank == 0 else 0.0
        rows.append(row)
        if comm.rank == 0:
            print(
                f"{name:9} einmpi {row['einmpi']:7.3f} s on {comm.size} ranks, "
                f"scipy {row['scipy']:7.3f} s: {row['ratio']:.2f} times as long, "
                f"{row['words']:,} words",
                flush=True,
            )
    if options.json and comm.rank == 0:
        write_results(options.json, rows)


if __name__ == "__main__":
    main()
