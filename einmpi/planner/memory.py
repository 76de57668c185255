"""Bytes of tensors and message buffers that a rank has in memory while a plan runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

import numpy as np

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.planner import pieces
from einmpi.planner.chains.record import FusedChain
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.halo import is_inside, needed_of
from einmpi.planner.moving.halo_counts import most_needed, most_needed_bound
from einmpi.planner.sparse_updates import places_filled, scattered_label

MESSAGE_BUFFER_BYTES = 16 * 2**20  # the most that one buffer for messages takes
LEAST_MESSAGE_BUFFER_BYTES = 256
MESSAGE_BUFFER_SHARE = 8  # a message buffer takes at most this fraction of the memory: an eighth
ROUNDING_BYTES = 16  # that the share of each rank in a message buffer may be rounded up by

PRODUCT_BLOCK_BYTES = 2**25  # of a product that is added to a carried tensor block by block
LEAST_BLOCK_ROWS = 64  # with fewer, a product would take longer
SPARSE_BLOCK_BYTES = 2**23  # of the rows of a carried tensor that are changed at a time
INDEX_BYTES = 8

Labels = Mapping[str, tuple[str | None, ...]]  # vertex → the label that each axis cuts
Layouts = Mapping[str, tuple[int | None, ...]]  # tensor → the dimension that each axis cuts


def stage_of(limit: int | None) -> int:
    """Return the size of a message buffer, in bytes, given the memory limit of a rank."""
    if limit is None:
        return MESSAGE_BUFFER_BYTES
    share = max(LEAST_MESSAGE_BUFFER_BYTES, limit // MESSAGE_BUFFER_SHARE)
    return min(MESSAGE_BUFFER_BYTES, share)


def staging(nbytes: int, ranks: int, stage: int = MESSAGE_BUFFER_BYTES) -> int:
    """Return the bytes of message buffers while a block of this size moves.

    There is one buffer for sending and one for receiving.
    """
    if ranks == 1:
        return 0
    return 2 * min(nbytes, stage) + ROUNDING_BYTES * ranks


def rows_of_block(row_bytes: int) -> int:
    """Return how many rows a block has, of a product that is computed block by block."""
    return max(1, PRODUCT_BLOCK_BYTES // max(1, row_bytes))


def is_worth_blocks(nbytes: int, row_bytes: int) -> bool:
    """Return whether to compute a product of this size block by block."""
    return nbytes > 2 * PRODUCT_BLOCK_BYTES and rows_of_block(row_bytes) >= LEAST_BLOCK_ROWS


def rows_of_sparse_block(places: int, row_bytes: int) -> int:
    """Return how many rows are changed at a time, if at most `places` rows are to be changed."""
    return max(1, min(places, SPARSE_BLOCK_BYTES // max(1, row_bytes)))


def sparse_update_bytes(places: int, row_bytes: int) -> int:
    """Return the bytes that an update of at most `places` rows needs beside the tensor.

    These are a block of sums, the rows that they are added to, and where each value goes: as its
    index, as the number of its row among those that change, and both again for one block.
    """
    return 2 * rows_of_sparse_block(places, row_bytes) * row_bytes + 4 * places * INDEX_BYTES


def block_bytes(vertex: Vertex, mesh: Mesh, cuts: Sequence[int | None]) -> int:
    """Return the size of the largest block of a tensor.

    `cuts` has for each axis the dimension that it cuts, or None.
    """
    return _block_elements(mesh, vertex.bound, tuple(cuts)) * np.dtype(vertex.dtype).itemsize


@lru_cache(maxsize=4096)  # layers repeat, and several orders of a graph are compared
def _block_elements(mesh: Mesh, bound: tuple[int, ...], cuts: tuple[int | None, ...]) -> int:
    elements = 1
    for dimension, extent in enumerate(bound):
        axes = [axis for axis, cut in enumerate(cuts) if cut == dimension]
        elements *= longest_share(mesh, extent, axes)
    return elements


def longest_share(mesh: Mesh, extent: int, axes: Sequence[int]) -> int:
    """Return the most indices that a rank can own of a label cut by these axes.

    Exact for the first axes of a window, else an upper bound.
    """
    if not axes:
        return extent
    window = next(group for group in mesh.windows(extent) if axes[0] in group)
    if all(axis in window for axis in axes):
        lengths = [mesh.factors[axis] for axis in window]
        places = [window.index(axis) for axis in axes]
    else:
        # Several windows cut the label, along different digits of the same numbers. A block on its
        # way may also be cut twice along one digit, or along digits of other numbers.
        sliced = {mesh.places(extent)[axis] for axis in axes}
        finest = max(sliced, key=lambda digit: (len(digit), digit))
        lengths = list(finest)
        places = [len(digit) - 1 for digit in sliced if list(digit) == lengths[: len(digit)]]
    parts = prod(lengths[place] for place in places)
    if sorted(places) == list(range(len(places))):
        return -(-extent // parts)
    fine_blocks = prod(lengths)
    longest_block = -(-extent // fine_blocks)
    return min(extent, fine_blocks // parts * longest_block)


def operand_cuts(
    graph: EinGraph, name: str, operand: int, state: Sequence[str | None]
) -> tuple[int | None, ...]:
    """Return the dimension of an operand that each axis cuts in this state of its user."""
    einsum = graph[name].computed_einsum
    cuts: list[int | None] = []
    for label in state:
        cuts.append(None if label is None else einsum.dimension_cut_by(operand, label))
    return tuple(cuts)


def output_cuts(graph: EinGraph, name: str, state: Sequence[str | None]) -> tuple[int | None, ...]:
    """Return the dimension of a vertex's result that each axis cuts in this state."""
    dimensions = graph[name].computed_einsum.output_dimensions
    return tuple([None if label is None else dimensions.get(label) for label in state])


