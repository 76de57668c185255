"""Pairs of blocks halfway around, of which two ranks have each: either computes a half of it."""

from __future__ import annotations

from einmpi.graph.arithmetic import call
from einmpi.graph.eingraph import Vertex
from einmpi.graph.forms.pairs.blocks import modulo, over, times
from einmpi.graph.forms.pairs.writer import Chart, Labels, PairWriter, Side
from einmpi.graph.scalar import Const, Element, Index, Scalar, unlike


def shared_pairs(writer: PairWriter, pair: tuple[int, int]) -> Chart:
    """Return the pairs of rows of blocks halfway around, of which two ranks have each.

    A rank of the first half of the blocks computes the first half of its rows with all others;
    one of the second half computes all of its rows with the second half of the others. These
    are what the rank opposite lacks, transposed. Both are two quarters of a pair.
    """
    quarter = unlike("quarter", writer.labels_of_pairs)
    half = -(-writer.division.longest // 2)
    writer.extent[quarter] = 2
    is_second = over(Index(writer.block), writer.division.blocks // 2)
    both = call("*", is_second, Index(quarter))
    either = call("-", call("+", is_second, Index(quarter)), both)
    rows: list[Labels] = []
    places: list[Side] = []
    valid: list[list[Scalar]] = []
    is_even = writer.division.rows % (writer.division.parts * 2) == 0
    for member, label, side, number in zip(
        pair, writer.labels, writer.sides, (both, either), strict=True
    ):
        name = unlike(f"{label}_half", writer.labels_of_pairs)
        writer.extent[name] = half
        rows.append((*side[:-1], name))
        place = call("+", times(number, half), Index(name))
        inside = call("minimum", place, Const(writer.division.longest - 1))
        places.append(writer.in_block(member, (*side[:-1], inside)))
        valid.append([] if is_even else [writer.is_no_copy(member, (*side[:-1], place))])
    labels = (writer.block, quarter, *rows[0], *rows[1])
    both_places = [(places[0], places[1])]
    distance = writer.division.blocks // 2
    chart = Chart(distance, pair, labels, (rows[0], rows[1]), both_places)
    chart.valid = (valid[0], valid[1])
    chart.is_twice = True
    chart.copies = {}
    chart.add_whole = lambda name: _joined(writer, chart, name)
    return chart


def _joined(writer: PairWriter, chart: Chart, name: str) -> Vertex:
    """Add the vertices that have all pairs of blocks halfway around."""
    blocks = writer.division.blocks
    others = writer.others_of[name]
    quarter = chart.labels[1]
    one, two = chart.rows
    half = writer.extent[one[-1]]
    pairs = writer.pairs[name, chart.distance]
    opposite = (writer.shifted(blocks // 2), quarter, *two, *one, *others)
    value = writer.mirrored(name, Element(pairs, opposite))
    moved = writer.added("moved", (*chart.labels, *others), value)
    is_second = over(Index(writer.block), blocks // 2)
    halves = []
    index: list[str | Scalar] = []
    for own in writer.sides:
        halves.append(over(Index(own[-1]), half))
        index += [*own[:-1], modulo(Index(own[-1]), half)]
    row_half, other_half = halves
    more = call("*", is_second, call("-", row_half, other_half))
    which_quarter = call("maximum", call("+", other_half, more), Const(0))
    which_quarter = call("minimum", which_quarter, Const(1))
    entries = (writer.block, which_quarter, *index, *others)
    is_own = call(
        "where",
        call("==", is_second, Const(0)),
        call("==", row_half, Const(0)),
        call("==", other_half, Const(1)),
    )
    whole = call("where", is_own, Element(pairs, entries), Element(moved.name, entries))
    plain = (writer.block, *writer.sides[0], *writer.sides[1], *others)
    return writer.added("halves", plain, whole)
