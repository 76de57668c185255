"""A graph as units that charge for copies: vertices, and outer products with their readers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.einsum import EinSum
from einmpi.planner.lower_bound.charges import Charging, Limit, Part
from einmpi.planner.lower_bound.halos import not_charged, readings_of, ways_with_halos
from einmpi.planner.lower_bound.ways import (
    FREE_WORK,
    MOST_WAYS,
    Ints,
    Role,
    Ways,
    Work,
    count_of_ways,
    grids,
    least_ways,
    most_kept,
    part_counts,
    role_of,
    ways_of_grid,
    ways_to_cut,
)
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
        if reader.aligned:  # parts of an aggregated label need not make partial results
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
    dimensions = tuple(part_counts([extent], ranks) for extent in made.bound)
    others = _other_labels(read, operand).values()
    of_others = [part_counts(extents, ranks) for extents in others]
    return grids(ranks, dimensions), grids(ranks, (*dimensions, *of_others))


@bounded_cache(16)  # layers repeat
def joint_ways(
    made: EinSum,
    read: EinSum,
    operand: int,
    ranks: int,
    work_of_made: Work = FREE_WORK,
    work_of_read: Work = FREE_WORK,
) -> Ways:
    """Return the ways to cut an outer product and its reader, which has it as this operand.

    The operands are those of the product, then the others of the reader. The words of a way are
    those of the reader's partial results and those that move of the product.
    """
    making, reading = _grids(made, read, operand, ranks)
    making, reading = work_of_made.allowed(making), work_of_read.allowed(reading)
    if not len(making) or not len(reading):
        return least_ways(len(made.operands) + len(read.operands) - 1, ranks)
    roles = [role_of(made, label) for label in made.output]
    made_ways = ways_of_grid(making, roles, len(made.operands), 0, work_of_made)
    index = [str(label) for label in read.operands[operand]]
    roles = [*(role_of(read, label) for label in index), *_other_labels(read, operand)]
    read_ways = ways_of_grid(reading, roles, len(read.operands), prod(read.bound), work_of_read)

    copies = 1 + read_ways.copies[:, operand]
    needed = np.column_stack([reading[:, : len(made.bound)], copies])
    kept = most_kept(making, needed, made.bound, ranks)
    words = made_ways.words[:, None] + read_ways.words + prod(made.bound) * copies - kept
    columns = []  # copies of each operand, for every pair of ways
    for column in made_ways.copies.T:
        columns.append(np.broadcast_to(column[:, None], kept.shape).ravel())
    for number, column in enumerate(read_ways.copies.T):
        if number != operand:
            columns.append(np.broadcast_to(column, kept.shape).ravel())
    spare = np.broadcast_to(read_ways.spare, kept.shape).ravel()
    return Ways(np.column_stack(columns), words.ravel(), spare)


# ---- units ---------------------------------------------------------------------------------------


MOST_ROWS = 250  # of a linear program; a graph with more is divided

Read = tuple[str, int]  # a vertex, and the number of its operand


class _Unit(NamedTuple):
    """A vertex, or an outer product and its reader."""

    result: str
    reads: tuple[Read, ...]
    ways: Ways
    free: frozenset[Read]  # those that charge nothing


EVERY_WORK_FREE: Mapping[str, Work] = {}

# Some units of a graph with what they charge, and the number of the charge for each operand.
_Joined = tuple[Charging, Mapping[Read, int]]


def tensor_read(graph: EinGraph, read: Read) -> str:
    reader, operand = read
    return graph[reader].inputs[operand]


def charging_of(
    graph: EinGraph,
    ranks: int,
    resident: Collection[str],
    work: Mapping[str, Work] = EVERY_WORK_FREE,
    unit: int = 1,
) -> Iterator[_Joined]:
    """Yield the parts of a graph with what they may charge, all at once or piece by piece.

    In a large graph, vertices that do the same charge the same. If there are still too many, the
    graph is divided: then nothing is charged for a tensor that another piece computes, nor for an
    input that an earlier piece reads.
    """
    units = list(_units(graph, ranks, work, unit))
    free = set(resident)
    made = {unit.result for unit in units}
    free |= {vertex.name for vertex in graph.computed if vertex.name not in made}
    if _rows(units) > MOST_ROWS:
        alike = vertices_alike(graph, dict.fromkeys(free, "free"))
        charging, charge_of = _joined(graph, units, free, alike, unit)
        if len(charging.parts) + charging.charges <= MOST_ROWS:
            yield charging, charge_of
            return
    read_before: set[str] = set()
    for piece in _pieces(units):
        read_here = {tensor_read(graph, read) for unit in piece for read in unit.reads}
        made_here = {unit.result for unit in piece}
        not_charged = set(free)
        for name in read_here:
            is_input = graph[name].is_input
            if (is_input and name in read_before) or (not is_input and name not in made_here):
                not_charged.add(name)
        yield _joined(graph, piece, not_charged, {}, unit)
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


def _units(graph: EinGraph, ranks: int, work: Mapping[str, Work], unit: int) -> Iterator[_Unit]:
    """Yield the vertices of a graph; outer products together with their readers."""
    vertices: dict[str, Vertex] = {}
    for vertex in graph.computed:
        if 0 not in (extent for _, extent in vertex.computed_einsum.extents):
            vertices[vertex.name] = vertex
    reader_of = {}
    for name, reader in outer_products(graph, ranks).items() if unit == 1 else ():
        if name in vertices and reader in vertices:
            reader_of[name] = reader
    product_of = {reader: vertices[name] for name, reader in reader_of.items()}
    for name, vertex in vertices.items():
        readings = readings_of(graph, vertex)
        free = {(name, operand) for operand in not_charged(graph, vertex, readings)}
        if name in product_of:
            product = product_of[name]
            operand = vertex.inputs.index(product.name)
            others = [read for read in _reads(vertex) if read[1] != operand]
            for each in (product, vertex):  # whose copies are counted as those of blocks
                unknown = [None] * len(each.inputs)
                free |= {(each.name, at) for at in not_charged(graph, each, unknown)}
            ways = joint_ways(
                product.computed_einsum,
                vertex.computed_einsum,
                operand,
                ranks,
                work.get(product.name, FREE_WORK),
                work.get(name, FREE_WORK),
            )
            yield _Unit(name, (*_reads(product), *others), ways, frozenset(free))
        elif name not in reader_of:
            einsum = vertex.computed_einsum
            own = work.get(name, FREE_WORK)
            own = own._replace(price=own.price // unit)
            elements = vertex.elements // unit
            partial_labels = vertex.partial_labels
            if any(reading is not None for reading in readings):
                ways = ways_with_halos(einsum, readings, elements, ranks, own, partial_labels)
            else:
                ways = ways_to_cut(einsum, elements, ranks, own, partial_labels)
            yield _Unit(name, _reads(vertex), ways, frozenset(free))


def _reads(vertex: Vertex) -> tuple[Read, ...]:
    return tuple((vertex.name, operand) for operand in range(len(vertex.inputs)))


def _joined(
    graph: EinGraph,
    units: Sequence[_Unit],
    free: Collection[str],
    alike: Mapping[str, str],
    unit_of_words: int,
) -> _Joined:
    """Return the parts of some units; those of vertices that are alike have the same charges.

    Nothing is charged for the tensors in `free`.
    """
    numbers: dict[Read, int] = {}
    charge_of: dict[Read, int] = {}
    charges_for: dict[str, list[int]] = {}
    charges_of: list[tuple[int | None, ...]] = []
    for unit in units:
        charges: list[int | None] = []
        for reader, operand in unit.reads:
            charge = None
            name = tensor_read(graph, (reader, operand))
            if name not in free and (reader, operand) not in unit.free:
                model = alike.get(reader, reader), operand
                charge = numbers.setdefault(model, len(numbers))
                charges_for.setdefault(name, []).append(charge)
                charge_of[reader, operand] = charge
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
        limits[Limit(tuple(sorted(charged)), graph[name].elements // unit_of_words)] = None
    return Charging(list(parts.values()), list(limits), len(numbers)), charge_of
