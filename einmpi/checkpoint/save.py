"""Save checkpoints of a run between the vertices of its graph, and restore them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from einmpi.checkpoint.contents import GraphContents
from einmpi.checkpoint.folder import Array, CheckpointFolder
from einmpi.checkpoint.load import Block, Identity
from einmpi.comm.base import Comm
from einmpi.files.claims import Claim
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.remainder import in_order, needed
from einmpi.runtime.buffers import Buffers
from einmpi.schedule.steps import SavePoint


class Checkpoints(CheckpointFolder):
    """The checkpoints of a run of a schedule, after its vertices."""

    def __init__(
        self,
        folder: str,
        every: float,
        comm: Comm,
        graph: EinGraph,
        identity: Identity,
        asked: Sequence[str] = (),
        quiet: bool = False,
        claim: Claim | None = None,
    ) -> None:
        super().__init__(folder, every, comm, GraphContents(graph), identity, asked, quiet, claim)
        self.graph = graph  # in the order in which vertices are computed, once that is known
        self.number: dict[str, int] = {}  # vertex → how many are done after it
        self.restored: tuple[SavePoint, ...] = ()  # what is in slots when the run begins
        self.points: dict[str, SavePoint] = {}  # of the vertices so far
        self.open: set[str] = set()  # the vertices after which all ranks can save

    def find(self, resume: bool) -> None:
        super().find(resume)
        if self.saved is not None and self.saved.order:
            self.graph = in_order(self.graph, self.saved.order)

    def restore(self, rank: int, buffers: Buffers) -> None:
        """Put what was saved into its slots."""
        for point in self.restored:
            self.points[point.vertex] = point
            if self.saved is not None and point.layout.block(rank) is not None:
                array = buffers.make(point.slot)
                values = buffers.backend.to_host(array)
                self.saved.fill(point.vertex, rank, values)
                buffers.backend.from_host(values, array)

    def starts(self, plan: str, points: Sequence[SavePoint]) -> None:
        """Prepare for a run: find out after which vertices all ranks can save.

        A plan may compute vertices in another order than the program has. Which kernels are fused
        depends on a rank's extents, so ranks may differ.
        """
        self.plan = plan
        names: dict[str, None] = {}
        if self.saved is not None:
            names = {vertex.name: None for vertex in self.graph.computed[: self.saved.done]}
        names.update(dict.fromkeys(point.vertex for point in points))
        self.graph = in_order(self.graph, list(names))
        self.contents = self.contents.in_order(list(names))
        self.number = {name: number for number, name in enumerate(names, 1)}
        own = json.dumps([point.vertex for point in points if not point.inside])
        texts = self.comm.allgather_text(own)
        self.open = set.intersection(*(set(json.loads(text)) for text in texts))

    def reached(self, point: SavePoint, buffers: Buffers) -> None:
        """Save after a vertex if it is time to, or if any rank is asked to stop."""
        self.points[point.vertex] = point
        done = self.number[point.vertex]
        if point.vertex not in self.open:
            return  # between fused kernels
        if self.saved is not None and done <= self.saved.done:
            return  # a copy of what was saved
        start = time.monotonic()
        requests = {text for text in self.comm.allgather_text(self.request()) if text}
        if requests:
            problem = self.save(done, buffers)
            self.finish(done, requests, start, problem)

    def save(self, done: int, buffers: Buffers) -> str:
        """Save what is needed after the first `done` vertices; return what failed, or ""."""
        points = [self.points[name] for name in needed(self.graph, done)]
        blocks = [Block(point.vertex, point.slot.dtype, point.layout) for point in points]

        def find_arrays() -> list[Array | None]:
            arrays: list[Array | None] = []
            for point in points:
                array = None
                if point.slot.name in buffers:
                    array = buffers.backend.to_host(buffers[point.slot])
                arrays.append(array)
            return arrays

        return self.write(done, blocks, find_arrays)
