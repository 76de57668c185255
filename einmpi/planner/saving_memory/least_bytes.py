"""The least memory in which a rank can carry out a plan: most tensors are outside of it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from einmpi.graph.eingraph import Vertex
from einmpi.planner import pieces
from einmpi.planner.memory import (
    LEAST_MESSAGE_BUFFER_BYTES,
    MESSAGE_BUFFER_BYTES,
    MESSAGE_BUFFER_SHARE,
    ROUNDING_BYTES,
    Cuts,
    longest_shares,
    on_a_rank,
)
from einmpi.planner.moving.halo import is_inside, needed_of
from einmpi.planner.moving.halo_counts import most_needed_bound
from einmpi.planner.peak_memory import input_bytes


def least_bytes(cut: Cuts, resident: Collection[str]) -> int:
    """Return the least memory in which a rank can carry out a plan.

    Everything but resident inputs is then kept outside of memory, and each vertex is computed in
    the smallest pieces.
    """
    staying = sum(input_bytes(cut, resident).values())
    pieces_of_vertices = [least_bytes_of_vertex(cut, vertex) for vertex in cut.graph.computed]
    return with_message_buffers(staying, max(pieces_of_vertices, default=0), cut.mesh.ranks)


def least_bytes_of_vertex(cut: Cuts, vertex: Vertex) -> int:
    """Return the bytes of the smallest pieces in which a rank can compute its part of a vertex."""
    einsum = on_a_rank(vertex.computed_einsum, cut.mesh, cut.states[vertex.name])
    tensors = [*(cut.graph[name] for name in vertex.inputs), vertex]
    bounds = [_bound_of_operand(cut, vertex, name) for name in vertex.inputs]
    itemsizes = tuple(np.dtype(tensor.dtype).itemsize for tensor in tensors)
    return pieces.least_bytes(einsum, (*bounds, vertex.bound), itemsizes)


def with_message_buffers(staying: int, pieces_bytes: int, ranks: int) -> int:
    """Return the least memory limit with room for what stays, and for pieces or message buffers.

    Each of the two buffers takes an eighth of the limit (`stage_of`), but no less than its least
    size and no more than its greatest. Where it takes an eighth, the other six eighths must hold
    everything else.
    """
    with_pieces = staying + pieces_bytes
    if ranks == 1:
        return with_pieces
    without_buffers = staying + ROUNDING_BYTES * ranks
    shares_for_the_rest = MESSAGE_BUFFER_SHARE - 2
    with_an_eighth = -(-without_buffers * MESSAGE_BUFFER_SHARE // shares_for_the_rest)
    with_greatest = without_buffers + 2 * MESSAGE_BUFFER_BYTES
    with_least = without_buffers + 2 * LEAST_MESSAGE_BUFFER_BYTES
    return max(with_pieces, min(with_an_eighth, with_greatest), with_least)


def _bound_of_operand(cut: Cuts, vertex: Vertex, name: str) -> tuple[int, ...]:
    """Return a bound on what a rank has of an operand in dimensions that are not cut in pieces.

    Of a dimension whose index is arithmetic, that is what the rank needs, or its block.
    """
    bound = cut.graph[name].bound
    state = cut.states[vertex.name]
    needed = needed_of(vertex, name, bound)
    if needed is None:
        return bound
    if not is_inside(cut.mesh, needed, cut.layouts[name], state):
        return most_needed_bound(cut.mesh, needed, state)
    return longest_shares(cut.mesh, bound, cut.layouts[name], range(len(bound)))
