"""Random graphs for the paper's algorithm, and its least cost by exhaustion and elimination."""

from __future__ import annotations

from collections.abc import Collection
from random import Random

import numpy as np
from paths import ROOT

import einmpi
from einmpi.graph.arithmetic import call
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Scalar
from einmpi.planner.paper import cost_aggregate, cost_join, cost_repartition, needs, viable

Factor = tuple[tuple[int, ...], np.ndarray]  # variables, costs over their values


def elementwise(*extents: int) -> EinSum:
    """A copy of a tensor."""
    labels = tuple(f"l{k}" for k in range(len(extents)))
    return EinSum(labels, (labels,), Arg(0), None, (), tuple(zip(labels, extents, strict=True)))


def matmul(i: int = 8, j: int = 8, k: int = 8) -> EinSum:
    """Parts are those of i, k, j."""
    extents = (("i", i), ("k", k), ("j", j))
    return EinSum(
        ("i", "k"), (("i", "j"), ("j", "k")), call("*", Arg(0), Arg(1)), "sum", ("j",), extents
    )


def graph_of(text: str, **tensors: object) -> EinGraph:
    return einmpi.program(text, **tensors).graph


def chain(skew: int) -> EinGraph:
    return einmpi.load(ROOT / "jobs/chain.toml", s=640, skew=skew).graph


def random_graph(random: Random, computed: int, tree: bool, labels: int = 4) -> EinGraph:
    """Return unary and binary EinSums over small tensors; a tree uses no computed one twice."""
    vertices: list[Vertex] = []
    unused: list[Vertex] = []
    for k in range(computed):
        sources = []
        for _ in range(random.choice((1, 2, 2))):
            made = unused if tree else [vertex for vertex in vertices if not vertex.is_input]
            if made and random.random() < 0.75:
                sources.append(random.choice(made))
                if sources[-1] in unused:
                    unused.remove(sources[-1])
            else:
                inputs = [vertex for vertex in vertices if vertex.is_input]
                if not inputs or random.random() < 0.7:
                    bound = tuple(
                        random.choice((1, 2, 3, 4, 6, 8, 8)) for _ in range(random.randint(0, 3))
                    )
                    inputs.append(Vertex(f"X{len(inputs)}", bound, "float64"))
                    vertices.append(inputs[-1])
                sources.append(random.choice(inputs[-1:] if random.random() < 0.7 else inputs))
        einsum = _random_einsum(random, [source.bound for source in sources], labels)
        vertices.append(
            Vertex(
                f"V{k}", einsum.bound, "float64", einsum, tuple(source.name for source in sources)
            )
        )
        unused.append(vertices[-1])
    vertices.sort(key=lambda vertex: not vertex.is_input)
    return EinGraph(tuple(vertices), tuple(vertex.name for vertex in unused))


def _random_einsum(random: Random, bounds: list[tuple[int, ...]], most: int) -> EinSum:
    """Labels carry their extent in their name; now and then a diagonal, a gather or a broadcast."""
    while True:
        operands: list[tuple[str | Scalar, ...]] = []
        for k, bound in enumerate(bounds):
            index: list[str | Scalar] = [f"{random.choice('ab')}{extent}" for extent in bound]
            if k and index and random.random() < 0.1:
                index[random.randrange(len(index))] = Arg(0)
            operands.append(tuple(index))
        used = list(
            dict.fromkeys(entry for index in operands for entry in index if isinstance(entry, str))
        )
        random.shuffle(used)
        output = used[: random.randint(0, min(3, len(used)))]
        aggregated = used[len(output) :]
        if random.random() < 0.1:
            output.append("c2")
        if len(output + aggregated) <= most:
            break
    extents = tuple((label, int(label[1:])) for label in output + aggregated)
    function = call("*", Arg(0), Arg(1)) if len(operands) == 2 else Arg(0)
    return EinSum(
        tuple(output),
        tuple(operands),
        function,
        "sum" if aggregated else None,
        tuple(aggregated),
        extents,
    )


def factors(
    graph: EinGraph, ranks: int, edges: Collection[tuple[str, str]] | None = None
) -> list[Factor]:
    """Return the paper's cost as tables over the viable vectors; only of `edges` if given."""
    names = [vertex.name for vertex in graph.computed]
    spaces = [viable(vertex.einsum, ranks) for vertex in graph.computed]
    found: list[Factor] = []
    for k, vertex in enumerate(graph.computed):
        einsum, bounds = vertex.einsum, [graph[name].bound for name in vertex.inputs]
        own = [
            cost_join(einsum, parts, bounds) + cost_aggregate(einsum, parts) for parts in spaces[k]
        ]
        found.append(((k,), np.array(own)))
        for operand, (source, bound) in enumerate(zip(vertex.inputs, bounds, strict=True)):
            if graph[source].is_input or (edges is not None and (source, vertex.name) not in edges):
                continue
            made = [parts[: len(bound)] for parts in spaces[names.index(source)]]
            table = [
                [cost_repartition(needs(einsum, operand, parts), d, bound) for parts in spaces[k]]
                for d in made
            ]
            found.append(((names.index(source), k), np.array(table)))
    return found


def exhaustive(tables: list[Factor]) -> int:
    """The smallest sum, over all combinations of values."""
    variables = sorted({variable for scope, _ in tables for variable in scope})
    return int(_joined(tables, variables).min())


def eliminated(tables: list[Factor]) -> int:
    """The smallest sum, one variable after another, the one with the smallest table first."""
    tables = list(tables)
    while any(scope for scope, _ in tables):
        size = {v: costs.shape[scope.index(v)] for scope, costs in tables for v in scope}
        around = {v: sorted({w for scope, _ in tables if v in scope for w in scope}) for v in size}
        variable = min(size, key=lambda v: (np.prod([size[w] for w in around[v]]), v))
        scope = around[variable]
        joined = _joined([table for table in tables if variable in table[0]], scope).min(
            axis=scope.index(variable)
        )
        tables = [table for table in tables if variable not in table[0]]
        tables.append((tuple(v for v in scope if v != variable), joined))
    return int(sum(costs for _, costs in tables))


def _joined(tables: list[Factor], variables: list[int]) -> np.ndarray:
    total = np.zeros((), np.int64)
    for scope, costs in tables:
        order = sorted(range(len(scope)), key=lambda k: scope[k])
        shape = [1] * len(variables)
        for k in order:
            shape[variables.index(scope[k])] = costs.shape[k]
        total = total + costs.transpose(order).reshape(shape)
    return total
