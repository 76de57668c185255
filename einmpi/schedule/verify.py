"""Check the schedules of all ranks against each other: every message arrives, every slot is filled once, nothing is
used after it is freed. For tests and debugging: it paints every element."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from einmpi.schedule.regions import Region, indices, shape
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import (
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
    reads,
    writes,
)


def verify(schedules: Sequence[Schedule]) -> None:
    """AssertionError with rank and step where the schedules do not fit together."""
    assert len({schedule.digest for schedule in schedules}) == 1, (
        "the schedules are of different plans"
    )
    for schedule in schedules:
        _check_slots(schedule)
        _check_tiers(schedule)
    _check_loads(schedules)
    _check_messages(schedules)


def _check_loads(schedules: Sequence[Schedule]) -> None:
    """All ranks of the mesh load the same tensors in the same order: they may read them together."""
    orders = {}
    for schedule in (each for each in schedules if each.steps):
        loads = [step for step in schedule.steps if isinstance(step, Load)]
        orders[tuple((load.tensor, load.layout, load.kept) for load in loads)] = schedule.rank
        for load in loads:
            assert load.region == load.layout.block(schedule.rank), (
                f"rank {schedule.rank}: {load}: not its region"
            )
    assert len(orders) <= 1, f"ranks {sorted(orders.values())} load different tensors"


def _check_slots(schedule: Schedule) -> None:
    """Each slot is filled whole, each element once, before it is read; and is there when it is used."""
    filled: dict[str, np.ndarray] = {}
    freed: set[str] = set()
    for number, step in enumerate(schedule.steps):
        where = f"rank {schedule.rank}, step {number}: {step}"
        for slot in reads(step):
            assert slot.name not in freed, f"{where}: {slot} is used after it was freed"
            if isinstance(step, Exchange) and step.source == step.target:
                continue  # it completes its own slot, or makes it where a rank had nothing to load
            assert slot.name in filled, f"{where}: {slot} is used before it is made"
            assert (filled[slot.name] == 1).all(), f"{where}: {slot} is not filled once everywhere"
        if isinstance(step, Load):
            _paint(filled, step.slot, step.place)
        elif isinstance(step, Exchange):
            _fill_exchange(filled, step)
        elif isinstance(step, Kernel | Passes):
            target = step.target if isinstance(step, Kernel) else step.kernel.target
            filled[target.name] = np.ones(target.shape, np.int8)
        elif isinstance(step, Free):
            assert step.slot.name not in freed, f"{where}: freed twice"
            del filled[step.slot.name]
            freed.add(step.slot.name)
    assert not (freed & filled.keys()), f"rank {schedule.rank}: a slot is used after it was freed"


def _check_tiers(schedule: Schedule) -> None:
    """Slots are in memory, or in the slow tier, where a step wants them; nothing is lost when memory is given up."""
    memory: set[str] = set()
    outside: set[str] = {slot.name for slot in schedule.outside}  # with the newest values
    kept = {step.slot.name for step in schedule.steps if isinstance(step, Load) and step.kept}
    for number, step in enumerate(schedule.steps):
        where = f"rank {schedule.rank}, step {number}: {step}"
        used = {slot.name for slot in reads(step)}
        made = {slot.name for slot in writes(step)}
        if isinstance(step, Kernel):
            assert used <= memory, f"{where}: {sorted(used - memory)} not in memory"
            assert not made & outside, f"{where}: its target is outside"
        elif isinstance(step, Passes):
            assert made <= outside - memory, f"{where}: its target is not outside"
        elif isinstance(step, Exchange | Reduce | Load):
            own = (used | made) - kept
            assert not own & memory or not own & (outside - memory), f"{where}: half in memory"
        elif isinstance(step, Evict | Drop | Fetch | Place | Free):
            name = step.slot.name
            inside = {Evict: True, Drop: True, Fetch: False, Place: False, Free: name in memory}[
                type(step)
            ]
            assert (name in memory) == inside, f"{where}: it is {'not ' * inside}in memory"
            if isinstance(step, Drop | Fetch):
                assert name in outside, f"{where}: its values are not outside"
            assert not isinstance(step, Evict | Drop) or name not in kept, (
                f"{where}: it stays where it is"
            )
            if isinstance(step, Fetch):
                memory.add(name)
            elif isinstance(step, Evict | Place):
                outside.add(name)
            else:
                memory.discard(name)
            if isinstance(step, Free):
                outside.discard(name)
        new = made - outside | made & memory
        memory |= new
        outside -= new


def _fill_exchange(filled: dict[str, np.ndarray], step: Exchange) -> None:
    filled.setdefault(step.target.name, np.zeros(step.target.shape, np.int8))
    if step.moves.own is not None:
        _paint(filled, step.target, step.moves.own[1])
    for region in step.moves.receives:
        if region is not None:
            _paint(filled, step.target, region)


def _paint(filled: dict[str, np.ndarray], slot: Slot, place: Region) -> None:
    array = filled.setdefault(slot.name, np.zeros(slot.shape, np.int8))
    if slot.shape:
        array[np.ix_(*map(indices, place))] += 1
    elif all(place):  # a number is moved as a vector of one element
        array += 1


def _check_messages(schedules: Sequence[Schedule]) -> None:
    """Between two ranks, messages are sent and received in the same order and have the same shapes."""
    sent: dict[tuple[int, int], deque[tuple[str, tuple[int, ...]]]] = defaultdict(deque)
    expected: list[tuple[int, int, str, tuple[int, ...], str]] = []
    for schedule in schedules:
        for number, step in enumerate(schedule.steps):
            where = f"rank {schedule.rank}, step {number}: {step}"
            for to, region in _sends(step):
                sent[schedule.rank, to].append((step.tensor, shape(region)))  # type: ignore[union-attr]
            for source, region in _receives(step):
                tensor = step.tensor  # type: ignore[union-attr]
                expected.append((source, schedule.rank, tensor, shape(region), where))
    for source, rank, tensor, extents, where in expected:
        queue = sent[source, rank]
        assert queue, f"{where}: rank {source} sends nothing"
        found = queue.popleft()
        assert found == (tensor, extents), (
            f"{where}: rank {source} sends {found}, not {(tensor, extents)}"
        )
    lost = [pair for pair, queue in sent.items() if queue]
    assert not lost, f"nobody receives what is sent from and to {lost[:4]}"


def _sends(step: Step) -> list[tuple[int, Region]]:
    if isinstance(step, Exchange):
        pairs = zip(step.moves.group, step.moves.sends, strict=True)
    elif isinstance(step, Reduce):
        pairs = zip(step.group, _but(step.pieces, step.me), strict=True)
    else:
        return []
    return [(rank, region) for rank, region in pairs if region is not None]


def _receives(step: Step) -> list[tuple[int, Region]]:
    if isinstance(step, Exchange):
        pairs = zip(step.moves.group, step.moves.receives, strict=True)
    elif isinstance(step, Reduce):
        pairs = zip(
            step.group, _but((step.pieces[step.me],) * len(step.group), step.me), strict=True
        )
    else:
        return []
    return [(rank, region) for rank, region in pairs if region is not None]


def _but(regions: Sequence[Region | None], member: int) -> list[Region | None]:
    return [None if k == member else region for k, region in enumerate(regions)]
