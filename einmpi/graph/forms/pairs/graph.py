"""Symmetric results as pairs of blocks: each pair of blocks of rows is computed once, by a rank
that has both, and copied to its mirror image.

A rank has the blocks a + r for r in a difference cover R: every difference of two blocks occurs
among them. So for each distance d one pair of blocks at that distance meets on every rank.

A result that the rest of the program reads is brought to its rows. One that nobody else reads may
stay in pairs of blocks: a graph of its own makes it of them. Of a block on the diagonal only a
triangle is then summed over ranks, packed into a rectangle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.arithmetic import call
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.forms.pairs.blocks import Division, modulo, plus
from einmpi.graph.forms.pairs.families import Paired
from einmpi.graph.forms.pairs.halves import shared_pairs
from einmpi.graph.forms.pairs.triangles import packed_diagonal
from einmpi.graph.forms.pairs.writer import PairWriter
from einmpi.graph.scalar import Const, Element, Index, Scalar, rebuild


@dataclass(frozen=True)
class InPairs:
    """A graph in which a symmetric vertex, and what follows from it, is computed by pairs."""

    graph: EinGraph
    added: tuple[Vertex, ...]
    block: str  # the label of the blocks, in all vertices that are added
    rows: tuple[str, ...]  # the labels of the pieces of a block, and of the places there
    part: str  # the label of the parts of a sum
    packed: tuple[str, str]  # the labels of packed triangles
    # For each result that stays in pairs of blocks, the graph that makes it of these.
    rests: Mapping[str, EinGraph]


def with_pairs_of_blocks(
    graph: EinGraph, family: Mapping[str, Paired], division: Division, stay: Collection[str] = ()
) -> InPairs:
    """Return the graph in which a symmetric vertex and its family are computed by pairs of blocks.

    Those that `stay` in these are no outputs any longer: their pairs are in their places.
    """
    writer = PairWriter(graph, family, division, stay)
    for vertex in graph.vertices:
        if vertex.name in family:
            _write(writer, family[vertex.name])
        else:
            writer.vertices.append(vertex)
    outputs: list[str] = []
    rests = {}
    for output in graph.outputs:
        if output not in stay:
            outputs.append(output)
            continue
        names = [writer.pairs[output, distance] for distance in range(len(writer.charts))]
        outputs += names
        given = []
        for name in names:
            made = writer.known[name]
            given.append(Vertex(name, made.bound, made.dtype))
        rests[output] = EinGraph((*given, *writer.rests[output]), (output,))
    changed = EinGraph(tuple(writer.vertices), tuple(outputs))
    added = tuple(each for each in writer.vertices if each.name not in graph.by_name)
    rows = writer.sides[0]
    return InPairs(changed, added, writer.block, rows, writer.part, writer.packed, rests)


def _write(writer: PairWriter, paired: Paired) -> None:
    """Add the vertices that compute a vertex, in the order in which they are computed."""
    writer.begin(paired)
    if not paired.labels:
        expression = rebuild(writer.expression, writer.with_diagonal)
        writer.finish(expression, paired.vertex.computed_einsum.aggregated)
    elif paired.is_square:
        _write_square(writer)
    elif paired.kept:
        _write_rows(writer)
    else:
        _write_total(writer)


def _write_square(writer: PairWriter) -> None:
    """Add the pairs of a symmetric result, and the result itself where others need it."""
    if writer.paired is writer.first:
        for distance, pair in enumerate(writer.division.pairs):
            _first_pairs(writer, distance, pair)
    else:
        for chart in writer.charts:
            made = writer.product(f"pairs_{chart.distance}", chart.labels, chart)
            writer.pairs[writer.vertex.name, chart.distance] = made.name
    readers = writer.graph.consumers[writer.vertex.name]
    if writer.graph.is_output(writer.vertex.name) or not set(readers) <= writer.family.keys():
        _to_rows(writer)


def _first_pairs(writer: PairWriter, distance: int, pair: tuple[int, int]) -> None:
    """Add the vertices that compute all pairs of blocks at some distance from operands."""
    is_halfway = 2 * distance == writer.division.blocks
    if writer.division.halves and is_halfway:
        chart = shared_pairs(writer, pair)
    else:
        chart = writer.plain_chart(distance, writer.sides)
    computed = chart
    if writer.division.fills:
        computed = writer.plain_chart(distance, writer.computed_sides)
    if writer.division.sums > 1 and distance == 0:
        computed = writer.plain_chart(0, writer.computed_sides)
        chart, made = packed_diagonal(writer, computed)
    elif writer.division.fills:
        sums = writer.product("sums", (writer.part, *computed.labels), computed)
        (places,) = chart.places
        rows = chain(*places)
        element = Element(sums.name, (writer.part, writer.block, *rows, *writer.others))
        output = (*chart.labels, *writer.others)
        made = writer.added(f"pairs_{distance}", output, element, [writer.part])
    else:
        made = writer.product(f"pairs_{distance}", chart.labels, chart)
    writer.charts.append(chart)
    writer.pairs[writer.vertex.name, distance] = made.name


def _write_total(writer: PairWriter) -> None:
    """Add the aggregate of all pairs of rows: most of them are there in one order only."""
    total: list[Scalar] = []
    for chart in writer.charts:
        conditions = [*chart.valid[0], *chart.valid[1]]
        parts = [(conditions, chart.is_twice)]
        if chart.diagonal is not None:
            outside = call("~", chart.diagonal)
            parts = [([*conditions, outside], True), ([*conditions, chart.diagonal], False)]
        for selected, is_twice in parts:
            value = _selected(writer, writer.value(chart), selected)
            aggregated = (*chart.labels, *writer.aggregated)
            made = writer.added("part", writer.others, value, aggregated)
            found = Element(made.name, writer.own_others)
            total.append(found)
            if is_twice:
                total.append(call("conj", found) if writer.paired.conjugates else found)
    writer.finish(_combined(writer, total))


def _write_rows(writer: PairWriter) -> None:
    """Add the aggregates of rows: a rank has parts of those of all blocks that it fetches."""
    parts: dict[int, list[Scalar]] = {}
    for chart in writer.charts:
        plain = writer.plain_chart(chart.distance, writer.sides)
        for own, other in ((0, 1), (1, 0))[: 1 + plain.is_twice]:
            value = _selected(writer, writer.value(plain, (own, other)), plain.valid[other])
            output = (writer.block, *writer.sides[own], *writer.others)
            made = writer.added("part", output, value, (*writer.sides[other], *writer.aggregated))
            element = Element(made.name, (writer.block, *writer.sides[0], *writer.others))
            parts.setdefault(plain.members[own], []).append(element)
    block, pieces, place = writer.division.place(Index(writer.paired.kept[0]))
    total: list[Scalar] = []
    for member, elements in parts.items():
        output = (writer.block, *writer.sides[0], *writer.others)
        made = writer.added("parts", output, _combined(writer, elements))
        blocks = writer.division.blocks
        shifted = modulo(plus(block, blocks - member), blocks) if member else block
        total.append(Element(made.name, (shifted, *pieces, place, *writer.own_others)))
    writer.finish(_combined(writer, total))


def _selected(writer: PairWriter, value: Scalar, conditions: Sequence[Scalar]) -> Scalar:
    """Return a value to be aggregated, where it counts."""
    record = AGGREGATIONS[writer.vertex.computed_einsum.required_aggregation]
    if record.is_idempotent or not conditions:
        return value
    neutral = Const(record.empty if record.empty is not None else 0)
    return call(
        "where", reduce(lambda one, other: call("&", one, other), conditions), value, neutral
    )


def _combined(writer: PairWriter, parts: Sequence[Scalar]) -> Scalar:
    """Return the aggregate of aggregates."""
    record = AGGREGATIONS[writer.vertex.computed_einsum.required_aggregation]
    return reduce(lambda one, other: call(record.operation, one, other), parts)


# ---- results at their rows -----------------------------------------------------------------------


def _to_rows(writer: PairWriter) -> None:
    """Add the vertices that bring a symmetric result to its rows."""
    name = writer.vertex.name
    if name in writer.stay:
        writer.target = writer.rests.setdefault(name, [])
    at_distance: dict[int, Scalar] = {}
    for chart in writer.charts:
        plain = writer.plain_chart(chart.distance, writer.sides)
        if chart.labels != plain.labels:
            labels = (*plain.labels, *writer.others)
            at_distance[chart.distance] = Element(writer.whole(name, chart.distance), labels)
            continue
        for away, first, is_mirrored in (
            (chart.distance, chart.members[0], False),
            (-chart.distance % writer.division.blocks, chart.members[1], True),
        ):
            if away not in at_distance:
                at_distance[away] = _at_its_row(writer, chart.distance, first, is_mirrored)
    _result(writer, _joined(writer, at_distance))
    writer.target = writer.vertices


def _at_its_row(writer: PairWriter, distance: int, member: int, is_mirrored: bool) -> Scalar:
    """Return what ranks have of the pairs at a distance, by the block of their first row.

    Pairs that another rank has computed are brought by a vertex of their own.
    """
    one, two = writer.sides
    name = writer.vertex.name
    plain = (writer.block, *one, *two, *writer.others)
    sides = (*two, *one) if is_mirrored else (*one, *two)
    block: str | Scalar = writer.block
    if member:
        block = writer.shifted(writer.division.blocks - member)
    value: Scalar = Element(writer.pairs[name, distance], (block, *sides, *writer.others))
    value = writer.mirrored(name, value) if is_mirrored else value
    return Element(writer.added("moved", plain, value).name, plain) if member else value


def _joined(writer: PairWriter, at_distance: Mapping[int, Scalar]) -> Vertex:
    """Add the vertex that has the blocks at all distances."""
    *distances, last = sorted(at_distance)
    expression = at_distance[last]
    for distance in reversed(distances):
        is_here = call("==", Index(writer.distance), Const(distance))
        expression = call("where", is_here, at_distance[distance], expression)
    one, two = writer.sides
    output = [writer.block, *one[:-1], writer.distance, one[-1], *two, *writer.others]
    return writer.added("blocks", output, expression)


def _result(writer: PairWriter, joined: Vertex) -> None:
    """Add the vertex itself, which reads each element at its place in a block."""
    row, other_row = map(Index, writer.paired.labels)
    block, pieces, place = writer.division.place(row)
    other_block, other_pieces, other_place = writer.division.place(other_row)
    blocks = writer.division.blocks
    distance = modulo(call("-", plus(other_block, blocks), block), blocks)
    side = (*pieces, distance, place)
    index = (block, *side, *other_pieces, other_place, *writer.own_others)
    writer.finish(Element(joined.name, index))
