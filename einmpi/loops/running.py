"""The run of a loop: once what never changes, then step after step, until the condition holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.arrays.dist_array import DistArray
from einmpi.checkpoint.load import best_name
from einmpi.checkpoint.resume import LoopCheckpoints
from einmpi.comm.agreement import abort_on_divergence, find_first_failure, on_first_rank, together
from einmpi.comm.base import Comm
from einmpi.compiled.given_inputs import Kinds, checked_inputs, update_views
from einmpi.compiled.inputs import Inputs
from einmpi.compiled.program import Compiled
from einmpi.compiled.running import Measured
from einmpi.errors import InputError, failure
from einmpi.job.job import Job, loop_of
from einmpi.kernels.cpu.dispatch import IN_LOOPS
from einmpi.loops.arrival import (
    arrivals,
    best_planned,
    hoisted_layouts,
    layouts_of,
    placed_for_once,
    placed_for_step,
    read_by_stages,
    step_layout,
)
from einmpi.loops.batches import LoopBatches, reading_batches
from einmpi.loops.history import Condition, HistoryFile, NanFinder, Validated
from einmpi.loops.stages import (
    Stages,
    kept_outputs,
    numbers_read,
    once_options,
    stages_of,
    step_options,
    with_less_memory,
    with_loop,
    written_step,
)
from einmpi.planner.plan import Options, Plan
from einmpi.runtime.actions import RankFailure
from einmpi.runtime.gpu.copies import on_host
from einmpi.schedule.layout import Layout
from einmpi.schedule.schedule import Schedule

# ---- result --------------------------------------------------------------------------------------
#
# The result of a loop: the last values of tensors, and those that were recorded.


@dataclass(frozen=True)
class LoopResult:
    """What a loop has computed.

    Attributes
    ----------
    outputs : dict of str to DistArray
        The last values of what is carried, under the names of the inputs, and the outputs of the
        last step.
    history : dict of str to numpy.ndarray
        For each recorded tensor its values, one for each step.
    steps : int
        The number of steps.
    is_done : bool
        Whether the condition holds, or `on_step` has ended the loop; False if the steps ended
        first.
    earlier : tuple of LoopResult
        Of a job with several loops, the results of all but the last, without their outputs.
        `history`, `steps` and `is_done` are those of the last loop.
    state : dict of str to DistArray
        What a next step would start from: the last values of all that is carried, with the state of
        an optimiser, as `W_m` and `W_v` of a parameter `W`.
    best_step : int or None
        The step after which the best validation was; None without validations.
    """

    outputs: dict[str, DistArray]
    history: dict[str, npt.NDArray[Any]]
    steps: int
    is_done: bool
    earlier: tuple[LoopResult, ...] = ()
    state: dict[str, DistArray] = field(default_factory=dict)
    best_step: int | None = None

    def __repr__(self) -> str:
        names = ", ".join(self.outputs)
        end = "done" if self.is_done else "out of steps"
        return f"<LoopResult of {names} after {self.steps} steps, {end}>"


# Ranks tell each other of errors after 1, 2, 4, … steps, and at least after so many.
MOST_STEPS_BETWEEN_AGREEMENTS = 64
SECONDS_BETWEEN_AGREEMENTS = 0.5  # about, with checkpoints: a signal is noticed then

Values: TypeAlias = dict[str, npt.NDArray[Any]]  # of tensors without dimensions


class LoopRun:
    """A loop on the ranks of a communicator."""

    def __init__(
        self,
        job: Job,
        comm: Comm,
        options: Options,
        checkpoints: LoopCheckpoints | None = None,
        on_row: Callable[[int, Values], None] | None = None,
        history_file: HistoryFile | None = None,
        number: int = 0,
        inputs_changing: Collection[str] = (),
    ) -> None:
        self.job = job
        self.number = number  # of loops before this one
        self.loop = loop_of(job)
        self.comm = comm
        self.options = options
        self.on_row = on_row
        self.on_computed: Callable[[int], None] | None = None  # after the work of each step
        self.checkpoints = checkpoints
        self.history_file = history_file  # known to rank 0
        self.kept_outputs = kept_outputs(job)
        self.inputs_changing = tuple(inputs_changing)  # between runs of this loop
        self.stages: Stages = stages_of(job, inputs_changing)
        # Computes the numbers of a validation after a step, if there is one.
        self.validate: Callable[[int], dict[str, float]] | None = None
        self.validated: Validated | None = None
        self.best: dict[str, DistArray] = {}  # copies of what is kept of the best validation
        # The caller's function, which gets the numbers of a step and may end the loop.
        self.on_step: Callable[[int, dict[str, Any]], object] | None = None
        self.start: LoopResult | None = None  # what it goes on from
        self.watched_names = self.loop.watched
        self.batches: LoopBatches | None = None
        self.step = Compiled(self.stages.step, comm, step_options(options, self.stages))
        self.step.backend.repetition = IN_LOOPS
        self.plan: Plan
        self.schedule: Schedule
        self.is_planned = False
        self.once_plan: Plan | None = None
        self.once_outputs: dict[str, DistArray] = {}
        self.values: dict[str, Any] = {}
        self.rows: dict[str, list[Any]] = {name: [] for name in self.loop.columns}
        self.steps_done = 0
        self.steps_before = 0  # those of them that an earlier run has done
        self.seconds_once = 0.0  # before the first step
        self.started = time.monotonic()
        self.measured = Measured(seconds=0.0, seconds_loading=0.0, received=0, peak=0)

    # ---- before the first step ------------------------------------------------------------------

    def prepare(self, inputs: Mapping[str, Any]) -> None:
        """Compute what never changes, and place the inputs of the first step."""
        start = {} if self.start is None else self.start.state
        given = self.checked({**inputs, **start})
        if self.loop.batches is not None:
            self.batches = LoopBatches(self.job, self.loop.batches, self.comm, given)
            given = {name: array for name, array in given.items() if name not in self.batches.specs}
        if not self.is_planned:
            # Without `start`, so that the plan is that of a loop which was never interrupted.
            layouts = layouts_of(inputs if start else given)
            self.plan_steps(read_by_stages(self.stages, layouts))
        layouts_before = read_by_stages(self.stages, layouts_of(given))
        with self.measuring_moves():
            self.values = placed_for_step(self.stages.step.graph, self.plan, given)
            for_once = placed_for_once(self.stages, self.plan, given)
        self.compute_once(for_once)
        layouts_before |= hoisted_layouts(self.stages, self.once_plan)
        arriving = arrivals(self.stages, self.plan, layouts_before, self.comm.nodes)
        hoisted = {name: self.once_outputs[name] for name in self.stages.hoisted}
        with self.measuring_moves():
            self.values |= placed_for_step(self.stages.step.graph, self.plan, hoisted)
        self.step.input_files.find(self.values, self.step.options.resident)
        batch_plan = None
        if self.batches is not None:
            batch_plan = self.batches.arrive_in(self.plan, self.job)
            self.step.files.update(self.batches.files)
        self.plan = with_loop(self.plan, self.stages, self.once_plan, batch_plan, arriving)
        if self.checkpoints is not None and self.checkpoints.continues_here:
            self.steps_done = self.checkpoints.steps_done
            self.values.update(self.checkpoints.carried())
            for name, values in self.checkpoints.history(self.number).items():
                self.rows[name] = list(values)
            for name, saved in self.checkpoints.best().items():
                layout = step_layout(self.stages.step.graph, self.plan, name)
                self.best[name] = self.checkpoints.restored(saved, layout)
        if self.start is not None:
            self.steps_done = self.start.steps
            for name in self.rows:
                self.rows[name] = list(self.start.history[name])
            self.best = {name: self.start.outputs[name] for name in self.loop.kept_best}
        if self.loop.validation is not None:
            self.validated = Validated(self.loop.validation, self.rows)
        self.steps_before = self.steps_done
        self.seconds_once = self.measured.seconds
        self.started = time.monotonic()

    def release(self) -> None:
        """Forget the tensors that the loop has used, once its results are taken."""
        self.values.clear()
        self.once_outputs.clear()
        self.batches = None
        self.step.resident.clear()
        self.step.backend.resident.clear()

    def leave_memory(self, nbytes: int) -> None:
        """Leave so much memory to tensors of earlier loops."""
        if nbytes and self.options.memory is not None:
            self.options = with_less_memory(self.options, nbytes)
            options = step_options(self.options, self.stages)
            self.step = Compiled(self.stages.step, self.comm, options)
            self.step.backend.repetition = IN_LOOPS

    def plan_steps(self, layouts_before: Mapping[str, Layout]) -> None:
        """Plan a step, given the layouts of inputs that are on the ranks already."""
        self.plan, self.schedule = best_planned(
            self.stages,
            self.options,
            layouts_before,
            lambda staying: self.step.planning.make_ready(tuple(staying.items())),
            lambda ready: ready[0],
        )
        self.is_planned = True

    def checked(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the given inputs as arrays; all ranks refuse what one of them does."""
        whole = replace(self.job, graph=written_step(self.job))
        numbers = numbers_read(whole.graph, self.loop)

        def check() -> tuple[dict[str, Any], Kinds]:
            for name in numbers:
                if name in inputs:
                    what = f"{name} is given, but in a loop it is a number of each step"
                    raise InputError("inputs", what, "another name")
            zeros = {name: np.array(0, dtype) for name, dtype in numbers.items()}
            return checked_inputs(whole, self.comm, {**inputs, **zeros})

        given, _ = together(
            self.comm,
            check,
            lambda found: repr(found[1]),
        )
        update_views(given)
        return given

    def compute_once(self, inputs: Mapping[str, Any]) -> None:
        """Compute what is the same in all steps, in the layouts in which a step needs it."""
        once = self.stages.once
        if once is None:
            return
        options = once_options(self.options, self.stages, self.plan)
        compiled = Compiled(once, self.comm, options)
        self.once_outputs = compiled(dict(inputs))
        ((self.once_plan, _),) = compiled.ready.values()
        assert compiled.measured is not None
        self.measured = self.measured.plus(compiled.measured)

    @contextmanager
    def measuring_moves(self) -> Iterator[None]:
        """Count what is received in a with block, besides what schedules move."""
        received = self.comm.received
        received_between = self.comm.received_between
        yield
        self.measured.received += self.comm.received - received
        self.measured.between += self.comm.received_between - received_between

    # ---- steps ----------------------------------------------------------------------------------

    def run(self) -> LoopResult:
        """Run all steps. All ranks call it."""
        sources = Inputs(
            self.stages.step,
            self.values,
            self.step.files,
            self.step.resident,
            changing=(*self.loop.carry, *self.inputs_changing),
            given_stay=True,
        )
        if self.loop.history is not None:
            on_first_rank(self.comm, self.start_history)
        own_failure = RankFailure()
        is_done = False
        condition = None if self.loop.until is None else Condition(self.loop.until)
        blocks: dict[str, Any] = {}
        first = self.steps_done
        next_agreement = first + 1
        numbers = numbers_read(self.stages.step.graph, self.loop)
        with (
            abort_on_divergence(self.comm),
            reading_batches(self.batches, self.loop.steps),
            self.step.runner.keeping_memory(),
        ):
            for number in range(first, self.loop.steps):
                for name, dtype in numbers.items():
                    self.values[name] = np.array(self.numbers(number)[name], dtype)
                blocks = self.compute_step(number, sources, own_failure)
                watched = self.watched(blocks, number)
                row = {name: watched[name] for name in self.loop.record}
                if self.loop.stop_at_nan and any(map(_is_nan, row.values())):
                    self.agree(own_failure)
                    self.explain_nan(number, row, sources)
                self.carry(blocks, sources)
                is_last = number + 1 == self.loop.steps
                row |= self.numbers_validated(number, is_last, own_failure)
                if condition is not None:
                    readable = {} if self.validated is None else self.validated.readable
                    is_done = condition.holds({**readable, **watched})
                is_done |= self.is_asked_to_stop(number, row, own_failure)
                if is_done and not is_last:
                    is_last = True
                    row |= self.numbers_validated(number, is_last, own_failure)
                self.add_row(number, row)
                if is_last or number + 1 == next_agreement:
                    self.agree(own_failure)
                if is_last:
                    break
                if number + 1 == next_agreement:
                    next_agreement += self.steps_until_agreement(number + 1, first)
        return self.result(self.step.results.outputs(self.plan, blocks, self.values), is_done)

    def compute_step(
        self, number: int, sources: Inputs, own_failure: RankFailure
    ) -> dict[str, Any]:
        """Run the schedule of a step, and return this rank's blocks of its results."""
        if self.batches is not None:
            self.batches.place(number, self.values)
        blocks, measured = self.step.runner.run(
            self.plan, self.schedule, sources, wait=False, failure=own_failure
        )
        if self.on_computed is not None:
            self.on_computed(number)
        if self.batches is not None:
            measured = self.batches.with_reading(measured)
        self.measured = self.measured.plus(measured)
        if own_failure.error is not None and self.values_decide:
            # The others may end the loop with this step, or go on: it cannot know.
            raise own_failure.error
        return blocks

    def carry(self, blocks: Mapping[str, Any], sources: Inputs) -> None:
        """Make results of a step the inputs of the next one."""
        for name, output in self.loop.carry.items():
            if name not in sources.overwritable:  # it was given, or loaded
                layout = self.step.results.layout_of(self.plan, output)
                dtype = self.stages.step.graph[output].dtype
                empty = np.empty((0,) * (len(layout.bound) or 1), dtype)
                self.values[name] = DistArray(empty, layout, self.comm)
                sources.overwritable.add(name)
            if output in blocks:  # not on an idle rank
                self.values[name]._replace_block(blocks[output])

    def numbers(self, step: int) -> dict[str, int]:
        """Return the numbers of a step that its program may read."""
        return self.loop.numbers(step)

    def numbers_validated(self, number: int, is_last: bool, own_failure: RankFailure) -> Values:
        """Return the numbers of the validation after a step; nan if they are not computed."""
        if self.validated is None:
            return {}
        validation = self.validated.validation
        found = dict.fromkeys(validation.columns, float("nan"))
        if self.validate is not None and validation.is_due(number, is_last):
            if self.validated.last_step == number:  # before it was known to be the last step
                return {}
            self.agree(own_failure)
            found = self.validate(number)
            if self.validated.add(number, found):
                self.keep_best()
        return {name: np.array(value) for name, value in found.items()}

    def keep_best(self) -> None:
        """Copy what is carried, as it is after the best validation so far."""
        for name in self.loop.kept_best:
            self.best.pop(name, None)  # its memory is free for the copy
            array = self.values[name]
            self.best[name] = array._with_block(array.local.copy())

    def is_asked_to_stop(self, number: int, row: Values, own_failure: RankFailure) -> bool:
        """Call the caller's function; return whether it ends the loop, on any rank."""
        on_step = self.on_step
        if on_step is None:
            return False
        self.agree(own_failure)
        numbers = {name: value[()] for name, value in row.items()}
        goes_on = together(self.comm, lambda: not on_step(number, numbers))
        return self.comm.lowest(int(goes_on)) == 0

    @property
    def values_decide(self) -> bool:
        """Whether values that a step computes can end the loop."""
        return self.loop.until is not None or (self.loop.stop_at_nan and bool(self.loop.record))

    def add_row(self, number: int, row: Values) -> None:
        """Keep the values that a step has recorded."""
        self.steps_done = number + 1
        for name, value in row.items():
            self.rows[name].append(value[()])  # without the memory that the step has given it
        if self.history_file is not None:
            self.history_file.append(number, row)
        if self.on_row is not None:
            self.on_row(number, row)

    def start_history(self) -> None:
        """Begin the file for the recorded values, with those of steps that are done."""
        history = self.history_file
        if history is not None:
            history.start(self.history())

    def steps_until_agreement(self, done: int, first: int) -> int:
        """Save a checkpoint if it is time to; return after how many steps to ask again.

        Without checkpoints ranks only tell each other of errors, and the steps in between double.
        """
        steps = min(done - first, MOST_STEPS_BETWEEN_AGREEMENTS)
        checkpoints = self.checkpoints
        if checkpoints is None:
            return steps
        seconds = (time.monotonic() - self.started) / (done - first)
        steps = max(1, min(steps, int(SECONDS_BETWEEN_AGREEMENTS / max(seconds, 1e-9))))
        own = f"{steps} {checkpoints.step_request(done)}"
        texts = self.comm.allgather_text(own)
        requests = []
        for text in texts:
            request = text.partition(" ")[2]
            if request:
                requests.append(request)
        if requests:
            tensors = {name: self.values[name] for name in self.loop.carry}
            tensors |= {best_name(name): array for name, array in self.best.items()}
            checkpoints.save(done, requests, self.plan, tensors, self.history())
        steps = int(texts[0].partition(" ")[0])  # by the clock of rank 0
        planned = checkpoints.next_planned(done)
        return steps if planned is None else min(steps, planned - done)

    def explain_nan(self, number: int, row: Values, sources: Inputs) -> None:
        """Run a step again to find the first tensor with nan in it, and raise an error.

        The inputs of the step are still there.
        """
        finder = NanFinder()
        self.step.run_schedule(self.plan, self.schedule, sources, finder)
        order = [vertex.name for vertex in self.plan.graph.vertices]
        found = []
        for names in self.comm.allgather_text(" ".join(finder.names)):
            found += names.split()
        recorded = " and ".join(name for name, value in row.items() if _is_nan(value))
        text = f"{self.job.source.name}: nan in step {number}, in {recorded}"
        if found:
            first = min(found, key=order.index)
            text += f"; the first tensor with nan in it is {self.plan.graph[first].located_name}"
        raise failure(text)

    def agree(self, own: RankFailure) -> None:
        """Raise the error of the first rank that has one, on all ranks."""
        if self.comm.size == 1:
            if own.error is not None:
                raise own.error
            return
        first_failed = find_first_failure(self.comm, own.error, own.part)
        if first_failed is not None:
            self.step.forget_inputs()
            raise first_failed

    def watched(self, blocks: Mapping[str, Any], number: int) -> Values:
        """Return the values that a condition or the history needs, the same on all ranks."""
        values: Values = {}
        for name in self.watched_names:
            if name in blocks:
                values[name] = np.asarray(on_host(blocks[name]))
            elif name in self.stages.step.graph.outputs:  # on an idle rank
                values[name] = np.empty((), self.stages.step.graph[name].dtype)
            elif name in self.numbers(number):
                values[name] = np.array(self.numbers(number)[name])
            else:
                values[name] = np.asarray(self.parameter(name))
        if self.plan.mesh.ranks < self.comm.size:
            values = self._values_of_first_rank(values)
        return values

    def _values_of_first_rank(self, values: Values) -> Values:
        """Return the values of rank 0: idle ranks compute nothing, and have none."""
        text = ""
        if self.comm.rank == 0:
            text = " ".join(value.tobytes().hex() for value in values.values())
        texts = self.comm.allgather_text(text)[0].split(" ")
        found = {}
        for (name, own), part in zip(values.items(), texts, strict=True):
            found[name] = np.frombuffer(bytes.fromhex(part), own.dtype).reshape(())
        return found

    def parameter(self, name: str) -> Any:
        """Return the value of a parameter that only the condition reads."""
        if name in self.values:
            return self.values[name]
        return next(spec.value for spec in self.job.inputs if spec.name == name)

    def history(self) -> dict[str, npt.NDArray[Any]]:
        """Return the values that were recorded so far."""
        found = {}
        for name, values in self.rows.items():
            dtype = "float64"  # of numbers of the validation
            if name in self.loop.record:
                dtype = self.stages.step.graph[name].dtype
            found[name] = np.array(values, dtype)
        return found

    def result(self, outputs: Mapping[str, DistArray], is_done: bool) -> LoopResult:
        """Return the last values and the history."""
        state = {name: outputs[output] for name, output in self.loop.carry.items()}
        found = {**state, **self.best}
        for name in self.kept_outputs:
            found[name] = outputs[name] if name in outputs else self.once_outputs[name]
        best_step = None if self.validated is None else self.validated.best_step
        return LoopResult(
            found, self.history(), self.steps_done, is_done, state=state, best_step=best_step
        )


def _is_nan(value: npt.NDArray[Any]) -> bool:
    return value.dtype.kind in "fc" and bool(np.isnan(value))
