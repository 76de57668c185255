"""What a checkpoint holds after some vertices of a graph, or after some steps of a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from einmpi.graph.eingraph import EinGraph
from einmpi.graph.remainder import in_order, needed
from einmpi.job.loop import MOST_STEPS, Loop
from einmpi.units import counted


class SavedKind(NamedTuple):
    """A tensor of a checkpoint by its name, shape and dtype."""

    name: str
    bound: tuple[int, ...]
    dtype: str


class EndedLoop(NamedTuple):
    """A loop that has ended before the one of a checkpoint."""

    steps: int
    is_done: bool  # whether its condition held


class Contents(Protocol):
    """What checkpoints hold. They are numbered by what is done."""

    most: int  # the highest number
    ended: tuple[EndedLoop, ...]  # loops before the one that is running
    order: tuple[str, ...]  # of vertices, if they are not in the order of the program

    def after(self, ended: Sequence[EndedLoop]) -> Contents:
        """Return what checkpoints hold after these loops; raise ValueError if there are none."""

    def in_order(self, names: Sequence[str]) -> Contents:
        """Return what checkpoints hold if vertices come in this order; no names: as they are.

        Raise ValueError if they cannot be computed in this order.
        """

    def tensors(self, done: int) -> list[SavedKind]:
        """Return the tensors of a checkpoint, in order."""

    def place(self, done: int) -> str:
        """Return what was done last, for messages: "Z" or "step 99"."""

    def progress(self, done: int) -> str:
        """Return how far the run was: "3 of 7 vertices"."""


class GraphContents:
    """After the first vertices of a graph: the tensors that later vertices and outputs need."""

    ended: tuple[EndedLoop, ...] = ()

    def __init__(self, graph: EinGraph, order: Sequence[str] = ()) -> None:
        self.graph = graph
        self.order = tuple(order)
        self.most = len(graph.computed)

    def after(self, ended: Sequence[EndedLoop]) -> Contents:
        if ended:
            raise ValueError("the job has no loops")
        return self

    def in_order(self, names: Sequence[str]) -> GraphContents:
        if list(names) == [vertex.name for vertex in self.graph.computed] or not names:
            return self
        return GraphContents(in_order(self.graph, names), names)

    def tensors(self, done: int) -> list[SavedKind]:
        kinds = []
        for name in needed(self.graph, done):
            vertex = self.graph[name]
            kinds.append(SavedKind(name, vertex.bound, vertex.dtype))
        return kinds

    def place(self, done: int) -> str:
        return self.graph.computed[done - 1].name

    def progress(self, done: int) -> str:
        return f"{done} of {counted(self.most, 'vertex', 'vertices')}"


class LoopKinds(NamedTuple):
    """What a loop adds to a checkpoint."""

    loop: Loop
    graph: EinGraph  # of a step, as written
    kept: tuple[SavedKind, ...]  # results of earlier loops that are still needed


class LoopContents:
    """After some steps of a loop: what is carried, and the values that were recorded.

    Of several loops, also what is still needed of those that have ended, and their records. The
    steps of all loops are counted together.
    """

    most = MOST_STEPS
    order: tuple[str, ...] = ()

    def __init__(self, loops: Sequence[LoopKinds], ended: Sequence[EndedLoop] = ()) -> None:
        self.loops = loops
        self.ended = tuple(ended)
        self.steps_before = sum(each.steps for each in ended)
        self.current = loops[len(self.ended)]

    def after(self, ended: Sequence[EndedLoop]) -> LoopContents:
        if len(ended) >= len(self.loops):
            raise ValueError("the job has fewer loops")
        return LoopContents(self.loops, ended)

    def in_order(self, names: Sequence[str]) -> LoopContents:
        if names:
            raise ValueError("the order of a step does not matter to a checkpoint")
        return self

    def tensors(self, done: int) -> list[SavedKind]:
        kinds = []
        for name in self.current.loop.carry:
            vertex = self.current.graph[name]
            kinds.append(SavedKind(name, vertex.bound, vertex.dtype))
        kinds += self.current.kept
        for number, each in enumerate(self.ended):
            kinds += self._histories(number, each.steps)
        kinds += self._histories(len(self.ended), done - self.steps_before)
        return kinds

    def _histories(self, number: int, steps: int) -> list[SavedKind]:
        """Return the recorded values of a loop after some steps."""
        kinds = []
        for name in self.loops[number].loop.columns:
            dtype = "float64"  # of numbers of the validation
            if name in self.loops[number].loop.record:
                dtype = self.loops[number].graph[name].dtype
            kinds.append(SavedKind(history_name(name, number), (steps,), dtype))
        return kinds

    def place(self, done: int) -> str:
        step = f"step {done - self.steps_before - 1}"
        return step if len(self.loops) == 1 else f"{step} of loop {len(self.ended) + 1}"

    def progress(self, done: int) -> str:
        steps = counted(self.current.loop.steps, "step")
        return f"{done - self.steps_before} of at most {steps}"


def history_name(name: str, loop: int) -> str:
    """Return the name under which the values of a recorded tensor are saved; no tensor has it."""
    return f"history of {name} in loop {loop + 1}"
