"""The driver: a program is a schedule with calls that are bound to its steps.

The first run does the steps one by one. Further runs call what was bound, as long as nobody watches
the steps or saves between them; after a step that fails, the rest is done one by one again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from einmpi.comm.base import Comm
from einmpi.kernels.prepared import stored_as
from einmpi.runtime.actions import (
    ACTIONS,
    KERNEL_ERRORS,
    InputSource,
    RankFailure,
    named_error,
    stand_in,
)
from einmpi.runtime.backend import Array, Backend, HostArray
from einmpi.runtime.background import Background, OnTransfer, SharedBuffers
from einmpi.runtime.binding import BoundCall, BoundSteps, StoredOtherwise
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.cpu.backend import NumpyBackend
from einmpi.schedule.regions import Slot
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Load, Repeat, SavePoint, Step, Store, numbered

Outputs: TypeAlias = tuple[dict[str, Array], Buffers]  # the blocks of outputs, and the memory used
NumberedCall: TypeAlias = tuple[int, BoundCall]  # with the number of its step


class Checkpointer(Protocol):
    """Saves tensors at the save points of a run, and restores what another run has saved."""

    seconds: float  # spent on saving

    def restore(self, rank: int, buffers: Buffers) -> None:
        """Put saved tensors into their slots."""

    def reached(self, point: SavePoint, buffers: Buffers) -> None:
        """Save what is there at a save point, if it is time to."""


@dataclass
class Run:
    """A run that is under way.

    `on_step` is called before each step. With `failure`, an error is noted there if the rank can go
    on after it: the outputs are then wrong.
    """

    storage: InputSource
    buffers: Buffers
    failure: RankFailure | None = None
    on_step: Callable[[Step], None] | None = None
    checkpointer: Checkpointer | None = None

    @property
    def has_failed(self) -> bool:
        return self.failure is not None and self.failure.error is not None

    @property
    def is_watched(self) -> bool:
        """Whether steps are more than what they do: someone is told, saves, or some are skipped."""
        if self.on_step is not None or self.checkpointer is not None:
            return True
        return self.failure is not None and self.failure.error is not None


class Program:
    """A schedule of one rank, bound to a backend and a communicator."""

    def __init__(self, schedule: Schedule, backend: Backend, comm: Comm) -> None:
        self.schedule = schedule
        self.backend = backend
        self.comm = comm
        self.outputs: dict[str, Slot] = {}
        for _, store in numbered(schedule.steps, Store):
            self.outputs[store.tensor] = store.slot
        self.points = dict(numbered(schedule.steps, SavePoint))  # by the number of the step
        self.actions = [(n, ACTIONS[type(step)], step) for n, step in enumerate(schedule.steps)]
        # Whether further runs differ from the first one. They have arrays and messages of their
        # own, so that one thread at a time has such a run: several may call a compiled job.
        self.can_repeat = isinstance(backend, NumpyBackend) and not schedule.outside
        self.has_run = False
        self.lock = threading.Lock()
        self.bound: BoundSteps | None = None
        self.bound_to: Hashable = ()  # how the slots of a schedule around it are stored
        self.peak = 0  # of the memory of a further run
        self.under_way: Callable[[], Run] = _no_run  # returns the run whose bound steps are called
        # The programs of steps that repeat others, by the number of the step.
        self.inner: dict[int, tuple[Repeat, Program]] = {}
        for number, step in numbered(schedule.steps, Repeat):
            inside = replace(schedule, steps=step.steps, lowered_steps=())
            self.inner[number] = step, Program(inside, backend, comm)

    def run(
        self,
        storage: InputSource,
        failure: RankFailure | None = None,
        on_step: Callable[[Step], None] | None = None,
        checkpointer: Checkpointer | None = None,
        on_transfer: OnTransfer | None = None,
    ) -> Outputs:
        """Carry out the schedule.

        Return this rank's blocks of the outputs, and the buffers, which know how much memory was
        used. The arguments are those of `Run`; `on_transfer` is called after each transfer in the
        background.
        """
        if self.schedule.overlaps:
            with closing(Background(self.backend, self.comm, on_transfer)) as background:
                buffers: Buffers = background.buffers
                self._run(Run(storage, buffers, failure, on_step, checkpointer))
        else:
            buffers = Buffers(self.backend)
            self._run(Run(storage, buffers, failure, on_step, checkpointer))
        return {name: buffers[slot] for name, slot in self.outputs.items()}, buffers

    def _run(self, run: Run) -> None:
        may_repeat = self.can_repeat and self.has_run and not run.is_watched
        if may_repeat and self.lock.acquire(blocking=False):
            try:
                self._run_again(run)
            finally:
                self.lock.release()
        else:
            self._run_one_by_one(run)
            self.has_run = self.has_run or not run.has_failed

    def _run_one_by_one(self, run: Run) -> None:
        for slot in self.schedule.outside:
            run.buffers.place(slot)
        if run.checkpointer is not None:
            run.checkpointer.restore(self.schedule.rank, run.buffers)
        calls = self._one_by_one(run, 0, len(self.schedule.steps))
        self._call(calls, run.buffers, lambda: run)

    def _run_again(self, run: Run) -> None:
        """Call what is bound to the steps; bind it first if that was not done yet."""
        bound = self.bound = self.bound or self._new_bound_steps()
        bound.begin(run.storage, run.buffers)
        self.under_way = lambda: run
        try:
            calls = bound.calls or bound.bind_and_yield(run.buffers)
            self._call(calls, run.buffers, self.under_way)
        finally:  # the inputs and outputs of a run belong to the caller when it is done
            self.under_way = _no_run
            bound.forget_storage()
        self.peak = run.buffers.peak

    def _new_bound_steps(self, outer: Sequence[Slot] = ()) -> BoundSteps:
        assert isinstance(self.backend, NumpyBackend)

        def repeat(number: int, buffers: Buffers) -> None:
            self._repeat(number, self.under_way(), buffers)

        return BoundSteps(self.schedule, self.backend, self.comm, repeat, outer)

    # ---- steps that repeat others ---------------------------------------------------------------

    def _repeat(self, number: int, run: Run, buffers: Buffers) -> None:
        """Do the step with this number, which repeats others. Nobody is told of those."""
        step, program = self.inner[number]
        inside = Run(run.storage, buffers, run.failure)
        program.run_many_times(inside, step.times, step.outer)

    def run_many_times(self, run: Run, times: int, outer: Sequence[Slot]) -> None:
        """Carry out the schedule again and again, on slots of the schedule around it.

        From the first time on, what is bound to the steps is called.
        """
        is_bound = self.can_repeat and times > 1 and self.lock.acquire(blocking=False)
        if not is_bound:
            for _ in range(times):
                self._run_one_by_one(run)
            return
        try:
            stored = stored_as([run.buffers[slot] for slot in outer])
            if self.bound is None or self.bound_to != stored:
                self.bound, self.bound_to = self._new_bound_steps(outer), stored
            bound = self.bound
            bound.begin(run.storage, run.buffers)
            for _ in range(times):
                if run.is_watched:  # the rank has failed
                    self._run_one_by_one(run)
                else:
                    calls = bound.calls or bound.bind_and_yield(run.buffers)
                    self._call(calls, run.buffers, lambda: run)
            bound.end(run.buffers)
        finally:
            self.lock.release()

    # ---- the loop over calls --------------------------------------------------------------------

    def carry_out(self, run: Run, first: int, stop: int) -> None:
        """Do the steps from one number to before another, one by one."""
        self._call(self._one_by_one(run, first, stop), run.buffers, lambda: run, stop)

    def _call(
        self,
        calls: Iterable[NumberedCall],
        buffers: Buffers,
        run_of: Callable[[], Run],
        stop: int | None = None,
    ) -> None:
        """Call what belongs to steps, in order. After one that fails, do the rest one by one.

        `run_of` returns the run, which most calls do not need.
        """
        while True:
            number = 0
            try:
                with np.errstate(all="ignore"):
                    for numbered_call in calls:
                        number, call = numbered_call
                        call(buffers)
                return
            except StoredOtherwise:
                pass
            except Exception as error:
                self._go_on_after(error, number, run_of())
            last = len(self.schedule.steps) if stop is None else stop
            calls = self._one_by_one(run_of(), number + 1, last)

    def _one_by_one(self, run: Run, first: int, stop: int) -> list[NumberedCall]:
        """Return the calls that do some steps, with what others want to know about them."""
        if run.is_watched or self.inner:
            return [(number, partial(self._do, number, run)) for number in range(first, stop)]
        # A GPU waits for what the host does here, call by call.
        comm, storage = self.comm, run.storage
        return [
            (number, partial(action, step, comm, storage))
            for number, action, step in self.actions[first:stop]
            if not (isinstance(storage, GivenBlocks) and isinstance(step, Load))
        ]

    def _do(self, number: int, run: Run, buffers: Buffers) -> None:
        """Do a step, tell those who watch, and skip what a rank that has failed leaves out."""
        step = self.schedule.steps[number]
        if run.on_step is not None:
            run.on_step(step)
        if run.failure is not None and run.failure.skips(step):
            stand_in(step, buffers)
        elif number in self.points and run.checkpointer is not None:
            if isinstance(buffers, SharedBuffers):
                buffers.background.wait_for_all()
            run.checkpointer.reached(self.points[number], buffers)
        elif number in self.inner:
            self._repeat(number, run, buffers)
        else:
            ACTIONS[type(step)](step, self.comm, run.storage, buffers)

    def _go_on_after(self, error: Exception, number: int, run: Run) -> None:
        """Take note of the error of a step, or raise it if the rank cannot go on after it."""
        step = self.schedule.steps[number]
        if step.kernels and isinstance(error, KERNEL_ERRORS):
            named = named_error(step.kernels[-1], error)
            named.__cause__ = error
            error = named
        part = sum(point < number for point in self.points)
        if run.failure is None or not run.failure.record(error, step, part):
            raise error
        stand_in(step, run.buffers)

    # ---- runs on blocks that the caller has taken from its inputs -------------------------------

    @property
    def is_bound(self) -> bool:
        """Whether further runs differ from the first one, and have been prepared for that."""
        return self.bound is not None and bool(self.bound.calls)

    def accepts(self, blocks: Mapping[str, HostArray]) -> bool:
        """Return whether `run_on_blocks` takes blocks that are stored as these are."""
        if self.bound is None or self.schedule.overlaps or not uses_memory_only(self.schedule):
            return False
        return self.bound.accepts(blocks)

    def run_on_blocks(
        self, take_blocks: Callable[[], Mapping[str, HostArray]], failure: RankFailure | None
    ) -> dict[str, Array] | None:
        """Carry out the schedule on blocks of all its inputs, by slot; return those of the outputs.

        `take_blocks` returns blocks that are stored as some that `accepts` has accepted. Return
        None, and take nothing, if another thread runs the schedule at this moment.
        """
        bound = self.bound
        if bound is None or not self.lock.acquire(blocking=False):
            return None
        try:
            blocks = take_blocks()
            buffers = Buffers(self.backend)
            arrays = buffers.arrays = {**bound.kept.slots, **blocks}
            storage = bound.storage = GivenBlocks(blocks)
            self.under_way = lambda: Run(storage, buffers, failure)
            self._call(bound.calls_after_loading, buffers, self.under_way)
        finally:
            self.under_way = _no_run
            bound.forget_storage()
            self.lock.release()
        return {name: arrays[slot.name] for name, slot in self.outputs.items()}


def _no_run() -> Run:
    raise AssertionError("no run is under way")


class GivenBlocks:
    """The blocks of all inputs of a run, by slot. They are in their slots from the start."""

    array_type: type[Any] = np.ndarray

    def __init__(self, blocks: Mapping[str, HostArray]) -> None:
        self.blocks = blocks

    def begin(self, step: Load, make: Callable[[], Array], comm: Comm, outside: bool) -> None: ...

    def fill(self, step: Load, target: Array, comm: Comm) -> None:
        raise AssertionError(f"the block of {step.tensor} is there")

    def block(self, step: Load, comm: Comm) -> Array:
        return self.blocks[step.slot.name]

    def close(self) -> None: ...

    def takes_messages(self, step: Load) -> bool:
        return False


def uses_memory_only(schedule: Schedule) -> bool:
    """Return whether a schedule uses no slow tier."""
    if schedule.outside:
        return False
    return not any(step.spills("place", "evict", "fetch") for step in schedule.steps)
