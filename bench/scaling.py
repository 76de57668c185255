"""Strong and weak scaling of plans on simulated networks, and the times that the planner predicts.

python bench/scaling.py [--works chain mttkrp llama ffnn] [--ranks 8 64 512] [--json FILE]
                        [--networks fat-tree dragonfly] [--strategies eindecomp data …]

SimGrid (`smpirun`) replays each plan on the first nodes of a network of 512 nodes with 8 cores
(bench/platforms). Kernels take the time of cluster.toml there, and plans are made for it, so
each point has predicted and simulated seconds. Strong: the same work for more ranks. Weak: work
that grows with the ranks. A strategy that needs more than `--limit` seconds of real time for a
point is left out at more ranks; a point without seconds was refused by the planner, and says why.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

from results import write_results

import einmpi
from einmpi.errors import InputError
from einmpi.graph.eingraph import EinGraph
from einmpi.job.job import Job
from einmpi.models.paper import MODELS, llama_program
from einmpi.planner.machine import read_machine
from einmpi.planner.strategies import Choice, Roles, Strategy, register_strategy
from einmpi.simulate.platform_file import read_platform
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


def simulate(job: Job, ranks: int, network: str, strategy: str) -> dict[str, Any]:
    """Return the figures of one point."""
    platform = read_platform(str(PLATFORMS / f"{network}.xml"))
    nodes = -(-ranks // platform.cores)
    place = Place(platform.text, platform.hosts[:nodes], read_machine(str(MACHINE)))
    try:
        plan = einmpi.plan(job, ranks, strategy=strategy, nodes=nodes, machine=str(MACHINE))
    except InputError as error:
        return {"refused": str(error)}
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


def points(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return all points, and print each."""
    rows = []
    too_slow: set[tuple[str, str, str, str]] = set()
    for work in options.works:
        for ranks in sorted(options.ranks):
            jobs = {"strong": WORKS[work](1)}
            if "weak" in options.curves and ranks > FIRST_RANKS:
                jobs["weak"] = WORKS[work](ranks // FIRST_RANKS)
            for curve in options.curves:
                job = jobs.get(curve, jobs["strong"])
                for network in options.networks:
                    for strategy in options.strategies:
                        key = (work, curve, network, strategy)
                        if key in too_slow:
                            continue
                        start = perf_counter()
                        found = simulate(job, ranks, network, strategy)
                        if perf_counter() - start > options.limit:
                            too_slow.add(key)
                        names = {"work": work, "curve": curve, "network": network}
                        row = {**names, "strategy": strategy, "ranks": ranks, **found}
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate the points that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--curves", nargs="+", choices=["strong", "weak"], default=["strong"])
    networks = sorted(file.stem for file in PLATFORMS.glob("*.xml"))
    parser.add_argument("--networks", nargs="+", choices=networks, default=["fat-tree"])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512])
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of real time a point")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(arguments)
    rows = points(options)
    if options.json:
        write_results(options.json, rows)


if __name__ == "__main__":
    main()
