"""A dry run of a schedule: arrays have a shape only, and the communicator notes the messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from einmpi.comm.base import Comm
from einmpi.runtime.backend import Array
from einmpi.runtime.buffers import Buffers
from einmpi.runtime.program import Program
from einmpi.runtime.shape_backend import ShapeBackend
from einmpi.runtime.sharing.arrays import SharedArrays
from einmpi.runtime.sharing.slots import SharedSlots
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Exchange, Load, Reduce, Slot, Step
from einmpi.simulate.message_rounds import MessageRounds


def dry_run(
    schedule: Schedule, slots: SharedSlots, comm: MessageRounds, on_step: Callable[[Step], None]
) -> None:
    """Carry out the steps of a schedule, of which some slots lie in shared memory.

    `on_step` is called before each step.
    """
    backend = ShapeBackend()
    backend.shared = _SharedNotes(slots)
    for group in slots.groups:
        comm.barrier_among(group)  # nobody may still read what the last run has left
    Program(schedule, backend, comm).run(_NoInputs(), on_step=on_step)


class _SharedNotes(SharedArrays):
    """The transfers in shared memory of a dry run: barriers, and what a rank copies."""

    def __init__(self, slots: SharedSlots) -> None:
        super().__init__()
        for step in slots.steps:
            self.transfers[id(step)] = partial(_note_transfer, step)
            self.transfers_beside[id(step)] = partial(_note_beside, step)


def _note_transfer(step: Exchange | Reduce, buffers: Buffers, comm: MessageRounds) -> None:
    is_gather = isinstance(step, Exchange) and step.moves.same_to_all
    if isinstance(step, Exchange):
        buffers.make(step.target)
    comm.barrier_among(step.group)
    # What is gathered is read where it is.
    comm.read_shared(step.nbytes, 0 if is_gather else step.nbytes)


def _note_beside(
    step: Exchange | Reduce, arriving: Sequence[Slot | None], buffers: Buffers, comm: MessageRounds
) -> None:
    for slot in arriving:
        if slot is not None:
            buffers.make(slot)
    comm.barrier_among(step.group)
    comm.read_shared(step.nbytes, step.nbytes)


class _NoInputs:
    """Inputs without values; reading them takes no time."""

    array_type: type[Any] = np.ndarray

    def begin(self, step: Load, make: Any, comm: Comm, outside: bool) -> None:
        pass

    def fill(self, step: Load, target: Array, comm: Comm) -> None:
        pass

    def block(self, step: Load, comm: Comm) -> Array:
        return np.broadcast_to(np.zeros((), step.slot.dtype), step.slot.shape)

    def close(self) -> None:
        pass

    def takes_messages(self, step: Load) -> bool:
        return False
