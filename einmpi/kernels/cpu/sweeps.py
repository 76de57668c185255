"""Sweeps in a schedule: stencils whose halos stay beside the block, which is then not copied, and
aggregates that are computed in the same pass over memory as the tensor they aggregate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from einmpi.kernels.halo_parts import split_at_halos
from einmpi.schedule.halo import HaloBlock, HaloExchange, Sweep
from einmpi.schedule.regions import Region, Slot, elements, shape
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Exchange, Free, Kernel, Reuse, SavePoint, Step, Store

MIN_SWEPT_BYTES = 2**22  # of the tensor: a smaller one stays in the cache anyway


# ---- halos beside the block ---------------------------------------------------------------------


def with_halos_beside(schedule: Schedule) -> Schedule:
    """Return the schedule with halos beside their blocks where that is possible.

    It takes no more memory. Where a kernel would write over the block, it gets memory of its own
    instead of the copy of the block.
    """
    if not any(_may_stay_beside(step) for step in schedule.steps):
        return schedule
    if any(step.places or step.evicts for step in schedule.steps):
        return schedule  # memory is short
    changes = _Changes(schedule.steps)
    for number, step in enumerate(schedule.steps):
        if isinstance(step, Kernel):
            changes.add_kernel(number, step)
    steps: list[Step] = []
    for number, step in enumerate(schedule.steps):
        steps += changes.replaced.get(number, [step])
    return replace(schedule, steps=tuple(steps))


def _may_stay_beside(step: Step) -> bool:
    """Return whether an exchange adds a halo to a block, and would copy more than it receives."""
    if not isinstance(step, Exchange) or step.moves.own is None or step.moves.same_to_all:
        return False
    if step.source == step.target or not step.target.shape:
        return False
    if step.cut is not None:
        return False  # other members send it in parts
    regions = [*step.moves.own]
    for _, region in step.moves.incoming():
        regions.append(region)
    for runs in itertools.chain(*regions):
        if len(runs) != 1:
            return False
    return 0 < step.moves.words <= elements(step.moves.own[0])


@dataclass
class _Changes:
    """The steps that take the place of others, by the number of those."""

    steps: Sequence[Step]
    replaced: dict[int, list[Step]] = field(default_factory=dict)

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """The steps that read or keep each slot."""
        return self._steps_by_slot(lambda step: {*step.reads, *step.keeps})

    @cached_property
    def freeing(self) -> dict[str, list[int]]:
        """The steps that free each slot."""
        return self._steps_by_slot(lambda step: step.frees)

    @cached_property
    def writers(self) -> dict[str, list[int]]:
        """The steps that write each slot."""
        return self._steps_by_slot(lambda step: step.writes)

    def _steps_by_slot(self, slots: Callable[[Step], Iterable[Slot]]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for number, step in enumerate(self.steps):
            for slot in slots(step):
                found.setdefault(slot.name, []).append(number)
        return found

    def add_kernel(self, number: int, kernel: Kernel) -> None:
        """Let a kernel read blocks and halos where they are, if it can."""
        blocks = []
        replaced: dict[int, list[Step]] = {}
        freed_later: list[Step] = []
        for target in dict.fromkeys(kernel.operands):
            position = self._exchange_of(target, number)
            if position is None:
                continue
            exchange = self.steps[position]
            assert isinstance(exchange, Exchange)
            block = _block_of(exchange)
            own, *arrived = block.sources
            in_the_way = self._steps_that_end(own, position, number)
            added = sum(slot.nbytes for slot in arrived)
            for other in in_the_way:
                added += own.nbytes if self.steps[other].frees else kernel.target.nbytes
            if in_the_way and added > target.nbytes:
                continue  # the copy takes less memory
            for other in in_the_way:
                replaced[other] = []
                if self.steps[other].frees:
                    freed_later.append(self.steps[other])
            replaced[position] = [HaloExchange(exchange, _arriving(exchange))]
            for other in self.freeing[target.name]:
                replaced[other] = [Free(slot) for slot in arrived]
            blocks.append(block)
        sweep = Sweep(kernel, tuple(blocks))
        if blocks and split_at_halos(sweep) is not None:
            replaced[number] = [sweep, *freed_later]
            self.replaced.update(replaced)

    def _steps_that_end(self, own: Slot, first: int, last: int) -> list[int]:
        """Return the steps between two others that free a block, or let it be written over."""
        found = []
        for number in range(first + 1, last):
            step = self.steps[number]
            is_written_over = isinstance(step, Reuse) and step.source == own
            if own in step.frees or is_written_over:
                found.append(number)
        return found

    def _exchange_of(self, target: Slot, number: int) -> int | None:
        """Return the exchange that fills an operand of this kernel, if the halo may stay beside."""
        writers = self.writers.get(target.name, [])
        if len(writers) != 1 or self.readers[target.name] != [number]:
            return None
        return writers[0] if _may_stay_beside(self.steps[writers[0]]) else None


def _arriving(exchange: Exchange) -> tuple[Slot | None, ...]:
    """Return the slots for the messages of an exchange, one for each member of the group."""
    target = exchange.target
    found: list[Slot | None] = []
    for member, region in enumerate(exchange.moves.receives):
        slot = None
        if region is not None:
            role = f"{target.role} from {exchange.group[member]}"
            slot = Slot(target.tensor, shape(region), target.dtype, role)
        found.append(slot)
    return tuple(found)


def _block_of(exchange: Exchange) -> HaloBlock:
    """Return where the elements of an exchange's target are if they are not put together."""
    assert exchange.moves.own is not None
    there, here = exchange.moves.own
    sources = [exchange.source]
    places: list[Region] = [here]
    starts = [tuple(runs[0][0] for runs in there)]
    arriving = zip(_arriving(exchange), exchange.moves.receives, strict=True)
    for slot, region in arriving:
        if slot is not None and region is not None:
            sources.append(slot)
            places.append(region)
            starts.append((0,) * len(region))
    return HaloBlock(exchange.target, tuple(sources), tuple(places), tuple(starts))


