"""Stretches of steps that need nothing but the GPU, and can be launched as one CUDA graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from einmpi.schedule.compute import Compute
from einmpi.schedule.memory import bytes_needed
from einmpi.schedule.regions import Slot, names_of
from einmpi.schedule.steps import Free, Reuse, SavePoint, Step, Store, Transfer

MIN_LAUNCHES = 2  # of a stretch, kernel by kernel: a graph of one kernel is not faster than it


@dataclass(frozen=True)
class Stretch:
    """The steps from `first` to before `stop`, captured as a graph or carried out one by one."""

    first: int
    stop: int
    is_captured: bool
    # Slots that become the caller's: they get memory of their own before the stretch begins.
    made_before: tuple[Slot, ...] = ()
    outer: tuple[str, ...] = ()  # all slots it uses that were made before


def find_stretches(steps: Sequence[Step], with_host: Collection[int]) -> list[Stretch]:
    """Cut the steps of a schedule into stretches; those with a number in `with_host` need the host.

    A slot that is made before its stretch takes memory for longer. If the schedule would need more
    memory than planned, the stretch is cut before the step that writes the slot first.
    """
    needed = _bytes_needed(steps)
    planned = needed.max(initial=0)
    made = _slots_made(steps)
    callers = _slots_of_caller(steps)
    found: list[Stretch] = []
    for first, stop, is_captured in _ranges(steps, with_host):
        if not is_captured:
            found.append(Stretch(first, stop, is_captured=False))
            continue
        needed_here = needed.copy()  # with the slots that are made before
        start = first
        made_before: list[Slot] = []
        for number in range(first, stop):
            own = [slot for slot in made[number] if slot.name in callers]
            nbytes = sum(slot.nbytes for slot in own)
            if own and needed_here[start:number].max(initial=0) + nbytes > planned:
                found.append(_captured(steps, made, start, number, made_before))
                start = number
                made_before = []
            needed_here[start:number] += nbytes
            made_before += own
        found.append(_captured(steps, made, start, stop, made_before))
    return found


def _bytes_needed(steps: Sequence[Step]) -> npt.NDArray[np.int64]:
    """Return the bytes of each step; those of a group as if it was computed kernel by kernel."""
    one_by_one: list[Step] = []
    positions = []  # where the steps of each step begin
    for step in steps:
        positions.append(len(one_by_one))
        if isinstance(step, Compute) and step.tiles.kind == "cache":
            one_by_one += step.steps
        else:
            one_by_one.append(step)
    needed = np.array(bytes_needed(one_by_one), np.int64)
    if not positions:
        return needed
    return np.maximum.reduceat(needed, positions)


def _captured(
    steps: Sequence[Step],
    made: Sequence[Sequence[Slot]],
    first: int,
    stop: int,
    made_before: Sequence[Slot],
) -> Stretch:
    """Return the stretch of these steps, which is captured if that is worth it."""
    launches = 0
    for step in steps[first:stop]:
        launches += len(step.kernels) or int(step.transfer is not None)
    if launches < MIN_LAUNCHES:
        return Stretch(first, stop, is_captured=False)
    used: dict[str, None] = {}
    for step in steps[first:stop]:
        used.update(dict.fromkeys(names_of((*step.reads, *step.writes))))
        used.update(dict.fromkeys(reuse.source.name for reuse in step.reuse_steps))
    for step, slots_made in zip(steps[first:stop], made[first:stop], strict=True):
        for slot in (*slots_made, *step.reuses):
            used.pop(slot.name, None)
    outer = (*used, *names_of(made_before))
    return Stretch(first, stop, True, tuple(made_before), outer)


def _ranges(steps: Sequence[Step], with_host: Collection[int]) -> Iterator[tuple[int, int, bool]]:
    """Yield ranges of neighbours that can all be captured, or that all cannot.

    A range is its first step, the step after its last, and whether it can be captured.
    """
    can_be_captured = []
    for number, step in enumerate(steps):
        needs_host = number in with_host
        can_be_captured.append(not needs_host and _can_be_captured(step))
    numbers = range(len(steps))
    for is_captured, neighbours in groupby(numbers, key=can_be_captured.__getitem__):
        together = list(neighbours)
        yield together[0], together[-1] + 1, is_captured


def _can_be_captured(step: Step) -> bool:
    """Return whether a kind of step works on the GPU alone, with memory of the GPU."""
    match step:
        case Free() | Store() | SavePoint():
            return True
        case Transfer():
            return len(step.group) == 1
        case Reuse():
            return not step.nan_checked
        case Compute():
            is_checked = any(reuse.nan_checked for reuse in step.reuse_steps)
            is_on_host = step.tiles.kind in ("slow", "scattered")
            return not is_checked and not is_on_host and not step.begins
    return False


def _slots_made(steps: Sequence[Step]) -> list[list[Slot]]:
    """Return for each step the slots that get new memory in it."""
    known: set[str] = set()
    found: list[list[Slot]] = []
    for step in steps:
        known.update(names_of(step.reuses))
        made = []
        for slot in step.allocates():
            if slot.name not in known:
                known.add(slot.name)
                made.append(slot)
        found.append(made)
        known.difference_update(names_of(step.frees))
    return found


def _slots_of_caller(steps: Sequence[Step]) -> set[str]:
    """Return the names of slots whose memory the caller gets."""
    found = set()
    for step in reversed(steps):
        if step.kind == "store":
            found.update(names_of(step.reads))
        for reuse in step.reuse_steps:
            if reuse.slot.name in found:
                found.add(reuse.source.name)
    return found
