"""The graph of a plan as a picture: tensors, how each is cut, and what moves along each edge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

from einmpi.graph.eingraph import Vertex
from einmpi.planner.moving.volume import NOTHING
from einmpi.planner.paper import Cost
from einmpi.planner.plan import Plan
from einmpi.planner.repetition import find_layers, repeated_layers
from einmpi.planner.text.summary import movements, show_layout
from einmpi.report.picture import (
    MARGIN,
    MONO_WIDTH,
    Arrangement,
    Box,
    Curve,
    Edge,
    Picture,
    Point,
    Shape,
    ShapeGroup,
    Text,
    arrange,
    overlap,
    shifted,
    shortened,
)
from einmpi.units import counted, plural, show_bytes, show_count, show_shape

# ---- movement ------------------------------------------------------------------------------------
#
# What a plan moves along each edge of the graph, and the layouts that each tensor goes through.


REASONS = ("join", "aggregate", "repartition")  # why words move: copies, partial results, new cuts
PARTIAL = -2  # a mesh axis along which each rank holds a partial result of the same block
EVERYWHERE = -1  # a mesh axis along which every rank holds the same block

Cuts = tuple[int, ...]  # for each mesh axis a dimension of the tensor, EVERYWHERE or PARTIAL


@dataclass(frozen=True)
class EdgeMovement:
    """All movement of a tensor to one vertex, or (`user` is None) into the layout it is kept in."""

    tensor: str
    user: str | None
    words: Cost
    nbytes: int

    @property
    def reason(self) -> str:
        """The reason for most of the movement; empty if nothing moves."""
        return main_reason(self.words)


def main_reason(words: Cost) -> str:
    """Return the reason with the most words; empty if no words move."""
    if not words.total:
        return ""
    return max(REASONS, key=lambda reason: int(getattr(words, reason)))


def total_words(movements: Sequence[EdgeMovement]) -> Cost:
    """Add up the words of several movements, reason by reason."""
    return sum((each.words for each in movements), NOTHING)


def edge_movements(plan: Plan) -> tuple[EdgeMovement, ...]:
    """Return one record for each pair of a tensor that moves and its user.

    Together they move exactly what the plan moves.
    """
    found: dict[tuple[str, str | None], EdgeMovement] = {}
    for each in movements(plan):
        edge = each.tensor, each.user
        before = found.get(edge, EdgeMovement(*edge, NOTHING, 0))
        words = before.words + each.words
        found[edge] = EdgeMovement(*edge, words, before.nbytes + each.nbytes)
    return tuple(found.values())


@dataclass
class LayoutUse:
    """When a tensor has a layout: on being made or kept, and for the vertices that read it."""

    events: list[str] = field(default_factory=list)  # of "made" and "kept"
    readers: list[str] = field(default_factory=list)


def layouts_of(plan: Plan, name: str) -> dict[Cuts, LayoutUse]:
    """Return the layouts of a tensor and what each is for: made, kept, then read."""
    graph = plan.graph
    vertex = graph[name]
    found: dict[Cuts, LayoutUse] = {}

    def use_of(cuts: Sequence[int | None]) -> LayoutUse:
        key = tuple(EVERYWHERE if cut is None else cut for cut in cuts)
        return found.setdefault(key, LayoutUse())

    if vertex.einsum is not None:
        state = plan.states[name]
        made = list(plan.made(name))
        for axis, label in enumerate(state):
            if label in vertex.partial_labels:
                made[axis] = PARTIAL
        use_of(made).events.append("made")
    if name in plan.layouts:
        use_of(plan.layouts[name]).events.append("kept")
    for user in graph.consumers[name]:
        for operand, read in enumerate(graph[user].inputs):
            if read != name:
                continue
            readers = use_of(plan.wanted(user, operand)).readers
            if user not in readers:
                readers.append(user)
    return found


MAX_DETAILED_TENSORS = (
    150  # with more of them, repeated layers share a box and EinSums are left out
)
MORE_LAYERS = "more layers"  # contains a space, so it cannot be a tensor's name
# Pixels.
LINE_HEIGHT = 18.0
PADDING = 10.0
TEXT_GAP = 14.0  # between two texts in a row
CHIP_FONT = 11.0
CHIP_GAP = 4.0
LEGEND_HEIGHT = 30.0
THINNEST_EDGE = 1.4
WIDEST_EDGE = 9.0
STAYING_EDGE = 1.2  # the width of an edge along which nothing moves
# What the picture and the tables call each reason for movement.
REASON_NAMES = {
    "join": "copies for a join",
    "aggregate": "partial results",
    "repartition": "repartitioning",
    "stays": "stays in place",
}


def shape_text(vertex: Vertex) -> str:
    return f"{vertex.dtype} {show_shape(vertex.bound)}"


@dataclass(frozen=True)
class _Drawn:
    """Which tensors get a box of their own; those of repeated layers share one box."""

    hidden: Mapping[str, str]  # tensor → its counterpart in the layer that is drawn
    layers: int  # how many layers are hidden

    def box(self, name: str) -> str:
        return MORE_LAYERS if name in self.hidden else name


def _choose_drawn(plan: Plan) -> _Drawn:
    if len(plan.graph.vertices) <= MAX_DETAILED_TENSORS:
        return _Drawn({}, 0)
    hidden = repeated_layers(plan.graph, results_of_none=True)
    layers = find_layers(plan.graph, results_of_none=True).layers
    return _Drawn(hidden, layers - 1 if hidden else 0)


def graph_picture(plan: Plan) -> Picture:
    """Draw the graph, inputs above their readers; wide edges move much."""
    drawn = _choose_drawn(plan)
    movements = edge_movements(plan)
    boxes = _boxes(plan, drawn, movements)
    edges = _edges(plan, drawn, movements)
    sizes = {name: box.size for name, box in boxes.items()}
    sources = [vertex.name for vertex in plan.graph.inputs if vertex.name in boxes]
    place = arrange(sizes, list(edges), sources)
    groups = _edge_groups(edges, place)
    for name, box in boxes.items():
        groups.append(box.at(place.centres[name]))
    legend, legend_width = _legend()
    width = max(place.width, legend_width)
    indent = (width - place.width) / 2
    below_legend = [shifted(group, indent, LEGEND_HEIGHT) for group in groups]
    title = (
        f"The graph of the program, cut over {counted(plan.mesh.ranks, 'rank')}: "
        f"{counted(len(plan.graph.computed), 'operation')}, "
        f"{show_bytes(plan.bytes_predicted)} moved{' a step' if plan.loops else ''}"
    )
    return Picture(width, place.height + LEGEND_HEIGHT, title, (legend, *below_legend))


# ---- boxes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    """A box with rows of texts, placed from left to right; `chips` are the last row."""

    style: str
    rows: tuple[tuple[Text, ...], ...]
    chips: tuple[tuple[str, str], ...]  # (text, style)
    hint: str

    @property
    def size(self) -> Point:
        widths = [sum(_chip_width(text) + CHIP_GAP for text, _ in self.chips)]
        for row in self.rows:
            gaps = TEXT_GAP * (len(row) - 1)
            widths.append(sum(text.width for text in row) + gaps)
        lines = len(self.rows)
        if self.chips:
            lines += 1
        return max(widths) + 2 * PADDING, LINE_HEIGHT * lines + PADDING

    def at(self, centre: Point) -> ShapeGroup:
        """Draw the box around a point."""
        width, height = self.size
        left = centre[0] - width / 2
        top = centre[1] - height / 2
        radius = 14.0 if self.style == "input" else 6.0
        shapes: list[Shape] = [Box(left, top, width, height, self.style, radius)]
        baseline = top + PADDING / 2 - 5
        for row in self.rows:
            baseline += LINE_HEIGHT
            x = left + PADDING
            for text in row:
                shapes.append(text.moved_to(x, baseline))
                x += text.width + TEXT_GAP
        baseline += LINE_HEIGHT
        x = left + PADDING
        for chip, style in self.chips:
            shapes += _chip_shapes(chip, style, x, baseline)
            x += _chip_width(chip) + CHIP_GAP
        return ShapeGroup(tuple(shapes), self.hint)


def _chip_shapes(text: str, style: str, x: float, baseline: float) -> list[Shape]:
    if style == "chip":
        colour = "join"
    elif style == "chip-partial":
        colour = "aggregate"
    else:
        return [Text(x, baseline, text, style, CHIP_FONT)]
    return [
        Box(x, baseline - 12, _chip_width(text), 16, style, 4.0),
        Text(x + 5, baseline, text, colour, CHIP_FONT, mono=True),
    ]


def _chip_width(text: str) -> float:
    return len(text) * CHIP_FONT * MONO_WIDTH + 10


def _boxes(plan: Plan, drawn: _Drawn, movements: Sequence[EdgeMovement]) -> dict[str, _Node]:
    into_layout = {each.tensor: each for each in movements if each.user is None}
    show_einsums = len(plan.graph.vertices) - len(drawn.hidden) <= MAX_DETAILED_TENSORS
    found: dict[str, _Node] = {}
    for vertex in plan.graph.vertices:
        name = drawn.box(vertex.name)
        if name != MORE_LAYERS:
            found[name] = _node(plan, vertex, into_layout.get(name), show_einsums)
        elif name not in found and not vertex.is_input:
            found[name] = _more_layers_node(plan, drawn, movements)
    return found


def _node(plan: Plan, vertex: Vertex, into_layout: EdgeMovement | None, show_einsum: bool) -> _Node:
    if vertex.is_input:
        style = "input"
    elif plan.graph.is_output(vertex.name):
        style = "output"
    else:
        style = "vertex"
    name = Text(0, 0, shortened(vertex.name, 24), "ink", 13, bold=True)
    rows: list[tuple[Text, ...]] = [(name, Text(0, 0, shape_text(vertex), "faint", 11))]
    if vertex.einsum is not None and show_einsum:
        einsum = shortened(vertex.einsum.summary(vertex.inputs), 42)
        rows.append((Text(0, 0, einsum, "ink", 11, mono=True),))
    chips = _chips(plan, vertex)
    if into_layout is not None:
        chips.append((f"+{show_bytes(into_layout.nbytes)}", into_layout.reason))
    return _Node(style, tuple(rows), tuple(chips), _hint(vertex, into_layout))


def _chips(plan: Plan, vertex: Vertex) -> list[tuple[str, str]]:
    """Return (text, style) of the small tags that say how a tensor is cut and kept."""
    chips = []
    if vertex.einsum is not None:
        for label, parts in plan.parts(vertex.name).items():
            if parts > 1:
                partial = label in vertex.partial_labels
                chips.append((f"{label}:{parts}", "chip-partial" if partial else "chip"))
        if not chips:
            chips.append(("not cut", "faint"))
    if vertex.name in plan.resident:
        chips.append(("resident", "faint"))
    if vertex.name in plan.layouts and vertex.bound and plan.mesh.ranks > 1:
        chips.append((f"kept {show_layout(plan, vertex.name)}", "faint"))
    return chips


def _hint(vertex: Vertex, into_layout: EdgeMovement | None) -> str:
    lines = [vertex.summary, f"{shape_text(vertex)}, {show_bytes(vertex.nbytes)}"]
    if vertex.einsum is not None:
        operations = vertex.operations()
        lines.append(f"{show_count(operations)} {plural(operations, 'operation')}")
    if into_layout is not None:
        reason = REASON_NAMES[into_layout.reason]
        lines.append(
            f"{show_bytes(into_layout.nbytes)} moved into the layout it is kept in ({reason})"
        )
    return "\n".join(lines)


def _more_layers_node(plan: Plan, drawn: _Drawn, movements: Sequence[EdgeMovement]) -> _Node:
    nbytes = 0
    for each in movements:
        owner = each.tensor if each.user is None else each.user
        if owner in drawn.hidden:
            nbytes += each.nbytes
    alike = True
    for name, model in drawn.hidden.items():
        same_state = plan.states.get(name) == plan.states.get(model)
        same_layout = plan.layouts.get(name) == plan.layouts.get(model)
        alike = alike and same_state and same_layout
    head = f"{counted(drawn.layers, 'more layer')} like this"
    tensors = f"{len(drawn.hidden):,} {plural(len(drawn.hidden), 'tensor')}"
    amount = f"{tensors}, {show_bytes(nbytes)} moved"
    cuts = "all cut alike" if alike else "some are cut differently: see the table"
    rows = (
        (Text(0, 0, head, "ink", 13, bold=True),),
        (Text(0, 0, amount, "ink", 11),),
        (Text(0, 0, cuts, "faint", 11),),
    )
    return _Node("more", rows, (), "")


# ---- edges ---------------------------------------------------------------------------------------


def _edges(
    plan: Plan, drawn: _Drawn, movements: Sequence[EdgeMovement]
) -> dict[Edge, list[EdgeMovement]]:
    """Return the edges between boxes, each with what moves along it."""
    found: dict[Edge, list[EdgeMovement]] = {}
    for vertex in plan.graph.vertices:
        for name in vertex.inputs:
            edge = drawn.box(name), drawn.box(vertex.name)
            if edge[0] != edge[1]:
                found.setdefault(edge, [])
    for each in movements:
        if each.user is None:
            continue
        edge = drawn.box(each.tensor), drawn.box(each.user)
        if edge in found:
            found[edge].append(each)
    return found


def _edge_groups(edges: Mapping[Edge, list[EdgeMovement]], place: Arrangement) -> list[ShapeGroup]:
    """Draw wide edges first, so that they do not cover narrow ones; texts come last."""
    amounts = {}
    for edge, moved in edges.items():
        amounts[edge] = sum(each.nbytes for each in moved)
    largest = max(amounts.values(), default=0) or 1
    out_degree = Counter(source for source, _ in edges)
    in_degree = Counter(target for _, target in edges)
    curves: list[ShapeGroup] = []
    labels: list[Text] = []
    backgrounds: list[Shape] = []
    for edge in sorted(edges, key=lambda edge: -amounts[edge]):
        source, target = edge
        amount = amounts[edge]
        if not amount:
            curve = Curve(place.routes[edge], "stays", STAYING_EDGE)
            curves.append(ShapeGroup((curve,), f"{source} → {target}: {REASON_NAMES['stays']}"))
            continue
        reason = main_reason(total_words(edges[edge]))
        width = THINNEST_EDGE + (WIDEST_EDGE - THINNEST_EDGE) * sqrt(amount / largest)
        curve = Curve(place.routes[edge], reason, width)
        hint = f"{source} → {target}: {show_bytes(amount)}, {REASON_NAMES[reason]}"
        curves.append(ShapeGroup((curve,), hint))
        at_target = out_degree[source] > in_degree[target]
        label = _edge_label(curve, show_bytes(amount), labels, at_target)
        left = label.x - label.width / 2 - 3
        backgrounds.append(Box(left, label.y - 11, label.width + 6, 15, "ground", 4.0))
        labels.append(label)
    return [*curves, ShapeGroup((*backgrounds, *labels))]


def _edge_label(curve: Curve, text: str, placed: Sequence[Text], at_target: bool) -> Text:
    """Put a text on an edge near one of its ends, where it covers no other text if possible."""
    beziers = curve.beziers()
    if at_target:
        piece = beziers[-1]
        positions = (0.6, 0.7, 0.5, 0.8, 0.4, 0.3)
    else:
        piece = beziers[0]
        positions = (0.4, 0.3, 0.5, 0.2, 0.6, 0.7)
    tried = []
    for t in positions:
        weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3)
        x = sum(weight * point[0] for weight, point in zip(weights, piece, strict=True))
        y = sum(weight * point[1] for weight, point in zip(weights, piece, strict=True))
        label = Text(x, y + 4, text, curve.style, 11, "middle", bold=True)
        if not overlap(label, placed):
            return label
        tried.append(label)
    return tried[0]


def _legend() -> tuple[ShapeGroup, float]:
    """Return the legend and its width."""
    shapes: list[Shape] = []
    x = MARGIN
    right = x
    for reason, name in REASON_NAMES.items():
        text = Text(x + 24, 21, name, reason, 11)
        shapes.append(Box(x, 14, 18, 5, reason, 2.0))
        shapes.append(text)
        right = text.x + text.width
        x += text.width + 46
    return ShapeGroup(tuple(shapes)), right + MARGIN