# ---- aggregates in the same pass ----------------------------------------------------------------


def with_folds(
    schedule: Schedule,
    is_map: Callable[[Kernel], bool],
    is_fold: Callable[[Kernel, Kernel], bool],
) -> Schedule:
    """Return the schedule with aggregates computed together with the tensor that they aggregate.

    `is_map` tells whether a kernel can be computed some rows at a time, `is_fold` whether a kernel
    can aggregate the target of another one in this way. What was between them comes after both,
    and a save point there is inside.
    """
    steps: list[Step] = []
    written_over = {step.slot for step in schedule.steps if isinstance(step, Reuse)}
    sweep_position: int | None = None  # in the new steps, as long as folds can be added
    for step in schedule.steps:
        sweep = _sweep_of(step, is_map)
        last = steps[sweep_position] if sweep_position is not None else None
        if isinstance(step, Kernel) and isinstance(last, Sweep) and is_fold(step, last.kernel):
            assert sweep_position is not None
            steps[sweep_position] = replace(last, folds=(*last.folds, step))
            for number in range(sweep_position + 1, len(steps)):
                point = steps[number]
                if isinstance(point, SavePoint):
                    steps[number] = replace(point, inside=True)
        elif sweep is not None and sweep.kernel.target not in written_over:
            steps.append(sweep)
            sweep_position = len(steps) - 1
        else:
            steps.append(step)
            # Without a halo there is no memory to spare, where something is freed between both.
            is_freed = isinstance(step, Free) and isinstance(last, Sweep) and bool(last.blocks)
            if not isinstance(step, Store | SavePoint) and not is_freed:
                sweep_position = None
    found: list[Step] = []
    for step in steps:
        is_plain = isinstance(step, Sweep) and not step.blocks and not step.folds
        found.append(step.kernel if isinstance(step, Sweep) and is_plain else step)
    return replace(schedule, steps=tuple(found))


def _sweep_of(step: Step, is_map: Callable[[Kernel], bool]) -> Sweep | None:
    """Return a step as a sweep to which aggregates can be added, if it is one."""
    if isinstance(step, Sweep):
        sweep = step
    elif isinstance(step, Kernel):
        sweep = Sweep(step)
    else:
        return None
    is_large = sweep.kernel.target.nbytes >= MIN_SWEPT_BYTES
    return sweep if is_large and is_map(sweep.kernel) else None
