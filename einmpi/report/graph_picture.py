"""The graph of a plan as a picture: tensors, how each is cut, and what moves on each edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from einmpi.graph.eingraph import Vertex
from einmpi.planner.factor import repeated_layers
from einmpi.planner.make_plan import Plan
from einmpi.report.arrange import MARGIN, Arrangement, Edge, Point, arrange
from einmpi.report.movement import WAYS, Movement, movements
from einmpi.report.picture import Box, Curve, Group, Picture, Shape, Text, overlap, shortened
from einmpi.units import show_bytes, show_count, show_shape

FEW = 150  # tensors that are drawn one by one, each with its EinSum
LINE, PAD, CHIP = 18.0, 10.0, 11.0
WIDEST = 9.0  # edge, in pixels
MORE = "more layers"  # with its space it is no tensor's name
LEGEND = 30.0  # the height of it
NAMES = {
    "join": "copies for a join",
    "aggregate": "partial results",
    "repartition": "change of cut",
    "stays": "stays where it is",
}


def shape_text(vertex: Vertex) -> str:
    return f"{vertex.dtype} {show_shape(vertex.bound)}"


def layout_text(plan: Plan, name: str) -> str:
    """[4,2]: the parts of each dimension of a tensor in the layout in which it is kept."""
    parts = plan.mesh.parts(plan.layouts[name], range(len(plan.graph[name].bound)))
    return f"[{','.join(map(str, parts))}]"


@dataclass(frozen=True)
class _Drawn:
    """Which tensors are drawn; the others are in one box, as repeated layers."""

    hidden: Mapping[str, str]  # tensor → the one of the first layer that it is like
    layers: int

    def box(self, name: str) -> str:
        return MORE if name in self.hidden else name


def _drawn(plan: Plan) -> _Drawn:
    if len(plan.graph.vertices) <= FEW:
        return _Drawn({}, 0)
    hidden = repeated_layers(plan.graph)
    computed = [name for name in hidden if not plan.graph[name].is_input]
    return _Drawn(hidden, len(computed) // max(1, len({hidden[name] for name in computed})))


def graph_picture(plan: Plan) -> Picture:
    """The graph, inputs above what reads them. Edges are as wide as what they move."""
    drawn, moved = _drawn(plan), movements(plan)
    own = {each.tensor: each for each in moved if each.user is None}
    inside = sum(each.nbytes for each in moved if drawn.box(each.user or each.tensor) == MORE)
    brief = len(plan.graph.vertices) - len(drawn.hidden) > FEW
    boxes: dict[str, _Node] = {}
    for vertex in plan.graph.vertices:
        name = drawn.box(vertex.name)
        if name != MORE:
            boxes[name] = _node(plan, vertex, own.get(name), brief)
        elif name not in boxes and not vertex.is_input:
            boxes[name] = _more(plan, drawn, inside)
    edges = _edges(plan, drawn, moved)
    sources = [vertex.name for vertex in plan.graph.inputs if vertex.name in boxes]
    place = arrange({name: node.size for name, node in boxes.items()}, list(edges), sources)
    legend = _legend()
    groups = [
        *_edge_groups(edges, place),
        *(node.at(place.centres[name]) for name, node in boxes.items()),
    ]
    width = max(
        place.width, max(text.x + text.width for text in legend if isinstance(text, Text)) + MARGIN
    )
    title = (
        f"The graph of the program, cut over {plan.mesh.ranks} ranks: {len(plan.graph.computed)} operations, "
        f"{show_bytes(plan.bytes_predicted)} moved"
    )
    moved_down = tuple(_shifted(group, (width - place.width) / 2, LEGEND) for group in groups)
    return Picture(width, place.height + LEGEND, title, (Group(tuple(legend)), *moved_down))


# ---- boxes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    """Rows of texts in a box; of a row the second text stands at its right end. `chips` is the last row."""

    style: str
    rows: tuple[tuple[Text, ...], ...]
    chips: tuple[tuple[str, str], ...]  # (text, style)
    hint: str

    @property
    def size(self) -> Point:
        widths = [sum(text.width for text in row) + 14 * (len(row) - 1) for row in self.rows]
        widths.append(sum(_chip_width(text) + 4 for text, _ in self.chips))
        return max(widths) + 2 * PAD, LINE * (len(self.rows) + bool(self.chips)) + PAD

    def at(self, centre: Point) -> Group:
        width, height = self.size
        left, y = centre[0] - width / 2, centre[1] - height / 2
        shapes: list[Shape] = [
            Box(left, y, width, height, self.style, 14.0 if self.style == "input" else 6.0)
        ]
        y += PAD / 2 - 5
        for row in self.rows:
            y += LINE
            x = left + PAD
            for text in row:
                shapes.append(
                    Text(x, y, text.text, text.style, text.size, "start", text.mono, text.bold)
                )
                x += text.width + 14
        x, y = left + PAD, y + LINE
        for chip, style in self.chips:
            if style in ("chip", "chip-partial"):
                shapes.append(Box(x, y - 12, _chip_width(chip), 16, style, 4.0))
                colour = "join" if style == "chip" else "aggregate"
                shapes.append(Text(x + 5, y, chip, colour, CHIP, "start", True))
            else:
                shapes.append(Text(x, y, chip, style, CHIP))
            x += _chip_width(chip) + 4
        return Group(tuple(shapes), self.hint)


def _chip_width(text: str) -> float:
    return len(text) * CHIP * 0.602 + 10


def _node(plan: Plan, vertex: Vertex, own: Movement | None, brief: bool) -> _Node:
    name = Text(0, 0, shortened(vertex.name, 24), "ink", 13, bold=True)
    rows: list[tuple[Text, ...]] = [(name, Text(0, 0, shape_text(vertex), "faint", 11))]
    style = (
        "input" if vertex.is_input else "output" if vertex.name in plan.graph.outputs else "vertex"
    )
    chips: list[tuple[str, str]] = []
    if vertex.einsum is not None:
        if not brief:
            rows.append(
                (
                    Text(
                        0, 0, shortened(vertex.einsum.show(vertex.inputs), 42), "ink", 11, mono=True
                    ),
                )
            )
        for label, parts in plan.parts(vertex.name).items():
            if parts > 1:
                chips.append(
                    (
                        f"{label}:{parts}",
                        "chip-partial" if label in vertex.einsum.aggregated else "chip",
                    )
                )
        chips = chips or [("not cut", "faint")]
    if vertex.name in plan.resident:
        chips.append(("lies there", "faint"))
    if vertex.name in plan.layouts and vertex.bound and plan.mesh.ranks > 1:
        chips.append((f"kept {layout_text(plan, vertex.name)}", "faint"))
    if own is not None and own.nbytes:
        chips.append((f"+{show_bytes(own.nbytes)}", own.way))
    return _Node(style, tuple(rows), tuple(chips), _hint(vertex, own))


def _hint(vertex: Vertex, own: Movement | None) -> str:
    lines = [str(vertex), f"{shape_text(vertex)}, {show_bytes(vertex.nbytes)}"]
    if vertex.einsum is not None:
        lines.append(f"{show_count(vertex.einsum.operations())} operations")
    if own is not None and own.nbytes:
        lines.append(
            f"{show_bytes(own.nbytes)} moved into the layout in which it is kept ({NAMES[own.way]})"
        )
    return "\n".join(lines)


def _more(plan: Plan, drawn: _Drawn, inside: int) -> _Node:
    def cuts(name: str) -> object:
        return plan.states.get(name), plan.layouts.get(name)

    alike = all(cuts(name) == cuts(model) for name, model in drawn.hidden.items())
    rows = (
        (Text(0, 0, f"{drawn.layers} more layers like this", "ink", 13, bold=True),),
        (Text(0, 0, f"{len(drawn.hidden):,} tensors, {show_bytes(inside)} moved", "ink", 11),),
        (
            Text(
                0,
                0,
                "all cut alike" if alike else "some are cut in other ways: see the table",
                "faint",
                11,
            ),
        ),
    )
    return _Node("more", rows, (), "")


# ---- edges ----------------------------------------------------------------------------------------------------------


def _edges(plan: Plan, drawn: _Drawn, moved: Sequence[Movement]) -> dict[Edge, list[Movement]]:
    found: dict[Edge, list[Movement]] = {}
    for vertex in plan.graph.vertices:
        for name in vertex.inputs:
            edge = drawn.box(name), drawn.box(vertex.name)
            if edge[0] != edge[1]:
                found.setdefault(edge, [])
    for each in moved:
        if (
            each.user is not None
            and (edge := (drawn.box(each.tensor), drawn.box(each.user))) in found
        ):
            found[edge].append(each)
    return found


def _edge_groups(edges: Mapping[Edge, list[Movement]], place: Arrangement) -> list[Group]:
    """Wide ones first, so that narrow ones can be seen; texts last."""
    amounts = {edge: sum(each.nbytes for each in moved) for edge, moved in edges.items()}
    most = max(amounts.values(), default=0) or 1
    users, reads = _counts(edges, 0), _counts(edges, 1)
    curves, labels = [], list[Text]()
    grounds = list[Shape]()
    for edge in sorted(edges, key=lambda edge: -amounts[edge]):
        amount = amounts[edge]
        words = [sum(each.words[k] for each in edges[edge]) for k in range(len(WAYS))]
        way = WAYS[words.index(max(words))] if amount else "stays"
        curve = Curve(
            place.routes[edge], way, 1.4 + (WIDEST - 1.4) * sqrt(amount / most) if amount else 1.2
        )
        hint = f"{edge[0]} → {edge[1]}: {f'{show_bytes(amount)}, {NAMES[way]}' if amount else NAMES[way]}"
        curves.append(Group((curve,), hint))
        if amount:
            label = _label(curve, show_bytes(amount), way, labels, users[edge[0]] > reads[edge[1]])
            grounds.append(
                Box(label.x - label.width / 2 - 3, label.y - 11, label.width + 6, 15, "ground", 4.0)
            )
            labels.append(label)
    return [*curves, Group((*grounds, *labels))]


def _counts(edges: Mapping[Edge, object], end: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for edge in edges:
        found[edge[end]] = found.get(edge[end], 0) + 1
    return found


def _label(curve: Curve, text: str, style: str, placed: Sequence[Text], low: bool) -> Text:
    """On the edge, at its end with fewer neighbours; further on where another text stands."""
    pieces = curve.beziers()
    piece = pieces[-1] if low else pieces[0]
    tries = (0.6, 0.7, 0.5, 0.8, 0.4, 0.3) if low else (0.4, 0.3, 0.5, 0.2, 0.6, 0.7)
    found = []
    for t in tries:
        weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3)
        x, y = (
            sum(weight * point[k] for weight, point in zip(weights, piece, strict=True))
            for k in (0, 1)
        )
        label = Text(x, y + 4, text, style, 11, "middle", bold=True)
        if not overlap(label, placed):
            return label
        found.append(label)
    return found[0]


# ---- the rest -------------------------------------------------------------------------------------------------------


def _legend() -> list[Shape]:
    shapes: list[Shape] = []
    x = MARGIN
    for way, name in NAMES.items():
        shapes.append(Box(x, 14, 18, 5, way, 2.0))
        text = Text(x + 24, 21, name, way, 11)
        shapes.append(text)
        x += text.width + 46
    return shapes


def _shifted(group: Group, right: float, down: float) -> Group:
    def moved(shape: Shape) -> Shape:
        if isinstance(shape, Curve):
            return Curve(
                tuple((x + right, y + down) for x, y in shape.points), shape.style, shape.line
            )
        if isinstance(shape, Box):
            return Box(
                shape.x + right,
                shape.y + down,
                shape.width,
                shape.height,
                shape.style,
                shape.radius,
            )
        return Text(
            shape.x + right,
            shape.y + down,
            shape.text,
            shape.style,
            shape.size,
            shape.anchor,
            shape.mono,
            shape.bold,
        )

    return Group(tuple(moved(shape) for shape in group.shapes), group.hint)
