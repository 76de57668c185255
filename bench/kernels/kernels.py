"""Compare kernels with what one would write instead: numpy, BLAS, scipy, numba, torch.

    python -m bench kernels [--kernels square linf softmax …] [--threads 1 2]
                            [--dtypes float64 float32] [--scale 1.0] [--repeat 7] [--json FILE]

A row is a kernel, a dtype and a number of threads: our median time, then the ratio of each peer's
time to ours, measured in turns. Above 1, ours is faster. "laid out" is the limit of a contraction:
matmul on matrices whose layout is right already. Both sides get the same number of threads; peers
that can use only one are marked "1 thread". At 2 threads, cdist computes half of the rows on each,
as it releases the interpreter's lock. Softmax and the norms run as jobs, all vertices together.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from typing import Any

import numba
import numpy as np
from scipy.spatial.distance import cdist
from scipy.special import erf
from threadpoolctl import threadpool_limits

import einmpi
from bench.lib.packages import has_package, package
from bench.lib.results import write_results
from einmpi.compiled.inputs import Inputs
from einmpi.kernels.contraction import recognise_contraction
from einmpi.kernels.cpu import dispatch
from einmpi.kernels.cpu.blas import workspace_bytes
from einmpi.runtime.cpu.backend import NumpyBackend

torch = package("torch") if find_spec("torch") else None  # without it, its columns are missing

REST_SECONDS = 0.02  # before each run, in which the threads of the previous one fall asleep
Arrays = dict[str, np.ndarray]
Run = Callable[[], Any]
Peer = Callable[[int, Arrays], Run]  # from threads and inputs, what is measured


@dataclass(frozen=True)
class Case:
    """One kernel and its peers.

    `way` is "kernel" for a kernel that fills an existing array, "fast" for the same with
    fast_math, and "job" for a whole run.
    """

    program: str
    shapes: dict[str, tuple[int, ...]]
    peers: dict[str, Peer]
    way: str = "kernel"
    is_random: bool = False  # peers draw other numbers


# ---- contractions -------------------------------------------------------------------------------

CONTRACTIONS: dict[str, tuple[str, dict[str, int]]] = {
    "square": ("ij,jk->ik", {"i": 1000, "j": 1000, "k": 1000}),
    "tall": ("ij,jk->ik", {"i": 20000, "j": 200, "k": 100}),
    "A^T B": ("ji,jk->ik", {"i": 800, "j": 1600, "k": 800}),
    "A B^T": ("ij,kj->ik", {"i": 800, "j": 1600, "k": 800}),
    "two sums": ("ijb,jbk->ik", {"i": 800, "j": 40, "b": 40, "k": 800}),
    "scores": ("bshd,bthd->bhst", {"b": 2, "s": 512, "t": 512, "h": 16, "d": 64}),
    "values": ("bhst,bthd->bshd", {"b": 2, "s": 512, "t": 512, "h": 16, "d": 64}),
    "reshape": ("abcd,cdef->abef", {"a": 30, "b": 30, "c": 30, "d": 30, "e": 30, "f": 30}),
    "permuted": ("ijkl,jlmk->im", {"i": 600, "j": 16, "k": 20, "l": 20, "m": 500}),
    "interleaved": ("iaj,jbk->abik", {"i": 40, "a": 40, "j": 600, "b": 10, "k": 80}),
    "heads": ("bsa,ahd->bhsd", {"b": 4, "s": 256, "a": 1024, "h": 16, "d": 64}),
    "vector": ("ij,j->i", {"i": 6000, "j": 6000}),
    "small": ("bij,bjk->bik", {"b": 20000, "i": 16, "j": 16, "k": 16}),
    "outer": ("i,j->ij", {"i": 6000, "j": 6000}),
}


def contraction(subscripts: str, extent: dict[str, int]) -> Case:
    (first, second), output = subscripts.split("->")[0].split(","), subscripts.split("->")[1]
    product = f"A[{','.join(first)}] * B[{','.join(second)}]"
    inner = any(label not in output for label in first)
    program = f"Z[{','.join(output)}] = {f'sum({product})' if inner else product}"
    shapes = {
        name: tuple(extent[x] for x in index) for name, index in (("A", first), ("B", second))
    }

    def laid_out(threads: int, arrays: Arrays) -> Run:
        sizes = dict(zip(first + second, arrays["A"].shape + arrays["B"].shape, strict=True))
        shared = [x for x in first if x in second]
        batch, m, k, n = (
            prod(sizes[x] for x in group)
            for group in (
                [x for x in shared if x in output],
                [x for x in first if x not in second],
                [x for x in shared if x not in output],
                [x for x in second if x not in first],
            )
        )
        a, b = arrays["A"].reshape(batch, m, k), arrays["B"].reshape(batch, k, n)
        out, limit = np.empty((batch, m, n), a.dtype), np.matmul if inner else np.multiply
        return lambda: limit(a, b, out=out)

    def by_einsum(threads: int, arrays: Arrays) -> Run:
        operands = tuple(arrays.values())
        out = np.einsum(subscripts, *operands, optimize=True)
        return lambda: np.einsum(subscripts, *operands, out=out, optimize=True)

    by_torch = with_torch(lambda A, B: torch.einsum(subscripts, A, B))
    return Case(program, shapes, {"laid out": laid_out, "numpy.einsum": by_einsum, **by_torch})


# ---- peers --------------------------------------------------------------------------------------


def plain(function: Callable[..., Any]) -> Peer:
    """Return a function of the inputs as a peer."""
    return lambda threads, arrays: lambda: function(**arrays)


def with_torch(function: Callable[..., Any]) -> dict[str, Peer]:
    """Return a function of torch tensors as a peer; none if torch is not installed."""

    def peer(threads: int, arrays: Arrays) -> Run:
        torch.set_num_threads(threads)
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return lambda: function(**tensors).numpy()

    return {"torch": peer} if torch is not None else {}


def distances(metric: str, turn: bool = False) -> Peer:
    def peer(threads: int, arrays: Arrays) -> Run:
        X, Y = arrays["X"], arrays["Y"]
        out, pool = np.empty((len(X), Y.shape[1] if turn else len(Y))), ThreadPoolExecutor(threads)
        parts = [slice(len(X) * k // threads, len(X) * (k + 1) // threads) for k in range(threads)]

        def run() -> np.ndarray:
            rows = np.ascontiguousarray(Y.T) if turn else Y
            list(pool.map(lambda part: cdist(X[part], rows, metric, out=out[part]), parts))
            return out

        return run

    return peer


def tiled_by_hand(threads: int, arrays: Arrays) -> Run:
    """Return the min-plus product in tiles of 4×64, as one would write it by hand."""
    numba.set_num_threads(threads)

    @numba.njit(parallel=threads > 1)
    def min_plus(a, b):  # type: ignore[no-untyped-def]
        rows, depth = a.shape
        columns = b.shape[1]
        out = np.empty((rows, columns), a.dtype)
        for block in numba.prange((rows + 3) // 4):
            i = min(block * 4, rows - 4)
            best = np.empty((4, 64), a.dtype)
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

    return lambda: min_plus(arrays["X"], arrays["Y"])


def min_plus_by_rows(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    return np.concatenate(
        [(X[i : i + 4, :, None] + Y[None]).min(axis=1) for i in range(0, len(X), 4)]
    )


def softmax(X: np.ndarray) -> np.ndarray:
    shifted = X - X.max(axis=1, keepdims=True)
    np.exp(shifted, out=shifted)
    shifted /= shifted.sum(axis=1, keepdims=True)
    return shifted


def rmsnorm(X: np.ndarray) -> np.ndarray:
    return X / np.sqrt(np.mean(X * X, axis=1, keepdims=True) + 1e-6)


def layernorm(X: np.ndarray) -> np.ndarray:
    shifted = X - X.mean(axis=1, keepdims=True)
    shifted /= np.sqrt(np.mean(shifted * shifted, axis=1, keepdims=True) + 1e-5)
    return shifted


def mask(X: np.ndarray) -> np.ndarray:
    n = np.arange(len(X))
    return np.where(n[None] <= n[:, None], X / 8.0, -np.inf)


def drawn(method: str) -> Peer:
    """Return a method of numpy's generator that fills an array of the shape of X."""

    def peer(threads: int, arrays: Arrays) -> Run:
        draw = getattr(np.random.Generator(np.random.Philox(1)), method)
        out = np.empty(arrays["X"].shape)
        return lambda: draw(out=out)

    return peer


