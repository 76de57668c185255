"""Outer products that one vertex reads: the two are cut together.

An outer product is larger than its operands and takes little work, so ranks best compute what they
need of it from copies of its operands. Its reader, taken alone, could not charge much for a copy of
it, because copies can be computed. Taken together, they pay for copies of the operands, or for
moving the product.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np

from einmpi.graph.eingraph import EinGraph
from einmpi.graph.einsum import EinSum
from einmpi.planner.lower_bound.kept import most_kept
from einmpi.planner.lower_bound.ways import (
    MOST_WAYS,
    Ints,
    Role,
    Ways,
    count_of_ways,
    grids,
    part_counts,
    role_of,
    ways_of_grid,
)

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
