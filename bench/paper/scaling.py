"""Strong and weak scaling of plans on simulated networks, and the times that the planner predicts.

python -m bench scaling [--works chain mttkrp llama ffnn] [--ranks 8 64 512] [--json FILE]
                        [--networks fat-tree dragonfly] [--strategies eindecomp data …]
                        [--jobs 15] [--limit 600] [--most-messages 20000000] [--done FILE.json …]

SimGrid (`smpirun`) replays each plan on the first nodes of a network of 512 nodes with 8 cores
(bench/platforms). Kernels take the time of its machine file, and plans are made for that, so each
point has predicted and simulated seconds. Strong: the same work for more ranks. Weak: work
that grows with the ranks.

`--jobs` points are simulated at a time, those with the most messages first, and FILE is written
anew after each of them. A point that takes more than `--limit` seconds is ended; one for which more
than `--most-messages` are expected is not begun. Such a point has no seconds in its row, nor has
one that the planner refuses: `refused` says why. `--done` takes points from earlier runs as they
are, except for those without seconds.

python -m bench scaling --read FILE.json … [--plot FILE.svg] [--table]

takes points that were written by --json instead of simulating any. --plot draws the seconds of the
first work, curve and network, and --table prints all of them in Markdown, with the largest errors
of the predictions.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

import einmpi
from bench import ROOT
from bench.lib.plots import line_plot
from bench.lib.processes import outcomes
from bench.lib.results import write_results
from bench.paper.scaling_table import FIRST_RANKS, Row, by_point, tables
from einmpi.graph.eingraph import EinGraph
from einmpi.job.job import Job
from einmpi.models.config import NAMED
from einmpi.planner.machine import read_machine
from einmpi.planner.plan import Plan
from einmpi.planner.strategies import Choice, Roles, Strategy, register_strategy
from einmpi.simulate.classes import classes_of, traces_of
from einmpi.simulate.cluster import read_platform
from einmpi.simulate.simulation import Place, simulate_plan
from einmpi.units import show_bytes
from tests.lib.paper_llama import llama_program

PLATFORMS = ROOT / "bench" / "platforms"
CORES = 8  # of a node of all platforms

# ---- what is computed ----------------------------------------------------------------------------

_CHAIN = "Z[i,k] = sum(A[i,j] * B[j,k]) + sum(C[i,j] * sum(D[j,l] * E[l,k]))"
_MTTKRP = "M[i,r] = sum(T[i,j,k] * B[j,r] * C[k,r])"
_FFNN = """
H[b,h] = relu(sum(X[b,i] * W1[i,h]))
P[b,o] = sum(H[b,h] * W2[h,o])
loss = mean((P[b,o] - Y[b,o])**2)
W1_next[i,h] = W1[i,h] - 0.01 * grad(loss, W1[i,h])
W2_next[h,o] = W2[h,o] - 0.01 * grad(loss, W2[h,o])
"""


def chain(scale: int) -> Job:
    """Products of matrices; the number of operations grows by `scale`."""
    size = _cube_root(1600**3 * scale)
    shapes = dict.fromkeys("ABCDE", (size, size))
    return einmpi.program(_CHAIN, roles={"batch": ("i",), "hidden": ("l",)}, **shapes)


def mttkrp(scale: int) -> Job:
    """The main kernel of CP decompositions, of rank 64."""
    size = _cube_root(512**3 * scale)
    shapes = {"T": (size, size, size), "B": (size, 64), "C": (size, 64)}
    return einmpi.program(_MTTKRP, roles={"batch": ("i",), "hidden": ("r",)}, **shapes)


def llama(scale: int) -> Job:
    """A layer of LLaMA-7B for 8 prompts of 512 tokens, or more prompts."""
    text, shapes, _ = llama_program(NAMED["7B"], 8 * scale, 512, 1)
    roles = {"batch": ("b",), "sequence": ("s", "t"), "head": ("h",), "hidden": ("f",)}
    return einmpi.program(text, dtype="float32", roles=roles, **shapes)


def ffnn(scale: int) -> Job:
    """A step of training a network with one hidden layer, on 1,024 samples or more."""
    batch = 1024 * scale
    shapes = {"X": (batch, 4096), "W1": (4096, 8192), "W2": (8192, 1024), "Y": (batch, 1024)}
    roles = {"batch": ("b",), "hidden": ("h",)}
    outputs = ["loss", "W1_next", "W2_next"]
    return einmpi.program(_FFNN, dtype="float32", outputs=outputs, roles=roles, **shapes)


def _cube_root(number: int) -> int:
    return round(number ** (1 / 3))


WORKS: dict[str, Callable[[int], Job]] = {
    "chain": chain,
    "mttkrp": mttkrp,
    "llama": llama,
    "ffnn": ffnn,
}

# ---- strategies ----------------------------------------------------------------------------------


def cut_in_two_dimensions(graph: EinGraph, ranks: int, roles: Roles) -> Choice:
    """Cut the two longest labels of every result over a grid of ranks, as SUMMA does.

    Labels that are summed over are not cut: each rank gets panels of its rows and its columns.
    """
    columns = 1
    while ranks % (2 * columns) == 0 and (2 * columns) ** 2 <= ranks:
        columns *= 2
    grid = (ranks // columns, columns)
    found = {}
    for vertex in graph.computed:
        einsum = vertex.computed_einsum
        extent = einsum.extent
        longest = sorted(einsum.output, key=lambda label: -extent[label])[:2]
        wanted = dict(zip(longest, grid, strict=False))
        parts = tuple(min(wanted.get(label, 1), extent[label]) for label in einsum.labels)
        if prod(parts) > ranks:
            raise AssertionError(f"{vertex.name} has {prod(parts)} parts")
        found[vertex.name] = parts
    return Choice(found, {})


register_strategy(
    Strategy("summa", "along the two longest labels of its result", cut_in_two_dimensions)
)
STRATEGIES = ("eindecomp", "megatron", "data", "sqrt", "summa")

# ---- points --------------------------------------------------------------------------------------


def machine_of(network: str) -> str:
    """Return the machine file of a network."""
    return str(PLATFORMS / f"{network}.toml")


class Point(NamedTuple):
    """What is simulated."""

    work: str
    ranks: int
    curve: str
    strategy: str
    network: str

    def plan(self) -> Plan:
        scale = max(1, self.ranks // FIRST_RANKS) if self.curve == "weak" else 1
        job = WORKS[self.work](scale)
        nodes = -(-self.ranks // CORES)
        return einmpi.plan(
            job, self.ranks, strategy=self.strategy, nodes=nodes, machine=machine_of(self.network)
        )

    def row(self, figures: Row) -> Row:
        names = {"work": self.work, "curve": self.curve, "network": self.network}
        return {**names, "strategy": self.strategy, "ranks": self.ranks, **figures}


def expected_messages(point: Point) -> int:
    """Return about how many messages are sent, if each rank sends as many as the first one.

    Raise InputError if the planner refuses the point.
    """
    plan = point.plan()
    first = next(traces_of(plan, next(classes_of(plan, None, shared=True))))
    return first.messages * point.ranks


def simulate(point: Point) -> Row:
    """Return the figures of a point."""
    platform = read_platform(str(PLATFORMS / f"{point.network}.xml"))
    assert platform.cores == CORES
    plan = point.plan()
    place = Place(
        platform.text, platform.hosts[: plan.nodes], read_machine(machine_of(point.network))
    )
    done = simulate_plan(plan, place)
    predicted = plan.seconds_predicted
    assert predicted is not None
    return {
        "seconds": done.seconds,
        "predicted": predicted,
        "error": predicted / done.seconds - 1,
        "words": plan.words_predicted,
        "bytes": done.nbytes,
        "messages": done.messages,
    }


class Results:
    """The rows of all points so far, in the order of the points, in a file that is always whole."""

    def __init__(self, points: Sequence[Point], file: str | None) -> None:
        self.points = points
        self.file = file
        self.found: dict[Point, Row] = {}

    def add(self, point: Point, figures: Row, costs: str = "") -> None:
        """Add the figures of a point, print them and write all that is there."""
        self.found[point] = point.row(figures)
        print(line_of(self.found[point]) + costs, flush=True)
        if self.file:
            write_results(self.file, self.rows())

    def rows(self) -> list[Row]:
        return [self.found[point] for point in self.points if point in self.found]


def points(options: argparse.Namespace) -> list[Row]:
    """Return the rows of all points, and print each as it comes."""
    wanted = product(
        options.works,
        sorted(options.ranks),
        options.curves,
        options.strategies,
        options.networks,
    )
    results = Results([Point(*each) for each in wanted], options.json)
    earlier = by_point(read_rows(options.done))
    left = []
    for point in results.points:
        row = earlier.get(point)
        if row is not None and "seconds" in row:
            results.found[point] = row
        else:
            left.append(point)
    begun = _most_messages_first(left, options, results)
    for outcome in outcomes(simulate, begun, options.jobs, options.limit):
        if outcome.result is None:
            results.add(outcome.task, {"refused": outcome.failed})
        else:
            costs = f" in {outcome.cpu_seconds:.0f} s of CPU time, {show_bytes(outcome.memory)}"
            results.add(outcome.task, outcome.result, costs)
    return results.rows()


def _most_messages_first(
    wanted: Sequence[Point], options: argparse.Namespace, results: Results
) -> list[Point]:
    """Return the points to simulate, in this order; note the others in the results."""
    messages: dict[Point, int] = {}
    for outcome in outcomes(expected_messages, wanted, options.jobs, options.limit):
        if outcome.result is None:
            results.add(outcome.task, {"refused": outcome.failed})
        elif outcome.result > options.most_messages:
            results.add(outcome.task, {"refused": f"{outcome.result:,} messages"})
        else:
            messages[outcome.task] = outcome.result
    return sorted(messages, key=lambda point: (-messages[point], point))


def line_of(row: Row) -> str:
    place = (
        f"{row['work']:8}{row['curve']:8}{row['network']:11}{row['ranks']:5}  {row['strategy']:11}"
    )
    if "refused" in row:
        return f"{place}{row['refused'][:100]}"
    times = f"{row['seconds']:10.3e} s, predicted {row['predicted']:10.3e} ({row['error']:+7.1%})"
    return f"{place}{times}{row['words']:16,} words{row['messages']:11,} messages"


def plot(rows: Sequence[Row]) -> str:
    """Return the curves of all strategies for the work, curve and network of the first row."""
    names = ("work", "curve", "network")
    shown = [row for row in rows if all(row[name] == rows[0][name] for name in names)]
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(shown, key=lambda row: row["ranks"]):
        if "seconds" in row:
            lines.setdefault(row["strategy"], []).append((row["ranks"], row["seconds"]))
    title = ", ".join(rows[0][name] for name in names)
    return line_plot(title, "ranks", "simulated seconds", lines)


def read_rows(files: Sequence[str]) -> list[Row]:
    """Return the points of files that --json wrote."""
    rows: list[Row] = []
    for file in files:
        rows += json.loads(Path(file).read_text(encoding="utf-8"))["rows"]
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate the points that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--curves", nargs="+", choices=["strong", "weak"], default=["strong"])
    networks = sorted(file.stem for file in PLATFORMS.glob("*.xml"))
    parser.add_argument("--networks", nargs="+", choices=networks, default=["fat-tree"])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512])
    parser.add_argument("--jobs", type=int, default=1, help="points that are simulated at a time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a point")
    parser.add_argument(
        "--most-messages", type=int, default=20_000_000, help="a point with more is not simulated"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument(
        "--done", nargs="+", default=[], metavar="FILE", help="take its points as they are"
    )
    parser.add_argument(
        "--read", nargs="+", metavar="FILE", help="simulate nothing, and take these points"
    )
    parser.add_argument("--plot", metavar="FILE.svg")
    parser.add_argument("--table", action="store_true", help="print the points in Markdown")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends all processes
    rows = read_rows(options.read) if options.read else points(options)
    if options.table:
        print(tables(rows, STRATEGIES))
    if options.plot:
        Path(options.plot).write_text(plot(rows) + "\n", encoding="utf-8")
    if options.json and options.read:
        write_results(options.json, rows)


if __name__ == "__main__":
    main()
