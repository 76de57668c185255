"""Patterns: the sorted keys of what is stored, and their joins, unions and projections.

Ranks cut stored elements into equal blocks, as they cut all else. If the elements of each block of
rows make up a block, the rest of a product with a vector is where its rows are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from einmpi.graph.scalar import unique
from einmpi.graph.sparse.coordinates import Blocks, blocks_by
from einmpi.graph.sparse.sorting import (
    Column,
    Keys,
    are_equal,
    are_sorted,
    few_numbers,
    is_first,
    key_dtype,
    numbered,
    sorting,
)
from einmpi.kernels.cpu.key_loops import count_pairs, list_pairs, order_by, run_loop, taken

Positions = Column  # of stored elements; -1 where nothing is stored


@dataclass(frozen=True, eq=False)
class Pattern:
    """Sorted keys, no two of them the same."""

    name: str  # of the first tensor that has it
    keys: Keys
    extents: tuple[int, ...]
    blocks: Blocks

    @property
    def stored(self) -> int:
        """The number of keys."""
        return len(self.keys[0])


class Patterns:
    """All patterns of a program, for so many ranks. Equal ones are one."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.known: list[Pattern] = []

    def of(self, name: str, keys: Keys, extents: Sequence[int]) -> Pattern:
        """Return the pattern of sorted keys."""
        for known in self.known:
            if known.extents == tuple(extents) and known.stored == len(keys[0]):
                pairs = zip(known.keys, keys, strict=True)
                if all(are_equal(a, b) for a, b in pairs):
                    return known
        blocks = blocks_by(keys[0], extents[0], self.ranks)
        self.known.append(Pattern(name, keys, tuple(extents), blocks))
        return self.known[-1]


@dataclass(frozen=True, eq=False)
class Part:
    """The keys of the stored elements of some operands, or of none, by label.

    `at` has for each combination the number of its element; None if these are the combinations.
    """

    keys: Mapping[str, Column]
    operands: tuple[int, ...] = ()
    at: Column | None = None

    @property
    def count(self) -> int:
        """The number of combinations."""
        return len(next(iter(self.keys.values())) if self.at is None else self.at)

    def column(self, label: str) -> Column:
        """Return the keys of a label at all combinations."""
        return self.keys[label] if self.at is None else taken(self.keys[label], self.at)

    def taken(self, order: Column) -> Part:
        """Return the combinations at these places, in this order."""
        return replace(self, at=order if self.at is None else taken(self.at, order))


@dataclass(frozen=True, eq=False)
class Iteration:
    """The combinations of keys that a vertex goes through: elements of several parts.

    `found` has for operands of no part the number of the stored element at each combination, -1
    for none. If the combinations are sorted by some `goals`, `result` has the number of that of
    each of them, and `begin` the first one of each goal. Ranks share the combinations by `blocks`;
    if these are blocks of a label's keys, it is `divided`. They may be known to be sorted by all
    labels, in the order of these.
    """

    labels: tuple[str, ...]
    parts: tuple[Part, ...]
    found: Mapping[int, Positions] = field(default_factory=dict)
    goals: tuple[str, ...] | None = None
    result: Column | None = None
    begin: Column | None = None
    blocks: Blocks = field(default=Blocks((0, 0)))
    divided: str | None = None
    is_sorted: bool = False

    @property
    def count(self) -> int:
        """The number of combinations."""
        return self.parts[0].count if self.parts else 0

    @property
    def operands(self) -> tuple[int, ...]:
        """The operands whose elements are known."""
        return (*(k for part in self.parts for k in part.operands), *self.found)

    def has_some(self, operand: int) -> bool:
        """Return whether an operand has a stored element at some combination."""
        if operand in self.found:
            return bool((self.found[operand] >= 0).any())
        return self.count > 0

    def is_at_all(self, operand: int) -> bool:
        """Return whether an operand has a stored element at all combinations."""
        return operand not in self.found or bool((self.found[operand] >= 0).all())

    def at(self, operand: int) -> Column | None:
        """Return the stored element at each combination; None if it has their number."""
        for part in self.parts:
            if operand in part.operands:
                return part.at
        return self.found[operand]

    def column(self, label: str) -> Column:
        """Return the keys of a label."""
        return next(part.column(label) for part in self.parts if label in part.keys)

    def columns(self, labels: Sequence[str]) -> Keys:
        """Return the keys of some labels."""
        return tuple(self.column(label) for label in labels)

    def taken(self, order: Column) -> Iteration:
        """Return the combinations at these places, in this order."""
        parts = tuple(part.taken(order) for part in self.parts)
        return Iteration(self.labels, parts, {k: at[order] for k, at in self.found.items()})

    def sorted_by(self, labels: tuple[str, ...]) -> Iteration:
        """Return the combinations sorted by some labels, and with the numbers of these goals."""
        if self.goals == labels:
            return self
        columns = self.columns(labels)
        is_sorted = self.is_sorted and labels == self.labels[: len(labels)]
        order = None if is_sorted else sorting(columns)
        if order is not None:
            columns = tuple(taken(column, order) for column in columns)
        firsts = is_first(columns, self.count)
        result = np.cumsum(firsts, dtype=key_dtype(self.count))
        result -= 1
        found = self if order is None else self.taken(order)
        return replace(found, goals=labels, result=result, begin=np.flatnonzero(firsts))

    def distinct(self) -> Keys:
        """Return the goals by which the combinations are sorted, each once."""
        assert self.goals is not None and self.begin is not None
        return self.taken(self.begin).columns(self.goals)


