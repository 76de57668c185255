"""Measure planning time and plan quality: chain, attention, LLaMA-7B, training, random graphs.

    python -m bench planning [--ranks 8 64 1024] [--graphs chain attention …] [--repeat 3]

Prints one row for each graph, number of ranks and strategy: words moved, the lower bound, their
ratio, the seconds to read and differentiate the program, and the median planning time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

import einmpi
from bench.lib.results import write_results
from einmpi.graph.eingraph import EinGraph
from einmpi.models.config import NAMED
from einmpi.planner.make_plan import make_plan
from einmpi.planner.plan import Options
from einmpi.planner.strategies import DEFAULT_STRATEGY, STRATEGIES
from tests.lib.paper_llama import llama_program, llama_training_program

ROLES = {"batch": ("b",), "sequence": ("s", "t"), "head": ("h",), "hidden": ("f",)}


def chain(skew: int, size: int = 6400) -> EinGraph:
    return einmpi.load("jobs/chain.toml", s=size, skew=skew).graph


def mttkrp() -> EinGraph:
    """Return a tensor times two factors, as in the CP decomposition."""
    shapes = {"X": (1024, 1024, 1024), "B": (1024, 24), "C": (1024, 24)}
    return einmpi.program("Z[i,a] = sum(X[i,j,k] * B[j,a] * C[k,a])", **shapes).graph


def mttkrp_of_order_5() -> EinGraph:
    """Return a tensor with five dimensions times four factors."""
    shapes = {"X": (64,) * 5, **dict.fromkeys("BCDE", (64, 24))}
    text = "Z[i,a] = sum(X[i,j,k,l,m] * B[j,a] * C[k,a] * D[l,a] * E[m,a])"
    return einmpi.program(text, **shapes).graph


def ttmc() -> EinGraph:
    """Return a chain of products of a tensor with matrices, as in the Tucker decomposition."""
    shapes = {"X": (1024, 1024, 1024), "B": (1024, 24), "C": (1024, 24)}
    return einmpi.program("Z[i,a,b] = sum(X[i,j,k] * B[j,a] * C[k,b])", **shapes).graph


def two_products() -> EinGraph:
    """Return (A·B)·C with sizes of 960."""
    shapes = dict.fromkeys("ABC", (960, 960))
    return einmpi.program("Z[i,l] = sum(sum[j](A[i,j] * B[j,k]) * C[k,l])", **shapes).graph


def feed_forward() -> EinGraph:
    """Return the gradients of a network with two hidden layers, by all weights."""
    text = """
        H[b,h] = relu(sum(X[b,i] * W1[i,h]))
        G[b,g] = relu(sum(H[b,h] * W2[h,g]))
        Z[b,l] = sum(G[b,g] * W3[g,l])
        loss = mean[b](logsumexp[l](Z[b,l]) - sum[l](Y[b,l] * Z[b,l]))
        D1[i,h] = grad(loss, W1[i,h])
        D2[h,g] = grad(loss, W2[h,g])
        D3[g,l] = grad(loss, W3[g,l])
    """
    shapes = {"X": (4096, 8192), "W1": (8192, 4096), "W2": (4096, 4096), "W3": (4096, 1024)}
    outputs = ["loss", "D1", "D2", "D3"]
    return einmpi.program(text, dtype="float32", outputs=outputs, Y=(4096, 1024), **shapes).graph


def attention() -> EinGraph:
    return einmpi.load("jobs/attention.toml", s=1024, a=4096, h=32).graph


def llama(batch: int, sequence: int, layers: int) -> EinGraph:
    text, shapes, _ = llama_program(NAMED["7B"], batch, sequence, layers)
    return einmpi.program(text, dtype="float32", **shapes).graph


def llama_training(batch: int, sequence: int, layers: int) -> EinGraph:
    """Return a step of gradient descent."""
    text, shapes, carry = llama_training_program(NAMED["7B"], batch, sequence, layers)
    outputs = ["loss", *carry.values()]
    return einmpi.program(text, dtype="float32", outputs=outputs, **shapes).graph


def classifier_training(batch: int) -> EinGraph:
    """Return a step of experiment 2 at full size: 597,540 features, 8,192 hidden, 14,588 labels."""
    text = """
        H[b,h] = relu(sum(X[b,i] * W1[i,h]) + b1[h])
        Z[b,l] = sum(H[b,h] * W2[h,l]) + b2[l]
        loss = mean[b](logsumexp[l](Z[b,l]) - Z[b,y[b]])
        W1_next[i,h] = W1[i,h] - 0.1 * grad(loss, W1[i,h])
        b1_next[h] = b1[h] - 0.1 * grad(loss, b1[h])
        W2_next[h,l] = W2[h,l] - 0.1 * grad(loss, W2[h,l])
        b2_next[l] = b2[l] - 0.1 * grad(loss, b2[l])
    """
    features, hidden, classes = 597540, 8192, 14588
    shapes = {
        "X": (batch, features),
        "W1": (features, hidden),
        "b1": (hidden,),
        "W2": (hidden, classes),
        "b2": (classes,),
    }
    outputs = ["loss", "W1_next", "b1_next", "W2_next", "b2_next"]
    numbers = np.zeros(batch, np.int64)
    return einmpi.program(text, dtype="float32", outputs=outputs, y=numbers, **shapes).graph


def carried(graph: EinGraph) -> Mapping[str, str]:
    """Return what a training step carries: each weight, and the output that it becomes."""
    names = [vertex.name for vertex in graph.inputs if graph.is_output(f"{vertex.name}_next")]
    return {name: f"{name}_next" for name in names}


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
    "chain-960": lambda: chain(1, 960),
    "two-products": two_products,
    "mttkrp": mttkrp,
    "mttkrp-5": mttkrp_of_order_5,
    "ttmc": ttmc,
    "feed-forward": feed_forward,
    "attention": attention,
    "llama-layer": lambda: llama(8, 1024, 1),
    "llama-32-layers": lambda: llama(8, 1024, 32),
    "llama-32-layers-long": lambda: llama(1, 4096, 32),
    "llama-32-layers-resident": lambda: llama(8, 1024, 32),
    "llama-32-layers-long-resident": lambda: llama(1, 4096, 32),
    "llama-training": lambda: llama_training(8, 1024, 32),
    "experiment2-128": lambda: classifier_training(128),
    "experiment2-512": lambda: classifier_training(512),
    "random-30": lambda: random_graph(30, 7),
    "random-100": lambda: random_graph(100, 1),
    "random-1000": lambda: random_graph(1000, 1),
}
ALL_STRATEGIES = ("chain", "chain-skewed", "attention", "llama-layer")


def stays(graph: str, name: str) -> bool:
    """Return whether an input of a graph stays on the ranks: weights, and the classes of rows."""
    return name == "y" or (graph.endswith("-resident") and name != "x_0")


def plan_rows(graphs: list[str], ranks: list[int], repeat: int) -> Iterator[dict[str, Any]]:
    """Plan all graphs, and yield a row for each strategy."""
    for name in graphs:
        start = time.perf_counter()
        graph = GRAPHS[name]()
        seconds_to_read = time.perf_counter() - start
        carry = carried(graph)
        resident = tuple(vertex.name for vertex in graph.inputs if stays(name, vertex.name))
        for count in ranks:
            for strategy in STRATEGIES if name in ALL_STRATEGIES else (DEFAULT_STRATEGY,):
                options = Options(strategy, roles=ROLES, carry=carry, resident=resident)
                try:
                    plans = [make_plan(graph, count, options) for _ in range(repeat)]
                except einmpi.InputError:
                    continue  # the graph has no label of a role the strategy needs
                moved = plans[0].words_predicted
                yield {
                    "graph": name,
                    "ranks": count,
                    "strategy": strategy,
                    "words": moved,
                    "bound": plans[0].lower_bound,
                    "seconds_to_read": seconds_to_read,
                    "seconds": statistics.median(plan.seconds for plan in plans),
                }


def show(row: dict[str, Any]) -> str:
    """Return the line of a row; there is no ratio to a bound that says nothing."""
    words, bound = row["words"], row["bound"]
    ratio = f"{words / bound:.3f}" if bound > words // 100 else "–"
    return (
        f"{row['graph']:22}{row['ranks']:6}  {row['strategy']:16}{words:18,}{bound:18,}{ratio:>8}"
        f"{row['seconds_to_read']:8.3f}{row['seconds']:8.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024, 4096])
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS), choices=list(GRAPHS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    given = parser.parse_args()
    print(
        f"{'graph':22}{'ranks':>6}  {'strategy':16}{'words':>18}{'lower bound':>18}"
        f"{'ratio':>8}{'read':>8}{'plan':>8}"
    )
    rows = []
    for row in plan_rows(given.graphs, given.ranks, given.repeat):
        rows.append(row)
        print(show(row), flush=True)
    if given.json:
        write_results(given.json, rows)


if __name__ == "__main__":
    main()
