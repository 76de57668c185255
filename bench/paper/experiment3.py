"""First-token inference of LLaMA (the paper's experiment 3): strategies side by side.

    python -m bench experiment3 [--models 7B 13B 30B 65B] [--devices 4x16GB 8x32GB]
                                [--cases 8x1024 4x4096] [--strategies …] [--machine FILE]
    mpirun -n 4 python -m bench experiment3 --run [--models tiny] [--cases 4x128] [--repeat 5]
                                [--dtype float32] [--backend numpy] [--memory 100MiB]

The first form plans: a row for each model, case (batch x sequence), kind of devices (ranks x memory
of each) and strategy, with the words that move, the operations of the busiest rank, the peak memory
of a rank, and the seconds that --machine predicts; with a machine, plans minimise these seconds.
The paper's servers had four GPUs of 16 GB, or eight of 32 GB. Weights are resident: they are where
they are needed before the first prompt comes.

The second form runs on the ranks that mpirun started, with random weights, and compares the logits
of all strategies. Strategies take turns; times are medians, of the slowest rank. For GPUs use
--backend cupy --dtype float16; several ranks may share one GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

import einmpi
from bench.lib.llama_jobs import (
    LOGITS,
    MODELS,
    call_inputs,
    model_of,
    on_host,
    prefill_job,
    show_row,
    wait_for,
)
from bench.lib.results import write_results
from einmpi.comm.agreement import comm_of_program
from einmpi.errors import InputError
from einmpi.job.job import Job
from einmpi.planner.strategies import STRATEGIES
from einmpi.units import parse_bytes, show_bytes, show_count

COMPARED = ["eindecomp", "eindecomp-paper", "megatron", "sequence", "attention", "data"]
HEAD_WIDTHS = {"model": 5, "batch": 5, "sequence": 8, "ranks": 5, "memory": 9, "strategy": 15}
WIDTHS = {
    **HEAD_WIDTHS,
    "words": 17,
    "operations": 19,
    "peak": 9,
    "seconds": 9,
}
MEASURED_WIDTHS = {"fastest": 9, "ratio": 6}
# Of logits of two strategies, relative to the largest: sums are added up in other orders.
TOLERANCE = {"float64": 1e-10, "float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}


def pair(text: str) -> tuple[int, str]:
    """Return the two parts of a text such as 8x1024 or 4x16GB."""
    first, _, second = text.partition("x")
    if not first.isdigit() or not second:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 8x1024 or 4x16GB")
    return int(first), second


def case(text: str) -> tuple[int, int]:
    """Return batch and sequence of a text such as 8x1024."""
    batch, sequence = pair(text)
    return batch, int(sequence)


def plan_row(
    job: Job, ranks: int, memory: str, strategy: str, machine: str | None
) -> dict[str, Any]:
    """Return what a plan says, or why there is none."""
    start = time.perf_counter()
    row: dict[str, Any] = {"ranks": ranks, "memory": memory, "strategy": strategy}
    try:
        plan = einmpi.plan(job, ranks, strategy=strategy, memory=memory, machine=machine)
    except InputError as error:
        return {**row, "refused": str(error)}
    return {
        **row,
        "words": plan.words_predicted,
        "bytes": plan.bytes_predicted,
        "operations_max_rank": plan.operations_busiest,
        "bytes_peak": plan.peak,
        "seconds": plan.seconds_predicted,
        "seconds_planning": time.perf_counter() - start,
        "digest": plan.digest,
    }


def show_plan(row: dict[str, Any]) -> str:
    """Return the line of a plan."""
    cells = {name: str(row[name]) for name in HEAD_WIDTHS if row[name] is not None}
    if "refused" in row:
        return f"{show_row(cells, HEAD_WIDTHS)}  {row['refused']}"
    cells["words"] = show_count(row["words"])
    cells["operations"] = show_count(row["operations_max_rank"])
    cells["peak"] = show_bytes(row["bytes_peak"])
    if row["seconds"] is not None:
        cells["seconds"] = f"{row['seconds']:.4f}"
    return show_row(cells, WIDTHS)


def make_plans(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Plan all combinations, and print a line for each."""
    print(show_row({name: name for name in WIDTHS}, WIDTHS))
    rows = []
    for name in given.models:
        for batch, sequence in given.cases:
            config = model_of(name, given.layers)
            job = prefill_job(config, batch, sequence, given.dtype, given.backend)
            for ranks, memory in given.devices:
                for strategy in given.strategies:
                    row = {"model": name, "batch": batch, "sequence": sequence}
                    row |= plan_row(job, ranks, memory, strategy, given.machine)
                    rows.append(row)
                    print(show_plan(row), flush=True)
    return rows


# ---- runs ----------------------------------------------------------------------------------------


