"""The execute loop: the steps of a schedule, one after another, on any backend over any communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from einmpi.errors import EinmpiError
from einmpi.runtime.backend import Backend
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.comm import Comm
from einmpi.runtime.passes import compute_in_passes
from einmpi.runtime.transfer import exchange, reduce
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
    SavePoint,
    Schedule,
    Slot,
    Step,
    Store,
    reads,
)


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

    def restore(self, rank: int, buffers: Buffers) -> None: ...
    def reached(self, point: SavePoint, buffers: Buffers) -> None: ...


def execute(schedule: Schedule, backend: Backend, comm: Comm, storage: Storage,
            on_step: Callable[[Step], None] | None = None,
            keeper: Keeper | None = None) -> tuple[dict[str, Any], Buffers]:  # fmt: skip
    """Do a rank's schedule: (its blocks of the outputs, the buffers with what they took). `on_step` hears of each step
    before it is done, `keeper` when a vertex is."""
    buffers = Buffers(backend)
    stored: dict[str, Slot] = {}
    for slot in schedule.outside:
        buffers.place(slot)
    if keeper is not None:
        keeper.restore(schedule.rank, buffers)
    for steps, point in schedule.parts():
        for step in steps:
            if on_step is not None:
                on_step(step)
            if isinstance(step, Store):
                stored[step.tensor] = step.slot  # it may go out of memory and come back until the end
            else:
                _do(step, buffers, comm, storage)
        if keeper is not None and point is not None:
            keeper.reached(point, buffers)
    return {name: buffers[slot] for name, slot in stored.items()}, buffers


def _do(step: Step, buffers: Buffers, comm: Comm, storage: Storage) -> None:
    if isinstance(step, Load):
        _load(step, buffers, storage, comm)
    elif isinstance(step, Begin):
        slot = step.load.slot
        storage.begin(step.load, lambda: buffers.make(slot), comm, outside=slot.name in buffers.slow)
    elif isinstance(step, Exchange):
        exchange(step, buffers, comm)
    elif isinstance(step, Reduce):
        reduce(step, buffers, comm)
    elif isinstance(step, Kernel):
        _compute(step, buffers)
    elif isinstance(step, Group):
        _compute_together(step, buffers, comm, storage)
    elif isinstance(step, Passes):
        with _naming(step.vertex):
            compute_in_passes(step, buffers)
    elif isinstance(step, Free):
        buffers.free(step.slot)
    elif isinstance(step, Place):
        buffers.place(step.slot)
    elif isinstance(step, Evict):
        buffers.evict(step.slot)
    elif isinstance(step, Drop):
        buffers.drop(step.slot)
    elif isinstance(step, Fetch):
        buffers.fetch(step.slot)


def _compute(step: Kernel, buffers: Buffers) -> None:
    operands = [buffers[slot] for slot in step.operands]
    with _naming(step.vertex):
        buffers.backend.compute(step, operands, buffers.make(step.target))


@contextmanager
def _naming(vertex: str) -> Iterator[None]:
    """What goes wrong in a kernel is said with the vertex."""
    try:
        yield
    except (ValueError, IndexError, MemoryError) as error:
        raise EinmpiError(f"{vertex}: {str(error) or type(error).__name__}") from error


def _compute_together(group: Group, buffers: Buffers, comm: Comm, storage: Storage) -> None:
    for step in group.steps:
        if isinstance(step, Begin):
            _do(step, buffers, comm, storage)
        elif isinstance(step, Kernel) and step.target not in group.inner:
            buffers.make(step.target)
    for slot in reads(group):
        buffers[slot]  # is whole from here on
    done = buffers.backend.compute_group(group, buffers.arrays)
    for step in group.steps:
        if not isinstance(step, Begin) and (not done or (isinstance(step, Free) and step.slot not in group.inner)):
            _do(step, buffers, comm, storage)


def _load(step: Load, buffers: Buffers, storage: Storage, comm: Comm) -> None:
    if step.kept:
        buffers.put(step.slot, storage.block(step, comm))
    else:
        storage.fill(step, buffers.make(step.slot), comm)
