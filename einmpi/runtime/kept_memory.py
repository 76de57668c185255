"""Memory that a schedule keeps from run to run: that of small slots and small messages. Arrays
that are not needed at the same time share it, so that it is no more than the plan allows for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.runtime.host_memory import ALIGNMENT, aligned_empty
from einmpi.runtime.messages import AtOnce, Gather, messages_of
from einmpi.schedule.memory import bytes_needed
from einmpi.schedule.steps import Exchange, Free, Kernel, Reduce, Slot, Step

HostArray: TypeAlias = npt.NDArray[Any]

MOST_BYTES_OF_AN_ARRAY = 2**16
MOST_BYTES_OF_A_SCHEDULE = 2**18


@dataclass(frozen=True)
class KeptMemory:
    """Arrays that are the same in all runs of a schedule."""

    slots: dict[str, HostArray]  # by name
    sent: dict[int, HostArray]  # message buffers by the number of the step
    received: dict[int, HostArray]  # of a gather, also what this rank sends
    nbytes: int  # the most that are in use at the same time


@dataclass(frozen=True)
class _Use:
    """An array that is needed from one step to another: a slot, or a message of a single step."""

    shape: tuple[int, ...]
    dtype: str
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def overlaps(self, other: _Use) -> bool:
        """Return whether both are needed in some step."""
        return self.first <= other.last and other.first <= self.last


def keep_memory(steps: Sequence[Step]) -> KeptMemory:
    """Allocate memory for the small slots and messages of a schedule; none if it is too much."""
    slots = _small_slots(steps)
    sent, received = _small_messages(steps)
    uses = [*slots.values(), *sent.values(), *received.values()]
    in_use = [0] * len(steps)
    for use in uses:
        for number in range(use.first, use.last + 1):
            in_use[number] += use.nbytes
    most_in_use = max(in_use, default=0)
    needed = bytes_needed(steps)
    most_of_others = 0
    for bytes_in_all, bytes_kept in zip(needed, in_use, strict=True):
        most_of_others = max(most_of_others, bytes_in_all - bytes_kept)
    offsets, total = _place(uses)
    # In arrays of their own, each would be aligned as well.
    has_gaps = total > most_in_use + ALIGNMENT * len(uses)
    is_planned = most_of_others + most_in_use <= max(needed, default=0)
    if has_gaps or not is_planned or total > MOST_BYTES_OF_A_SCHEDULE:
        return KeptMemory({}, {}, {}, 0)
    memory = aligned_empty((total,), "uint8")
    arrays = []
    for use, offset in zip(uses, offsets, strict=True):
        arrays.append(np.ndarray(use.shape, use.dtype, memory, offset))
    after_slots = len(slots)
    after_sent = after_slots + len(sent)
    return KeptMemory(
        dict(zip(slots, arrays[:after_slots], strict=True)),
        dict(zip(sent, arrays[after_slots:after_sent], strict=True)),
        dict(zip(received, arrays[after_sent:], strict=True)),
        most_in_use,
    )


def _small_slots(steps: Sequence[Step]) -> dict[str, _Use]:
    """Return the slots that only kernels and messages use, and when they are needed."""
    touched: dict[Slot, list[int]] = {}
    excluded: set[str] = set()
    freed: set[str] = set()
    for number, step in enumerate(steps):
        for slot in (*step.reads, *step.writes, *step.reuses, *step.keeps, *step.frees):
            touched.setdefault(slot, []).append(number)
            if not isinstance(step, Kernel | Exchange | Reduce | Free):
                excluded.add(slot.name)
        freed.update(slot.name for slot in step.frees)
    found = {}
    for slot, numbers in touched.items():
        is_inner = slot.name in freed and slot.name not in excluded
        if is_inner and slot.nbytes <= MOST_BYTES_OF_AN_ARRAY:
            found[slot.name] = _Use(slot.shape, slot.dtype, numbers[0], numbers[-1])
    return found


def _small_messages(steps: Sequence[Step]) -> tuple[dict[int, _Use], dict[int, _Use]]:
    """Return what steps send and receive in small messages, by the number of the step."""
    sent = {}
    received = {}
    for number, step in enumerate(steps):
        if not isinstance(step, Exchange | Reduce):
            continue
        messages = messages_of(step)
        elements_sent = 0
        elements_received = 0
        if isinstance(messages, Gather):
            elements_received = messages.total
        elif isinstance(messages, AtOnce):
            elements_sent = sum(messages.send_counts)
            elements_received = sum(messages.receive_counts)
        else:
            continue
        dtype = step.writes[0].dtype
        own_sent = _Use((elements_sent,), dtype, number, number)
        own_received = _Use((elements_received,), dtype, number, number)
        if max(own_sent.nbytes, own_received.nbytes) <= MOST_BYTES_OF_AN_ARRAY:
            sent[number] = own_sent
            received[number] = own_received
    return sent, received


def _place(uses: Sequence[_Use]) -> tuple[list[int], int]:
    """Return an offset for each array, and the bytes in all.

    Arrays that are needed at the same time do not overlap. The largest are placed first, each at
    the lowest offset that is free.
    """
    offsets = [0] * len(uses)
    placed: list[int] = []
    total = 0
    for number in sorted(range(len(uses)), key=lambda number: -uses[number].nbytes):
        use = uses[number]
        offset = 0
        for other in sorted(placed, key=offsets.__getitem__):
            other_end = offsets[other] + _aligned(uses[other].nbytes)
            is_free_before = offset + _aligned(use.nbytes) <= offsets[other]
            if use.overlaps(uses[other]) and not is_free_before:
                offset = max(offset, other_end)
        offsets[number] = offset
        placed.append(number)
        total = max(total, offset + _aligned(use.nbytes))
    return offsets, total


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
