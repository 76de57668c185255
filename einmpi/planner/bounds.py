"""A lower bound on the words any plan of the whole graph moves: each contraction at its best real-valued cuts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from math import exp, log

from einmpi.graph.eingraph import EinGraph, Vertex


def lower_bound_words(graph: EinGraph, ranks: int, resident: Collection[str] = ()) -> int:
    """Σ over vertices of min over real d ≥ 1, ∏ d = ranks, of Σ_T w_T·(∏_{l ∉ T} d_l − 1) + |Z|·(∏_{agg} d_l − 1).

    A vertex pays for copies of its operands and for partial results. The words w_T a vertex may charge for a copy of
    an operand are shared out so that no word is charged twice: see `charges`.
    """
    if ranks == 1:
        return 0
    charged = charges(graph, ranks, resident)
    total = sum(_vertex_bound(vertex, ranks, charged[vertex.name]) for vertex in graph.computed)
    return int(total * (1 - 1e-6))  # the minimum is found numerically, to about eight digits


def charges(graph: EinGraph, ranks: int, resident: Collection[str] = ()) -> dict[str, list[float]]:
    """For each vertex the words it charges for one more copy of each operand.

    All users together charge a tensor T at most |T|, which a copy costs when it is moved. But a copy of a computed
    tensor can also be made by computing it twice. Cutting one output label further instead would save its maker the
    copies of the operands that have this label; so users may not charge more than the maker charges for those.
    """
    products = {
        name: sum(graph[user].inputs.count(name) for user in users if _is_product(graph[user]))
        for name, users in graph.consumers.items()
    }
    full = {v.name: 0.0 if v.name in resident else float(v.elements) for v in graph.vertices}
    claims = {
        v.name: [full[n] / max(1, products[n]) for n in v.inputs]
        for v in graph.computed
        if _is_product(v)
    }
    left = {
        v.name: _backing(v, claims[v.name], ranks) if v.name in claims else full[v.name]
        for v in graph.vertices
    }
    claimed = dict.fromkeys(left, 0.0)
    for vertex in reversed(graph.computed):  # users before makers
        if vertex.name not in claims:
            claims[vertex.name] = _claim(vertex, claimed[vertex.name], left, graph, ranks, products)
        for name, claim in zip(vertex.inputs, claims[vertex.name], strict=True):
            claimed[name] += claim
    for vertex in graph.computed:  # makers before users: what the maker cannot back is taken back
        charged = sum(
            claim
            for user in graph.consumers[vertex.name]
            for name, claim in zip(graph[user].inputs, claims[user], strict=True)
            if name == vertex.name
        )
        backing = _backing(vertex, claims[vertex.name], ranks)
        if charged > backing:
            for user in graph.consumers[vertex.name]:
                scale = [
                    backing / charged if name == vertex.name else 1.0 for name in graph[user].inputs
                ]
                claims[user] = [claim * by for claim, by in zip(claims[user], scale, strict=True)]
    return claims


def _is_product(vertex: Vertex) -> bool:
    """An aggregate of several operands: what copies are for."""
    einsum = vertex.einsum
    return einsum is not None and len(einsum.operands) > 1 and bool(einsum.aggregated)


def _claim(
    vertex: Vertex,
    wanted: float,
    left: dict[str, float],
    graph: EinGraph,
    ranks: int,
    products: Mapping[str, int],
) -> list[float]:
    """Charge operands as much as users charge the result, those first that nobody else needs."""
    claims = [0.0] * len(vertex.inputs)
    label = _longest(vertex, ranks)
    assert vertex.einsum is not None
    order = [k for k, index in enumerate(vertex.einsum.operands) if label in index]
    for k in sorted(
        order,
        key=lambda k: (products[vertex.inputs[k]] > 0, len(graph.consumers[vertex.inputs[k]]), k),
    ):
        name = vertex.inputs[k]
        free = left[name] if products[name] == 0 else 0.0
        claims[k] = max(0.0, min(wanted, free))
        left[name] -= claims[k]
        wanted -= claims[k]
    return claims


def _longest(vertex: Vertex, ranks: int) -> str | None:
    """The longest output label, if it can be cut over all ranks."""
    assert vertex.einsum is not None
    output = [
        (extent, label) for label, extent in vertex.einsum.extents if label in vertex.einsum.output
    ]
    best = max(output, default=(0, ""), key=lambda entry: entry[0])
    return best[1] if best[0] >= ranks else None


def _backing(vertex: Vertex, claims: Sequence[float], ranks: int) -> float:
    """The most words that users may charge for a copy of a computed tensor."""
    einsum = vertex.einsum
    assert einsum is not None
    saved = [
        sum(claim for claim, index in zip(claims, einsum.operands, strict=True) if label in index)
        for label in einsum.output
        if einsum.extent[label] >= ranks
    ]
    return min(float(vertex.elements), max(saved, default=0.0))


def _vertex_bound(vertex: Vertex, ranks: int, operands: Sequence[float]) -> float:
    einsum = vertex.einsum
    assert einsum is not None
    if 0 in (extent for _, extent in einsum.extents):
        return 0.0
    absent = [
        tuple(label not in index for label in einsum.labels) if words else ()
        for words, index in zip(operands, einsum.operands, strict=True)
    ]
    # The last mark is for ranks that compute the same again: that copies operands, and makes no partial results.
    terms = [(words, (*gone, True)) for words, gone in zip(operands, absent, strict=True) if words]
    if einsum.aggregated:
        terms.append(
            (vertex.elements, (*(label in einsum.aggregated for label in einsum.labels), False))
        )
    return _minimum(tuple(terms), tuple(extent for _, extent in einsum.extents), ranks)


@cache
def _minimum(
    terms: tuple[tuple[float, tuple[bool, ...]], ...], extents: tuple[int, ...], ranks: int
) -> float:
    """min Σ words·(∏ d over the marked labels − 1). Convex in log d; solved by exchange between pairs of labels."""
    if not terms or not extents:
        return 0.0
    limits = [*(log(min(extent, ranks)) for extent in extents), log(ranks)]
    marked = [gone for _, gone in terms]
    point, left = [], log(ranks)
    for limit in limits:  # a feasible start: fill labels in order
        point.append(min(limit, left))
        left -= point[-1]
    for _ in range(500):
        values = [
            words * exp(sum(x for x, mark in zip(point, marks, strict=True) if mark))
            for (words, _), marks in zip(terms, marked, strict=True)
        ]
        if (
            max(
                _exchange(point, i, j, limits, marked, values)
                for i in range(len(point))
                for j in range(i)
            )
            < 1e-9
        ):
            break
    return sum(values) - sum(words for words, _ in terms)


def _exchange(
    point: list[float],
    i: int,
    j: int,
    limits: Sequence[float],
    marked: Sequence[Sequence[bool]],
    values: list[float],
) -> float:
    """Move weight from label j to label i to the minimum along that line, A·eᵗ + B·e⁻ᵗ; how much was moved."""
    rising = sum(
        value for value, marks in zip(values, marked, strict=True) if marks[i] and not marks[j]
    )
    falling = sum(
        value for value, marks in zip(values, marked, strict=True) if marks[j] and not marks[i]
    )
    low = max(-point[i], point[j] - limits[j])
    high = min(limits[i] - point[i], point[j])
    if rising == falling or high - low < 1e-12:
        return 0.0
    best = low if falling == 0 else high if rising == 0 else log(falling / rising) / 2
    step = min(max(best, low), high)
    point[i] += step
    point[j] -= step
    for k, marks in enumerate(marked):
        values[k] *= exp(step * (marks[i] - marks[j]))
    return abs(step)
