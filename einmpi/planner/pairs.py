"""Symmetric results by pairs of blocks (graph/forms/pairs.py): how they are divided, what that
moves, and what no plan can avoid to move."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.forms.pairs.blocks import MOST_BLOCKS, Division
from einmpi.graph.forms.pairs.families import Paired, family_of, paired
from einmpi.graph.forms.pairs.graph import InPairs, with_pairs_of_blocks
from einmpi.planner.memory import Cuts
from einmpi.planner.mesh import Mesh

MIN_BYTES = 2**22  # of operands and result: with less, messages take longer than what they save
MIN_ROWS = 8  # of a piece of blocks that ranks cut
# Numbers of blocks that are tried where each rank has a piece of all of them. Of 16 blocks, 9/16 of
# the square is summed.
UNCUT_BLOCKS = (16, 9, 8, 5)


# How many labels of rows the results may have that are computed from pairs: those of several
# families of a symmetric result are tried.
KEPT = ((0, 1, 2), (0, 2), ())


@dataclass(frozen=True)
class Pairing:
    """How a symmetric vertex may be divided on a mesh, and the words that this moves."""

    family: Mapping[str, Paired]  # the vertex, and those that are computed from its pairs
    stay: tuple[str, ...]  # in pairs of blocks
    summed: str  # the aggregated label that ranks cut, if blocks have several pieces
    division: Division
    block_axes: tuple[int, ...]  # axes of the mesh that cut the blocks; the others cut pieces
    piece_axes: tuple[tuple[int, ...], ...]  # for each label of pieces
    words: int

    @property
    def first(self) -> Paired:
        """The symmetric vertex that all others follow from."""
        return next(iter(self.family.values()))

    def note_on(self, name: str) -> str:
        """Return what a plan says about a vertex."""
        if name != self.first.vertex.name:
            return f"computed from the pairs of blocks of {self.first.vertex.name}"
        first, second = self.first.labels
        blocks = self.division.blocks
        return f"symmetric in {first} and {second}: pairs of {blocks} blocks, each computed once"


def can_be_paired(graph: EinGraph, vertex: Vertex, ranks: int) -> bool:
    """Return whether a vertex is symmetric, and large enough for pairs of blocks."""
    if vertex.einsum is None or vertex.recurrence is not None or ranks == 1:
        return False
    nbytes = vertex.nbytes + sum(graph[name].nbytes for name in set(vertex.inputs))
    if nbytes < MIN_BYTES:
        return False
    found = paired(graph, vertex)
    return found is not None and vertex.einsum.extent[found.labels[0]] >= MIN_ROWS * ranks


def pairings(
    graph: EinGraph, vertex: Vertex, mesh: Mesh, may_stay: Collection[str]
) -> list[Pairing]:
    """Return pairings of a vertex, those first that move the fewest words.

    `may_stay` names outputs that need not be in a layout, as far as the program does not read them.
    """
    if not can_be_paired(graph, vertex, mesh.ranks):
        return []
    found = []
    families = [family_of(graph, vertex.name, kept) for kept in KEPT]
    for number, family in enumerate(families):
        if family.keys() in [other.keys() for other in families[:number]]:
            continue
        staying = []
        for name, member in family.items():
            is_read = not set(graph.consumers[name]) <= family.keys()
            if member.is_square and name in may_stay and not is_read:
                staying.append(name)
        for stay in dict.fromkeys([tuple(staying), ()]):
            best = min(
                _pairings(graph, family, mesh, stay),
                key=lambda pairing: pairing.words,
                default=None,
            )
            if best is not None:
                found.append(best)
    return sorted(found, key=lambda pairing: pairing.words)


def _pairings(
    graph: EinGraph, family: Mapping[str, Paired], mesh: Mesh, stay: tuple[str, ...]
) -> Iterator[Pairing]:
    first = next(iter(family.values()))
    einsum = first.vertex.computed_einsum
    rows = einsum.extent[first.labels[0]]
    summed = max(einsum.aggregated, key=lambda label: (einsum.extent[label], label))
    is_brought = any(_is_brought(graph, family, name, stay) for name in family)
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
        is_packed = not is_brought and einsum.extent[summed] % ranks_of_group == 0
        division = Division(rows, blocks, pieces, pieces_first=count == 0)
        if is_packed:
            division = replace(division, summed=summed, sums=ranks_of_group)
        if blocks == 1:  # its triangle is packed, or there is no gain
            if not is_packed:
                continue
            division = replace(division, pieces=(), pieces_first=False)
        can_sum = not pieces or einsum.extent[summed] >= mesh.ranks
        if can_sum and rows >= division.parts:
            words = _words(graph, family, division, ranks_of_group, stay)
            cut = axes[:count], tuple(piece_axes)
            yield Pairing(family, stay, summed, division, *cut, words)


def _is_brought(
    graph: EinGraph, family: Mapping[str, Paired], name: str, stay: Collection[str]
) -> bool:
    """Return whether a symmetric result is brought to its rows, as others read it there."""
    is_read = not set(graph.consumers[name]) <= family.keys()
    return family[name].is_square and (is_read or (graph.is_output(name) and name not in stay))


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
    family: Mapping[str, Paired],
    division: Division,
    ranks_of_group: int,
    stay: Collection[str],
) -> int:
    """Return what moves: rows for other blocks, partial results of pairs, and pairs to their rows.

    Each pair of blocks is summed once. A block on the diagonal has both of its halves, if they are
    not packed. Results that stay in pairs are not brought to rows.
    """
    first = next(iter(family.values())).vertex
    blocks = division.blocks
    distances = division.pairs
    of_block = division.computed.rows_of_block
    halves = 1 if division.halves else 0

    def of_pair(name: str) -> int:
        """Return the elements of a pair of blocks."""
        return graph[name].elements * of_block**2 // division.rows**2

    elements = of_pair(first.name)
    summed = blocks * elements * (2 * len(distances) - halves) // 2
    if division.sums > 1:
        summed -= blocks * (elements - elements * (of_block + 1) // (2 * of_block))
    words = (ranks_of_group - 1) * summed
    copies = len(division.fetched) * ranks_of_group - 1
    for tensor, reader in _rows_read(graph, family).items():
        # Ranks share the sums of the first vertex, but each rank of a group reads all other rows.
        is_shared = reader == first.name
        words += (len(division.fetched) - 1 if is_shared else copies) * graph[tensor].elements
    for name, member in family.items():
        if len(member.labels) == 2 and len(member.kept) == 1:
            # Parts of its rows are summed; they are computed from whole blocks of the diagonal.
            words += copies * graph[name].elements + (blocks * elements if division.sums > 1 else 0)
    away = _away(division, halves, ranks_of_group)
    for name in family:
        if _is_brought(graph, family, name, stay):
            words += of_pair(name) * away // (2 * ranks_of_group)
    return words


def _rows_read(graph: EinGraph, family: Mapping[str, Paired]) -> dict[str, str]:
    """Return the tensors of which ranks read rows, and the first vertex that reads each."""
    found: dict[str, str] = {}
    for name, member in family.items():
        einsum = graph[name].computed_einsum
        for tensor, index in zip(graph[name].inputs, einsum.operands, strict=True):
            if tensor not in family and not set(member.labels).isdisjoint(index):
                found.setdefault(tensor, name)
    return found


def _away(division: Division, halves: int, ranks_of_group: int) -> int:
    """Return how many pairs of blocks are brought to rows, times twice the ranks of a group."""
    blocks = division.blocks
    distances = division.pairs
    if division.pieces_first:
        return blocks * (2 * (blocks - len(distances)) + halves) * (ranks_of_group - 1)
    in_place = {distance for distance, (first, _) in enumerate(distances) if first == 0}
    for distance, (_, second) in enumerate(distances):
        if second == 0:
            in_place.add(-distance % blocks)
    return blocks * (2 * (blocks - len(in_place)) + halves) * ranks_of_group


# ---- the plan ------------------------------------------------------------------------------------


def in_pairs(graph: EinGraph, cut: Cuts, pairing: Pairing) -> tuple[InPairs, Cuts]:
    """Return a graph with vertices in pairs of blocks, and cuts of it from which a search begins.

    What is not added keeps the cuts that it has.
    """
    form = with_pairs_of_blocks(graph, pairing.family, pairing.division, pairing.stay)
    added = _cuts_of(form.added, cut.mesh, pairing, form)
    states = {**cut.states, **added.states}
    layouts = {**cut.layouts, **added.layouts}
    for name, member in pairing.family.items():
        if name not in form.graph.by_name:
            states.pop(name, None)
            layouts.pop(name, None)
        elif member.labels:
            label = member.kept[0] if member.kept else None
            states[name] = (label,) * len(cut.mesh.factors)
            layouts[name] = _dimensions(states[name], graph[name].computed_einsum.output)
    first = pairing.first
    einsum = first.vertex.computed_einsum
    row = first.labels[0]
    for name, index in zip(first.vertex.inputs, einsum.operands, strict=True):
        if row in index:
            state: list[str | None] = [pairing.summed] * len(cut.mesh.factors)
            for axis in pairing.block_axes:
                state[axis] = row
            layouts[name] = _dimensions(state, [str(entry) for entry in index])
    return form, Cuts(form.graph, cut.mesh, states, layouts)


def to_rows(form: InPairs, mesh: Mesh, pairing: Pairing, name: str) -> Cuts:
    """Return cuts of the graph that makes a result of pairs of blocks: a search begins there."""
    *added, result = form.rests[name].computed
    found = _cuts_of(added, mesh, pairing, form)
    state = (pairing.family[name].labels[0],) * len(mesh.factors)
    layout = _dimensions(state, result.computed_einsum.output)
    states = {**found.states, name: state}
    return Cuts(form.rests[name], mesh, states, {**found.layouts, name: layout})


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
