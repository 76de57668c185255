"""Products of sparse tensors, compared with scipy and numpy in one process.

    python -m bench sparse [--cases spmv-stencil sddmm …] [--dtypes float64 float32] [--repeat 15]
                           [--small] [--cpu-time] [--json FILE]
    mpirun -n 2 python -m bench sparse --cases spmv-stencil

A row has the median times of calls of a compiled step, and of what people write with scipy or
numpy. They take turns, with one thread each; on several ranks the first one computes the latter
while the others wait. Below 1, einmpi is faster. On a busy machine --cpu-time counts the time of
the processor instead of the clock's. The matrices are that of a 5-point stencil on a square, and
one whose rows and columns are used as often as Zipf's law says. A case whose name ends in "first"
works the patterns out in each call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse

import einmpi
from bench.lib.results import write_results
from einmpi.comm.mpi import comm_of

Keys = tuple[np.ndarray, ...]
COLUMNS = 32  # of dense matrices
FACTORS = 16  # of factors of a tensor
TILE = 16  # rows and columns of a tile
TOLERANCE = {"float64": 1e-9, "float32": 1e-3}  # relative to the largest element


# ---- keys ----------------------------------------------------------------------------------------


def stencil(size: int) -> tuple[Keys, tuple[int, ...]]:
    """Return the places of the 5-point matrix of a square of points."""
    line = scipy.sparse.diags_array([1.0, 1.0, 1.0], offsets=[-1, 0, 1], shape=(size, size))
    eye = scipy.sparse.eye_array(size)
    matrix = scipy.sparse.kron(line, eye) + scipy.sparse.kron(eye, line)
    found = scipy.sparse.csr_array(matrix).tocoo()
    return found.coords, found.shape


def zipf(stored: int, shape: tuple[int, ...], exponent: float) -> tuple[Keys, tuple[int, ...]]:
    """Return random places; index number n of a dimension is used n**-exponent times as often."""
    rng = np.random.default_rng(1)
    columns = []
    for extent in shape:
        sums = np.cumsum(np.arange(1, extent + 1, dtype=float) ** -exponent)
        columns.append(np.searchsorted(sums, sums[-1] * rng.random(2 * stored)))
    places = np.unique(np.ravel_multi_index(tuple(columns), shape))
    places = np.sort(rng.permutation(places)[:stored])
    return np.unravel_index(places, shape), shape


def matrix_of(name: str, small: bool) -> tuple[Keys, tuple[int, ...]]:
    if name == "stencil":
        return stencil(20 if small else 447)
    if name == "tensor":
        shape = (200, 100, 50) if small else (20_000, 10_000, 5_000)
        return zipf(1000 if small else 10**6, shape, 0.7)
    if name == "tiles":
        return zipf(50 if small else 20_000, (20, 20) if small else (2000, 2000), 0.0)
    keys, shape = zipf(1000 if small else 10**6, (400, 400) if small else (200_000, 200_000), 0.85)
    if name == "shuffled zipf":  # or its square has 700 million products
        keys = keys[0], np.random.default_rng(2).permutation(shape[1])[keys[1]]
        keys = tuple(column[np.lexsort(keys[::-1])] for column in keys)
    return keys, shape


# ---- what is compared ----------------------------------------------------------------------------


def by_rows(keys: Keys, values: np.ndarray, shape: tuple[int, ...]) -> scipy.sparse.csr_array:
    return scipy.sparse.csr_array((values, keys), shape=shape)


def matvec(keys: Keys, values: np.ndarray, shape: tuple[int, ...], x: np.ndarray) -> Any:
    rows = by_rows(keys, values, shape)
    return lambda: rows @ x


def sampled(keys: Keys, values: np.ndarray, _: Any, U: np.ndarray, V: np.ndarray) -> Any:
    i, j = keys
    return lambda: values * np.einsum("qk,qk->q", U[i], V[j])


def factored(
    keys: Keys, values: np.ndarray, shape: tuple[int, ...], B: np.ndarray, C: np.ndarray
) -> Any:
    i, j, k = keys
    starts = np.flatnonzero(np.r_[True, i[1:] != i[:-1]])
    rows = i[starts]

    def compute() -> np.ndarray:
        found = np.zeros((shape[0], B.shape[1]), values.dtype)
        found[rows] = np.add.reduceat(values[:, None] * B[j] * C[k], starts)
        return found

    return compute


def squared(keys: Keys, values: np.ndarray, shape: tuple[int, ...]) -> Any:
    rows = by_rows(keys, values, shape)

    def compute() -> np.ndarray:
        found = rows @ rows
        found.sort_indices()
        return found.data

    return compute


def shortest(keys: Keys, values: np.ndarray, shape: tuple[int, ...], d: np.ndarray) -> Any:
    i, j = keys
    starts = np.flatnonzero(np.r_[True, i[1:] != i[:-1]])
    rows = i[starts]

    def compute() -> np.ndarray:
        found = np.full(shape[0], np.inf, values.dtype)
        found[rows] = np.minimum.reduceat(values + d[j], starts)
        return found

    return compute


def tiled(keys: Keys, values: np.ndarray, shape: tuple[int, ...], X: np.ndarray) -> Any:
    i, j = keys
    starts = np.searchsorted(i, np.arange(shape[0] + 1))
    extents = (shape[0] * TILE, shape[1] * TILE)
    blocks = scipy.sparse.bsr_array((values, j, starts), shape=extents)
    whole = X.reshape(extents[1], -1)
    return lambda: (blocks @ whole).reshape(shape[0], TILE, -1)


@dataclass(frozen=True)
class Case:
    """A program over a sparse tensor A, its dense inputs, and what computes the same."""

    keys: str
    program: str
    peer: str
    by_peer: Callable[..., Any]  # from keys, values, shape and dense inputs
    # For each dense input, the dimension of A that it shares, and its further extents.
    dense: tuple[tuple[str, int, tuple[int, ...]], ...] = ()
    tile: tuple[int, ...] = ()
    implicit: float = 0
    is_first: bool = False  # whether patterns are new in each call


SPMV = "y[i] = sum(A[i,j] * x[j])"
VECTOR = (("x", 1, ()),)
SPMM = "y[i,f] = sum(A[i,j] * X[j,f])"
MATRIX = (("X", 1, (COLUMNS,)),)
SDDMM = "y[i,j] = A[i,j] * sum(U[i,k] * V[j,k])"
SPGEMM = "y[i,k] = sum(A[i,j] * A[j,k])"
SIDES = (("U", 0, (COLUMNS,)), ("V", 1, (COLUMNS,)))
CASES = {
    "spmv-stencil": Case("stencil", SPMV, "scipy CSR", matvec, VECTOR),
    "spmv-zipf": Case("zipf", SPMV, "scipy CSR", matvec, VECTOR),
    "spmm-stencil": Case("stencil", SPMM, "scipy CSR", matvec, MATRIX),
    "spmm-zipf": Case("zipf", SPMM, "scipy CSR", matvec, MATRIX),
    "sddmm-stencil": Case("stencil", SDDMM, "numpy", sampled, SIDES),
    "sddmm-zipf": Case("zipf", SDDMM, "numpy", sampled, SIDES),
    "mttkrp": Case(
        "tensor",
        "y[i,r] = sum(A[i,j,k] * B[j,r] * C[k,r])",
        "numpy, reduceat",
        factored,
        (("B", 1, (FACTORS,)), ("C", 2, (FACTORS,))),
    ),
    "spgemm": Case("stencil", SPGEMM, "scipy CSR, sorted", squared),
    "spgemm-first": Case("stencil", SPGEMM, "scipy CSR, sorted", squared, is_first=True),
    "spgemm-zipf-first": Case("shuffled zipf", SPGEMM, "scipy CSR, sorted", squared, is_first=True),
    "min-plus": Case(
        "zipf",
        "y[i] = min(A[i,j] + d[j])",
        "numpy, reduceat",
        shortest,
        (("d", 1, ()),),
        implicit=np.inf,
    ),
    "tiles": Case(
        "tiles",
        "y[I,i,f] = sum(A[I,J,i,j] * X[J,j,f])",
        "scipy BSR",
        tiled,
        (("X", 1, (TILE, COLUMNS)),),
        (TILE, TILE),
    ),
}


# ---- measuring -----------------------------------------------------------------------------------


def stored_of(case: Case, keys: Keys, values: np.ndarray, shape: tuple[int, ...]) -> Any:
    """Return the sparse input of a case; nothing has been found out about its keys."""
    return einmpi.SparseArray.from_keys(keys, values, shape + case.tile, case.implicit)


def measure(
    name: str, dtype: str, small: bool, repeat: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Measure a row: medians of calls that take turns; the first two turns warm up."""
    case = CASES[name]
    comm = comm_of()
    keys, shape = matrix_of(case.keys, small)
    rng = np.random.default_rng(0)
    values = (rng.random((len(keys[0]), *case.tile)) + 0.5).astype(dtype)
    dense = {}
    for tensor, dimension, extents in case.dense:
        dense[tensor] = rng.standard_normal((shape[dimension], *extents)).astype(dtype)
    spread = {key: einmpi.DistArray.from_global(x) for key, x in dense.items()}
    job = einmpi.program(case.program, A=stored_of(case, keys, values, shape), **spread)

    def make_call() -> Callable[[], Any]:
        inputs = {"A": stored_of(case, keys, values, shape), **spread}
        return partial(einmpi.compile(job), inputs)

    step = make_call()
    by_peer = case.by_peer(keys, values, shape, *dense.values())
    result = step()["y"]
    found = (result.values if isinstance(result, einmpi.SparseArray) else result).gather()
    wanted = by_peer()
    largest = np.abs(wanted[np.isfinite(wanted)]).max()
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE[dtype] * largest, err_msg=name)
    seconds: dict[str, list[float]] = {"einmpi": [], case.peer: []}
    for turn in range(repeat + 2):
        if case.is_first:
            step = make_call()
        for key, compute in (("einmpi", step), (case.peer, by_peer)):
            comm.barrier()
            if key == "einmpi" or comm.rank == 0:
                start = clock()
                made = compute()
                if turn > 1:
                    seconds[key].append(clock() - start)
                del made
    comm.barrier()
    medians = {key: statistics.median(times or [0.0]) for key, times in seconds.items()}
    ratio = medians["einmpi"] / medians[case.peer] if comm.rank == 0 else 0.0
    return {
        "case": name,
        "dtype": dtype,
        "stored": len(keys[0]),
        "ranks": comm.size,
        "peer": case.peer,
        "seconds": medians,
        "ratio": ratio,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="NAME")
    parser.add_argument("--dtypes", nargs="+", default=list(TOLERANCE), choices=TOLERANCE)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="with the sizes of the tests")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    given = parser.parse_args(arguments)
    clock = time.process_time if given.cpu_time else time.perf_counter
    is_first = comm_of().rank == 0
    if is_first:
        print(f"{'case':18}{'dtype':>9}{'einmpi ms':>11}{'peer ms':>10}{'ratio':>7}  compared with")
    rows = []
    for dtype in given.dtypes:
        for name in given.cases:
            row = measure(name, dtype, given.small, given.repeat, clock)
            rows.append(row)
            ours, peers = (1e3 * each for each in row["seconds"].values())
            if is_first:
                text = f"{name:18}{dtype:>9}{ours:11.2f}{peers:10.2f}{row['ratio']:7.2f}"
                print(f"{text}  {row['peer']}", flush=True)
    if given.json and is_first:
        write_results(given.json, rows)


if __name__ == "__main__":
    main()