def over_keys(labels: Sequence[str], keys: Keys, operands: tuple[int, ...] = ()) -> Iteration:
    """Return the combinations that are some keys, where operands store their elements."""
    return Iteration(tuple(labels), (Part(dict(zip(labels, keys, strict=True)), operands),))


def divided(
    iteration: Iteration, extent: Mapping[str, int], ranks: int, most_uneven: float
) -> Iteration:
    """Return an iteration in blocks: by the first label whose keys are sorted."""
    blocks = Blocks((0, iteration.count))
    if ranks == 1:
        return replace(iteration, blocks=blocks)
    for label in iteration.labels:
        column = iteration.column(label)
        if are_sorted([column])[0]:
            blocks = blocks_by(column, extent[label], ranks, most_uneven)
            is_divided = blocks.length is not None
            return replace(iteration, blocks=blocks, divided=label if is_divided else None)
    return replace(iteration, blocks=blocks)


class Parts(NamedTuple):
    """Parts of results, one for each rank that some combinations of a result are on.

    `of` has for each combination the number of its part. They lie in `blocks`, and each part is in
    the block of its rank. `results` goes through the parts, in the order of the results. So many
    `elsewhere` are on other ranks than their results.
    """

    of: Positions
    blocks: Blocks
    results: Iteration
    elsewhere: int


