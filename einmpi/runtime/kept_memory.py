"""Memory that a schedule keeps from run to run: that of small slots and small messages. Arrays
that are not needed at the same time share it, so that it is no more than the plan allows for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, TypeAlias

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
    nbytes: int  # the most that are in use at the same time, without single numbers


class _MessageKey(NamedTuple):
    step: int
    is_sent: bool


_Key: TypeAlias = str | _MessageKey  # the name of a slot, or a message


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
    """Allocate memory for the small slots and messages of a schedule, as far as is planned."""
    candidates = _small_slots(steps) | _small_messages(steps)
    uses, most_in_use = _within_plan(candidates, bytes_needed(steps))
    offsets, total = _place(list(uses.values()))
    # In arrays of their own, each would be aligned as well.
    has_gaps = total > most_in_use + ALIGNMENT * len(uses)
    kept = KeptMemory({}, {}, {}, most_in_use)
    if has_gaps or total > MOST_BYTES_OF_A_SCHEDULE:
        return replace(kept, nbytes=0)
    memory = aligned_empty((total,), "uint8")
    for (key, use), offset in zip(uses.items(), offsets, strict=True):
        array = np.ndarray(use.shape, use.dtype, memory, offset)
        if isinstance(key, str):
            kept.slots[key] = array
        elif key.is_sent:
            kept.sent[key.step] = array
        else:
            kept.received[key.step] = array
    return kept


def _within_plan(
    candidates: Mapping[_Key, _Use], needed: Sequence[int]
) -> tuple[dict[_Key, _Use], int]:
    """Return what can be kept without needing more memory than planned.

    Messages come first, and small arrays before large ones. `needed` has the planned bytes of each
    step. Also return the bytes that are kept. Single numbers fit into the gaps that alignment
    leaves, and are not counted.
    """
    planned = max(needed, default=0)
    chosen: dict[_Key, _Use] = {}
    kept = np.zeros(len(needed), np.int64)  # in use in each step
    counted = np.zeros(len(needed), np.int64)  # those of them that are not single numbers
    others = np.array(needed, np.int64)
    by_size = sorted(candidates.items(), key=lambda item: item[1].nbytes)
    for key, use in sorted(by_size, key=lambda item: isinstance(item[0], str)):
        steps = slice(use.first, use.last + 1)
        kept[steps] += use.nbytes
        is_number = use.nbytes <= ALIGNMENT
        if not is_number:
            counted[steps] += use.nbytes
        if is_number or counted.max() + (others - kept).max() <= planned:
            chosen[key] = use
        else:
            kept[steps] -= use.nbytes
            counted[steps] -= use.nbytes
    return chosen, int(counted.max(initial=0))


def _small_slots(steps: Sequence[Step]) -> dict[_Key, _Use]:
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
    found: dict[_Key, _Use] = {}
    for slot, numbers in touched.items():
        is_inner = slot.name in freed and slot.name not in excluded
        if is_inner and slot.nbytes <= MOST_BYTES_OF_AN_ARRAY:
            found[slot.name] = _Use(slot.shape, slot.dtype, numbers[0], numbers[-1])
    return found


def _small_messages(steps: Sequence[Step]) -> dict[_Key, _Use]:
    """Return what steps send and receive in small messages."""
    found: dict[_Key, _Use] = {}
    for number, step in enumerate(steps):
        if not isinstance(step, Exchange | Reduce):
            continue
        messages = messages_of(step)
        sent = 0
        received = 0
        if isinstance(messages, Gather):
            received = messages.total
        elif isinstance(messages, AtOnce):
            sent = sum(messages.send_counts)
            received = sum(messages.receive_counts)
        else:
            continue
        dtype = step.writes[0].dtype
        own_sent = _Use((sent,), dtype, number, number)
        own_received = _Use((received,), dtype, number, number)
        if max(own_sent.nbytes, own_received.nbytes) <= MOST_BYTES_OF_AN_ARRAY:
            found[_MessageKey(number, is_sent=True)] = own_sent
            found[_MessageKey(number, is_sent=False)] = own_received
    return found


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
