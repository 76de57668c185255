"""Strong and weak scaling of plans on simulated networks, and the times that the planner predicts.

python bench/scaling.py [--works chain mttkrp llama ffnn] [--ranks 8 64 512] [--json FILE]
                        [--networks fat-tree dragonfly] [--strategies eindecomp data …]

SimGrid (`smpirun`) replays each plan on the first nodes of a network of 512 nodes with 8 cores
(bench/platforms). Kernels take the time of cluster.toml there, and plans are made for it, so
each point has predicted and simulated seconds. Strong: the same work for more ranks. Weak: work
that grows with the ranks. A strategy that needs more than `--limit` seconds of CPU time for a
point, without those of SimGrid, is left out at more ranks; a point without seconds was refused by
the planner, and says why.

python bench/scaling.py --plot FILE.svg [--read FILE.json …]

draws the seconds of the first work, curve and network; --read takes points that were written by
--json instead of simulating them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

from plots import line_plot
from results import write_results

import einmpi
from einmpi.errors import InputError
from einmpi.graph.eingraph import EinGraph
from einmpi.job.job import Job
from einmpi.models.paper import MODELS, llama_program
from einmpi.planner.machine import read_machine
from einmpi.planner.strategies import Choice, Roles, Strategy, register_strategy
from einmpi.simulate.platform_file import read_platform
from einmpi.simulate.replay import replay
from einmpi.simulate.simulation import Place, simulate_plan

PLATFORMS = Path(__file__).resolve().parent / "platforms"
MACHINE = PLATFORMS / "cluster.toml"
FIRST_RANKS = 8  # of a weak curve: there, work is that of the strong curve

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
    text, shapes, _ = llama_program(MODELS["7B"], 8 * scale, 512, 1)
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


def simulate(
    job: Job, ranks: int, networks: Sequence[str], strategy: str
) -> dict[str, dict[str, Any]]:
    """Return the figures of a plan on each network. Its traces are written once."""
    platforms = {name: read_platform(str(PLATFORMS / f"{name}.xml")) for name in networks}
    first = platforms[networks[0]]
    nodes = -(-ranks // first.cores)
    try:
        plan = einmpi.plan(job, ranks, strategy=strategy, nodes=nodes, machine=str(MACHINE))
    except InputError as error:
        return {network: {"refused": str(error)} for network in networks}
    predicted = plan.seconds_predicted
    assert predicted is not None
    found = {}
    with TemporaryDirectory(prefix="einmpi-scaling-") as name:
        folder = Path(name)
        place = Place(first.text, first.hosts[:nodes], read_machine(str(MACHINE)))
        done = simulate_plan(plan, place, folder=folder)
        for network, platform in platforms.items():
            assert platform.hosts == first.hosts and platform.cores == first.cores
            seconds = done.seconds
            if platform is not first:
                (folder / "platform.xml").write_text(platform.text)
                seconds = replay(folder, ranks)
            found[network] = {
                "seconds": seconds,
                "predicted": predicted,
                "error": predicted / seconds - 1,
                "words": plan.words_predicted,
                "bytes": done.nbytes,
                "messages": done.messages,
            }
    return found


def points(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return all points, and print each."""
    rows = []
    too_slow: set[tuple[str, str, str]] = set()
    wanted = product(options.works, sorted(options.ranks), options.curves, options.strategies)
    for work, ranks, curve, strategy in wanted:
        if (work, curve, strategy) in too_slow:
            continue
        scale = max(1, ranks // FIRST_RANKS) if curve == "weak" else 1
        start = process_time()
        found = simulate(WORKS[work](scale), ranks, options.networks, strategy)
        if process_time() - start > options.limit:
            too_slow.add((work, curve, strategy))
        for network, figures in found.items():
            names = {"work": work, "curve": curve, "network": network}
            row = {**names, "strategy": strategy, "ranks": ranks, **figures}
            rows.append(row)
            print(line_of(row), flush=True)
    return rows


def line_of(row: dict[str, Any]) -> str:
    place = (
        f"{row['work']:8}{row['curve']:8}{row['network']:11}{row['ranks']:5}  {row['strategy']:11}"
    )
    if "refused" in row:
        return f"{place}{row['refused'][:100]}"
    times = f"{row['seconds']:10.3e} s, predicted {row['predicted']:10.3e} ({row['error']:+7.1%})"
    return f"{place}{times}{row['words']:16,} words{row['messages']:11,} messages"


def plot(rows: Sequence[dict[str, Any]]) -> str:
    """Return the curves of all strategies for the work, curve and network of the first row."""
    names = ("work", "curve", "network")
    shown = [row for row in rows if all(row[name] == rows[0][name] for name in names)]
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(shown, key=lambda row: row["ranks"]):
        if "seconds" in row:
            lines.setdefault(row["strategy"], []).append((row["ranks"], row["seconds"]))
    title = ", ".join(rows[0][name] for name in names)
    return line_plot(title, "ranks", "simulated seconds", lines)


def read_rows(files: Sequence[str]) -> list[dict[str, Any]]:
    """Return the points of files that --json wrote."""
    rows: list[dict[str, Any]] = []
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
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds of CPU time for a point"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--read", nargs="+", metavar="FILE", help="points of earlier runs")
    parser.add_argument("--plot", metavar="FILE.svg")
    options = parser.parse_args(arguments)
    rows = read_rows(options.read) if options.read else points(options)
    if options.plot:
        Path(options.plot).write_text(plot(rows) + "\n", encoding="utf-8")
    if options.json:
        write_results(options.json, rows)


if __name__ == "__main__":
    main()
