"""A lower bound on the words that any plan of a graph moves.

Each vertex is taken alone, with the best real-valued cuts (docs/planner.md, "The lower bound").
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from math import exp, log

from einmpi.graph.eingraph import EinGraph, Vertex

SAFETY = 1e-6  # the minimum is found numerically, to about eight digits
MAX_SWEEPS = 500
LEAST_STEP = 1e-9  # a sweep that moves no label by more than this ends the search

# Words, and for each label whether it multiplies them when it is cut; the last mark is for ranks
# that compute the same again.
Term = tuple[float, tuple[bool, ...]]


def lower_bound_words(graph: EinGraph, ranks: int, resident: Collection[str] = ()) -> int:
    """Return the sum over all vertices of the words that each must move.

    A vertex with operands T and result Z moves at least the minimum, over real d ≥ 1 with
    ∏ d = ranks, of Σ_T w_T·(∏_{l ∉ T} d_l − 1) + |Z|·(∏_{l aggregated} d_l − 1): it pays for copies
    of its operands and for partial results. The words w_T that a vertex may charge for a copy of an
    operand are shared out so that no word is charged twice: see `charges`.
    """
    if ranks == 1:
        return 0
    charged = charges(graph, ranks, resident)
    total = sum(_vertex_bound(vertex, ranks, charged[vertex.name]) for vertex in graph.computed)
    return int(total * (1 - SAFETY))


def charges(graph: EinGraph, ranks: int, resident: Collection[str] = ()) -> dict[str, list[float]]:
    """Return for each vertex the words that it charges for one more copy of each operand.

    All users together charge a tensor T at most |T|, the cost of moving one copy. But a copy of a
    computed tensor can also be made by computing it twice. Cutting one output label further instead
    would save its maker the copies of the operands that have this label; so users may not charge
    more than the maker charges for those (`_backing`).
    """
    product_uses = {}  # tensor → how often it is an operand of a product
    for name, users in graph.consumers.items():
        products = [user for user in users if _is_product(graph[user])]
        product_uses[name] = sum(graph[user].inputs.count(name) for user in products)

    # Products share the words of their operands equally.
    claims: dict[str, list[float]] = {}
    chargeable: dict[str, float] = {}  # tensor → words that its users may charge for a copy
    free = {*resident, *_partly_read(graph)}
    for vertex in graph.vertices:
        chargeable[vertex.name] = 0.0 if vertex.name in free else float(vertex.elements)
    for vertex in graph.computed:
        if _is_product(vertex):
            shares = [chargeable[name] / max(1, product_uses[name]) for name in vertex.inputs]
            claims[vertex.name] = shares
    for vertex in graph.computed:
        if vertex.name in claims and vertex.name not in free:
            chargeable[vertex.name] = _backing(vertex, claims[vertex.name], ranks)

    # Users before makers: other vertices pass on what is charged for their result.
    claimed = dict.fromkeys(chargeable, 0.0)
    for vertex in reversed(graph.computed):
        if vertex.name not in claims:
            wanted = claimed[vertex.name]
            claims[vertex.name] = _pass_on(vertex, wanted, chargeable, graph, ranks, product_uses)
        for name, claim in zip(vertex.inputs, claims[vertex.name], strict=True):
            claimed[name] += claim

    # Makers before users: claims that the maker cannot back are scaled down.
    for vertex in graph.computed:
        users = graph.consumers[vertex.name]
        charged = 0.0
        for user in users:
            for name, claim in zip(graph[user].inputs, claims[user], strict=True):
                if name == vertex.name:
                    charged += claim
        backing = _backing(vertex, claims[vertex.name], ranks)
        if charged > backing:
            for user in users:
                for operand, name in enumerate(graph[user].inputs):
                    if name == vertex.name:
                        claims[user][operand] *= backing / charged
    return claims


def _partly_read(graph: EinGraph) -> Iterator[str]:
    """Yield tensors of which a vertex may need only a part, by index arithmetic."""
    for vertex in graph.computed:
        for operand, name in enumerate(vertex.inputs):
            if vertex.computed_einsum.has_arithmetic(operand):
                yield name


def _is_product(vertex: Vertex) -> bool:
    """Return whether a vertex aggregates several operands: such vertices need copies."""
    einsum = vertex.einsum
    return einsum is not None and len(einsum.operands) > 1 and bool(einsum.aggregated)


def _pass_on(
    vertex: Vertex,
    wanted: float,
    chargeable: dict[str, float],
    graph: EinGraph,
    ranks: int,
    product_uses: Mapping[str, int],
) -> list[float]:
    """Charge the operands as much as the users charge for the result; return these claims.

    Only operands with the longest output label count, those with the fewest other users first,
    and none that a product charges.
    """
    label = _longest_output_label(vertex, ranks)
    candidates = []
    for operand, index in enumerate(vertex.computed_einsum.operands):
        name = vertex.inputs[operand]
        if label in index and product_uses[name] == 0:
            candidates.append((len(graph.consumers[name]), operand))
    claims = [0.0] * len(vertex.inputs)
    for _, operand in sorted(candidates):
        name = vertex.inputs[operand]
        claim = max(0.0, min(wanted, chargeable[name]))
        claims[operand] = claim
        chargeable[name] -= claim
        wanted -= claim
    return claims


def _longest_output_label(vertex: Vertex, ranks: int) -> str | None:
    """Return the longest output label, if it can be cut over all ranks."""
    einsum = vertex.computed_einsum
    longest = 0
    found = None
    for label, extent in einsum.extents:
        if label in einsum.output and extent > longest:
            longest = extent
            found = label
    return found if longest >= ranks else None


def _backing(vertex: Vertex, claims: Sequence[float], ranks: int) -> float:
    """Return the most words that users may charge for a copy of a computed tensor."""
    einsum = vertex.computed_einsum
    most_saved = 0.0  # by cutting one output label further
    for label in einsum.output:
        if einsum.extent[label] >= ranks:
            operands = zip(claims, einsum.operands, strict=True)
            saved = sum(claim for claim, index in operands if label in index)
            most_saved = max(most_saved, saved)
    return min(float(vertex.elements), most_saved)


def _vertex_bound(vertex: Vertex, ranks: int, charged: Sequence[float]) -> float:
    """Return the words that one vertex must move, given what it charges for each operand."""
    einsum = vertex.computed_einsum
    extents = tuple(extent for _, extent in einsum.extents)
    if 0 in extents:
        return 0.0
    terms: list[Term] = []
    for words, index in zip(charged, einsum.operands, strict=True):
        if words:
            # Cutting a label that an operand lacks copies the operand; so does computing again.
            marks = [label not in index for label in einsum.labels]
            terms.append((words, (*marks, True)))
    if einsum.aggregated:
        marks = [label in einsum.aggregated for label in einsum.labels]
        terms.append((vertex.elements, (*marks, False)))
    return _minimum(tuple(terms), extents, ranks)


@cache
def _minimum(terms: tuple[Term, ...], extents: tuple[int, ...], ranks: int) -> float:
    """Return min Σ words·(∏ d over the marked labels − 1) over real cuts d with ∏ d = ranks.

    In x = log d this is a sum of exponentials, which is convex, over a simplex with Σ x = log
    ranks. It is solved by exchanging weight between two labels at a time.
    """
    if not terms or not extents:
        return 0.0
    limits = [*(log(min(extent, ranks)) for extent in extents), log(ranks)]
    marked = [marks for _, marks in terms]
    point = []  # a feasible start: labels are filled in order
    left = log(ranks)
    for limit in limits:
        point.append(min(limit, left))
        left -= point[-1]
    for _ in range(MAX_SWEEPS):
        values = []  # of each term at this point
        for words, marks in terms:
            exponent = sum(x for x, mark in zip(point, marks, strict=True) if mark)
            values.append(words * exp(exponent))
        largest_step = 0.0
        for i in range(len(point)):
            for j in range(i):
                step = _exchange(point, i, j, limits, marked, values)
                largest_step = max(largest_step, step)
        if largest_step < LEAST_STEP:
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
    """Move weight t from label j to label i, to the minimum along that line; return |t|.

    Along the line the sum is A·eᵗ + B·e⁻ᵗ + C, whose minimum is at t = log(B / A) / 2. `point` and
    `values` are changed in place.
    """
    rising = 0.0  # A: terms that have label i but not j
    falling = 0.0  # B: terms that have label j but not i
    for value, marks in zip(values, marked, strict=True):
        if marks[i] and not marks[j]:
            rising += value
        elif marks[j] and not marks[i]:
            falling += value
    low = max(-point[i], point[j] - limits[j])
    high = min(limits[i] - point[i], point[j])
    if rising == falling or high - low < 1e-12:
        return 0.0
    if falling == 0:
        best = low
    elif rising == 0:
        best = high
    else:
        best = log(falling / rising) / 2
    step = min(max(best, low), high)
    point[i] += step
    point[j] -= step
    for k, marks in enumerate(marked):
        values[k] *= exp(step * (marks[i] - marks[j]))
    return abs(step)