def peak_bytes(
    graph: EinGraph,
    mesh: Mesh,
    states: Labels,
    layouts: Layouts,
    resident: Collection[str],
    stage: int = MESSAGE_BUFFER_BYTES,
    early: Collection[str] = (),
    in_place: Collection[str] = (),
    blocked: Collection[str] = (),
    chains: Sequence[FusedChain] = (),
) -> int:
    """Return a bound on the bytes that a rank has in memory at once; see `bytes_at_vertices`."""
    needed = bytes_at_vertices(
        graph, mesh, states, layouts, resident, stage, early, in_place, blocked, chains
    )
    return max(needed)


def bytes_at_vertices(
    graph: EinGraph,
    mesh: Mesh,
    states: Labels,
    layouts: Layouts,
    resident: Collection[str],
    stage: int = MESSAGE_BUFFER_BYTES,
    early: Collection[str] = (),
    in_place: Collection[str] = (),
    blocked: Collection[str] = (),
    chains: Sequence[FusedChain] = (),
    overlapped: Collection[str] = (),
) -> list[int]:
    """Return a bound on the bytes that a rank has in memory before the first vertex and at each.

    Goes through the vertices in order and adds up what is stored, what the vertex gathers of its
    operands, and what it makes. Message buffers are there while a tensor moves. The inputs in
    `early` are read before the first vertex. The outputs in `in_place` take the memory of resident
    inputs. The vertices in `blocked` are computed together with the next one, block by block.
    Those of a chain, which follow one another, have the memory of the whole chain. Those in
    `overlapped` are computed while what they need, and what they make, moves between nodes; what
    they need may begin to move while the vertex before is computed.
    """
    resident = frozenset(resident)
    in_place = frozenset(in_place)
    blocked = frozenset(blocked)
    stored = input_bytes(graph, mesh, states, layouts, resident)  # tensor → bytes of its block
    not_resident = [name for name in early if name not in resident]
    waiting = input_bytes(graph, mesh, states, layouts, not_resident)
    present = sum(stored.values()) + sum(waiting.values())
    needed = [sum(stored.values())]
    gathered_before = 0  # for a blocked vertex, and needed until the next one is complete
    chain_of = {name: chain for chain in chains for name in chain.vertices}
    for vertex in graph.computed:
        chain = chain_of.get(vertex.name)
        if chain is not None:
            if vertex.name == chain.vertices[0]:
                for name in chain.vertices:
                    for operand in graph[name].inputs:
                        present -= waiting.pop(operand, 0)
                at_chain, added = _bytes_of_chain(
                    graph, mesh, chain, states, layouts, stored, stage
                )
                needed += [present + at_chain] * len(chain.vertices)
                present += added
                for name in chain.vertices:
                    for operand in graph.last_reads[name]:
                        if operand not in resident:
                            present -= stored.pop(operand, 0)
            continue
        state = states[vertex.name]
        for name in vertex.inputs:
            present -= waiting.pop(name, 0)
        new_inputs, gathered, buffers = _operand_bytes(
            graph, mesh, vertex, states, layouts, stored, stage
        )
        present += new_inputs

        cuts = output_cuts(graph, vertex.name, state)
        made = block_bytes(vertex, mesh, cuts)
        if vertex.name in blocked:
            made = _bytes_of_blocks(vertex, mesh, cuts)
        gathered += gathered_before
        final = 0  # bytes of the result in its layout, if it moves there
        final_buffers = 0
        moves = False
        if vertex.name in layouts:
            moves = layouts[vertex.name] != cuts or is_partial(vertex, states)
        if moves:
            final = block_bytes(vertex, mesh, layouts[vertex.name])
            final_buffers = staging(max(made, final), mesh.ranks, stage)
        if vertex.name in in_place:
            final = 0
            if not moves:
                made = 0
        while_computing = present + gathered + max(made, buffers)
        while_moving = present + made + final + final_buffers
        needed.append(max(while_computing, while_moving))
        if vertex.name in overlapped:
            needed[-2] += new_inputs + gathered + buffers
            needed[-1] = present + gathered + made + buffers + final + final_buffers

        stored[vertex.name] = final if moves else made
        present += stored[vertex.name]
        gathered_before = 0
        if vertex.name in blocked:
            gathered_before = gathered
            continue
        done = list(graph.last_reads[vertex.name])
        for name in vertex.inputs:
            if name in blocked:
                done += graph.last_reads[name]
        for name in done:
            if name not in resident:
                present -= stored.pop(name, 0)
    return needed