def parts_of(
    iteration: Iteration, labels: tuple[str, ...], goals: Keys, extents: Sequence[int], ranks: int
) -> Parts:
    """Return the parts of results, given to which result each combination goes."""
    keys, of = projected((iteration.blocks.blocks_of_elements(ranks), *goals))
    rank, *own = keys
    starts = np.searchsorted(rank, np.arange(ranks + 1))
    blocks = Blocks(tuple(starts.tolist()), int(np.diff(starts).max()))
    results = over_keys(labels, tuple(own), (0,))
    elsewhere = int((own[0] * np.int64(ranks) // extents[0] != rank).sum())
    return Parts(of, blocks, results.taken(np.lexsort((rank, *own[::-1]))), elsewhere)


def stored_at(operand: int, pattern: Pattern, labels: Sequence[str]) -> Iteration:
    """Return an operand's own elements; of a repeated label only those on the diagonal."""
    kept = unique(labels)
    keys = tuple(pattern.keys[labels.index(label)] for label in kept)
    whole = over_keys(kept, keys, (operand,))
    if len(kept) == len(labels):
        return replace(whole, is_sorted=True)
    keep = np.ones(pattern.stored, bool)
    for label, column in zip(labels, pattern.keys, strict=True):
        keep &= column == whole.column(label)
    return whole.taken(np.flatnonzero(keep))


def join(
    a: Iteration, b: Iteration, extent: Mapping[str, int], goals: tuple[str, ...] | None = None
) -> Iteration:
    """Return all pairs of combinations that agree on the labels that both have.

    They are sorted by some goals, if those that one of the two has come first.
    """
    same = at_same_keys(a, b)
    if same is not None:
        return same
    labels = unique(a.labels, b.labels)
    if goals is None:
        goals = labels
    if not _begin(goals, a) and _begin(goals, b):
        a, b = b, a
    own = tuple(label for label in goals if label in a.labels)
    rest = tuple(label for label in goals if label not in a.labels)
    a = a.sorted_by(own)
    left, right, result, begin = _pairs(a, b, rest, extent)
    found = {k: taken(at, left) for k, at in a.found.items()}
    found.update({k: taken(at, right) for k, at in b.found.items()})
    parts = [part.taken(left) for part in a.parts] + [part.taken(right) for part in b.parts]
    return Iteration(labels, tuple(parts), found, own + rest, result, begin)


def _pairs(
    a: Iteration, b: Iteration, rest: Sequence[str], extent: Mapping[str, int]
) -> tuple[Column, Column, Column, Column]:
    """Return the pairs of combinations that agree, by the goals of `a` and then the rest of `b`.

    The combinations of `a`, those of `b`, the numbers of results, and the first pair of each.
    """
    assert a.result is not None and a.begin is not None
    shared = [label for label in a.labels if label in b.labels]
    shared_keys = [each.columns(shared) for each in (a, b)]
    extents = [extent[label] for label in shared]
    (of_a, of_b), numbers = few_numbers(shared_keys, extents, [a.count, b.count])
    (key,), keys = few_numbers([b.columns(rest)], [extent[label] for label in rest], [b.count])
    ends = np.zeros(len(a.begin) + 1, np.int64)
    count = np.zeros(numbers, key_dtype(b.count))
    run_loop(count_pairs, (a.result, of_a, of_b), (count, ends), a.count + b.count)
    pairs = int(ends[-1])
    dtype = key_dtype(pairs)
    place = ends[:-1].astype(dtype)
    left = np.empty(pairs, key_dtype(a.count))
    right = np.empty(pairs, key_dtype(b.count))
    result, begin = np.empty((2, pairs), dtype)
    starts, order = order_by(of_a, numbers)
    of_left = starts, order, taken(a.result, order)
    _, right_order = order_by(key, keys)
    given = (*of_left, right_order, of_b, key)
    run_loop(list_pairs, given, (place, left, right, result, begin), pairs)
    return left, right, result, begin[: int(result[-1]) + 1 if pairs else 0].copy()


def _begin(goals: Sequence[str], a: Iteration) -> bool:
    """Return whether those of some goals that an iteration has come first."""
    is_own = [label in a.labels for label in goals]
    return is_own == sorted(is_own, reverse=True)


def at_same_keys(a: Iteration, b: Iteration) -> Iteration | None:
    """Return two iterations as one, if they are the elements of tensors with one pattern."""
    if len(a.parts) != 1 or len(b.parts) != 1 or a.found or b.found:
        return None
    left, right = a.parts[0], b.parts[0]
    if left.at is not None or right.at is not None or len(a.labels) != len(b.labels):
        return None
    if any(left.keys[label] is not right.keys.get(label) for label in left.keys):
        return None
    return replace(a, parts=(replace(left, operands=left.operands + right.operands),))


def union(a: Iteration, b: Iteration) -> Iteration:
    """Return the combinations that one of two iterations over the same labels has.

    Which elements are stored there has to be looked up, but for those of one part alone.
    """
    same = at_same_keys(a, b)
    if same is not None:
        return same
    both = zip(a.columns(a.labels), b.columns(a.labels), strict=True)
    keys, place = projected(tuple(np.concatenate(parts) for parts in both))
    found = {}
    for each, own in ((a, place[: a.count]), (b, place[a.count :])):
        if len(each.parts) == 1:
            for operand in each.operands:
                found[operand] = np.full(len(keys[0]), -1, np.int64)
                at = each.at(operand)
                found[operand][own] = np.arange(each.count) if at is None else at
    return Iteration(a.labels, over_keys(a.labels, keys).parts, found)


def projected(keys: Keys) -> tuple[Keys, Column]:
    """Return keys sorted, each once, and the place of each of the given ones among them."""
    labels = tuple(str(dimension) for dimension in range(len(keys)))
    ordered = over_keys(labels, keys).sorted_by(labels)
    order = ordered.parts[0].at
    assert ordered.result is not None
    if order is None:
        return ordered.distinct(), ordered.result
    place = np.empty_like(ordered.result)
    place[order] = ordered.result
    return ordered.distinct(), place


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
    keys = tuple(pattern.keys[dimension] for dimension in dimensions)
    if tuple(dimensions) != tuple(range(len(pattern.keys))):
        keys, _ = projected(keys)
    return keys, extents
