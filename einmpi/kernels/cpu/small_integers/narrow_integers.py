"""Integers whose values are known to be small are computed in small dtypes, with the same values.

A vector holds more of them, and processors convert them to floats faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from einmpi.graph.index_arithmetic import Interval, interval_of_call
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Arg, Call, Const, Scalar
from einmpi.kernels.loop_nest import IndexedArray
from einmpi.kernels.scalar_text import kind_of

_DTYPES = ("uint8", "int8", "int16", "int32")  # the first that has room is taken
_MOST_BITS = 30  # of numbers that are shifted to the left


def narrowed(function: Scalar, operands: Sequence[IndexedArray]) -> Scalar:
    """Return ⊗ with the same values and dtype, its integers computed in the smallest dtypes."""
    types = [operand.dtype for operand in operands]

    def same(node: Scalar, changed: Scalar) -> Scalar:
        """Return what a node has become in the node's own dtype."""
        dtype = kind_of(node, types)
        if isinstance(node, Const) or kind_of(changed, types) == dtype:
            return changed
        return Call(np.dtype(dtype).name, (changed,))

    def narrow(node: Scalar) -> tuple[Scalar, Interval | None]:
        if isinstance(node, Arg):
            return node, _interval_of_operand(operands[node.position])
        if isinstance(node, Const):
            return node, (node.value, node.value) if type(node.value) is int else None
        assert isinstance(node, Call)
        found = [narrow(arg) for arg in node.args]
        intervals = [interval for _, interval in found if interval is not None]
        record = OPERATIONS[node.op]
        if record.is_cast and len(intervals) == 1:
            interval = intervals[0] if _fits(intervals, node.op) else None
            return Call(node.op, (found[0][0],)), interval
        dtype = np.dtype(kind_of(node, types))
        reached = _reached(node.op, intervals) if len(intervals) == len(found) else None
        if reached is not None and dtype.kind in "iu" and _fits([reached], dtype.name):
            for small in _DTYPES:
                if (
                    _fits([*intervals, reached], small)
                    and np.dtype(small).itemsize <= dtype.itemsize
                ):
                    args = []
                    for arg, _ in found:
                        is_small = isinstance(arg, Const) or kind_of(arg, types) == np.dtype(small)
                        args.append(arg if is_small else Call(small, (arg,)))
                    return Call(node.op, tuple(args)), reached
        args = [same(arg, changed) for arg, (changed, _) in zip(node.args, found, strict=True)]
        return Call(node.op, tuple(args)), None

    return same(function, narrow(function)[0])


def _interval_of_operand(operand: IndexedArray) -> Interval | None:
    if operand.first is not None:
        return operand.first, operand.first + operand.shape[0] - 1
    dtype = np.dtype(operand.dtype)
    if dtype.kind not in "iu" or dtype.itemsize > 2:
        return None
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def _fits(intervals: Sequence[Interval], dtype: str) -> bool:
    """Return whether a dtype of integers has room for all values."""
    if np.dtype(dtype).kind not in "iu":
        return False
    limits = np.iinfo(dtype)
    return all(limits.min <= low and high <= limits.max for low, high in intervals)


def _reached(op: str, intervals: Sequence[Interval]) -> Interval | None:
    """Return bounds of an operation on integers; None if they are not known."""
    if op in ("+", "-", "*", "neg"):
        return interval_of_call(op, list(intervals))
    if op not in ("&", "|", "^", "<<", ">>") or any(low < 0 for low, _ in intervals):
        return None
    (_, high), (least, most) = intervals
    if op == "&":
        return 0, min(high, most)
    if op in ("|", "^"):
        return 0, 2 ** max(high.bit_length(), most.bit_length()) - 1
    if most >= 8 or high.bit_length() > _MOST_BITS:
        return None
    return 0, high << most if op == "<<" else high >> least
