"""Lists of labels: projecting extents onto them (paper, section 3), joining them, new names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

# i·p stays below 2**53 for every index i and 4096 ranks: exact in any arithmetic of the planner.
MAX_EXTENT = 2**39
MAX_LABELS = 64  # of one EinSum, and dimensions of a tensor: numpy's limit
# Bytes of a tensor, and values of ⊗ that one rank computes, stay below it: they fit into 64 bits.
MAX_COUNT = 2**63


def project(vector: Sequence[int], wanted: Sequence[str], labels: Sequence[str]) -> tuple[int, ...]:
    """Return the paper's b[wanted; labels]: the entry of `vector` for each wanted label."""
    return tuple(vector[labels.index(label)] for label in wanted)


def unique(*lists: Iterable[str]) -> tuple[str, ...]:
    """Return the paper's ⊙: the lists joined, each label once, in order of first occurrence."""
    return tuple(dict.fromkeys(label for labels in lists for label in labels))


def fresh(stem: str, taken: Collection[str]) -> str:
    """Return `stem` if it is not taken, else the first of stem_1, stem_2, … that is not."""
    name = stem
    count = 0
    while name in taken:
        count += 1
        name = f"{stem}_{count}"
    return name