class Way:
    """A strategy that is ready to run; all ranks make one."""

    def __init__(self, job: Job, strategy: str, given: argparse.Namespace, world: Any) -> None:
        self.compiled = einmpi.compile(job, world, strategy=strategy, memory=given.memory)
        self.comm = comm_of_program(world)
        self.backend = given.backend
        self.times: list[float] = []

    def run_once(self, inputs: dict[str, Any]) -> Any:
        """Return the logits, and note the seconds of the slowest rank."""
        self.comm.barrier()
        start = time.perf_counter()
        logits = self.compiled(inputs)[LOGITS]
        wait_for(self.backend)
        took = time.perf_counter() - start
        self.times.append(max(self.of_all_ranks(took)))
        return logits

    def of_all_ranks(self, number: float) -> list[float]:
        """Return a number of every rank."""
        return [float(text) for text in self.comm.allgather_text(repr(number))]

    def result(self) -> dict[str, Any]:
        """Return what was planned and measured. The first run, which loads, does not count."""
        ((plan, _),) = self.compiled.ready.values()
        measured = self.compiled.measured
        assert measured is not None
        received = int(sum(self.of_all_ranks(measured.received)))
        assert received == plan.bytes_predicted, f"{received} bytes, {plan.bytes_predicted} planned"
        times = self.times[1:]
        return {
            "words": plan.words_predicted,
            "bytes": received,
            "operations_max_rank": plan.operations_busiest,
            "bytes_peak": int(max(self.of_all_ranks(measured.peak))),
            "seconds": statistics.median(times),
            "fastest": min(times),
            "times": times,
        }


def check_logits(logits: dict[str, Any], dtype: str) -> None:
    """Raise AssertionError if two strategies do not agree."""
    first = next(iter(logits.values()))
    largest = float(np.abs(first).max())
    assert np.isfinite(largest), "logits are not finite"
    for strategy, found in logits.items():
        error = float(np.abs(found - first).max()) / largest
        assert error <= TOLERANCE[dtype], f"{strategy}: logits differ by {error:.1e}"


def measure(
    name: str, batch: int, sequence: int, given: argparse.Namespace, world: Any
) -> list[dict[str, Any]]:
    """Run all strategies in turns, and return a row for each on all ranks."""
    config = model_of(name, given.layers)
    job = prefill_job(config, batch, sequence, given.dtype, given.backend)
    inputs = call_inputs(config, batch, sequence)
    ways: dict[str, Way] = {}
    rows: list[dict[str, Any]] = []
    logits = {}
    for strategy in given.strategies:
        rows.append(
            {
                "model": name,
                "batch": batch,
                "sequence": sequence,
                "ranks": comm_of_program(world).size,
                "memory": given.memory,
                "strategy": strategy,
            }
        )
        way = Way(job, strategy, given, world)
        try:
            logits[strategy] = on_host(way.run_once(inputs).gather())
        except InputError as error:
            rows[-1]["refused"] = str(error)
            continue
        ways[strategy] = way
    check_logits(logits, given.dtype)
    for _ in range(given.repeat):
        for way in ways.values():
            way.run_once(inputs)
    for row in rows:
        if row["strategy"] in ways:
            row |= ways[row["strategy"]].result()
    return rows


def show_run(row: dict[str, Any], first: dict[str, Any]) -> str:
    """Return the line of a run; the ratio is that of its seconds to those of the first one."""
    if "refused" in row:
        return show_plan(row)
    ratio = row["seconds"] / first["seconds"]
    cells = {"fastest": f"{row['fastest']:.4f}", "ratio": f"{ratio:.2f}"}
    return f"{show_plan(row)}  {show_row(cells, MEASURED_WIDTHS)}"


def run_all(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all cases on the ranks that mpirun started; rank 0 prints a line for each strategy."""
    comm = comm_of_program(None)
    if comm.rank == 0:
        widths = {**WIDTHS, **MEASURED_WIDTHS}
        print(show_row({name: name for name in widths}, widths))
    rows = []
    for name in given.models:
        for batch, sequence in given.cases:
            found = measure(name, batch, sequence, given, None)
            rows += found
            done = [row for row in found if "refused" not in row]
            for row in found:
                if comm.rank == 0:
                    print(show_run(row, done[0] if done else row), flush=True)
    return rows if comm.rank == 0 else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", action="store_true", help="run on the ranks of mpirun")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=None)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--cases", nargs="+", type=case, default=None, metavar="BxS")
    parser.add_argument(
        "--devices", nargs="+", type=pair, default=[(4, "16GB"), (8, "32GB")], metavar="PxBYTES"
    )
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=COMPARED)
    parser.add_argument("--machine", metavar="FILE", help="as einmpi calibrate writes it")
    parser.add_argument("--memory", metavar="BYTES", help="limit of a rank, for --run")
    parser.add_argument("--dtype", default=None, choices=list(TOLERANCE))
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    given = parser.parse_args()
    given.models = given.models or (["tiny"] if given.run else ["7B", "13B", "30B", "65B"])
    given.cases = given.cases or ([(4, 128)] if given.run else [(8, 1024), (4, 4096)])
    given.dtype = given.dtype or ("float32" if given.run else "float16")
    for _, memory in given.devices:
        parse_bytes(memory, "--devices")
    rows = run_all(given) if given.run else make_plans(given)
    if given.json and rows:
        write_results(given.json, rows)


if __name__ == "__main__":
    main()
