"""The lower bound on the words that any plan of a graph moves (docs/lower_bound.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.einsum import EinSum
from einmpi.planner.lower_bound.charges import Charging, Limit, Part
from einmpi.planner.lower_bound.kept import (
    MOST_WAYS,
    MOST_WORDS,
    Ints,
    Role,
    Ways,
    count_of_ways,
    grids,
    most_kept,
    part_counts,
    role_of,
    ways_of_grid,
    ways_to_cut,
)
from einmpi.planner.lower_bound.parts import Charges, least_words
from einmpi.planner.repetition import vertices_alike

# ---- outer products ------------------------------------------------------------------------------
#
# Outer products that one vertex reads: the two are cut together.
#
# An outer product is larger than its operands and takes little work, so ranks best compute what
# they need of it from copies of its operands. Its reader, taken alone, could not charge much
# for a copy of it, because copies can be computed. Taken together, they pay for copies of the
# operands, or for moving the product.


MOST_PAIRS = 1 << 19  # of a way to cut the product and a way to cut its reader


def outer_products(graph: EinGraph, ranks: int) -> dict[str, str]:
    """Return outer products → the vertex that alone reads each of them, once.

    No vertex reads two of those that are returned, and none that is returned reads another one.
    """
    found: dict[str, str] = {}
    for vertex in graph.computed:
        users = graph.consumers[vertex.name]
        if len(users) != 1 or graph.is_output(vertex.name) or vertex.name in found.values():
            continue
        reader = graph[users[0]]
        if reader.name in found.values() or reader.inputs.count(vertex.name) != 1:
            continue
        made, read = vertex.computed_einsum, reader.computed_einsum
        operand = reader.inputs.index(vertex.name)
        index = read.operands[operand]
        are_labels = all(isinstance(entry, str) for entry in index)
        if not are_labels or len(set(index)) < len(index) or not _is_outer_product(made):
            continue
        of_reader = len(made.bound) + len(_other_labels(read, operand))
        if count_of_ways(ranks, of_reader + 1) > MOST_WAYS:
            continue
        making, reading = _grids(made, read, operand, ranks)
        if len(making) * len(reading) <= MOST_PAIRS:
            found[vertex.name] = reader.name
    return found


def _is_outer_product(einsum: EinSum) -> bool:
    """Return whether an EinSum aggregates nothing, and none of its operands has all labels."""
    if einsum.aggregated or not einsum.operands or einsum.labels != einsum.output:
        return False
    for operand in range(len(einsum.operands)):
        if all(einsum.dimension_cut_by(operand, label) is not None for label in einsum.labels):
            return False
    return True


def _other_labels(read: EinSum, operand: int) -> dict[Role, tuple[int, ...]]:
    """Return the labels of the reader that the product does not have: extents by roles."""
    found: dict[Role, tuple[int, ...]] = {}
    for label, extent in read.extents:
        if label not in read.operands[operand]:
            role = role_of(read, label)
            found[role] = (*found.get(role, ()), extent)
    return found


def _grids(made: EinSum, read: EinSum, operand: int, ranks: int) -> tuple[Ints, Ints]:
    """Return the ways to cut an outer product, and its reader, which has it as this operand.

    In every way: the parts of each dimension of the product, then of whatever else is cut.
    """
    dimensions = [part_counts([extent], ranks) for extent in made.bound]
    others = _other_labels(read, operand).values()
    of_others = [part_counts(extents, ranks) for extents in others]
    return grids(ranks, dimensions), grids(ranks, [*dimensions, *of_others])


@lru_cache(maxsize=16)  # layers repeat
def joint_ways(made: EinSum, read: EinSum, operand: int, ranks: int) -> Ways:
    """Return the ways to cut an outer product and its reader, which has it as this operand.

    The operands are those of the product, then the others of the reader. The words of a way are
    those of the reader's partial results and those that move of the product.
    """
    making, reading = _grids(made, read, operand, ranks)
    roles = [role_of(made, label) for label in made.output]
    made_ways = ways_of_grid(making, roles, len(made.operands), 0)
    index = [str(label) for label in read.operands[operand]]
    roles = [*(role_of(read, label) for label in index), *_other_labels(read, operand)]
    read_ways = ways_of_grid(reading, roles, len(read.operands), prod(read.bound))

    copies = 1 + read_ways.copies[:, operand]
    needed = np.column_stack([reading[:, : len(made.bound)], copies])
    kept = most_kept(making, needed, made.bound, ranks)
    words = read_ways.words + prod(made.bound) * copies - kept
    columns = []  # copies of each operand, for every pair of ways
    for column in made_ways.copies.T:
        columns.append(np.broadcast_to(column[:, None], kept.shape).ravel())
    for number, column in enumerate(read_ways.copies.T):
        if number != operand:
            columns.append(np.broadcast_to(column, kept.shape).ravel())
    spare = np.broadcast_to(read_ways.spare, kept.shape).ravel()
    return Ways(np.column_stack(columns), words.ravel(), spare)


MOST_ROWS = 250  # of a linear program; a graph with more is divided
FINEST_FRACTION = 1 << 20  # of a word: charges are whole numbers of such fractions

Read = tuple[str, int]  # a vertex, and the number of its operand


class _Unit(NamedTuple):
    """A vertex, or an outer product and its reader."""

    result: str
    reads: tuple[tuple[Read, str], ...]  # with the tensor that is read
    ways: Ways


class _Joined(NamedTuple):
    """Some units of a graph, and what they charge."""

    charging: Charging
    charge_of: Mapping[Read, int]  # its number
    tensor_of: Mapping[Read, str]


def lower_bound_words(
    graph: EinGraph, ranks: int, resident: Collection[str] = (), words: int | None = None
) -> int:
    """Return the words that every plan on a mesh of so many ranks moves, or less.

    Inputs are stored once, except for those that are `resident`: these are where they are needed.
    `words` are those that a known plan moves. If a bound that takes each vertex alone is lower,
    what the vertices move together is looked at, too.
    """
    fraction = _finest_fraction(graph, ranks)
    if ranks == 1 or not fraction:
        return 0
    total = 0
    charged: dict[Read, float] = {}
    of_tensors: dict[str, float] = {}
    for joined in _charging(graph, ranks, resident):
        charges = joined.charging.best(fraction)
        total += max(0, joined.charging.bound(charges, fraction))
        for read, number in joined.charge_of.items():
            charged[read] = charges[number] / fraction
            name = joined.tensor_of[read]
            of_tensors[name] = of_tensors.get(name, 0.0) + charged[read]
    bound = -(-total // fraction)  # words are whole numbers
    if words is None or bound >= words:
        return bound
    charges_of_graph = Charges(charged, of_tensors)
    return max(bound, least_words(graph, ranks, resident, charges_of_graph, words))


def _finest_fraction(graph: EinGraph, ranks: int) -> int:
    """Return how many fractions a word can have; 0 if sums of words would not fit into 64 bits."""
    largest = max(vertex.elements for vertex in graph.vertices)
    most_operands = max((len(vertex.inputs) for vertex in graph.computed), default=0)
    # Of two vertices taken as one: all operands, what moves between them, the result, and its
    # partial results.
    terms = 2 * most_operands + 3
    return min(FINEST_FRACTION, MOST_WORDS // max(1, ranks * largest * terms))


def _charging(graph: EinGraph, ranks: int, resident: Collection[str]) -> Iterator[_Joined]:
    """Yield the parts of a graph with what they may charge, all at once or piece by piece.

    In a large graph, vertices that do the same charge the same. If there are still too many, the
    graph is divided: then nothing is charged for a tensor that another piece computes, nor for an
    input that an earlier piece reads.
    """
    units = list(_units(graph, ranks))
    free = {*resident, *_partly_read(graph)}
    made = {unit.result for unit in units}
    free |= {vertex.name for vertex in graph.computed if vertex.name not in made}
    if _rows(units) > MOST_ROWS:
        alike = vertices_alike(graph, dict.fromkeys(free, "free"))
        whole = _joined(graph, units, free, alike)
        if len(whole.charging.parts) + whole.charging.charges <= MOST_ROWS:
            yield whole
            return
    read_before: set[str] = set()
    for piece in _pieces(units):
        read_here = {name for unit in piece for _, name in unit.reads}
        made_here = {unit.result for unit in piece}
        not_charged = set(free)
        for name in read_here:
            is_input = graph[name].is_input
            if (is_input and name in read_before) or (not is_input and name not in made_here):
                not_charged.add(name)
        yield _joined(graph, piece, not_charged, {})
        read_before |= read_here


def _rows(units: Sequence[_Unit]) -> int:
    """Return the rows of the linear program: one for each unit and one for each operand."""
    return sum(1 + len(unit.reads) for unit in units)


def _pieces(units: Sequence[_Unit]) -> Iterator[Sequence[_Unit]]:
    """Yield neighbouring units, as many at a time as make a small linear program."""
    start = 0
    rows = 0
    for end, unit in enumerate(units):
        rows += _rows([unit])
        if rows > MOST_ROWS and end > start:
            yield units[start:end]
            start = end
            rows = _rows([unit])
    yield units[start:]


def _partly_read(graph: EinGraph) -> Iterator[str]:
    """Yield tensors of which a vertex may need only a part, by index arithmetic."""
    for vertex in graph.computed:
        for operand, name in enumerate(vertex.inputs):
            if vertex.computed_einsum.has_arithmetic(operand):
                yield name


def _units(graph: EinGraph, ranks: int) -> Iterator[_Unit]:
    """Yield the vertices of a graph; outer products together with their readers."""
    vertices: dict[str, Vertex] = {}
    for vertex in graph.computed:
        if 0 not in (extent for _, extent in vertex.computed_einsum.extents):
            vertices[vertex.name] = vertex
    reader_of = {}
    for name, reader in outer_products(graph, ranks).items():
        if name in vertices and reader in vertices:
            reader_of[name] = reader
    product_of = {reader: vertices[name] for name, reader in reader_of.items()}
    for name, vertex in vertices.items():
        if name in product_of:
            product = product_of[name]
            others = [read for read in _reads(vertex) if read[1] != product.name]
            operand = vertex.inputs.index(product.name)
            ways = joint_ways(product.computed_einsum, vertex.computed_einsum, operand, ranks)
            yield _Unit(name, (*_reads(product), *others), ways)
        elif name not in reader_of:
            ways = ways_to_cut(vertex.computed_einsum, vertex.elements, ranks)
            yield _Unit(name, _reads(vertex), ways)


def _reads(vertex: Vertex) -> tuple[tuple[Read, str], ...]:
    return tuple(((vertex.name, at), name) for at, name in enumerate(vertex.inputs))


def _joined(
    graph: EinGraph, units: Sequence[_Unit], free: Collection[str], alike: Mapping[str, str]
) -> _Joined:
    """Return the parts of some units; those of vertices that are alike have the same charges.

    Nothing is charged for the tensors in `free`.
    """
    numbers: dict[Read, int] = {}
    charge_of: dict[Read, int] = {}
    tensor_of: dict[Read, str] = {}
    charges_for: dict[str, list[int]] = {}
    charges_of: list[tuple[int | None, ...]] = []
    for unit in units:
        charges: list[int | None] = []
        for (reader, operand), name in unit.reads:
            charge = None
            if name not in free:
                model = alike.get(reader, reader), operand
                charge = numbers.setdefault(model, len(numbers))
                charges_for.setdefault(name, []).append(charge)
                charge_of[reader, operand] = charge
                tensor_of[reader, operand] = name
            charges.append(charge)
        charges_of.append(tuple(charges))

    # Equal units are one part. Ways are equal if they are the same object.
    parts: dict[tuple[object, ...], Part] = {}
    for unit, charges_of_unit in zip(units, charges_of, strict=True):
        for_result = tuple(sorted(charges_for.get(unit.result, ())))
        key = (charges_of_unit, for_result, id(unit.ways))
        times = parts[key].times if key in parts else 0
        parts[key] = Part(charges_of_unit, for_result, unit.ways, times + 1)
    limits: dict[Limit, None] = {}
    for name, charged in charges_for.items():
        limits[Limit(tuple(sorted(charged)), graph[name].elements)] = None
    charging = Charging(list(parts.values()), list(limits), len(numbers))
    return _Joined(charging, charge_of, tensor_of)
