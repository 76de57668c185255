"""The partitionings of an EinSum that make exactly as many kernel calls as there are ranks.

Paper, sections 6 and 8.1.
"""

from __future__ import annotations

from functools import cache

from einmpi.graph.einsum import EinSum
from einmpi.graph.labels import unique

Parts = tuple[int, ...]  # of each label of an EinSum, or of each dimension of a tensor
Extents = tuple[int, ...]

MAX_VECTORS = 8192  # of one EinSum; enough for all of them with 6 labels at 4096 ranks


def viable(einsum: EinSum, ranks: int) -> list[Parts]:
    """Return every way to cut the labels into exactly `ranks` kernel calls.

    No label is cut into more parts than its extent. The prime factors of `ranks` are balls in the
    labels' buckets. The list is in rising lexicographic order of the paper's vectors, whose labels
    stand in the order of the operands, ℓX ⊙ ℓY. Where the labels are too small for `ranks` calls,
    the list has the vectors with the most calls below that. Beyond MAX_VECTORS vectors only the
    longest labels are cut, as many of them as keep the list that short.
    """
    order = join_order(einsum)
    vectors = _vectors(tuple(einsum.extents[position][1] for position in order), ranks)
    # Back from the paper's order of the labels to that of EinSum.labels.
    place = [order.index(position) for position in range(len(order))]
    found = []
    for vector in vectors:
        found.append(tuple(vector[position] for position in place))
    return found


def join_order(einsum: EinSum) -> tuple[int, ...]:
    """Return the positions of the labels in the order of the operands; other labels come last."""
    labels = unique(einsum.bounded_labels(), einsum.labels)
    return tuple(einsum.labels.index(label) for label in labels)


def fullest(extents: Extents, ranks: int) -> Parts:
    """Return the cuts of labels with the largest product that divides `ranks`.

    The first label takes as much as it can: extents (4, 100) at 8 ranks are cut (4, 2).
    """
    ways = _ways(extents, ranks)
    left = max(ways[0])
    parts = []
    for extent, later in zip(extents, ways[1:], strict=True):
        cut = max(_cuts(left, extent, later))
        parts.append(cut)
        left //= cut
    return tuple(parts)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number in rising order."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)


@cache
def _vectors(extents: Extents, ranks: int) -> tuple[Parts, ...]:
    """Return all vectors of parts with as many kernel calls as possible, at most `ranks`.

    A vector is begun only if the later labels can complete it.
    """
    ways = _ways(extents, ranks)
    calls = max(ways[0])
    if ways[0][calls] > MAX_VECTORS:
        extents = _fewer_labels(extents, ranks, calls)
        ways = _ways(extents, ranks)
    # Beginnings of vectors, each with the product that is left for the later labels.
    begun: list[tuple[Parts, int]] = [((), calls)]
    for extent, later in zip(extents, ways[1:], strict=True):
        cuts_of = {left: _cuts(left, extent, later) for left in divisors(calls)}
        longer = []
        for vector, left in begun:
            for cut in cuts_of[left]:
                longer.append(((*vector, cut), left // cut))
        begun = longer
    return tuple(vector for vector, _ in begun)


def _cuts(left: int, extent: int, later: dict[int, int]) -> list[int]:
    """Return the cuts of a label that the later labels can complete to the product `left`."""
    cuts = []
    for cut in divisors(left):
        if cut <= max(extent, 1) and left // cut in later:
            cuts.append(cut)
    return cuts


def _ways(extents: Extents, ranks: int) -> list[dict[int, int]]:
    """Return, for the labels from each position on: product of parts → number of vectors.

    For extents (2, 4) and 4 ranks: [{1: 1, 2: 2, 4: 2}, {1: 1, 2: 1, 4: 1}, {1: 1}].
    """
    ways = [{1: 1}]
    for extent in reversed(extents):
        cuts = [cut for cut in divisors(ranks) if cut <= max(extent, 1)]
        here: dict[int, int] = {}
        for later_product, count in ways[-1].items():
            for cut in cuts:
                product = later_product * cut
                if ranks % product == 0:
                    here[product] = here.get(product, 0) + count
        ways.append(here)
    ways.reverse()
    return ways


def _fewer_labels(extents: Extents, ranks: int, calls: int) -> Extents:
    """Return the extents with those of the shortest labels set to 1, so that they stay uncut.

    As many labels are kept as MAX_VECTORS allows, but enough for `calls` kernel calls.
    """
    longest_first = sorted(range(len(extents)), key=lambda label: (-extents[label], label))
    best: Extents | None = None
    for count in range(1, len(extents) + 1):
        kept = longest_first[:count]
        fewer = tuple(extent if label in kept else 1 for label, extent in enumerate(extents))
        vectors = _ways(fewer, ranks)[0].get(calls, 0)
        if vectors and (best is None or vectors <= MAX_VECTORS):
            best = fewer
        if vectors > MAX_VECTORS:
            break
    return best or extents
