"""The least memory in which a rank can carry out a plan: most tensors are outside of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.planner import pieces
from einmpi.planner.memory import (
    LEAST_MESSAGE_BUFFER_BYTES,
    MESSAGE_BUFFER_BYTES,
    MESSAGE_BUFFER_SHARE,
    ROUNDING_BYTES,
    Labels,
    Layouts,
    longest_share,
)
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.halo import is_inside, needed_of
from einmpi.planner.moving.halo_counts import most_needed_bound
from einmpi.planner.peak_memory import input_bytes


def least_bytes(
    graph: EinGraph, mesh: Mesh, states: Labels, layouts: Layouts, resident: Collection[str]
) -> int:
    """Return the least memory in which a rank can carry out a plan.

    Everything but resident inputs is then kept outside of memory, and each vertex is computed in
    the smallest pieces.
    """
    staying = sum(input_bytes(graph, mesh, states, layouts, resident).values())
    least = staying
    for vertex in graph.computed:
        pieces_of_vertex = least_bytes_of_vertex(graph, mesh, vertex, states[vertex.name], layouts)
        least = max(least, staying + pieces_of_vertex)
    if mesh.ranks == 1:
        return least
    return max(least, with_message_buffers(staying, mesh.ranks))


def least_bytes_of_vertex(
    graph: EinGraph, mesh: Mesh, vertex: Vertex, state: Sequence[str | None], layouts: Layouts
) -> int:
    """Return the bytes of the smallest pieces in which a rank can compute its part of a vertex."""
    shares = []
    for label, extent in vertex.computed_einsum.extents:
        axes = [axis for axis, cut in enumerate(state) if cut == label]
        shares.append((label, longest_share(mesh, extent, axes)))
    einsum = replace(vertex.computed_einsum, extents=tuple(shares))
    tensors = [*(graph[name] for name in vertex.inputs), vertex]
    bounds = []
    for name in vertex.inputs:
        bounds.append(_bound_of_operand(graph, mesh, vertex, name, tuple(state), layouts))
    itemsizes = tuple(np.dtype(tensor.dtype).itemsize for tensor in tensors)
    return pieces.least_bytes(einsum, (*bounds, vertex.bound), itemsizes)


def with_message_buffers(staying: int, ranks: int) -> int:
    """Return the least memory limit that has room for two message buffers beside these bytes.

    Each takes an eighth of the limit (`stage_of`), but no less than its least size and no more than
    its greatest. Where it takes an eighth, the other six eighths must hold everything else.
    """
    without_buffers = staying + ROUNDING_BYTES * ranks
    shares_for_the_rest = MESSAGE_BUFFER_SHARE - 2
    with_an_eighth = -(-without_buffers * MESSAGE_BUFFER_SHARE // shares_for_the_rest)
    with_greatest = without_buffers + 2 * MESSAGE_BUFFER_BYTES
    with_least = without_buffers + 2 * LEAST_MESSAGE_BUFFER_BYTES
    return max(min(with_an_eighth, with_greatest), with_least)


def _bound_of_operand(
    graph: EinGraph,
    mesh: Mesh,
    vertex: Vertex,
    name: str,
    state: tuple[str | None, ...],
    layouts: Layouts,
) -> tuple[int, ...]:
    """Return a bound on what a rank has of an operand in dimensions that are not cut in pieces.

    Of a dimension whose index is arithmetic, that is what the rank needs, or its block.
    """
    bound = graph[name].bound
    needed = needed_of(vertex, name, bound)
    if needed is None:
        return bound
    if not is_inside(mesh, needed, layouts[name], state):
        return most_needed_bound(mesh, needed, state)
    block = []
    for dimension, extent in enumerate(bound):
        axes = [axis for axis, cut in enumerate(layouts[name]) if cut == dimension]
        block.append(longest_share(mesh, extent, axes))
    return tuple(block)
