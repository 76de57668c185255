"""The skewed matrix chain on two hosts with a slow network between them, under every strategy.

python -m bench hosts [--size 1200] [--rate 1gbit] [--repeat 7]

The hosts are network namespaces of this machine (tests/lib/namespaces.py), each with half of its
cores. The machine is calibrated first. Then the strategies alternate, so that other load on it
affects all of them; seconds are medians. The default plan comes first; it minimises bytes. The
others are planned for the measured machine, so that their seconds are also predicted. Needs root,
ip and tc.

python -m bench hosts --simulate [--size 1200] …

The same without overlap, and beside the seconds those that `einmpi simulate` gives for two nodes
with the times that were calibrated. Needs SimGrid.

python -m bench hosts --overlap 600 800 1000 [--repeat 15]

Instead, the chain of these sizes, not skewed, without and with kernels that run while tensors move.
The two take turns. The share of moving is that of the run without overlap.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import einmpi
from bench.lib.results import write_results
from einmpi.api import options_of
from einmpi.comm.mpi import comm_of
from einmpi.compiled.inputs import Inputs
from einmpi.compiled.program import Compiled
from einmpi.job.job import Job
from einmpi.planner.machine import read_machine
from einmpi.planner.plan import Plan
from einmpi.planner.strategies import STRATEGIES
from einmpi.schedule.schedule import Schedule
from einmpi.simulate.cluster import make_cluster
from einmpi.simulate.simulation import Place, simulate_plan
from einmpi.units import show_bandwidth, show_bytes
from tests.lib.namespaces import ROOT, hosts, reason_against

# Roles, so that data and model parallelism apply too: rows of the result, and the long label that
# is summed over.
ROLES = '\n[roles]\nbatch = ["i"]\nhidden = ["l"]\n'

Run = Callable[..., "subprocess.CompletedProcess[str]"]


# ---- on the ranks --------------------------------------------------------------------------------


def chain_job(file: str, size: int, overlap: str) -> Job:
    """Return the skewed chain."""
    return replace(einmpi.load(file, s=size, skew=10), overlap=overlap)


def on_ranks(file: str, machine: str, size: int, repeat: int, overlap: str) -> None:
    """Rank 0 prints a line of JSON for each way to plan."""
    job, comm = chain_job(file, size, overlap), comm_of()
    ways = []
    for name, options in [
        ("the default plan", {}),
        *((name, {"strategy": name, "machine": machine}) for name in STRATEGIES),
    ]:
        compiled = Compiled(job, comm, options_of(job, **options))
        try:
            plan, schedule, _ = compiled.prepare({})
        except einmpi.InputError:  # it needs roles that a chain does not have
            continue
        ways.append((name, compiled, plan, schedule, Inputs(job, {}, {}, keep=True), []))
    for turn in range(repeat + 1):
        for _, compiled, plan, schedule, inputs, seconds in ways:
            comm.barrier()
            _, measured = compiled.run_schedule(plan, schedule, inputs)
            every = [
                json.loads(text)
                for text in comm.allgather_text(json.dumps([measured.seconds, measured.between]))
            ]
            if turn:  # the first one makes the connections
                seconds.append((max(own for own, _ in every), sum(between for _, between in every)))
    default = ways[0][2]
    for name, _, plan, _, _, seconds in ways:
        same = all(plan.parts(vertex) == default.parts(vertex) for vertex in plan.states)
        row = {
            "name": name,
            "planned": plan.bytes_between,
            "predicted": plan.seconds_predicted,
            "runs": seconds,
            "note": "  the same cuts" if same and plan is not default else "",
        }
        if comm.rank == 0:
            print(json.dumps(row), flush=True)


def overlap_on_ranks(file: str, size: int, repeat: int) -> None:
    """Rank 0 prints a line of JSON: seconds without and with overlap, and the share of moving."""
    with contextlib.suppress(OSError):  # before other work on the machine, where Linux groups it
        Path("/proc/self/autogroup").write_text("-20")
    comm = comm_of()
    job = einmpi.load(file, s=size)
    ways = []
    for mode in ("off", "auto"):
        own = replace(job, overlap=mode)
        compiled = Compiled(own, comm, options_of(own))
        compiled.runner.keeps_memory = True  # as in a loop
        plan, schedule, _ = compiled.prepare({})
        ways.append((compiled, plan, schedule, Inputs(own, {}, {}, keep=True)))
    seconds: list[list[float]] = [[], []]
    hidden = []
    blocks = []
    for turn in range(repeat + 1):
        for way, (compiled, plan, schedule, inputs) in enumerate(ways):
            comm.barrier()
            outputs, measured = compiled.run_schedule(plan, schedule, inputs)
            own = [measured.seconds, measured.seconds_hidden]
            every = [json.loads(text) for text in comm.allgather_text(json.dumps(own))]
            if turn:  # the first one makes the connections
                seconds[way].append(max(each[0] for each in every))
                hidden.append(sum(each[1] for each in every) / len(every))
            else:
                blocks.append(outputs["Z"].local.tobytes())
    shares = [share_of_moving(*ways[0]) for _ in range(3)]
    row = {
        "share": statistics.median(shares),
        "off": seconds[0],
        "auto": seconds[1],
        "hidden": hidden[1::2],
    }
    row["same"] = comm.lowest(int(blocks[0] == blocks[1]))
    nbytes = ways[0][1].bytes_between
    if comm.rank == 0:
        print(json.dumps({**row, "nbytes": nbytes}), flush=True)


def share_of_moving(compiled: Compiled, plan: Plan, schedule: Schedule, inputs: Inputs) -> float:
    """The share of a run without overlap in which this rank sends and receives."""
    starts: list[tuple[float, str]] = []
    compiled.runner.on_step = lambda step: starts.append((perf_counter(), step.kind))
    comm_of().barrier()
    compiled.run_schedule(plan, schedule, inputs)
    compiled.runner.on_step = None
    starts.append((perf_counter(), ""))
    moving = 0.0
    computing = 0.0
    for (start, kind), (end, _) in itertools.pairwise(starts):
        if kind in ("exchange", "reduce"):
            moving += end - start
        elif kind != "load":
            computing += end - start
    return moving / (moving + computing)


# ---- on the hosts --------------------------------------------------------------------------------


def measure(
    run: Run, per_host: int, job: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Print a line for each strategy, and return a row for each."""
    machine = str(job.with_name(f"machine{per_host}.toml"))
    finished(run(per_host, ["-m", "einmpi", "calibrate", "--save", machine]))
    size, repeat = options.size, options.repeat
    arguments = [
        __file__,
        "--on-ranks",
        str(job),
        machine,
        "--size",
        str(size),
        "--repeat",
        str(repeat),
        *(["--simulate"] if options.simulate else []),
    ]
    rows = [
        json.loads(line) for line in finished(run(per_host, arguments, timeout=1200)).splitlines()
    ]
    ranks = f"{per_host} rank{'s' * (per_host > 1)}"
    print(
        f"\nchain, skewed, s = {size}, 2 hosts × {ranks}, {options.rate} between them; "
        f"medians of {repeat}"
    )
    print(
        "calibrate: a rank receives "
        f"{show_bandwidth(read_machine(machine).between)} from the other host"
    )
    print(
        f"{'strategy':18}{'between hosts':>14}{'counted':>12}"
        f"{'seconds':>9}{'predicted':>11}{'ratio':>7}"
        + f"{'simulated':>11}{'error':>8}"
        * options.simulate
    )
    base = statistics.median(seconds for seconds, _ in rows[0]["runs"])
    found = []
    for row in rows:
        median = statistics.median(seconds for seconds, _ in row["runs"])
        found.append({"hosts": 2, "ranks": 2 * per_host, "strategy": row["name"]})
        found[-1] |= {"bytes_between": row["planned"], "seconds": median}
        found[-1]["predicted"] = row["predicted"]
        counted = {between for _, between in row["runs"]}
        shown = (
            "the same"
            if counted == {row["planned"]}
            else ", ".join(map(show_bytes, sorted(counted)))
        )
        predicted = "" if row["predicted"] is None else f"{row['predicted']:.3f}"
        simulated = ""
        if options.simulate:
            strategy = row["name"] if row["name"] in STRATEGIES else None
            found[-1]["simulated"] = simulate(str(job), size, 2 * per_host, strategy, machine)
            error = found[-1]["simulated"] / median - 1
            simulated = f"{found[-1]['simulated']:>11.3f}{error:>+8.0%}"
        print(
            f"{row['name']:18}{show_bytes(row['planned']):>14}{shown:>12}{median:>9.3f}{predicted:>11}"
            f"{median / base:>7.2f}{simulated}{row['note']}",
            flush=True,
        )
    return found


