"""The execute loop: the steps of a schedule, one after another, on any backend over any communicator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from einmpi.comm.base import Comm
from einmpi.errors import EinmpiError
from einmpi.runtime.backend import Backend
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.passes import compute_in_passes
from einmpi.runtime.transfer import exchange, reduce
from einmpi.schedule.schedule import SavePoint, Schedule
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
    Step,
    Store,
)

FAULTS = (ValueError, IndexError, MemoryError)  # of a kernel; other errors are ours


class Storage(Protocol):
    """Where inputs come from."""

    def begin(self, step: Load, make: Callable[[], Any], comm: Comm, outside: bool) -> None:
        """Load in the background, if that is possible, into the array that `make` gives; it may be in the slow tier."""

    def fill(self, step: Load, target: Any, comm: Comm) -> None:
        """Put a region of an input at a place in an array. All ranks of the layout call it."""

    def block(self, step: Load, comm: Comm) -> Any:
        """A region of an input that stays on the rank, to be read only. All ranks of the layout call it."""


class Keeper(Protocol):
    """Saves what there is at a point of a run, and brings back what another run has saved."""

    seconds: float  # spent on saving

    def restore(self, rank: int, buffers: Buffers) -> None: ...
    def reached(self, point: SavePoint, buffers: Buffers) -> None: ...


def execute(
    schedule: Schedule,
    backend: Backend,
    comm: Comm,
    storage: Storage,
    on_step: Callable[[Step], None] | None = None,
    keeper: Keeper | None = None,
) -> tuple[dict[str, Any], Buffers]:
    """Do a rank's schedule: (its blocks of the outputs, the buffers with what they took). `on_step` hears of each step
    before it is done, `keeper` when a vertex is."""
    buffers = Buffers(backend)
    for slot in schedule.outside:
        buffers.place(slot)
    if keeper is not None:
        keeper.restore(schedule.rank, buffers)
    for steps, point in schedule.parts:
        for step in steps:
            if on_step is not None:
                on_step(step)
            ACTIONS[type(step)](step, buffers, comm, storage)
        if keeper is not None and point is not None:
            keeper.reached(point, buffers)
    return {name: buffers[slot] for name, slot in buffers.outputs.items()}, buffers


def _load(step: Load, buffers: Buffers, comm: Comm, storage: Storage) -> None:
    if step.kept:
        buffers.put(step.slot, storage.block(step, comm))
    else:
        storage.fill(step, buffers.make(step.slot), comm)


def _begin(step: Begin, buffers: Buffers, comm: Comm, storage: Storage) -> None:
    slot = step.load.slot
    storage.begin(step.load, lambda: buffers.make(slot), comm, outside=slot.name in buffers.slow)


def _compute(step: Kernel, buffers: Buffers, _: Comm, __: Storage) -> None:
    operands = [buffers[slot] for slot in step.operands]
    try:
        buffers.backend.compute(step, operands, buffers.make(step.target))
    except FAULTS as error:
        raise _named(step.vertex, error) from error


def _compute_in_passes(step: Passes, buffers: Buffers, _: Comm, __: Storage) -> None:
    try:
        compute_in_passes(step, buffers)
    except FAULTS as error:
        raise _named(step.vertex, error) from error


def _named(vertex: str, error: Exception) -> EinmpiError:
    """What goes wrong in a kernel is said with the vertex."""
    return EinmpiError(f"{vertex}: {str(error) or type(error).__name__}")


def _compute_together(group: Group, buffers: Buffers, comm: Comm, storage: Storage) -> None:
    for begin in group.begins:
        _begin(begin, buffers, comm, storage)
    for slot in group.writes:
        buffers.make(slot)
    for slot in group.reads:
        buffers[slot]  # waits until its values are there
    if buffers.backend.compute_group(group, buffers.arrays):
        for slot in group.frees:
            buffers.free(slot)
    else:
        for step in group.one_by_one:
            ACTIONS[type(step)](step, buffers, comm, storage)


def _store(step: Store, buffers: Buffers, _: Comm, __: Storage) -> None:
    buffers.outputs[step.tensor] = step.slot  # it may leave memory and come back until the end


# What each kind of step does.
ACTIONS: dict[type, Callable[[Any, Buffers, Comm, Storage], None]] = {
    Load: _load,
    Begin: _begin,
    Exchange: lambda step, buffers, comm, _: exchange(step, buffers, comm),
    Reduce: lambda step, buffers, comm, _: reduce(step, buffers, comm),
    Kernel: _compute,
    Group: _compute_together,
    Passes: _compute_in_passes,
    Store: _store,
    Free: lambda step, buffers, *_: buffers.free(step.slot),
    Place: lambda step, buffers, *_: buffers.place(step.slot),
    Evict: lambda step, buffers, *_: buffers.evict(step.slot),
    Drop: lambda step, buffers, *_: buffers.drop(step.slot),
    Fetch: lambda step, buffers, *_: buffers.fetch(step.slot),
}
