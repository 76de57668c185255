"""Loops on a few ranks, compared with what people use instead.

    mpirun -n 2 python -m bench loops [--cases kmeans jacobi cg] [--size small] [--repeat 5]
                                      [--json FILE]
    mpirun -n 16 python -m bench loops --cases jacobi        # in 4 × 4 blocks

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
    measure, whose result is that of `result` after the same steps. A peer that runs on all ranks
    returns a block on each of them, and `join` puts them together, which is not measured.
    """

    job: Callable[[dict[str, int]], Job]
    inputs: Callable[[dict[str, int]], dict[str, Array]]
    peer: Callable[[dict[str, int], dict[str, Array]], Callable[[], Array]]
    peer_name: str
    package: str  # that the peer needs
    result: str
    sizes: dict[str, int]
    small: dict[str, int]
    tolerance: float
    join: Callable[[Array], Array] | None = None  # for a peer that runs on all ranks


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
    """Blocks as square as the ranks allow, with a border of the neighbours' values around each.

    One compiled pass a step, two arrays, and all four borders travel at the same time.
    """
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
    grid = WORLD.Create_cart(MPI.Compute_dims(WORLD.size, 2))
    neighbours = [*grid.Shift(0, 1), *grid.Shift(1, 1)]  # above, below, left, right
    block = []
    inner = []  # what is computed, in an array with borders: the edges of the plate stay
    for place, blocks in zip(grid.coords, grid.dims, strict=True):
        first, stop = n * place // blocks, n * (place + 1) // blocks
        block.append(slice(first, stop))
        inner.append((max(first, 1) - first + 1, min(stop, n - 1) - first + 1))
    (top, bottom), (left, right) = inner
    computed = slice(top - 1, bottom + 1), slice(left - 1, right + 1)  # with what is around it

    def exchange(u: Array) -> None:
        """Fill the borders; MPI sends and receives contiguous copies of columns."""
        own = (u[1, 1:-1], u[-2, 1:-1], u[1:-1, 1], u[1:-1, -2])
        borders = (u[0, 1:-1], u[-1, 1:-1], u[1:-1, 0], u[1:-1, -1])
        received = [np.empty(len(border)) for border in borders]
        requests = []
        for side, neighbour in enumerate(neighbours):
            requests.append(grid.Irecv(received[side], neighbour, side ^ 1))
        for side, neighbour in enumerate(neighbours):
            requests.append(grid.Isend(np.ascontiguousarray(own[side]), neighbour, side))
        MPI.Request.Waitall(requests)
        for side, neighbour in enumerate(neighbours):
            if neighbour != MPI.PROC_NULL:
                borders[side][:] = received[side]

    def run() -> Array:
        old = np.pad(inputs["U"][tuple(block)], 1)
        new = old.copy()
        for _ in range(sizes["steps"]):
            exchange(old)
            change = sweep(old[computed], new[computed])
            change = grid.allreduce(change, MPI.MAX)
            old, new = new, old
            if change < 1e-4:
                break
        return old[1:-1, 1:-1]

    return run


def whole_plate(block: Array) -> Array:
    """Return the blocks of all ranks put together, on rank 0."""
    blocks = WORLD.gather(block)
    if blocks is None:
        return None
    rows, columns = MPI.Compute_dims(WORLD.size, 2)
    return np.block([blocks[row * columns : (row + 1) * columns] for row in range(rows)])


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
        result="U",
        sizes={"n": 4000, "steps": 100},
        small={"n": 30, "steps": 5},
        tolerance=1e-12,
        join=whole_plate,
    ),
    "cg": Case(
        job=cg_job,
        inputs=cg_inputs,
        peer=cg_peer,
        peer_name="scipy",
        package="scipy",
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
    if case.join is not None:
        result = candidate()
    elif WORLD.rank == 0:
        with threadpool_limits(limits=WORLD.size):
            result = candidate()
    done = WORLD.Ibarrier()
    while not done.Test():
        time.sleep(SECONDS_BETWEEN_LOOKS)
    seconds = time.perf_counter() - start
    if case.join is not None:
        result = case.join(result)
    return seconds, result


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
