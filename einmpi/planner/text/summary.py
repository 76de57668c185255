"""A plan in a few words: what is cut, what is sent to whom, what is combined. Few lines for any number of vertices."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from einmpi.planner.factor import Edge, Variable, factor
from einmpi.planner.plan_data import PlanData
from einmpi.planner.text.tables import Note
from einmpi.planner.traffic import edge_traffic
from einmpi.units import show_bytes

_NAMES, _GROUPS = 6, 3  # that are listed; the rest is counted

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Movement:
    """A tensor on its way: from where it is made, or stored, to where it is stored, or read."""

    tensor: str
    user: str | None  # the vertex that reads it there; None where it is stored
    copied: int  # words that move as copies,
    combined: int  # as partial results,
    recut: int  # or because the tensor is cut along other dimensions
    copies: int  # ranks that have each element in the end
    partials: int  # ranks whose results are combined into each element
    uses: int  # reads that this serves
    made: tuple[int, ...]  # parts of each dimension before,
    wanted: tuple[int, ...]  # and after
    nbytes: int  # that move


def movements(plan: PlanData) -> Iterator[Movement]:
    """Everything that a plan moves between ranks, in the order of the graph."""
    problem = factor(plan.graph, plan.resident, plan.layouts)
    for edge in problem.edges:
        target = problem.variables[edge.target]
        source = None if edge.source is None else problem.variables[edge.source]
        cuts = [symbols(plan, end) for end in (source, target) if end is not None]
        tensor = plan.graph[edge.tensor]
        words = edge_traffic(plan.mesh, edge, cuts).words
        copied, combined, recut = (edge.weight * amount for amount in words)
        if not copied + combined + recut:
            continue
        made = [edge.source_symbols[symbol] for symbol in cuts[0]] if source else []
        wanted = [edge.target_symbols[symbol] for symbol in cuts[-1]]
        yield Movement(
            edge.tensor,
            target.name if target.kind == "vertex" else None,
            copied,
            combined,
            recut,
            copies=plan.mesh.parts(wanted, [edge.ndim])[0],
            partials=plan.mesh.parts(made, [edge.ndim + 1])[0] if source else 1,
            uses=_uses(plan, edge, target),
            made=plan.mesh.parts(made, range(edge.ndim)) if source else (),
            wanted=plan.mesh.parts(wanted, range(edge.ndim)),
            nbytes=(copied + combined + recut) * np.dtype(tensor.dtype).itemsize,
        )


def symbols(plan: PlanData, end: Variable) -> tuple[int, ...]:
    """What each axis of the mesh cuts there, by number."""
    whole = len(end.extents)
    if end.kind == "tensor":
        return tuple(whole if cut is None else cut for cut in plan.layouts[end.name])
    einsum = plan.graph[end.name].einsum
    assert einsum is not None
    return tuple(
        whole if cut is None else einsum.labels.index(cut) for cut in plan.states[end.name]
    )


def _uses(plan: PlanData, edge: Edge, target: Variable) -> int:
    if target.kind == "vertex":
        return 1
    return sum(
        plan.graph[user].inputs.count(edge.tensor) for user in plan.graph.consumers[edge.tensor]
    )


# ---- as text --------------------------------------------------------------------------------------------------------


def in_words(plan: PlanData) -> list[Note]:
    """At most four lines, each with what a plan does: cuts, sends, combines, moves most."""
    if plan.mesh.ranks == 1:
        return [("cuts", "nothing: one rank does it all")]
    position = {vertex.name: k for k, vertex in enumerate(plan.graph.vertices)}
    moved = sorted(movements(plan), key=lambda move: position[move.tensor])
    if not moved:
        return [("cuts", "; ".join(_cuts(plan))), ("sends", "nothing: each rank has what it needs")]
    sent = _copies(plan, moved) + _recuts(moved)
    lines = {
        "cuts": _cuts(plan),
        "sends": sent,
        "combines": _combines(plan, moved),
        "moves most": _most(moved),
    }
    return [(word, "; ".join(parts)) for word, parts in lines.items() if parts]


def _cuts(plan: PlanData) -> list[str]:
    """The most frequent cuts first. Labels of different vertices may have the same name."""
    groups: _Groups[tuple[tuple[tuple[str, int], ...], int]] = _Groups("vertices")
    for name, state in plan.states.items():
        cut = tuple((label, parts) for label, parts in plan.parts(name).items() if parts > 1)
        groups.add((cut, plan.mesh.parts(state, [None])[0]), name, 1)

    def show(key: tuple[tuple[tuple[str, int], ...], int], names: list[str]) -> str:
        cut, same = key
        labels = {parts: [label for label, count in cut if count == parts] for _, parts in cut}
        each = {parts: " each" if len(known) > 1 else "" for parts, known in labels.items()}
        what = (
            ", ".join(f"{_and(known)} in {parts}{each[parts]}" for parts, known in labels.items())
            or "nothing"
        )
        again = f", {'each part' if cut else 'all'} on {same} ranks" if same > 1 else ""
        return f"{what}{again} ({_list(names, of=len(plan.states))})"

    return groups.listed(show)


def _copies(plan: PlanData, moved: Sequence[Movement]) -> list[str]:
    groups: _Groups[tuple[int, int]] = _Groups("tensors")
    for move in moved:
        if move.copied:
            groups.add((move.copies, move.uses), move.tensor, move.nbytes)

    def show(key: tuple[int, int], names: list[str]) -> str:
        copies, uses = key
        what = "all of" if copies == plan.mesh.ranks else "each part of"
        once = f", once for {uses} uses" if uses > 1 else ""
        return f"{what} {_list(names)} to {copies} ranks{once}"

    return groups.listed(show)


def _recuts(moved: Sequence[Movement]) -> list[str]:
    groups: _Groups[tuple[tuple[int, ...], tuple[int, ...]]] = _Groups("tensors")
    for move in moved:
        if move.recut:
            groups.add((move.made, move.wanted), move.tensor, move.nbytes)
    return groups.listed(
        lambda key, names: f"{_list(names)} anew, cut {_parts(key[0])} and then {_parts(key[1])}"
    )


def _combines(plan: PlanData, moved: Sequence[Movement]) -> list[str]:
    groups: _Groups[tuple[int, str]] = _Groups("tensors")
    for move in moved:
        if move.combined:
            einsum = plan.graph[move.tensor].einsum
            assert einsum is not None and einsum.aggregation is not None
            groups.add((move.partials, einsum.aggregation), move.tensor, move.nbytes)
    return groups.listed(
        lambda key, names: f"partial results of {_list(names)} over {key[0]} ranks ({key[1]})"
    )


def _most(moved: Sequence[Movement]) -> list[str]:
    totals: dict[str, int] = {}
    for move in moved:
        totals[move.tensor] = totals.get(move.tensor, 0) + move.nbytes
    most = max(totals.values())
    names = [name for name, total in totals.items() if total == most]
    each = " each" if len(names) > 1 else ""
    return [f"{_list(names)}: {show_bytes(most)}{each} of {show_bytes(sum(totals.values()))}"]


class _Groups(Generic[Key]):
    """Names with the same key, each once, and how much a key weighs."""

    def __init__(self, things: str) -> None:
        self.things = things
        self.names: dict[Key, dict[str, None]] = {}
        self.weights: dict[Key, int] = {}

    def add(self, key: Key, name: str, weight: int) -> None:
        self.names.setdefault(key, {})[name] = None
        self.weights[key] = self.weights.get(key, 0) + weight

    def listed(self, show: Callable[[Key, list[str]], str]) -> list[str]:
        """The weightiest keys, of equal ones the first; the others are counted."""
        order = sorted(self.names, key=lambda key: -self.weights[key])
        shown = [show(key, list(self.names[key])) for key in order[:_GROUPS]]
        rest = {name for key in order[_GROUPS:] for name in self.names[key]}
        return (
            [*shown, f"{len(order) - _GROUPS} more ways for {len(rest)} {self.things}"]
            if rest
            else shown
        )


def _and(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _list(names: Sequence[str], of: int = 0) -> str:
    """The first names; all of them where only one would be left out, and "all" of more than a few."""
    if len(names) <= _NAMES + 1:
        return ", ".join(names)
    return (
        f"all {of} vertices"
        if len(names) == of
        else f"{', '.join(names[:_NAMES])} and {len(names) - _NAMES} more"
    )


def _parts(parts: Sequence[int]) -> str:
    return f"[{','.join(map(str, parts))}]"
