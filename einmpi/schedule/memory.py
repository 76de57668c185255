"""When a slot can be freed, when a load can begin, and how much memory a schedule takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType

from einmpi.schedule.regions import Slot, names_of
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Begin, Free, Load, Repeat, Reuse, Step, numbered


def with_frees(steps: Sequence[Step], outer: Collection[str] = ()) -> list[Step]:
    """Add a Free after the last use of each slot, except for slots that a step keeps.

    Those in `outer`, given by name, are there for steps that follow.
    """
    last_use: dict[Slot, int] = {}
    kept = set(outer)
    for number, step in enumerate(steps):
        for slot in (*step.reads, *step.writes):
            last_use[slot] = number
        kept.update(names_of(step.keeps))
    freed_after: dict[int, list[Step]] = {}
    for slot, number in last_use.items():
        if slot.name not in kept:
            freed_after.setdefault(number, []).append(Free(slot))
    found: list[Step] = []
    for number, step in enumerate(steps):
        found.append(step)
        found += freed_after.get(number, [])
    return found


def repeat(
    recurrence: str, steps: Sequence[Step], times: int, results: Sequence[Slot] = ()
) -> Repeat:
    """Return a step that does others so many times; slots of theirs alone are freed each time.

    The `results` are made there, and stay.
    """
    outer: dict[Slot, None] = dict.fromkeys(results)
    made: set[Slot] = set(results)
    for step in steps:
        outer.update(dict.fromkeys(slot for slot in step.reads if slot not in made))
        made.update(step.writes)
    freeing = tuple(with_frees(steps, names_of(outer)))
    there = dict.fromkeys(names_of(outer), 0)
    most = max(bytes_needed(freeing, in_memory_before=there), default=0)
    return Repeat(recurrence, freeing, times, tuple(outer), most, tuple(results))


def with_reuses(steps: Sequence[Step], reuses: Sequence[Reuse]) -> list[Step]:
    """Add steps that give slots memory, each before the first step that writes the slot."""
    waiting = {reuse.slot.name: reuse for reuse in reuses}
    found: list[Step] = []
    for step in steps:
        for slot in step.writes:
            reuse = waiting.pop(slot.name, None)
            if reuse is not None:
                found.append(reuse)
        found.append(step)
    assert not waiting, f"{sorted(waiting)} are never written"
    return found


def with_begins(steps: Sequence[Step], limit: int) -> list[Step]:
    """Add a Begin for each Load that fits into memory together with the kernels before it.

    It goes as early as possible, but not before the Begin of an input that is needed earlier.
    Loading to the slow tier takes no memory. To keep the files there small, no more is read
    ahead than would fit into memory. Such a Begin and its place in the slow tier go before
    out-of-core tiles only: other kernels may be joined later, with nothing of the kind between.
    """
    needed = bytes_needed(steps)
    needed_slow = [0] * len(steps)  # read ahead to the slow tier
    place_of: dict[str, int] = {}  # the number of the step that places each slot outside
    for number, step in enumerate(steps):
        for slot in step.spills("place"):
            place_of[slot.name] = number
    added: dict[int, list[Step]] = {}
    moved: set[int] = set()
    for number, load in numbered(steps, Load):
        if load.kept:
            continue
        size = load.slot.nbytes
        place = place_of.get(load.slot.name)
        if place is None:
            counted = needed
            start = earliest_start(steps, counted, number, size, limit)
        else:
            counted = needed_slow
            start = earliest_start(
                steps, counted, number, size, limit, attrgetter("is_out_of_core")
            )
        if start is None:
            continue
        before = added.setdefault(start, [])
        if place is not None:
            before.append(steps[place])
            moved.add(place)
        before.append(Begin(load))
        for k in range(start, number):
            counted[k] += size
    return reordered(steps, added, moved)


def reordered(
    steps: Sequence[Step], before: Mapping[int, Sequence[Step]], removed: set[int]
) -> list[Step]:
    """Insert steps before those with a number, and leave out those with a number in `removed`."""
    found: list[Step] = []
    for number, step in enumerate(steps):
        found += before.get(number, ())
        if number not in removed:
            found.append(step)
    return found


def earliest_start(
    steps: Sequence[Step],
    needed: Sequence[int],
    number: int,
    nbytes: int,
    limit: int,
    suits: Callable[[Step], bool] = attrgetter("computes"),
    first: int = 0,
) -> int | None:
    """Return the first step from which on, up to the step `number`, `nbytes` more fit.

    Only steps that suit, from the step `first` on, are considered; None where there is none.
    """
    fitting = number
    while fitting > first and needed[fitting - 1] + nbytes <= limit:
        fitting -= 1
    return next((k for k in range(fitting, number) if suits(steps[k])), None)


def peak_bytes(schedule: Schedule) -> int:
    """Return the most bytes of tensors, message buffers and pieces on the rank at any time."""
    return max(bytes_needed(schedule.steps), default=0)


def lowered_bytes(schedule: Schedule, shared: Container[str] = ()) -> int:
    """Return the most bytes that the steps need as they were lowered, for which the plan allows."""
    return max(bytes_needed(schedule.lowered_steps, shared), default=0)


def spilled_bytes(schedule: Schedule) -> int:
    """Return the bytes written to the slow tier: slots that are evicted or created there."""
    total = sum(slot.nbytes for slot in schedule.outside)
    for step in schedule.steps:
        total += sum(slot.nbytes for slot in step.spills("evict", "place"))
    return total


def bytes_needed(
    steps: Sequence[Step],
    shared: Container[str] = (),
    in_memory_before: Mapping[str, int] = MappingProxyType({}),
) -> list[int]:
    """Return the bytes of tensors, message buffers and pieces in memory in each step.

    Slots in memory that ranks share, given by name, are not counted. `in_memory_before` has the
    bytes of slots that are there before the first step.
    """
    in_memory = dict(in_memory_before)
    slow: set[str] = set()  # slots with an array in the slow tier
    # Transfers in the background, each with the memory of its messages. One is done at a time.
    under_way: list[tuple[Step, int]] = []
    needed = []
    total = sum(in_memory.values())
    for step in steps:
        slow.update(names_of(step.spills("place", "evict")))
        for slot in step.reuses:
            in_memory.setdefault(slot.name, 0)  # the input is counted
        for slot in step.allocates(slow):
            if slot.name not in in_memory and slot.name not in shared:
                in_memory[slot.name] = slot.nbytes
                total += slot.nbytes
        if step.background:
            under_way.append((step, step.working_bytes))
        elif step.awaited is not None:
            while under_way and under_way.pop(0)[0] is not step.awaited:
                pass
        working = max([nbytes for _, nbytes in under_way], default=0)
        if not step.background:
            working += step.working_bytes
        needed.append(total + working)
        for slot in (*step.frees, *step.spills("drop")):
            total -= in_memory.pop(slot.name, 0)
        slow.difference_update(names_of(step.frees))
    return needed
