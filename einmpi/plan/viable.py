"""The partitionings of an EinSum that make exactly as many kernel calls as there are ranks (paper, sections 6, 8.1)."""

from __future__ import annotations

from functools import cache

from einmpi.graph.einsum import EinSum

Parts = tuple[int, ...]  # of each label, in the order of EinSum.labels; or of each dimension of a tensor

MAX_VECTORS = 8192  # of one EinSum; all of them for 6 labels at 4096 ranks


def viable(einsum: EinSum, ranks: int) -> list[Parts]:
    """Every way to cut the labels into exactly `ranks` kernel calls, no label into more parts than its extent.

    The prime factors of `ranks` are balls in the labels' buckets. The list is in falling lexicographic order: the first
    label is cut most first. Where the labels are too small for `ranks` calls it has the vectors with the most calls
    below that. Beyond MAX_VECTORS vectors only the longest labels are cut, as many as keep the list that short.
    """
    return list(vectors(tuple(extent for _, extent in einsum.extents), ranks))


@cache
def vectors(extents: tuple[int, ...], ranks: int) -> tuple[Parts, ...]:
    """`viable` for labels of these extents."""
    ways = _ways(extents, ranks)
    calls = max(ways[0])
    if ways[0][calls] > MAX_VECTORS:
        extents = _shortened(extents, ranks, calls)
        ways = _ways(extents, ranks)
    found: list[tuple[Parts, int]] = [((), calls)]
    for extent, rest in zip(extents, ways[1:], strict=True):
        cuts = [c for c in reversed(_divisors(ranks)) if c <= max(extent, 1)]
        found = [((*head, c), left // c) for head, left in found for c in cuts if left % c == 0 and left // c in rest]
    return tuple(head for head, _ in found)


def first_vector(extents: tuple[int, ...], ranks: int) -> Parts:
    """The first of `vectors`, without making the others: the first label takes as much as it can."""
    ways = _ways(extents, ranks)
    left, found = max(ways[0]), []
    for extent, rest in zip(extents, ways[1:], strict=True):
        fits = (c for c in _divisors(left) if c <= max(extent, 1) and left // c in rest)
        found.append(max(fits))
        left //= found[-1]
    return tuple(found)


def _ways(extents: tuple[int, ...], ranks: int) -> list[dict[int, int]]:
    """For the labels from each position on: a product of parts → how many vectors have it."""
    ways = [{1: 1}]
    for extent in reversed(extents):
        cuts = [c for c in _divisors(ranks) if c <= max(extent, 1)]
        here: dict[int, int] = {}
        for product, count in ways[-1].items():
            for cut in cuts:
                if ranks % (product * cut) == 0:
                    here[product * cut] = here.get(product * cut, 0) + count
        ways.append(here)
    return ways[::-1]


def _shortened(extents: tuple[int, ...], ranks: int, calls: int) -> tuple[int, ...]:
    """The extents with those of the shortest labels, which stay uncut, set to 1."""
    longest = sorted(range(len(extents)), key=lambda k: (-extents[k], k))
    best = extents
    for count in range(1, len(extents)):
        kept = set(longest[:count])
        fewer = tuple(extent if k in kept else 1 for k, extent in enumerate(extents))
        found = _ways(fewer, ranks)[0].get(calls, 0)
        if found and (found <= MAX_VECTORS or best is extents):
            best = fewer
        if found > MAX_VECTORS:
            break
    return best


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)
