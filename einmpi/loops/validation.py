"""Validation of a training: the program runs for other inputs, with the parameters as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from einmpi.arrays.dist_array import DistArray
from einmpi.job.loop import EPOCH, STEP, Validation
from einmpi.loops.arrival import arrivals, layouts_of, placed_for_step, read_by_stages
from einmpi.loops.running import LoopRun
from einmpi.loops.stages import validation_loop, written_step
from einmpi.planner.plan_data import Cost, cost_of_all


class ValidationRun(LoopRun):
    """The loop over the batches of a validation, which is run again and again."""

    def __init__(self, training: LoopRun, validation: Validation) -> None:
        self.training = training
        job, loop = validation_loop(training.job, validation)
        super().__init__(
            job, loop, training.comm, training.options, inputs_changing=training.loop.carry
        )
        self.validation = validation
        self.given: dict[str, Any] = {}  # inputs of the caller
        self.predicted = Cost()  # of all that was computed so far
        self.training_step = 0

    def take_inputs(self, given: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        """Keep the caller's arrays: `given` for the training, `others` for the validation."""
        names_read = set(written_step(self.job, self.loop).by_name)
        replaced = {spec.name for spec in self.validation.inputs}
        names_shared = names_read - replaced - set(self.training.loop.carry)
        for name, array in given.items():
            if name in names_shared:
                self.given[name] = array
        for name, array in others.items():
            if name in names_read:
                self.given[name] = array

    def numbers(self, step: int) -> dict[str, int]:
        """Return the numbers of a step: which rows it takes, and where the training is."""
        found = super().numbers(step)
        of_training = self.training.loop.numbers(self.training_step)
        found[STEP] = of_training[STEP]
        if EPOCH in found:
            found[EPOCH] = of_training[EPOCH]
        return found

    def numbers_after(self, step: int) -> dict[str, float]:
        """Return the numbers of the validation after a step of the training. All ranks call it."""
        self.training_step = step
        carried = {}
        for name in self.training.loop.carry:
            if name in self.stages.step.graph.by_name:
                carried[name] = self.training.values[name]
        self._place(carried)
        self.steps_done = 0
        for values in self.rows.values():
            values.clear()
        history = self.run().history
        self.predicted = self.predicted.plus(self.plan.cost, self.loop.steps)
        counts = [1.0]
        if self.loop.batches is not None:
            counts = [float(self.loop.batches.count_of(k)) for k in range(self.loop.steps)]
        found = {}
        for name, column in zip(self.validation.record, self.validation.columns, strict=True):
            weighted = history[name].astype("float64") * counts
            found[column] = float(weighted.sum() / sum(counts))
        return found

    def _place(self, carried: Mapping[str, DistArray]) -> None:
        """Put the parameters where the steps need them; the first time also all other inputs."""
        if not self.is_planned:
            self.prepare({**self.given, **carried})
            self.predicted = self.plan.cost_once
            return
        layouts = read_by_stages(self.stages, layouts_of(carried))
        moving = arrivals(self.stages, self.plan, layouts, self.comm.nodes)
        self.predicted = self.predicted.plus(cost_of_all(moving.values()))
        received = self.comm.received
        received_between = self.comm.received_between
        self.values.update(placed_for_step(self.stages.step.graph, self.plan, carried))
        self.measured = replace(
            self.measured,
            received=self.measured.received + self.comm.received - received,
            between=self.measured.between + self.comm.received_between - received_between,
        )