def _bytes_of_chain(
    graph: EinGraph,
    mesh: Mesh,
    chain: FusedChain,
    states: Labels,
    layouts: Layouts,
    stored: dict[str, int],
    stage: int,
) -> tuple[int, int]:
    """Return the bytes that a chain needs beside what is there before, and what it leaves.

    All its operands are brought to it before it begins, and its results move when it is complete.
    `stored` has the bytes of every tensor that is in memory, as for `_operand_bytes`.
    """
    added = 0
    gathered = 0
    buffers = 0
    made = 0
    for name in chain.vertices:
        vertex = graph[name]
        operands = _operand_bytes(graph, mesh, vertex, states, layouts, stored, stage)
        added += operands[0]
        gathered += operands[1]
        buffers = max(buffers, operands[2])
        stored[name] = 0
        if name not in chain.inner:
            stored[name] = block_bytes(vertex, mesh, output_cuts(graph, name, states[name]))
            made += stored[name]
    peak = added + gathered + max(made + chain.nbytes, buffers)
    added += made
    for name in chain.outer:
        vertex = graph[name]
        cuts = output_cuts(graph, name, states[name])
        final_cuts = layouts.get(name, cuts)
        if final_cuts == cuts and (name not in layouts or not is_partial(vertex, states)):
            continue
        final = block_bytes(vertex, mesh, final_cuts)
        final_buffers = staging(max(stored[name], final), mesh.ranks, stage)
        peak = max(peak, added + final + final_buffers)
        added += final - stored[name]
        stored[name] = final
    return peak, added


def _bytes_of_blocks(vertex: Vertex, mesh: Mesh, cuts: Sequence[int | None]) -> int:
    """Return the memory for a vertex that is computed block by block, for an update."""
    einsum = vertex.computed_einsum
    label = scattered_label(einsum)
    if label is None:
        return PRODUCT_BLOCK_BYTES
    dimension = einsum.output.index(label)
    return sparse_update_bytes(places_filled(einsum), row_bytes(vertex, mesh, cuts, dimension))


