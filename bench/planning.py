"""Measure planning time and plan quality: chain, attention, LLaMA-7B layers, random graphs.

    python bench/planning.py [--ranks 8 64 1024] [--graphs chain attention …] [--repeat 3]

Prints one row for each graph, number of ranks and strategy: words moved, the lower bound, their
ratio, and the median planning time.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator

import einmpi
from einmpi.graph.eingraph import EinGraph
from einmpi.models.llama import MODELS, llama_program
from einmpi.planner.bounds import lower_bound_words
from einmpi.planner.make_plan import make_plan
from einmpi.planner.plan import Options
from einmpi.planner.strategies import DEFAULT_STRATEGY, STRATEGIES

ROLES = {"batch": ("b",), "sequence": ("s", "t"), "head": ("h",), "hidden": ("f",)}


def chain(skew: int) -> EinGraph:
    return einmpi.load("jobs/chain.toml", s=6400, skew=skew).graph


def attention() -> EinGraph:
    return einmpi.load("jobs/attention.toml", s=1024, a=4096, h=32).graph


def llama(batch: int, sequence: int, layers: int) -> EinGraph:
    text, shapes, _ = llama_program(MODELS["7B"], batch, sequence, layers)
    return einmpi.program(text, dtype="float32", **shapes).graph


def random_graph(vertices: int, seed: int) -> EinGraph:
    """Return products and sums of matrices, mostly of the latest results."""
    choose = random.Random(seed)
    shapes: dict[str, tuple[int, int]] = {}
    made: dict[str, tuple[int, int]] = {}

    def new_input(rows: int, columns: int) -> str:
        name = f"I{len(shapes)}"
        shapes[name] = made[name] = (rows, columns)
        return name

    new_input(1024, 1024)
    lines = []
    for k in range(vertices):
        names = list(made)
        x = choose.choice(names[-4:] if choose.random() < 0.95 else names)
        rows, columns = made[x]
        if choose.random() < 0.6:
            fitting = [
                name for name in names[-8:] if made[name][0] == columns and choose.random() < 0.4
            ]
            y = (
                fitting[-1]
                if fitting
                else new_input(columns, choose.choice([256, 512, 1024, 2048]))
            )
            lines.append(f"V{k}[i,k] = sum({x}[i,j] * {y}[j,k])")
            made[f"V{k}"] = (rows, made[y][1])
        else:
            fitting = [name for name in names[-16:] if made[name] == made[x] and name != x]
            y = fitting[-1] if fitting else new_input(rows, columns)
            lines.append(f"V{k}[i,k] = {x}[i,k] + tanh({y}[i,k])")
            made[f"V{k}"] = made[x]
    return einmpi.program("\n".join(lines), dtype="float32", **shapes).graph


GRAPHS: dict[str, Callable[[], EinGraph]] = {
    "chain": lambda: chain(1),
    "chain-skewed": lambda: chain(10),
    "attention": attention,
    "llama-layer": lambda: llama(8, 1024, 1),
    "llama-32-layers": lambda: llama(8, 1024, 32),
    "llama-32-layers-long": lambda: llama(1, 4096, 32),
    "random-1000": lambda: random_graph(1000, 1),
}
ALL_STRATEGIES = ("chain", "chain-skewed", "attention", "llama-layer")


def rows(
    graphs: list[str], ranks: list[int], repeat: int
) -> Iterator[tuple[str, int, str, int, int, str, float]]:
    for name in graphs:
        graph = GRAPHS[name]()
        for count in ranks:
            for strategy in STRATEGIES if name in ALL_STRATEGIES else (DEFAULT_STRATEGY,):
                try:
                    plans = [
                        make_plan(graph, count, Options(strategy, roles=ROLES))
                        for _ in range(repeat)
                    ]
                except einmpi.InputError:
                    continue  # the graph has no label of a role the strategy needs
                bound = lower_bound_words(graph, count)
                plan = plans[0]
                ratio = f"{plan.words_predicted / bound:.3f}" if bound else "–"
                seconds = statistics.median(plan.seconds for plan in plans)
                yield name, count, strategy, plan.words_predicted, bound, ratio, seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024, 4096])
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS), choices=list(GRAPHS))
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    print(
        f"{'graph':22}{'ranks':>6}  {'strategy':16}{'words':>18}{'lower bound':>18}"
        f"{'ratio':>8}{'seconds':>9}"
    )
    for name, count, strategy, words, bound, ratio, seconds in rows(
        given.graphs, given.ranks, given.repeat
    ):
        print(
            f"{name:22}{count:6}  {strategy:16}{words:18,}{bound:18,}{ratio:>8}{seconds:9.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
