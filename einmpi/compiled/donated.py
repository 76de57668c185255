"""Inputs that a caller gives away: a compiled step may write its results over them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy
from typing import Any

import numpy as np

from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.given_inputs import is_array
from einmpi.kernels.cuda.driver import is_device_array


def take_donated(
    names: Collection[str], inputs: Mapping[str, Any], given: dict[str, Any]
) -> set[str]:
    """Take the DistArrays among these inputs from the caller; return which can be written over.

    `inputs` are those of the caller, `given` the same as they are used.
    """
    overwritable = _overwritable(names, given)
    for name in names:
        array = inputs.get(name)
        if not isinstance(array, DistArray):
            continue
        for used_name, used in given.items():
            if used is array:
                given[used_name] = copy(array)
        array._give_away()
    return overwritable


def _overwritable(names: Collection[str], given: Mapping[str, Any]) -> set[str]:
    """Return which of these inputs can be written over, as they are given.

    These are DistArrays that share no memory with another input. Arrays and datasets stay as they
    are.
    """
    found = set()
    for name in names:
        array = given.get(name)
        if not isinstance(array, DistArray):
            continue
        others = [other for other_name, other in given.items() if other_name != name]
        if not any(_may_share_memory(array.local, other) for other in others):
            found.add(name)
    return found


def _may_share_memory(local: Any, other: Any) -> bool:
    """Return whether a block may share memory with another input."""
    if isinstance(other, DistArray):
        other = other.local
    if not is_array(other):
        return False
    if is_device_array(local) and is_device_array(other):
        return bool(local.data.mem.ptr == other.data.mem.ptr)
    if is_device_array(local) or is_device_array(other):
        return False
    return np.may_share_memory(local, other)
