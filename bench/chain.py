"""The paper's matrix chain, (A·B) + (C·(D·E)), on the ranks of mpirun, against numpy in one
process.

mpirun -n 2 python bench/chain.py --size 2000 --dtype float64

numpy runs on rank 0 with as many BLAS threads as there are ranks, while the other ranks sleep. Its
runs and those of the strategies alternate, and medians are compared. Bytes moved are shown next to
the planner's lower bound.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

import einmpi
from einmpi.api import options_of
from einmpi.comm.mpi import comm_of
from einmpi.compiled.inputs import Inputs
from einmpi.compiled.program import Compiled
from einmpi.files.load import load_array
from einmpi.units import show_bytes

JOB = Path(__file__).resolve().parents[1] / "jobs" / "chain.toml"
WORLD = MPI.COMM_WORLD


def meet() -> None:
    """A barrier that leaves the cores to others."""
    request = WORLD.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


def numpy_chain(job: einmpi.Job) -> Callable[[], float]:
    """Seconds of numpy on rank 0."""
    arrays = {}
    if WORLD.rank == 0:
        arrays = {
            spec.name: load_array(spec, spec.shape or (), spec.dtype or "") for spec in job.inputs
        }

    def run() -> float:
        meet()
        seconds = 0.0
        if WORLD.rank == 0:
            with threadpool_limits(limits=WORLD.size, user_api="blas"):
                start = time.perf_counter()
                arrays["A"] @ arrays["B"] + arrays["C"] @ (arrays["D"] @ arrays["E"])
                seconds = time.perf_counter() - start
        meet()
        return seconds

    return run


class Ours:
    """One strategy, planned once, run again and again with its inputs in memory."""

    def __init__(self, job: einmpi.Job, strategy: str) -> None:
        self.compiled = Compiled(job, comm_of(WORLD), options_of(job, strategy))
        self.plan, self.schedule, _ = self.compiled.prepare({})
        self.inputs = Inputs(job, {}, {}, keep=True)

    def __call__(self) -> float:
        meet()
        _, self.measured = self.compiled.run_schedule(self.plan, self.schedule, self.inputs)
        return WORLD.allreduce(self.measured.seconds, MPI.MAX)

    def moved(self) -> int:
        return WORLD.allreduce(self.measured.received)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=2000)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--strategies", nargs="*", default=["eindecomp", "eindecomp-paper", "sqrt", "replicate"]
    )
    options = parser.parse_args()
    for kind, skew in (("uniform", 1), ("skewed", 10)):
        job = einmpi.load(JOB, dtype=options.dtype, s=options.size, skew=skew)
        ways: dict[str, Callable[[], float]] = {"numpy": numpy_chain(job)}
        ways |= {name: Ours(job, name) for name in options.strategies}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(options.repeats + 1):
            for name, way in ways.items():
                seconds = way()
                if turn:  # the first one warms up
                    times[name].append(seconds)
        if WORLD.rank == 0:
            print(
                f"chain, {kind}, s = {options.size}, {options.dtype}, "
                f"{WORLD.size} ranks, one BLAS thread each; "
                f"medians of {options.repeats}"
            )
        base = statistics.median(times["numpy"])
        for name, way in ways.items():
            median = statistics.median(times[name])
            row = f"  {name:16} {median:8.3f} s  "
            if isinstance(way, Ours):
                moved = way.moved()
                bound = way.plan.lower_bound * np.dtype(options.dtype).itemsize
                ratio = median / base if base else 0
                row += f"{ratio:5.2f} × numpy   moved {show_bytes(moved):>10}, "
                row += f"bound {show_bytes(bound):>10}"
            if WORLD.rank == 0:
                print(
                    row if isinstance(way, Ours) else f"{row}with {WORLD.size} BLAS threads",
                    flush=True,
                )


if __name__ == "__main__":
    main()
