"""When a slot can go, and the most bytes a schedule holds at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from einmpi.plan.memory import staging
from einmpi.schedule.steps import (
    Begin,
    Exchange,
    Free,
    Kernel,
    Load,
    Reduce,
    Schedule,
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
        return staging(max(step.source.nbytes, step.target.nbytes), len(step.moves.group))
    if isinstance(step, Reduce):
        return staging(step.slot.nbytes, len(step.group))
    return 0


def with_begins(steps: Sequence[Step], limit: int) -> list[Step]:
    """The steps with a Begin for each Load that fits into memory beside the kernels before it: the earlier the better,
    but what is wanted first goes first."""
    needed = _bytes_needed(steps)
    begins: dict[int, list[Step]] = {}
    for number, step in enumerate(steps):
        if not isinstance(step, Load) or step.kept:
            continue
        start = None
        for k in range(number - 1, -1, -1):
            if needed[k] + step.slot.nbytes > limit:
                break
            if isinstance(steps[k], Kernel):
                start = k
        if start is not None:
            begins.setdefault(start, []).append(Begin(step))
            for k in range(start, number):
                needed[k] += step.slot.nbytes
    return [each for number, step in enumerate(steps) for each in (*begins.get(number, ()), step)]


def peak_bytes(schedule: Schedule) -> int:
    """The most bytes of tensors and message buffers on the rank."""
    return max(_bytes_needed(schedule.steps), default=0)


def _bytes_needed(steps: Sequence[Step]) -> list[int]:
    """The bytes of tensors and message buffers in each step."""
    held: dict[str, int] = {}
    needed, total = [], 0
    for step in steps:
        for slot in writes(step):
            if slot.name not in held:
                held[slot.name] = slot.nbytes
                total += slot.nbytes
        needed.append(total + message_bytes(step))
        if isinstance(step, Free):
            total -= held.pop(step.slot.name)
    return needed
