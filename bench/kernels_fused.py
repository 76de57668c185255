"""Compiled kernels against what one would write instead: scipy, numpy, a loop tiled by hand in numba.

    python bench/kernels_fused.py [--kernels linf min-plus …] [--threads 1 2] [--repeat 7] [--scale 1.0]

One row a kernel and number of threads: the median time of both, measured in turns, their ratio (above 1: this is
faster), and the seconds that the kernels took to compile. The other side uses one thread unless it says otherwise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from scipy.spatial.distance import cdist
from scipy.special import erf

import einmpi
from einmpi.runtime import fused

Other = Callable[..., Any]
# name → program, shapes of its inputs, what is compared with it
CASES: dict[str, tuple[str, dict[str, tuple[int, ...]], str, Other]] = {}


def case(name: str, program: str, other: str, **shapes: tuple[int, ...]) -> Callable[[Other], Other]:
    def add(function: Other) -> Other:
        CASES[name] = program, shapes, other, function
        return function

    return add


def tiled(parallel: bool) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The min-plus product in tiles of 4×64, as one would write it by hand."""

    @numba.njit(parallel=parallel)
    def min_plus(a, b):  # type: ignore[no-untyped-def]
        rows, depth = a.shape
        columns = b.shape[1]
        out = np.empty((rows, columns))
        for block in numba.prange((rows + 3) // 4):
            i = min(block * 4, rows - 4)
            best = np.empty((4, 64))
            for k in range(0, columns, 64):
                width = min(64, columns - k)
                best[:] = np.inf
                for j in range(depth):
                    x0, x1, x2, x3 = a[i, j], a[i + 1, j], a[i + 2, j], a[i + 3, j]
                    for v in range(width):
                        y = b[j, k + v]
                        best[0, v] = min(best[0, v], x0 + y)
                        best[1, v] = min(best[1, v], x1 + y)
                        best[2, v] = min(best[2, v], x2 + y)
                        best[3, v] = min(best[3, v], x3 + y)
                out[i : i + 4, k : k + width] = best[:, :width]
        return out

    return min_plus


@case("linf", "Z[i,k] = max(abs(X[i,j] - Y[k,j]))", "scipy cdist", X=(2000, 500), Y=(2000, 500))
def _linf(threads: int, X: np.ndarray, Y: np.ndarray) -> Any:
    return cdist(X, Y, "chebyshev")


@case("linf-jk", "Z[i,k] = max(abs(X[i,j] - Y[j,k]))", "scipy cdist of a copy", X=(2000, 500), Y=(500, 2000))
def _linf_turned(threads: int, X: np.ndarray, Y: np.ndarray) -> Any:
    return cdist(X, np.ascontiguousarray(Y.T), "chebyshev")


@case("l2", "Z[i,k] = sum((X[i,j] - Y[k,j])**2)", "scipy cdist", X=(2000, 500), Y=(2000, 500))
def _l2(threads: int, X: np.ndarray, Y: np.ndarray) -> Any:
    return cdist(X, Y, "sqeuclidean")


@case("min-plus", "Z[i,k] = min(X[i,j] + Y[j,k])", "numba 4×64, as many threads", X=(2000, 2000), Y=(2000, 2000))
def _min_plus(threads: int, X: np.ndarray, Y: np.ndarray) -> Any:
    numba.set_num_threads(threads)
    if threads not in HAND:
        HAND[threads] = tiled(threads > 1)
    return HAND[threads](X, Y)


HAND: dict[int, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {}


@case("min-plus-np", "Z[i,k] = min(X[i,j] + Y[j,k])", "numpy, blocks of rows", X=(500, 500), Y=(500, 500))
def _min_plus_numpy(threads: int, X: np.ndarray, Y: np.ndarray) -> Any:
    return np.concatenate([(X[i : i + 4, :, None] + Y[None]).min(axis=1) for i in range(0, len(X), 4)])


@case("softmax", "Z[i,j] = softmax[j](X[i,j])", "numpy, 5 passes", X=(4000, 4000))
def _softmax(threads: int, X: np.ndarray) -> Any:
    shifted = X - X.max(axis=1, keepdims=True)
    np.exp(shifted, out=shifted)
    shifted /= shifted.sum(axis=1, keepdims=True)
    return shifted


@case("mask", "Z[i,j] = where(j <= i, X[i,j] / 8.0, -inf)", "numpy", X=(4000, 4000))
def _mask(threads: int, X: np.ndarray) -> Any:
    n = np.arange(len(X))
    return np.where(n[None] <= n[:, None], X / 8.0, -np.inf)


@case("gelu", "Z[i,j] = gelu(X[i,j])", "numpy and scipy's erf", X=(1000, 4000))
def _gelu(threads: int, X: np.ndarray) -> Any:
    return 0.5 * X * (1 + erf(X / np.sqrt(2)))


@case("tanh", "Z[i,j] = tanh(X[i,j])", "numpy", X=(1000, 4000))
def _tanh(threads: int, X: np.ndarray) -> Any:
    return np.tanh(X)


@case("rows", "Z[i] = sum(X[i,j])", "numpy", X=(4000, 4000))
def _rows(threads: int, X: np.ndarray) -> Any:
    return X.sum(axis=1)


@case("columns", "Z[j] = sum(X[i,j])", "numpy", X=(4000, 4000))
def _columns(threads: int, X: np.ndarray) -> Any:
    return X.sum(axis=0)


@case("norm", "Z = sum(X[i,j]**2)", "numpy einsum", X=(4000, 4000))
def _norm(threads: int, X: np.ndarray) -> Any:
    return np.einsum("ij,ij->", X, X)


@case("max", "Z[i] = max(X[i,j])", "numpy", X=(4000, 4000))
def _max(threads: int, X: np.ndarray) -> Any:
    return X.max(axis=1)


@case("turn", "Z[j,i] = X[i,j] * 2 + Y[j,i]", "numpy", X=(4000, 4000), Y=(4000, 4000))
def _turn(threads: int, X: np.ndarray, Y: np.ndarray) -> Any:
    return X.T * 2 + Y


def runner(program: str, arrays: dict[str, np.ndarray], threads: int) -> Callable[[], np.ndarray]:
    """All vertices of a program, one kernel each, into arrays that are there already."""
    graph = einmpi.program(program, **arrays).graph
    tensors = {**arrays, **{vertex.name: np.empty(vertex.bound, vertex.dtype) for vertex in graph.computed}}

    def run() -> np.ndarray:
        for vertex in graph.computed:
            operands = [tensors[name] for name in vertex.inputs]
            fused.compute(vertex.einsum, operands, tensors[vertex.name], threads=threads)
        return tensors[graph.outputs[0]]

    return run


def measure(name: str, threads: int, dtype: str, repeat: int, scale: float) -> tuple[str, float, float, float]:
    program, shapes, other, function = CASES[name]
    rng = np.random.default_rng(0)
    arrays = {x: rng.normal(size=[max(2, int(n * scale)) for n in shape]).astype(dtype) for x, shape in shapes.items()}
    run, before = runner(program, arrays, threads), fused.STATISTICS.compile_seconds
    wanted = function(threads, **arrays)
    near = (1e-4 if dtype == "float32" else 1e-9) * max(1.0, float(np.abs(wanted[np.isfinite(wanted)]).max()))
    np.testing.assert_allclose(run(), wanted, rtol=near, atol=near)
    compiled = fused.STATISTICS.compile_seconds - before
    times: tuple[list[float], list[float]] = [], []
    for _ in range(repeat):
        for kept, step in zip(times, (run, lambda: function(threads, **arrays)), strict=True):
            start = time.perf_counter()
            step()
            kept.append(time.perf_counter() - start)
    return other, statistics.median(times[0]), statistics.median(times[1]), compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["float64"], choices=["float64", "float32"])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--scale", type=float, default=1.0, help="of every extent")
    given = parser.parse_args()
    print(f"{'kernel':13}{'dtype':9}{'threads':>7}{'ms':>10}{'other ms':>10}{'ratio':>7}{'compile':>9}  other")
    for name in given.kernels:
        for dtype in given.dtypes:
            for threads in given.threads:
                other, ours, theirs, compiled = measure(name, threads, dtype, given.repeat, given.scale)
                row = f"{name:13}{dtype:9}{threads:7}{ours * 1e3:10.2f}{theirs * 1e3:10.2f}{theirs / ours:7.2f}"
                print(f"{row}{compiled:9.2f}  {other}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EINMPI_CACHE_DIR"] = folder  # so that compile times are those of a first run
        main()
