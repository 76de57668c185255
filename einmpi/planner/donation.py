"""Which carried tensors are updated in place: the next value is written over the old one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise

from einmpi.graph.eingraph import Vertex
from einmpi.graph.scalar import IndexEntries
from einmpi.planner import memory
from einmpi.planner.memory import (
    Cuts,
    find_sparse_update,
    is_worth_blocks,
    places_filled,
    row_bytes,
    scattered_label,
)
from einmpi.planner.moving.halo import is_inside, needed_of


def updatable_in_place(
    cut: Cuts, carry: Mapping[str, str], nan_checked: Collection[str]
) -> dict[str, str]:
    """Return, for inputs that can be updated in place, the output that takes their memory.

    `carry` has the output that each input becomes. `nan_checked` are tensors that must be computed
    before an input is lost: if one of them is nan, the step is run again from its inputs.
    """
    return {
        name: output
        for name, output in carry.items()
        if not why_not_in_place(cut, name, output, nan_checked)
    }


def why_not_in_place(cut: Cuts, name: str, output: str, nan_checked: Collection[str]) -> str:
    """Return why an output cannot take the memory of an input; nothing if it can."""
    graph = cut.graph
    if not graph[name].bound:
        return "a number is not worth it"
    if not graph.consumers[name]:
        return "no step reads it"
    position = graph.position
    for reader in graph.consumers[name]:
        if position[reader] > position[output]:
            return f"{reader} reads {name} after {output} is computed"
    for checked in nan_checked:
        if position.get(checked, -1) >= position[output]:
            return f"{checked} is recorded, and computed after {output}"
    if cut.moves(output):
        return ""  # it is computed elsewhere, and then moved to the memory of the input
    vertex = graph[output]
    for operand in _operands_read(cut, vertex, name):
        if not reads_where_it_writes(vertex, operand):
            return f"{output} reads other elements of {name} than it writes"
    return ""


def reads_where_it_writes(vertex: Vertex, operand: int) -> bool:
    """Return whether each element of a result needs just the same element of an operand."""
    einsum = vertex.computed_einsum
    if not einsum.is_elementwise or einsum.scan is not None or einsum.segments is not None:
        return False
    labels = einsum.operands[operand]
    return labels == einsum.output and len(set(labels)) == len(labels)


def _operands_read(cut: Cuts, user: Vertex, name: str) -> list[int]:
    """Return the operands of a vertex that are an input where it is stored, not a copy of it."""
    found = []
    needed = needed_of(user, name, cut.graph[name].bound)
    for operand, operand_name in enumerate(user.inputs):
        if operand_name != name:
            continue
        layout = cut.layouts.get(name)
        if layout is None:
            is_there = True
        elif needed is not None:
            is_there = is_inside(cut.mesh, needed, layout, cut.states[user.name])
        else:
            is_there = layout == cut.wanted(user.name, operand)
        if is_there:
            found.append(operand)
    return found


def blocked_products(
    cut: Cuts, resident: Collection[str], updatable: Mapping[str, str]
) -> tuple[str, ...]:
    """Return large aggregates that are needed only for an update that follows them at once.

    Such an aggregate, the sum of W - rate * sum(…) say, is computed block by block, each of which
    is used at once and then forgotten; a scattered one, only for the rows that get values.
    `updatable` has the inputs that can be updated in place, and the output that takes their memory.
    """
    found = []
    graph = cut.graph
    overwritten = {output: name for name, output in updatable.items()}
    for vertex, following in pairwise(graph.computed):
        if following.name not in overwritten or graph.consumers[vertex.name] != (following.name,):
            continue
        if graph.is_output(vertex.name) or vertex.name in cut.layouts or not vertex.bound:
            continue
        if cut.is_partial(vertex.name):
            continue
        name = overwritten[following.name]
        is_read_first = name in following.inputs and _reads_own_rows(vertex, name)
        if not is_read_first and _operands_read(cut, vertex, name):
            continue  # later blocks would read what earlier ones have written over it
        is_sparse = is_sparse_update(vertex, following)
        if not is_sparse and not _is_large_product(cut, vertex, following):
            continue
        if _is_updated_where_it_is(cut, following, vertex.name, resident):
            found.append(vertex.name)
    return tuple(found)


def _reads_own_rows(vertex: Vertex, name: str) -> bool:
    """Return whether each row of an aggregate needs just the same row of an input.

    A scattered sum has a row for each index of the scattered label, all others for each index of
    the first one.
    """
    einsum = vertex.computed_einsum
    segments = einsum.segments
    label = scattered_label(einsum)
    if segments is not None and label is not None:
        (index,) = segments.indices
        dimension = einsum.output.index(label)
        found = [entries[dimension : dimension + 1] for entries in segments.operands]
        row: IndexEntries = (index,)
    else:
        found = [entries[:1] for entries in einsum.operands]
        row = einsum.output[:1]
    return all(
        entries == row
        for operand, entries in zip(vertex.inputs, found, strict=True)
        if operand == name
    )


def is_sparse_update(vertex: Vertex, update: Vertex) -> bool:
    """Return whether an update changes those rows only for which a vertex adds up values.

    These must be less than half of all rows, or the sums large.
    """
    einsum = vertex.computed_einsum
    label = scattered_label(einsum)
    if label is None or update.inputs.count(vertex.name) != 1:
        return False
    change = update.inputs.index(vertex.name)
    if find_sparse_update(update.computed_einsum, change) is None:
        return False
    is_large = vertex.nbytes > 2 * memory.PRODUCT_BLOCK_BYTES
    return is_large or 2 * places_filled(einsum) <= einsum.extent[label]


def _is_large_product(cut: Cuts, vertex: Vertex, update: Vertex) -> bool:
    """Return whether a vertex is worth to be computed in blocks of rows, and can be."""
    if not _goes_by_rows(vertex) or not _goes_by_rows(update):
        return False
    cuts = cut.made(vertex.name)
    nbytes = cut.block_bytes(vertex.name, cuts)
    return is_worth_blocks(nbytes, row_bytes(vertex, cut.mesh, cuts, 0))


def _goes_by_rows(vertex: Vertex) -> bool:
    """Return whether a vertex can be computed for some indices of its first dimension only."""
    einsum = vertex.computed_einsum
    if einsum.scan is not None or einsum.segments is not None:
        return False
    if einsum.is_pass_of_scan:
        return False
    if einsum.reads_diagonals or not einsum.is_indexed_by_labels:
        return False
    return einsum.output[0] not in einsum.labels_as_numbers


def _is_updated_where_it_is(
    cut: Cuts, update: Vertex, product: str, resident: Collection[str]
) -> bool:
    """Return whether an update of single elements moves nothing, neither before nor after."""
    if cut.moves(update.name):
        return False
    for operand, name in enumerate(update.inputs):
        is_input = cut.graph[name].is_input
        if name == product and not reads_where_it_writes(update, operand):
            return False
        stored = cut.layouts.get(name)
        if is_input and name not in resident:
            return False
        if stored is None and is_input:
            continue  # nothing else reads it, so that it is where this update needs it
        if stored is None:
            if cut.is_partial(name):
                return False
            stored = cut.made(name)
        if stored != cut.wanted(update.name, operand):
            return False
    return update.computed_einsum.is_elementwise
