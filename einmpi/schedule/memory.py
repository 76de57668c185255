"""When a slot can go, when a load can begin, and the most bytes a schedule holds at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from einmpi.planner.memory import staging
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import (
    Begin,
    Drop,
    Evict,
    Exchange,
    Fetch,
    Free,
    Kernel,
    Load,
    Passes,
    Place,
    Reduce,
    Slot,
    Step,
    Store,
    reads,
    writes,
)


def with_frees(steps: Sequence[Step], kept: Collection[str]) -> list[Step]:
    """The steps with a Free after the last use of each slot; outputs and the `kept` inputs stay."""
    last: dict[Slot, int] = {}
    for number, step in enumerate(steps):
        for slot in (*reads(step), *writes(step)):
            last[slot] = number
        if isinstance(step, Store) or (isinstance(step, Load) and step.tensor in kept):
            kept = {*kept, step.slot.name}
    found: list[Step] = []
    ends: dict[int, list[Slot]] = {}
    for slot, number in last.items():
        if slot.name not in kept:
            ends.setdefault(number, []).append(slot)
    for number, step in enumerate(steps):
        found.append(step)
        found += [Free(slot) for slot in ends.get(number, ())]
    return found


def message_bytes(step: Step) -> int:
    """The most bytes of buffers for messages that a step needs."""
    if isinstance(step, Exchange):
        return staging(
            max(step.source.nbytes, step.target.nbytes), len(step.moves.group), step.stage
        )
    if isinstance(step, Reduce):
        return staging(step.slot.nbytes, len(step.group), step.stage)
    return 0


def with_begins(steps: Sequence[Step], limit: int) -> list[Step]:
    """The steps with a Begin for each Load that fits into memory beside the kernels before it: the earlier the better,
    but what is wanted first goes first. What is loaded to the slow tier needs no memory; so that files there do not get
    large, no more is read ahead than would fit into memory. There a Begin goes before Passes, as groups have no Place.
    """
    needed, outside = bytes_needed(steps), [0] * len(steps)
    placed = {
        step.slot.name: number for number, step in enumerate(steps) if isinstance(step, Place)
    }
    begins: dict[int, list[Step]] = {}
    moved: set[int] = set()
    for number, step in enumerate(steps):
        if not isinstance(step, Load) or step.kept:
            continue
        place = placed.get(step.slot.name)
        counted, kinds = (needed, (Kernel, Passes)) if place is None else (outside, (Passes,))
        start = earliest_start(steps, counted, number, step.slot.nbytes, limit, kinds)
        if start is None:
            continue
        if place is not None:
            begins.setdefault(start, []).append(steps[place])
            moved.add(place)
        begins.setdefault(start, []).append(Begin(step))
        for k in range(start, number):
            counted[k] += step.slot.nbytes
    return [
        each
        for number, step in enumerate(steps)
        for each in (*begins.get(number, ()), *(() if number in moved else (step,)))
    ]


def earliest_start(
    steps: Sequence[Step],
    needed: Sequence[int],
    number: int,
    nbytes: int,
    limit: int,
    kinds: tuple[type, ...] = (Kernel, Passes),
    first: int = 0,
) -> int | None:
    """The first step of some kinds, not before the step `first`, from which on there is room for so many bytes more up
    to the step `number`; None where there is no such step."""
    start = None
    for k in range(number - 1, first - 1, -1):
        if needed[k] + nbytes > limit:
            break
        if isinstance(steps[k], kinds):
            start = k
    return start


def peak_bytes(schedule: Schedule) -> int:
    """The most bytes of tensors and message buffers on the rank."""
    return max(bytes_needed(schedule.steps), default=0)


def spilled_bytes(schedule: Schedule) -> int:
    """Bytes that are written to the slow tier: what is evicted, and what is made there."""
    placed = sum(slot.nbytes for slot in schedule.outside)
    return placed + sum(
        step.slot.nbytes for step in schedule.steps if isinstance(step, Evict | Place)
    )


def bytes_needed(steps: Sequence[Step]) -> list[int]:
    """The bytes of tensors, message buffers and pieces in memory in each step."""
    held: dict[str, int] = {}
    outside: set[str] = set()
    needed, total = [], 0
    for step in steps:
        if isinstance(step, Place):
            outside.add(step.slot.name)
        made = (
            [step.slot]
            if isinstance(step, Fetch)
            else [s for s in writes(step) if s.name not in outside]
        )
        for slot in made:
            outside.discard(slot.name)
            if slot.name not in held:
                held[slot.name] = slot.nbytes
                total += slot.nbytes
        needed.append(
            total + message_bytes(step) + (step.buffers if isinstance(step, Passes) else 0)
        )
        if isinstance(step, Free | Drop):
            total -= held.pop(step.slot.name, 0)
            if isinstance(step, Drop):
                outside.add(step.slot.name)
            else:
                outside.discard(step.slot.name)
    return needed
