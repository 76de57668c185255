"""Which carried tensors are updated in place: the next value is written over the old one."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.planner.memory import Labels, Layouts, is_partial, operand_cuts, output_cuts
from einmpi.planner.mesh import Mesh
from einmpi.planner.moving.halo import is_inside, needed_of


def updatable_in_place(
    graph: EinGraph,
    mesh: Mesh,
    states: Labels,
    layouts: Layouts,
    carry: Mapping[str, str],
    nan_checked: Collection[str] = (),
) -> dict[str, str]:
    """Return, for inputs that can be updated in place, the output that takes their memory.

    `carry` has the output that each input becomes. `nan_checked` are tensors that must be computed
    before an input is lost: if one of them is nan, the step is run again from its inputs.
    """
    found = {}
    for name, output in carry.items():
        if not why_not_in_place(graph, mesh, states, layouts, name, output, nan_checked):
            found[name] = output
    return found


def why_not_in_place(
    graph: EinGraph,
    mesh: Mesh,
    states: Labels,
    layouts: Layouts,
    name: str,
    output: str,
    nan_checked: Collection[str] = (),
) -> str:
    """Return why an output cannot take the memory of an input; nothing if it can."""
    if not graph[name].bound:
        return "a number is not worth it"
    if not graph.consumers[name]:
        return "no step reads it"
    position = {vertex.name: number for number, vertex in enumerate(graph.vertices)}
    for reader in graph.consumers[name]:
        if position[reader] > position[output]:
            return f"{reader} reads {name} after {output} is computed"
    for checked in nan_checked:
        if position.get(checked, -1) >= position[output]:
            return f"{checked} is recorded, and computed after {output}"
    vertex = graph[output]
    if output not in graph.consumers[name]:
        return ""
    cuts = output_cuts(graph, output, states[output])
    if layouts[output] != cuts or is_partial(vertex, states):
        return ""  # it is computed elsewhere, and then moved to the memory of the input
    for operand, operand_name in enumerate(vertex.inputs):
        if operand_name != name:
            continue
        is_copied = _is_copied(graph, mesh, vertex, operand, states, layouts)
        if not is_copied and not reads_where_it_writes(vertex, operand):
            return f"{output} reads other elements of {name} than it writes"
    return ""


def reads_where_it_writes(vertex: Vertex, operand: int) -> bool:
    """Return whether each element of a result needs just the same element of an operand."""
    einsum = vertex.computed_einsum
    if not einsum.is_elementwise or einsum.scan is not None or einsum.segments is not None:
        return False
    labels = einsum.operands[operand]
    return labels == einsum.output and len(set(labels)) == len(labels)


def _is_copied(
    graph: EinGraph, mesh: Mesh, user: Vertex, operand: int, states: Labels, layouts: Layouts
) -> bool:
    """Return whether an operand is brought into another array before it is read."""
    name = user.inputs[operand]
    state = states[user.name]
    needed = needed_of(user, name, graph[name].bound)
    if needed is not None:
        return not is_inside(mesh, needed, layouts[name], state)
    return layouts[name] != operand_cuts(graph, user.name, operand, state)
