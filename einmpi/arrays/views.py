"""Views of DistArrays, as numpy has them: elements of another tensor that follow its changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from einmpi.arrays.dist_array import DistArray

Array: TypeAlias = npt.NDArray[Any]


class Link(NamedTuple):
    """How a view depends on the tensor that it was made of, which may be a view too."""

    read: Callable[[DistArray], DistArray]  # returns the elements; all ranks call it
    write: Callable[[DistArray, DistArray], None]  # replaces them in the tensor
    stored: Callable[[Array], Array]  # returns a view of an array that is stored as the tensor
    shares: bool = False  # whether the elements that are read are in the memory of the tensor


class View(DistArray):
    """Elements of another tensor: a slice, a transpose, a reshape, or several of these.

    On several ranks these elements may be on other ranks than in the other tensor, its base, so a
    view usually has a copy of them. What is written into it goes to the base. The base counts such
    changes, on all ranks alike, and a view that has missed one reads the base again when it is
    used next.

    Parameters
    ----------
    array : DistArray
        The tensor that it is made of. If it is a view, its own base becomes the base.
    link : Link
        How it depends on that tensor.
    key : object
        The key that selects it there, if a key does.
    """

    def __init__(self, array: DistArray, link: Link, key: Any = "no key") -> None:
        values = link.read(array)
        self._dtype = values.dtype
        self.layout = values.layout
        self.own_comm = values.own_comm
        self.base = array
        self.key = key
        self.links: tuple[Link, ...] = (link,)
        if isinstance(array, View):
            self.base = array.base
            self.key = "no key of the base"
            self.links = (*array.links, link)
        self.shares = all(each.shares for each in self.links)
        self._hold(values)

    @property
    def local(self) -> Array:
        """This rank's block, which all ranks read together after the base has changed."""
        self._update()
        return super().local

    @property
    def _is_current(self) -> bool:
        return self._changes == self.base._changes

    def _update(self) -> None:
        if self._is_given_away or self._is_current:
            return
        values = self.base
        for link in self.links:
            values = link.read(values)
        self._hold(values)

    def _hold(self, values: DistArray) -> None:
        """Have these elements, which are those of the base now."""
        self._local = values.local
        self._changes = self.base._changes
        if not self.shares and isinstance(self._local, np.ndarray):
            self._local.flags.writeable = False  # what is written there would be lost

    def write(self, values: DistArray) -> None:
        """Replace all elements, in the base."""
        *links, last_link = self.links
        parts = [self.base]
        for link in links:
            parts.append(link.read(parts[-1]))
        changed = parts.pop()
        last_link.write(changed, values)
        for link in reversed(links):
            part = parts.pop()
            if not link.shares:
                link.write(part, changed)
            changed = part
        self.base._count_change()
        self._hold(values)

    def __repr__(self) -> str:
        # No rank waits for others here: programs often print on one rank only.
        if self._is_current or self.is_alone():
            return super().__repr__()
        return f"DistArray(changed since it was read, shape={self.shape}, dtype={self.dtype})"


@contextmanager
def writing(array: DistArray) -> Iterator[DistArray]:
    """Yield a tensor whose block takes new elements of another one: itself, or a copy of a view.

    All ranks call it.
    """
    if isinstance(array, View) and not array.shares:
        if any(link.write is refuse_writing for link in array.links):
            refuse_writing(array, array)
        changed = array.copy()
        yield changed
        array.write(changed)
        return
    try:
        yield array
    finally:
        base = array.base if isinstance(array, View) else array
        base._count_change()


def refuse_writing(array: DistArray, values: DistArray) -> None:
    """Raise the error of numpy. It is the way to write into a view that is read-only."""
    raise ValueError("assignment destination is read-only")


def stored_as_numpy(view: View) -> Array:
    """Return an array with the strides that numpy's view would have, but without its elements."""
    base = view.base
    strides = [prod(base.shape[axis + 1 :]) * base.itemsize for axis in range(base.ndim)]
    stored = as_strided(np.empty((), base.dtype), base.shape, strides)
    for link in view.links:
        stored = link.stored(stored)
    return stored