def row_bytes(vertex: Vertex, mesh: Mesh, cuts: Sequence[int | None], dimension: int) -> int:
    """Return the bytes that a rank has of a tensor for one index of a dimension."""
    bound = list(vertex.bound)
    bound[dimension] = 1
    other_cuts = [None if cut == dimension else cut for cut in cuts]
    return block_bytes(replace(vertex, bound=tuple(bound)), mesh, other_cuts)


def _operand_bytes(
    graph: EinGraph,
    mesh: Mesh,
    vertex: Vertex,
    states: Labels,
    layouts: Layouts,
    stored: dict[str, int],
    stage: int,
) -> tuple[int, int, int]:
    """Return the bytes of operands that are new, of those brought into another layout, of buffers.

    `stored` has the bytes of every tensor that is in memory. An input that has a layout of its own
    and is read for the first time is new, and added to it.
    """
    new = 0
    gathered = 0
    buffers = 0
    for operand, name in enumerate(vertex.inputs):
        tensor = graph[name]
        wanted = operand_cuts(graph, vertex.name, operand, states[vertex.name])
        if tensor.is_input and name not in stored and name in layouts:
            stored[name] = block_bytes(tensor, mesh, layouts[name])
            new += stored[name]
            if None in layouts[name]:
                buffers = max(buffers, staging(stored[name], mesh.ranks, stage))
        needed = needed_of(vertex, name, tensor.bound)
        if needed is not None:
            if vertex.inputs.index(name) != operand:
                continue  # the first operand has brought what all of them need
            if is_inside(mesh, needed, layouts[name], states[vertex.name]):
                continue  # it is read where it is stored
            most = most_needed(mesh, needed, states[vertex.name])
            size = most * np.dtype(tensor.dtype).itemsize
            gathered += size
            buffers = max(buffers, staging(max(stored.get(name, 0), size), mesh.ranks, stage))
            continue
        partial = False
        if name in layouts:
            cuts_now = layouts[name]
        elif tensor.is_input:
            cuts_now = wanted
        else:
            cuts_now = output_cuts(graph, name, states[name])
            partial = is_partial(tensor, states)
        if name not in stored or cuts_now != wanted or partial:
            size = block_bytes(tensor, mesh, wanted)
            gathered += size
            # An input of which no two ranks need the same is read by each of them: no messages.
            if name in stored or None in wanted:
                largest = max(stored.get(name, 0), size)
                buffers = max(buffers, staging(largest, mesh.ranks, stage))
    return new, gathered, buffers


def peak_bound(
    graph: EinGraph, ranks: int, resident: Collection[str], without_memory: Collection[str] = ()
) -> int:
    """Return a lower bound on the peak memory of any plan.

    Every tensor that is needed lies somewhere, at best evenly on all ranks, but for those in
    `without_memory`: outputs that may take the memory of inputs, and tensors inside of chains.
    """
    share = {vertex.name: -(-vertex.nbytes // ranks) for vertex in graph.vertices}
    share.update(dict.fromkeys(without_memory, 0))
    resident = frozenset(resident)
    present = {name for name in resident if graph.consumers.get(name)}
    nbytes = sum(share[name] for name in present)
    peak = nbytes
    for vertex in graph.computed:
        new = {*vertex.inputs, vertex.name} - present
        present |= new
        nbytes += sum(share[name] for name in new)
        peak = max(peak, nbytes)
        done = present.intersection(graph.last_reads[vertex.name]).difference(resident)
        present -= done
        nbytes -= sum(share[name] for name in done)
    return peak


def input_bytes(
    graph: EinGraph, mesh: Mesh, states: Labels, layouts: Layouts, inputs: Collection[str]
) -> dict[str, int]:
    """Return the bytes of a rank's block of each of these inputs that is used."""
    found = {}
    for name in inputs:
        for user in graph.consumers.get(name, ()):
            operand = graph[user].inputs.index(name)
            cuts = layouts.get(name) or operand_cuts(graph, user, operand, states[user])
            found[name] = block_bytes(graph[name], mesh, cuts)
    return found


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


def is_partial(vertex: Vertex, states: Labels) -> bool:
    """Return whether a vertex leaves partial results: an aggregated label is cut."""
    if vertex.einsum is None:
        return False
    return any(label in vertex.einsum.aggregated for label in states[vertex.name])
