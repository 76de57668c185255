"""Check that the schedules of all ranks fit together. It is slow, as it looks at every element."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from einmpi.schedule.compute import Compute
from einmpi.schedule.regions import Region, Slot, indices, names_of, packed, shape
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Load, Repeat, Step, Transfer, numbered


def verify(schedules: Sequence[Schedule]) -> None:
    """Raise an AssertionError that names rank and step where the schedules do not fit together.

    Every message must arrive, every slot be filled exactly once before it is read, and no slot be
    used after it is freed.
    """
    digests = {schedule.digest for schedule in schedules}
    assert len(digests) == 1, "the schedules are of different plans"
    for schedule in schedules:
        _check_slots(schedule)
        _check_tiers(schedule)
        _check_background(schedule)
    _check_loads(schedules)
    _check_messages(schedules)


def _check_loads(schedules: Sequence[Schedule]) -> None:
    """Check that all ranks of the mesh load the same tensors in the same order.

    They may read them together.
    """
    orders = {}
    for schedule in schedules:
        loads = [load for _, load in numbered(schedule.steps, Load)]
        if not loads:
            continue
        orders[tuple((load.tensor, load.layout, load.kept) for load in loads)] = schedule.rank
        for load in loads:
            assert load.region == load.layout.block(schedule.rank), (
                f"rank {schedule.rank}: {load}: not its region"
            )
    assert len(orders) <= 1, f"ranks {sorted(orders.values())} load different tensors"


def _check_slots(schedule: Schedule) -> None:
    """Check that each element of a slot is written once before the slot is read, and that a slot
    exists when it is used."""
    filled: dict[str, npt.NDArray[np.int8]] = {}  # how often each element of a slot was written
    freed: set[str] = set()
    for number, step in enumerate(schedule.steps):
        where = f"rank {schedule.rank}, step {number}: {step}"
        for slot in step.reads:
            assert slot.name not in freed, f"{where}: {slot} is used after it was freed"
            if step.completes_slot:
                continue  # it reads its own slot, which other steps need not have filled yet
            assert slot.name in filled, f"{where}: {slot} is used before it is made"
            counts = filled[slot.name]
            if slot.shape:
                counts = counts[np.ix_(*map(indices, step.region_of(slot)))]
            assert (counts == 1).all(), f"{where}: {slot} is not filled once everywhere"
        for slot in step.writes:
            filled.setdefault(slot.name, np.zeros(slot.shape, np.int8))
        for slot, place in places_filled(step):
            _count_writes(filled[slot.name], slot, place)
        if isinstance(step, Transfer) and step.moves.is_halo and not step.arriving:
            counts = filled[step.target.name]
            counts[counts == 0] = 1  # at the corners of a star, which nobody misses
        for slot in step.frees:
            assert slot.name not in freed, f"{where}: freed twice"
            del filled[slot.name]
            freed.add(slot.name)
    assert not (freed & filled.keys()), f"rank {schedule.rank}: a slot is used after it was freed"


def places_filled(step: Step) -> Iterator[tuple[Slot, Region]]:
    """Yield the places to which a step writes new elements; a place may be empty."""
    if isinstance(step, Load):
        yield step.slot, step.place
    elif isinstance(step, Compute) or (isinstance(step, Transfer) and step.arriving):
        for slot in step.writes:
            yield slot, step.region_of(slot)
    elif isinstance(step, Repeat):
        for slot in step.results:
            yield slot, step.region_of(slot)
    elif isinstance(step, Transfer) and step.aggregation is None:
        if step.moves.own is not None:
            yield step.target, step.moves.own[1]
        for _, region in step.moves.incoming():
            yield step.target, region


def _check_tiers(schedule: Schedule) -> None:
    """Check that slots are in memory or in the slow tier, as each step expects them to be, and
    that no values are lost when memory is given up."""
    memory: set[str] = set()
    outside: set[str] = set(names_of(schedule.outside))  # with the newest values
    kept: set[str] = set()
    for _, load in numbered(schedule.steps, Load):
        kept |= set(names_of(load.keeps))
    for number, step in enumerate(schedule.steps):
        where = f"rank {schedule.rank}, step {number}: {step}"
        read = set(names_of(step.reads))
        written = set(names_of(step.writes))
        if step.is_out_of_core:
            assert written <= outside - memory, f"{where}: its target is not outside"
        elif step.kernels:
            assert read <= memory, f"{where}: {sorted(read - memory)} not in memory"
            assert not written & outside, f"{where}: its target is outside"
        elif written:
            moved = (read | written) - kept
            in_both = moved & memory and moved & (outside - memory)
            assert not in_both, f"{where}: half in memory"
        assert not set(names_of(step.spills("place", "fetch"))) & memory, (
            f"{where}: it is in memory"
        )
        leaving = set(names_of(step.spills("evict", "drop")))
        assert leaving <= memory, f"{where}: it is not in memory"
        assert not leaving & kept, f"{where}: it stays where it is"
        assert set(names_of(step.spills("drop", "fetch"))) <= outside, (
            f"{where}: its values are not outside"
        )
        outside |= set(names_of(step.spills("place", "evict")))
        memory |= set(names_of(step.allocates(outside)))
        outside -= written & memory  # the slow tier has older values now
        memory -= set(names_of((*step.spills("drop"), *step.frees)))
        outside -= set(names_of(step.frees))


def _check_background(schedule: Schedule) -> None:
    """Check that no step touches what a transfer in the background changes, or changes what it
    sends, and that every transfer is awaited."""
    under_way: list[Step] = []
    for number, step in enumerate(schedule.steps):
        where = f"rank {schedule.rank}, step {number}: {step}"
        if step.awaited is not None:
            assert any(each is step.awaited for each in under_way), f"{where}: it is not under way"
            while under_way.pop(0) is not step.awaited:
                pass
        elif step.background:
            under_way.append(step)
        elif step.kind != "store":
            assert not (under_way and step.transfer), f"{where}: transfers are out of order"
            for transfer in under_way:
                _check_apart(step, transfer, where)
    assert not under_way, f"rank {schedule.rank}: nobody waits for {under_way[0]}"


def _check_apart(step: Step, transfer: Step, where: str) -> None:
    """Check that a step and a transfer at the same time touch different elements."""
    moved = set(names_of((*transfer.reads, *transfer.writes)))
    assert not set(names_of((*step.frees, *step.reuses))) & moved, (
        f"{where}: its slot is still moving"
    )
    for slot in step.writes:
        if slot.name in moved:
            both = _common_elements(slot, step.region_of(slot), transfer.region_of(slot))
            assert not both, f"{where}: {slot} is still moving"
    for slot in step.reads:
        if slot in transfer.writes:
            both = _common_elements(slot, step.region_of(slot), transfer.region_of(slot))
            assert not both, f"{where}: {slot} has not arrived"


def _common_elements(slot: Slot, one: Region, two: Region) -> int:
    counts = np.zeros(slot.shape or (1,), np.int8)
    for region in (one, two):
        counts[np.ix_(*map(indices, region))] += 1
    return int((counts == 2).sum())


def _count_writes(counts: npt.NDArray[np.int8], slot: Slot, place: Region) -> None:
    if not slot.shape:
        if all(place):  # a number is moved as a vector of one element
            counts += 1
    elif place == packed(place):  # the whole slot, or its first part
        counts[tuple(slice(extent) for extent in shape(place))] += 1
    else:
        counts[np.ix_(*map(indices, place))] += 1


def _check_messages(schedules: Sequence[Schedule]) -> None:
    """Check that between two ranks messages are sent and received in the same order and shapes."""
    sent: dict[tuple[int, int], deque[tuple[str, tuple[int, ...]]]] = defaultdict(deque)
    expected: list[tuple[int, int, str, tuple[int, ...], str]] = []
    for schedule in schedules:
        for number, outer in enumerate(schedule.steps):
            for step, _ in outer.innermost():
                if step.transfer is None:
                    continue
                where = f"rank {schedule.rank}, step {number}: {step}"
                for to, region in step.transfer.outgoing():
                    sent[schedule.rank, to].append((step.vertex, shape(region)))
                for source, region in step.transfer.incoming():
                    expected.append((source, schedule.rank, step.vertex, shape(region), where))
    for source, rank, tensor, extents, where in expected:
        queue = sent[source, rank]
        assert queue, f"{where}: rank {source} sends nothing"
        found = queue.popleft()
        assert found == (tensor, extents), (
            f"{where}: rank {source} sends {found}, not {(tensor, extents)}"
        )
    lost = [pair for pair, queue in sent.items() if queue]
    assert not lost, f"messages between these ranks are not received: {lost[:4]}"
