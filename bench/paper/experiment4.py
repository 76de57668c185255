"""Prefill of LLaMA with the weights in host memory (the paper's experiment 4), and its peers.

    python -m bench experiment4 [--model 7B] [--batches 1 16] [--sequences 512 1024 2048 4096]
                                [--peers accelerate-cpu accelerate-disk zero-inference flexgen …]
                                [--share 0.25] [--dtype float16] [--backend cupy] [--repeat 3]
    python -m bench experiment4 --backend numpy --dtype float32 --model tiny --batches 1 2
    python -m bench experiment4 --plan [--models 7B 65B] [--devices 8x40GB] [--batches 16]

The first form runs on one device, which may hold --share of the weights besides the activations.
The weights are random arrays in host memory, the same for all; the logits of all are compared.
Peers that are not installed are named and left out: nothing is downloaded. "bus" is the time that
the weights take from pinned host memory to the GPU, and "transformers" has them on the device. All
take turns, and times are medians of whole calls.

The second form plans for several devices: words that move between ranks, operations of a rank, and
the bytes that a rank reads of the weights. The paper's server had eight GPUs of 40 GB.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import einmpi
from bench.lib.llama_jobs import (
    LOGITS,
    MODELS,
    TOKENS,
    call_inputs,
    model_of,
    on_host,
    prefill_job,
    show_row,
    weight_spread,
)
from bench.lib.llama_peers import PEERS, Call, Prepared, Skipped
from bench.lib.results import write_results
from bench.paper.experiment3 import COMPARED, TOLERANCE, pair, plan_row
from einmpi.comm.base import ALONE
from einmpi.models.config import Config
from einmpi.models.programs import weights_of
from einmpi.units import show_bytes, show_count

WIDTHS = {"batch": 5, "sequence": 8, "way": 16, "seconds": 9, "fastest": 9, "ratio": 6}
PLAN_WIDTHS = {
    "model": 5,
    "batch": 5,
    "sequence": 8,
    "ranks": 5,
    "memory": 9,
    "strategy": 15,
    "words": 17,
    "operations": 19,
    "peak": 9,
    "weights": 9,
}
RANDOM_NUMBERS = 2**24  # that all weights are made of: drawing billions would take minutes
BUS_BYTES = 2**28  # of one copy


def random_weights(config: Config, dtype: str) -> dict[str, Any]:
    """Return weights by the names of inputs, each an array of its own in host memory."""
    rng = np.random.default_rng(0)
    spread = weight_spread(config)
    numbers = rng.uniform(-spread, spread, RANDOM_NUMBERS).astype(dtype)
    found = {}
    for name, weight in weights_of(config).items():
        if len(weight.shape) == 1:
            found[name] = np.ones(weight.shape, dtype)
            continue
        start = int(rng.integers(RANDOM_NUMBERS))
        found[name] = np.resize(np.roll(numbers, -start), weight.shape)
    return found


def as_checkpoint(config: Config, weights: dict[str, Any]) -> dict[str, Any]:
    """Return the weights by the names and in the shapes of a checkpoint: views, not copies."""
    found = {}
    for name, weight in weights_of(config).items():
        array = weights[name]
        rows = array.shape[0]
        if name.startswith(("wq", "wk", "wv")):  # [heads, numbers of a head, width]
            rows = array.size // config.width
        found[weight.tensor] = array if array.ndim == 1 else array.reshape(rows, -1)
    return found


# ---- ways to compute ----------------------------------------------------------------------------


def own_way(
    config: Config,
    batch: int,
    sequence: int,
    weights: dict[str, Any],
    given: argparse.Namespace,
    details: dict[str, Any],
) -> Call:
    """Return einmpi's function of tokens; `details` gets its limit and its peak."""
    job = prefill_job(config, batch, sequence, given.dtype, given.backend, resident=False)
    limit = None  # a CPU computes with the weights where they are
    if given.backend == "cupy":
        nbytes = sum(array.nbytes for array in weights.values())
        activations = einmpi.plan(job, 1).peak  # each weight is there only when it is used
        limit = activations + int(given.share * nbytes)
    compiled = einmpi.compile(replace(job, memory=limit), ALONE)
    inputs = {**call_inputs(config, batch, sequence), **weights}

    def call(tokens: Any) -> Any:
        logits = on_host(compiled({**inputs, TOKENS: tokens})[LOGITS].gather())
        measured = compiled.measured
        assert measured is not None
        details["bytes_limit"] = limit
        details["bytes_peak"] = measured.peak
        return logits

    return call


def bus_seconds(nbytes: int) -> float:
    """Return how long so many bytes take from pinned host memory to the GPU."""
    import cupy

    pinned = cupy.cuda.alloc_pinned_memory(BUS_BYTES)
    on_host = np.frombuffer(pinned, np.uint8, BUS_BYTES)
    on_device = cupy.empty(BUS_BYTES, np.uint8)
    times = []
    for _ in range(6):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        on_device.set(on_host)
        cupy.cuda.Device().synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * nbytes / BUS_BYTES


def prepare_peers(given: argparse.Namespace, prepared: Prepared) -> dict[str, Call]:
    """Return the peers that run here; say of the others why they do not."""
    found = {}
    for name in given.peers:
        try:
            found[name] = PEERS[name](prepared)
        except Skipped as reason:
            print(f"{name} is left out: {reason}", flush=True)
        except Exception as error:  # of a package that is there and does not work
            text = " ".join(str(error).split())
            print(f"{name} is left out: {type(error).__name__}: {text:.200}", flush=True)
    return found


# ---- measuring ----------------------------------------------------------------------------------


