"""Lists of labels: projecting a vector of extents (paper, section 3), joining lists, new names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

# i·p stays below 2**53 for every index i and 4096 ranks: exact in any arithmetic the planner uses.
MAX_EXTENT = 2**39


def project(vector: Sequence[int], wanted: Sequence[str], labels: Sequence[str]) -> tuple[int, ...]:
    """The paper's b[wanted; labels]: the entry of `vector` for each wanted label."""
    return tuple(vector[labels.index(label)] for label in wanted)


def unique(*lists: Iterable[str]) -> tuple[str, ...]:
    """The paper's ⊙: the lists one after another, each label once, in order of first occurrence."""
    return tuple(dict.fromkeys(label for labels in lists for label in labels))


def fresh(stem: str, taken: Collection[str]) -> str:
    """`stem` if nobody has it, else stem_1, stem_2, …"""
    name, count = stem, 0
    while name in taken:
        count += 1
        name = f"{stem}_{count}"
    return name
