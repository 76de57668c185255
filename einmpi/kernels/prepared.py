"""Calls that are prepared once and then repeated: all that depends on shapes and strides alone is
worked out the first time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
# An EinSum on arrays of the shapes, strides and dtypes that it was prepared for: the operands, and
# the target. It keeps nothing from call to call, so that several threads may use it.
PreparedCall: TypeAlias = Callable[[Sequence[Array], Array], None]
ViewMaker: TypeAlias = Callable[[Array], Array]

MAX_PREPARED_CALLS = 4096

T = TypeVar("T")


class NumpyCall:
    """A prepared call of numpy's functions, in which floating-point errors are ignored.

    `bare` is the same call for those who ignore these errors for many calls at once, which takes
    less time. `bind` returns it for operands and a target that stay the same arrays.
    """

    def __init__(
        self,
        bare: PreparedCall,
        bind: Callable[[Sequence[Array], Array], Callable[[], Any]] | None = None,
    ) -> None:
        self.bare = bare
        self.bind = bind or (lambda operands, out: partial(bare, operands, out))

    def __call__(self, operands: Sequence[Array], out: Array) -> None:
        with np.errstate(all="ignore"):
            self.bare(operands, out)


def bare_call(call: PreparedCall) -> PreparedCall:
    """Return a prepared call for a caller who ignores floating-point errors."""
    return call.bare if isinstance(call, NumpyCall) else call


def bound_call(call: PreparedCall, operands: Sequence[Array], out: Array) -> PreparedCall:
    """Return a prepared call that computes with these arrays, whatever it is called with.

    The caller ignores floating-point errors.
    """
    if not isinstance(call, NumpyCall):
        return call
    compute = call.bind(operands, out)
    return lambda _operands, _out: compute()


class PreparedCalls:
    """Prepared calls by the object they belong to and a key.

    Objects are compared by identity: hashing an EinSum takes longer than a small kernel.
    """

    def __init__(self) -> None:
        self.entries: dict[tuple[int, Hashable], tuple[Any, Any]] = {}

    def get(self, owner: Any, key: Hashable, prepare: Callable[[], T]) -> T:
        """Return the call of an owner and a key; prepare it if there is none yet."""
        entry = self.entries.get((id(owner), key))
        if entry is None:
            call = prepare()
            if len(self.entries) >= MAX_PREPARED_CALLS:
                self.entries.clear()
            # Keep a reference to the owner, so that no other object gets the same id.
            entry = self.entries[id(owner), key] = owner, call
        found: T = entry[1]
        return found


def stored_as(arrays: Sequence[Array]) -> Hashable:
    """Return all that a prepared call depends on, for the arrays of a known step."""
    return tuple([(array.dtype, array.strides, array.flags.aligned) for array in arrays])


def view_maker(array: Array, view: Array) -> ViewMaker | None:
    """Return what makes the same view of other arrays, with the shape and strides of this one.

    Return None if there is no such function: the view is a copy, the array has gaps, or numpy has
    no buffer of its dtype.
    """
    if view is array or _is_same_view(array, view):
        return unchanged
    if not _has_buffer(array) or view.size == 0 or view.dtype != array.dtype:
        return None
    if not np.may_share_memory(array, view):
        return None
    shape = view.shape
    dtype = view.dtype
    strides = view.strides
    offset = address_of(view) - address_of(array)
    if view.size == array.size and array.reshape(shape).strides == strides:
        return methodcaller("reshape", shape)  # takes less time
    return lambda other: np.ndarray(shape, dtype, other, offset, strides)


def _has_buffer(array: Array) -> bool:
    """Return whether numpy can make other arrays in the memory of this one."""
    is_user_defined = array.dtype.isbuiltin == 2  # bfloat16, which numpy has no buffer of
    return not is_user_defined and array.flags.c_contiguous


def _is_same_view(array: Array, view: Array) -> bool:
    """Return whether two arrays have the same elements in the same places."""
    is_alike = view.shape == array.shape and view.strides == array.strides
    return is_alike and view.dtype == array.dtype and address_of(view) == address_of(array)


def address_of(array: Any) -> int:
    """Return the address of the first element of an array, or of what stands for one."""
    return int(array.__array_interface__["data"][0])


def unchanged(array: Array) -> Array:
    """Return an array as it is: the view of it that needs nothing to be made."""
    return array