def take_turns(ways: dict[str, Call], tokens: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Return the times of each way, or why it failed. All take turns after a first one."""
    times: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    wanted = None
    for turn in range(given.repeat + 1):
        for name, call in ways.items():
            if name in failed:
                continue
            start = time.perf_counter()
            try:
                logits = call(tokens)
            except Exception as error:  # such as too little memory of a peer; others go on
                if name == "einmpi":
                    raise
                failed[name] = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
                continue
            took = time.perf_counter() - start
            if turn > 0:
                times.setdefault(name, []).append(took)
                continue
            assert np.isfinite(logits).all(), f"{name}: logits are not finite"
            wanted = logits if wanted is None else wanted
            error_of_way = float(np.abs(logits - wanted).max() / np.abs(wanted).max())
            assert error_of_way <= TOLERANCE[given.dtype], f"{name}: differs by {error_of_way:.1e}"
    return {"times": times, "failed": failed}


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all batches and sequences, and print a line for each way."""
    config = model_of(given.model, given.layers)
    weights = random_weights(config, given.dtype)
    nbytes = sum(array.nbytes for array in weights.values())
    print(f"{given.model}: {show_bytes(nbytes)} of weights in host memory, {given.dtype}")
    device = "cuda" if given.backend == "cupy" else "cpu"
    prepared = Prepared(config, as_checkpoint(config, weights), given.dtype, device)
    peers = prepare_peers(given, prepared)
    print(show_row({name: name for name in WIDTHS}, WIDTHS), flush=True)
    rows = []
    for batch in given.batches:
        for sequence in given.sequences:
            details: dict[str, Any] = {}
            own = own_way(config, batch, sequence, weights, given, details)
            tokens = call_inputs(config, batch, sequence)[TOKENS]
            found = take_turns({"einmpi": own, **peers}, tokens, given)
            case = {"model": given.model, "batch": batch, "sequence": sequence}
            if given.backend == "cupy":
                found["times"]["bus"] = [bus_seconds(nbytes)]
            first = statistics.median(found["times"]["einmpi"])
            for name, times in found["times"].items():
                row = {**case, "way": name, "seconds": statistics.median(times), "times": times}
                row["ratio"] = first / row["seconds"]
                rows.append({**row, **(details if name == "einmpi" else {})})
                print(show_times(rows[-1]), flush=True)
            for name, reason in found["failed"].items():
                rows.append({**case, "way": name, "failed": reason})
                print(f"{batch:5}  {sequence:8}  {name:16}  {reason}", flush=True)
    return rows


def show_times(row: dict[str, Any]) -> str:
    """Return the line of a way; the ratio is that of einmpi's seconds to its seconds."""
    cells = {"batch": str(row["batch"]), "sequence": str(row["sequence"]), "way": row["way"]}
    cells["seconds"] = f"{row['seconds']:.4f}"
    cells["fastest"] = f"{min(row['times']):.4f}"
    cells["ratio"] = f"{row['ratio']:.2f}"
    return show_row(cells, WIDTHS)


# ---- plans --------------------------------------------------------------------------------------


def make_plans(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Plan for several devices whose memory does not have to hold the weights."""
    print(show_row({name: name for name in PLAN_WIDTHS}, PLAN_WIDTHS))
    rows = []
    for name in given.models:
        config = model_of(name, given.layers)
        for batch in given.batches:
            for sequence in given.sequences:
                job = prefill_job(
                    config, batch, sequence, given.dtype, given.backend, resident=False
                )
                nbytes = sum(vertex.nbytes for vertex in job.graph.inputs)
                for ranks, memory in given.devices:
                    for strategy in given.strategies:
                        row = {"model": name, "batch": batch, "sequence": sequence}
                        row |= plan_row(job, ranks, memory, strategy, given.machine)
                        row["bytes_read_by_a_rank"] = -(-nbytes // ranks)
                        rows.append(row)
                        print(show_plan(row), flush=True)
    return rows


def show_plan(row: dict[str, Any]) -> str:
    """Return the line of a plan."""
    head = {name: width for name, width in PLAN_WIDTHS.items() if name in row and name != "words"}
    cells = {name: str(row[name]) for name in head}
    if "refused" in row:
        return f"{show_row(cells, head)}  {row['refused']}"
    cells["words"] = show_count(row["words"])
    cells["operations"] = show_count(row["operations_max_rank"])
    cells["peak"] = show_bytes(row["bytes_peak"])
    cells["weights"] = show_bytes(row["bytes_read_by_a_rank"])
    return show_row(cells, PLAN_WIDTHS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", action="store_true", help="plan for several devices")
    parser.add_argument("--model", choices=list(MODELS), default="7B")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["7B", "65B"])
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--batches", nargs="+", type=int, default=None)
    parser.add_argument("--sequences", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--share", type=float, default=0.25, help="of the weights on the device")
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--devices", nargs="+", type=pair, default=[(8, "40GB")], metavar="PxBYTES")
    parser.add_argument("--strategies", nargs="+", default=COMPARED)
    parser.add_argument("--machine", metavar="FILE", help="for --plan, as einmpi calibrate writes")
    parser.add_argument("--dtype", default="float16", choices=["float16", "float32"])
    parser.add_argument("--backend", default="cupy")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    given = parser.parse_args()
    make: Callable[[argparse.Namespace], list[dict[str, Any]]] = make_plans
    if given.plan:
        given.batches = given.batches or [16]
    else:
        given.batches = given.batches or [1, 16]
        make = measure
    rows = make(given)
    if given.json:
        write_results(given.json, rows)


if __name__ == "__main__":
    main()
