"""Fuse consecutive kernels that share rows: a group is computed one block of rows at a time.

What passes from one kernel to the next stays in the cache, so that softmax reads and writes once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from einmpi.planner.chains import shared_rows
from einmpi.schedule.compute import Compute, Kernel, Tiles, members_of
from einmpi.schedule.memory import bytes_needed
from einmpi.schedule.regions import Slot, names_of
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Step

Updates: TypeAlias = tuple[tuple[Slot, Slot], ...]  # an input, and what is written over it


@dataclass(frozen=True)
class GroupingRule:
    """A backend's rule for groups.

    `accepts` tells whether a kernel may be part of a group. `choose_block` gives how many indices
    of each row to compute at a time, or None if the kernels are better computed one by one. Of
    other kernels, those that `can_lead` may be the first of a group that `is_worthwhile`. A kernel
    that `changes_a_part` of what it is written over is computed alone.

    Without `most_outside` a group is all kernels that follow one another and share rows. With it, a
    group is the most of them that have a block; so many kernels after these may have none.
    """

    accepts: Callable[[Kernel], bool]
    choose_block: Callable[[Sequence[Kernel], Sequence[Sequence[str]]], tuple[int, ...] | None]
    can_lead: Callable[[Kernel], bool] = lambda _: False
    is_worthwhile: Callable[[Compute], bool] = lambda _: True
    changes_a_part: Callable[[Kernel], bool] = lambda _: False
    most_outside: int = 0


def with_groups(schedule: Schedule, rule: GroupingRule, is_repeated: bool = False) -> Schedule:
    """Return the schedule with groups in place of kernels, where a rule asks for them.

    The schedule needs no more memory with groups than it did without. What is loaded between the
    kernels of a group is loaded before it. A save point between them comes after the group, and
    is marked as being inside it.

    If a step repeats the schedule, no group may need more than its kernels do.
    """
    steps: list[Step] = []
    # What is in memory besides is not known if slots are in the slow tier, or steps are repeated.
    uses_slow_tier = any(step.spills("place") for step in schedule.steps)
    peak = 0 if uses_slow_tier or is_repeated else _peak_bytes(schedule.steps, {})
    in_memory: dict[str, int] = {}  # the bytes of each slot, which several steps may allocate
    position = 0
    while position < len(schedule.steps):
        taken: Sequence[Step] = schedule.steps[position : position + 1]
        run = _longest_run(schedule.steps, position, rule, schedule.updates)
        run = _without_lost_inputs(run, schedule.updates)
        found = _group_of(run, in_memory, peak, rule)
        if found is None and any(step.when_fused == "before" for step in run):
            run = _before_loads(run)
            found = _group_of(run, in_memory, peak, rule)
        if found is not None:
            taken = run
            found += [step.inside_group() for step in run if step.when_fused == "after"]
        steps += found or taken
        for step in taken:
            for slot in step.reuses:
                in_memory.setdefault(slot.name, 0)  # the input is counted
            for slot in step.allocates():
                in_memory.setdefault(slot.name, slot.nbytes)
            for slot in step.frees:
                in_memory.pop(slot.name, None)
        position += len(taken)
    return replace(schedule, steps=tuple(steps))


def _longest_run(
    steps: Sequence[Step], start: int, rule: GroupingRule, updates: Updates
) -> list[Step]:
    """Return the most steps from a position on that share rows, with what is freed meanwhile.

    Loads are among them if a kernel of the run follows, and nothing of the run has used their slot.
    """
    run: list[Step] = []
    used: set[str] = set()  # slots of the run
    kernels: list[Kernel] = []
    most_steps = most_kernels = 0  # of the longest group that the rule has a block for
    for step in steps[start:]:
        kernel = step.only_kernel
        if kernel is not None:
            is_accepted = rule.accepts(kernel) or (not run and rule.can_lead(kernel))
            if not is_accepted or _is_alone(kernel, updates, rule):
                break
            rows = _rows_of([*kernels, kernel])
            if not rows and not rule.most_outside:
                break
            if most_kernels == len(kernels):
                most_steps = len(run)  # with what is freed after the last of them
            kernels.append(kernel)
        elif not run or not step.when_fused:
            break
        if step.when_fused == "before":
            if not used.isdisjoint(names_of(step.writes)):
                break
        else:
            for slot in (*step.reads, *step.writes, *step.reuses, *step.keeps, *step.frees):
                used.add(slot.name)
        run.append(step)
        if kernel is not None and rule.most_outside:
            if len(kernels) > 1 and rows and rule.choose_block(kernels, rows) is not None:
                most_kernels = len(kernels)
            elif len(kernels) - most_kernels > rule.most_outside:
                break
    if rule.most_outside and most_kernels < len(kernels):
        run = run[:most_steps]
    return _up_to_last_kernel(run)


def _up_to_last_kernel(run: list[Step]) -> list[Step]:
    """Return a run without the loads and save points after its last kernel, and what follows."""
    end = len(run)
    for number in reversed(range(len(run))):
        if run[number].kernels:
            break
        if run[number].when_fused in ("before", "after"):
            end = number
    return run[:end]


def _before_loads(run: list[Step]) -> list[Step]:
    """Return the steps of a run before the first one that loads."""
    first_ones = itertools.takewhile(lambda step: step.when_fused != "before", run)
    return _up_to_last_kernel(list(first_ones))


def _loads_first(run: list[Step]) -> tuple[list[Step], list[Step]]:
    """Return what a run loads, to be done before it, and its other steps.

    What begins to load one of these slots comes before it.
    """
    loaded = {slot for step in run if step.when_fused == "before" for slot in step.writes}
    first: list[Step] = []
    others: list[Step] = []
    for step in run:
        begun = {begin.load.slot for begin in step.begins}
        if step.when_fused == "before" or begun & loaded:
            first.append(step)
        elif step.when_fused != "after":
            others.append(step)
    return first, others


def _without_lost_inputs(run: list[Step], updates: Updates) -> list[Step]:
    """Return the first steps of a run, in which no block loses an input that a later block needs.

    A slot may be written over an input. Each block of rows must then read just those elements of
    the input that it writes.
    """
    kernels = _kernels_of(run)
    if len(kernels) < 2:
        return run
    rows = _rows_of(kernels)
    written = [kernel.target.name for kernel in kernels]
    for source, target in updates:
        if target.name not in written:
            continue
        writer = written.index(target.name)
        output = kernels[writer].einsum.output
        dimensions = [output.index(labels[writer]) for labels in rows]
        for number in range(writer):
            labels_read = [labels[number] for labels in rows]
            if not _reads_own_rows(kernels[number], source, labels_read, dimensions):
                shorter = _up_to_last_kernel(run[: _place_of_kernel(run, kernels[writer])])
                return _without_lost_inputs(shorter, updates)
    return run


def _place_of_kernel(run: Sequence[Step], kernel: Kernel) -> int:
    return next(number for number, step in enumerate(run) if kernel in step.kernels)


def _is_alone(kernel: Kernel, updates: Updates, rule: GroupingRule) -> bool:
    """Return whether a kernel writes over its own operand, as the steps of a recurrence do, or
    changes only a part of what it is written over."""
    if kernel.target in kernel.operands:
        return True
    if all(kernel.target.name != target.name for _, target in updates):
        return False
    return rule.changes_a_part(kernel)


def _reads_own_rows(
    kernel: Kernel, slot: Slot, rows: Sequence[str], dimensions: Sequence[int]
) -> bool:
    """Return whether a kernel reads each element of a slot once, with rows in these dimensions."""
    for operand, entries in zip(kernel.operands, kernel.einsum.operands, strict=True):
        if operand.name != slot.name:
            continue
        if sorted(map(str, entries)) != sorted(kernel.einsum.labels):
            return False
        if [entries[dimension] for dimension in dimensions] != list(rows):
            return False
    return True


def _rows_of(kernels: Sequence[Kernel]) -> tuple[tuple[str, ...], ...]:
    """Return the rows that kernels share and that none of them aggregates."""
    rows = []
    for labels in shared_rows(members_of(kernels)):
        pairs = zip(labels, kernels, strict=True)
        if all(label in kernel.einsum.output for label, kernel in pairs):
            rows.append(labels)
    return tuple(rows)


def _group_of(
    run: list[Step], in_memory: Mapping[str, int], peak: int, rule: GroupingRule
) -> list[Step] | None:
    """Return the steps of a run as what it loads, then a group.

    None if the rule or the memory speaks against it: the group may need as much as the run did,
    or `peak` bytes, which others need at other times.
    """
    kernels = _kernels_of(run)
    if len(kernels) < 2:
        return None
    rows = _rows_of(kernels)
    block = rule.choose_block(kernels, rows)
    if block is None:
        return None
    loads, grouped = _loads_first(run)
    group = _joined(kernels, grouped, Tiles("cache", rows, block))
    if not rule.is_worthwhile(group):
        return None
    steps: list[Step] = [*loads, group]
    needed = _peak_bytes(steps, in_memory)
    return steps if needed <= max(peak, _peak_bytes(run, in_memory)) else None


def _joined(kernels: Sequence[Kernel], steps: Sequence[Step], tiles: Tiles) -> Compute:
    """Return kernels as one step, with what is done between them."""
    between = []
    done = 0  # kernels so far
    freed: set[Slot] = set()
    for step in steps:
        if step.kernels:
            done += 1
        else:
            between.append((done, step))
            freed.update(step.frees)
    inner = frozenset(kernel.target for kernel in kernels if kernel.target in freed)
    return Compute(tuple(kernels), tiles, inner, between=tuple(between))


def _kernels_of(run: Sequence[Step]) -> list[Kernel]:
    return [kernel for step in run for kernel in step.kernels]


def _peak_bytes(steps: Sequence[Step], in_memory: Mapping[str, int]) -> int:
    """Return the most bytes in use during some steps, given the slots in memory before them."""
    return max(bytes_needed(steps, in_memory_before=in_memory), default=0)
