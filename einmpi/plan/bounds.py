"""A lower bound on the words any plan of the whole graph moves: each contraction at its best real-valued cuts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from math import log

import numpy as np

from einmpi.graph.eingraph import EinGraph, Vertex


def lower_bound_words(graph: EinGraph, ranks: int, resident: Collection[str] = ()) -> int:
    """Σ over vertices of min over real d ≥ 1, ∏ d = ranks, of Σ_T |T|·(∏_{l ∉ T} d_l − 1).

    A vertex pays for copies of its operands and for partial results. A copy of a computed operand is counted at the
    least it may cost: the operand itself, or copies of what it is computed from. A tensor with several users may be
    copied once for all of them: its words are shared out among the largest.
    """
    if ranks == 1:
        return 0
    copy = copy_words(graph, resident)
    payers = {name: _largest(graph, users) for name, users in graph.consumers.items()}
    total = 0.0
    for vertex in graph.computed:
        shares = [
            copy[name] / len(payers[name]) / vertex.inputs.count(name) if vertex.name in payers[name] else 0.0
            for name in vertex.inputs
        ]
        total += _vertex_bound(vertex, ranks, shares)
    return int(total * (1 - 1e-6))  # the minimum is found numerically, to about eight digits


def copy_words(graph: EinGraph, resident: Collection[str]) -> dict[str, int]:
    """The least words that one more copy of each tensor costs."""
    copy: dict[str, int] = {}
    for vertex in graph.vertices:
        if vertex.is_input:
            copy[vertex.name] = 0 if vertex.name in resident else vertex.elements
        else:
            copy[vertex.name] = min(vertex.elements, sum(copy[name] for name in dict.fromkeys(vertex.inputs)))
    return copy


def _largest(graph: EinGraph, users: Sequence[str]) -> list[str]:
    calls = {name: einsum.calls() for name in users if (einsum := graph[name].einsum) is not None}
    return [name for name in users if calls[name] == max(calls.values())]


def _vertex_bound(vertex: Vertex, ranks: int, operands: Sequence[float]) -> float:
    einsum = vertex.einsum
    assert einsum is not None
    if 0 in (extent for _, extent in einsum.extents):
        return 0.0
    absent = [
        tuple(label not in index for label in einsum.labels) if words else ()
        for words, index in zip(operands, einsum.operands, strict=True)
    ]
    terms = [(words, gone) for words, gone in zip(operands, absent, strict=True) if words]
    if einsum.aggregated:
        terms.append((vertex.elements, tuple(label in einsum.aggregated for label in einsum.labels)))
    return _minimum(tuple(terms), tuple(extent for _, extent in einsum.extents), ranks)


@cache
def _minimum(terms: tuple[tuple[float, tuple[bool, ...]], ...], extents: tuple[int, ...], ranks: int) -> float:
    """min Σ words·(∏ d over the marked labels − 1). Convex in log d; solved by exchange between pairs of labels."""
    if not terms or not extents:
        return 0.0
    # The last label is idle: what no label can take is computed redundantly, which copies every operand.
    limits = np.array([*(log(min(extent, ranks)) for extent in extents), log(ranks)])
    marks = np.array([[*gone, True] for _, gone in terms], float)
    words = np.array([count for count, _ in terms])
    point = np.minimum(limits, 0.0)
    left = log(ranks)
    for k in range(len(limits)):  # a feasible start: fill labels in order
        point[k] = min(limits[k], left)
        left -= point[k]
    for _ in range(200):
        before = point.copy()
        for i in range(len(point)):
            for j in range(i):
                _exchange(point, i, j, limits, marks, words)
        if np.abs(point - before).max() < 1e-10:
            break
    return float((words * (np.exp(marks @ point) - 1)).sum())


def _exchange(point, i, j, limits, marks, words) -> None:  # type: ignore[no-untyped-def]
    """Move weight between labels i and j to the minimum along that line (the derivative is monotone: bisection)."""
    low = max(-point[i], point[j] - limits[j])
    high = min(limits[i] - point[i], point[j])
    slope = marks[:, i] - marks[:, j]
    if not slope.any() or high - low < 1e-12:
        return
    base = words * np.exp(marks @ point) * slope
    for _ in range(60):
        middle = (low + high) / 2
        if (base * np.exp(slope * middle)).sum() > 0:
            high = middle
        else:
            low = middle
    point[i] += (low + high) / 2
    point[j] -= (low + high) / 2