# ---- the cases ----------------------------------------------------------------------------------

ROWS, LARGE = {"X": (2000, 500), "Y": (2000, 500)}, {"X": (4000, 4000)}
SQUARED = "Z[i,k] = sum((X[i,j] - Y[k,j])**2)"
squared_by_torch = with_torch(
    lambda X, Y: torch.cdist(X, Y, compute_mode="donot_use_mm_for_euclid_dist").square()
)
CASES: dict[str, Case] = {
    **{name: contraction(*case) for name, case in CONTRACTIONS.items()},
    "linf": Case(
        "Z[i,k] = max(abs(X[i,j] - Y[k,j]))",
        ROWS,
        {
            "scipy cdist": distances("chebyshev"),
            **with_torch(lambda X, Y: torch.cdist(X, Y, p=float("inf"))),
        },
    ),
    "linf-jk": Case(
        "Z[i,k] = max(abs(X[i,j] - Y[j,k]))",
        {"X": (2000, 500), "Y": (500, 2000)},
        {"scipy cdist of a copy": distances("chebyshev", turn=True)},
    ),
    "l2": Case(SQUARED, ROWS, {"scipy cdist": distances("sqeuclidean"), **squared_by_torch}),
    "l2-fast": Case(
        SQUARED, ROWS, {"scipy cdist": distances("sqeuclidean"), **squared_by_torch}, "fast"
    ),
    "min-plus": Case(
        "Z[i,k] = min(X[i,j] + Y[j,k])",
        {"X": (2000, 2000), "Y": (2000, 2000)},
        {"numba 4×64": tiled_by_hand},
    ),
    "min-plus-np": Case(
        "Z[i,k] = min(X[i,j] + Y[j,k])",
        {"X": (500, 500), "Y": (500, 500)},
        {"numpy, 1 thread": plain(min_plus_by_rows)},
    ),
    "softmax": Case(
        "Z[i,j] = softmax[j](X[i,j])",
        LARGE,
        {"numpy's 5 passes, 1 thread": plain(softmax), **with_torch(lambda X: torch.softmax(X, 1))},
        "job",
    ),
    "rmsnorm": Case(
        "Z[i,j] = rmsnorm[j](X[i,j])",
        LARGE,
        {
            "numpy, 1 thread": plain(rmsnorm),
            **with_torch(lambda X: torch.nn.functional.rms_norm(X, X.shape[1:], eps=1e-6)),
        },
        "job",
    ),
    "layernorm": Case(
        "Z[i,j] = layernorm[j](X[i,j])",
        LARGE,
        {
            "numpy, 1 thread": plain(layernorm),
            **with_torch(lambda X: torch.nn.functional.layer_norm(X, X.shape[1:])),
        },
        "job",
    ),
    "mask": Case(
        "Z[i,j] = where(j <= i, X[i,j] / 8.0, -inf)", LARGE, {"numpy, 1 thread": plain(mask)}
    ),
    "gelu": Case(
        "Z[i,j] = gelu(X[i,j])",
        {"X": (1000, 4000)},
        {
            "numpy and scipy's erf, 1 thread": plain(
                lambda X: 0.5 * X * (1 + erf(X / X.dtype.type(np.sqrt(2))))
            ),
            **with_torch(lambda X: torch.nn.functional.gelu(X)),
        },
    ),
    "tanh": Case(
        "Z[i,j] = tanh(X[i,j])",
        {"X": (1000, 4000)},
        {"numpy, 1 thread": plain(lambda X: np.tanh(X)), **with_torch(lambda X: torch.tanh(X))},
    ),
    # X says how many numbers there are; they are float64 in all dtypes of it.
    "uniform": Case(
        "Z[i,j] = uniform(1, i, j) + 0 * X[i,j]",
        {"X": (2500, 4000)},
        {"numpy's Philox, 1 thread": drawn("random")},
        is_random=True,
    ),
    "normal": Case(
        "Z[i,j] = normal(1, i, j) + 0 * X[i,j]",
        {"X": (2500, 4000)},
        {"numpy's Philox, 1 thread": drawn("standard_normal")},
        is_random=True,
    ),
    "rows": Case(
        "Z[i] = sum(X[i,j])",
        LARGE,
        {"numpy, 1 thread": plain(lambda X: X.sum(axis=1)), **with_torch(lambda X: X.sum(1))},
    ),
    "columns": Case(
        "Z[j] = sum(X[i,j])",
        LARGE,
        {"numpy, 1 thread": plain(lambda X: X.sum(axis=0)), **with_torch(lambda X: X.sum(0))},
    ),
    "norm": Case(
        "Z = sum(X[i,j]**2)",
        LARGE,
        {"numpy.einsum, 1 thread": plain(lambda X: np.einsum("ij,ij->", X, X))},
    ),
    "max": Case(
        "Z[i] = max(X[i,j])",
        LARGE,
        {"numpy, 1 thread": plain(lambda X: X.max(axis=1)), **with_torch(lambda X: X.amax(1))},
    ),
    "turn": Case(
        "Z[j,i] = X[i,j] * 2 + Y[j,i]",
        {"X": (4000, 4000), "Y": (4000, 4000)},
        {
            "numpy, 1 thread": plain(lambda X, Y: X.T * 2 + Y),
            **with_torch(lambda X, Y: X.T * 2 + Y),
        },
    ),
}


