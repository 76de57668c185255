"""Check the schedules of all ranks against each other: every message arrives, every slot is filled once, nothing is
used after it is freed. For tests and debugging: it paints every element."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from einmpi.schedule.regions import Region, indices, shape
from einmpi.schedule.steps import Exchange, Free, Kernel, Load, Reduce, Schedule, Slot, Step, reads


def verify(schedules: Sequence[Schedule]) -> None:
    """AssertionError with rank and step where the schedules do not fit together."""
    assert len({schedule.digest for schedule in schedules}) == 1, "the schedules are of different plans"
    for schedule in schedules:
        _check_slots(schedule)
    _check_loads(schedules)
    _check_messages(schedules)


def _check_loads(schedules: Sequence[Schedule]) -> None:
    """All ranks of the mesh load the same tensors in the same order: they may read them together."""
    orders = {}
    for schedule in (each for each in schedules if each.steps):
        loads = [step for step in schedule.steps if isinstance(step, Load)]
        orders[tuple((load.tensor, load.layout, load.kept) for load in loads)] = schedule.rank
        for load in loads:
            assert load.region == load.layout.block(schedule.rank), f"rank {schedule.rank}: {load}: not its region"
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
        elif isinstance(step, Kernel):
            filled[step.target.name] = np.ones(step.target.shape, np.int8)
        elif isinstance(step, Free):
            assert step.slot.name not in freed, f"{where}: freed twice"
            del filled[step.slot.name]
            freed.add(step.slot.name)
    assert not (freed & filled.keys()), f"rank {schedule.rank}: a slot is used after it was freed"


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
        assert found == (tensor, extents), f"{where}: rank {source} sends {found}, not {(tensor, extents)}"
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
        pairs = zip(step.group, _but((step.pieces[step.me],) * len(step.group), step.me), strict=True)
    else:
        return []
    return [(rank, region) for rank, region in pairs if region is not None]


def _but(regions: Sequence[Region | None], member: int) -> list[Region | None]:
    return [None if k == member else region for k, region in enumerate(regions)]
