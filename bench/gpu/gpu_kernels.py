"""Kernels on a GPU, compared with cupy.matmul, cupy.ElementwiseKernel and torch.

    python -m bench gpu_kernels [--kernels matmul linf softmax …] [--repeat 20] [--json FILE]

One row for each kernel and dtype: einmpi's median time, the rate, then the ratio of each peer's
time to einmpi's, measured in turns. Above 1, einmpi is faster. Results are compared with those of
the first peer.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import einmpi
from bench.lib.packages import package
from bench.lib.results import write_results
from einmpi.comm.base import ALONE

cupy = package("cupy")

try:
    import torch
except ImportError:  # its columns are left out
    torch = None

Arrays = dict[str, Any]
Peer = Callable[[Arrays], Callable[[], Any]]  # takes the inputs, returns what is timed


@dataclass(frozen=True)
class Case:
    program: str
    shapes: dict[str, tuple[int, ...]]
    dtypes: tuple[str, ...]
    operations: float  # with the unit "numbers": how many are read and written
    peers: dict[str, Peer]
    unit: str = "T op/s"


def of_torch(function: Callable[..., Any]) -> Peer:
    def make(arrays: Arrays) -> Callable[[], Any]:
        given = [torch.as_tensor(array, device="cuda") for array in arrays.values()]
        return lambda: function(*given)

    return make


def elementwise(text: str) -> Peer:
    def make(arrays: Arrays) -> Callable[[], Any]:
        names = list(arrays)
        kernel = cupy.ElementwiseKernel(", ".join(f"T {name}" for name in names), "T z", text)
        return lambda: kernel(*(arrays[name] for name in names))

    return make


def compiled(function: Callable[..., Any]) -> Peer:
    return lambda arrays: of_torch(torch.compile(function))(arrays)


def single(x: Any) -> Any:
    return x.float() if x.dtype == torch.float16 else x


def attend(q: Any, k: Any, v: Any) -> Any:
    scores = torch.einsum("bshd,bthd->bhst", q, k) / 128**0.5
    return torch.einsum("bhst,bthd->bshd", torch.softmax(scores, -1), v)


RUNS_AT_ONCE = 5
INFINITY = float("inf")
SIZE = 8192
HEADS = (8, 1024, 32, 128)
CASES = {
    "matmul": Case(
        "Z[i,k] = sum(A[i,j] * B[j,k])",
        {"A": (SIZE, SIZE), "B": (SIZE, SIZE)},
        ("float16", "bfloat16", "float32", "float64", "complex64"),
        2.0 * SIZE**3,
        {"cupy.matmul": lambda x: lambda: cupy.matmul(x["A"], x["B"])},
    ),
    "A^T B": Case(
        "Z[i,k] = sum(A[j,i] * B[j,k])",
        {"A": (SIZE, SIZE), "B": (SIZE, SIZE)},
        ("float32", "float16"),
        2.0 * SIZE**3,
        {"cupy.matmul": lambda x: lambda: cupy.matmul(x["A"].T, x["B"])},
    ),
    "scores": Case(
        "Z[b,h,s,t] = sum(Q[b,s,h,d] * K[b,t,h,d])",
        {"Q": HEADS, "K": HEADS},
        ("float32", "float16"),
        2.0 * 8 * 32 * 1024**2 * 128,
        {"torch.einsum": of_torch(lambda q, k: torch.einsum("bshd,bthd->bhst", q, k))},
    ),
    "linf": Case(
        "Z[i,k] = max(abs(X[i,j] - Y[j,k]))",
        {"X": (4000, 1000), "Y": (1000, 4000)},
        ("float32", "float64", "float16"),
        3 * 4000.0 * 1000 * 4000,
        {
            "torch.cdist": of_torch(
                lambda x, y: torch.cdist(single(x), single(y.T.contiguous()), p=INFINITY)
            )
        },
    ),
    "min-plus": Case(
        "Z[i,k] = min(X[i,j] + Y[j,k])",
        {"X": (4000, 1000), "Y": (1000, 4000)},
        ("float32", "int32"),
        2 * 4000.0 * 1000 * 4000,
        {},
    ),
    "l2": Case(
        "Z[i,k] = sum((X[i,j] - Y[k,j])**2)",
        {"X": (4000, 1000), "Y": (4000, 1000)},
        ("float32",),
        3 * 4000.0 * 1000 * 4000,
        {},
    ),
    "map": Case(
        "Z[i] = exp(-x[i]**2) * y[i] + x[i]",
        {"x": (2**28,), "y": (2**28,)},
        ("float32", "float16"),
        3.0 * 2**28,
        {
            "ElementwiseKernel": elementwise("z = exp(-x * x) * y + x"),
            "torch.compile": compiled(lambda x, y: torch.exp(-(x**2)) * y + x),
        },
        "numbers",
    ),
    "turned": Case(
        "Z[i,j] = x[j,i] + y[i,j]",
        {"x": (16384, 16384), "y": (16384, 16384)},
        ("float32", "float16"),
        3.0 * 2**28,
        {"torch.compile": compiled(lambda x, y: x.T + y)},
        "numbers",
    ),
    "rows": Case(
        "Z[i] = sum(x[i,j])",
        {"x": (2**16, 4096)},
        ("float32", "float16"),
        2.0**28,
        {"torch": of_torch(lambda x: x.sum(1))},
        "numbers",
    ),
    "columns": Case(
        "Z[j] = sum(x[i,j])",
        {"x": (2**16, 4096)},
        ("float32", "float16"),
        2.0**28,
        {"torch": of_torch(lambda x: x.sum(0))},
        "numbers",
    ),
    "total": Case(
        "Z = max(x[i,j])",
        {"x": (2**16, 4096)},
        ("float32", "float16"),
        2.0**28,
        {"torch": of_torch(lambda x: x.max())},
        "numbers",
    ),
    "softmax": Case(
        "Z[i,j] = softmax[j](x[i,j])",
        {"x": (2**18, 1024)},
        ("float32", "float16"),
        2.0 * 2**28,
        {"torch": of_torch(lambda x: torch.softmax(x, 1))},
        "numbers",
    ),
    "attention": Case(
        "T[b,h,s,t] = sum(Q[b,s,h,d] * K[b,t,h,d])\n"
        "P[b,h,s,t] = softmax[t](T[b,h,s,t] / sqrt(128))\n"
        "Z[b,s,h,d] = sum(P[b,h,s,t] * V[b,t,h,d])",
        {"Q": HEADS, "K": HEADS, "V": HEADS},
        ("float32", "float16"),
        4.0 * 8 * 32 * 1024**2 * 128,
        {"torch eager": of_torch(attend)},
    ),
}


def inputs(case: Case, dtype: str) -> Arrays:
    rng = cupy.random.default_rng(1)
    made = {}
    for name, shape in case.shapes.items():
        values = rng.random(shape, dtype=np.float32) - np.float32(0.5)
        if dtype == "bfloat16":
            import ml_dtypes

            made[name] = values.astype(ml_dtypes.bfloat16)
        else:
            made[name] = (values * 1000 if dtype.startswith("int") else values).astype(dtype)
    return made


def ours(case: Case, dtype: str, arrays: Arrays) -> Callable[[], Any]:
    """Return calls of the compiled program on one rank, with its inputs on the GPU."""
    compiled = einmpi.compile(einmpi.program(case.program, backend="cupy", **arrays), ALONE)

    def run() -> Any:
        return compiled(arrays)["Z"].local

    return run


def seconds(run: Callable[[], Any]) -> float:
    """Return how long a run takes, if the host starts some of them one after the other."""
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for _ in range(RUNS_AT_ONCE):
        run()
    stop.record()
    stop.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, stop)) / 1e3 / RUNS_AT_ONCE


def measure(name: str, dtype: str, repeat: int) -> dict[str, Any]:
    case = CASES[name]
    arrays = inputs(case, dtype)
    runs = {"ours": ours(case, dtype, arrays)}
    for peer, make in case.peers.items():
        try:
            runs[peer] = make(arrays)
            runs[peer]()
        except Exception as error:  # a peer may lack a dtype
            print(f"    {name} {dtype}: no {peer}: {type(error).__name__} {str(error)[:120]}")
            runs.pop(peer, None)
    if len(runs) > 1:
        compare(runs["ours"](), list(runs.values())[1](), dtype)
    times: dict[str, list[float]] = {key: [] for key in runs}
    for turn in range(repeat + 3):
        for key, run in runs.items():
            taken = seconds(run)
            if turn >= 3:  # the first turns compile
                times[key].append(taken)
    median = {key: statistics.median(taken) for key, taken in times.items()}
    rate = case.operations / median["ours"] / 1e12
    unit = case.unit
    if unit == "numbers":
        rate, unit = rate * np.dtype("float16" if dtype == "bfloat16" else dtype).itemsize, "TB/s"
    peers = {key: median[key] / median["ours"] for key in runs if key != "ours"}
    return {
        "kernel": name,
        "dtype": dtype,
        "seconds": median["ours"],
        "rate": rate,
        "unit": unit,
        "peers": peers,
    }


def compare(found: Any, wanted: Any, dtype: str) -> None:
    a, b = (
        x.astype(np.result_type(x.dtype, np.float64))
        if isinstance(x, cupy.ndarray)
        else cupy.asarray(x.double())
        for x in (found, wanted)
    )
    worst = float(cupy.abs(a - b).max() / cupy.abs(b).max())
    limit = {"float16": 5e-3, "bfloat16": 4e-2, "float32": 1e-4, "complex64": 1e-4}.get(
        dtype, 1e-10
    )
    assert worst <= limit, f"the results differ by {worst:.1e} of the largest value"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json")
    given = parser.parse_args()
    rows = []
    for name in given.kernels:
        for dtype in CASES[name].dtypes:
            cupy.get_default_memory_pool().free_all_blocks()
            try:
                row = measure(name, dtype, given.repeat)
            except AssertionError as error:
                print(f"{name:10} {dtype:10} {error}", flush=True)
                continue
            rows.append(row)
            peers = "  ".join(f"{peer} {ratio:.2f}" for peer, ratio in row["peers"].items())
            rate = f"{row['rate']:7.2f} {row['unit']:6}"
            print(
                f"{name:10} {dtype:10} {row['seconds'] * 1e3:8.3f} ms {rate}  {peers}", flush=True
            )
    if given.json:
        write_results(given.json, rows)


if __name__ == "__main__":
    main()
