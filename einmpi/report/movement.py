"""What a plan moves along each edge of the graph, and the layouts that each tensor goes through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from einmpi.planner.memory import operand_cuts, output_cuts
from einmpi.planner.plan import Plan
from einmpi.planner.text.summary import movements

REASONS = ("join", "aggregate", "repartition")  # why words move: copies, partial results, new cuts
PARTIAL = -2  # a mesh axis along which each rank holds a partial result of the same block
EVERYWHERE = -1  # a mesh axis along which every rank holds the same block

Words = tuple[int, int, int]  # one amount for each of REASONS
Cuts = tuple[int, ...]  # for each mesh axis a dimension of the tensor, EVERYWHERE or PARTIAL


@dataclass(frozen=True)
class EdgeMovement:
    """All movement of a tensor to one vertex, or (`user` is None) into the layout it is kept in."""

    tensor: str
    user: str | None
    words: Words
    nbytes: int

    @property
    def reason(self) -> str:
        """The reason for most of the movement; empty if nothing moves."""
        return main_reason(self.words)


def main_reason(words: Words) -> str:
    """Return the reason with the most words; empty if no words move."""
    if not any(words):
        return ""
    return REASONS[words.index(max(words))]


def total_words(movements: Sequence[EdgeMovement]) -> Words:
    """Add up the words of several movements, reason by reason."""
    join = sum(each.words[0] for each in movements)
    aggregate = sum(each.words[1] for each in movements)
    repartition = sum(each.words[2] for each in movements)
    return join, aggregate, repartition


def edge_movements(plan: Plan) -> tuple[EdgeMovement, ...]:
    """Return one record for each pair of a tensor that moves and its user.

    Together they move exactly what the plan moves.
    """
    found: dict[tuple[str, str | None], EdgeMovement] = {}
    for each in movements(plan):
        edge = each.tensor, each.user
        before = found.get(edge, EdgeMovement(each.tensor, each.user, (0, 0, 0), 0))
        join, aggregate, repartition = before.words
        words = join + each.copied, aggregate + each.combined, repartition + each.recut
        found[edge] = EdgeMovement(each.tensor, each.user, words, before.nbytes + each.nbytes)
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
        made = list(output_cuts(graph, name, state))
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
            readers = use_of(operand_cuts(graph, user, operand, plan.states[user])).readers
            if user not in readers:
                readers.append(user)
    return found
