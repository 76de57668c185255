"""What people compute every day, compared with numpy on one rank.

    python -m bench daily [--cases argmin pooling …] [--repeat 7] [--small] [--cpu-time]
                          [--backend gpu] [--json FILE]

A row is a case of daily_cases.py: the median times of einmpi and of numpy, measured in turns with
one thread each, and their ratio. Below 1, einmpi is faster. On a busy machine --cpu-time counts the
time of the processor instead of the clock's. With --backend gpu both compute on a GPU, numpy's side
by CuPy.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

import einmpi
from bench.kernels.daily_cases import CASES, Case
from bench.lib.results import write_results
from einmpi.comm.base import ALONE
from einmpi.runtime.cpu.backend import NumpyBackend

TOLERANCE = 1e-9  # relative to the largest element


def prepare(case: Case, sizes: dict[str, int], gpu: bool) -> dict[str, Callable[[], Any]]:
    """Return both candidates; their inputs are in memory."""
    arrays = case.inputs(np.random.default_rng(0), sizes)
    job = einmpi.program(case.program, **arrays, **sizes)
    module: Any = np
    if gpu:
        import cupy

        module = cupy
        arrays = {name: cupy.asarray(array) for name, array in arrays.items()}
        job = replace(job, backend="cupy")
    compiled = einmpi.compile(job, ALONE)
    if not gpu:
        compiled.runner.backend = NumpyBackend(threads=1)

    def by_einmpi() -> list[Any]:
        results = [array.local for array in compiled(arrays).values()]
        compiled.backend.wait()
        return results

    def by_numpy() -> list[Any]:
        results = list(case.by_numpy(module, **arrays))
        if gpu:
            module.cuda.Device().synchronize()
        return results

    return {"einmpi": by_einmpi, "numpy": by_numpy}


def check(name: str, candidates: dict[str, Callable[[], Any]]) -> None:
    """Assert that both compute the same."""
    for found, wanted in zip(candidates["einmpi"](), candidates["numpy"](), strict=True):
        if not isinstance(found, np.ndarray):  # of CuPy
            found = found.get()
            wanted = wanted.get()
        largest = max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(found, wanted, TOLERANCE, TOLERANCE * largest, err_msg=name)


def measure(
    name: str, small: bool, repeat: int, gpu: bool, clock: Callable[[], float]
) -> dict[str, Any]:
    """Measure a row: medians of runs that take turns; the first turn warms up."""
    case = CASES[name]
    sizes = case.small if small else case.sizes
    with threadpool_limits(limits=1, user_api="blas"):
        candidates = prepare(case, sizes, gpu)
        check(name, candidates)
        seconds: dict[str, list[float]] = {key: [] for key in candidates}
        for turn in range(repeat + 1):
            for key, candidate in candidates.items():
                start = clock()
                result = candidate()
                if turn:
                    seconds[key].append(clock() - start)
                del result
    medians = {key: statistics.median(times) for key, times in seconds.items()}
    ratio = medians["einmpi"] / medians["numpy"]
    return {"case": name, "sizes": sizes, "peer": case.peer, "seconds": medians, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="NAME")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="with the sizes of the tests")
    parser.add_argument("--backend", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    given = parser.parse_args()
    clock = time.process_time if given.cpu_time else time.perf_counter
    print(f"{'case':22}{'einmpi ms':>11}{'numpy ms':>10}{'ratio':>7}  compared with")
    rows = []
    for name in given.cases:
        row = measure(name, given.small, given.repeat, given.backend == "gpu", clock)
        rows.append(row)
        einmpi_ms = 1e3 * row["seconds"]["einmpi"]
        numpy_ms = 1e3 * row["seconds"]["numpy"]
        print(
            f"{name:22}{einmpi_ms:11.1f}{numpy_ms:10.1f}{row['ratio']:7.2f}  {row['peer']}",
            flush=True,
        )
    if given.json:
        write_results(given.json, rows)


if __name__ == "__main__":
    main()
