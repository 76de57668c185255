"""A schedule that is run again and again. From the second run on, small slots keep their memory,
and all that is the same in every run is bound to the calls that carry out its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from einmpi.comm.base import Comm
from einmpi.kernels.prepared import bare_call, bound_call, stored_as
from einmpi.kernels.updates.partial_updates import find_partial_update
from einmpi.kernels.updates.placed_rows import find_placed_rows
from einmpi.runtime.backend import Array, HostArray
from einmpi.runtime.bound_transfers import BoundCall, bind_exchange, bind_reduce
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.cpu.backend import NumpyBackend
from einmpi.runtime.execute import (
    ACTIONS,
    KERNEL_ERRORS,
    InputSource,
    carry_out,
    execute,
    go_on_after,
    named_error,
)
from einmpi.runtime.failure import RankFailure
from einmpi.runtime.host_memory import (
    MIN_RECYCLED_BYTES,
    MOST_BYTES_OF_SMALL_ARRAY,
    SmallArrays,
    aligned_empty,
)
from einmpi.runtime.kept_memory import KeptMemory, keep_memory
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.slots import names_of
from einmpi.schedule.steps import Exchange, Free, Kernel, Load, Reduce, Reuse, Slot, Step, Store

_NumberedCall: TypeAlias = tuple[int, BoundCall]  # with the number of its step


class _StoredOtherwise(Exception):
    """An input is stored in another way than the one that kernels were prepared for."""


class Repeated(Protocol):
    """A schedule that is run again and again by one rank."""

    def run(
        self, storage: InputSource, failure: RankFailure | None
    ) -> tuple[dict[str, Array], Buffers]:
        """Carry out the schedule; results and `failure` are those of `execute`."""


class RepeatedSchedule:
    """The runs of a schedule on host memory without a slow tier, by one rank."""

    def __init__(self, schedule: Schedule, backend: NumpyBackend, comm: Comm) -> None:
        self.schedule = schedule
        self.backend = backend
        self.comm = comm
        self.has_run = False
        self.kept: KeptMemory | None = None
        self.calls: list[_NumberedCall] = []
        self.calls_after_loading: list[_NumberedCall] = []  # all but those that take inputs
        self.expected: dict[str, Hashable] = {}  # how blocks of inputs are stored, by slot
        self.peak = 0  # of the memory of a run
        self.outputs: dict[str, Slot] = {}
        self.reused: set[str] = set()  # slots that may have the memory of an input
        for step in schedule.steps:
            if isinstance(step, Store):
                self.outputs[step.tensor] = step.slot
            self.reused.update(names_of(step.reuses))
        self.storage: InputSource  # of the run that is under way
        self.lock = threading.Lock()  # several threads may call a compiled job

    def run(
        self, storage: InputSource, failure: RankFailure | None
    ) -> tuple[dict[str, Array], Buffers]:
        """Carry out the schedule; results and `failure` are those of `execute`."""
        has_failed = failure is not None and failure.error is not None
        if not self.has_run or has_failed or not self.lock.acquire(blocking=False):
            found = execute(self.schedule, self.backend, self.comm, storage, failure=failure)
            self.has_run = failure is None or failure.error is None
            return found
        try:
            self.storage = storage
            buffers = self._run_bound(failure)
        finally:
            self.lock.release()
        return self._output_blocks(buffers), buffers

    def accepts(self, blocks: Mapping[str, HostArray]) -> bool:
        """Return whether `run_on_blocks` takes blocks that are stored as these are."""
        if not self.calls or self.expected.keys() != blocks.keys():
            return False
        for name, block in blocks.items():
            if stored_as((block,)) != self.expected[name]:
                return False
        return all(step.kept for step in self.schedule.steps if isinstance(step, Load))

    def run_on_blocks(
        self, take_blocks: Callable[[], Mapping[str, HostArray]], failure: RankFailure | None
    ) -> dict[str, Array] | None:
        """Carry out the schedule on blocks of all its inputs, by slot; return those of the outputs.

        `take_blocks` returns blocks that are stored as some that `accepts` has accepted. Return
        None, and take nothing, if another thread runs the schedule at this moment.
        """
        kept = self.kept
        if kept is None or not self.lock.acquire(blocking=False):
            return None
        try:
            blocks = take_blocks()
            buffers = Buffers(self.backend)
            buffers.arrays = {**kept.slots, **blocks}
            number = self._carry_out(self.calls_after_loading, buffers, failure)
            if number is not None:
                self.storage = _GivenBlocks(blocks)
                for step in self.schedule.steps[number + 1 :]:
                    if isinstance(step, Load):
                        del buffers.arrays[step.slot.name]
                self._finish(number + 1, buffers, failure)
        finally:
            self.lock.release()
        return self._output_blocks(buffers)

    def _output_blocks(self, buffers: Buffers) -> dict[str, Array]:
        arrays = buffers.arrays
        return {name: arrays[slot.name] for name, slot in self.outputs.items()}

    def _run_bound(self, failure: RankFailure | None) -> Buffers:
        """Call what is bound to the steps; bind it first if that was not done yet."""
        if self.kept is None:
            self.kept = keep_memory(self.schedule.steps, self.backend.shared.arrays)
        buffers = Buffers(self.backend)
        buffers.arrays.update(self.kept.slots)
        buffers.grow(self.kept.nbytes)
        number = self._carry_out(
            self.calls or self._bound_calls(self.kept, buffers), buffers, failure
        )
        if number is not None:
            self._finish(number + 1, buffers, failure)
        self.peak = buffers.peak
        return buffers

    def _carry_out(
        self, calls: Iterable[_NumberedCall], buffers: Buffers, failure: RankFailure | None
    ) -> int | None:
        """Call what is bound to steps; return the number of the step that has failed, if any.

        The steps after it are not done.
        """
        step_number = 0
        try:
            with np.errstate(all="ignore"):
                for numbered_call in calls:
                    step_number, call = numbered_call
                    call(buffers)
        except _StoredOtherwise:
            return step_number
        except Exception as error:
            self._go_on_after(error, step_number, buffers, failure)
            return step_number
        return None

    def _bound_calls(self, kept: KeptMemory, buffers: Buffers) -> Iterator[_NumberedCall]:
        """Yield each call when the calls before it are done: it is bound to what is there then."""
        self.expected.clear()
        found = []
        after_loading = []
        for number, step in enumerate(self.schedule.steps):
            for call in self._bind(number, step, kept, buffers):
                found.append((number, call))
                if not isinstance(step, Load):
                    after_loading.append((number, call))
                yield number, call
        self.calls = found
        self.calls_after_loading = after_loading

    def _go_on_after(
        self, error: Exception, number: int, buffers: Buffers, failure: RankFailure | None
    ) -> None:
        """Take note of the error of a step, or raise it, as `execute` does."""
        step = self.schedule.steps[number]
        if isinstance(step, Kernel) and isinstance(error, KERNEL_ERRORS):
            named = named_error(step, error)
            named.__cause__ = error
            error = named
        go_on_after(error, step, self._part_of(number), buffers, failure)

    def _finish(self, first: int, buffers: Buffers, failure: RankFailure | None) -> None:
        """Carry out the steps from a number on in the ordinary way."""
        for number, step in enumerate(self.schedule.steps[first:], first):
            part = self._part_of(number)
            carry_out([step], part, buffers, self.comm, self.storage, failure)

    def _part_of(self, number: int) -> int:
        """Return the part of the schedule that a step is in."""
        return sum(point.steps <= number for point in self.schedule.points)

    # ---- what is bound to a step ----------------------------------------------------------------

    def _bind(self, number: int, step: Step, kept: KeptMemory, buffers: Buffers) -> list[BoundCall]:
        """Return the calls that carry out a step, given the slots that exist before it."""
        if isinstance(step, Free):
            if step.slot.name in buffers.shared.arrays:
                return [lambda buffers: buffers.free(step.slot)]
            return [] if step.slot.name in kept.slots else [_bind_free(step.slot.name)]
        if isinstance(step, Store):
            return []
        if id(step) in buffers.shared.transfers:
            action = ACTIONS[type(step)]
            return [lambda buffers: action(step, buffers, self.comm, self.storage)]
        if isinstance(step, Exchange):
            return bind_exchange(step, number, kept, self.comm)
        if isinstance(step, Reduce):
            return bind_reduce(step, number, kept, self.comm)
        if isinstance(step, Load) and step.kept:
            return [self._bind_load(step)]
        if isinstance(step, Reuse) and not step.nan_checked:
            return [_bind_reuse(step)]
        if isinstance(step, Kernel):
            if not self._may_be_partial(step):
                return [self._bind_kernel(step, kept, buffers)]
            write = self._bind_row_writes(step, buffers)
            if write is not None:
                return [write]
        action = ACTIONS[type(step)]
        return [lambda buffers: action(step, buffers, self.comm, self.storage)]

    def _may_be_partial(self, step: Kernel) -> bool:
        """Return whether a kernel may write over an input, and then only where it changes."""
        if step.target.name not in self.reused:
            return False
        einsum = step.einsum
        return find_placed_rows(einsum) is not None or find_partial_update(einsum) is not None

    def _bind_load(self, step: Load) -> BoundCall:
        """Return the call that takes a block of an input that is on the rank."""
        name = step.slot.name

        def load(buffers: Buffers) -> None:
            block = self.storage.block(step, self.comm)
            buffers.put(step.slot, block)
            stored = stored_as((block,))
            if stored != self.expected.setdefault(name, stored):
                raise _StoredOtherwise

        return load

    def _bind_kernel(self, step: Kernel, kept: KeptMemory, buffers: Buffers) -> BoundCall:
        """Return the call that computes a kernel. The caller ignores floating-point errors."""
        names = names_of(step.operands)
        make_target = _bind_making(step.target, self.backend)
        operands = [buffers.arrays[name] for name in names]
        target = make_target(buffers)
        backend = self.backend
        prepared = backend.prepared_kernel(step, operands, target)
        if all(name in kept.slots for name in (*names, step.target.name)):
            bound = bound_call(prepared, operands, target)
            return lambda _: backend.compute_kernel(step, operands, target, bound)
        bare = bare_call(prepared)

        def compute_kernel(buffers: Buffers) -> None:
            arrays = buffers.arrays
            operands = [arrays[name] for name in names]
            backend.compute_kernel(step, operands, make_target(buffers), bare)

        return compute_kernel

    def _bind_row_writes(self, step: Kernel, buffers: Buffers) -> BoundCall | None:
        """Return the call that writes rows over an input; None if the kernel is none that does."""
        names = names_of(step.operands)
        target_name = step.target.name
        write = None
        if target_name in buffers.arrays:
            operands = [buffers.arrays[name] for name in names]
            target = buffers.arrays[target_name]
            write = self.backend.prepared_row_writes(step, operands, target)
        rows = find_placed_rows(step.einsum)
        if write is None or rows is None:
            return None
        action = ACTIONS[Kernel]
        old_name = names[rows.operand]

        def write_rows(buffers: Buffers) -> None:
            arrays = buffers.arrays
            target = arrays.get(target_name)
            if target is None or target is not arrays[old_name]:  # the input must stay as it is
                action(step, buffers, self.comm, self.storage)
                return
            write([arrays[name] for name in names], target)

        return write_rows


class _GivenBlocks:
    """The blocks of all inputs of a run, by slot."""

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


def _bind_reuse(step: Reuse) -> BoundCall:
    """Return what gives a slot the array of another one."""
    name = step.slot.name
    source = step.source.name

    def reuse(buffers: Buffers) -> None:
        buffers.arrays[name] = buffers.arrays[source]

    return reuse


def _bind_free(name: str) -> BoundCall:
    """Return what gives up the array of a slot."""

    def free(buffers: Buffers) -> None:
        array = buffers.arrays.pop(name, None)
        if array is not None:
            buffers.bytes_in_use -= array.nbytes

    return free


def _bind_making(slot: Slot, backend: NumpyBackend) -> Callable[[Buffers], HostArray]:
    """Return what gives the array of a slot, and creates it if there is none."""
    name = slot.name
    if name in backend.shared.arrays:
        return lambda buffers: buffers.make(slot)
    nbytes = slot.nbytes
    create: Callable[[], HostArray] = partial(backend.allocate, slot.shape, slot.dtype)
    if nbytes <= MOST_BYTES_OF_SMALL_ARRAY:
        create = SmallArrays(slot.shape, np.dtype(slot.dtype)).take
    elif nbytes < MIN_RECYCLED_BYTES:
        create = partial(aligned_empty, slot.shape, np.dtype(slot.dtype))

    def make(buffers: Buffers) -> HostArray:
        arrays = buffers.arrays
        if name not in arrays:
            arrays[name] = create()
            buffers.grow(nbytes)
        array: HostArray = arrays[name]
        return array

    return make


def can_be_repeated(schedule: Schedule) -> bool:
    """Return whether a schedule uses memory only, no slow tier, and has nothing in the background.

    Large transfers, which go on in the background, would gain nothing.
    """
    if schedule.outside or schedule.overlaps:
        return False
    return not any(step.places or step.evicts or step.fetches for step in schedule.steps)
