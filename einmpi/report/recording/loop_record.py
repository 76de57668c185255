"""A recorder of the steps of a loop: the sums of all, and when each rank did what in a few."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from einmpi.comm.base import Comm
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.eingraph import EinGraph
from einmpi.report.recording.record import (
    OwnSpans,
    Record,
    StepTimes,
    Timeline,
    Times,
    TransferTime,
    gather_records,
    timeline_of,
)
from einmpi.report.recording.summary import VertexTimes, vertex_times
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Step

# Without a choice, the first step of a loop is traced, and so many at its end.
LAST_STEPS_TRACED = 3


class _StepTimes(NamedTuple):
    """When a rank began and ended each step of its schedule, in one step of the loop."""

    number: int  # of the step
    starts: Times
    ends: Times
    transfers: list[TransferTime]  # in the background


@dataclass(frozen=True)
class LoopRecord:
    """What was recorded of a loop, on rank 0."""

    records: Sequence[Record]  # of each rank: the traced steps, on the clock of rank 0
    traced: tuple[int, ...]  # the numbers of these steps
    times: tuple[VertexTimes, ...]  # of all steps


class LoopRecorder(StepTimes):
    """Records the steps of one loop. All ranks call `begin` and `finish`.

    A step is traced if its number is in `chosen`, or, if there is no such step, if it is the first
    or one of the last. `wait` waits for kernels: on a GPU they outlast the step that starts them.
    """

    def __init__(
        self,
        comm: Comm,
        schedule: Schedule,
        wait: Callable[[], None],
        chosen: range | None = None,
        name: str = "",
    ) -> None:
        super().__init__(comm)
        self.schedule = schedule
        self.wait = wait
        self.chosen = chosen if chosen is not None else range(0)
        self.name = name  # of the loop, before the numbers of its steps
        self.seconds = np.zeros(len(schedule.steps))  # of each of them, in all steps of the loop
        self.transfer_seconds: dict[int, TransferTime] = {}  # in all steps, by the id of each
        self.steps = 0  # of the loop, so far
        self.first: _StepTimes | None = None
        self.last: deque[_StepTimes] = deque(maxlen=LAST_STEPS_TRACED)
        self.selected: list[_StepTimes] = []

    def on_schedule_step(self, _: Step) -> None:
        """Note that a step of the schedule begins."""
        self.wait()
        self.note_time()

    def on_transfer(self, step: Step, start: float, end: float) -> None:
        """Note when a transfer in the background began and ended."""
        super().on_transfer(step, start, end)
        known = self.transfer_seconds.get(id(step), TransferTime(step, 0.0, 0.0))
        self.transfer_seconds[id(step)] = known._replace(end=known.end + end - start)

    def end_step(self, number: int) -> None:
        """Note that a step of the loop has ended."""
        self.wait()
        step = _StepTimes(number, *self.taken(), self.transfers)
        self.transfers = []
        self.seconds += step.ends - step.starts
        self.steps += 1
        if self.first is None:
            self.first = step
        else:
            self.last.append(step)
        if number in self.chosen:
            self.selected.append(step)

    def _traced(self) -> list[_StepTimes]:
        if self.selected or self.first is None:
            return self.selected
        return [self.first, *self.last]

    def finish(self, graph: EinGraph) -> LoopRecord | None:
        """Return what was recorded on rank 0, None on the others. `graph` is that of a step."""
        schedule_steps = self.schedule.steps
        traced = self._traced()
        own = OwnSpans()
        for number, starts, ends, transfers in traced:
            own.add(schedule_steps, starts, ends, f"{self.name}step {number}")
            own.add_transfers(transfers, f"{self.name}step {number}")
        sums = OwnSpans()
        sums.add(schedule_steps, np.zeros(len(schedule_steps)), self.seconds, repeats=self.steps)
        sums.add_transfers(list(self.transfer_seconds.values()), repeats=self.steps)
        records = self.gathered(own)
        all_sums = gather_records(self.comm, sums.record())
        if self.comm.rank > 0:
            return None
        numbers = tuple(step.number for step in traced)
        steady = timeline_of([[record] for record in records])
        if len(numbers) > 1:  # the first step prepares what later ones only call
            first = f"{self.name}step {numbers[0]}"
            spans = tuple(span for span in steady.spans if span.during != first)
            steady = replace(steady, spans=spans)
        all_steps = timeline_of([[record] for record in all_sums])
        return LoopRecord(records, numbers, _times_of_loop(all_steps, steady, graph))


def loops_timeline(loops: Sequence[LoopRecord]) -> Timeline:
    """Return the traced steps of loops that followed one another, on one clock."""
    records_by_rank = []
    for rank in range(len(loops[0].records)):
        records_by_rank.append([loop.records[rank] for loop in loops])
    return timeline_of(records_by_rank)


def _times_of_loop(
    all_steps: Timeline, steady: Timeline, graph: EinGraph
) -> tuple[VertexTimes, ...]:
    """Return the times of every tensor that was computed or moved, in all steps together.

    Each span of `all_steps` has the seconds of all steps. How much of the moving is waiting can be
    told only where it is known when the other ranks began: in the steps that were traced. The
    waiting has the same part of all steps, and so has what was hidden behind kernels.
    """
    names = [vertex.name for vertex in graph.vertices]
    waiting_shares = {}
    hidden_shares = {}
    for vertex in vertex_times(steady, names):
        moving = vertex.communication + vertex.waiting + vertex.hidden
        waiting_shares[vertex.name] = vertex.waiting / moving if moving else 0.0
        hidden_shares[vertex.name] = vertex.hidden / moving if moving else 0.0
    found = []
    for vertex in vertex_times(all_steps, names):
        moving = vertex.communication + vertex.waiting + vertex.hidden
        waiting = moving * waiting_shares.get(vertex.name, 0.0)
        hidden = moving * hidden_shares.get(vertex.name, 0.0)
        itemsize = 1
        if vertex.name in graph.by_name:
            itemsize = DTYPES[graph[vertex.name].dtype].itemsize
        times = replace(
            vertex,
            communication=moving - waiting - hidden,
            waiting=waiting,
            hidden=hidden,
            words=vertex.nbytes // itemsize,
        )
        found.append(times)
    return tuple(found)
