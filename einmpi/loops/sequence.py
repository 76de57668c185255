"""Loops one after another: results of earlier ones are inputs of later ones, where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from einmpi.arrays.dist_array import DistArray
from einmpi.checkpoint.load import EndedLoop, LoopKinds
from einmpi.checkpoint.resume import LoopCheckpoints
from einmpi.comm.agreement import together
from einmpi.comm.base import Comm
from einmpi.errors import InputError, nearest_of
from einmpi.job.batches import EPOCH, Validation
from einmpi.job.job import Job, loop_of
from einmpi.job.loop import STEP
from einmpi.loops.arrival import (
    arrivals,
    inputs_that_stay,
    layouts_of,
    placed_for_step,
    read_by_stages,
    result_layouts,
    with_staying,
)
from einmpi.loops.history import Validated
from einmpi.loops.running import LoopResult, LoopRun
from einmpi.loops.stages import (
    bytes_kept,
    kept_tensors,
    names_made,
    names_passed_on,
    validation_job,
    with_kept,
    with_loop,
    written_step,
)
from einmpi.planner.plan import Cost, Options, cost_of_all
from einmpi.schedule.layout import Layout, even_layout

# ---- validation ----------------------------------------------------------------------------------
#
# Validation of a training: the program runs for other inputs, with the parameters as they are.


class ValidationRun(LoopRun):
    """The loop over the batches of a validation, which is run again and again."""

    def __init__(self, training: LoopRun, validation: Validation) -> None:
        self.training = training
        job = validation_job(training.job, validation)
        super().__init__(job, training.comm, training.options, inputs_changing=training.loop.carry)
        self.validation = validation
        self.given: dict[str, Any] = {}  # inputs of the caller
        self.predicted = Cost()  # of all that was computed so far
        self.training_step = 0

    def take_inputs(self, given: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        """Keep the caller's arrays: `given` for the training, `others` for the validation."""
        names_read = set(written_step(self.job).by_name)
        replaced = {spec.name for spec in self.validation.inputs}
        names_shared = names_read - replaced - set(self.training.loop.carry)
        for name, array in given.items():
            if name in names_shared:
                self.given[name] = array
        for name, array in {**others, **self.validation.given}.items():
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
        with self.measuring_moves():
            self.values.update(placed_for_step(self.stages.step.graph, self.plan, carried))


