"""The lower bound where results are symmetric: their pairs of rows may be computed once each, by
ranks that no product of cuts describes (docs/lower_bound.md)."""

from __future__ import annotations

from collections.abc import Collection
from math import isqrt, prod

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.forms.pairs.families import family_of
from einmpi.planner.lower_bound.pieces import ALL_CUTS, Bound
from einmpi.planner.lower_bound.words import lower_bound_words
from einmpi.planner.pairs import can_be_paired


def bound_with_pairs(graph: EinGraph, ranks: int, resident: Collection[str], bound: Bound) -> Bound:
    """Return a bound of all plans, given one of the plans that cut labels only.

    Nothing is counted for symmetric results, what they read and what is computed from their pairs,
    but the words of one of them.
    """
    symmetric = [vertex for vertex in graph.computed if can_be_paired(graph, vertex, ranks)]
    if not symmetric:
        return bound
    names = {name for vertex in symmetric for name in family_of(graph, vertex.name)}
    least = [_words_of_rest(graph, ranks, resident, names)]
    least += [_words_of_pairs(graph, vertex, ranks, resident) for vertex in symmetric]
    return bound if bound.words <= max(least) else Bound(max(least), ALL_CUTS)


def _words_of_rest(
    graph: EinGraph, ranks: int, resident: Collection[str], names: Collection[str]
) -> int:
    """Return the bound of a graph in which some results are given, wherever they are needed."""
    outputs = tuple(name for name in graph.outputs if name not in names)
    needed = set(outputs)
    vertices: list[Vertex] = []
    for vertex in reversed(graph.vertices):
        if vertex.name not in needed:
            continue
        if vertex.name in names:
            vertices.append(Vertex(vertex.name, vertex.bound, vertex.dtype))
        else:
            vertices.append(vertex)
            needed.update(vertex.inputs)
    if not outputs:
        return 0
    rest = EinGraph(tuple(reversed(vertices)), outputs)
    return lower_bound_words(rest, ranks, (*resident, *names))


def _words_of_pairs(graph: EinGraph, vertex: Vertex, ranks: int, resident: Collection[str]) -> int:
    """Return the fewest words of C[i,k] ← Σ[j](A[i,j] × A[k,j]) and the like; 0 for other forms."""
    einsum = vertex.computed_einsum
    name = vertex.inputs[0]
    if len(einsum.output) != 2 or set(vertex.inputs) != {name} or len(vertex.inputs) != 2:
        return 0
    if not graph[name].is_input or name in resident:
        return 0
    for index in einsum.operands:
        if len(index) != 1 + len(einsum.aggregated) or not set(einsum.aggregated) <= set(index):
            return 0
    summed = prod(einsum.extent[label] for label in einsum.aggregated)
    return words_of_pairs(einsum.bound[0], summed, ranks)


def words_of_pairs(rows: int, columns: int, ranks: int) -> int:
    """Return the fewest words for all pairs of rows, shared equally by the ranks.

    A rank that computes V terms from `a` elements of A for `c` elements below the diagonal has
    2V ≤ a·√(2c). The least a + c is in the middle or at an end of what c can be: a share of these
    elements, or all.
    """
    below = rows * (rows - 1)  # twice the elements below the diagonal
    terms = below * columns
    if ranks * columns**2 <= below:
        read_and_summed = isqrt(columns**2 * below * ranks) + below // 2
    elif columns**2 >= ranks**2 * below:
        read_and_summed = isqrt(columns**2 * below) + ranks * below // 2
    else:
        read_and_summed = _cube_root(27 * ranks * terms**2 // 8)
    return max(0, read_and_summed - rows * columns - below // 2)


def _cube_root(number: int) -> int:
    """Return the largest integer whose cube is not above a number."""
    root = 1 << -(-number.bit_length() // 3)
    while root**3 > number:  # Newton's method from above
        root = (2 * root + number // root**2) // 3
    return root
