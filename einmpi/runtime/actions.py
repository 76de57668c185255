"""What each kind of step does, on any backend over any communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from einmpi.comm.base import Comm
from einmpi.errors import EinmpiError
from einmpi.runtime.backend import Array
from einmpi.runtime.background import SharedBuffers
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.compute import compute, compute_kernel
from einmpi.runtime.transfer import transfer
from einmpi.schedule.compute import Compute, Kernel
from einmpi.schedule.steps import (
    Await,
    Begin,
    Free,
    Load,
    Repeat,
    Reuse,
    SavePoint,
    Spill,
    Step,
    Store,
    Transfer,
)

# What a kernel raises because of its values. Other errors are ours, and keep their traceback.
KERNEL_ERRORS = (ValueError, IndexError, MemoryError)


class InputSource(Protocol):
    """What loads the inputs of a run."""

    array_type: type[Any]  # given arrays of this type need not be copied

    def begin(self, step: Load, make: Callable[[], Array], comm: Comm, outside: bool) -> None:
        """Load in the background, if possible, into the array that `make` returns.

        `outside` says that this array is in the slow tier.
        """

    def fill(self, step: Load, target: Array, comm: Comm) -> None:
        """Put a region of an input at a place in an array. All ranks of the layout call it."""

    def block(self, step: Load, comm: Comm) -> Array:
        """Return a region of an input that stays on the rank, to be read only.

        All ranks of the layout call it.
        """

    def close(self) -> None:
        """End what runs in the background. The caller may change given arrays after this."""

    def takes_messages(self, step: Load) -> bool:
        """Return whether ranks may send each other what they load."""


# ---- what each kind of step does ----------------------------------------------------------------


def _load(step: Load, comm: Comm, storage: InputSource, buffers: Buffers) -> None:
    if isinstance(buffers, SharedBuffers) and storage.takes_messages(step):
        buffers.background.wait_for_all()
    if step.kept:
        if step.slot.name not in buffers.arrays:  # else the caller has put it there
            buffers.put(step.slot, storage.block(step, comm))
    else:
        storage.fill(step, buffers.make(step.slot), comm)


def _begin(step: Begin, comm: Comm, storage: InputSource, buffers: Buffers) -> None:
    slot = step.load.slot

    def begin_loading() -> None:
        is_outside = slot.name in buffers.slow
        storage.begin(step.load, lambda: buffers.make(slot), comm, outside=is_outside)

    if buffers.shared.is_free(slot):
        begin_loading()
    else:
        buffers.shared.postpone(slot, begin_loading)


def _transfer(step: Transfer, comm: Comm, _: InputSource, buffers: Buffers) -> None:
    if step.background and isinstance(buffers, SharedBuffers):
        buffers.background.begin(step)
    else:
        transfer(step, buffers, comm)


def _await(step: Await, _: Comm, __: InputSource, buffers: Buffers) -> None:
    assert isinstance(buffers, SharedBuffers), "only transfers in the background are awaited"
    buffers.background.wait_for(step.moving)


def _compute(step: Compute, comm: Comm, storage: InputSource, buffers: Buffers) -> None:
    try:
        if step.is_plain:  # most are: a GPU waits for what the host does before
            compute_kernel(step, buffers)
        else:
            compute(step, buffers, partial(_carry_out, comm, storage))
    except KERNEL_ERRORS as error:
        raise named_error(step.kernels[-1], error) from error


def _carry_out(comm: Comm, storage: InputSource, steps: Sequence[Step], buffers: Buffers) -> None:
    for step in steps:
        ACTIONS[type(step)](step, comm, storage, buffers)


def named_error(kernel: Kernel, error: Exception) -> EinmpiError:
    """Return an error that names the vertex and its place in the program."""
    name = kernel.located_name or kernel.vertex
    return EinmpiError(f"{name}: {str(error) or type(error).__name__}")


def _repeat(step: Repeat, comm: Comm, storage: InputSource, buffers: Buffers) -> None:
    """Do steps again and again, one by one. A program calls what it has bound to them instead."""
    for _ in range(step.times):
        _carry_out(comm, storage, step.steps, buffers)


def _reuse(step: Reuse, _: Comm, __: InputSource, buffers: Buffers) -> None:
    for slot in step.nan_checked:
        if np.isnan(buffers.backend.to_host(buffers[slot])).any():
            return  # the inputs are needed to find where nan comes from
    buffers.reuse(step.slot, step.source)


def _spill(step: Spill, _: Comm, __: InputSource, buffers: Buffers) -> None:
    getattr(buffers, step.action)(step.slot)


ACTIONS: dict[type, Callable[[Any, Comm, InputSource, Buffers], None]] = {
    Load: _load,
    Begin: _begin,
    Transfer: _transfer,
    Await: _await,
    Compute: _compute,
    Store: lambda *_: None,  # the slot may leave memory and come back until the end
    SavePoint: lambda *_: None,
    Free: lambda step, _, __, buffers: buffers.free(step.slot),
    Reuse: _reuse,
    Spill: _spill,
    Repeat: _repeat,
}


# ---- failure -------------------------------------------------------------------------------------
#
# A rank that goes on after an error: it computes nothing more, but sends and receives what the
# others expect, so that they reach the end of the run and can be told.


class RankFailure:
    """The first error of this rank in a run, and the part of the schedule that it was in."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.part = 0

    def record(self, error: Exception, step: Step, part: int) -> bool:
        """Take note of an error; return False if the rank cannot go on after it.

        Without memory there is no place for what other ranks send. In other steps, messages may be
        lost.
        """
        is_exhausted = isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError)
        # Errors of other steps may leave other ranks waiting for messages.
        if is_exhausted or step.kind not in ("kernel", "load"):
            return False
        if self.error is None:
            self.error = error
            self.part = part
        return True

    def skips(self, step: Step) -> bool:
        """Return whether a step is left out, because the rank has failed before."""
        return self.error is not None and bool(step.kernels)


def stand_in(step: Step, buffers: Buffers) -> None:
    """Leave the slots as a step would that was skipped or has failed, but with zeros in them."""
    for slot in step.writes:
        buffers.make(slot)[...] = 0  # of a part of a kernel, all parts: none is of use any more
    for slot in (*step.frees, *step.inner):
        if slot.name in buffers:
            buffers.free(slot)
