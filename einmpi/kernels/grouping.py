"""Which kernels that follow one another are done together, block of rows by block: softmax reads and writes once.

What lies between the kernels of a group stays in the cache, and is never whole in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Begin, Free, Group, Kernel, Step


@dataclass(frozen=True)
class GroupingRule:
    """Which kernels may be in a group, and how many of each row at a time; None: better one after another."""

    suits: Callable[[Kernel], bool]
    block: Callable[[Sequence[Kernel], Sequence[Sequence[str]]], tuple[int, ...] | None]


def group_kernels(schedule: Schedule, rule: GroupingRule) -> Schedule:
    """The schedule with groups in it, as the rule of a backend wants them. It needs no more memory."""
    steps: list[Step] = []
    ends = [0] * (len(schedule.steps) + 1)  # how many steps there are in place of the first ones
    inside: set[int] = set()
    held: dict[str, int] = {}
    number = 0
    while number < len(schedule.steps):
        run = _run(schedule.steps, number, rule)
        group = _group(run, sum(held.values()), rule)
        taken = run if group else schedule.steps[number : number + 1]
        steps.append(group or schedule.steps[number])
        for step in taken:
            _hold(held, step)
            number += 1
            ends[number] = len(steps)
        inside.update(range(number - len(taken) + 1, number))
    points = [
        replace(point, steps=ends[point.steps], inside=point.steps in inside)
        for point in schedule.points
    ]
    return replace(schedule, steps=tuple(steps), points=tuple(points))


def _hold(held: dict[str, int], step: Step) -> None:
    for slot in step.allocates():
        held[slot.name] = slot.nbytes
    for slot in step.frees:
        del held[slot.name]


def _run(steps: Sequence[Step], start: int, rule: GroupingRule) -> list[Kernel | Free | Begin]:
    """The most steps from a start on that have rows in common, with what is freed in it."""
    found: list[Kernel | Free | Begin] = []
    rows = _Rows()
    for number in range(start, len(steps)):
        step = steps[number]
        if isinstance(step, Free | Begin) and found:
            found.append(step)
            continue
        if not isinstance(step, Kernel) or not rule.suits(step) or not rows.add(step):
            break
        found.append(step)
    return found


def _group(run: list[Kernel | Free | Begin], held: int, rule: GroupingRule) -> Group | None:
    kernels = [kernel for step in run for kernel in step.kernels]
    if len(kernels) < 2:
        return None
    rows = _Rows()
    for kernel in kernels:
        rows.add(kernel)
    labels = rows.found()
    block = rule.block(kernels, labels)
    if block is None:
        return None
    group = Group(tuple(run), labels, block)
    return group if _peak([group], held) <= _peak(run, held) else None


def _peak(steps: Sequence[Step], before: int) -> int:
    """The most bytes that are held while these steps are done."""
    held: dict[str, int] = {"": before}
    peak = before
    for step in steps:
        for slot in step.allocates():
            held[slot.name] = slot.nbytes
        peak = max(peak, sum(held.values()))
        for slot in step.frees:
            if slot.name in held:
                del held[slot.name]
            else:
                held[""] -= slot.nbytes
    return peak


@dataclass
class _Rows:
    """Labels of kernels that are the same since one writes a dimension that the other one reads."""

    kernels: list[Kernel] = field(default_factory=list)
    made: dict[str, int] = field(default_factory=dict)  # the kernel that makes a slot

    def add(self, kernel: Kernel) -> bool:
        """Take a kernel, if it reads what the others make and there are rows then."""
        if self.kernels and not any(slot.name in self.made for slot in kernel.operands):
            return False
        self.kernels.append(kernel)
        self.made[kernel.target.name] = len(self.kernels) - 1
        if not self.found():
            self.kernels.pop()
            del self.made[kernel.target.name]
            return False
        return True

    def found(self) -> tuple[tuple[str, ...], ...]:
        """The rows, in the order of the first kernel's output: a label of every kernel that none aggregates."""
        first = self.kernels[0].einsum
        names = [
            {label: label for label in first.output}
        ]  # of each kernel: label → the first kernel's
        bad: set[str] = set()
        for kernel in self.kernels[1:]:
            mine: dict[str, str] = {}
            for slot, index in zip(kernel.operands, kernel.einsum.operands, strict=True):
                if slot.name not in self.made:
                    continue
                maker = self.made[slot.name]
                for entry, label in zip(index, self.kernels[maker].einsum.output, strict=True):
                    row = names[maker].get(label)
                    if row is None:
                        continue
                    if not isinstance(entry, str) or mine.setdefault(entry, row) != row:
                        bad.update([row, *([mine[entry]] if isinstance(entry, str) else [])])
            twice = {row for row, count in Counter(mine.values()).items() if count > 1}
            aggregated = {mine[label] for label in mine if label not in kernel.einsum.output}
            bad |= twice | aggregated | (set(first.output) - set(mine.values()))
            names.append(mine)
        good = [label for label in first.output if label not in bad]
        return tuple(
            tuple(next(x for x in mine if mine[x] == label) for mine in names) for label in good
        )
