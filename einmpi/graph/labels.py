"""Lists of labels: projecting extents onto them (paper, section 3), joining them, new names."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence

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
    return tuple(dict.fromkeys(itertools.chain(*lists)))


def unlike(name: str, taken: Container[str]) -> str:
    """Return a name, with as many underscores after it as make it unlike those taken."""
    while name in taken:
        name += "_"
    return name


class Names:
    """The names in use. None becomes free again, so each new one is found in constant time."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._next_number: dict[str, int] = {}  # of each stem; all smaller ones are taken

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    def add(self, name: str) -> None:
        """Note that a name is in use."""
        self._taken.add(name)

    def take_new(self, stem: str) -> str:
        """Take and return `stem` if it is free, else the first of stem_1, stem_2, … that is."""
        number = self._next_number.get(stem, 0)
        name = f"{stem}_{number}" if number else stem
        while name in self._taken:
            number += 1
            name = f"{stem}_{number}"
        self._next_number[stem] = number + 1
        self._taken.add(name)
        return name
