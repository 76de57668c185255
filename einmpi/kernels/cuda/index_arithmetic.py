"""Indices of a kernel that are arithmetic on loop counters, such as u[(d+64)%128].

Their ranges are known before the kernel runs, and some of them move along with packs.
"""

from __future__ import annotations

from collections.abc import Mapping

from einmpi.graph.index_arithmetic import Interval, interval_of
from einmpi.graph.scalar import Arg, Call, Const, Index, Scalar, rebuild, walk


def range_of(entry: Scalar, counters: Mapping[int, Interval]) -> Interval | None:
    """Return bounds of an index, given those of counters by their operands; None if unknown."""
    for node in walk(entry):
        if isinstance(node, Arg) and node.position not in counters:
            return None

    def leaf(node: Scalar) -> Scalar:
        return Index(str(node.position)) if isinstance(node, Arg) else node

    labels = {str(operand): interval for operand, interval in counters.items()}
    return interval_of(rebuild(entry, leaf), labels)


def moves_in_packs(entry: Scalar, counter: int, first: int, pack: int) -> bool:
    """Tell whether an index grows by 1 inside of a pack, and begins at a multiple of its size.

    `counter` is the operand that counts the lane, from `first` on, and the index depends on nothing
    else. `pack` is a power of two.
    """
    match entry:
        case Arg(position):
            return position == counter and first % pack == 0
        case Call("+", (moved, Const(int(number)))) | Call("+", (Const(int(number)), moved)):
            pass
        case Call("-", (moved, Const(int(number)))):
            pass
        case Call("%", (moved, Const(int(number)))) if number > 0:
            pass
        case _:
            return False
    return number % pack == 0 and moves_in_packs(moved, counter, first, pack)
