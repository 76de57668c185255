"""Whole jobs on one GPU, compared with the same written in CuPy and torch.

    python -m bench gpu [--part chain] [--sizes 4000 8000] [--dtypes float32 float16] [--json FILE]

Parts: the matrix chain, a fused map, attention, and the chain with little memory (`limited`).
Inputs are on the GPU already, except in `limited`, where they are in host memory. A call is timed
until the GPU is done. All candidates take turns; a ratio compares the medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

import numpy as np

import einmpi
from bench import ROOT
from bench.lib.packages import package
from bench.lib.results import write_results
from einmpi.comm.base import ALONE
from einmpi.report.describe import TOLERANCE
from einmpi.units import show_bytes

cupy = package("cupy")

JOB = ROOT / "jobs" / "chain.toml"
BUS_BYTES_PER_SECOND = 55e9  # between pinned memory and an H200
Candidate = Callable[[], Any]  # what is timed
ATTENTION = """
T[b,h,s,t] = sum(Q[b,s,h,d] * K[b,t,h,d]) / sqrt(size)
O[b,s,h,d] = sum(softmax[t](T[b,h,s,t]) * V[b,t,h,d])
"""
MAP = "Z[i,j] = tanh(2 * X[i,j] + Y[i,j]) * exp(-X[i,j]**2)"


def medians(candidates: Mapping[str, Candidate], repeats: int) -> dict[str, float]:
    """Return the seconds of each candidate; all take turns."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(repeats + 2):
        for name, candidate in candidates.items():
            cupy.cuda.Device().synchronize()
            start = time.perf_counter()
            result = candidate()
            cupy.cuda.Device().synchronize()
            if turn > 1:  # the first two turns warm up
                times[name].append(time.perf_counter() - start)
            del result
    return {name: statistics.median(each) for name, each in times.items()}


def row(
    name: str, candidates: Mapping[str, Candidate], repeats: int, operations: float = 0
) -> dict[str, Any]:
    """Time the candidates and print a line. Where a ratio is above 1, einmpi is faster."""
    seconds = medians(candidates, repeats)
    own = seconds["einmpi"]
    ratios = {peer: each / own for peer, each in seconds.items() if peer != "einmpi"}
    shown = ", ".join(
        f"{ratio:.2f} × {peer} ({1e3 * seconds[peer]:.3f} ms)" for peer, ratio in ratios.items()
    )
    rate = f", {operations / own / 1e12:.1f} T op/s" if operations else ""
    print(f"{name:44} {1e3 * own:9.3f} ms{rate}: {shown}", flush=True)
    return {"name": name, "seconds": seconds, "ratios": ratios}


def close(found: Any, wanted: Any, dtype: str) -> None:
    """Check that two results agree, except for rounding and the order of sums."""
    difference = abs(found.astype(np.float64) - wanted.astype(np.float64)).max()
    error = float(difference / abs(wanted).max())
    assert error < TOLERANCE[dtype], f"the results differ by {error}"


def torch_or_none() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch


def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """Return normal numbers that are small enough for sums in half precision."""
    values = cupy.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return (values / sqrt(shape[-1])).astype(dtype)


def call_of(job: einmpi.Job, arrays: Mapping[str, Any], output: str) -> Candidate:
    compiled = einmpi.compile(replace(job, backend="cupy"), ALONE)
    return lambda: compiled(arrays)[output].local


# ---- parts --------------------------------------------------------------------------------------


