"""A rank that goes on after an error: it computes nothing more, but sends and receives what the
others expect, so that they reach the end of the run and can be told."""

from __future__ import annotations

from einmpi.runtime.buffers import Buffers
from einmpi.schedule.blocked_updates import BlockedUpdate
from einmpi.schedule.fused.chain import Chain
from einmpi.schedule.halo import Sweep
from einmpi.schedule.overlap.steps import KernelPart, UpdatePart
from einmpi.schedule.steps import Group, Kernel, Load, Passes, Step

# Their errors are those of one rank, and other ranks wait only for what comes after them.
_SKIPPED_STEPS = (Kernel, KernelPart, UpdatePart, Group, Chain, Passes, BlockedUpdate, Sweep)
_LOCAL_STEPS = (*_SKIPPED_STEPS, Load)


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
        if is_exhausted or not isinstance(step, _LOCAL_STEPS):
            return False
        if self.error is None:
            self.error = error
            self.part = part
        return True

    def skips(self, step: Step) -> bool:
        """Return whether a step is left out, because the rank has failed before."""
        return self.error is not None and isinstance(step, _SKIPPED_STEPS)


def stand_in(step: Step, buffers: Buffers) -> None:
    """Leave the slots as a step would that was skipped or has failed, but with zeros in them."""
    for slot in step.writes:
        buffers.make(slot)[...] = 0  # of a part of a kernel, all parts: none is of use any more
    freed = list(step.frees)
    if isinstance(step, Group):
        freed += step.inner
    for slot in freed:
        if slot.name in buffers:
            buffers.free(slot)
