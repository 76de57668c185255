"""Checkpoints of a loop, between its steps: what is carried and what was recorded."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from einmpi.checkpoint.contents import LoopContents, history_name
from einmpi.checkpoint.folder import SAVE, Array, CheckpointFolder
from einmpi.checkpoint.load import Block, Identity, SavedTensor
from einmpi.comm.base import Comm
from einmpi.compiled.dist_array import DistArray
from einmpi.files.claims import Claim
from einmpi.graph.eingraph import EinGraph
from einmpi.job.loop import Loop
from einmpi.planner.plan import Plan
from einmpi.runtime.gpu.copies import on_host
from einmpi.schedule.layout import Layout


class LoopCheckpoints(CheckpointFolder):
    """The checkpoints of a loop.

    They are saved every so many steps, if `every_steps` is not 0, else by the clock of rank 0.
    """

    def __init__(
        self,
        folder: str,
        every: float,
        every_steps: int,
        comm: Comm,
        loop: Loop,
        graph: EinGraph,
        identity: Identity,
        asked: Sequence[str] = (),
        quiet: bool = False,
        claim: Claim | None = None,
    ) -> None:
        contents = LoopContents(loop, graph)
        super().__init__(folder, every, comm, contents, identity, asked, quiet, claim)
        self.loop = loop
        self.every_steps = every_steps

    # ---- where a loop continues -----------------------------------------------------------------

    @property
    def steps_done(self) -> int:
        """The number of steps that an earlier run has done."""
        return 0 if self.saved is None else self.saved.done

    def carried(self) -> dict[str, SavedTensor]:
        """Return the inputs of the next step."""
        assert self.saved is not None
        found = {}
        for kind in self.contents.tensors(self.saved.done):
            if kind.name in self.loop.carry:
                found[kind.name] = SavedTensor(self.saved, kind.name, kind.bound, None)
        return found

    def history(self) -> dict[str, Array]:
        """Return the values that were recorded in the steps that are done."""
        found: dict[str, Array] = {}
        if self.saved is not None:
            for name in self.loop.record:
                found[name] = np.array(self.saved.mapped(history_name(name), 0))
        return found

    # ---- when to save ---------------------------------------------------------------------------

    def next_planned(self, done: int) -> int | None:
        """Return after how many steps the next checkpoint is due; None if the clock decides."""
        if not self.every_steps:
            return None
        return (done // self.every_steps + 1) * self.every_steps

    def step_request(self, done: int) -> str:
        """Return what this rank asks for after a step."""
        if not self.every_steps or self.asked:
            return self.request()
        return SAVE if done % self.every_steps == 0 else ""

    def save(
        self,
        done: int,
        requests: Sequence[str],
        plan: Plan,
        carried: Mapping[str, DistArray],
        rows: Mapping[str, Array],
    ) -> None:
        """Save what the next step needs. All ranks call it; it may end the run."""
        start = time.monotonic()
        blocks = []
        everywhere: tuple[Any, ...] = (None,) * len(plan.mesh.factors)
        for name, array in carried.items():
            layout = Layout(plan.mesh, array.shape or (1,), array.layout.cuts)
            blocks.append(Block(name, array.dtype.name, layout))
        for name, values in rows.items():
            layout = Layout(plan.mesh, values.shape, everywhere)
            blocks.append(Block(history_name(name), values.dtype.name, layout))

        def find_arrays() -> list[Array | None]:
            arrays: list[Array | None] = []
            for array in carried.values():
                local = np.asarray(on_host(array.local))
                arrays.append(np.ascontiguousarray(local))
            arrays.extend(np.ascontiguousarray(values) for values in rows.values())
            return arrays

        self.plan = plan.digest
        problem = self.write(done, blocks, find_arrays)
        self.finish(done, requests, start, problem)
