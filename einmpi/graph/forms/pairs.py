"""Symmetric results as pairs of blocks: each pair of blocks of rows is computed once, by a rank
that has both, and copied to its mirror image.

A rank has the blocks a + r for r in a difference cover R: every difference of two blocks occurs
among them. So for each distance d one pair of blocks at that distance meets on every rank.

A result that the rest of the program reads is brought to its rows. One that nobody reads may stay
in pairs of blocks: a graph of its own makes it of them. Of a block on the diagonal only a triangle
is then summed over ranks, packed into a rectangle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod

from einmpi.graph.arithmetic import call
from einmpi.graph.eingraph import EinGraph, Vertex, make_vertex
from einmpi.graph.einsum import make_einsum, reopen
from einmpi.graph.forms.symmetry import find_swap
from einmpi.graph.scalar import Const, Element, Index, Names, Scalar, rebuild, unlike

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
        return self.blocks * prod(self.pieces)

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
            return _times(part, self.longest)
        return _over(_plus(_times(part, self.rows), self.parts - 1), self.parts)

    def row(self, block: Scalar, pieces: Sequence[Scalar], place: Scalar) -> Scalar:
        """Return the row at a place of a piece; in a piece that is shorter, the last row."""
        digits = list(zip(self.pieces, pieces, strict=True))
        digits.insert(len(digits) if self.pieces_first else 0, (self.blocks, block))
        part: Scalar = Const(0)
        for length, digit in digits:
            part = digit if part == Const(0) else call("+", _times(part, length), digit)
        row = call("+", self.start(part), place)
        if self.rows % self.parts == 0:
            return row
        last = _plus(self.start(_plus(part, 1)), -1)
        return call("minimum", row, last)

    def length(self, part: Scalar) -> Scalar:
        """Return the rows of a piece, given its number."""
        if self.rows % self.parts == 0:
            return Const(self.longest)
        return call("-", self.start(_plus(part, 1)), self.start(part))

    def place(self, row: Scalar) -> tuple[Scalar, list[Scalar], Scalar]:
        """Return the block and the piece of a row, and its place there."""
        if self.rows % self.parts == 0:
            part = _over(row, self.longest)
            place = _modulo(row, self.longest)
        else:
            part = _over(_times(row, self.parts), self.rows)
            place = call("-", row, self.start(part))
        lengths = list(self.pieces)
        lengths.insert(len(lengths) if self.pieces_first else 0, self.blocks)
        digits: list[Scalar] = []
        below = self.parts
        for length in lengths:
            below //= length
            digit = _over(part, below)
            digits.append(digit if not digits else _modulo(digit, length))
        block = digits.pop(-1 if self.pieces_first else 0)
        return block, digits, place


def _plus(value: Scalar, more: int | Scalar) -> Scalar:
    other = Const(more) if isinstance(more, int) else more
    return value if other == Const(0) else call("+", value, other)


def _minus(value: Scalar, less: Scalar) -> Scalar:
    if isinstance(less, Const):
        return _plus(value, call("neg", less))
    return call("-", value, less)


def _last(length: Scalar) -> Scalar:
    """Return the last of so many places."""
    return _plus(length, -1)


def _times(value: Scalar, factor: int) -> Scalar:
    return call("*", value, Const(factor)) if factor != 1 else value


def _over(value: Scalar, divisor: int) -> Scalar:
    return call("//", value, Const(divisor)) if divisor != 1 else value


def _modulo(value: Scalar, divisor: int) -> Scalar:
    return call("%", value, Const(divisor)) if divisor != 1 else Const(0)


def paired_labels(graph: EinGraph, vertex: Vertex) -> tuple[str, str] | None:
    """Return the two labels of a symmetric aggregate that can be computed by pairs of blocks.

    None if it cannot. No operand may have both labels, and neither is used as a number.
    """
    einsum = vertex.einsum
    if einsum is None or not einsum.aggregated or vertex.recurrence is not None:
        return None
    if einsum.has_special_form or einsum.is_pass_of_scan:
        return None
    unsigned = any(graph[name].dtype.startswith("u") for name in vertex.inputs)
    swap = find_swap(einsum, vertex.inputs, unsigned)
    if swap is None or len(swap) > 1 or not set(swap[0]).isdisjoint(einsum.labels_as_numbers):
        return None
    for index in einsum.operands:
        if sum(entry in swap[0] for entry in index) > 1:
            return None
    return swap[0]


@dataclass(frozen=True)
class InPairs:
    """A graph in which a symmetric vertex is computed by pairs of blocks."""

    graph: EinGraph
    added: tuple[Vertex, ...]
    block: str  # the label of the blocks, in all vertices that are added
    rows: tuple[str, ...]  # the labels of the pieces of a block, and of the places there
    part: str  # the label of the parts of a sum
    packed: tuple[str, str]  # the labels of packed triangles
    # Makes the result of pairs of blocks, if it stays in these.
    rest: EinGraph | None = None


def with_pairs_of_blocks(
    graph: EinGraph, name: str, division: Division, stays: bool = False
) -> InPairs:
    """Return the graph in which a symmetric vertex is computed by pairs of blocks.

    If it `stays` in these, they are outputs in its place.
    """
    vertex = graph[name]
    labels = paired_labels(graph, vertex)
    assert labels is not None, f"{name} is not symmetric"
    writer = _Writer(graph, vertex, labels, division, stays)
    written = writer.written()
    vertices: list[Vertex] = []
    for each in graph.vertices:
        vertices += written if each.name == name else [each]
    outputs: list[str] = []
    rest = None
    for output in graph.outputs:
        outputs += writer.pairs if stays and output == name else [output]
    if stays:
        given = []
        for pair in writer.pairs:
            made = writer.known[pair]
            given.append(Vertex(pair, made.bound, made.dtype))
        rest = EinGraph((*given, *writer.rest), (name,))
    changed = EinGraph(tuple(vertices), tuple(outputs))
    added = tuple(each for each in written if each.name != name)
    rows = writer.sides[0]
    return InPairs(changed, added, writer.block, rows, writer.part, writer.packed, rest)


@dataclass
class _Writer:
    """Writes the vertices that compute one symmetric vertex, the last of them.

    If the result stays in pairs of blocks, what makes it of them goes to `rest`.
    """

    graph: EinGraph
    vertex: Vertex
    labels: tuple[str, str]
    division: Division
    stays: bool
    vertices: list[Vertex] = field(default_factory=list)
    rest: list[Vertex] = field(default_factory=list)
    pairs: list[str] = field(default_factory=list)  # the vertices that compute them

    def __post_init__(self) -> None:
        self.einsum = self.vertex.computed_einsum
        self.known = dict(self.graph.by_name)
        self.taken = Names(self.known)
        used = self.einsum.labels
        division = self.division
        self.block = unlike("block", used)
        self.distance = unlike("distance", used)
        self.extent = self.einsum.extent
        self.extent.update({self.block: division.blocks, self.distance: division.blocks})
        sides = []  # the labels of both rows: those of their pieces, and of their places there
        for which in self.labels:
            side = []
            for number, length in enumerate((*division.pieces, division.longest)):
                side.append(unlike(f"{which}_{number}", used))
                self.extent[side[-1]] = length
            sides.append(tuple(side))
        self.sides = tuple(sides)
        self.computed_sides = self.sides  # the same where pairs are computed
        if division.fills:
            labels = [unlike(f"{which}_row", used) for which in self.labels]
            self.extent.update(dict.fromkeys(labels, division.computed.longest))
            self.computed_sides = tuple((label,) for label in labels)
        self.others = [label for label in self.einsum.output if label not in self.labels]
        self.part = unlike("part", self.extent)
        self.in_part = unlike(f"{division.summed}_part", self.extent)
        self.packed = (unlike("packed", self.extent), unlike("packed_column", self.extent))
        if division.sums > 1:
            length = self.extent[division.summed] // division.sums
            self.extent.update({self.part: division.sums, self.in_part: length})

    def written(self) -> list[Vertex]:
        """Return the vertices in the order in which they are computed."""
        fetched = self.fetched_rows()
        at_distance: dict[int, Element] = {}
        for distance, pair in enumerate(self.division.pairs):
            if self.division.halves and 2 * distance == self.division.blocks:
                at_distance[distance] = self.halves_of_pairs(pair, fetched)
                continue
            if self.division.sums > 1 and distance == 0:
                at_distance[0] = self.packed_diagonal(fetched)
                continue
            product = self.pair_of_blocks(distance, pair, fetched)
            for away, first, mirrored in (
                (distance, pair[0], False),
                (-distance % self.division.blocks, pair[1], True),
            ):
                if away not in at_distance:
                    at_distance[away] = self.at_its_row(product, first, mirrored)
        self.result(self.joined(at_distance))
        return self.vertices

    def fetched_rows(self) -> dict[tuple[Element, int], Vertex]:
        """Add vertices that fetch the rows of blocks, one for each tensor and member of R."""
        first, _ = self.labels
        side = self.computed_sides[0]
        *pieces, place = map(Index, side)
        found: dict[tuple[Element, int], Vertex] = {}
        for name, index in zip(self.vertex.inputs, self.einsum.operands, strict=True):
            if first not in index:
                continue
            element = Element(name, index)
            block = self.block
            if self.division.pieces_first:  # all that follow it, so that no index wraps around
                block = unlike("any_block", self.einsum.labels)
                self.extent[block] = self.division.blocks + self.division.blocks // 2
            labels = [block, *side, *self.others_in(index)]
            for member in self.division.fetched:
                shifted = self.shifted(member)
                if self.division.pieces_first:
                    shifted = _modulo(Index(block), self.division.blocks)
                where = self.division.computed.row(shifted, pieces, place)
                at_row = tuple(where if entry == first else self.inside(entry) for entry in index)
                copy = self.added("rows", labels, Element(name, at_row))
                found[element, member] = copy
        return found

    def pair_of_blocks(
        self, distance: int, pair: tuple[int, int], fetched: Mapping[tuple[Element, int], Vertex]
    ) -> Vertex:
        """Add the vertex that computes all pairs of blocks at some distance."""

        def read(element: Element, which: int) -> Element:
            return self.of_block(fetched, element, pair[which], self.computed_sides[which])

        output = [self.block, *self.sides[0], *self.sides[1], *self.others]
        stem = f"pairs_{distance}"
        if self.division.fills:
            one, two = self.computed_sides
            sums = self.product("sums", [self.part, self.block, *one, *two, *self.others], read)
            rows: list[str | Scalar] = []
            for member, side in zip(pair, self.sides, strict=True):
                rows += self.in_block(member, side)
            element = Element(sums.name, (self.part, self.block, *rows, *self.others))
            product = self.added(stem, output, element, [self.part])
        else:
            product = self.product(stem, output, read)
        self.pairs.append(product.name)
        return product

    def in_block(self, member: int, side: Sequence[str | Scalar]) -> Sequence[str | Scalar]:
        """Return where rows of a block are that are given by their pieces, if pairs have none."""
        if not self.division.fills:
            return side
        block = self.shifted(member)
        *pieces, place = (Index(each) if isinstance(each, str) else each for each in side)
        row = self.division.row(block, pieces, place)
        return (call("-", row, self.division.computed.start(block)),)

    # ---- blocks on the diagonal ------------------------------------------------------------------
    #
    # A triangle of s rows becomes a rectangle of s + e rows and h = ⌈s/2⌉ columns, where e is 1 for
    # even s, else 0. Its element [r,q] is [r - e, q] of the block if r ≥ q + e, and otherwise
    # [h - 1 + e + q, h + r]. What follows from that for s = 4:
    #
    #     00             22 32
    #     10 11          00 33
    #     20 21 22   →   10 11
    #     30 31 32 33    20 21
    #                    30 31

    def triangle(self) -> tuple[Scalar, Scalar, Scalar]:
        """Return s + e, e and h: numbers, or what follows from the block if lengths differ."""
        division = self.division.computed
        rows: Scalar = Const(division.longest * prod(division.pieces))
        if self.division.fills:
            rows = division.length(Index(self.block))
        odd = _plus(call("*", call("//", rows, Const(2)), Const(2)), 1)
        return odd, call("-", odd, rows), call("//", _plus(rows, 1), Const(2))

    def packed_diagonal(self, fetched: Mapping[tuple[Element, int], Vertex]) -> Element:
        """Add the vertices that sum the blocks on the diagonal: each rank those of its part."""
        one, two = self.computed_sides
        division = self.division.computed

        def read(element: Element, which: int) -> Element:
            return self.of_block(fetched, element, 0, self.computed_sides[which])

        whole = self.product("diagonal", [self.part, self.block, *one, *two, *self.others], read)
        longest = division.longest * prod(division.pieces)
        lengths = (longest + 1 - longest % 2, -(-longest // 2))
        self.extent.update(zip(self.packed, lengths, strict=True))
        rows, is_even, half = self.triangle()
        row, column = map(Index, self.packed)

        def element(first: Scalar, second: Scalar) -> Element:
            places = (*self.digits_of(first), *self.digits_of(second))
            return Element(whole.name, (self.part, self.block, *places, *self.others))

        # An index that is a label alone would have to be a label as long as the dimension.
        left_column = call("minimum", column, Const(longest - 1))
        left_row = call("maximum", _minus(row, is_even), Const(0))
        if self.division.fills:
            left_row = call("minimum", left_row, Const(longest - 1))
        left = element(left_row, left_column)
        right_column = call("minimum", _plus(row, half), Const(longest - 1))
        right = element(_plus(_plus(column, _last(half)), is_even), right_column)
        is_left = call(">=", row, _plus(column, is_even))
        output = [self.block, *self.packed, *self.others]
        triangle = self.added("triangle", [self.part, *output], call("where", is_left, left, right))
        index: list[str | Scalar] = list(self.packed)
        if self.division.fills:
            index[1] = call("minimum", column, _last(half))
            if longest % 2 == 0:  # a triangle with one row less has two rows less when packed
                index[0] = call("minimum", row, _last(rows))
        parts = Element(triangle.name, (self.part, self.block, *index, *self.others))
        packed = self.added("pairs_0", output, parts, [self.part])
        self.pairs.append(packed.name)
        return self.unpacked(packed)

    def digits_of(self, row: Scalar) -> list[Scalar]:
        """Return the piece of a row of a block, and its place there."""
        division = self.division.computed
        digits: list[Scalar] = []
        below = division.longest * prod(division.pieces)
        for length in (*division.pieces, division.longest):
            below //= length
            digit = _over(row, below)
            digits.append(digit if not digits else _modulo(digit, length))
        return digits

    def row_of(self, side: Sequence[str]) -> Scalar:
        """Return the row of a block, given its piece and its place there."""
        if self.division.fills:
            (found,) = self.in_block(0, side)
            assert not isinstance(found, str), "it is worked out"
            return found
        first, *others = side
        row: Scalar = Index(first)
        for label in others:
            row = call("+", _times(row, self.extent[label]), Index(label))
        return row

    def unpacked(self, packed: Vertex) -> Element:
        """Add the vertices that bring all rows of blocks on the diagonal to where these are.

        There are four cases: on or below the diagonal or above it, and from each triangle the
        left part of the rectangle or the right one.
        """
        one, two = self.sides
        first, second = self.row_of(one), self.row_of(two)
        last_row, most = self.extent[self.packed[0]] - 1, self.extent[self.packed[1]]
        _, is_even, half = self.triangle()
        skipped = _plus(_last(half), is_even)  # columns of the block before those of the right part
        any_row = unlike("any_row", self.extent)
        any_column = unlike("any_column", self.extent)
        division = self.division.computed
        rows = division.longest * prod(division.pieces)
        self.extent.update({any_row: rows, any_column: most})

        def after(row: Scalar, start: Scalar) -> Scalar:
            return call("maximum", _minus(row, start), Const(0))

        def copy(label: str, row: str | Scalar, column: str | Scalar, at: Scalar) -> Element:
            index = (self.block, row, column, *self.others)
            output = [self.block, *one, label, *self.others]
            made = self.added("diagonal", output, Element(packed.name, index), at_end=True)
            return Element(made.name, (self.block, *one, at, *self.others))

        in_left = call("minimum", second, _last(half))
        last = call("minimum", first, _last(half))
        below = _plus(Index(any_row), is_even)
        if self.division.fills:  # in a block that is longer than others, this is not too far
            below = call("minimum", below, Const(last_row))
        lower_left = copy(any_column, _plus(first, is_even), any_column, in_left)
        at_row = call("minimum", Index(any_column), Const(rows - 1))  # no label: see above
        lower_right = copy(any_column, at_row, after(first, skipped), after(second, half))
        upper_left = copy(any_row, below, last, second)
        upper_right = copy(any_column, after(first, half), any_column, after(second, skipped))
        lower = call("where", call("<", second, half), lower_left, lower_right)
        upper = call("where", call("<", first, half), upper_left, upper_right)
        plain = (self.block, *one, *two, *self.others)
        is_lower = call("<=", second, first)
        whole = self.added("diagonal", plain, call("where", is_lower, lower, upper), at_end=True)
        return Element(whole.name, plain)

    # ---- blocks of which two ranks have a half each ----------------------------------------------

    def halves_of_pairs(
        self, pair: tuple[int, int], fetched: Mapping[tuple[Element, int], Vertex]
    ) -> Element:
        """Add the vertices for the pairs halfway around, of which two ranks have each.

        A rank of the first half of the blocks computes the first half of its rows with all others;
        one of the second half computes all of its rows with the second half of the others. These
        are what the rank opposite lacks, transposed. Both are two quarters of a pair.
        """
        blocks = self.division.blocks
        length = -(-self.division.longest // 2)
        quarter = unlike("quarter", self.extent)
        self.extent[quarter] = 2
        sides = []
        for label, side in zip(self.labels, self.sides, strict=True):
            place = unlike(f"{label}_half", self.extent)
            self.extent[place] = length
            sides.append((*side[:-1], place))
        is_second = _over(Index(self.block), blocks // 2)
        both = call("*", is_second, Index(quarter))
        either = call("-", call("+", is_second, Index(quarter)), both)
        copies: dict[tuple[Element, int], Element] = {}

        def read(element: Element, which: int) -> Element:
            if (element, which) not in copies:
                half = _times(either if which else both, length)
                place = call("+", half, Index(sides[which][-1]))
                place = call("minimum", place, Const(self.division.longest - 1))
                side = self.in_block(pair[which], (*sides[which][:-1], place))
                rows = self.of_block(fetched, element, pair[which], side)
                labels = (self.block, quarter, *sides[which], *self.others_in(element.index))
                copy = self.added("half", labels, rows)
                copies[element, which] = Element(copy.name, labels)
            return copies[element, which]

        one, two = sides
        output = (self.block, quarter, *one, *two, *self.others)
        computed = self.product(f"pairs_{blocks // 2}", output, read)
        self.pairs.append(computed.name)
        opposite = (self.shifted(blocks // 2), quarter, *two, *one, *self.others)
        moved = self.added("moved", output, Element(computed.name, opposite), at_end=True)
        halves = []
        index: list[str | Scalar] = []
        for own in self.sides:
            halves.append(_over(Index(own[-1]), length))
            index += [*own[:-1], _modulo(Index(own[-1]), length)]
        row_half, other_half = halves
        more = call("*", is_second, call("-", row_half, other_half))
        which_quarter = call("maximum", call("+", other_half, more), Const(0))
        which_quarter = call("minimum", which_quarter, Const(1))
        entries = (self.block, which_quarter, *index, *self.others)
        is_own = call(
            "where",
            call("==", is_second, Const(0)),
            call("==", row_half, Const(0)),
            call("==", other_half, Const(1)),
        )
        whole = call("where", is_own, Element(computed.name, entries), Element(moved.name, entries))
        plain = (self.block, *self.sides[0], *self.sides[1], *self.others)
        return Element(self.added("halves", plain, whole, at_end=True).name, plain)

    def of_block(
        self,
        fetched: Mapping[tuple[Element, int], Vertex],
        element: Element,
        member: int,
        side: Sequence[str | Scalar],
    ) -> Element:
        """Return an element of a block of rows: the one so many places after that of a rank."""
        index = (*side, *self.others_in(element.index))
        if self.division.pieces_first:
            after = call("+", Index(self.block), Const(member))
            return Element(fetched[element, 0].name, (after, *index))
        return Element(fetched[element, member].name, (self.block, *index))

    def product(
        self,
        stem: str,
        output: Sequence[str],
        read: Callable[[Element, int], Element],
    ) -> Vertex:
        """Add a vertex like the symmetric one, on what `read` gives for elements with a label.

        Elements with the second label are given with the first one: only these were fetched.
        """
        aggregated = [
            label for label in self.others_in(self.einsum.aggregated) if label not in output
        ]
        swapped = dict(zip(self.labels, reversed(self.labels), strict=True))

        def leaf(node: Scalar) -> Scalar:
            if not isinstance(node, Element):
                return node
            if self.labels[0] in node.index:
                return read(node, 0)
            if self.labels[1] in node.index:
                index = tuple(swapped.get(str(entry), entry) for entry in node.index)
                return read(Element(node.tensor, index), 1)
            return Element(node.tensor, tuple(map(self.inside, node.index)))

        expression = rebuild(reopen(self.einsum, self.vertex.inputs), leaf)
        return self.added(stem, output, expression, aggregated)

    def at_its_row(self, pairs: Vertex, member: int, mirrored: bool) -> Element:
        """Return what ranks have of the pairs at a distance, by the block of their first row.

        Pairs that another rank has computed are brought by a vertex of their own.
        """
        one, two = self.sides
        plain = (self.block, *one, *two, *self.others)
        index = (*two, *one, *self.others) if mirrored else plain[1:]
        if member == 0:
            return Element(pairs.name, (self.block, *index))
        moved = Element(pairs.name, (self.shifted(self.division.blocks - member), *index))
        return Element(self.added("moved", plain, moved, at_end=True).name, plain)

    def joined(self, at_distance: Mapping[int, Element]) -> Vertex:
        """Add the vertex that has the blocks at all distances."""
        *distances, last = sorted(at_distance)
        expression: Scalar = at_distance[last]
        for distance in reversed(distances):
            is_here = call("==", Index(self.distance), Const(distance))
            expression = call("where", is_here, at_distance[distance], expression)
        one, two = self.sides
        output = [self.block, *one[:-1], self.distance, one[-1], *two, *self.others]
        return self.added("blocks", output, expression, at_end=True)

    def result(self, joined: Vertex) -> None:
        """Add the vertex itself, which reads each element at its place in a block."""
        block, pieces, place = self.division.place(Index(self.labels[0]))
        other_block, other_pieces, other_place = self.division.place(Index(self.labels[1]))
        blocks = self.division.blocks
        distance = _modulo(call("-", _plus(other_block, blocks), block), blocks)
        side = (*pieces, distance, place)
        index = (block, *side, *other_pieces, other_place, *self.others)
        einsum, inputs = make_einsum(
            self.einsum.output, Element(joined.name, index), None, (), self.extent
        )
        made = make_vertex(
            self.vertex.name, einsum, inputs, self.known, self.vertex.origin, self.vertex.places
        )
        (self.rest if self.stays else self.vertices).append(made)

    def others_in(self, index: Sequence[str | Scalar]) -> list[str]:
        """Return the labels of an index, each once, but for those of rows.

        In place of a label that is divided come its parts, and the places there.
        """
        found: list[str] = []
        for entry in dict.fromkeys(index):
            if self.division.sums > 1 and entry == self.division.summed:
                found += [self.part, self.in_part]
            elif entry not in self.labels:
                found.append(str(entry))
        return found

    def inside(self, entry: str | Scalar) -> str | Scalar:
        """Return an entry of an index: a label that is divided by its part and the place there."""
        if self.division.sums == 1 or entry != self.division.summed:
            return entry
        before = _times(Index(self.part), self.extent[self.in_part])
        return call("+", before, Index(self.in_part))

    def shifted(self, member: int) -> Scalar:
        """Return the block so many places after that of a rank."""
        if member == 0:
            return Index(self.block)
        return _modulo(_plus(Index(self.block), member), self.division.blocks)

    def added(
        self,
        stem: str,
        output: Sequence[str],
        expression: Scalar,
        aggregated: Sequence[str] = (),
        at_end: bool = False,
    ) -> Vertex:
        """Add and return a vertex that the program does not know.

        `at_end` says that it makes the result of pairs of blocks.
        """
        aggregation = self.einsum.aggregation if aggregated else None
        einsum, inputs = make_einsum(output, expression, aggregation, aggregated, self.extent)
        name = self.taken.take_new(f"{self.vertex.name}_{stem}")
        vertex = make_vertex(name, einsum, inputs, self.known, places=self.vertex.places)
        vertex = replace(vertex, is_auxiliary=True)
        self.known[name] = vertex
        (self.rest if at_end and self.stays else self.vertices).append(vertex)
        return vertex
