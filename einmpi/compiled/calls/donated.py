"""Inputs that a caller gives away: a compiled step may write its results over them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from einmpi.arrays.dist_array import DistArray
from einmpi.arrays.views import View
from einmpi.compiled.given_inputs import is_array
from einmpi.kernels.cuda.driver import is_device_array


def take_donated(
    names: Collection[str], inputs: Mapping[str, Any], given: dict[str, Any]
) -> set[str]:
    """Take the DistArrays among these inputs from the caller; return which can be written over.

    `inputs` are those of the caller, `given` the same as they are used.
    """
    overwritable = _overwritable(names, given)
    donated: dict[int, DistArray] = {}  # by identity
    for name in names:
        array = inputs.get(name)
        if isinstance(array, DistArray):
            donated[id(array)] = array
    for name, used in given.items():
        if id(used) in donated or isinstance(used, View):
            given[name] = DistArray(used.local, used.layout, used.own_comm)
    for array in donated.values():
        array._give_away()
    return overwritable


def _overwritable(names: Collection[str], given: Mapping[str, Any]) -> set[str]:
    """Return which of these inputs can be written over, as they are given.

    These are DistArrays that share no memory with another input. Arrays and datasets stay as they
    are, and so does what a view is a view of.
    """
    on_devices: Counter[int] = Counter()  # the addresses of all arrays that GPUs have
    # Arrays of the host by what owns their memory: others do not overlap with them.
    on_host: dict[int, list[tuple[str, Any]]] = {}
    borrowed: list[tuple[str, Any]] = []  # arrays whose memory numpy does not own
    for name, array in given.items():
        block: Any = array.local if isinstance(array, DistArray) else array
        if is_device_array(block):
            on_devices[block.data.mem.ptr] += 1
        elif is_array(block):
            owner = _owner(block)
            if type(owner) is np.ndarray:
                on_host.setdefault(id(owner), []).append((name, block))
            else:
                borrowed.append((name, block))
    found = set()
    for name in names:
        array = given.get(name)
        if not isinstance(array, DistArray) or isinstance(array, View):
            continue
        own: Any = array.local
        if is_device_array(own):
            is_shared = on_devices[own.data.mem.ptr] > 1
        else:
            others = on_host.get(id(_owner(own)), []) + borrowed
            if type(_owner(own)) is not np.ndarray:
                others = [*itertools.chain(*on_host.values()), *borrowed]
            is_shared = False
            for other_name, block in others:
                if other_name != name and np.may_share_memory(own, block):
                    is_shared = True
        if not is_shared:
            found.add(name)
    return found


def _owner(array: Any) -> Any:
    """Return the array, or other object, whose memory an array uses."""
    while type(array) is np.ndarray and array.base is not None:
        array = array.base
    return array
