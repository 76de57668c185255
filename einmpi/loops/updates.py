"""The updates of a loop's step: in an order in which they can be made in place, and how much of a
carried tensor each of them changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.kernels.updates.partial_updates import find_partial_update
from einmpi.planner.donation import is_sparse_update
from einmpi.planner.sparse_updates import places_filled, scattered_label


def with_updates_in_order(
    graph: EinGraph, carry: Mapping[str, str], nan_checked: Collection[str] = ()
) -> EinGraph:
    """Return the graph with the next values of carried tensors after all uses of the old ones.

    Then the next value can be written over the old one. `carry` has the output that each input
    becomes. The tensors in `nan_checked` are computed before, too, where that is possible.
    """
    order = list(graph.vertices)
    for name, output in carry.items():
        order = _with_late_update(graph, order, name, output, nan_checked)
    for name, output in carry.items():
        order = _with_update_after_its_sum(graph, order, name, output, nan_checked)
    inputs_of_outputs = {output: name for name, output in carry.items()}
    vertices = []
    for vertex in order:
        if vertex.name in inputs_of_outputs:
            vertex = replace(vertex, changed=_elements_changed(graph, vertex, inputs_of_outputs))
        vertices.append(vertex)
    return replace(graph, vertices=tuple(vertices))


def _elements_changed(
    graph: EinGraph, vertex: Vertex, inputs_of_outputs: Mapping[str, str]
) -> int | None:
    """Return how many elements of a carried tensor an update changes; None if it may be all."""
    einsum = vertex.computed_einsum
    extents = dict(einsum.extents)
    carried = inputs_of_outputs[vertex.name]
    update = find_partial_update(einsum)
    if update is not None and vertex.inputs[update.operand] == carried:
        for condition in update.conditions:
            if condition.comparison == "==":
                extents[condition.label] = 1
        return prod(extents[label] for label in einsum.output)
    for name in vertex.inputs:
        scattered = graph[name]
        if scattered.is_input or graph.consumers[name] != (vertex.name,):
            continue
        if is_sparse_update(scattered, vertex):
            dimension = _scattered_dimension(scattered)
            label = einsum.output[dimension]
            extents[label] = min(extents[label], places_filled(scattered.computed_einsum))
            return prod(extents[label] for label in einsum.output)
    return None


def _scattered_dimension(vertex: Vertex) -> int:
    """Return the dimension along which values are scattered."""
    einsum = vertex.computed_einsum
    label = scattered_label(einsum)
    assert label is not None
    return einsum.output.index(label)


def _with_late_update(
    graph: EinGraph,
    order: list[Vertex],
    name: str,
    output: str,
    nan_checked: Collection[str],
) -> list[Vertex]:
    """Return the order in which the output comes after the last vertex that reads the input."""
    start = [vertex.name for vertex in order].index(output)
    dependent = {output}  # the output and what is computed from it
    end = start
    for position in range(start + 1, len(order)):
        vertex = order[position]
        needs_output = not dependent.isdisjoint(vertex.inputs)
        if needs_output:
            dependent.add(vertex.name)
        comes_first = name in vertex.inputs or vertex.name in nan_checked
        if comes_first and needs_output:
            return order  # it needs both values
        if comes_first:
            end = position
    if end == start:
        return order
    if _bytes_kept_longer(order, start) > graph[output].nbytes:
        return order
    first = []
    later = []
    for vertex in order[start : end + 1]:
        if vertex.name in dependent:
            later.append(vertex)
        else:
            first.append(vertex)
    return [*order[:start], *first, *later, *order[end + 1 :]]


def _with_update_after_its_sum(
    graph: EinGraph,
    order: list[Vertex],
    name: str,
    output: str,
    nan_checked: Collection[str],
) -> list[Vertex]:
    """Return the order in which the output comes right after a sum that nothing else needs.

    So the sum, a gradient say, need not be kept. Nothing that comes between them now may read the
    input, nor compute what the output needs or what must be known before the input is lost.
    """
    position = [vertex.name for vertex in order].index(output)
    update = order[position]
    start = position - 1
    while start >= 0:
        vertex = order[start]
        is_last_read_here = graph.consumers[vertex.name] == (output,)
        if vertex.einsum is not None and vertex.einsum.aggregated and is_last_read_here:
            passed = order[start + 1 : position]
            return [*order[: start + 1], update, *passed, *order[position + 1 :]]
        if vertex.name in update.inputs or vertex.name in nan_checked or name in vertex.inputs:
            return order
        start -= 1
    return order


def _bytes_kept_longer(order: Sequence[Vertex], position: int) -> int:
    """Return the bytes of the computed operands that a vertex is the last to read."""
    read_later: set[str] = set()
    for vertex in order[position + 1 :]:
        read_later.update(vertex.inputs)
    read_last_here = set(order[position].inputs) - read_later
    total = 0
    for vertex in order[:position]:
        if vertex.name in read_last_here and not vertex.is_input:
            total += vertex.nbytes
    return total
