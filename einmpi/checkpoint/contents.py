"""What a checkpoint holds after some vertices of a graph, or after some steps of a loop."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from einmpi.graph.eingraph import EinGraph
from einmpi.graph.remainder import needed
from einmpi.job.loop import MOST_STEPS, Loop
from einmpi.units import counted


class SavedKind(NamedTuple):
    """A tensor of a checkpoint by its name, shape and dtype."""

    name: str
    bound: tuple[int, ...]
    dtype: str


class Contents(Protocol):
    """What checkpoints hold. They are numbered by what is done."""

    most: int  # the highest number

    def tensors(self, done: int) -> list[SavedKind]:
        """Return the tensors of a checkpoint, in order."""

    def place(self, done: int) -> str:
        """Return what was done last, for messages: "Z" or "step 99"."""

    def progress(self, done: int) -> str:
        """Return how far the run was: "3 of 7 vertices"."""


class GraphContents:
    """After the first vertices of a graph: the tensors that later vertices and outputs need."""

    def __init__(self, graph: EinGraph) -> None:
        self.graph = graph
        self.most = len(graph.computed)

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


class LoopContents:
    """After some steps of a loop: what is carried, and the values that were recorded."""

    most = MOST_STEPS

    def __init__(self, loop: Loop, graph: EinGraph) -> None:
        self.loop = loop
        self.graph = graph  # of a step, as written

    def tensors(self, done: int) -> list[SavedKind]:
        kinds = []
        for name in self.loop.carry:
            vertex = self.graph[name]
            kinds.append(SavedKind(name, vertex.bound, vertex.dtype))
        for name in self.loop.record:
            kinds.append(SavedKind(history_name(name), (done,), self.graph[name].dtype))
        return kinds

    def place(self, done: int) -> str:
        return f"step {done - 1}"

    def progress(self, done: int) -> str:
        return f"{done} of at most {counted(self.loop.steps, 'step')}"


def history_name(name: str) -> str:
    """Return the name under which the values of a recorded tensor are saved; no tensor has it."""
    return f"history of {name}"
