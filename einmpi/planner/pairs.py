"""Symmetric results by pairs of blocks (graph/forms/pairs.py): how they are divided, what that
moves, and what no plan can avoid to move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


def best_pairing(graph: EinGraph, vertex: Vertex, mesh: Mesh) -> Pairing | None:
    """Return the pairing of a vertex that moves the fewest words; None if there is none."""
    if not can_be_paired(graph, vertex, mesh.ranks):
        return None
    return min(_pairings(graph, vertex, mesh), key=lambda pairing: pairing.words, default=None)


def _pairings(graph: EinGraph, vertex: Vertex, mesh: Mesh) -> Iterator[Pairing]:
    labels = paired_labels(graph, vertex)
    assert labels is not None, f"{vertex.name} is not symmetric"
    einsum = vertex.computed_einsum
    rows = einsum.extent[labels[0]]
    summed = max(einsum.aggregated, key=lambda label: (einsum.extent[label], label))
    axes = tuple(range(len(mesh.factors)))
    candidates = [(0, blocks) for blocks in UNCUT_BLOCKS]  # axes that cut blocks, and blocks
    for count in range(1, len(axes) + 1):
        candidates.append((count, prod(mesh.factors[:count])))
    for count, blocks in candidates:
        piece_axes = _axes_of_pieces(mesh, axes[count:])
        if piece_axes is None or blocks > MOST_BLOCKS:
            continue
        pieces = tuple(prod(mesh.factors[axis] for axis in group) for group in piece_axes)
        division = Division(rows, blocks, pieces, pieces_first=count == 0)
        can_sum = not pieces or einsum.extent[summed] >= mesh.ranks
        if can_sum and rows >= division.parts:
            words = _words(graph, vertex, labels, division)
            cut = axes[:count], tuple(piece_axes)
            yield Pairing(vertex.name, labels, summed, division, *cut, words)


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


def _words(graph: EinGraph, vertex: Vertex, labels: tuple[str, str], division: Division) -> int:
    """Return what moves: rows for other blocks, partial results of pairs, and pairs to their rows.

    Each pair of blocks is summed once, but a block on the diagonal has both of its halves.
    """
    einsum = vertex.computed_einsum
    read = set()
    for name, index in zip(vertex.inputs, einsum.operands, strict=True):
        if labels[0] in index:
            read.add(name)
    blocks = division.blocks
    distances = division.pairs
    pieces = prod(division.pieces)
    computed = vertex.elements * (division.parts * division.longest) ** 2 // division.rows**2
    block = -(-computed // (2 * blocks))  # half of what all ranks have at one distance
    halves = 1 if division.halves else 0
    words = (pieces - 1) * block * (2 * len(distances) - halves)
    if division.pieces_first:
        away = 2 * (blocks - len(distances)) + halves
        return words + block * away * (pieces - 1) // pieces
    operands = sum(graph[name].elements for name in read)
    words += (len(division.fetched) - 1) * operands
    in_place = {distance for distance, (first, _) in enumerate(distances) if first == 0}
    for distance, (_, second) in enumerate(distances):
        if second == 0:
            in_place.add(-distance % blocks)
    return words + block * (2 * (blocks - len(in_place)) + halves)


# ---- the plan ------------------------------------------------------------------------------------


def in_pairs(graph: EinGraph, cut: Cuts, pairing: Pairing) -> tuple[EinGraph, Cuts]:
    """Return the graph with a vertex in pairs of blocks, and cuts from which a search begins.

    What is not added keeps the cuts that it has.
    """
    form = with_pairs_of_blocks(graph, pairing.name, pairing.division)
    states = dict(cut.states)
    layouts = dict(cut.layouts)
    for vertex in form.added:
        labels = vertex.computed_einsum.labels
        states[vertex.name] = _cuts(cut.mesh, pairing, form, labels)
        layout = _cuts(cut.mesh, pairing, form, vertex.computed_einsum.output)
        layouts[vertex.name] = _dimensions(layout, vertex.computed_einsum.output)
    vertex = graph[pairing.name]
    einsum = vertex.computed_einsum
    first = pairing.labels[0]
    states[vertex.name] = (first,) * len(cut.mesh.factors)
    layouts[vertex.name] = _dimensions(states[vertex.name], einsum.output)
    for name, index in zip(vertex.inputs, einsum.operands, strict=True):
        if first in index:
            state: list[str | None] = [pairing.summed] * len(cut.mesh.factors)
            for axis in pairing.block_axes:
                state[axis] = first
            layouts[name] = _dimensions(state, [str(entry) for entry in index])
    return form.graph, Cuts(form.graph, cut.mesh, states, layouts)


def _cuts(
    mesh: Mesh, pairing: Pairing, form: InPairs, labels: Sequence[str]
) -> tuple[str | None, ...]:
    """Return what axes cut in a vertex that was added: blocks, and the summed label or pieces."""
    state: list[str | None] = [None] * len(mesh.factors)
    for axis in pairing.block_axes:
        state[axis] = form.block
    for piece, axes in zip(form.pieces, pairing.piece_axes, strict=True):
        for axis in axes:
            state[axis] = pairing.summed if pairing.summed in labels else piece
    return tuple(state)


def _dimensions(state: Sequence[str | None], labels: Sequence[str]) -> tuple[int | None, ...]:
    return tuple(labels.index(cut) if cut in labels else None for cut in state)
