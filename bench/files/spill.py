"""The paper's matrix chain with a memory limit, against the same without one.

python -m bench spill --size 4000 --part 4

One process. Runs with and without the limit alternate, and medians are compared. Loading is not
timed; with a limit the inputs are loaded into scratch files.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np

import einmpi
from bench import ROOT
from bench.lib.results import write_results
from einmpi.api import options_of
from einmpi.comm.base import ALONE
from einmpi.compiled.inputs import Inputs
from einmpi.compiled.program import Compiled
from einmpi.compiled.running import Measured
from einmpi.units import show_bytes

JOB = ROOT / "jobs" / "chain.toml"


class Ours:
    """The job with one limit, or none: planned once, run again and again."""

    def __init__(self, job: einmpi.Job, memory: int | None) -> None:
        self.compiled = Compiled(job, ALONE, options_of(job, memory=memory))
        self.plan, self.schedule, _ = self.compiled.prepare({})
        self.runs: list[Measured] = []

    def run(self) -> np.ndarray:
        inputs = Inputs(self.compiled.job, {}, {})
        outputs, measured = self.compiled.run_schedule(self.plan, self.schedule, inputs)
        self.runs.append(measured)
        return outputs["Z"].local

    @property
    def seconds(self) -> float:
        return statistics.median(each.seconds for each in self.runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=2000)
    parser.add_argument("--skew", type=int, default=1)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument(
        "--part",
        type=int,
        nargs="+",
        default=[2, 4, 8],
        help="the limit is the plan's peak over this",
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    job = einmpi.load(JOB, dtype=options.dtype, s=options.size, skew=options.skew)
    free = Ours(job, None)
    limited = {part: Ours(job, free.plan.peak // part) for part in options.part}
    for _ in range(options.repeat):
        wanted = free.run()
        for ours in limited.values():
            found = ours.run()
            assert np.abs(found - wanted).max() <= 1e-3 * np.abs(wanted).max(), "the results differ"
    print(f"chain, s = {options.size}, {options.dtype}, {free.compiled.work.text}")
    print(f"no limit: {show_bytes(free.plan.peak)}, {free.seconds:.2f} s")
    rows = [{"limit": "none", "seconds": free.seconds, "ratio": 1.0, "bytes_peak": free.plan.peak}]
    for part, ours in limited.items():
        last = ours.runs[-1]
        ratio = f"{ours.seconds:.2f} s, {ours.seconds / free.seconds:.2f} times as long"
        moved = f"{show_bytes(last.spilled)} written, {show_bytes(last.fetched)} read"
        print(f"1/{part}: {show_bytes(last.peak)}, {ratio}; {moved}")
        rows.append(
            {
                "limit": f"1/{part}",
                "seconds": ours.seconds,
                "ratio": ours.seconds / free.seconds,
                "bytes_peak": last.peak,
                "bytes_written": last.spilled,
                "bytes_read": last.fetched,
            }
        )
    if options.json:
        write_results(options.json, rows)


if __name__ == "__main__":
    main()
