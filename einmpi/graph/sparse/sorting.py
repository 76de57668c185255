"""Keys in order: which are sorted already, the order that sorts others, and where keys are."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.kernels.cpu.key_loops import Column as Column
from einmpi.kernels.cpu.key_loops import key_dtype as key_dtype
from einmpi.kernels.cpu.key_loops import taken

Keys: TypeAlias = tuple[Column, ...]  # unsigned, of 32 bits if they fit
_MOST_NUMBERED = 2**62  # positions that have a number in int64
_BLOCK = 2**14  # keys that are compared at a time, so that temporaries stay in the cache
_MOST_NUMBERS = 4  # for each key that there is, of tables by number


def positions(keys: Keys, extents: Sequence[int]) -> Any:
    """Return a number for each position, in the order of the positions; None if it is too great."""
    if prod(extents) >= _MOST_NUMBERED:
        return None
    if len(keys) == 1:
        return keys[0]
    numbers = np.zeros(len(keys[0]) if keys else 0, np.int64)
    for column, extent in zip(keys, extents, strict=True):
        numbers *= extent
        numbers += column
    return numbers


def numbered(groups: Sequence[Keys], extents: Sequence[int]) -> list[Column]:
    """Return numbers for the keys of several groups: equal keys have equal ones, in their order."""
    found = [positions(keys, extents) for keys in groups]
    if found[0] is not None:
        return found
    # Too many positions: number the keys that there are.
    return few_numbers(groups, extents, [len(keys[0]) for keys in groups])[0]


def few_numbers(
    groups: Sequence[Keys], extents: Sequence[int], counts: Sequence[int]
) -> tuple[list[Column], int]:
    """Return numbers for so many keys of groups, in their order, and how many there may be.

    Equal keys have equal numbers. There are few for each key.
    """
    if not extents:
        return [np.zeros(count, np.uint32) for count in counts], 1
    total = sum(counts)
    if prod(extents) <= _MOST_NUMBERS * total:
        dtype = key_dtype(prod(extents))
        found = [numbers.astype(dtype, copy=False) for numbers in numbered(groups, extents)]
        return found, prod(extents)
    columns = [np.concatenate(parts) for parts in zip(*groups, strict=True)]
    order = sorting(columns)
    numbers = _counted(columns, np.arange(total) if order is None else order)
    return np.split(numbers.astype(key_dtype(total)), np.cumsum(counts)[:-1]), total


def _counted(columns: Sequence[Column], order: Column) -> Column:
    """Return how many different keys come before each one, given the order that sorts them."""
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(is_first([column[order] for column in columns], len(order))) - 1
    return numbers


def sorting(columns: Sequence[Column]) -> Column | None:
    """Return the order that sorts keys, equal ones as they are given; None if they are sorted."""
    return None if not columns or are_sorted(columns)[0] else sorting_order(columns)


def sorting_order(columns: Sequence[Column]) -> Column:
    """Return the order that sorts keys, equal ones as they are given."""
    count = len(columns[0])
    if count >= 2**32 or any(column.dtype != np.uint32 for column in columns):
        return np.lexsort(columns[::-1])
    # numpy sorts numbers much faster than it finds the order that sorts them: the place of each key
    # becomes the low half of a number.
    order: Column = np.arange(count, dtype=np.uint32)
    for column in reversed(columns):
        numbers = taken(column, order).astype(np.uint64)
        numbers <<= 32
        numbers |= np.arange(count, dtype=np.uint32)
        numbers.sort()
        places = numbers.astype(np.uint32)
        del numbers  # before there are the next ones
        order = taken(order, places)
    return order


def are_sorted(columns: Sequence[Column]) -> tuple[bool, bool]:
    """Return whether keys are sorted, and if they are whether no two of them are the same."""
    are_different = True
    last = len(columns[0]) - 1
    for start in range(0, last, _BLOCK):
        here = slice(start, min(start + _BLOCK, last))
        after = slice(here.start + 1, here.stop + 1)
        same: Any = True
        for column in columns:
            if (same & (column[after] < column[here])).any():
                return False, False
            same = same & (column[after] == column[here])
        are_different = are_different and not same.any()
    return True, are_different


def is_first(columns: Sequence[Column], count: int) -> npt.NDArray[np.bool_]:
    """Return for sorted keys which differ from those before them."""
    found = np.zeros(count, bool)
    found[:1] = True
    for column in columns:
        found[1:] |= column[1:] != column[:-1]
    return found


def are_equal(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Return whether lists are the same, of one dtype. Most that differ do so in a few places."""
    if a is b or a.dtype != b.dtype or a.shape != b.shape:
        return a is b
    some = slice(None, None, len(a) // _BLOCK + 1)
    return np.array_equal(a[some], b[some]) and np.array_equal(a, b)
