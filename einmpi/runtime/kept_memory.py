"""Memory that a schedule keeps from run to run: that of small slots and small messages. Arrays
that are not needed at the same time share it, so that it is no more than the plan allows for."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.runtime.host_memory import ALIGNMENT, aligned_empty
from einmpi.runtime.transfer import (
    AtOnce,
    Gather,
    Messages,
    are_boxes,
    is_box,
    is_left_to_communicator,
    messages_of,
)
from einmpi.schedule.memory import bytes_needed, lowered_bytes
from einmpi.schedule.regions import Slot, names_of
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Step, Transfer, numbered

# ---- memory placement ----------------------------------------------------------------------------
#
# Places in one block of memory for arrays that are needed at different times.


@dataclass(frozen=True)
class ArrayUse:
    """An array that is needed from one step to another: a slot, or a message of a single step."""

    shape: tuple[int, ...]
    dtype: str
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    def overlaps(self, other: ArrayUse) -> bool:
        """Return whether both are needed in some step."""
        return self.first <= other.last and other.first <= self.last


def place_arrays(uses: Sequence[ArrayUse]) -> tuple[list[int], int]:
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


HostArray: TypeAlias = npt.NDArray[Any]

MOST_BYTES_OF_AN_ARRAY = 2**16
MOST_BYTES_OF_A_SCHEDULE = 2**18
# Messages of a schedule that keep memory which is not planned: about as little as the objects of
# Python that are bound to its steps.
MOST_BYTES_BESIDE_THE_PLAN = 2**14


@dataclass(frozen=True)
class KeptMemory:
    """Arrays that are the same in all runs of a schedule."""

    slots: dict[str, HostArray]  # by name
    sent: dict[int, HostArray]  # message buffers by the number of the step
    received: dict[int, HostArray]  # of a gather, also what this rank sends
    nbytes: int  # the most that are in use at the same time, without single numbers
    # By the number of a step, the bytes of messages that are counted in this step alone.
    beside_the_plan: dict[int, int]


class _MessageKey(NamedTuple):
    step: int
    is_sent: bool


_Key: TypeAlias = str | _MessageKey  # the name of a slot, or a message


_Arrays: TypeAlias = dict[_Key, ArrayUse]  # those that are only of use together


def keep_memory(
    schedule: Schedule, shared: Container[str] = (), outer: Sequence[Slot] = ()
) -> KeptMemory:
    """Allocate memory for the small slots and messages of a schedule, as far as is planned.

    Slots in memory that ranks share, given by name, have theirs already, and so have those of a
    schedule around it. Halos stay where their messages arrive.
    """
    steps = schedule.steps
    messages = _small_messages(steps)
    candidates = list(messages)
    for arrays in _small_slots(steps):
        if not any(key in shared for key in arrays):
            candidates.append(arrays)
    needed = bytes_needed(steps, shared, dict.fromkeys(names_of(outer), 0))
    planned = max([*needed, lowered_bytes(schedule, shared)])
    uses, most_in_use = _within_plan(candidates, needed, planned)
    offsets, total = place_arrays(list(uses.values()))
    # In arrays of their own, each would be aligned as well.
    has_gaps = total > most_in_use + ALIGNMENT * len(uses)
    kept = KeptMemory({}, {}, {}, most_in_use, {})
    if has_gaps or total > MOST_BYTES_OF_A_SCHEDULE:
        return replace(kept, nbytes=0)
    memory = aligned_empty((total,), "uint8")
    for (key, use), offset in zip(uses.items(), offsets, strict=True):
        _add_array(kept, key, np.ndarray(use.shape, use.dtype, memory, offset))
    bytes_beside = 0
    for arrays in messages:
        is_new = not any(key in uses for key in arrays)
        is_new = is_new and all(use.first == use.last for use in arrays.values())
        nbytes = _total_bytes(arrays)
        if is_new and bytes_beside + nbytes <= MOST_BYTES_BESIDE_THE_PLAN:
            bytes_beside += nbytes
            for key, use in arrays.items():
                kept.beside_the_plan[use.first] = nbytes
                _add_array(kept, key, aligned_empty(use.shape, use.dtype))
    for number, step in numbered(steps, Transfer):
        if number in kept.received:
            for slot, place in _halos(step):
                kept.slots[slot.name] = kept.received[number][place].reshape(slot.shape)
    return kept


def _halos(step: Transfer) -> Iterator[tuple[Slot, slice]]:
    """Yield the slots that are received as they are, and their places in the message."""
    messages = messages_of(step) if step.arriving else None
    if isinstance(messages, AtOnce):
        for piece in messages.received:
            slot = step.arriving[piece.member]
            assert slot is not None, "each message has a slot"
            yield slot, piece.place


def _add_array(kept: KeptMemory, key: _Key, array: HostArray) -> None:
    if isinstance(key, str):
        kept.slots[key] = array
    elif key.is_sent:
        kept.sent[key.step] = array
    else:
        kept.received[key.step] = array


def _within_plan(
    candidates: Sequence[_Arrays], needed: Sequence[int], planned: int
) -> tuple[_Arrays, int]:
    """Return what can be kept without needing more memory than planned.

    Arrays that are kept together come together. Small ones are tried before large ones, and
    messages first. `needed` has the bytes of each step. Also return the bytes that are
    kept. Single numbers fit into the gaps that alignment leaves, and are not counted.
    """
    chosen: _Arrays = {}
    kept = np.zeros(len(needed), np.int64)  # in use in each step
    counted = np.zeros(len(needed), np.int64)  # those of them that are not single numbers
    others = np.array(needed, np.int64)
    by_size = sorted(candidates, key=_total_bytes)
    everything: _Arrays = {}
    for arrays in candidates:
        everything.update(arrays)
    # All together may fit where some alone, which are there all the time, would not.
    for arrays in (everything, *sorted(by_size, key=_are_slots)):
        if arrays.keys() <= chosen.keys():
            continue
        kept_before = kept.copy()
        counted_before = counted.copy()
        for use in arrays.values():
            steps = slice(use.first, use.last + 1)
            kept[steps] += use.nbytes
            if use.nbytes > ALIGNMENT:
                counted[steps] += use.nbytes
        are_numbers = all(use.nbytes <= ALIGNMENT for use in arrays.values())
        if are_numbers or counted.max() + (others - kept).max() <= planned:
            chosen.update(arrays)
        else:
            kept = kept_before
            counted = counted_before
    return chosen, int(counted.max(initial=0))


def _total_bytes(arrays: _Arrays) -> int:
    return sum(use.nbytes for use in arrays.values())


def _are_slots(arrays: _Arrays) -> bool:
    return any(isinstance(key, str) for key in arrays)


def _small_slots(steps: Sequence[Step]) -> list[_Arrays]:
    """Return the slots that only kernels and messages use, and when they are needed."""
    touched: dict[Slot, list[int]] = {}
    excluded: set[str] = set()
    for _, transfer in numbered(steps, Transfer):  # halos are parts of a message
        excluded.update(slot.name for slot, _ in _halos(transfer))
    freed: set[str] = set()
    for number, step in enumerate(steps):
        used = (*step.reads, *step.writes, *step.reuses, *step.keeps)
        for slot in (*used, *step.frees):
            touched.setdefault(slot, []).append(number)
        if used and step.only_kernel is None and step.transfer is None:
            excluded.update(names_of((*used, *step.frees)))
        freed.update(names_of(step.frees))
        excluded.update(names_of(step.spills("place", "evict", "drop", "fetch")))
    found: list[_Arrays] = []
    for slot, numbers in touched.items():
        is_inner = slot.name in freed and slot.name not in excluded
        if is_inner and slot.nbytes <= MOST_BYTES_OF_AN_ARRAY:
            found.append({slot.name: ArrayUse(slot.shape, slot.dtype, numbers[0], numbers[-1])})
    return found


def _small_messages(steps: Sequence[Step]) -> list[_Arrays]:
    """Return what steps send and receive in small messages that can be bound to them.

    Other steps would not use the memory, and need as much of their own.
    """
    found: list[_Arrays] = []
    stored = {slot.name for step in steps for slot in step.keeps}
    for number, step in numbered(steps, Transfer):
        if step.background:
            continue
        if step.aggregation is not None and is_left_to_communicator(step):
            continue
        own = step.moves.own
        if own is not None and not (is_box(own[0]) and is_box(own[1])):
            continue
        messages = messages_of(step)
        if messages is None or not are_boxes(messages):
            continue
        sizes = _sizes(messages, step.target.name in stored)
        if sizes is None:
            continue
        sent, received = sizes
        last = number
        halos = {slot for slot, _ in _halos(step)}
        for later in range(number, len(steps)):
            if not halos.isdisjoint(steps[later].frees):
                last = later
        dtype = step.source.dtype
        own_sent = ArrayUse((sent,), dtype, number, number)
        own_received = ArrayUse((received,), dtype, number, last)
        if max(own_sent.nbytes, own_received.nbytes) <= MOST_BYTES_OF_AN_ARRAY:
            found.append(
                {
                    _MessageKey(number, is_sent=True): own_sent,
                    _MessageKey(number, is_sent=False): own_received,
                }
            )
    return found


def _sizes(messages: Messages, is_stored: bool) -> tuple[int, int] | None:
    """Return the elements that a step sends and receives in messages; None without messages.

    A slot that is stored has other memory in each run.
    """
    if isinstance(messages, Gather):
        return 0, messages.total
    if isinstance(messages, AtOnce):
        return sum(messages.send_counts), sum(messages.receive_counts)
    return (0, sum(messages.counts)) if is_stored else None
