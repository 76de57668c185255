"""Loops on a few ranks, compared with what people use instead.

    mpirun -n 2 python -m bench loops [--cases kmeans jacobi cg] [--size small] [--repeat 5]
                                      [--json FILE]

A row is a loop: the median and the least time of all its steps by einmpi on all ranks and by a
peer, measured in turns, and the ratios. Below 1, einmpi is faster. scikit-learn and scipy run on
rank 0 with as many threads as there are ranks, while the other ranks sleep; ranks must not be bound
to single cores (Open MPI: --bind-to none). Planning, and what is computed once, is not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

import einmpi
from bench import ROOT
from bench.lib.packages import has_package
from bench.lib.results import write_results
from einmpi.api import options_of
from einmpi.comm.mpi import comm_of
from einmpi.job.job import Job
from einmpi.job.loop import StepProgram, make_loop
from einmpi.language.syntax import Source
from einmpi.loops.running import LoopRun

Array = Any  # of numpy
JOBS = ROOT / "jobs"
WORLD = MPI.COMM_WORLD
SECONDS_BETWEEN_LOOKS = 0.001  # of ranks that wait for rank 0

CG = """
q[i]      = sum(M[i,j] * p[j])
before    = sum(r[i]**2)
alpha     = before / sum(p[i] * q[i])
x_next[i] = x[i] + alpha * p[i]
r_next[i] = r[i] - alpha * q[i]
residual  = sum(r_next[i]**2)
p_next[i] = r_next[i] + residual / before * p[i]
"""


@dataclass(frozen=True)
class Case:
    """A loop and its peer.

    `job`, `inputs` and `peer` get the sizes, `peer` the inputs too; it returns a function to
    measure, whose result is that of `result` after the same steps.
    """

    job: Callable[[dict[str, int]], Job]
    inputs: Callable[[dict[str, int]], dict[str, Array]]
    peer: Callable[[dict[str, int], dict[str, Array]], Callable[[], Array]]
    peer_name: str
    package: str  # that the peer needs
    on_all_ranks: bool  # whether the peer runs on all ranks
    result: str
    sizes: dict[str, int]
    small: dict[str, int]
    tolerance: float


# ---- k-means -------------------------------------------------------------------------------------


def kmeans_job(sizes: dict[str, int]) -> Job:
    names = ("points", "f", "k")
    job = einmpi.load(JOBS / "clusters.toml", **{name: sizes[name] for name in names})
    return replace(job, loop=replace(job.loop, steps=sizes["steps"]))


def kmeans_inputs(sizes: dict[str, int]) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(sizes["points"], sizes["f"]))
    near = np.zeros(sizes["points"], "int64")
    return {"X": X, "C": X[: sizes["k"]].copy(), "near": near}


def kmeans_peer(sizes: dict[str, int], inputs: dict[str, Array]) -> Callable[[], Array]:
    from sklearn.cluster import KMeans

    def fit() -> Array:
        model = KMeans(
            sizes["k"],
            init=inputs["C"],
            n_init=1,
            max_iter=sizes["steps"],
            tol=0,
            algorithm="lloyd",
            copy_x=True,
        )
        return model.fit(inputs["X"]).cluster_centers_

    return fit


# ---- Jacobi's method -----------------------------------------------------------------------------


def jacobi_job(sizes: dict[str, int]) -> Job:
    job = einmpi.load(JOBS / "plate.toml", n=sizes["n"])
    return replace(job, loop=replace(job.loop, steps=sizes["steps"]))


def jacobi_inputs(sizes: dict[str, int]) -> dict[str, Array]:
    U = np.zeros((sizes["n"], sizes["n"]))
    U[0] = 100.0
    return {"U": U}


def jacobi_peer(sizes: dict[str, int], inputs: dict[str, Array]) -> Callable[[], Array]:
    """Blocks of rows with a row of each neighbour, one compiled pass a step, two arrays."""
    import numba

    @numba.njit(fastmath={"nnan", "nsz"})
    def sweep(old: Array, new: Array) -> float:
        change = 0.0
        for i in range(1, old.shape[0] - 1):
            for j in range(1, old.shape[1] - 1):
                value = (old[i - 1, j] + old[i + 1, j] + old[i, j - 1] + old[i, j + 1]) / 4
                change = max(change, abs(value - old[i, j]))
                new[i, j] = value
        return change

    n = sizes["n"]
    first = n * WORLD.rank // WORLD.size
    stop = n * (WORLD.rank + 1) // WORLD.size
    before = WORLD.rank - 1 if WORLD.rank > 0 else MPI.PROC_NULL
    after = WORLD.rank + 1 if WORLD.rank + 1 < WORLD.size else MPI.PROC_NULL

    def run() -> Array:
        old = np.zeros((stop - first + 2, n))  # the first and the last row are the neighbours'
        old[1:-1] = inputs["U"][first:stop]
        new = old.copy()
        low = 2 if first == 0 else 1  # the border of the plate stays
        high = len(old) - 2 if stop == n else len(old) - 1
        for _ in range(sizes["steps"]):
            WORLD.Sendrecv(old[1], before, 0, old[-1], after, 0)
            WORLD.Sendrecv(old[-2], after, 1, old[0], before, 1)
            change = sweep(old[low - 1 : high + 1], new[low - 1 : high + 1])
            change = WORLD.allreduce(change, MPI.MAX)
            old, new = new, old
            if change < 1e-4:
                break
        blocks = WORLD.allgather(old[1:-1])
        return np.concatenate(blocks)

    return run


# ---- conjugate gradients -------------------------------------------------------------------------


def cg_job(sizes: dict[str, int]) -> Job:
    n = sizes["n"]
    job = einmpi.program(CG, M=(n, n), x=(n,), r=(n,), p=(n,))
    program = StepProgram(job.written, job.sizes, job.inputs)
    carry = {"x": "x_next", "r": "r_next", "p": "p_next"}
    until = Source("until", "residual < 1e-30")
    loop = make_loop(program, lambda *_: "loop", sizes["steps"], carry, until, ["residual"])
    return replace(job, loop=loop)


def cg_inputs(sizes: dict[str, int]) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    n = sizes["n"]
    # Symmetric, with eigenvalues around n: each row has more on its diagonal than elsewhere.
    M = rng.normal(size=(n, n))
    M += M.T.copy()
    M[np.diag_indices(n)] += 4 * n**0.5
    ones = np.ones(n)
    return {"M": M, "x": np.zeros(n), "r": ones, "p": ones.copy()}


def cg_peer(sizes: dict[str, int], inputs: dict[str, Array]) -> Callable[[], Array]:
    from scipy.sparse.linalg import cg

    def solve() -> Array:
        found, _ = cg(inputs["M"], inputs["r"], rtol=0, atol=1e-15, maxiter=sizes["steps"])
        return found

    return solve


CASES = {
    "kmeans": Case(
        job=kmeans_job,
        inputs=kmeans_inputs,
        peer=kmeans_peer,
        peer_name="scikit-learn",
        package="sklearn",
        on_all_ranks=False,
        result="C",
        sizes={"points": 200_000, "f": 64, "k": 64, "steps": 20},
        small={"points": 600, "f": 4, "k": 5, "steps": 3},
        tolerance=1e-8,
    ),
    "jacobi": Case(
        job=jacobi_job,
        inputs=jacobi_inputs,
        peer=jacobi_peer,
        peer_name="numba with mpi4py",
        package="numba",
        on_all_ranks=True,
        result="U",
        sizes={"n": 4000, "steps": 100},
        small={"n": 30, "steps": 5},
        tolerance=1e-12,
    ),
    "cg": Case(
        job=cg_job,
        inputs=cg_inputs,
        peer=cg_peer,
        peer_name="scipy",
        package="scipy",
        on_all_ranks=False,
        result="x",
        sizes={"n": 4000, "steps": 50},
        small={"n": 60, "steps": 5},
        tolerance=1e-10,
    ),
}


# ---- measuring -----------------------------------------------------------------------------------


def by_einmpi(case: Case, job: Job, inputs: dict[str, Array]) -> tuple[float, Array]:
    """Return the seconds of all steps, and the result."""
    assert job.loop is not None
    run = LoopRun(job, comm_of(WORLD), options_of(job))
    run.prepare(inputs)
    WORLD.Barrier()
    start = time.perf_counter()
    found = run.run()
    WORLD.Barrier()
    seconds = time.perf_counter() - start
    return seconds, found.outputs[case.result].gather()


def by_peer(case: Case, candidate: Callable[[], Array]) -> tuple[float, Array]:
    """Return the seconds of the peer, and its result, on rank 0; others sleep if it is alone."""
    WORLD.Barrier()
    start = time.perf_counter()
    result = None
    if case.on_all_ranks:
        result = candidate()
    elif WORLD.rank == 0:
        with threadpool_limits(limits=WORLD.size):
            result = candidate()
    done = WORLD.Ibarrier()
    while not done.Test():
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return time.perf_counter() - start, result


def measure(name: str, is_small: bool, repeat: int) -> dict[str, Any]:
    """Measure a row: runs that take turns; the first turn warms up."""
    case = CASES[name]
    sizes = case.small if is_small else case.sizes
    job = case.job(sizes)
    inputs = case.inputs(sizes)
    has_peer = find_spec(case.package) is not None
    if WORLD.rank == 0:
        has_package(case.peer_name, case.package)  # says so if it is not
    candidate = case.peer(sizes, inputs) if has_peer else None
    seconds: dict[str, list[float]] = {"einmpi": [], "peer": []}
    for turn in range(repeat + 1):
        own_seconds, found = by_einmpi(case, job, inputs)
        if turn:
            seconds["einmpi"].append(own_seconds)
        if candidate is None:
            continue
        peer_seconds, wanted = by_peer(case, candidate)
        if turn:
            seconds["peer"].append(peer_seconds)
        elif WORLD.rank == 0:
            largest = float(np.abs(wanted).max())
            np.testing.assert_allclose(found, wanted, 0, case.tolerance * largest, err_msg=name)
    row: dict[str, Any] = {"case": name, "sizes": sizes, "ranks": WORLD.size, "repeat": repeat}
    row["peer"] = case.peer_name
    row["median"] = {key: statistics.median(times) for key, times in seconds.items() if times}
    row["least"] = {key: min(times) for key, times in seconds.items() if times}
    row["ratio"] = None
    row["ratio_of_least"] = None
    if has_peer:
        row["ratio"] = row["median"]["einmpi"] / row["median"]["peer"]
        row["ratio_of_least"] = row["least"]["einmpi"] / row["least"]["peer"]
    return row


def shown(row: dict[str, Any]) -> str:
    """Return a row of the printed table."""
    own = f"{row['case']:8}{row['median']['einmpi']:11.3f}{row['least']['einmpi']:8.3f}"
    if row["ratio"] is None:
        return f"{own}  without a peer"
    peer = f"{row['median']['peer']:9.3f}{row['least']['peer']:8.3f}"
    ratios = f"{row['ratio']:8.2f}{row['ratio_of_least']:8.2f}"
    return f"{own}{peer}{ratios}  {row['peer']}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="NAME")
    parser.add_argument("--size", choices=["small", "full"], default="full")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    given = parser.parse_args()
    if WORLD.rank == 0:
        print(f"{'':8}{'einmpi':^19}{'peer':^17}{'ratio':^16}")
        print(f"{'case':8}{'median s':>11}{'least':>8}{'median':>9}{'least':>8}{'':16}  peer")
    rows = []
    for name in given.cases:
        row = measure(name, given.size == "small", given.repeat)
        rows.append(row)
        if WORLD.rank == 0:
            print(shown(row), flush=True)
    if given.json and WORLD.rank == 0:
        write_results(given.json, rows)


if __name__ == "__main__":
    try:
        main()
    except SystemExit:  # --help, or a wrong option
        raise
    except BaseException:
        traceback.print_exc()
        WORLD.Abort(1)  # the other ranks wait for this one