class LoopSequence:
    """The loops of a job on the ranks of a communicator; there may be only one."""

    def __init__(
        self,
        job: Job,
        comm: Comm,
        options_of: Callable[[Job], Options],
        checkpoints: LoopCheckpoints | None = None,
    ) -> None:
        self.job = job
        self.comm = comm
        self.checkpoints = checkpoints
        self.names = names_passed_on(job)
        self.runs: list[LoopRun] = []
        for number, each in enumerate(job.one_after_another()):
            run = LoopRun(each, comm, options_of(each), checkpoints, number=number)
            self.runs.append(run)
        self.validations: dict[int, ValidationRun] = {}  # by the number of their loops
        for run in self.runs:
            if run.loop.validation is not None:
                validation = ValidationRun(run, run.loop.validation)
                run.validate = validation.numbers_after
                self.validations[run.number] = validation
        self.layouts: dict[str, Layout] = {}  # of tensors that earlier loops leave
        self.results: list[LoopResult] = []  # of loops that have ended
        self.tensors: dict[str, DistArray] = {}  # that later loops or the user need

    # ---- before the first loop ------------------------------------------------------------------

    def plan(self, inputs: Mapping[str, Any]) -> None:
        """Plan all loops, so that none fails to be planned after another has run for hours."""
        if len(self.runs) == 1:
            return  # it is planned when its inputs are checked
        together(self.comm, lambda: self._check_names(inputs))
        layouts_before = layouts_of(inputs)
        for run, kept in zip(self.runs, kept_tensors(self.job), strict=True):
            run.leave_memory(bytes_kept(kept, self.layouts, run.stages.inputs))
            run.plan_steps(read_by_stages(run.stages, layouts_before))
            found = result_layouts(run.job, run.plan)
            layouts_before |= found
            self.layouts |= found

    def _check_names(self, inputs: Iterable[str]) -> None:
        known = [spec.name for spec in self.job.inputs]
        for name in inputs:
            if name not in known:
                raise InputError("inputs", f"unknown input {name!r}", nearest_of(known, name))

    # ---- running --------------------------------------------------------------------------------

    def run(
        self,
        inputs: Mapping[str, Any],
        around: Callable[[LoopRun], AbstractContextManager[object]] = lambda run: nullcontext(),
        validation_inputs: Mapping[str, Any] | None = None,
    ) -> LoopResult:
        """Run all loops. All ranks call it. `around` is entered for the steps of each of them.

        `validation_inputs` are those that the caller has.
        """
        self.plan(inputs)
        first = self._restore()
        for number in range(first, len(self.runs)):
            run = self.runs[number]
            given = dict(inputs)
            if len(self.runs) > 1:
                given = self._inputs_of(number, inputs)
            if self.checkpoints is not None:
                ended = [EndedLoop(each.steps, each.is_done) for each in self.results]
                rows = [each.history for each in self.results]
                kept = {}
                for name, array in self.tensors.items():
                    if name in self.names.kept[number]:
                        kept[name] = array
                self.checkpoints.enter(ended, rows, kept)
            staying: tuple[str, ...] = ()
            if number > first:
                staying = self._keep_loaded(number, given)
            run.prepare(given)
            if staying:
                run.plan = with_staying(run.plan, staying)
            if number in self.validations:
                self.validations[number].take_inputs(given, validation_inputs or {})
            del given
            bytes_here = self._count_kept(run)
            with around(run):
                result = run.run()
            bytes_here += sum(array.local.nbytes for array in run.best.values())
            run.measured = replace(run.measured, peak=run.measured.peak + bytes_here)
            is_last = number + 1 == len(self.runs)
            self.results.append(result if is_last else replace(result, state={}))
            self._keep(number, result)
        last = self.results[-1]
        outputs = {name: self.tensors[name] for name in self.names.final}
        return replace(last, outputs=outputs, earlier=tuple(self.results[:-1]))

    def _count_kept(self, run: LoopRun) -> int:
        """Add tensors of earlier loops to the planned memory of a loop; return their bytes here.

        Those that its steps read where they lie are counted already. First values of what it
        carries are forgotten: it has them.
        """
        for name in run.loop.carry:
            self.tensors.pop(name, None)
        planned = 0
        here = 0
        for name, array in self.tensors.items():
            if run.values.get(name) is not array:
                planned += array.layout.max_elements() * array.dtype.itemsize
                here += array.local.nbytes
        run.plan = with_kept(run.plan, planned)
        return here

    def _inputs_of(self, number: int, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs that a loop gets: from the caller, or from earlier loops."""
        run = self.runs[number]
        made_earlier: set[str] = set()
        for each in self.runs[:number]:
            made_earlier.update(names_made(each.job))
        found = {}
        for spec in run.job.inputs:
            name = spec.name
            if name in self.tensors and name in made_earlier:
                found[name] = self.tensors[name]
            elif name in inputs and name not in made_earlier:
                found[name] = inputs[name]
        return found

    def _keep_loaded(self, number: int, given: Mapping[str, Any]) -> tuple[str, ...]:
        """Take over the inputs that the loop before has loaded, where this one needs the same.

        Return their names. All else that the loop before has used is forgotten.
        """
        before = self.runs[number - 1]
        run = self.runs[number]
        found = inputs_that_stay(before.stages, before.plan, run.stages, run.plan)
        staying = tuple(name for name in found if name not in given)
        for (name, region), block in before.step.resident.items():
            if name in staying:
                run.step.resident[name, region] = block
        for name in staying:
            if name in before.step.files:
                run.step.files[name] = before.step.files[name]
        before.release()
        return staying

    def _keep(self, number: int, result: LoopResult) -> None:
        """Keep of the results so far what later loops or the user need."""
        loop = self.runs[number].loop
        self.tensors |= result.outputs
        for name, output in loop.carry.items():
            self.tensors[output] = result.outputs[name]
        needed = set(self.names.final)
        if number + 1 < len(self.runs):
            needed = set(self.names.kept[number + 1])
            # Of what the next loop carries, only the first value is needed.
            needed |= set(self.runs[number + 1].loop.carry)
        self.tensors = {name: array for name, array in self.tensors.items() if name in needed}

    # ---- continuing after a checkpoint ----------------------------------------------------------

    def _restore(self) -> int:
        """Take over the loops that had ended before a checkpoint; return how many."""
        checkpoints = self.checkpoints
        if checkpoints is None or checkpoints.saved is None:
            return 0
        for number, ended in enumerate(checkpoints.saved.ended):
            history = checkpoints.history(number)
            run = self.runs[number]
            best_step = None
            if run.loop.validation is not None:
                best_step = Validated(run.loop.validation, history).best_step
            result = LoopResult({}, history, ended.steps, ended.is_done, best_step=best_step)
            self.results.append(result)
            run.steps_before = ended.steps
            run.plan = with_loop(run.plan, run.stages, None)
        for name, saved in checkpoints.kept_results().items():
            layout = self.layouts.get(name)
            if layout is None:  # it was computed before the first step of its loop
                layout = replace(saved.block.layout, bound=saved.shape)
                if layout.mesh.ranks > self.comm.size:
                    layout = even_layout(self.runs[0].plan.mesh, saved.shape)
            self.tensors[name] = checkpoints.restored(saved, layout)
        return len(checkpoints.saved.ended)


def loop_kinds(job: Job) -> list[LoopKinds]:
    """Return what each loop of a job adds to a checkpoint."""
    kinds = []
    for each, kept in zip(job.one_after_another(), kept_tensors(job), strict=True):
        kinds.append(LoopKinds(loop_of(each), each.written, tuple(kept.values())))
    return kinds
