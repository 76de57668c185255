"""The paper's matrix chain, (A·B) + (C·(D·E)), on the ranks of mpirun, against numpy in one
process.

mpirun -n 2 python -m bench chain --size 2000 --dtype float64

Ranks are bound to equal shares of the machine's cores, with as many threads. numpy is a process of
its own, with all of these cores and as many BLAS threads. Its runs and those of the strategies
alternate, and medians are compared. Inputs are in memory, in the blocks that the plan reads. Bytes
moved are shown next to the planner's lower bound.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

import einmpi
from bench import ROOT
from bench.lib.node_peers import bind, blocks_of_plan
from bench.lib.results import write_results
from bench.paper.node import PAUSE, Peer
from einmpi.api import options_of
from einmpi.comm.mpi import comm_of
from einmpi.compiled.program import Compiled
from einmpi.units import show_bytes

JOB = ROOT / "jobs" / "chain.toml"
WORLD = MPI.COMM_WORLD


def meet() -> None:
    """A barrier that leaves the cores to others."""
    request = WORLD.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


def bind_ranks() -> list[int]:
    """Bind the ranks of a machine to equal shares of its cores; return all of these cores."""
    on_node = WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    cores = sorted(set().union(*on_node.allgather(os.sched_getaffinity(0))))
    share = max(1, len(cores) // on_node.size)
    first = on_node.rank * share % len(cores)
    bind(cores[first : first + share])
    return cores[: share * on_node.size]


class Numpy:
    """numpy with all cores, in a process that the first rank starts."""

    def __init__(self, cores: list[int], size: int, skew: int, dtype: str) -> None:
        self.peer = Peer("numpy", cores) if WORLD.rank == 0 else None
        if self.peer is not None:
            order = {"case": "chain", "size": size, "skew": skew, "dtype": dtype}
            self.peer.ask(do="prepare", name="chain", peer="numpy", forget=True, **order)

    def __call__(self) -> float:
        meet()
        seconds = 0.0
        if self.peer is not None:
            seconds, _ = self.peer.ask(do="compute", name="chain")
            time.sleep(PAUSE)
        meet()
        return seconds

    def end(self) -> None:
        if self.peer is not None:
            self.peer.end()


class Ours:
    """One strategy, planned once, run again and again with its inputs in memory."""

    def __init__(self, job: einmpi.Job, strategy: str) -> None:
        self.compiled = Compiled(job, comm_of(WORLD), options_of(job, strategy=strategy))
        self.inputs = blocks_of_plan(self.compiled)
        self.plan = self.compiled.prepare({})[0]  # its lower bound is that of free inputs

    def __call__(self) -> float:
        meet()
        WORLD.Barrier()
        start = time.perf_counter()
        self.compiled(self.inputs)
        return WORLD.allreduce(time.perf_counter() - start, MPI.MAX)

    def moved(self) -> int:
        assert self.compiled.measured is not None
        return WORLD.allreduce(self.compiled.measured.received)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=2000)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--strategies", nargs="*", default=["eindecomp", "eindecomp-paper", "sqrt", "replicate"]
    )
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    rows = []
    cores = bind_ranks()
    for kind, skew in (("uniform", 1), ("skewed", 10)):
        job = einmpi.load(JOB, dtype=options.dtype, s=options.size, skew=skew)
        numpy_process = Numpy(cores, options.size, skew, options.dtype)
        ways: dict[str, Callable[[], float]] = {"numpy": numpy_process}
        ways |= {name: Ours(job, name) for name in options.strategies}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(options.repeats + 1):
            for name, way in ways.items():
                seconds = way()
                if turn:  # the first one warms up
                    times[name].append(seconds)
        numpy_process.end()
        if WORLD.rank == 0:
            print(
                f"chain, {kind}, s = {options.size}, {options.dtype}, "
                f"{WORLD.size} ranks × {max(1, len(cores) // WORLD.size)} threads; "
                f"medians of {options.repeats}"
            )
        base = statistics.median(times["numpy"])
        for name, way in ways.items():
            median = statistics.median(times[name])
            row = f"  {name:16} {median:8.3f} s  "
            found = {"chain": kind, "way": name, "seconds": median}
            rows.append(found)
            if isinstance(way, Ours):
                moved = way.moved()
                bound = way.plan.lower_bound * np.dtype(options.dtype).itemsize
                ratio = median / base if base else 0
                found |= {"ratio": ratio, "bytes": moved, "bytes_bound": bound}
                row += f"{ratio:5.2f} × numpy   moved {show_bytes(moved):>10}, "
                row += f"bound {show_bytes(bound):>10}"
            if WORLD.rank == 0:
                print(
                    row if isinstance(way, Ours) else f"{row}with {len(cores)} BLAS threads",
                    flush=True,
                )
    if options.json and WORLD.rank == 0:
        write_results(options.json, rows)


if __name__ == "__main__":
    main()
