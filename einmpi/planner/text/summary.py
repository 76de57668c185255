"""A summary of a plan in words: what is cut, what is sent to whom, what is combined."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from einmpi.planner.factor import Edge, Variable
from einmpi.planner.moving.traffic import edges_of_plan
from einmpi.planner.paper.costs import Cost
from einmpi.planner.plan_data import PlanData, cuts_of
from einmpi.planner.text.tables import Note, show_parts
from einmpi.units import counted, show_bytes

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


def movements(plan: PlanData) -> Iterator[Movement]:
    """Yield everything that a plan moves between ranks, in the order of the graph."""
    for edge, target, cuts, traffic in edges_of_plan(cuts_of(plan), plan.resident):
        if not traffic.words.total:
            continue
        made: list[int] = []
        if edge.source is not None:
            made = [edge.source_symbols[symbol] for symbol in cuts[0]]
        wanted = [edge.target_symbols[symbol] for symbol in cuts[-1]]
        replicated = edge.ndim
        partial = edge.ndim + 1
        itemsize = np.dtype(plan.graph[edge.tensor].dtype).itemsize
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
        )


def _uses(plan: PlanData, edge: Edge, target: Variable) -> int:
    """Return how many reads an edge serves: one, or all reads of a stored tensor."""
    if target.kind == "vertex":
        return 1
    users = plan.graph.consumers[edge.tensor]
    return sum(plan.graph[user].inputs.count(edge.tensor) for user in users)


# ---- as text ------------------------------------------------------------------------------------


def in_words(plan: PlanData) -> list[Note]:
    """Return at most four notes: what the plan cuts, sends, combines and moves most.

    They stay short for any number of vertices.
    """
    if plan.mesh.ranks == 1:
        return [("cuts", "nothing: one rank does it all")]
    position = plan.graph.position
    moved = sorted(movements(plan), key=lambda move: position[move.tensor])
    if not moved:
        return [("cuts", "; ".join(_cuts(plan))), ("sends", "nothing: each rank has what it needs")]
    notes = []
    for keyword, parts in (
        ("cuts", _cuts(plan)),
        ("sends", _copies(plan, moved) + _halos(moved) + _recuts(moved)),
        ("combines", _combines(plan, moved)),
        ("moves most", _most(moved)),
    ):
        if parts:
            notes.append((keyword, "; ".join(parts)))
    return notes


_Cut = tuple[tuple[str, int], ...]  # labels with their numbers of parts


def _cuts(plan: PlanData) -> list[str]:
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


def _grouped(
    moved: Sequence[Movement],
    key_of: Callable[[Movement], Key | None],
    show: Callable[[Key, list[str]], str],
) -> list[str]:
    """Return a text for each key of movements, which `show` makes; None is no key."""
    groups: _Groups[Key] = _Groups("tensor", "tensors")
    for move in moved:
        key = key_of(move)
        if key is not None:
            groups.add(key, move.tensor, move.nbytes)
    return groups.listed(show)


def _copies(plan: PlanData, moved: Sequence[Movement]) -> list[str]:
    """Return which tensors are copied to how many ranks."""

    def key_of(move: Movement) -> tuple[int, int] | None:
        return (move.copies, move.uses) if move.words.join and not move.is_halo else None

    def show(key: tuple[int, int], names: list[str]) -> str:
        copies, uses = key
        what = "all of" if copies == plan.mesh.ranks else "each part of"
        once = f", once for {uses} uses" if uses > 1 else ""
        return f"{what} {_list(names)} to {copies} ranks{once}"

    return _grouped(moved, key_of, show)


def _halos(moved: Sequence[Movement]) -> list[str]:
    """Return of which tensors ranks get what they lack for index arithmetic."""

    def show(key: bool, names: list[str]) -> str:
        return f"of {_list(names)}, what the indices of a rank reach outside of its part"

    return _grouped(moved, lambda move: move.is_halo or None, show)


def _recuts(moved: Sequence[Movement]) -> list[str]:
    """Return which tensors are cut along other dimensions, and how."""

    def show(key: str, names: list[str]) -> str:
        return f"{_list(names)} anew, cut {key}"

    def key_of(move: Movement) -> str | None:
        if not move.words.repartition:
            return None
        return f"{show_parts(move.made)} and then {show_parts(move.wanted)}"

    return _grouped(moved, key_of, show)


def _combines(plan: PlanData, moved: Sequence[Movement]) -> list[str]:
    """Return which partial results are combined over how many ranks."""

    def key_of(move: Movement) -> str | None:
        if not move.words.aggregate:
            return None
        aggregation = plan.graph[move.tensor].computed_einsum.aggregation
        return f"over {move.partials} ranks ({aggregation})"

    def show(key: str, names: list[str]) -> str:
        return f"partial results of {_list(names)} {key}"

    return _grouped(moved, key_of, show)


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
