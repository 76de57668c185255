"""What recording costs: the paper's matrix chain on the ranks of mpirun, with and without it.

    mpirun -n 2 python -m bench tracing --size 2000

Runs with and without a recorder alternate, in one process, on the same inputs. The medians of the
slowest rank's seconds are compared. Then the cost of one call of the recorder, paid once per step.
"""

from __future__ import annotations

import argparse
import statistics
import time

import einmpi
from bench import ROOT
from bench.lib.results import write_results
from einmpi.api import options_of
from einmpi.comm.base import ALONE, Comm
from einmpi.comm.mpi import comm_of
from einmpi.compiled.inputs import Inputs
from einmpi.compiled.program import Compiled
from einmpi.process.signals import activity_writer
from einmpi.report.record import Recorder
from einmpi.schedule.steps import Step

JOB = ROOT / "jobs" / "chain.toml"
CALLS = 100_000


class Runs:
    """The chain, compiled and loaded once."""

    def __init__(self, size: int, comm: Comm) -> None:
        job = einmpi.load(JOB, s=size)
        self.comm, self.compiled = comm, Compiled(job, comm, options_of(job))
        self.plan, self.schedule, given = self.compiled.prepare({})
        self.inputs = Inputs(job, given, self.compiled.files, keep=True)
        self.note = activity_writer(comm.rank)

    def seconds(self, record: bool) -> tuple[float, float]:
        """Return the seconds of the slowest rank: of the run alone, and with gathering."""
        recorder = Recorder(self.comm) if record else None

        def on_step(step: Step) -> None:
            if recorder is not None:
                recorder(step)
            self.note(" ".join(str(step).split()))

        self.compiled.runner.on_step = on_step
        self.comm.barrier()
        start = time.perf_counter()
        if recorder is not None:
            recorder.begin()
        _, measured = self.compiled.run_schedule(self.plan, self.schedule, self.inputs)
        if recorder is not None:
            recorder.finish()
        taken = f"{measured.seconds} {time.perf_counter() - start}"
        run, whole = zip(
            *(map(float, text.split()) for text in self.comm.allgather_text(taken)), strict=True
        )
        return max(run), max(whole)


def cost_of_a_call() -> float:
    recorder = Recorder(ALONE)
    start = time.perf_counter()
    for _ in range(CALLS):
        recorder(None)  # type: ignore[arg-type]
    return (time.perf_counter() - start) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    runs = Runs(options.size, comm_of())
    runs.seconds(True)
    taken: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for turn in range(options.repeat):
        for record in (turn % 2 == 0, turn % 2 == 1):  # neither is always the first
            taken[record].append(runs.seconds(record))
    if runs.comm.rank == 0:
        print(f"s = {options.size}, {runs.comm.size} ranks, {len(runs.schedule.steps)} steps")
        rows = []
        for k, name in enumerate(("the run", "with comparing clocks and gathering")):
            without, recorded = (
                statistics.median(each[k] for each in taken[record]) for record in (False, True)
            )
            more = 100 * (recorded / without - 1)
            rows.append({"what": name, "seconds": without, "recorded": recorded, "percent": more})
            print(f"{name}: without {without:.4f} s, recorded {recorded:.4f} s, {more:+.2f} %")
        print(f"a call of the recorder takes {1e9 * cost_of_a_call():.0f} ns")
        if options.json:
            write_results(options.json, rows)


if __name__ == "__main__":
    main()
