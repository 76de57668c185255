"""A summary of a plan in words: what is cut, what is sent to whom, what is combined."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from einmpi.graph.eingraph import Vertex
from einmpi.planner.factor import Edge, Variable
from einmpi.planner.grids import inner_words
from einmpi.planner.moving.volume import edge_traffic, edges_of_plan
from einmpi.planner.paper import Cost
from einmpi.planner.plan import Plan
from einmpi.planner.repetition import find_layers
from einmpi.units import counted, show_bytes, show_count

# ---- tables --------------------------------------------------------------------------------------
#
# Columns of text side by side, and notes below them.


Row = tuple[str, ...]
Note = tuple[str, str]  # a keyword, which may be empty, and the text that belongs to it

KEYWORD_COLUMNS = 13  # width of the keyword that begins a note


def show_cuts(plan: Plan, name: str) -> str:
    """Return the parts of the labels of a vertex that are cut: "i:2 k:4"."""
    cut = [f"{label}:{parts}" for label, parts in plan.parts(name).items() if parts > 1]
    return " ".join(cut)


def show_layout(plan: Plan, name: str) -> str:
    """Return the number of parts of each dimension in the layout a tensor is kept in: [4,2]."""
    return show_parts(plan.mesh.parts(plan.layouts[name], range(len(plan.graph[name].bound))))


def show_parts(parts: Sequence[int]) -> str:
    """Return the number of parts of each dimension: "[4,2]"."""
    return f"[{','.join(map(str, parts))}]"


def note_line(note: Note) -> str:
    """Return a note as a line of text: "digest       0123456789abcdef"."""
    keyword, text = note
    if not keyword:
        return text
    return f"{keyword:<{KEYWORD_COLUMNS}}{text}"


def table_lines(rows: Sequence[Row], left: int = 1) -> list[str]:
    """Return the rows with their columns aligned, the first `left` columns to the left."""
    widths = []
    for column in range(len(rows[0])):
        widths.append(max(len(row[column]) for row in rows))
    lines = []
    for row in rows:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.ljust(width) if column < left else cell.rjust(width))
        lines.append("  ".join(cells))
    return lines


MOST_NAMES = 6  # that are listed; more are counted
MOST_GROUPS = 3

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Movement:
    """A tensor on its way: made or stored in one layout, stored or read in another."""

    tensor: str
    user: str | None  # the vertex that reads it there; None where it is stored
    words: Cost  # that move as copies, as partial results, because it is cut in another way
    copies: int  # ranks that have each element in the end
    partials: int  # ranks whose results are combined into each element
    uses: int  # reads that this serves
    made: tuple[int, ...]  # parts of each dimension before
    wanted: tuple[int, ...]  # parts of each dimension after
    nbytes: int  # that move
    is_halo: bool = False  # the copied words are what ranks lack for index arithmetic
    # If they are what lists of indices name: words that would move if nobody knew these lists.
    words_unlisted: int | None = None


def movements(plan: Plan) -> Iterator[Movement]:
    """Yield everything that a plan moves between ranks, in the order of the graph."""
    for edge, target, cuts, traffic in edges_of_plan(plan, plan.resident):
        if not traffic.words.total:
            continue
        made: list[int] = []
        if edge.source is not None:
            made = [edge.source_symbols[symbol] for symbol in cuts[0]]
        wanted = [edge.target_symbols[symbol] for symbol in cuts[-1]]
        replicated = edge.ndim
        partial = edge.ndim + 1
        itemsize = np.dtype(plan.graph[edge.tensor].dtype).itemsize
        unlisted = None
        if edge.needed is not None and edge.needed.lists:
            unknown = replace(edge, needed=replace(edge.needed, lists=()))
            unlisted = edge_traffic(plan.mesh, unknown, cuts).times(edge.weight).words.total
        yield Movement(
            edge.tensor,
            target.name if target.kind == "vertex" else None,
            traffic.words,
            copies=plan.mesh.parts(wanted, [replicated])[0],
            partials=plan.mesh.parts(made, [partial])[0] if made else 1,
            uses=_uses(plan, edge, target),
            made=plan.mesh.parts(made, range(edge.ndim)) if made else (),
            wanted=plan.mesh.parts(wanted, range(edge.ndim)),
            nbytes=traffic.words.total * itemsize,
            is_halo=edge.needed is not None,
            words_unlisted=unlisted,
        )


def ghosts(plan: Plan) -> dict[str, tuple[int, int]]:
    """Return what moves of tensors by lists of indices, and what would move without these."""
    found: dict[str, tuple[int, int]] = {}
    for move in movements(plan):
        if move.words_unlisted is not None:
            words, unlisted = found.get(move.tensor, (0, 0))
            found[move.tensor] = words + move.words.total, unlisted + move.words_unlisted
    return found


def _uses(plan: Plan, edge: Edge, target: Variable) -> int:
    """Return how many reads an edge serves: one, or all reads of a stored tensor."""
    if target.kind == "vertex":
        return 1
    users = plan.graph.consumers[edge.tensor]
    return sum(plan.graph[user].inputs.count(edge.tensor) for user in users)


# ---- as text ------------------------------------------------------------------------------------


def in_words(plan: Plan) -> list[Note]:
    """Return at most five notes: what the plan cuts, sends, combines, moves most, and its balance.

    They stay short for any number of vertices.
    """
    if plan.mesh.ranks == 1:
        return [("cuts", "nothing: one rank does it all")]
    position = plan.graph.position
    moved = sorted(movements(plan), key=lambda move: position[move.tensor])
    large = [each.name for each in plan.graph.computed if inner_words(plan.graph, each)]
    panels = [f"panels of {_list(large)}"] if large else []
    if not moved and not panels:
        nothing = "nothing: each rank has what it needs"
        return [("cuts", "; ".join(_cuts(plan))), ("sends", nothing), *_balance(plan)]
    phrases: dict[str, _Groups[_Phrase]] = {}
    for kind in ("copies", "halos", "new cuts", "partial results"):
        phrases[kind] = _Groups("tensor", "tensors")
    for move in moved:
        for kind, phrase in _phrases(plan, move):
            phrases[kind].add(phrase, move.tensor, move.nbytes)

    def show(phrase: _Phrase, names: list[str]) -> str:
        return f"{phrase[0]}{_list(names)}{phrase[1]}"

    copies, halos, new_cuts, combined = (group.listed(show) for group in phrases.values())
    notes = []
    for keyword, parts in (
        ("cuts", _cuts(plan)),
        ("sends", copies + halos + new_cuts + panels),
        ("ghosts", _ghosts(plan)),
        ("combines", combined),
        ("moves most", _most(moved) if moved else []),
    ):
        if parts:
            notes.append((keyword, "; ".join(parts)))
    return notes + _balance(plan)


def _ghosts(plan: Plan) -> list[str]:
    """Return what ranks fetch because indices name it, the tensors that move most first."""
    moved = sorted(ghosts(plan).items(), key=lambda each: -each[1][0])
    shown = [f"{name}, {words:,} words of {unlisted:,}" for name, (words, unlisted) in moved]
    if len(shown) > MOST_GROUPS:
        shown[MOST_GROUPS:] = [f"{len(shown) - MOST_GROUPS} more"]
    return [f"of {each}" if number == 0 else each for number, each in enumerate(shown)]


# What stands before and after the names of tensors that move alike, and for how many uses.
_Phrase = tuple[str, str, int]


def _phrases(plan: Plan, move: Movement) -> Iterator[tuple[str, _Phrase]]:
    """Yield what is said of a movement, each time with its kind."""
    if move.words_unlisted is not None:
        return  # a note of its own
    if move.is_halo:
        yield "halos", ("of ", ", what the indices of a rank reach outside of its part", 0)
    elif move.words.join:
        what = "all of" if move.copies == plan.mesh.ranks else "each part of"
        once = f", once for {move.uses} uses" if move.uses > 1 else ""
        yield "copies", (f"{what} ", f" to {move.copies} ranks{once}", move.uses)
    if move.words.repartition:
        cuts = f"{show_parts(move.made)} and then {show_parts(move.wanted)}"
        yield "new cuts", ("", f" anew, cut {cuts}", 0)
    if move.words.aggregate:
        aggregation = plan.graph[move.tensor].computed_einsum.aggregation
        over = f" over {move.partials} ranks ({aggregation})"
        yield "partial results", ("partial results of ", over, 0)


_Cut = tuple[tuple[str, int], ...]  # labels with their numbers of parts


def _cuts(plan: Plan) -> list[str]:
    """Return the most frequent cuts first. Labels of different vertices may have the same name."""
    groups: _Groups[tuple[_Cut, int]] = _Groups("vertex", "vertices")
    for name, state in plan.states.items():
        cut = tuple((label, parts) for label, parts in plan.parts(name).items() if parts > 1)
        replicas = plan.mesh.parts(state, [None])[0]
        groups.add((cut, replicas), name, 1)

    def show(key: tuple[_Cut, int], names: list[str]) -> str:
        cut, replicas = key
        labels_by_parts: dict[int, list[str]] = {}
        for label, parts in cut:
            labels_by_parts.setdefault(parts, []).append(label)
        phrases = []
        for parts, labels in labels_by_parts.items():
            each = " each" if len(labels) > 1 else ""
            phrases.append(f"{_and(labels)} in {parts}{each}")
        what = ", ".join(phrases) or "nothing"
        again = ""
        if replicas > 1:
            again = f", {'each part' if cut else 'all'} on {replicas} ranks"
        return f"{what}{again} ({_vertex_list(names, len(plan.states))})"

    return groups.listed(show)


LEAST_SHARE_OF_WORK = 0.8  # below it, the balance of a plan is worth a note


def _balance(plan: Plan) -> list[Note]:
    """Return how much of its time a rank works on average, if parts differ a lot in length.

    The label that is cut most unevenly is named: 10 indices in 8 parts are 2 each on 5 ranks.
    """
    most_lost = 0.0
    work, time = 0, 0
    named = ""
    for vertex in plan.graph.computed:
        einsum = vertex.computed_einsum
        own = vertex.operations() * plan.mesh.parts(plan.states[vertex.name], [None])[0]
        busiest = plan.mesh.ranks * plan.operations_of_busiest(vertex)
        work += own
        time += busiest
        for label, share in plan.longest_shares(vertex).items():
            extent, parts = einsum.extent[label], plan.parts(vertex.name).get(label, 1)
            lost = busiest * (1 - extent / (parts * share)) if share else 0.0
            if lost > most_lost:
                most_lost = lost
                named = f"{label} = {extent} in {parts} parts of up to {share} ({vertex.name})"
    if not named or work >= LEAST_SHARE_OF_WORK * time:
        return []
    return [("balance", f"ranks are busy {100 * work / time:.3g} % of the time: {named}")]


def _most(moved: Sequence[Movement]) -> list[str]:
    """Return the tensor, or the tensors, of which most bytes move."""
    totals: dict[str, int] = {}
    for move in moved:
        totals[move.tensor] = totals.get(move.tensor, 0) + move.nbytes
    most = max(totals.values())
    names = [name for name, total in totals.items() if total == most]
    each = " each" if len(names) > 1 else ""
    return [f"{_list(names)}: {show_bytes(most)}{each} of {show_bytes(sum(totals.values()))}"]


class _Groups(Generic[Key]):
    """Names grouped by key, each name once, with the weight of each key."""

    def __init__(self, thing: str, things: str) -> None:
        self.thing = thing  # what a name is the name of
        self.things = things
        self.names: dict[Key, dict[str, None]] = {}
        self.weights: dict[Key, int] = {}

    def add(self, key: Key, name: str, weight: int) -> None:
        self.names.setdefault(key, {})[name] = None
        self.weights[key] = self.weights.get(key, 0) + weight

    def listed(self, show: Callable[[Key, list[str]], str]) -> list[str]:
        """Return the texts of the heaviest keys, of equal ones the first; others are counted."""
        order = sorted(self.names, key=lambda key: -self.weights[key])
        texts = [show(key, list(self.names[key])) for key in order[:MOST_GROUPS]]
        others = order[MOST_GROUPS:]
        if others:
            names = {name for key in others for name in self.names[key]}
            ways = counted(len(others), "more way")
            texts.append(f"{ways} for {counted(len(names), self.thing, self.things)}")
        return texts


def _and(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _list(names: Sequence[str]) -> str:
    """Return the first names and a count of the rest; all names where one would be left out."""
    if len(names) <= MOST_NAMES + 1:
        return ", ".join(names)
    return f"{', '.join(names[:MOST_NAMES])} and {len(names) - MOST_NAMES} more"


def _vertex_list(names: Sequence[str], vertices: int) -> str:
    """Return a list of names, or "all … vertices" if it is long and has them all."""
    if len(names) == vertices and len(names) > MOST_NAMES + 1:
        return f"all {vertices} vertices"
    return _list(names)


# ---- folding -------------------------------------------------------------------------------------
#
# Repeated layers in tables of a plan: what is the same as in the layer before is one line.


MOST_UNFOLDED = 40  # vertices; a graph with no more is shown whole
LEAST_FOLDED = 4  # vertices one after another; fewer are shown


class Fold(NamedTuple):
    """Vertices one after another, each cut and moved as the same one of the layer before."""

    vertices: tuple[Vertex, ...]
    first_layer: int  # layers are counted from 1
    last_layer: int

    @property
    def text(self) -> str:
        """What stands in a table instead of the vertices."""
        first = self.vertices[0].name
        last = self.vertices[-1].name
        layers = f"layer {self.first_layer}"
        if self.last_layer > self.first_layer:
            layers = f"layers {self.first_layer} to {self.last_layer}"
        count = show_count(len(self.vertices))
        return f"… {first} to {last}: {count} vertices of {layers}, each as in the layer before"


def vertices_and_folds(plan: Plan, full: bool = False) -> list[Vertex | Fold]:
    """Return what a table shows, in order: vertices, and folds for others; `full` has no folds."""
    computed = plan.graph.computed
    shown: list[Vertex | Fold] = []
    next_place = 0
    for start, end, fold in () if full else _folds(plan):
        shown += computed[next_place:start]
        shown.append(fold)
        next_place = end
    shown += computed[next_place:]
    return shown


def folded_vertices(plan: Plan) -> frozenset[str]:
    """Return the names of the vertices that tables do not show."""
    names: set[str] = set()
    for each in vertices_and_folds(plan):
        if isinstance(each, Fold):
            names.update(vertex.name for vertex in each.vertices)
    return frozenset(names)


def _folds(plan: Plan) -> Iterator[tuple[int, int, Fold]]:
    """Yield the place of the first vertex of each fold, the place after its last, and the fold."""
    computed = plan.graph.computed
    if len(computed) <= MOST_UNFOLDED:
        return
    start, period, count = _whole_layers(plan)
    end = start + period * count
    first = start + period
    for place in range(start + period, end + 1):
        if place < end and _look_alike(plan, computed[place], computed[place - period]):
            continue
        if place - first >= LEAST_FOLDED:
            first_layer = (first - start) // period + 1
            last_layer = (place - 1 - start) // period + 1
            yield first, place, Fold(computed[first:place], first_layer, last_layer)
        first = place + 1


def _whole_layers(plan: Plan) -> tuple[int, int, int]:
    """Return the place of the first layer, the vertices of a layer, and the number of layers.

    The search for layers looks at what surrounds each vertex, so that it leaves out parts of the
    first and of the last layer, which read an input or are an output. Here they are included.
    """
    computed = plan.graph.computed
    start, period, count = find_layers(plan.graph, results_of_none=True)
    if not count:
        return 0, 1, 1
    end = start + period * count
    while start > 0 and computed[start - 1].einsum == computed[start - 1 + period].einsum:
        start -= 1
    while end < len(computed) and computed[end].einsum == computed[end - period].einsum:
        end += 1
    return start, period, (end - start) // period


def _look_alike(plan: Plan, vertex: Vertex, before: Vertex) -> bool:
    """Return whether a plan says the same of two vertices that compute the same."""
    for name, name_before in zip(vertex.inputs, before.inputs, strict=True):
        if plan.layouts.get(name) != plan.layouts.get(name_before):
            return False
    return (
        vertex.einsum == before.einsum
        and vertex.dtype == before.dtype
        and plan.states[vertex.name] == plan.states[before.name]
        and plan.layouts.get(vertex.name) == plan.layouts.get(before.name)
        and plan.bills[vertex.name] == plan.bills[before.name]
        and plan.notes.get(vertex.name) == plan.notes.get(before.name)
    )
