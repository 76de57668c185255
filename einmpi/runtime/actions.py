"""What each kind of step does, on any backend over any communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from einmpi.comm.base import Comm
from einmpi.errors import EinmpiError
from einmpi.kernels.updates import compute_in_place
from einmpi.runtime.backend import Array
from einmpi.runtime.background import PartBuffers, SharedBuffers
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.chain import accumulate, compute_chain
from einmpi.runtime.passes import compute_in_passes
from einmpi.runtime.transfer import exchange_halo, transfer
from einmpi.runtime.updates import compute_blocked_update, compute_sparse_update
from einmpi.schedule.blocked_updates import BlockedUpdate, SparseBlockedUpdate
from einmpi.schedule.chain import Accumulate, Chain
from einmpi.schedule.halo import HaloExchange, Sweep
from einmpi.schedule.overlap import Await, KernelPart, UpdatePart
from einmpi.schedule.regions import Region
from einmpi.schedule.steps import (
    Begin,
    Drop,
    Evict,
    Exchange,
    Fetch,
    Free,
    Group,
    Kernel,
    Load,
    Passes,
    Place,
    Reduce,
    Reuse,
    SavePoint,
    Step,
    Store,
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


def _transfer(step: Exchange | Reduce, comm: Comm, _: InputSource, buffers: Buffers) -> None:
    if step.background and isinstance(buffers, SharedBuffers):
        buffers.background.begin(step)
    else:
        transfer(step, buffers, comm)


def _await(step: Await, _: Comm, __: InputSource, buffers: Buffers) -> None:
    assert isinstance(buffers, SharedBuffers), "only transfers in the background are awaited"
    buffers.background.wait_for(step.moving)


def _compute_kernel_part(step: KernelPart, _: Comm, __: InputSource, buffers: Buffers) -> None:
    operands = []
    for slot, region in zip(step.kernel.operands, step.piece.operands, strict=True):
        operands.append(_part_of(buffers[slot], region))
    target = _part_of(buffers.make(step.kernel.target), step.piece.target)
    try:
        buffers.backend.compute_kernel(step.piece.kernel, operands, target)
    except KERNEL_ERRORS as error:
        raise named_error(step.kernel, error) from error


def _compute_update_part(step: UpdatePart, _: Comm, __: InputSource, buffers: Buffers) -> None:
    target = step.update.update.target
    views = {target.name: _part_of(buffers.make(target), step.region_written(target))}
    for slot in step.reads:
        views[slot.name] = buffers[slot]
        if slot.shape:
            views[slot.name] = _part_of(buffers[slot], step.region_read(slot))
    try:
        compute_blocked_update(step.part, PartBuffers(buffers, views))
    except KERNEL_ERRORS as error:
        raise named_error(step.update.update, error) from error


def _part_of(array: Array, box: Region) -> Array:
    """Return a view of a box of an array."""
    return array[tuple(slice(*runs[0]) if runs else slice(0) for runs in box)]


def _compute_kernel(step: Kernel, _: Comm, __: InputSource, buffers: Buffers) -> None:
    operands = [buffers[slot] for slot in step.operands]
    target = buffers.make(step.target)
    backend = buffers.backend
    try:
        if id(target) not in map(id, operands):
            backend.compute_kernel(step, operands, target)
        elif not backend.write_rows(step, operands, target):
            compute_in_place(step, operands, target, backend.to_host, backend.compute_kernel)
    except KERNEL_ERRORS as error:
        raise named_error(step, error) from error


def _compute_in_passes(step: Passes, _: Comm, __: InputSource, buffers: Buffers) -> None:
    try:
        compute_in_passes(step, buffers)
    except KERNEL_ERRORS as error:
        raise named_error(step.kernel, error) from error


def _compute_blocked_update(
    step: BlockedUpdate, _: Comm, __: InputSource, buffers: Buffers
) -> None:
    try:
        if isinstance(step, SparseBlockedUpdate):
            compute_sparse_update(step, buffers)
        else:
            compute_blocked_update(step, buffers)
    except KERNEL_ERRORS as error:
        raise named_error(step.update, error) from error


def named_error(kernel: Kernel, error: Exception) -> EinmpiError:
    """Return an error that names the vertex and its place in the program."""
    name = kernel.located_name or kernel.vertex
    return EinmpiError(f"{name}: {str(error) or type(error).__name__}")


def _compute_group(group: Group, comm: Comm, storage: InputSource, buffers: Buffers) -> None:
    early, late = group.begins_in_order
    for begin in early:
        _begin(begin, comm, storage, buffers)
    for reuse in group.reuse_steps:
        _reuse(reuse, comm, storage, buffers)
    made = [slot for slot in group.writes if slot.name not in buffers]
    for slot in group.writes:
        buffers.make(slot)
    for slot in group.reads:
        buffers[slot]  # waits until its values are there
    if buffers.backend.compute_group(group, buffers.arrays):
        for slot in group.frees:
            buffers.free(slot)
    else:
        for slot in made:  # one by one they need not be there all the time
            buffers.free(slot)
        for step in group.one_by_one:
            ACTIONS[type(step)](step, comm, storage, buffers)
    for begin in late:
        _begin(begin, comm, storage, buffers)


def _compute_chain(chain: Chain, comm: Comm, storage: InputSource, buffers: Buffers) -> None:
    def carry_out_steps(steps: Sequence[Step], inside: Buffers) -> None:
        for step in steps:
            ACTIONS[type(step)](step, comm, storage, inside)

    compute_chain(chain, buffers, carry_out_steps)


def _compute_sweep(step: Sweep, _: Comm, __: InputSource, buffers: Buffers) -> None:
    for slot in step.writes:
        buffers.make(slot)
    for slot in step.reads:
        buffers[slot]  # waits until its values are there
    try:
        buffers.backend.compute_group(step, buffers.arrays)
    except KERNEL_ERRORS as error:
        raise named_error(step.kernel, error) from error


def _reuse(step: Reuse, _: Comm, __: InputSource, buffers: Buffers) -> None:
    for slot in step.nan_checked:
        if np.isnan(buffers.backend.to_host(buffers[slot])).any():
            return  # the inputs are needed to find where nan comes from
    buffers.reuse(step.slot, step.source)


ACTIONS: dict[type, Callable[[Any, Comm, InputSource, Buffers], None]] = {
    Load: _load,
    Begin: _begin,
    Exchange: _transfer,
    Reduce: _transfer,
    Await: _await,
    Kernel: _compute_kernel,
    KernelPart: _compute_kernel_part,
    UpdatePart: _compute_update_part,
    HaloExchange: lambda step, comm, _, buffers: exchange_halo(step, buffers, comm),
    Group: _compute_group,
    Chain: _compute_chain,
    Accumulate: lambda step, _, __, buffers: accumulate(step, buffers),
    Sweep: _compute_sweep,
    Passes: _compute_in_passes,
    BlockedUpdate: _compute_blocked_update,
    SparseBlockedUpdate: _compute_blocked_update,
    Store: lambda *_: None,  # the slot may leave memory and come back until the end
    SavePoint: lambda *_: None,
    Free: lambda step, _, __, buffers: buffers.free(step.slot),
    Reuse: _reuse,
    Place: lambda step, _, __, buffers: buffers.place(step.slot),
    Evict: lambda step, _, __, buffers: buffers.evict(step.slot),
    Drop: lambda step, _, __, buffers: buffers.drop(step.slot),
    Fetch: lambda step, _, __, buffers: buffers.fetch(step.slot),
}


# ---- failure -------------------------------------------------------------------------------------
#
# A rank that goes on after an error: it computes nothing more, but sends and receives what the
# others expect, so that they reach the end of the run and can be told.


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
