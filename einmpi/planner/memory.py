"""The most bytes of tensors a rank holds while a plan runs (docs/planner.md)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.planner import pieces
from einmpi.planner.mesh import Mesh

MESSAGE_BUFFER_BYTES = 16 * 2**20  # the most that one buffer for messages takes
_LEAST_STAGE, _STAGES = 256, 8


def stage_of(limit: int | None) -> int:
    """Bytes of a buffer for messages, where a rank has so much memory."""
    if limit is None:
        return MESSAGE_BUFFER_BYTES
    return min(MESSAGE_BUFFER_BYTES, max(_LEAST_STAGE, limit // _STAGES))


def staging(nbytes: int, ranks: int, stage: int = MESSAGE_BUFFER_BYTES) -> int:
    """Bytes of buffers while a block of this size moves: one for sending, one for receiving, and what rounding adds."""
    return 2 * min(nbytes, stage) + 16 * ranks if ranks > 1 else 0


def block_bytes(vertex: Vertex, mesh: Mesh, cuts: Sequence[int | None]) -> int:
    """The largest block of a tensor when each axis cuts the dimension given (None: none)."""
    longest = [
        longest_share(mesh, extent, [axis for axis, cut in enumerate(cuts) if cut == dimension])
        for dimension, extent in enumerate(vertex.bound)
    ]
    return prod(longest) * np.dtype(vertex.dtype).itemsize


def longest_share(mesh: Mesh, extent: int, axes: Sequence[int]) -> int:
    """The most indices a rank can own of a label cut by these axes; exact for the first axes of a window."""
    if not axes:
        return extent
    window = next(group for group in mesh.windows(extent) if axes[0] in group)
    axes = [axis for axis in axes if axis in window]  # a block on its way may be cut by two windows
    cut = prod(mesh.factors[axis] for axis in axes)
    if tuple(axes) == window[: len(axes)]:
        return -(-extent // cut)
    blocks = prod(mesh.factors[axis] for axis in window)
    return min(extent, blocks // cut * -(-extent // blocks))


def operand_cuts(
    graph: EinGraph, name: str, operand: int, state: Sequence[str | None]
) -> tuple[int | None, ...]:
    """The dimension of an operand that each axis cuts in this state of its user."""
    einsum = graph[name].einsum
    assert einsum is not None
    index = einsum.operands[operand]
    return tuple(
        index.index(label) if label is not None and label in index else None for label in state
    )


def output_cuts(graph: EinGraph, name: str, state: Sequence[str | None]) -> tuple[int | None, ...]:
    einsum = graph[name].einsum
    assert einsum is not None
    return tuple(
        einsum.output.index(x) if x is not None and x in einsum.output else None for x in state
    )


def peak_bytes(
    graph: EinGraph,
    mesh: Mesh,
    states: Mapping[str, tuple[str | None, ...]],
    layouts: Mapping[str, tuple[int | None, ...]],
    resident: Collection[str],
    stage: int = MESSAGE_BUFFER_BYTES,
    early: Collection[str] = (),
) -> int:
    """Walk through the vertices: what is stored, plus what the vertex gathers, plus what it makes.

    While a tensor moves there are buffers for messages beside it, one for sending and one for receiving. Inputs that
    are `early` are there from the start.
    """
    held = _input_bytes(graph, mesh, states, layouts, resident)
    waiting = _input_bytes(
        graph, mesh, states, layouts, [name for name in early if name not in resident]
    )
    peak = sum(held.values())
    for vertex in graph.computed:
        state = states[vertex.name]
        waiting = {name: nbytes for name, nbytes in waiting.items() if name not in vertex.inputs}
        gathered = staged = 0
        for operand, name in enumerate(vertex.inputs):
            wanted = operand_cuts(graph, vertex.name, operand, state)
            if graph[name].is_input and name not in held and name in layouts:
                held[name] = block_bytes(graph[name], mesh, layouts[name])
                if None in layouts[name]:
                    staged = max(staged, staging(held[name], mesh.ranks, stage))
            stored = layouts.get(name) or (
                wanted if graph[name].is_input else output_cuts(graph, name, states[name])
            )
            partial = name not in layouts and _is_partial(graph[name], states)
            if name not in held or stored != wanted or partial:
                size = block_bytes(graph[name], mesh, wanted)
                gathered += size
                if name in held or None in wanted:  # else an input that no two ranks want
                    staged = max(staged, staging(max(held.get(name, 0), size), mesh.ranks, stage))
        cuts = output_cuts(graph, vertex.name, state)
        made = block_bytes(vertex, mesh, cuts)
        moves = vertex.name in layouts and (
            layouts[vertex.name] != cuts or _is_partial(vertex, states)
        )
        final = block_bytes(vertex, mesh, layouts[vertex.name]) if moves else 0
        now = sum(held.values()) + sum(waiting.values())
        staged_final = staging(max(made, final), mesh.ranks, stage) if moves else 0
        peak = max(peak, now + gathered + max(made, staged), now + made + final + staged_final)
        for name in graph.last_reads[vertex.name]:
            if name not in resident:
                held.pop(name, None)
        held[vertex.name] = final if moves else made
    return peak


def peak_bound(graph: EinGraph, ranks: int, resident: Collection[str]) -> int:
    """What no plan's peak is below: every tensor that is needed lies somewhere, at best evenly on all ranks."""
    share = {v.name: -(-v.nbytes // ranks) for v in graph.vertices}
    held = {name for name in resident if graph.consumers.get(name)}
    now = peak = sum(share[name] for name in held)
    for vertex in graph.computed:
        new = {*vertex.inputs, vertex.name} - held
        held |= new
        now += sum(share[name] for name in new)
        peak = max(peak, now)
        done = held.intersection(graph.last_reads[vertex.name]).difference(resident)
        held -= done
        now -= sum(share[name] for name in done)
    return peak


def _input_bytes(
    graph: EinGraph,
    mesh: Mesh,
    states: Mapping[str, tuple[str | None, ...]],
    layouts: Mapping[str, tuple[int | None, ...]],
    inputs: Collection[str],
) -> dict[str, int]:
    """Of those of these inputs that are used: the bytes of a rank's block."""
    held = {}
    for name in inputs:
        for user in graph.consumers.get(name, ()):
            operand = graph[user].inputs.index(name)
            cuts = layouts.get(name) or operand_cuts(graph, user, operand, states[user])
            held[name] = block_bytes(graph[name], mesh, cuts)
    return held


def least_bytes(
    graph: EinGraph,
    mesh: Mesh,
    states: Mapping[str, tuple[str | None, ...]],
    layouts: Mapping[str, tuple[int | None, ...]],
    resident: Collection[str],
) -> int:
    """What a rank needs at the least, when all that can be is outside of its memory and vertices go piece by piece."""
    held = sum(_input_bytes(graph, mesh, states, layouts, resident).values())
    least = held
    for vertex in graph.computed:
        assert vertex.einsum is not None
        axes = {
            x: [a for a, cut in enumerate(states[vertex.name]) if cut == x]
            for x in vertex.einsum.labels
        }
        extents = tuple(
            (x, longest_share(mesh, extent, axes[x])) for x, extent in vertex.einsum.extents
        )
        einsum = replace(vertex.einsum, extents=extents)
        tensors = [*(graph[name] for name in vertex.inputs), vertex]
        itemsizes = tuple(np.dtype(tensor.dtype).itemsize for tensor in tensors)
        least = max(
            least,
            held + pieces.least_bytes(einsum, tuple(tensor.bound for tensor in tensors), itemsizes),
        )
    if mesh.ranks == 1:
        return least
    # Two buffers for messages beside what stays; they are a share of the limit that is being looked for.
    fixed = held + 16 * mesh.ranks
    return max(least, fixed + 2 * _LEAST_STAGE, -(-fixed * _STAGES // (_STAGES - 2)))


def _is_partial(vertex: Vertex, states: Mapping[str, tuple[str | None, ...]]) -> bool:
    """Whether ranks hold parts of an aggregate that have yet to be put together."""
    return vertex.einsum is not None and any(
        label in vertex.einsum.aggregated for label in states[vertex.name]
    )
