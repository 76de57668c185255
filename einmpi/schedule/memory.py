"""When a slot can go, and the most bytes a schedule holds at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from einmpi.plan.memory import staging
from einmpi.schedule.steps import Exchange, Free, Load, Reduce, Schedule, Slot, Step, Store, reads, writes


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


def peak_bytes(schedule: Schedule) -> int:
    """The most bytes of tensors and message buffers on the rank."""
    held: dict[str, int] = {}
    peak = 0
    for step in schedule.steps:
        for slot in writes(step):
            held[slot.name] = slot.nbytes
        peak = max(peak, sum(held.values()) + message_bytes(step))
        if isinstance(step, Free):
            del held[step.slot.name]
    return peak
