"""Fused stencils: halos stay in buffers beside the block, which is then not copied, and aggregates
are computed in the same pass over memory as the tensor they aggregate."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from einmpi.schedule.compute import Compute, HaloBlock, Kernel
from einmpi.schedule.memory import lowered_bytes, peak_bytes
from einmpi.schedule.regions import Region, Slot, elements, names_of, shape
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Free, Step, Transfer, numbered

MIN_FOLDED_BYTES = 2**22  # of the tensor: a smaller one stays in the cache anyway


# ---- halo buffers --------------------------------------------------------------------------------


def with_halo_buffers(schedule: Schedule, reads_halos: Callable[[Compute], bool]) -> Schedule:
    """Return the schedule with halos in buffers of their own where that is possible.

    `reads_halos` tells whether a kernel can read a block and its halo where they are. It takes no
    more memory: where a kernel would write over the block, it gets memory of its own instead of
    the copy of the block.
    """
    exchanges = {}
    for number, exchange in numbered(schedule.steps, Transfer):
        if _may_have_buffers(exchange):
            exchanges[number] = exchange
    if not exchanges:
        return schedule
    changes = _Changes(schedule.steps, reads_halos, exchanges)
    for number, step in enumerate(schedule.steps):
        kernel = step.only_kernel
        if kernel is not None:
            changes.add_kernel(number, kernel)
    steps: list[Step] = []
    for number, step in enumerate(schedule.steps):
        steps += changes.replaced.get(number, [step])
    return replace(schedule, steps=tuple(steps))


def _may_have_buffers(step: Transfer) -> bool:
    """Return whether a transfer adds a halo to a block, and would copy more than it receives."""
    if step.moves.own is None or step.moves.same_to_all:
        return False
    if step.aggregation is not None or step.source == step.target or not step.target.shape:
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
    reads_halos: Callable[[Compute], bool]
    exchanges: dict[int, Transfer]  # that may have halo buffers, by the number of the step
    replaced: dict[int, list[Step]] = field(default_factory=dict)

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """The steps that read or keep each slot."""
        return self._steps_by_slot(lambda step: {*step.reads, *step.keeps})

    @cached_property
    def spilled(self) -> Collection[str]:
        """The slots that may be in the slow tier."""
        return self._steps_by_slot(lambda step: step.spills("place", "evict"))

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
            exchange = self.exchanges[position]
            block = _block_of(exchange)
            own, *arrived = block.sources
            in_the_way = self._steps_that_end(own, position, number)
            added = sum(slot.nbytes for slot in arrived)
            for other in in_the_way:
                added += own.nbytes if self.steps[other].frees else kernel.target.nbytes
            if in_the_way and added > target.nbytes:
                continue  # the copy takes less memory
            for other in in_the_way:
                if self.steps[other].frees and other not in replaced:
                    freed_later.append(self.steps[other])
                replaced[other] = []
            replaced[position] = [replace(exchange, arriving=_arriving(exchange))]
            for other in self.freeing[target.name]:
                replaced[other] = [Free(slot) for slot in arrived]
            blocks.append(block)
        stencil = Compute((kernel,), halos=tuple(blocks))
        is_taken = not self.replaced.keys().isdisjoint(replaced)  # another kernel waits for a free
        if blocks and not is_taken and self.reads_halos(stencil):
            replaced[number] = [stencil, *freed_later]
            self.replaced.update(replaced)

    def _steps_that_end(self, own: Slot, first: int, last: int) -> list[int]:
        """Return the steps between two others that free a block, or let it be written over."""
        found = []
        for number in range(first + 1, last):
            step = self.steps[number]
            is_written_over = any(reuse.source == own for reuse in step.reuse_steps)
            if own in step.frees or is_written_over:
                found.append(number)
        return found

    def _exchange_of(self, target: Slot, number: int) -> int | None:
        """Return the exchange that fills an operand of this kernel, if the halo may stay beside."""
        writers = self.writers.get(target.name, [])
        if len(writers) != 1 or self.readers[target.name] != [number]:
            return None
        exchange = self.exchanges.get(writers[0])
        if exchange is None:
            return None
        used = names_of((*exchange.reads, target))
        if any(name in self.spilled for name in used):  # they are in other places at other times
            return None
        return writers[0]


def _arriving(exchange: Transfer) -> tuple[Slot | None, ...]:
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


def _block_of(exchange: Transfer) -> HaloBlock:
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
    is_fold: Callable[[Kernel, Slot], bool],
) -> Schedule:
    """Return the schedule with aggregates of a tensor computed in one pass over its memory.

    That is the pass in which the tensor is computed, or the pass of another aggregate of it.
    `is_map` tells whether a kernel can be computed some rows at a time, `is_fold` whether a kernel
    can aggregate what is in a slot in this way. What was between them comes after both, and a save
    point there is inside.
    """
    steps: list[Step] = []
    written_over = {slot for step in schedule.steps for slot in step.reuses}
    computes = dict(numbered(schedule.steps, Compute))
    last: Compute | None = None  # what aggregates can be added to
    position = 0  # of it, in the new steps
    folded: Slot | None = None  # the tensor of which they are
    for number, step in enumerate(schedule.steps):
        fold = step.only_kernel
        if fold is not None and last is not None and folded is not None:
            between = steps[position + 1 :]
            arrived = {slot for each in between for slot in each.writes}
            if is_fold(fold, folded) and arrived.isdisjoint(fold.operands):
                last = replace(last, kernels=(*last.kernels, fold))
                steps[position:] = [last, *(each.inside_group() for each in between)]
                continue
        steps.append(step)
        found = _folded_slot(computes.get(number), is_map, is_fold)
        if found is not None and step.writes[0] not in written_over:
            last = computes[number]
            position = len(steps) - 1
            folded = found
            continue
        # Without a halo there is no memory to spare, where something is freed between both.
        is_freed = step.manages_memory and step.frees and last is not None and last.halos
        is_mark = step.kind == "store" or step.when_fused == "after"
        if step.transfer is None and not is_mark and not is_freed:
            last = None
    fused = replace(schedule, steps=tuple(steps))
    fits = peak_bytes(fused) <= max(peak_bytes(schedule), lowered_bytes(schedule))
    return fused if fits else schedule


def _folded_slot(
    step: Compute | None, is_map: Callable[[Kernel], bool], is_fold: Callable[[Kernel, Slot], bool]
) -> Slot | None:
    """Return the tensor of which aggregates can be computed together with a step, if there is one.

    It is what the step computes, or what it aggregates itself.
    """
    if step is None or not (step.is_plain or step.halos):
        return None
    kernel = step.kernels[0]
    if kernel.target.nbytes >= MIN_FOLDED_BYTES and is_map(kernel):
        return kernel.target
    for slot in kernel.operands:
        if slot.nbytes >= MIN_FOLDED_BYTES and is_fold(kernel, slot):
            return slot
    return None
