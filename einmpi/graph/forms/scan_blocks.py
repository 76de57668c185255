"""Scans in blocks: the expressions of totals of blocks and of scans inside of blocks, and how to
recognise them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.scalar import Arg, Call, Const, Index, IndexEntries, Number, Scalar


@dataclass(frozen=True)
class Blocks:
    """A dimension in blocks of nearly equal length: index i is in block ⌊i · count / extent⌋."""

    count: int
    extent: int

    @property
    def longest(self) -> int:
        """The number of indices in the longest block."""
        return -(-self.extent // self.count)

    def first(self, block: int) -> int:
        """Return the first index of a block."""
        return (block * self.extent + self.count - 1) // self.count

    def block_of(self, index: Scalar) -> Scalar:
        """Return the block of an index as an expression."""
        return Call("//", (Call("*", (index, Const(self.count))), Const(self.extent)))

    def first_of(self, block: Scalar) -> Scalar:
        """Return the first index of a block as an expression."""
        scaled = Call("*", (block, Const(self.extent)))
        rounded_up = Call("+", (scaled, Const(self.count - 1)))
        return Call("//", (rounded_up, Const(self.count)))


@dataclass(frozen=True)
class BlockTotals:
    """T[b] ← ⊕ of all values of block b. An operand's index may begin at a later one than 0."""

    blocks: Blocks
    block: str  # the label of blocks
    inside: str  # the aggregated label: positions inside of a block
    dimension: int  # of the operand: the one in blocks
    start: int  # the first index of this dimension that the operand has
    masked: Number  # takes the place of values after the end of a block


@dataclass(frozen=True)
class BlockedScan:
    """Y[i] ← ⊕ of the values of i's block up to i, and of the total of all blocks before it."""

    blocks: Blocks
    along: str
    inside: str
    dimension: int  # of the values: the one in blocks
    start: int  # the first index of this dimension that the operand has
    offset_dimension: int
    offset_start: int
    masked: Number  # takes the place of values after an index


# ---- expressions --------------------------------------------------------------------------------


def place_in_block(blocks: Blocks, block: str, inside: str) -> tuple[Scalar, Scalar]:
    """Return the index at a position inside of a block, and whether the block is that long.

    The index stays inside of the block in any case: a rank with a block needs nothing else.
    """
    first = blocks.first_of(Index(block))
    first_of_next = blocks.first_of(Call("+", (Index(block), Const(1))))
    place = Call("+", (first, Index(inside)))
    last = Call("-", (first_of_next, Const(1)))
    return Call("minimum", (place, last)), Call("<", (place, first_of_next))


def place_up_to(blocks: Blocks, along: str, inside: str) -> Scalar:
    return Call("+", (blocks.first_of(blocks.block_of(Index(along))), Index(inside)))


def position_up_to(blocks: Blocks, along: str, inside: str) -> Scalar:
    """Return the index at a position inside of an index's block, but no later than the index."""
    return Call("minimum", (place_up_to(blocks, along, inside), Index(along)))


def block_before(blocks: Blocks, along: str) -> Scalar:
    """Return the block before that of an index, the first one if there is none."""
    before = Call("-", (blocks.block_of(Index(along)), Const(1)))
    return Call("maximum", (before, Const(0)))


def value_up_to(
    blocks: Blocks, along: str, inside: str, joined: Scalar, value: Scalar, masked: Number
) -> Scalar:
    """Return what a scan aggregates at a position inside of the block of an index.

    `joined` is the first value of a block, aggregated with the total of all blocks before it.
    """
    is_up_to = Call("<=", (place_up_to(blocks, along, inside), Index(along)))
    is_first = Call("==", (Index(inside), Const(0)))
    has_offset = Call(">", (blocks.block_of(Index(along)), Const(0)))
    takes_offset = Call("&", (is_first, has_offset))
    taken = Call("where", (takes_offset, joined, value))
    return Call("where", (is_up_to, taken, Const(masked)))


# ---- recognising them ---------------------------------------------------------------------------


def recognise_totals(
    function: Scalar, operands: Sequence[IndexEntries], output: Sequence[str], inside: str
) -> BlockTotals | None:
    """Return what a vertex computes if that is the total of each block, else None."""
    match function:
        case Call("where", (Call("<", (Call("+", (first, Index())), _)), value, Const(masked))):
            pass
        case _:
            return None
    found = _blocks_and_number(first)
    if found is None or not isinstance(found[1], Index):
        return None
    blocks = found[0]
    block = found[1].label
    match value:
        case Arg(0):
            pass
        case Call(name, (Arg(0),)) if name in DTYPES:
            pass
        case _:
            return None
    position, is_inside = place_in_block(blocks, block, inside)
    expected = Call("where", (is_inside, value, Const(masked)))
    if len(operands) != 1 or function != expected or block not in output:
        return None
    lines = [label for label in output if label != block]
    place = _place_of(operands[0], position, lines)
    if place is None:
        return None
    dimension, start = place
    return BlockTotals(blocks, block, inside, dimension, start, masked)


def recognise_blocked_scan(
    function: Scalar,
    operands: Sequence[IndexEntries],
    output: Sequence[str],
    inside: str,
    aggregation: str,
) -> BlockedScan | None:
    """Return what a vertex computes if that is a scan in blocks, else None."""
    match function:
        case Call(
            "where",
            (
                Call("<=", (Call("+", (first, Index())), Index(along))),
                Call("where", (_, joined, value)),
                Const(masked),
            ),
        ):
            pass
        case _:
            return None
    found = _blocks_and_number(first)
    if found is None:
        return None
    blocks = found[0]
    if function != value_up_to(blocks, along, inside, joined, value, masked):
        return None
    match joined:
        case Call(name, (uncast,)) if name in DTYPES:
            pass
        case _:
            uncast = joined
    operation = AGGREGATIONS[aggregation].operation
    match uncast, value:
        case Call(op, (Arg(0), same)), (Arg(1) | Call("bool", (Arg(1),))):
            is_joined = op == operation and same == value
        case _:
            return None
    if not is_joined or len(operands) != 2 or along not in output:
        return None
    lines = [label for label in output if label != along]
    offset_place = _place_of(operands[0], block_before(blocks, along), lines)
    value_place = _place_of(operands[1], position_up_to(blocks, along, inside), lines)
    if offset_place is None or value_place is None:
        return None
    dimension, start = value_place
    offset_dimension, offset_start = offset_place
    return BlockedScan(
        blocks, along, inside, dimension, start, offset_dimension, offset_start, masked
    )


def _blocks_and_number(first: Scalar) -> tuple[Blocks, Scalar] | None:
    """Return the blocks, and the number of one, of whose first index this is the expression."""
    match first:
        case Call("//", (Call("+", (Call("*", (number, Const(int(extent)))), _)), Const(count))):
            if type(count) is int and count > 0:
                return Blocks(count, extent), number
    return None


def _place_of(
    index: IndexEntries, position: Scalar, lines: Sequence[str]
) -> tuple[int, int] | None:
    """Return the dimension that is indexed by a position, and the index at which it begins.

    All other dimensions must be those of the lines; else return None.
    """
    found = None
    others = []
    for dimension, entry in enumerate(index):
        match entry:
            case str():
                others.append(entry)
            case Call("-", (whole, Const(int(start)))) if whole == position:
                found = dimension, start
            case _ if entry == position:
                found = dimension, 0
            case _:
                return None
    if sorted(others) != sorted(lines):
        return None
    return found
