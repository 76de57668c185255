"""The text language → EinGraph: a program's statements, in the order they need, outputs (paper, section 3)."""

from __future__ import annotations

import ast
import heapq
import re
from collections.abc import Iterable, Mapping, Sequence

from einmpi.errors import InputError, one_of
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.rewrite import optimize
from einmpi.language.statements import Inputs, build, check_names, declare
from einmpi.language.symbols import Vertices
from einmpi.language.syntax import Declaration, Source, Statement, entries, statements


def build_graph(
    source: Source,
    inputs: Inputs,
    sizes: Mapping[str, int] | None = None,
    outputs: Sequence[str] | None = None,
) -> EinGraph:
    """Parse, infer and rewrite a program: what a plan is made for."""
    return optimize(parse_program(source, inputs, sizes or {}, outputs))


def parse_graph(text: str) -> EinGraph:
    """Read back str(graph)."""
    body, _, listed = text.rpartition("outputs: ")
    outputs = [name.strip() for name in listed.split(",")]
    return parse_program(Source("graph", body), {}, {}, outputs)


def parse_program(
    source: Source, inputs: Inputs, sizes: Mapping[str, int], outputs: Sequence[str] | None = None
) -> EinGraph:
    """The program as written: one vertex an aggregation or elementwise statement, not yet rewritten."""
    given = list(statements(source))
    program = [item for item in given if isinstance(item, Statement)]
    words = set(
        re.findall(r"[^\W\d]\w*", source.text)
    )  # no temporary takes the name of a tensor or a label
    vertices = Vertices(source, sizes, words | set(inputs))
    for name, (shape, dtype) in inputs.items():
        vertices.add_input(name, shape, dtype, source.name)
    for item in given:
        if isinstance(item, Declaration):
            declare(vertices, item)
    check_names(vertices, program)
    reads = _reads(program)
    for item in _in_order(source, program, reads):
        build(vertices, item)
    if not outputs:
        used = {name for names in reads.values() for name in names}
        outputs = [item.name for item in program if item.name not in used]
    computed = [item.name for item in program]
    for name in outputs:
        if name not in computed:
            raise InputError(source.name, f"unknown output {name!r}", one_of(computed, name))
    return EinGraph(tuple(vertices.known.values()), tuple(outputs))


def _reads(program: Sequence[Statement]) -> dict[str, tuple[str, ...]]:
    """For each statement, those whose result it uses."""
    names = {item.name for item in program}
    scalars = {item.name for item in program if not item.labels}
    reads = {}
    for item in program:
        found: dict[str, None] = {}
        labels: set[int] = set()  # names that stand directly in brackets are labels, not tensors
        for node in ast.walk(item.value):
            if isinstance(node, ast.Subscript):
                labels.update(id(entry) for entry in entries(node.slice))
                if isinstance(node.value, ast.Name) and node.value.id in names:
                    found[node.value.id] = None
            elif isinstance(node, ast.Name) and node.id in scalars and id(node) not in labels:
                found[node.id] = None
        reads[item.name] = tuple(found)
    return reads


def _in_order(
    source: Source, program: Sequence[Statement], reads: Mapping[str, Sequence[str]]
) -> Iterable[Statement]:
    """Every statement after those it uses, otherwise as written; InputError on a cycle."""
    number = {item.name: k for k, item in enumerate(program)}
    waits = {name: set(names) for name, names in reads.items()}
    feeds: dict[str, list[str]] = {name: [] for name in reads}
    for name, names in reads.items():
        for needed in names:
            feeds[needed].append(name)
    ready = [number[name] for name, names in waits.items() if not names]
    heapq.heapify(ready)
    order = []
    while ready:
        item = program[heapq.heappop(ready)]
        order.append(item)
        for name in feeds[item.name]:
            waits[name].discard(item.name)
            if not waits[name]:
                heapq.heappush(ready, number[name])
    if len(order) < len(program):
        path = [next(item.name for item in program if waits[item.name])]
        while path[-1] not in path[:-1]:
            path.append(min(waits[path[-1]], key=number.__getitem__))
        path = path[path.index(path[-1]) :]
        node = program[number[path[0]]].node
        raise InputError(
            source.at(node), f"{path[0]} depends on itself: {' ← '.join(path)}", "no cycle"
        )
    return order
