"""Minimum of a sum of tables over discrete variables, exactly: bucket elimination (planner, section 4)."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
MAX_CELLS = 1 << 25  # of one joined table
_CHUNK = 1 << 18  # cells joined at a time: stays in cache


class TooWide(Exception):
    """A joined table would have more than MAX_CELLS cells."""


@dataclass(frozen=True)
class Table:
    """Costs over the variables in `scope`; tables with the same key have the same costs."""

    scope: tuple[int, ...]
    costs: Ints
    key: int


@dataclass(frozen=True)
class Eliminated:
    """Costs over the remaining variables above `least`, where the minimum is, the key of these costs."""

    costs: Ints
    best: npt.NDArray[np.intp]
    key: int
    least: int


@dataclass
class Memo:
    """Eliminations done before: repeated layers have equal tables, and cost nothing the second time."""

    numbers: dict[object, int] = field(default_factory=dict)
    results: dict[object, Eliminated] = field(default_factory=dict)
    cells: int = 0  # joined so far: a measure of work that does not depend on the machine

    def number(self, key: object) -> int:
        """A small number for the key of a table."""
        return self.numbers.setdefault(key, len(self.numbers))


def minimize(sizes: Sequence[int], tables: Sequence[Table], memo: Memo | None = None) -> tuple[int, list[int]]:
    """(the least sum, the value of every variable that reaches it). Ties go to the smallest value."""
    memo = memo or Memo()
    buckets: list[dict[int, Table]] = [{} for _ in sizes]
    total = 0
    count = 0

    def add(table: Table) -> None:
        nonlocal count
        for variable in table.scope:
            buckets[variable][count] = table
        count += 1

    for table in tables:
        add(table)

    def width(variable: int) -> int:
        joined = {other for table in buckets[variable].values() for other in table.scope} | {variable}
        cells = 1
        for other in joined:
            cells *= sizes[other]
        return cells

    queue = [(width(variable), variable) for variable in range(len(sizes))]
    heapq.heapify(queue)
    done = [False] * len(sizes)
    steps: list[tuple[int, tuple[int, ...], npt.NDArray[np.intp]]] = []
    while queue:
        cells, variable = heapq.heappop(queue)
        if done[variable]:
            continue
        if (now := width(variable)) != cells:
            heapq.heappush(queue, (now, variable))
            continue
        if cells > MAX_CELLS:
            raise TooWide
        done[variable] = True
        joined = list(buckets[variable].items())
        scope = tuple(sorted({other for _, table in joined for other in table.scope} - {variable}))
        result = _eliminate(variable, scope, [table for _, table in joined], sizes, memo)
        total += result.least
        steps.append((variable, scope, result.best))
        for number, table in joined:
            for other in table.scope:
                buckets[other].pop(number, None)
        add(Table(scope, result.costs, result.key))
        for other in scope:
            heapq.heappush(queue, (width(other), other))
    values = [0] * len(sizes)
    for variable, scope, best in reversed(steps):
        values[variable] = int(best[tuple(values[other] for other in scope)])
    return total, values


def _eliminate(
    variable: int, scope: tuple[int, ...], tables: Sequence[Table], sizes: Sequence[int], memo: Memo
) -> Eliminated:
    """The sum of the tables, minimised over `variable`, and where the minimum is."""
    place: Mapping[int, int] = {other: k for k, other in enumerate((*scope, variable))}
    key = tuple(sorted((table.key, *(place[v] for v in table.scope)) for table in tables))
    found = memo.results.get(key)
    if found is not None:
        return found
    shape = tuple(sizes[v] for v in (*scope, variable))
    aligned = [_align(table, place, len(shape)) for table in tables]
    outer, inner = (shape[0], int(np.prod(shape[1:], dtype=np.int64))) if scope else (1, shape[-1])
    memo.cells += outer * inner
    step = max(1, _CHUNK // max(1, inner))
    least, where = [], []
    for start in range(0, outer, step) if scope else [0]:
        total: Ints = np.zeros((1,) * len(shape), np.int64)
        for table in aligned:
            part = table[start : start + step] if scope and table.shape[0] > 1 else table
            total = total + part
        if scope:
            total = np.broadcast_to(total, (min(step, outer - start), *shape[1:]))
        else:
            total = np.broadcast_to(total, shape)
        index = total.argmin(axis=-1)
        where.append(index)
        least.append(np.take_along_axis(total, index[..., None], axis=-1)[..., 0])
    join = np.concatenate if scope else (lambda pieces: pieces[0])
    costs = join(least)
    lowest = int(costs.min())
    costs = costs - lowest
    # Above their minimum, costs soon repeat from layer to layer: the key is what they are, not how they came about.
    content = memo.number((costs.shape, blake2b(costs.tobytes()).digest()))
    memo.results[key] = Eliminated(costs, join(where), content, lowest)
    return memo.results[key]


def _align(table: Table, place: Mapping[int, int], ndim: int) -> Ints:
    """The table with one axis for each variable of the joined scope."""
    order = sorted(range(len(table.scope)), key=lambda k: place[table.scope[k]])
    costs = table.costs.transpose(order)
    shape = [1] * ndim
    for k, source in enumerate(order):
        shape[place[table.scope[source]]] = costs.shape[k]
    return costs.reshape(shape)
