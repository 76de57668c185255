"""Repeated layers in tables of a plan: what is the same as in the layer before is one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from einmpi.graph.eingraph import Vertex
from einmpi.planner.plan_data import PlanData
from einmpi.planner.repetition import find_layers
from einmpi.units import show_count

MOST_UNFOLDED = 40  # vertices; a graph with no more is shown whole
LEAST_FOLDED = 4  # vertices one after another; fewer are shown


class Fold(NamedTuple):
    """Vertices one after another, each cut and moved as the same one of the layer before."""

    vertices: tuple[Vertex, ...]
    first_layer: int  # layers are counted from 1
    last_layer: int

    @property
    def text(self) -> str:
        """What stands in a table instead of the vertices."""
        first = self.vertices[0].name
        last = self.vertices[-1].name
        layers = f"layer {self.first_layer}"
        if self.last_layer > self.first_layer:
            layers = f"layers {self.first_layer} to {self.last_layer}"
        count = show_count(len(self.vertices))
        return f"… {first} to {last}: {count} vertices of {layers}, each as in the layer before"


def vertices_and_folds(plan: PlanData, full: bool = False) -> list[Vertex | Fold]:
    """Return what a table shows, in order: vertices, and folds for others; `full` has no folds."""
    computed = plan.graph.computed
    shown: list[Vertex | Fold] = []
    next_place = 0
    for start, end, fold in () if full else _folds(plan):
        shown += computed[next_place:start]
        shown.append(fold)
        next_place = end
    shown += computed[next_place:]
    return shown


def folded_vertices(plan: PlanData) -> frozenset[str]:
    """Return the names of the vertices that tables do not show."""
    names: set[str] = set()
    for each in vertices_and_folds(plan):
        if isinstance(each, Fold):
            names.update(vertex.name for vertex in each.vertices)
    return frozenset(names)


def _folds(plan: PlanData) -> Iterator[tuple[int, int, Fold]]:
    """Yield the place of the first vertex of each fold, the place after its last, and the fold."""
    computed = plan.graph.computed
    if len(computed) <= MOST_UNFOLDED:
        return
    start, period, count = _whole_layers(plan)
    end = start + period * count
    first = start + period
    for place in range(start + period, end + 1):
        if place < end and _look_alike(plan, computed[place], computed[place - period]):
            continue
        if place - first >= LEAST_FOLDED:
            first_layer = (first - start) // period + 1
            last_layer = (place - 1 - start) // period + 1
            yield first, place, Fold(computed[first:place], first_layer, last_layer)
        first = place + 1


def _whole_layers(plan: PlanData) -> tuple[int, int, int]:
    """Return the place of the first layer, the vertices of a layer, and the number of layers.

    The search for layers looks at what surrounds each vertex, so that it leaves out parts of the
    first and of the last layer, which read an input or are an output. Here they are included.
    """
    computed = plan.graph.computed
    start, period, count = find_layers(plan.graph, results_of_none=True)
    if not count:
        return 0, 1, 1
    end = start + period * count
    while start > 0 and computed[start - 1].einsum == computed[start - 1 + period].einsum:
        start -= 1
    while end < len(computed) and computed[end].einsum == computed[end - period].einsum:
        end += 1
    return start, period, (end - start) // period


def _look_alike(plan: PlanData, vertex: Vertex, before: Vertex) -> bool:
    """Return whether a plan says the same of two vertices that compute the same."""
    for name, name_before in zip(vertex.inputs, before.inputs, strict=True):
        if plan.layouts.get(name) != plan.layouts.get(name_before):
            return False
    return (
        vertex.einsum == before.einsum
        and vertex.dtype == before.dtype
        and plan.states[vertex.name] == plan.states[before.name]
        and plan.layouts.get(vertex.name) == plan.layouts.get(before.name)
        and plan.bills[vertex.name] == plan.bills[before.name]
        and plan.notes.get(vertex.name) == plan.notes.get(before.name)
    )
