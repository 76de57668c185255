"""Writes vertices of pairs of rows: which pairs a rank has, where their rows are in the blocks that
it has fetched, and what an expression reads for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from einmpi.graph.arithmetic import call
from einmpi.graph.eingraph import EinGraph, Vertex, make_vertex
from einmpi.graph.einsum import make_einsum, reopen
from einmpi.graph.forms.pairs.blocks import Division, modulo, plus, times
from einmpi.graph.forms.pairs.families import Paired
from einmpi.graph.scalar import Const, Element, Index, Names, Scalar, rebuild, relabel, unlike

Labels = tuple[str, ...]
Side = tuple[str | Scalar, ...]  # the piece and the place of a row in its block


@dataclass
class Chart:
    """Pairs of rows of which vertices have elements: those of blocks at one distance."""

    distance: int
    members: tuple[int, int]  # the blocks of both rows are so many after that of a rank
    labels: Labels  # of the vertices, but for those of a batch
    rows: tuple[Labels, Labels]  # those of them that number either row; none of packed triangles
    # Where both rows are in blocks as they were fetched. There are two such pairs in a packed
    # triangle, for the left part of the rectangle and for the right one.
    places: Sequence[tuple[Side, Side]]
    is_left: Scalar | None = None
    # Conditions for rows of which an element is no copy, and for elements of the diagonal.
    valid: tuple[Sequence[Scalar], Sequence[Scalar]] = ((), ())
    diagonal: Scalar | None = None
    is_twice: bool = False  # each pair of rows is there in one order only
    # Copies of rows by tensor and side, if places are no labels.
    copies: dict[tuple[Element, int], Element] | None = None
    # Where ranks have a part of these pairs: adds the vertex that has all of them of a result.
    add_whole: Callable[[str], Vertex] | None = None
    # Where the diagonal is packed: an element of it, of a result.
    on_diagonal: Callable[[str], Scalar] | None = None


@dataclass
class PairWriter:
    """Writes the vertices that compute a symmetric vertex and its family.

    What makes results of pairs that stay in pairs of blocks goes to `rests`.
    """

    graph: EinGraph
    family: Mapping[str, Paired]
    division: Division
    stay: Collection[str]
    vertices: list[Vertex] = field(default_factory=list)
    rests: dict[str, list[Vertex]] = field(default_factory=dict)
    charts: list[Chart] = field(default_factory=list)
    pairs: dict[tuple[str, int], str] = field(default_factory=dict)  # by result and distance
    fetched: dict[tuple[Element, int], Vertex] = field(default_factory=dict)
    diagonals: dict[str, Vertex] = field(default_factory=dict)
    wholes: dict[tuple[str, int, bool], str] = field(default_factory=dict)
    others_of: dict[str, Labels] = field(default_factory=dict)  # labels that are not of rows

    def __post_init__(self) -> None:
        first = next(iter(self.family.values()))
        self.first = first
        self.target = self.vertices
        einsum = first.vertex.computed_einsum
        self.known = dict(self.graph.by_name)
        self.taken = Names(self.known)
        used = einsum.labels
        division = self.division
        self.block = unlike("block", used)
        self.distance = unlike("distance", used)
        self.extent = einsum.extent
        self.extent.update({self.block: division.blocks, self.distance: division.blocks})
        sides = []  # the labels of both rows: those of their pieces, and of their places there
        for which in first.labels:
            side = []
            for number, length in enumerate(division.lengths_of_block):
                side.append(unlike(f"{which}_{number}", used))
                self.extent[side[-1]] = length
            sides.append(tuple(side))
        self.sides = tuple(sides)
        self.computed_sides = self.sides  # the same where pairs are computed
        if division.fills:
            labels = [unlike(f"{which}_row", used) for which in first.labels]
            self.extent.update(dict.fromkeys(labels, division.computed.longest))
            self.computed_sides = tuple((label,) for label in labels)
        self.part = unlike("part", self.extent)
        self.in_part = unlike(f"{division.summed}_part", self.extent)
        self.packed = (unlike("packed", self.extent), unlike("packed_column", self.extent))
        self.extent.update(dict.fromkeys(self.packed, 0))
        if division.sums > 1:
            length = self.extent[division.summed] // division.sums
            self.extent.update({self.part: division.sums, self.in_part: length})
        self.labels_of_pairs = frozenset(self.extent)

    def begin(self, paired: Paired) -> None:
        """Let what follows be written for this vertex, with its labels of rows as all have them."""
        self.paired = paired
        self.vertex = paired.vertex
        einsum = paired.vertex.computed_einsum
        self.expression = reopen(einsum, paired.vertex.inputs)
        if not paired.labels:
            return
        self.labels = self.first.labels
        names = dict(zip(paired.labels, self.labels, strict=True))
        for label in einsum.labels:
            if label not in names:
                is_first = paired is self.first
                names[label] = label if is_first else unlike(label, self.labels_of_pairs)
                self.extent[names[label]] = einsum.extent[label]
        self.expression = relabel(self.expression, names)
        self.own_others = paired.others_in(einsum.output)
        self.others = tuple(names[str(label)] for label in self.own_others)
        self.others_of[self.vertex.name] = self.others
        aggregated = (names[label] for label in einsum.aggregated)
        self.aggregated = [label for label in aggregated if label not in self.labels]

    # ---- values of pairs of rows -----------------------------------------------------------------

    def plain_chart(self, distance: int, sides: Sequence[Labels]) -> Chart:
        """Return all pairs of rows of pairs of blocks at a distance."""
        pair = self.division.pairs[distance]
        one, two = sides
        places: tuple[Side, Side] = (one, two)
        if sides is not self.computed_sides:
            places = (self.in_block(pair[0], one), self.in_block(pair[1], two))
        valid: tuple[Sequence[Scalar], Sequence[Scalar]] = ((), ())
        if self.division.rows % self.division.parts != 0:
            first, second = map(self.is_no_copy, pair, self.sides)
            valid = ([first], [second])
        is_twice = distance > 0 and 2 * distance != self.division.blocks
        labels = (self.block, *one, *two)
        return Chart(distance, pair, labels, (one, two), [places], valid=valid, is_twice=is_twice)

    def is_no_copy(self, member: int, side: Side) -> Scalar:
        """Return the condition that a row is no copy of the last one of its piece."""
        *pieces, place = map(as_number, side)
        part = self.division.part(self.shifted(member), pieces)
        return call("<", place, self.division.length(part))

    def product(self, stem: str, labels: Sequence[str], chart: Chart) -> Vertex:
        """Add a vertex like the one that is written, of pairs of rows."""
        output = (*labels, *self.others)
        aggregated = self.others_in(self.aggregated)
        aggregated = [label for label in aggregated if label not in output]
        return self.added(stem, output, self.value(chart), aggregated)

    def value(self, chart: Chart, order: tuple[int, int] = (0, 1)) -> Scalar:
        """Return the expression of a vertex for pairs of rows.

        `order` says which row of a pair each label of rows numbers.
        """

        def leaf(node: Scalar) -> Scalar:
            if isinstance(node, Element):
                return self.element(chart, node, order)
            if not isinstance(node, Index):
                return node
            if node.label in self.labels:
                number = order[self.labels.index(node.label)]
                return self.at(chart, lambda places: self.row(chart, places, number))
            return as_number(self.inside(node.label))

        return rebuild(self.expression, leaf)

    def at(self, chart: Chart, get: Callable[[tuple[Side, Side]], Scalar]) -> Scalar:
        """Return what `get` gives for the places of rows in their blocks."""
        found = [get(places) for places in chart.places]
        return found[0] if chart.is_left is None else call("where", chart.is_left, *found)

    def row(self, chart: Chart, places: tuple[Side, Side], number: int) -> Scalar:
        """Return the first or the second row of a pair."""
        *pieces, place = map(as_number, places[number])
        block = self.shifted(chart.members[number])
        return self.division.computed.row(block, pieces, place)

    def element(self, chart: Chart, element: Element, order: tuple[int, int]) -> Scalar:
        """Return an element of an operand for pairs of rows."""
        square = self.family.get(element.tensor)
        number_of = dict(zip(self.labels, order, strict=True))
        rows = () if square is None else square.rows_in(element.index)
        if square is not None and rows[0] != rows[1]:
            name = self.pairs_in(chart, element.tensor)
            found = Element(name, (*chart.labels, *square.others_in(element.index)))
            is_mirrored = number_of[str(rows[0])] == 1
            return call("conj", found) if is_mirrored and square.conjugates else found
        numbers = list(dict.fromkeys(number_of[str(x)] for x in element.index if x in number_of))
        if len(numbers) == 2:

            def whole(places: tuple[Side, Side]) -> Scalar:
                at_rows = {x: self.row(chart, places, number) for x, number in number_of.items()}
                return Element(element.tensor, tuple(at_rows.get(str(x), x) for x in element.index))

            return self.at(chart, whole)
        if numbers:
            (number,) = numbers
            first = tuple(self.labels[0] if x in number_of else x for x in element.index)
            alike = Element(element.tensor, first)
            return self.at(chart, lambda places: self.of_block(chart, alike, number, places))
        if square is not None:
            return self.with_diagonal(element)
        return Element(element.tensor, tuple(map(self.inside, element.index)))

    def pairs_in(self, chart: Chart, name: str) -> str:
        """Return the vertex that has elements of a symmetric result for these pairs of rows."""
        if chart.labels == self.charts[chart.distance].labels:
            return self.pairs[name, chart.distance]
        return self.whole(name, chart.distance)

    def of_block(
        self, chart: Chart, element: Element, number: int, places: tuple[Side, Side]
    ) -> Element:
        """Return an element of the first or second row of a pair, in its block as it was fetched.

        Elements are given with the first label of rows, as all of them are fetched.
        """
        others = self.others_in(element.index)
        index = (*places[number], *others)
        member = chart.members[number]
        if self.division.pieces_first:
            after = call("+", Index(self.block), Const(member))
            found = Element(self.fetched_rows(element, 0).name, (after, *index))
        else:
            found = Element(self.fetched_rows(element, member).name, (self.block, *index))
        if chart.copies is None:
            return found
        if (element, number) not in chart.copies:
            labels = (*chart.labels[:2], *chart.rows[number], *others)
            copy = self.added("half", labels, found)
            chart.copies[element, number] = Element(copy.name, labels)
        return chart.copies[element, number]

    def fetched_rows(self, element: Element, member: int) -> Vertex:
        """Return the vertex that fetches the rows of blocks of a tensor, for a member of R."""
        if (element, member) in self.fetched:
            return self.fetched[element, member]
        block = self.block
        shifted = self.shifted(member)
        if self.division.pieces_first:  # all that follow it, so that no index wraps around
            block = unlike("any_block", self.labels_of_pairs)
            self.extent[block] = self.division.blocks + self.division.blocks // 2
            shifted = modulo(Index(block), self.division.blocks)
        side = self.computed_sides[0]
        square = self.family.get(element.tensor)
        if square is None:
            *pieces, place = map(Index, side)
            where = self.division.computed.row(shifted, pieces, place)
            first = self.labels[0]
            index = tuple(where if x == first else self.inside(x) for x in element.index)
            copied = Element(element.tensor, index)
        else:
            others = square.others_in(element.index)
            copied = Element(self.diagonal_of(element.tensor).name, (shifted, *side, *others))
        copy = self.added("rows", (block, *side, *self.others_in(element.index)), copied)
        self.fetched[element, member] = copy
        return copy

    def in_block(self, member: int, side: Side) -> Side:
        """Return where rows of a block are that are given by their pieces, if pairs have none."""
        if not self.division.fills:
            return side
        block = self.shifted(member)
        *pieces, place = map(as_number, side)
        row = self.division.row(block, pieces, place)
        return (call("-", row, self.division.computed.start(block)),)

    # ---- elements of the diagonal ----------------------------------------------------------------

    def with_diagonal(self, node: Scalar) -> Scalar:
        """Return an element of the diagonal of a symmetric result where it is; else the leaf."""
        if not isinstance(node, Element) or node.tensor not in self.family:
            return node
        square = self.family[node.tensor]
        row, _ = square.rows_in(node.index)
        block, pieces, place = self.division.computed.place(as_number(row))
        index = (block, *pieces, place, *square.others_in(node.index))
        return Element(self.diagonal_of(node.tensor).name, index)

    def diagonal_of(self, name: str) -> Vertex:
        """Return the vertex that has the diagonal of a symmetric result."""
        if name not in self.diagonals:
            side = self.computed_sides[0]
            others = self.others_of[name]
            on_diagonal = self.charts[0].on_diagonal
            element: Scalar = Element(self.pairs[name, 0], (self.block, *side, *side, *others))
            if on_diagonal is not None:
                element = on_diagonal(name)
            self.diagonals[name] = self.added("on_diagonal", (self.block, *side, *others), element)
        return self.diagonals[name]

    def whole(self, name: str, distance: int) -> str:
        """Return the vertex that has all pairs of rows at a distance where one row is."""
        key = (name, distance, self.target is self.vertices)
        if key not in self.wholes:
            add_whole = self.charts[distance].add_whole
            assert add_whole is not None, f"all pairs of {name} at {distance} are there"
            self.wholes[key] = add_whole(name).name
        return self.wholes[key]

    def mirrored(self, name: str, value: Scalar) -> Scalar:
        """Return an element of a symmetric result, given that on the other side of the diagonal."""
        return call("conj", value) if self.family[name].conjugates else value

    # ---- vertices and labels ---------------------------------------------------------------------

    def finish(self, expression: Scalar, aggregated: Sequence[str] = ()) -> None:
        """Add a vertex of the program, with its own labels."""
        own = self.vertex.computed_einsum
        aggregation = own.aggregation if aggregated else None
        einsum, inputs = make_einsum(own.output, expression, aggregation, aggregated, own.extent)
        origin, places = self.vertex.origin, self.vertex.places
        made = make_vertex(self.vertex.name, einsum, inputs, self.known, origin, places)
        self.target.append(made)

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
        before = times(Index(self.part), self.extent[self.in_part])
        return call("+", before, Index(self.in_part))

    def shifted(self, member: int) -> Scalar:
        """Return the block so many places after that of a rank."""
        if member == 0:
            return Index(self.block)
        return modulo(plus(Index(self.block), member), self.division.blocks)

    def added(
        self,
        stem: str,
        output: Sequence[str],
        expression: Scalar,
        aggregated: Sequence[str] = (),
    ) -> Vertex:
        """Add and return a vertex that the program does not know."""
        aggregation = self.vertex.computed_einsum.aggregation if aggregated else None
        einsum, inputs = make_einsum(output, expression, aggregation, aggregated, self.extent)
        name = self.taken.take_new(f"{self.vertex.name}_{stem}")
        vertex = make_vertex(name, einsum, inputs, self.known, places=self.vertex.places)
        vertex = replace(vertex, is_auxiliary=True)
        self.known[name] = vertex
        self.target.append(vertex)
        return vertex


def as_number(entry: str | Scalar) -> Scalar:
    """Return the number that an entry of an index stands for."""
    return Index(entry) if isinstance(entry, str) else entry