# ---- measuring ----------------------------------------------------------------------------------


def ours(case: Case, threads: int, arrays: Arrays) -> Run:
    """Prepare our side: inputs are in memory, plans are made, and a kernel's output exists."""
    job = einmpi.program(case.program, **arrays)
    if case.way == "job":
        compiled = einmpi.compile(job)
        compiled.runner.backend = NumpyBackend(threads)
        plan, schedule, given = compiled.prepare(arrays)
        inputs = Inputs(job, given, compiled.files)
        return lambda: compiled.run_schedule(plan, schedule, inputs)[0]["Z"].local
    (vertex,) = job.graph.computed
    operands = [arrays[name] for name in vertex.inputs]
    out = np.empty(vertex.bound, vertex.dtype)

    def run() -> np.ndarray:
        dispatch.compute_einsum(vertex.einsum, operands, out, {}, threads, case.way == "fast")
        return out

    return run


def copied(case: Case, arrays: Arrays) -> float | None:
    """Return the bytes of a contraction's temporaries, relative to its operands and result."""
    (vertex, *others) = einmpi.program(case.program, **arrays).graph.computed
    contraction = None if others else recognise_contraction(vertex.einsum)
    if contraction is None:
        return None
    total = vertex.nbytes + sum(array.nbytes for array in arrays.values())
    dtypes = [arrays[name].dtype.name for name in vertex.inputs]
    return workspace_bytes(contraction, dtypes, vertex.dtype) / total


