"""Symmetric results by pairs of blocks (graph/forms/pairs.py): how they are divided, what that
moves, and what no plan can avoid to move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.forms.pairs import (
    MOST_BLOCKS,
    Division,
    InPairs,
    paired_labels,
    with_pairs_of_blocks,
)
from einmpi.planner.memory import Cuts
from einmpi.planner.mesh import Mesh

MIN_BYTES = 2**22  # of operands and result: with less, messages take longer than what they save
MIN_ROWS = 8  # of a piece of blocks that ranks cut
# Numbers of blocks that are tried where each rank has a piece of all of them. Of 16 blocks, 9/16 of
# the square is summed.
UNCUT_BLOCKS = (16, 9, 8, 5)


@dataclass(frozen=True)
class Pairing:
    """How a symmetric vertex may be divided on a mesh, and the words that this moves."""

    name: str
    labels: tuple[str, str]
    summed: str  # the aggregated label that ranks cut, if blocks have several pieces
    division: Division
    block_axes: tuple[int, ...]  # axes of the mesh that cut the blocks; the others cut pieces
    piece_axes: tuple[tuple[int, ...], ...]  # for each label of pieces
    words: int
    stays: bool  # in pairs of blocks

    @property
    def note(self) -> str:
        """What a plan says about it."""
        first, second = self.labels
        blocks = self.division.blocks
        return f"symmetric in {first} and {second}: pairs of {blocks} blocks, each computed once"


def can_be_paired(graph: EinGraph, vertex: Vertex, ranks: int) -> bool:
    """Return whether a vertex is symmetric, and large enough for pairs of blocks."""
    if vertex.einsum is None or vertex.recurrence is not None or ranks == 1:
        return False
    nbytes = vertex.nbytes + sum(graph[name].nbytes for name in set(vertex.inputs))
    if nbytes < MIN_BYTES:
        return False
    labels = paired_labels(graph, vertex)
    return labels is not None and vertex.einsum.extent[labels[0]] >= MIN_ROWS * ranks


def best_pairing(graph: EinGraph, vertex: Vertex, mesh: Mesh, stays: bool) -> Pairing | None:
    """Return the pairing of a vertex that moves the fewest words; None if there is none.

    `stays` says whether the result stays in pairs of blocks.
    """
    if not can_be_paired(graph, vertex, mesh.ranks):
        return None
    pairings = _pairings(graph, vertex, mesh, stays)
    return min(pairings, key=lambda pairing: pairing.words, default=None)


def _pairings(graph: EinGraph, vertex: Vertex, mesh: Mesh, stays: bool) -> Iterator[Pairing]:
    labels = paired_labels(graph, vertex)
    assert labels is not None, f"{vertex.name} is not symmetric"
    einsum = vertex.computed_einsum
    rows = einsum.extent[labels[0]]
    summed = max(einsum.aggregated, key=lambda label: (einsum.extent[label], label))
    axes = tuple(range(len(mesh.factors)))
    candidates = [(0, blocks) for blocks in (1, *UNCUT_BLOCKS)]  # axes that cut blocks, and blocks
    for count in range(1, len(axes) + 1):
        candidates.append((count, prod(mesh.factors[:count])))
    for count, blocks in candidates:
        piece_axes = _axes_of_pieces(mesh, axes[count:])
        if piece_axes is None or blocks > MOST_BLOCKS:
            continue
        pieces = tuple(prod(mesh.factors[axis] for axis in group) for group in piece_axes)
        ranks_of_group = prod(pieces)
        is_packed = stays and einsum.extent[summed] % ranks_of_group == 0
        division = Division(rows, blocks, pieces, pieces_first=count == 0)
        if is_packed:
            division = replace(division, summed=summed, sums=ranks_of_group)
        if blocks == 1:  # its triangle is packed, or there is no gain
            if not is_packed:
                continue
            division = replace(division, pieces=(), pieces_first=False)
        can_sum = not pieces or einsum.extent[summed] >= mesh.ranks
        if can_sum and rows >= division.parts:
            words = _words(graph, vertex, labels, division, ranks_of_group, stays)
            cut = axes[:count], tuple(piece_axes)
            yield Pairing(vertex.name, labels, summed, division, *cut, words, stays)


def _axes_of_pieces(mesh: Mesh, axes: Sequence[int]) -> list[tuple[int, ...]] | None:
    """Return groups of these axes that can cut labels which number pieces, as long as possible."""
    groups = []
    left = tuple(axes)
    while left:
        for count in range(len(left), 0, -1):
            group = left[:count]
            if group in mesh.windows(prod(mesh.factors[axis] for axis in group)):
                break
        else:
            return None
        groups.append(group)
        left = left[count:]
    return groups


def _words(
    graph: EinGraph,
    vertex: Vertex,
    labels: tuple[str, str],
    division: Division,
    ranks_of_group: int,
    stays: bool,
) -> int:
    """Return what moves: rows for other blocks, partial results of pairs, and pairs to their rows.

    Each pair of blocks is summed once. A block on the diagonal has both of its halves, if they are
    not packed. Results that stay in pairs are not brought to rows.
    """
    einsum = vertex.computed_einsum
    read = set()
    for name, index in zip(vertex.inputs, einsum.operands, strict=True):
        if labels[0] in index:
            read.add(name)
    blocks = division.blocks
    distances = division.pairs
    of_block = division.computed.longest * prod(division.computed.pieces)
    elements = vertex.elements * of_block**2 // division.rows**2  # of a pair of blocks
    halves = 1 if division.halves else 0
    summed = blocks * elements * (2 * len(distances) - halves) // 2
    if division.sums > 1:
        summed -= blocks * (elements - elements * (of_block + 1) // (2 * of_block))
    words = (ranks_of_group - 1) * summed
    if division.pieces_first:
        away = blocks * elements * (2 * (blocks - len(distances)) + halves) // 2
        return words + (0 if stays else away * (ranks_of_group - 1) // ranks_of_group)
    operands = sum(graph[name].elements for name in read)
    words += (len(division.fetched) - 1) * operands
    if stays:
        return words
    in_place = {distance for distance, (first, _) in enumerate(distances) if first == 0}
    for distance, (_, second) in enumerate(distances):
        if second == 0:
            in_place.add(-distance % blocks)
    return words + blocks * elements * (2 * (blocks - len(in_place)) + halves) // 2


# ---- the plan ------------------------------------------------------------------------------------


def in_pairs(graph: EinGraph, cut: Cuts, pairing: Pairing) -> tuple[InPairs, Cuts]:
    """Return a vertex in pairs of blocks, and cuts of the graph from which a search begins.

    What is not added keeps the cuts that it has.
    """
    form = with_pairs_of_blocks(graph, pairing.name, pairing.division, pairing.stays)
    added = _cuts_of(form.added, cut.mesh, pairing, form)
    states = {**cut.states, **added.states}
    layouts = {**cut.layouts, **added.layouts}
    vertex = graph[pairing.name]
    einsum = vertex.computed_einsum
    first = pairing.labels[0]
    if pairing.stays:
        del states[vertex.name]
        layouts.pop(vertex.name, None)
    else:
        states[vertex.name] = (first,) * len(cut.mesh.factors)
        layouts[vertex.name] = _dimensions(states[vertex.name], einsum.output)
    for name, index in zip(vertex.inputs, einsum.operands, strict=True):
        if first in index:
            state: list[str | None] = [pairing.summed] * len(cut.mesh.factors)
            for axis in pairing.block_axes:
                state[axis] = first
            layouts[name] = _dimensions(state, [str(entry) for entry in index])
    return form, Cuts(form.graph, cut.mesh, states, layouts)


def to_rows(form: InPairs, mesh: Mesh, pairing: Pairing) -> Cuts:
    """Return cuts of the graph that makes a result of pairs of blocks: a search begins there."""
    assert form.rest is not None, f"{pairing.name} does not stay in pairs of blocks"
    *added, result = form.rest.computed
    found = _cuts_of(added, mesh, pairing, form)
    state = (pairing.labels[0],) * len(mesh.factors)
    layout = _dimensions(state, result.computed_einsum.output)
    states = {**found.states, result.name: state}
    return Cuts(form.rest, mesh, states, {**found.layouts, result.name: layout})


def _cuts_of(vertices: Sequence[Vertex], mesh: Mesh, pairing: Pairing, form: InPairs) -> Cuts:
    """Return what axes cut in vertices that were added, and in their results."""
    states = {}
    layouts = {}
    for vertex in vertices:
        einsum = vertex.computed_einsum
        of_output = {label: einsum.extent[label] for label in einsum.output}
        layout = _cuts(mesh, pairing, form, of_output)
        states[vertex.name] = _cuts(mesh, pairing, form, einsum.extent)
        if einsum.aggregated == (form.part,):  # each rank sums all parts of its elements
            states[vertex.name] = layout
        layouts[vertex.name] = _dimensions(layout, einsum.output)
    return Cuts(form.graph, mesh, states, layouts)


def _cuts(
    mesh: Mesh, pairing: Pairing, form: InPairs, extents: Mapping[str, int]
) -> tuple[str | None, ...]:
    """Return what axes cut in a vertex that was added, or in its result.

    Some cut blocks. The others cut the sum, or the rows of what is summed; of packed triangles
    columns, too, if there are few rows.
    """
    state: list[str | None] = [None] * len(mesh.factors)
    for axis in pairing.block_axes:
        state[axis] = form.block
    for number, axes in enumerate(pairing.piece_axes):
        of_sum = (form.part, pairing.summed)
        labels = [label for label in (*of_sum, *form.packed, form.rows[number]) if label in extents]
        for axis in axes:
            for label in labels:
                cutting = {axis, *(other for other, cut in enumerate(state) if cut == label)}
                windows = mesh.windows(extents[label])
                if label in of_sum or any(cutting <= set(window) for window in windows):
                    state[axis] = label
                    break
    return tuple(state)


def _dimensions(state: Sequence[str | None], labels: Sequence[str]) -> tuple[int | None, ...]:
    return tuple(labels.index(cut) if cut in labels else None for cut in state)
