"""Lists of integers that never change, as the keys of stored elements: what is found out about them
once holds for every kernel and every call that reads them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import count
from typing import Any, TypeVar
from weakref import ref

import numpy.typing as npt

from einmpi.kernels.prepared import address_of

Array = npt.NDArray[Any]
T = TypeVar("T")

_NUMBERS = count(1)


class _FixedList:
    """A list that never changes, and what is known of it and of its parts."""

    def __init__(self, array: Array) -> None:
        self.number = next(_NUMBERS)
        key = id(array)
        self.array = ref(array, lambda _: _FIXED.pop(key, None))
        self.facts: dict[Hashable, Any] = {}


_FIXED: dict[int, _FixedList] = {}  # by the id of the array


def fix(array: Array) -> None:
    """Take note that nobody changes this array any more. It must have its own memory."""
    if id(array) not in _FIXED:
        _FIXED[id(array)] = _FixedList(array)


def identity_of(array: Array) -> Hashable | None:
    """Return what only arrays with the same elements have; None if this one may change."""
    found = _owner(array)
    return None if found is None else _identity(found, array)


def fact(array: Array, key: Hashable, find: Callable[[], T]) -> T:
    """Return what `find` finds out about a list that never changes: it is called once."""
    owner = _owner(array)
    assert owner is not None
    place = (_identity(owner, array), key)
    if place not in owner.facts:
        owner.facts[place] = find()
    found: T = owner.facts[place]
    return found


def is_within(array: Array, extent: int) -> bool:
    """Return whether a list never changes, and all its elements are indices below an extent."""
    if array.dtype.kind not in "iu" or not array.size or identity_of(array) is None:
        return False
    is_signed = array.dtype.kind == "i"
    if is_signed and fact(array, "least", lambda: int(array.min())) < 0:
        return False
    return greatest_of(array) < extent


def greatest_of(array: Array) -> int:
    """Return the greatest element of a list that never changes."""
    return fact(array, "greatest", lambda: int(array.max()))


def _owner(array: Array) -> _FixedList | None:
    """Return the list that an array is, or is a view of."""
    owner: Any = array
    while owner is not None:
        found = _FIXED.get(id(owner))
        if found is not None and found.array() is owner:
            return found
        owner = getattr(owner, "base", None)
    return None


def _identity(owner: _FixedList, array: Array) -> Hashable:
    if owner.array() is array:
        return owner.number
    return owner.number, address_of(array), array.shape, array.strides, array.dtype
