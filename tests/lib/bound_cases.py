"""Graphs for tests of the lower bound, and the words of their best plans."""

from __future__ import annotations

import random
from math import prod

import einmpi
from einmpi.graph.eingraph import EinGraph
from einmpi.planner.factor import factor
from einmpi.planner.lower_bound.pieces import ALL_CUTS, CUTS_OF_MESH
from einmpi.planner.mesh import Mesh
from einmpi.planner.plan import Plan
from einmpi.planner.search import search
from einmpi.planner.solving.solver import Solver


def optimum(graph: EinGraph, ranks: int, resident: tuple[str, ...] = ()) -> float:
    """Words of the best plan of a graph of float32 tensors."""
    found = search(Solver(factor(graph, resident), Mesh(ranks)))
    assert found.exact
    return found.cost / 4


def repeated_operations(plan: Plan) -> int:
    """Operations that a rank does as another one does them."""
    repeated = 0
    for vertex in plan.graph.computed:
        cuts = prod(plan.parts(vertex.name).values())
        repeated += vertex.operations() * (plan.mesh.ranks // cuts - 1)
    return repeated


def is_among(other: Plan, plan: Plan) -> bool:
    """Whether the lower bound of a plan holds for another one.

    Bounds are given that gathered dimensions are not cut. A plan that cuts them picks elements
    where they lie, in a vertex of its own.
    """
    if {vertex.name for vertex in plan.graph.computed} != {
        each.name for each in other.graph.computed
    }:
        return False
    if plan.among in (CUTS_OF_MESH, ALL_CUTS):
        return True
    return repeated_operations(other) <= repeated_operations(plan)


# (program, shapes, resident): small cases in which a word is easily counted twice.
TRAPS = {
    "a resident matrix is summed by every rank": ("v[i] = sum(W[i,j])", {"W": (2, 1000)}, "W"),
    "a resident vector is summed by every rank": ("n = sum(W[i])", {"W": (1000,)}, "W"),
    "a result of one element": ("Z[i] = max[j](X[i,j] * X[j,i])", {"X": (1, 1)}, ""),
    "an outer product is computed by every rank": (
        "T[i,j] = exp(a[i] * b[j]); C[k] = sum(T[i,j] * W[i,j,k])",
        {"a": (4,), "b": (4,), "W": (4, 4, 10000)},
        "",
    ),
    "a product of resident vectors": (
        "T[i,j] = exp(a[i] * b[j]); C[i,k] = sum(T[i,j] * W[j,k])",
        {"a": (100,), "b": (100,), "W": (100, 100)},
        "a b",
    ),
    "a product used by two products": (
        "T[i,k] = sum(A[i,j] * B[j,k]); U[i,l] = sum(T[i,k] * C[k,l]);"
        "V[k,l] = sum(T[i,k] * D[i,l])",
        {"A": (64, 2), "B": (2, 64), "C": (64, 64), "D": (64, 64)},
        "",
    ),
    "one matrix three times": ("U[i,l] = sum(A[i,j] * A[j,k] * A[k,l])", {"A": (16, 16)}, ""),
    "a thin matrix between wide ones": (
        "T[i,k] = sum(A[i,j] * B[j,k]); U[i,l] = sum(T[i,k] * C[k,l])",
        {"A": (1000, 1000), "B": (1000, 3), "C": (3, 1000)},
        "A",
    ),
    "fewer elements than ranks": (
        "T[i] = sum(A[i,j] * b[j]); n = sum(T[i] * T[i])",
        {"A": (2, 3), "b": (3,)},
        "",
    ),
    "a diagonal": ("d[i] = X[i,i]; Z[i,k] = sum(X[i,j] * X[j,k]) + d[i]", {"X": (24, 24)}, ""),
    "a broadcast scalar": (
        "n = sum(X[i]); Z[i,j] = n * Y[i,j] + n; m = sum(Z[i,j])",
        {"X": (9,), "Y": (5, 7)},
        "",
    ),
}

LETTERS = "ijklm"


def random_products(rng: random.Random) -> EinGraph:
    """Return products and sums of one to four tensors; many of them are outer products."""
    extent = {label: rng.choice((1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 100)) for label in LETTERS}
    labels_of: dict[str, list[str]] = {}
    shapes = {}
    lines = []
    for k in range(rng.randint(1, 4)):
        operands = []
        for _ in range(rng.randint(1, 4)):
            if lines and rng.random() < 0.5:
                operands.append(rng.choice([f"V{m}" for m in range(k)]))
                continue
            operands.append(f"I{len(shapes)}")
            labels_of[operands[-1]] = rng.sample(LETTERS, rng.randint(1, 3))
            shapes[operands[-1]] = tuple(extent[label] for label in labels_of[operands[-1]])
        labels = sorted({label for name in operands for label in labels_of[name]})
        share = rng.choice((0.6, 1))
        output = [label for label in rng.sample(labels, len(labels)) if rng.random() < share]
        labels_of[f"V{k}"] = output
        read = [f"{name}[{','.join(labels_of[name])}]" for name in operands]
        body = rng.choice((" * ", " + ")).join(read)
        aggregated = [label for label in labels if label not in output]
        if aggregated:
            body = f"{rng.choice(('sum', 'max'))}[{','.join(aggregated)}]({body})"
        lines.append(f"V{k}[{','.join(output)}] = {body}")
    text = "\n".join(lines).replace("[]", "")
    return einmpi.program(text, dtype="float32", **shapes).graph
