"""Packed triangles: what ranks sum of blocks on the diagonal of a symmetric result.

A triangle of s rows becomes a rectangle of s + e rows and h = ⌈s/2⌉ columns, where e is 1 for even
s, else 0. Its element [r,q] is [r - e, q] of the block if r ≥ q + e, and otherwise
[h - 1 + e + q, h + r]. What follows from that for s = 4:

    00             22 32
    10 11          00 33
    20 21 22   →   10 11
    30 31 32 33    20 21
                   30 31
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from einmpi.graph.arithmetic import call
from einmpi.graph.eingraph import Vertex
from einmpi.graph.forms.pairs.blocks import digits_of, last_of, minus, plus, with_digits
from einmpi.graph.forms.pairs.writer import Chart, PairWriter, Side, as_number
from einmpi.graph.scalar import Const, Element, Index, Scalar, unlike


def _sides(writer: PairWriter) -> tuple[Scalar, Scalar, Scalar]:
    """Return s + e, e and h: numbers, or what follows from the block if lengths differ."""
    division = writer.division.computed
    rows: Scalar = Const(division.rows_of_block)
    if writer.division.fills:
        rows = division.length(Index(writer.block))
    odd = plus(call("*", call("//", rows, Const(2)), Const(2)), 1)
    return odd, call("-", odd, rows), call("//", plus(rows, 1), Const(2))


def _places(
    writer: PairWriter, row: Scalar, column: Scalar
) -> tuple[Scalar, Sequence[tuple[Side, Side]], Scalar]:
    """Return whether an element of the rectangle is in the left part of the block.

    Then where it is in the block, in the left part and in the right one, and whether it is on
    the diagonal.
    """
    lengths = writer.division.computed.lengths_of_block
    longest = prod(lengths)
    _, is_even, half = _sides(writer)
    # An index that is a label alone would have to be a label as long as the dimension.
    left_column = call("minimum", column, Const(longest - 1))
    left_row = call("maximum", minus(row, is_even), Const(0))
    if writer.division.fills:
        left_row = call("minimum", left_row, Const(longest - 1))
    right_column = call("minimum", plus(row, half), Const(longest - 1))
    right_row = plus(plus(column, last_of(half)), is_even)
    is_left = call(">=", row, plus(column, is_even))
    places = []
    are_equal = []
    for one, two in ((left_row, left_column), (right_row, right_column)):
        places.append((tuple(digits_of(one, lengths)), tuple(digits_of(two, lengths))))
        are_equal.append(call("==", one, two))
    return is_left, places, call("where", is_left, *are_equal)


def packed_diagonal(writer: PairWriter, computed: Chart) -> tuple[Chart, Vertex]:
    """Add the vertices that sum the blocks on the diagonal: each rank those of its part."""
    whole = writer.product("diagonal", (writer.part, *computed.labels), computed)
    longest = writer.division.computed.rows_of_block
    lengths = (longest + 1 - longest % 2, -(-longest // 2))
    writer.extent.update(zip(writer.packed, lengths, strict=True))
    row, column = map(Index, writer.packed)
    is_left, places, _ = _places(writer, row, column)
    found = []
    for one, two in places:
        found.append(Element(whole.name, (writer.part, writer.block, *one, *two, *writer.others)))
    labels = (writer.block, *writer.packed)
    output = (*labels, *writer.others)
    value = call("where", is_left, *found)
    triangle = writer.added("triangle", [writer.part, *output], value)
    rows, _, half = _sides(writer)
    index: list[str | Scalar] = list(writer.packed)
    valid: list[Scalar] = []
    if writer.division.fills:
        valid = [call("<", row, rows), call("<", column, half)]
        index[1] = call("minimum", column, last_of(half))
        if longest % 2 == 0:  # a triangle with one row less has two rows less when packed
            index[0] = call("minimum", row, last_of(rows))
    parts = Element(triangle.name, (writer.part, writer.block, *index, *writer.others))
    packed = writer.added("pairs_0", output, parts, [writer.part])
    is_left, places, diagonal = _places(writer, *map(as_number, index))
    chart = Chart(
        *(0, (0, 0), labels, ((), ()), places, is_left, (valid, []), diagonal),
        add_whole=lambda name: _unpacked(writer, name),
        on_diagonal=lambda name: _on_diagonal(writer, name),
    )
    if writer.division.rows % writer.division.parts != 0 and not valid:

        def is_no_copy(number: int) -> Scalar:
            return writer.at(chart, lambda places: writer.is_no_copy(0, places[number]))

        chart.valid = ([is_no_copy(0)], [is_no_copy(1)])
    return chart, packed


def _row(writer: PairWriter, side: Side) -> Scalar:
    """Return the row of a block, given its piece and its place there."""
    return with_digits(list(map(as_number, side)), writer.division.computed.lengths_of_block)


def _on_diagonal(writer: PairWriter, name: str) -> Scalar:
    """Return the element of the diagonal in each row of a block."""
    row = _row(writer, writer.computed_sides[0])
    last = [writer.extent[label] - 1 for label in writer.packed]
    _, is_even, half = _sides(writer)
    right_row = minus(row, half)
    found = []
    for place in (
        (plus(row, is_even), row),
        (right_row, plus(right_row, minus(Const(1), is_even))),
    ):
        index = []
        for entry, most in zip(place, last, strict=True):
            index.append(call("maximum", call("minimum", entry, Const(most)), Const(0)))
        entries = (writer.block, *index, *writer.others_of[name])
        found.append(Element(writer.pairs[name, 0], entries))
    return call("where", call("<", row, half), *found)


def _unpacked(writer: PairWriter, name: str) -> Vertex:
    """Add the vertices that bring all rows of blocks on the diagonal to where these are.

    There are four cases: on or below the diagonal or above it, and from each triangle the
    left part of the rectangle or the right one.
    """
    one, two = writer.sides
    others = writer.others_of[name]
    division = writer.division.computed
    first, second = (_row(writer, writer.in_block(0, side)) for side in writer.sides)
    last_row, most = writer.extent[writer.packed[0]] - 1, writer.extent[writer.packed[1]]
    _, is_even, half = _sides(writer)
    skipped = plus(last_of(half), is_even)  # columns of the block before those of the right part
    any_row = unlike("any_row", writer.labels_of_pairs)
    any_column = unlike("any_column", writer.labels_of_pairs)
    rows = division.rows_of_block
    writer.extent.update({any_row: rows, any_column: most})

    def after(row: Scalar, start: Scalar) -> Scalar:
        return call("maximum", minus(row, start), Const(0))

    def copy(label: str, row: str | Scalar, column: str | Scalar, at: Scalar) -> Element:
        index = (writer.block, row, column, *others)
        output = (writer.block, *one, label, *others)
        made = writer.added("diagonal", output, Element(writer.pairs[name, 0], index))
        return Element(made.name, (writer.block, *one, at, *others))

    in_left = call("minimum", second, last_of(half))
    last = call("minimum", first, last_of(half))
    below = plus(Index(any_row), is_even)
    if writer.division.fills:  # in a block that is longer than others, this is not too far
        below = call("minimum", below, Const(last_row))
    lower_left = copy(any_column, plus(first, is_even), any_column, in_left)
    at_row = call("minimum", Index(any_column), Const(rows - 1))  # no label: see above
    lower_right = copy(any_column, at_row, after(first, skipped), after(second, half))
    upper_left = copy(any_row, below, last, second)
    upper_right = copy(any_column, after(first, half), any_column, after(second, skipped))
    lower = call("where", call("<", second, half), lower_left, lower_right)
    upper = call("where", call("<", first, half), upper_left, upper_right)
    is_lower = call("<=", second, first)
    value = call("where", is_lower, lower, writer.mirrored(name, upper))
    return writer.added("diagonal", (writer.block, *one, *two, *others), value)
