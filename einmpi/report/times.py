"""Where the time of a run went, vertex by vertex: computing, moving and waiting."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from einmpi.comm.base import Comm
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.eingraph import EinGraph
from einmpi.planner.text.summary import Row
from einmpi.report.record import (
    Done,
    Recorder,
    Span,
    Timeline,
    TransferTime,
    gather_spans,
    spans_of,
    timeline_of,
)
from einmpi.schedule.steps import Step
from einmpi.units import show_count

_TIMED_KINDS = ("kernel", "repeat", "exchange", "reduce")
MAX_ROWS = 20  # vertices that have a row of their own: those that took longest


@dataclass
class VertexTimes:
    """Seconds as means over the ranks that have steps; operations and bytes as sums."""

    name: str
    kernel: float = 0.0
    slowest_kernel: float = 0.0  # of the rank that computed longest
    communication: float = 0.0
    waiting: float = 0.0
    operations: int = 0
    nbytes: int = 0
    words: int | None = None  # that moved, in a loop
    hidden: float = 0.0  # of moving in the background, while the rank did something else

    @property
    def seconds(self) -> float:
        return self.kernel + self.communication + self.waiting

    def as_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "name": self.name,
            "seconds_kernel": self.kernel,
            "seconds_communication": self.communication,
            "seconds_waiting": self.waiting,
            "operations": self.operations,
            "bytes": self.nbytes,
        }
        if self.hidden:
            data["seconds_hidden"] = self.hidden
        if self.words is not None:
            data["words"] = self.words
        return data


def vertex_times(timeline: Timeline, names: Sequence[str]) -> tuple[VertexTimes, ...]:
    """Return the times of every tensor that was computed or moved, in the order of `names`."""
    found: dict[str, VertexTimes] = {}
    kernels: dict[tuple[str, int], float] = defaultdict(float)  # of a tensor on a rank
    for span, waited in zip(timeline.spans, _waits(timeline), strict=True):
        if span.kind not in _TIMED_KINDS:
            continue
        times = found.setdefault(span.vertex, VertexTimes(span.vertex))
        times.operations += span.operations
        times.nbytes += span.nbytes
        took = span.end - span.start
        if span.background:  # the rank waited for the transfer itself
            times.hidden += took - waited
            times.communication += waited
        elif span.kind in ("kernel", "repeat"):
            times.kernel += took
            kernels[span.vertex, span.rank] += took
        else:
            times.communication += took - waited
            times.waiting += waited
    for (name, _), seconds in kernels.items():
        found[name].slowest_kernel = max(found[name].slowest_kernel, seconds)
    busy_ranks = len({span.rank for span in timeline.spans})
    for times in found.values():
        times.kernel /= busy_ranks
        times.communication /= busy_ranks
        times.waiting /= busy_ranks
        times.hidden /= busy_ranks
    order = [name for name in names if name in found]
    return tuple(found[name] for name in dict.fromkeys([*order, *found]))


def total(name: str, vertices: Iterable[VertexTimes]) -> VertexTimes:
    """Return the sums of several vertices, under a name."""
    columns = zip(*(astuple(vertex)[1:] for vertex in vertices), strict=True)
    sums: list[Any] = [None if None in column else sum(column) for column in columns]
    return VertexTimes(name, *sums)


def _waits(timeline: Timeline) -> list[float]:
    """Return for each span how long its rank waited for the last one of its group."""
    waits = [0.0] * len(timeline.spans)
    for members in timeline.meetings():
        last_start = max(timeline.spans[place].start for place in members.values())
        for place in members.values():
            span = timeline.spans[place]
            waits[place] = min(last_start, span.end) - span.start
    waiting: dict[tuple[int, str], list[Span]] = {}  # for transfers in the background
    for span in timeline.spans:
        if span.kind == "wait":
            waiting.setdefault((span.rank, span.during), []).append(span)
    for place, span in enumerate(timeline.spans):
        if span.background:
            own = waiting.get((span.rank, span.during), [])
            waits[place] = sum(_seconds_in_both(span, wait) for wait in own)
    return waits


def _seconds_in_both(one: Span, two: Span) -> float:
    return max(0.0, min(one.end, two.end) - max(one.start, two.start))


# ---- as a table ----------------------------------------------------------------------------------


def summary_rows(vertices: Sequence[VertexTimes]) -> list[Row]:
    """Return the heads, a row for each of the slowest vertices, one for the others, and the sum."""
    order = sorted(vertices, key=lambda vertex: -vertex.seconds)
    count = len(order)
    if count > MAX_ROWS + 1:  # a row for one other vertex would say less than its own
        count = MAX_ROWS
    shown = order[:count]
    others = order[count:]
    if others:
        shown.append(total(f"{len(others)} others", others))
    if len(order) > 1:
        shown.append(total("in all", order))
    heads: Row = ("vertex", "computing s", "moving s", "waiting s", "GFLOP/s", "GB/s", "imbalance")
    has_hidden = any(vertex.hidden for vertex in shown)
    if has_hidden:
        heads += ("hidden s",)
    if any(vertex.words is not None for vertex in shown):
        heads += ("words",)
    return [heads, *(_row(vertex, has_hidden) for vertex in shown)]


def _row(vertex: VertexTimes, has_hidden: bool) -> Row:
    imbalance = "–"
    if vertex.kernel:
        imbalance = f"{vertex.slowest_kernel / vertex.kernel:.2f}"
    cells: Row = (
        vertex.name,
        f"{vertex.kernel:.4f}",
        f"{vertex.communication:.4f}",
        f"{vertex.waiting:.4f}",
        _rate(vertex.operations, vertex.kernel),
        _rate(vertex.nbytes, vertex.communication + vertex.hidden),
        imbalance,
    )
    if has_hidden:
        cells += (f"{vertex.hidden:.4f}",)
    return cells if vertex.words is None else (*cells, show_count(vertex.words))


def _rate(amount: int, seconds: float) -> str:
    if not amount or not seconds:
        return "–"
    rate = amount / seconds / 1e9
    return f"{rate:.1f}" if rate >= 0.1 else f"{rate:.1g}"


# ---- loops ---------------------------------------------------------------------------------------
#
# Of a loop, the sums of all steps are recorded, and of a few of them when each rank did what.


LAST_STEPS_TRACED = 3  # without a choice: the first step of a loop, and so many at its end


@dataclass(frozen=True)
class LoopRecord:
    """What was recorded of a loop, on rank 0."""

    spans: Sequence[Sequence[Span]]  # of each rank: the traced steps, on the clock of rank 0
    traced: tuple[int, ...]  # the numbers of these steps
    times: tuple[VertexTimes, ...]  # of all steps


class LoopRecorder(Recorder):
    """Records the steps of one loop.

    A step is traced if its number is in `chosen`, or, if there is no such step, if it is the first
    or one of the last. `name` is that of the loop, before the numbers of its steps.
    """

    def __init__(
        self, comm: Comm, wait: Callable[[], None], chosen: range | None = None, name: str = ""
    ) -> None:
        super().__init__(comm, wait)
        self.chosen = chosen if chosen is not None else range(0)
        self.name = name
        self.seconds: Any = 0.0  # of each step of the schedule, in all steps of the loop
        self.transfer_seconds: dict[int, TransferTime] = {}  # in all steps, by the id of each
        self.steps_done = 0  # of the loop
        self.first: tuple[int, Done] | None = None  # a step by its number
        self.last: deque[tuple[int, Done]] = deque(maxlen=LAST_STEPS_TRACED)
        self.selected: list[tuple[int, Done]] = []

    def on_transfer(self, step: Step, start: float, end: float) -> None:
        super().on_transfer(step, start, end)
        known = self.transfer_seconds.get(id(step), TransferTime(step, 0.0, 0.0))
        self.transfer_seconds[id(step)] = known._replace(end=known.end + end - start)

    def end_step(self, number: int) -> None:
        """Note that a step of the loop has ended."""
        done = self.taken()
        self.seconds = self.seconds + done.ends - done.starts
        self.steps_done += 1
        if self.first is None:
            self.first = number, done
        else:
            self.last.append((number, done))
        if number in self.chosen:
            self.selected.append((number, done))

    def finish_loop(self, graph: EinGraph) -> LoopRecord | None:
        """Return what was recorded on rank 0, None on the others. `graph` is that of a step."""
        traced = self.selected
        if not traced and self.first is not None:
            traced = [self.first, *self.last]
        rank = self.comm.rank
        own = []
        for number, done in traced:
            own += spans_of(done, rank, f"{self.name}step {number}")
        sums = []
        if self.first is not None:
            zeros = np.zeros(len(self.seconds))
            transfers = list(self.transfer_seconds.values())
            summed = Done(self.first[1].steps, zeros, self.seconds, transfers)
            sums = spans_of(summed, rank, repeats=self.steps_done)
        spans = self.gathered(own)
        all_sums = gather_spans(self.comm, sums)
        if rank > 0:
            return None
        numbers = tuple(number for number, _ in traced)
        steady = timeline_of(spans)
        if len(numbers) > 1:  # the first step prepares what later ones only call
            first = f"{self.name}step {numbers[0]}"
            later = tuple(span for span in steady.spans if span.during != first)
            steady = replace(steady, spans=later)
        return LoopRecord(spans, numbers, _times_of_loop(timeline_of(all_sums), steady, graph))


def loops_timeline(loops: Sequence[LoopRecord]) -> Timeline:
    """Return the traced steps of loops that followed one another, on one clock."""
    by_rank = zip(*(loop.spans for loop in loops), strict=True)
    return timeline_of([[*itertools.chain.from_iterable(own)] for own in by_rank])


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