def simulate(file: str, size: int, ranks: int, strategy: str | None, machine: str) -> float:
    """Return the seconds of a plan on two simulated nodes with the times of a machine file.

    Without a strategy it is the default plan, which is not made for the machine.
    """
    times = read_machine(machine)
    cluster = make_cluster("nodes=2,topology=flat", ranks, times)
    options = {"strategy": strategy, "machine": machine} if strategy else {}
    plan = einmpi.plan(chain_job(file, size, "off"), ranks, nodes=2, **options)
    return simulate_plan(plan, Place(cluster.platform(), cluster.hosts(), times)).seconds


def measure_overlap(
    run: Run, per_host: int, job: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Print a line for each size, and return a row for each."""
    found = []
    print(f"chain, 2 hosts × {per_host}, {options.rate} between them; of {options.repeat} runs")
    print("   s  between hosts  moving  without  with overlap  ratio  of the fastest  hidden  bits")
    for size in options.overlap:
        arguments = [__file__, "--on-ranks", str(job), "-", "--overlap", str(size)]
        arguments += ["--repeat", str(options.repeat)]
        row = json.loads(finished(run(per_host, arguments, timeout=1200)))
        off = statistics.median(row["off"])
        auto = statistics.median(row["auto"])
        fastest = min(row["off"]) / min(row["auto"])
        found.append({"ranks": 2 * per_host, "size": size, "without": off, "seconds": auto})
        hidden = statistics.median(row["hidden"])
        bits = "the same" if row["same"] else "other"
        print(
            f"{size:>4}{show_bytes(row['nbytes']):>15}{row['share']:>8.0%}{off:>9.3f}{auto:>14.3f}"
            f"{off / auto:>7.2f}{fastest:>16.2f}{hidden:>8.3f}  {bits}",
            flush=True,
        )
    return found


def finished(done: subprocess.CompletedProcess[str]) -> str:
    """What it printed; its error ends this program."""
    if done.returncode:
        sys.exit(f"bench/paper/hosts.py: {done.stderr.strip()}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=1200)
    parser.add_argument("--rate", default="1gbit", help="of the network, as tc takes it")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], help="on each host")
    parser.add_argument("--simulate", action="store_true", help="simulate the same")
    parser.add_argument("--overlap", type=int, nargs="*", metavar="SIZE", help="compare overlap")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    parser.add_argument("--on-ranks", nargs=2, metavar=("JOB", "MACHINE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_ranks and options.overlap:
        overlap_on_ranks(options.on_ranks[0], options.overlap[0], options.repeat)
        return
    if options.on_ranks:
        overlap = "off" if options.simulate else "auto"
        on_ranks(*options.on_ranks, options.size, options.repeat, overlap)
        return
    if reason := reason_against():
        sys.exit(f"bench/paper/hosts.py: {reason}")
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # the hosts are taken down on the way out
    with tempfile.TemporaryDirectory() as folder, hosts(options.rate) as run:
        job = Path(folder, "chain.toml")
        job.write_text((ROOT / "jobs" / "chain.toml").read_text() + ROLES)
        compare = measure_overlap if options.overlap else measure
        rows = [row for per_host in options.ranks for row in compare(run, per_host, job, options)]
    if options.json:
        write_results(options.json, rows)


if __name__ == "__main__":
    main()