def chain(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows, torch = [], torch_or_none()
    for dtype in options.dtypes:
        for size in options.sizes:
            for kind, skew in (("uniform", 1), ("skewed", 10)):
                thin, long = size // skew, size * skew
                shapes = {
                    "A": (size, thin),
                    "B": (thin, size),
                    "C": (size, thin),
                    "D": (thin, long),
                    "E": (long, size),
                }
                arrays = {name: numbers(shape, dtype, ord(name)) for name, shape in shapes.items()}
                job = einmpi.load(JOB, dtype=dtype, s=size, skew=skew)
                candidates: dict[str, Candidate] = {
                    "einmpi": call_of(job, arrays, "Z"),
                    "cupy": partial(chain_by_hand, arrays),
                }
                if torch is not None:
                    tensors = {
                        name: torch.as_tensor(array, device="cuda")
                        for name, array in arrays.items()
                    }
                    candidates["torch"] = partial(chain_by_hand, tensors)
                close(candidates["einmpi"](), candidates["cupy"](), dtype)
                operations = 2 * (2 * size * thin * size + thin * long * size)
                rows.append(
                    row(f"chain {kind} s = {size} {dtype}", candidates, options.repeats, operations)
                )
    return rows


def chain_by_hand(x: Mapping[str, Any]) -> Any:
    return x["A"] @ x["B"] + x["C"] @ (x["D"] @ x["E"])


def fused(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows, torch = [], torch_or_none()
    for dtype in options.dtypes:
        x, y = (numbers((8192, 8192), dtype, seed) for seed in (1, 2))
        job = einmpi.program(MAP, X=x, Y=y)
        kernel = cupy.ElementwiseKernel(
            "T x, T y",
            "T z",
            "z = (T)(tanh(2 * (float)x + (float)y) * exp(-(float)x * (float)x))",
            "by_hand",
        )
        candidates: dict[str, Candidate] = {
            "einmpi": call_of(job, {"X": x, "Y": y}, "Z"),
            "cupy.ElementwiseKernel": lambda x=x, y=y, kernel=kernel: kernel(x, y),
        }
        close(candidates["einmpi"](), candidates["cupy.ElementwiseKernel"](), dtype)
        if torch is not None:
            function = torch.compile(lambda a, b: torch.tanh(2 * a + b) * torch.exp(-(a * a)))
            a, b = (torch.as_tensor(array, device="cuda") for array in (x, y))
            try:
                function(a, b)
                candidates["torch.compile"] = lambda a=a, b=b, function=function: function(a, b)
            except Exception as error:  # it needs a compiler of its own
                print(f"torch.compile does not work here: {' '.join(str(error).split()):.100}")
        rows.append(row(f"map 8192×8192 {dtype}", candidates, options.repeats))
    return rows


def attention(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows, torch = [], torch_or_none()
    shape = (8, 1024, 32, 128)
    for dtype in options.dtypes:
        arrays = {name: numbers(shape, dtype, ord(name)) for name in "QKV"}
        job = einmpi.program(ATTENTION, size=shape[-1], **arrays)
        candidates: dict[str, Candidate] = {"einmpi": call_of(job, arrays, "O")}
        if torch is not None:
            q, k, v = (torch.as_tensor(arrays[name], device="cuda") for name in "QKV")

            def eager(q: Any = q, k: Any = k, v: Any = v) -> Any:
                scores = torch.einsum("bshd,bthd->bhst", q, k) / sqrt(shape[-1])
                return torch.einsum("bhst,bthd->bshd", torch.softmax(scores, -1), v)

            candidates["torch"] = eager
            close(candidates["einmpi"](), cupy.asarray(eager()), dtype)
        rows.append(row(f"attention B8 S1024 H32 D128 {dtype}", candidates, options.repeats))
    return rows


def limited(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time the chain with a quarter of the memory that it would use, and without a limit.

    The inputs are in host memory, and whole calls are timed. Print also how long the bus alone
    takes for the bytes between host and GPU.
    """
    rows = []
    for dtype in options.dtypes:
        for size in options.sizes:
            arrays = {
                name: cupy.asnumpy(numbers((size, size), dtype, ord(name))) for name in "ABCDE"
            }
            job = replace(einmpi.load(JOB, dtype=dtype, s=size), backend="cupy")
            memory = einmpi.plan(job, 1).peak // 4
            limited_call = einmpi.compile(replace(job, memory=memory), ALONE)
            unlimited_call = einmpi.compile(job, ALONE)
            found = cupy.asarray(limited_call(arrays)["Z"].local)
            wanted = cupy.asarray(unlimited_call(arrays)["Z"].local)
            close(found, wanted, dtype)
            del found, wanted
            ((_, schedule),) = limited_call.ready.values()
            placed = [slot for step in schedule.steps for slot in step.spills("place")]
            # The host itself writes the inputs to its memory: these bytes are not on the bus.
            written = sum(slot.nbytes for slot in placed if slot.name in arrays)
            measured = limited_call.measured
            moved = measured.spilled - written + measured.fetched
            bus = f"{1e3 * moved / BUS_BYTES_PER_SECOND:.1f} ms on the bus"
            print(f"chain s = {size} {dtype}, {show_bytes(moved)} between host and GPU: {bus}")
            candidates: dict[str, Candidate] = {
                "einmpi": partial(limited_call, arrays),
                "all memory": partial(unlimited_call, arrays),
            }
            name = f"  with {show_bytes(memory)}, peak {show_bytes(measured.peak)}"
            rows.append(
                row(name, candidates, options.repeats)
                | {"size": size, "dtype": dtype, "bytes": moved}
            )
    return rows


PARTS = {"chain": chain, "fused": fused, "attention": attention, "limited": limited}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sizes", type=int, nargs="*", default=[4000, 8000])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "float16"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    rows = [found for part in options.part for found in PARTS[part](options)]
    if options.json:
        write_results(options.json, rows)


if __name__ == "__main__":
    main()
