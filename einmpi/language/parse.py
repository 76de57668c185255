"""Programs to graphs: statements in the order in which they need each other (paper, section 3)."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from einmpi.errors import InputError, nearest_of
from einmpi.garbage import without_garbage_search
from einmpi.gradients.differentiate import finished
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.recurrences import computed_again, connected
from einmpi.graph.rewrite import optimize, prune
from einmpi.graph.scalar import MAX_LABELS
from einmpi.language.macro_calls import gradients_in, losses_in
from einmpi.language.recurrences import add_recurrence, shifted_reads
from einmpi.language.scope import mark_values
from einmpi.language.statements import Inputs, add_declaration, add_statement, check_names
from einmpi.language.symbols import SymbolTable
from einmpi.language.syntax import Declaration, Source, Statement, entries, statements

_FEWER_LABELS = "split it into several statements"


class Graphs(NamedTuple):
    """A program as a graph: as it is written, and rewritten to be cheap."""

    written: EinGraph
    rewritten: EinGraph


@without_garbage_search
def build_graphs(
    source: Source,
    inputs: Inputs,
    sizes: Mapping[str, int] | None = None,
    outputs: Sequence[str] | None = None,
    strict: bool = False,
    items: Sequence[Statement | Declaration] | None = None,
    parameters: Mapping[str, type] | None = None,
) -> Graphs:
    """Parse a program and infer extents and dtypes. Both graphs have only what outputs need.

    If `strict`, only rewrites are made that are exact for all values. `items` are the statements
    of the source, if they are known already. `parameters` are those inputs that are numbers, with
    their types in Python.
    """
    written = prune(parse_program(source, inputs, sizes or {}, outputs, items, parameters))
    return Graphs(written, rewrite(source, written, strict))


def rewrite(
    source: Source, written: EinGraph, strict: bool = False, again: Collection[str] = ()
) -> EinGraph:
    """Return the graph that is planned, given that of the program as written.

    If `strict`, only rewrites are made that are exact for all values. Tensors that steps of
    recurrences compute are not kept for others if they are in `again`.
    """
    graph = optimize(computed_again(written, again), strict)
    for vertex in graph.vertices:
        _check_limits(source, vertex)
    return graph


def _check_limits(source: Source, vertex: Vertex) -> None:
    """Refuse a vertex with too many labels.

    This is done after splitting: a product of 100 tensors becomes 99 vertices with few labels each.
    """
    if len(vertex.bound) > MAX_LABELS:
        what = f"{vertex.name} has {len(vertex.bound)} dimensions"
        raise InputError(_place_of(source, vertex), what, f"at most {MAX_LABELS}")
    if vertex.einsum is not None and len(vertex.einsum.labels) > MAX_LABELS:
        what = f"{vertex.name} is computed over {len(vertex.einsum.labels)} labels at once"
        raise InputError(_place_of(source, vertex), what, f"at most {MAX_LABELS}", _FEWER_LABELS)


def _place_of(source: Source, vertex: Vertex) -> str:
    """Return where the statement of a vertex is, or only the name of the file."""
    for item in statements(source):
        if item.name in vertex.origin:
            return source.at(item.node)
    return source.name


def parse_graph(text: str) -> EinGraph:
    """Read back str(graph)."""
    body, _, listed = text.rpartition("outputs: ")
    outputs = [name.strip() for name in listed.split(",")]
    return parse_program(Source("graph", body), {}, {}, outputs)


def parse_program(
    source: Source,
    inputs: Inputs,
    sizes: Mapping[str, int],
    outputs: Sequence[str] | None = None,
    items: Sequence[Statement | Declaration] | None = None,
    parameters: Mapping[str, type] | None = None,
) -> EinGraph:
    """Return the graph of a program as written, with a vertex for each aggregation or statement.

    `parameters` are those inputs that are numbers, with their types in Python.
    """
    if items is None:
        items = statements(source)
    program = [item for item in items if isinstance(item, Statement)]
    # No temporary takes the name of a tensor or a label.
    words = set(re.findall(r"[^\W\d]\w*", source.text))
    symbols = SymbolTable(source, sizes, words | set(inputs), parameters)
    for name, (shape, dtype) in inputs.items():
        symbols.add_input(name, shape, dtype, source.name)
    for item in items:
        if isinstance(item, Declaration):
            add_declaration(symbols, item)
    check_names(symbols, program)
    mark_values(program, symbols.known)
    symbols.differentiated = gradients_in(program)
    reads = _reads(program)
    order = _in_order(source, program, reads)
    not_used = losses_in(program) if symbols.is_differentiated else set()
    for group in order:
        names = [item.name for item in group]
        if _is_cyclic(names, reads):
            # What only its own next steps read is a result.
            for item in group:
                not_used |= shifted_reads(item, names)
            add_recurrence(symbols, group)
        else:
            add_statement(symbols, group[0])
    used: set[str] = set()
    for read in _reads(program, not_used).values() if not_used else reads.values():
        used.update(read)
    defined = [item.name for item in program]
    if not outputs:
        outputs = [name for name in defined if name not in used]
    known = set(defined)
    for name in outputs:
        if name not in known:
            raise InputError(source.name, f"unknown output {name!r}", nearest_of(defined, name))
    known_tensors: Mapping[str, Vertex] = symbols.known
    if symbols.is_differentiated or "stop" in words:
        known_tensors = finished(symbols.known, symbols.is_differentiated)
    return EinGraph(tuple(known_tensors.values()), tuple(outputs))


def _reads(
    program: Sequence[Statement], ignored: Collection[int] = ()
) -> dict[str, tuple[str, ...]]:
    """Return for each statement the statements whose results it uses.

    In Z[i] = n * sum(Y[i,j]) these are Y and n, unless n is a label or a size. `ignored` are the
    ids of names in syntax trees that do not count.
    """
    names = {item.name for item in program}
    scalars = {item.name for item in program if not item.labels}
    reads = {}
    for item in program:
        found: dict[str, None] = {}
        for name, has_brackets in _names_in(item, ignored):
            candidates = names if has_brackets else scalars
            if name in candidates:
                found[name] = None
        reads[item.name] = tuple(found)
    return reads


def _names_in(item: Statement, ignored: Collection[int]) -> Iterator[tuple[str, bool]]:
    """Yield the names in a statement that may be tensors, and whether brackets follow them."""
    # ids of names directly in brackets, which are labels, not tensors, and of others
    in_brackets = set(ignored)
    for node in item.nodes:
        if isinstance(node, ast.Subscript):
            in_brackets.update(id(entry) for entry in entries(node.slice))
            if isinstance(node.value, ast.Name) and id(node.value) not in ignored:
                yield node.value.id, True
        elif isinstance(node, ast.Name) and id(node) not in in_brackets:
            yield node.id, False


def _in_order(
    source: Source, program: Sequence[Statement], reads: Mapping[str, Sequence[str]]
) -> list[list[Statement]]:
    """Return the statements, each after those it uses, otherwise as written.

    Those that use each other come together: they are a recurrence, if one of them is read at an
    index with arithmetic. InputError if not.
    """
    by_name = {item.name: item for item in program}
    order = []
    for names in connected(reads):
        group = [by_name[name] for name in names]
        if _is_cyclic(names, reads) and not any(shifted_reads(item, names) for item in group):
            cycle = _cycle(names, reads)
            what = f"{cycle[0]} depends on itself: {' ← '.join(cycle)}"
            raise InputError(source.at(by_name[cycle[0]].node), what, "a program without cycles")
        order.append(group)
    return order


def _is_cyclic(names: Sequence[str], reads: Mapping[str, Sequence[str]]) -> bool:
    return len(names) > 1 or names[0] in reads[names[0]]


def _cycle(names: Sequence[str], reads: Mapping[str, Sequence[str]]) -> list[str]:
    """Return names each of which uses the next; the last is the first one again."""
    path = [names[0]]
    while path[-1] not in path[:-1]:
        path.append(next(name for name in names if name in reads[path[-1]]))
    return path[path.index(path[-1]) :]
