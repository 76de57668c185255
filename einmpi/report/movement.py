"""What a plan moves on each edge of the graph, tensor by tensor; and how each tensor lies on the ranks on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from einmpi.planner.factor import factor
from einmpi.planner.make_plan import Plan
from einmpi.planner.memory import operand_cuts, output_cuts
from einmpi.planner.text.summary import symbols
from einmpi.planner.traffic import edge_traffic

WAYS = ("join", "aggregate", "repartition")  # copies for a join, partial results, changes of cut
PARTIAL = -2  # an axis whose ranks hold partial results of the same block
EVERYWHERE = -1  # an axis whose ranks hold the same


@dataclass(frozen=True)
class Movement:
    """A tensor on its way to a vertex that reads it; or, where `user` is None, into the layout in which it is kept."""

    tensor: str
    user: str | None
    words: tuple[int, int, int]  # in each of WAYS
    nbytes: int

    @property
    def way(self) -> str:
        """The way that moves most; empty where nothing moves."""
        return WAYS[self.words.index(max(self.words))] if self.nbytes else ""


def movements(plan: Plan) -> tuple[Movement, ...]:
    """One for each pair of a tensor and its user; together they move what the plan moves."""
    # All tensors that have a layout are given as pinned: then they are the same ones as in the plan.
    whole = factor(plan.graph, plan.resident, plan.layouts)
    found: dict[tuple[str, str | None], list[int]] = {}
    for edge in whole.edges:
        target = whole.variables[edge.target]
        ends = [target] if edge.source is None else [whole.variables[edge.source], target]
        cuts = [symbols(plan, end) for end in ends]
        words = edge_traffic(plan.mesh, edge, cuts).words
        total = found.setdefault(
            (edge.tensor, target.name if target.kind == "vertex" else None), [0, 0, 0]
        )
        for column, amount in enumerate(words):
            total[column] += edge.weight * amount
    size = {vertex.name: np.dtype(vertex.dtype).itemsize for vertex in plan.graph.vertices}
    return tuple(
        Movement(
            tensor,
            user,
            (join, aggregate, repartition),
            (join + aggregate + repartition) * size[tensor],
        )
        for (tensor, user), (join, aggregate, repartition) in found.items()
    )


def ways_it_lies(plan: Plan, name: str) -> dict[tuple[int, ...], tuple[list[str], list[str]]]:
    """The layouts of a tensor in the order of its life: for each axis of the mesh a dimension, EVERYWHERE or PARTIAL.

    With each goes when it lies so: ("made", "kept"), and the vertices that read it so.
    """
    graph, vertex = plan.graph, plan.graph[name]
    found: dict[tuple[int, ...], tuple[list[str], list[str]]] = {}

    def at(cuts: Sequence[int | None]) -> tuple[list[str], list[str]]:
        return found.setdefault(tuple(EVERYWHERE if cut is None else cut for cut in cuts), ([], []))

    if vertex.einsum is not None:
        aggregated, state = vertex.einsum.aggregated, plan.states[name]
        made = output_cuts(graph, name, state)
        at(
            [
                PARTIAL if label in aggregated else cut
                for label, cut in zip(state, made, strict=True)
            ]
        )[0].append("made")
    if name in plan.layouts:
        at(plan.layouts[name])[0].append("kept")
    for user in graph.consumers[name]:
        for operand, read in enumerate(graph[user].inputs):
            users = (
                at(operand_cuts(graph, user, operand, plan.states[user]))[1]
                if read == name
                else [user]
            )
            if user not in users:
                users.append(user)
    return found
