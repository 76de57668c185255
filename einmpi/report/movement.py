"""What a plan moves along each edge of the graph, and the layouts that each tensor goes through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from einmpi.planner.moving.traffic import NOTHING
from einmpi.planner.paper.costs import Cost
from einmpi.planner.plan import Plan
from einmpi.planner.plan_data import cuts_of
from einmpi.planner.text.summary import movements

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
    cut = cuts_of(plan)
    vertex = graph[name]
    found: dict[Cuts, LayoutUse] = {}

    def use_of(cuts: Sequence[int | None]) -> LayoutUse:
        key = tuple(EVERYWHERE if cut is None else cut for cut in cuts)
        return found.setdefault(key, LayoutUse())

    if vertex.einsum is not None:
        state = plan.states[name]
        made = list(cut.made(name))
        for axis, label in enumerate(state):
            if label in vertex.einsum.aggregated:
                made[axis] = PARTIAL
        use_of(made).events.append("made")
    if name in plan.layouts:
        use_of(plan.layouts[name]).events.append("kept")
    for user in graph.consumers[name]:
        for operand, read in enumerate(graph[user].inputs):
            if read != name:
                continue
            readers = use_of(cut.wanted(user, operand)).readers
            if user not in readers:
                readers.append(user)
    return found
