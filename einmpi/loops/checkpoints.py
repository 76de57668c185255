"""Checkpoints of a loop, between its steps: what is carried and what was recorded."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from einmpi.arrays.dist_array import DistArray
from einmpi.checkpoint.folder import SAVE, Array, CheckpointFolder
from einmpi.checkpoint.load import (
    Block,
    EndedLoop,
    Identity,
    LoopContents,
    LoopKinds,
    SavedTensor,
    history_name,
)
from einmpi.comm.base import Comm
from einmpi.files.claims import Claim
from einmpi.planner.plan import Plan
from einmpi.runtime.gpu.copies import on_host
from einmpi.schedule.layout import Layout, even_layout


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
        loops: Sequence[LoopKinds],
        identity: Identity,
        asked: Sequence[str] = (),
        quiet: bool = False,
        claim: Claim | None = None,
    ) -> None:
        self.contents: LoopContents
        contents = LoopContents(loops)
        super().__init__(folder, every, comm, contents, identity, asked, quiet, claim)
        self.every_steps = every_steps
        self.ended_rows: list[dict[str, Array]] = []  # what loops that have ended recorded
        self.kept: dict[str, DistArray] = {}  # results of theirs that are still needed

    # ---- where a loop continues -----------------------------------------------------------------

    def enter(
        self,
        ended: Sequence[EndedLoop],
        rows: Sequence[dict[str, Array]],
        kept: Mapping[str, DistArray],
    ) -> None:
        """Note what a loop that begins, or continues, finds: the loops before it have ended."""
        self.contents = self.contents.after(ended)
        self.ended_rows = list(rows)
        self.kept = dict(kept)

    @property
    def continues_here(self) -> bool:
        """Whether the checkpoint is one of the loop that is running."""
        return self.saved is not None and len(self.saved.ended) == len(self.contents.ended)

    @property
    def steps_done(self) -> int:
        """The number of steps of the loop that an earlier run has done."""
        if self.saved is None or not self.continues_here:
            return 0
        return self.saved.done - self.contents.steps_before

    def carried(self) -> dict[str, SavedTensor]:
        """Return the inputs of the next step."""
        return self._saved_tensors(list(self.contents.current.loop.carry))

    def kept_results(self) -> dict[str, SavedTensor]:
        """Return the results of earlier loops that are still needed."""
        return self._saved_tensors([kind.name for kind in self.contents.current.kept])

    def _saved_tensors(self, names: Sequence[str]) -> dict[str, SavedTensor]:
        assert self.saved is not None
        found = {}
        for kind in self.contents.tensors(self.saved.done):
            if kind.name in names:
                found[kind.name] = SavedTensor(self.saved, kind.name, kind.bound, None)
        return found

    def history(self, number: int) -> dict[str, Array]:
        """Return the values that a loop has recorded before the checkpoint."""
        found: dict[str, Array] = {}
        if self.saved is not None:
            for name in self.contents.loops[number].loop.columns:
                found[name] = np.array(self.saved.mapped(history_name(name, number), 0))
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
        tensors = {**carried, **self._kept_on(plan)}
        for name, array in tensors.items():
            layout = Layout(plan.mesh, array.shape or (1,), array.layout.cuts)
            blocks.append(Block(name, array.dtype.name, layout))
        histories: list[Array] = []
        for number, recorded in enumerate([*self.ended_rows, rows]):
            for name, values in recorded.items():
                layout = Layout(plan.mesh, values.shape, everywhere)
                blocks.append(Block(history_name(name, number), values.dtype.name, layout))
                histories.append(values)

        def find_arrays() -> list[Array | None]:
            arrays: list[Array | None] = []
            for array in tensors.values():
                local = np.asarray(on_host(array.local))
                arrays.append(np.ascontiguousarray(local))
            arrays.extend(np.ascontiguousarray(values) for values in histories)
            return arrays

        self.plan = plan.digest
        steps_in_all = self.contents.steps_before + done
        problem = self.write(steps_in_all, blocks, find_arrays)
        self.finish(steps_in_all, requests, start, problem)

    def _kept_on(self, plan: Plan) -> dict[str, DistArray]:
        """Return what is still needed of earlier loops on the mesh of a plan."""
        found = {}
        for kind in self.contents.current.kept:
            array = self.kept[kind.name]
            if array.layout.mesh != plan.mesh:
                array = array.redistribute(even_layout(plan.mesh, array.shape))
            found[kind.name] = array
        return found
