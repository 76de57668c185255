"""LLaMA's prefill on one GPU, with the weights on the GPU and with the weights in host memory.

    python -m bench gpu_llama [--model 7B] [--layers 32] [--batches 1 8] [--parts device host]

All weights are random. With `host` the GPU may hold a quarter of the weights besides the
activations, and whole calls are timed; they can take no less than the bus needs for all weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from math import prod, sqrt
from typing import Any

import numpy as np

import einmpi
from bench.lib.packages import package
from bench.lib.results import write_results
from einmpi.comm.base import ALONE
from einmpi.models.config import NAMED
from einmpi.units import show_bytes
from tests.lib.paper_llama import llama_program

cupy = package("cupy")


def random_values(shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    values = cupy.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return (values / sqrt(shape[0])).astype(dtype)


def random_weights(shapes: dict[str, tuple[int, ...]], dtype: str) -> dict[str, Any]:
    """Return weights on the GPU; those of all layers are different."""
    return {
        name: random_values(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())
    }


def timed(call: Any, repeats: int) -> dict[str, float]:
    """Return the median seconds of a call, and of the host's part of it."""
    totals = []
    returned = []
    for turn in range(repeats + 3):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        result = call()
        middle = time.perf_counter()
        cupy.cuda.Device().synchronize()
        if turn > 2:  # the first turns compile kernels and capture graphs
            totals.append(time.perf_counter() - start)
            returned.append(middle - start)
        del result
    return {
        "seconds": statistics.median(totals),
        "fastest": min(totals),
        "until_return": statistics.median(returned),
    }


def show(name: str, found: dict[str, float]) -> None:
    milliseconds = {key: f"{1e3 * value:.2f}" for key, value in found.items()}
    print(
        f"{name:36} {milliseconds['seconds']} ms, fastest {milliseconds['fastest']}, "
        f"on the host {milliseconds['until_return']}",
        flush=True,
    )


def measure(options: argparse.Namespace, batch: int, weights: dict[str, Any]) -> dict[str, Any]:
    text, shapes, _ = llama_program(NAMED[options.model], batch, options.sequence, options.layers)
    last = f"x_{options.layers or NAMED[options.model].layers}"
    job = einmpi.program(text, outputs=[last], dtype=options.dtype, **shapes)
    job = replace(job, backend="cupy")
    x = random_values(shapes["x_0"], options.dtype, 999)
    inputs = {"x_0": x, **weights}
    found: dict[str, Any] = {"batch": batch}
    wanted = None
    if "device" in options.parts:
        compiled = einmpi.compile(job, ALONE)
        wanted = cupy.asnumpy(compiled(inputs)[last].local)
        found["device"] = timed(lambda: compiled(inputs)[last], options.repeats)
        show(f"B{batch}, weights on the GPU", found["device"])
        if options.profile:
            print_kernels(lambda: compiled(inputs)[last])
    if "host" in options.parts:
        on_host = {name: cupy.asnumpy(array) for name, array in weights.items()}
        nbytes = sum(array.nbytes for array in on_host.values())
        activations = einmpi.plan(job, 1).peak  # each weight is there only when it is used
        limit = activations + int(options.share * nbytes)
        limited = einmpi.compile(replace(job, memory=limit), ALONE)
        given = {"x_0": cupy.asnumpy(x), **on_host}
        result = limited(given)[last].local
        if wanted is not None:
            assert np.array_equal(cupy.asnumpy(result), wanted), "the results differ"
        del result
        found["host"] = timed(lambda: limited(given)[last], options.repeats)
        measured = limited.measured
        show(f"B{batch}, {show_bytes(nbytes)} of weights on the host", found["host"])
        print(f"  limit {show_bytes(limit)}, peak {show_bytes(measured.peak)}")
    return found


def print_kernels(call: Any) -> None:
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        cupy.cuda.Device().synchronize()
    totals: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_time_total:
            entry = totals.setdefault(event.name, [0, 0.0])
            entry[0] += 1
            entry[1] += event.device_time_total
    for name, (count, microseconds) in sorted(totals.items(), key=lambda item: -item[1][1])[:20]:
        print(f"    {microseconds:9.0f} µs  {count:4} × {name:.100}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="7B", choices=NAMED)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument(
        "--parts", nargs="*", choices=["device", "host"], default=["device", "host"]
    )
    parser.add_argument("--share", type=float, default=0.25, help="of the weights on the GPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    _, shapes, names = llama_program(NAMED[options.model], 1, 8, options.layers)
    weights = random_weights({name: shapes[name] for name in names}, options.dtype)
    print(f"{sum(prod(shapes[name]) for name in names) / 1e9:.2f} G weights", flush=True)
    rows = [measure(options, batch, weights) for batch in options.batches]
    if options.json:
        write_results(options.json, rows)


if __name__ == "__main__":
    main()