def measure(name: str, dtype: str, threads: int, scale: float, repeat: int) -> dict[str, Any]:
    """Measure a row: medians of runs that take turns, so that all see the same machine.

    The first turn warms up. The order changes from turn to turn, so that no peer always follows
    the same other one.
    """
    case = CASES[name]
    rng = np.random.default_rng(0)
    arrays = {}
    for operand, shape in case.shapes.items():
        scaled = [max(4, round(extent * scale)) for extent in shape]
        arrays[operand] = rng.normal(size=scaled).astype(dtype)
    with threadpool_limits(limits=threads, user_api="blas"):
        runs = {"ours": ours(case, threads, arrays)}
        runs |= {peer: make(threads, arrays) for peer, make in case.peers.items()}
        results = {peer: np.array(run()) for peer, run in runs.items() if peer != "laid out"}
        if not case.is_random:
            check(name, results, dtype)
        seconds: dict[str, list[float]] = {peer: [] for peer in runs}
        for turn in range(repeat + 1):
            order = list(runs)[turn % len(runs) :] + list(runs)[: turn % len(runs)]
            if turn % 2:
                order.reverse()
            for peer in order:
                time.sleep(REST_SECONDS)
                start = time.perf_counter()
                runs[peer]()
                if turn:
                    seconds[peer].append(time.perf_counter() - start)
    medians = {peer: statistics.median(times) for peer, times in seconds.items()}
    base = medians.pop("ours")
    ratios = {peer: {"seconds": median, "ratio": median / base} for peer, median in medians.items()}
    return {
        "kernel": name,
        "program": case.program,
        "dtype": dtype,
        "threads": threads,
        "seconds": base,
        "peers": ratios,
        "copied": copied(case, arrays),
    }


def check(name: str, results: dict[str, np.ndarray], dtype: str) -> None:
    """Assert that all of them compute the same."""
    wanted = results.pop("ours")
    largest = float(np.abs(wanted[np.isfinite(wanted)]).max())
    near = (1e-4 if dtype == "float32" else 1e-9) * max(1.0, largest)
    for peer, found in results.items():
        np.testing.assert_allclose(found, wanted, rtol=near, atol=near, err_msg=f"{name}: {peer}")


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure all kernels, dtypes and numbers of threads that were asked for."""
    for name in given.kernels:
        for dtype in given.dtypes:
            for threads in given.threads:
                yield measure(name, dtype, threads, given.scale, given.repeat)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kernels", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["float64"], choices=["float64", "float32"])
    parser.add_argument("--scale", type=float, default=1.0, help="factor of every extent")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    given = parser.parse_args()
    has_package("torch", "torch")  # says so if it is not
    print(f"{'kernel':13}{'dtype':9}{'threads':>7}{'ms':>10}{'copied':>8}  time of a peer / ours")
    found = []
    for row in rows(given):
        found.append(row)
        part = "" if row["copied"] is None else f"{row['copied']:.2f}"
        peers = ", ".join(f"{peer} {one['ratio']:.2f}" for peer, one in row["peers"].items())
        figures = f"{row['seconds'] * 1e3:10.2f}{part:>8}  {peers}"
        print(f"{row['kernel']:13}{row['dtype']:9}{row['threads']:7}{figures}", flush=True)
    if given.json:
        write_results(given.json, found)


if __name__ == "__main__":
    main()
