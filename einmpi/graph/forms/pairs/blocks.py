"""How the rows of a symmetric result are divided into blocks, of which some meet on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from einmpi.graph.arithmetic import call
from einmpi.graph.scalar import Const, Scalar

# The smallest difference covers of 1, 2, 3, … blocks, each without the 0 that it begins with:
# of 7 blocks it is 0, 1, 3. They were found by trying all sets in order of their size.
_COVERS = (
    ";1;1;1 2;1 2;1 3;1 3;1 2 4;1 2 4;1 2 5;1 2 5;1 3 7;1 3 9;1 2 3 7;1 2 3 7;1 2 5 8;1 2 4 12;"
    "1 2 5 11;1 2 6 9;1 2 3 6 10;1 4 14 16;1 2 3 7 11;1 2 3 7 11;1 2 3 7 15;1 2 3 8 12;"
    "1 2 5 9 15;1 2 5 13 22;1 4 15 20 22;1 2 3 4 9 14;1 2 3 4 9 19;1 3 8 12 18;1 2 3 7 11 19;"
    "1 2 3 6 16 27;1 2 3 7 12 20;1 2 3 8 12 21;1 2 5 12 14 20;1 2 4 10 15 22;1 2 3 4 8 14 23;"
    "1 2 4 13 18 33;1 2 3 4 9 14 24;1 2 3 4 9 15 25;1 2 3 4 9 15 25;1 2 3 4 10 15 26;"
    "1 2 3 6 16 27 38;1 2 3 5 12 18 26;1 2 3 6 18 25 38;1 2 3 5 16 22 40;1 2 5 9 20 26 36;"
    "1 2 5 24 33 36 44;1 3 8 17 28 32 38;1 2 5 11 18 30 38;1 2 3 4 6 14 21 30;1 2 3 4 7 21 29 44;"
    "1 2 3 4 9 15 21 31;1 2 3 4 6 19 26 47;1 2 3 4 11 16 33 39;1 3 13 32 36 43 52;"
    "1 2 3 7 21 33 37 50;1 2 3 6 13 21 35 44;1 2 4 9 15 25 30 42;1 2 3 7 15 25 36 45;"
    "1 2 4 10 32 39 46 51;1 2 6 8 20 38 41 54;1 2 5 14 16 34 42 59"
)
MOST_BLOCKS = 64


@cache
def difference_cover(blocks: int) -> tuple[int, ...]:
    """Return the fewest numbers whose differences, modulo `blocks`, are all numbers below it.

    0 is one of them, and half of an even number of blocks.
    """
    cover = (0, *map(int, _COVERS.split(";")[blocks - 1].split()))
    opposite = [number for number in cover if (number + blocks // 2) % blocks in cover]
    first = 0 if blocks % 2 else opposite[0]
    return tuple(sorted((number - first) % blocks for number in cover))


@cache
def pairs_by_distance(blocks: int) -> tuple[tuple[int, int], ...]:
    """Return for each distance up to half of the blocks two members of the cover that have it.

    Where that is possible one of them is 0: one of the two mirror images is then where a rank
    needs it.
    """
    cover = difference_cover(blocks)
    found = []
    for distance in range(blocks // 2 + 1):
        possible = []
        for first in cover:
            second = (first + distance) % blocks
            if second in cover:
                possible.append((first, second))
        found.append(min(possible, key=lambda pair: (0 not in pair, pair)))
    return tuple(found)


@dataclass(frozen=True)
class Division:
    """How the rows of a symmetric result are divided into blocks, and these into pieces.

    Blocks are consecutive rows if ranks cut them. Otherwise each rank has a piece of all blocks,
    and pieces are consecutive rows: piece 0 of all blocks, then piece 1 of all blocks, …
    """

    rows: int
    blocks: int
    pieces: tuple[int, ...]  # the lengths of the labels that number the pieces of a block
    pieces_first: bool
    # The aggregated label that is divided into so many parts, one for each rank of a group: their
    # sums of blocks on the diagonal are then packed. 1: ranks may cut any label.
    summed: str = ""
    sums: int = 1

    @property
    def parts(self) -> int:
        """The number of pieces of all blocks."""
        return prod(self.lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of the labels that number a piece, the slowest first."""
        if self.pieces_first:
            return (*self.pieces, self.blocks)
        return (self.blocks, *self.pieces)

    @property
    def lengths_of_block(self) -> tuple[int, ...]:
        """The lengths of the labels that number a row of a block."""
        return (*self.pieces, self.longest)

    @property
    def rows_of_block(self) -> int:
        """The rows of the longest block."""
        return prod(self.lengths_of_block)

    @property
    def fetched(self) -> tuple[int, ...]:
        """The blocks after its own that a rank fetches: none if it has a piece of all blocks."""
        return (0,) if self.pieces_first else difference_cover(self.blocks)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """For each distance the two blocks after its own of which a rank computes the pair."""
        if self.pieces_first:
            return tuple((0, distance) for distance in range(self.blocks // 2 + 1))
        return pairs_by_distance(self.blocks)

    @property
    def halves(self) -> bool:
        """Whether two ranks share each pair halfway around; if not, both compute it."""
        is_even = self.blocks % 2 == 0
        return is_even and prod(self.pieces) > 1 and self.longest > 1

    @property
    def longest(self) -> int:
        """The rows of the longest piece."""
        return -(-self.rows // self.parts)

    @property
    def fills(self) -> bool:
        """Whether ranks sum parts of blocks of unlike lengths: those are not summed piece by piece.

        Shorter pieces are filled with copies of their last row, which then do not move.
        """
        return self.sums > 1 and not self.pieces_first and self.rows % self.parts != 0

    @property
    def computed(self) -> Division:
        """How rows are divided where pairs are computed."""
        return replace(self, pieces=()) if self.fills else self

    def start(self, part: Scalar) -> Scalar:
        """Return the first row of a piece, given its number."""
        if self.rows % self.parts == 0:
            return times(part, self.longest)
        return over(plus(times(part, self.rows), self.parts - 1), self.parts)

    def row(self, block: Scalar, pieces: Sequence[Scalar], place: Scalar) -> Scalar:
        """Return the row at a place of a piece; in a piece that is shorter, the last row."""
        part = self.part(block, pieces)
        row = call("+", self.start(part), place)
        if self.rows % self.parts == 0:
            return row
        last = plus(self.start(plus(part, 1)), -1)
        return call("minimum", row, last)

    def part(self, block: Scalar, pieces: Sequence[Scalar]) -> Scalar:
        """Return the number of a piece of a block."""
        digits = (*pieces, block) if self.pieces_first else (block, *pieces)
        return with_digits(digits, self.lengths)

    def length(self, part: Scalar) -> Scalar:
        """Return the rows of a piece, given its number."""
        if self.rows % self.parts == 0:
            return Const(self.longest)
        return call("-", self.start(plus(part, 1)), self.start(part))

    def place(self, row: Scalar) -> tuple[Scalar, list[Scalar], Scalar]:
        """Return the block and the piece of a row, and its place there."""
        if self.rows % self.parts == 0:
            part = over(row, self.longest)
            place = modulo(row, self.longest)
        else:
            part = over(times(row, self.parts), self.rows)
            place = call("-", row, self.start(part))
        digits = digits_of(part, self.lengths)
        block = digits.pop(-1 if self.pieces_first else 0)
        return block, digits, place


def plus(value: Scalar, more: int | Scalar) -> Scalar:
    other = Const(more) if isinstance(more, int) else more
    return value if other == Const(0) else call("+", value, other)


def minus(value: Scalar, less: Scalar) -> Scalar:
    if isinstance(less, Const):
        return plus(value, call("neg", less))
    return call("-", value, less)


def last_of(length: Scalar) -> Scalar:
    """Return the last of so many places."""
    return plus(length, -1)


def times(value: Scalar, factor: int) -> Scalar:
    return call("*", value, Const(factor)) if factor != 1 else value


def over(value: Scalar, divisor: int) -> Scalar:
    return call("//", value, Const(divisor)) if divisor != 1 else value


def modulo(value: Scalar, divisor: int) -> Scalar:
    return call("%", value, Const(divisor)) if divisor != 1 else Const(0)


def digits_of(number: Scalar, lengths: Sequence[int]) -> list[Scalar]:
    """Return the digits of a number, the slowest first, given how many values each has."""
    digits: list[Scalar] = []
    below = prod(lengths)
    for length in lengths:
        below //= length
        digit = over(number, below)
        digits.append(digit if not digits else modulo(digit, length))
    return digits


def with_digits(digits: Sequence[Scalar], lengths: Sequence[int]) -> Scalar:
    """Return the number that has these digits."""
    number: Scalar = Const(0)
    for digit, length in zip(digits, lengths, strict=True):
        number = digit if number == Const(0) else call("+", times(number, length), digit)
    return number
