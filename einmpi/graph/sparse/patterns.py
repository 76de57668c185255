"""Patterns: the sorted keys of what is stored, and their joins, unions and projections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.graph.scalar import unique
from einmpi.graph.sparse.coordinates import Keys, digest_of, positions

Positions = npt.NDArray[np.int64]  # of stored elements; -1 where nothing is stored


@dataclass(frozen=True, eq=False)
class Pattern:
    """Sorted keys, no two of them the same."""

    name: str  # of the first tensor that has it
    keys: Keys
    extents: tuple[int, ...]

    @property
    def stored(self) -> int:
        """The number of keys."""
        return len(self.keys[0])


class Patterns:
    """All patterns of a program. Equal ones are one."""

    def __init__(self) -> None:
        self.known: dict[tuple[tuple[int, ...], str], Pattern] = {}

    def of(self, name: str, keys: Keys, extents: Sequence[int]) -> Pattern:
        """Return the pattern of sorted keys."""
        key = (tuple(extents), digest_of(keys))
        return self.known.setdefault(key, Pattern(name, keys, tuple(extents)))


@dataclass(frozen=True)
class Iteration:
    """The combinations of keys that a vertex goes through.

    `at` has for operands the number of the stored element at each combination, -1 for none.
    """

    labels: tuple[str, ...]
    keys: Keys
    at: Mapping[int, Positions]

    @property
    def count(self) -> int:
        """The number of combinations."""
        return len(self.keys[0])

    def column(self, label: str) -> npt.NDArray[np.int64]:
        """Return the keys of a label."""
        return self.keys[self.labels.index(label)]

    def columns(self, labels: Sequence[str]) -> Keys:
        """Return the keys of some labels."""
        return tuple(self.column(label) for label in labels)

    def taken(self, order: npt.NDArray[np.int64]) -> Iteration:
        """Return the combinations at these places, in this order."""
        keys = tuple(column[order] for column in self.keys)
        return Iteration(self.labels, keys, {k: at[order] for k, at in self.at.items()})


def numbered(groups: Sequence[Keys], extents: Sequence[int]) -> list[npt.NDArray[np.int64]]:
    """Return numbers for the keys of several groups: equal keys have equal ones, in their order."""
    found = [positions(keys, extents) for keys in groups]
    if found[0] is not None:
        return found
    # Too many positions: number the keys that there are.
    columns = [np.concatenate(parts) for parts in zip(*groups, strict=True)]
    order = np.lexsort(columns[::-1])
    changes = np.zeros(len(order), bool)
    for column in columns:
        changes[1:] |= column[order][1:] != column[order][:-1]
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(changes)
    ends = np.cumsum([len(keys[0]) for keys in groups])
    return np.split(numbers, ends[:-1])


def stored_at(operand: int, pattern: Pattern, labels: Sequence[str]) -> Iteration:
    """Return an operand's own elements; of a repeated label only those on the diagonal."""
    kept = unique(labels)
    keep = np.ones(pattern.stored, bool)
    for label, column in zip(labels, pattern.keys, strict=True):
        keep &= column == pattern.keys[labels.index(label)]
    places = np.flatnonzero(keep)
    keys = tuple(pattern.keys[labels.index(label)][places] for label in kept)
    return Iteration(kept, keys, {operand: places})


def join(a: Iteration, b: Iteration, extent: Mapping[str, int]) -> Iteration:
    """Return all pairs of combinations that agree on the labels that both have."""
    shared = [label for label in a.labels if label in b.labels]
    extents = [extent[label] for label in shared]
    if shared:
        of_a, of_b = numbered([a.columns(shared), b.columns(shared)], extents)
    else:
        of_a, of_b = np.zeros(a.count, np.int64), np.zeros(b.count, np.int64)
    order = np.argsort(of_b, kind="stable")
    ordered = of_b[order]
    first = np.searchsorted(ordered, of_a, "left")
    partners = np.searchsorted(ordered, of_a, "right") - first
    from_a = np.repeat(np.arange(a.count), partners)
    begins = np.cumsum(partners) - partners
    from_b = order[np.arange(len(from_a)) + np.repeat(first - begins, partners)]
    left, right = a.taken(from_a), b.taken(from_b)
    added = tuple(label for label in b.labels if label not in a.labels)
    keys = left.keys + right.columns(added)
    return Iteration(a.labels + added, keys, {**left.at, **right.at})


def union(a: Iteration, b: Iteration, extent: Mapping[str, int]) -> Iteration:
    """Return the combinations that one of two iterations over the same labels has.

    Which elements are stored there has to be looked up.
    """
    columns = [a.keys, b.columns(a.labels)]
    both = tuple(np.concatenate(parts) for parts in zip(*columns, strict=True))
    keys, _ = projected(both, [extent[label] for label in a.labels])
    return Iteration(a.labels, keys, {})


def projected(keys: Keys, extents: Sequence[int]) -> tuple[Keys, npt.NDArray[np.int64]]:
    """Return keys sorted, each once, and the place of each of the given ones among them."""
    (numbers,) = numbered([keys], extents)
    _, first, place = np.unique(numbers, return_index=True, return_inverse=True)
    return tuple(column[first] for column in keys), place.reshape(-1)


def looked_up(pattern: Pattern, wanted: Keys) -> Positions:
    """Return where keys are in a pattern, -1 for those that it does not have."""
    have, want = numbered([pattern.keys, wanted], pattern.extents)
    if not len(have):
        return np.full(len(want), -1, np.int64)
    place: Any = np.minimum(np.searchsorted(have, want), len(have) - 1)
    return np.where(have[place] == want, place, -1)


def projection(pattern: Pattern, dimensions: Sequence[int]) -> tuple[Keys, tuple[int, ...]]:
    """Return the keys of a pattern in some of its dimensions, and their extents."""
    extents = tuple(pattern.extents[dimension] for dimension in dimensions)
    keys, _ = projected(tuple(pattern.keys[dimension] for dimension in dimensions), extents)
    return keys, extents
