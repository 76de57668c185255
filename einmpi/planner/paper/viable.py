"""The partitionings of an EinSum that make exactly as many kernel calls as there are ranks (paper, sections 6, 8.1)."""

from __future__ import annotations

from functools import cache

from einmpi.graph.einsum import EinSum
from einmpi.graph.labels import unique

Parts = tuple[
    int, ...
]  # of each label, in the order of EinSum.labels; or of each dimension of a tensor
Extents = tuple[int, ...]

MAX_VECTORS = 8192  # of one EinSum; all of them for 6 labels at 4096 ranks


def viable(einsum: EinSum, ranks: int) -> list[Parts]:
    """Every way to cut the labels into exactly `ranks` kernel calls, no label into more parts than its extent.

    The prime factors of `ranks` are balls in the labels' buckets. The list is in rising lexicographic order of the
    paper's vectors, whose labels are the operands' as they come, ℓX ⊙ ℓY. Where the labels are too small for `ranks`
    calls it has the vectors with the most calls below that. Beyond MAX_VECTORS vectors only the longest labels are cut,
    as many of them as keep the list that short.
    """
    joined = join_order(einsum)
    found = _vectors(tuple(einsum.extents[k][1] for k in joined), ranks)
    place = [joined.index(k) for k in range(len(joined))]
    return [tuple(vector[k] for k in place) for vector in found]


def join_order(einsum: EinSum) -> tuple[int, ...]:
    """The positions of the labels in the order in which the operands have them; those that none has come last."""
    return tuple(
        einsum.labels.index(label) for label in unique(einsum.bounded_labels(), einsum.labels)
    )


def fullest(extents: Extents, ranks: int) -> Parts:
    """The cuts of labels with the largest product that divides `ranks`: the first label takes as much as it can."""
    ways = _ways(extents, ranks)
    left, found = max(ways[0]), []
    for extent, rest in zip(extents, ways[1:], strict=True):
        found.append(max(c for c in divisors(left) if c <= max(extent, 1) and left // c in rest))
        left //= found[-1]
    return tuple(found)


@cache
def divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)


@cache
def _vectors(extents: Extents, ranks: int) -> tuple[Parts, ...]:
    ways = _ways(extents, ranks)
    calls = max(ways[0])
    if ways[0][calls] > MAX_VECTORS:
        extents = _fewer_labels(extents, ranks, calls)
        ways = _ways(extents, ranks)
    found: list[tuple[Parts, int]] = [((), calls)]
    for extent, rest in zip(extents, ways[1:], strict=True):
        # Only what the labels to come can complete: no vector is begun in vain.
        cuts = {
            n: [c for c in divisors(n) if c <= max(extent, 1) and n // c in rest]
            for n in divisors(calls)
        }
        found = [((*head, cut), left // cut) for head, left in found for cut in cuts[left]]
    return tuple(head for head, _ in found)


def _ways(extents: Extents, ranks: int) -> list[dict[int, int]]:
    """For the labels from each position on: a product of parts → how many vectors have it."""
    ways = [{1: 1}]
    for extent in reversed(extents):
        cuts = [c for c in divisors(ranks) if c <= max(extent, 1)]
        here: dict[int, int] = {}
        for product, count in ways[-1].items():
            for cut in cuts:
                if ranks % (product * cut) == 0:
                    here[product * cut] = here.get(product * cut, 0) + count
        ways.append(here)
    return ways[::-1]


def _fewer_labels(extents: Extents, ranks: int, calls: int) -> Extents:
    """The extents with those of the shortest labels, which stay uncut, set to 1."""
    longest = sorted(range(len(extents)), key=lambda k: (-extents[k], k))
    best: Extents | None = None
    for count in range(1, len(extents) + 1):
        kept = longest[:count]
        fewer = tuple(extent if k in kept else 1 for k, extent in enumerate(extents))
        found = _ways(fewer, ranks)[0].get(calls, 0)
        if found and (best is None or found <= MAX_VECTORS):
            best = fewer
        if found > MAX_VECTORS:
            break
    return best or extents
