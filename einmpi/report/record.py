"""A recorder of when a rank does its steps. Rank 0 gathers the records of all ranks."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.comm.base import Comm, uncounted
from einmpi.comm.control_messages import ClockReading, compare_clocks, on_first_clock
from einmpi.files.atomic import replace_file
from einmpi.process.startup import first_use_seconds
from einmpi.runtime.program import Checkpointer
from einmpi.schedule.steps import Step

# ---- timeline ------------------------------------------------------------------------------------
#
# What every rank did and when: the steps of a run on a common clock.


# "wait" is the time in which a rank waits for transfers in the background, "repeat" all steps of a
# recurrence together.
KINDS = ("load", "exchange", "reduce", "kernel", "repeat", "store", "spill", "wait")


class Span(NamedTuple):
    """One step on one rank. Times are seconds since the run began, on a common clock."""

    rank: int
    kind: str  # one of KINDS
    vertex: str  # the tensor that is loaded, moved or made; of fused kernels the last one
    label: str  # the step on one line
    start: float
    end: float
    nbytes: int = 0  # received from others, read, written, or copied to or from scratch
    operations: int = 0  # of a kernel
    group: tuple[int, ...] = ()  # the ranks that exchange or reduce together
    to: int | None = None  # the next of them, in a ring, that gets something from this rank
    during: str = ""  # in which step of a loop, as text
    background: bool = False  # a transfer, while other spans of the rank went on


@dataclass(frozen=True)
class Timeline:
    """The spans of all ranks."""

    ranks: int
    seconds: float  # from the first start to the last end
    # By rank; of each rank those in the background come last, and both are sorted by start. In a
    # loop, this holds for each of its steps.
    spans: tuple[Span, ...]

    @property
    def has_background(self) -> bool:
        """Whether transfers went on in the background."""
        return any(span.background for span in self.spans)

    def meetings(self) -> list[dict[int, int]]:
        """Find the spans that belong to the same exchange or reduction of a group.

        Return a dictionary for each: from the ranks to the places of their spans in `spans`.
        """
        # By kind, tensor and group, and by number: a group may do the same several times.
        found: dict[tuple[Any, ...], dict[int, int]] = {}
        counts: Counter[tuple[int, Any]] = Counter()
        for place, span in enumerate(self.spans):
            if len(span.group) < 2:
                continue
            # The members of a group meet in the same order, so counting on each rank matches them.
            what = span.kind, span.vertex, span.group
            number = counts[span.rank, what]
            counts[span.rank, what] += 1
            found.setdefault((what, number), {})[span.rank] = place
        return list(found.values())


Times: TypeAlias = npt.NDArray[np.float64]


def is_reported(step: Step) -> bool:
    """Return whether a step is a span. A transfer in the background is one when it is done."""
    return bool(step.kind) and not step.background


def operations_of(step: Step) -> int:
    """Return the operations of all kernels of a step."""
    return sum(times * kernel.einsum.operations() for kernel, times in step.work)


def span_of(
    step: Step, rank: int, start: float, end: float, during: str = "", repeats: int = 1
) -> Span:
    """Return what a step does, and when; `repeats` of it in one span."""
    receiver = None
    if step.transfer is not None:
        receiver = next((rank for rank, _ in step.transfer.outgoing()), None)
    return Span(
        rank,
        step.kind,
        step.vertex,
        " ".join(str(step).split()),
        start,
        end,
        step.nbytes * repeats,
        operations_of(step) * repeats,
        step.group,
        receiver,
        during,
        bool(step.background),
    )


class TransferTime(NamedTuple):
    """When a transfer in the background began and ended."""

    step: Step
    start: float
    end: float


class Done(NamedTuple):
    """The steps that a rank has done one after another, and when each began and ended."""

    steps: Sequence[Step]
    starts: Times
    ends: Times
    transfers: Sequence[TransferTime]  # in the background


class Recorder:
    """Records the steps of a run. It is called at the start of each.

    All ranks call `begin` and `finish`; in between, a step costs no more than reading the clock.
    `wait` waits for kernels: on a GPU they outlast the step that starts them.
    """

    def __init__(
        self,
        comm: Comm,
        wait: Callable[[], None] = lambda: None,
        checkpoints: Checkpointer | None = None,
    ) -> None:
        self.comm = comm
        self.wait = wait
        self.checkpoints = checkpoints
        self.clocks: list[ClockReading] = []
        self.steps: list[Step] = []
        self.times: list[float] = []  # when each step began
        # Seconds that checkpoints and first uses, such as the compilation of kernels, had taken by
        # then: they do not count towards the step before.
        self.excluded: list[float] = []
        self.transfers: list[TransferTime] = []  # in the background

    def begin(self) -> None:
        self.clocks = compare_clocks(self.comm)

    def __call__(self, step: Step) -> None:
        self._note_time()
        self.steps.append(step)

    def _note_time(self) -> None:
        """Note that a step begins, or that the last one has ended."""
        self.wait()
        self.times.append(perf_counter())
        excluded = first_use_seconds()
        if self.checkpoints is not None:
            excluded += self.checkpoints.seconds
        self.excluded.append(excluded)

    def on_transfer(self, step: Step, start: float, end: float) -> None:
        """Note when a transfer in the background began and ended."""
        self.transfers.append(TransferTime(step, start, end))

    def taken(self) -> Done:
        """Return the steps so far, and forget them."""
        self._note_time()
        times = np.array(self.times)
        done = Done(self.steps, times[:-1], times[1:] - np.diff(self.excluded), self.transfers)
        self.steps = []
        self.transfers = []
        self.times.clear()
        self.excluded.clear()
        return done

    def gathered(self, own: Sequence[Span]) -> list[list[Span]]:
        """Return the spans of all ranks on rank 0, by its clock."""
        clocks_after = compare_clocks(self.comm)
        found = gather_spans(self.comm, own)
        if self.comm.rank > 0:
            return []
        moved = []
        for spans, before, after in zip(found, self.clocks, clocks_after, strict=True):
            times = np.array([(span.start, span.end) for span in spans]).reshape(-1, 2)
            times = on_first_clock(times, before, after)
            pairs = zip(spans, times.tolist(), strict=True)
            moved.append([span._replace(start=start, end=end) for span, (start, end) in pairs])
        return moved

    def finish(self) -> Timeline | None:
        """Return the timeline of all ranks on rank 0, None on the others."""
        found = self.gathered(spans_of(self.taken(), self.comm.rank))
        return timeline_of(found) if self.comm.rank == 0 else None


def spans_of(done: Done, rank: int, during: str = "", repeats: int = 1) -> list[Span]:
    """Return steps that have been done as spans; `repeats` of them in one span each.

    `during` says in which step of a loop that was.
    """
    times = done.starts.tolist(), done.ends.tolist()
    spans = []
    for step, start, end in zip(done.steps, *times, strict=True):
        if is_reported(step):
            spans.append(span_of(step, rank, start, end, during, repeats))
    for step, start, end in done.transfers:
        spans.append(span_of(step, rank, start, end, during, repeats))
    return spans


def gather_spans(comm: Comm, own: Sequence[Span]) -> list[Sequence[Span]]:
    """Return the spans of all ranks on rank 0. This does not count as data moved."""
    found = [own]
    with uncounted(comm):
        if comm.rank > 0:
            data = np.frombuffer(pickle.dumps(own), np.uint8)
            for part in (np.array([data.size]), data):
                comm.sendrecv(0, part, None, None)
            return []
        for rank in range(1, comm.size):
            size = np.empty(1, np.int64)
            comm.sendrecv(None, None, rank, size)
            data = np.empty(size[0], np.uint8)
            comm.sendrecv(None, None, rank, data)
            found.append(pickle.loads(data.tobytes()))
    return found


def timeline_of(spans_by_rank: Sequence[Sequence[Span]]) -> Timeline:
    """Put the spans of all ranks together. The run begins when its first step does."""
    begin = min((span.start for spans in spans_by_rank for span in spans), default=0.0)
    # Equal texts and groups are shared by all spans: a group may have as many members as there are
    # ranks.
    shared: dict[Any, Any] = {}
    found = []
    for span in itertools.chain.from_iterable(spans_by_rank):
        start = span.start - begin
        found.append(
            span._replace(
                vertex=shared.setdefault(span.vertex, span.vertex),
                label=shared.setdefault(span.label, span.label),
                group=shared.setdefault(span.group, span.group),
                start=start,
                end=max(start, span.end - begin),
            )
        )
    return Timeline(
        len(spans_by_rank), max((span.end for span in found), default=0.0), tuple(found)
    )


# ---- trace ---------------------------------------------------------------------------------------
#
# A timeline as a trace file for Perfetto or Chrome: a track for each rank, arrows for messages.


PROCESS = 1  # viewers take process 0 for the idle task of a system


def write_trace(file: str | os.PathLike[str], timeline: Timeline) -> None:
    """Write one event per line, so that a large trace need not be held in memory as a whole."""
    replace_file(file, (line.encode() for line in _lines(timeline)))


def _lines(timeline: Timeline) -> Iterator[str]:
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    separator = ""
    for event in events(timeline):
        yield separator + json.dumps(event, ensure_ascii=False)
        separator = ",\n"
    yield "\n]}\n"


def events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace: names of tracks, then spans, then arrows."""
    yield _event("M", "process_name", 0, args={"name": "einmpi"})
    for rank in range(timeline.ranks):
        yield _event("M", "thread_name", rank, args={"name": f"rank {rank}"})
        yield _event("M", "thread_sort_index", rank, args={"sort_index": rank})
    if timeline.has_background:
        for rank in range(timeline.ranks):
            track = timeline.ranks + rank
            yield _event("M", "thread_name", track, args={"name": f"rank {rank}, moving"})
            yield _event("M", "thread_sort_index", track, args={"sort_index": rank})
    timeline = replace(timeline, spans=tuple(_in_nanoseconds(timeline)))
    for span in timeline.spans:
        yield _span_event(span, _track_of(span, timeline))
    yield from _arrows(timeline)


def _track_of(span: Span, timeline: Timeline) -> int:
    """Return the track of a span: that of its rank, or the second one of its rank."""
    return span.rank + timeline.ranks if span.background else span.rank


def _span_event(span: Span, track: int) -> dict[str, Any]:
    args: dict[str, Any] = {"step": span.label}
    if span.during:
        args["loop"] = span.during
    if span.nbytes:
        args["bytes"] = span.nbytes
    if span.operations:
        args["operations"] = span.operations
    return _event(
        "X",
        span.vertex,
        track,
        cat=span.kind,
        ts=span.start / 1000,
        dur=(span.end - span.start) / 1000,
        args=args,
    )


def _in_nanoseconds(timeline: Timeline) -> Iterator[Span]:
    """Yield the spans in whole nanoseconds.

    On a track they do not overlap: viewers leave out those that do.
    """
    end_before: dict[int, int] = {}  # of the last span on each track
    for span in timeline.spans:
        track = _track_of(span, timeline)
        start = max(end_before.get(track, 0), round(span.start * 1e9))
        end = max(start, round(span.end * 1e9))
        end_before[track] = end
        yield span._replace(start=start, end=end)


def _arrows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield an arrow from each step that sends to one rank that receives, not to all of them.

    An arrow leaves at the start of its step. It arrives just before the end of the other step,
    because at the end itself the next step begins.
    """
    number = 0
    for members in timeline.meetings():
        for place in members.values():
            span = timeline.spans[place]
            if span.to is None or span.to not in members:
                continue
            receiver = timeline.spans[members[span.to]]
            leaves = span.start
            arrives = receiver.end - 1
            clocks_agree = leaves < span.end and max(receiver.start, leaves) <= arrives
            if not clocks_agree:
                continue
            number += 1
            shared = {"cat": span.kind, "id": number}
            track = _track_of(span, timeline)
            other = _track_of(receiver, timeline)
            yield _event("s", span.vertex, track, ts=leaves / 1000, **shared)
            yield _event("f", span.vertex, other, ts=arrives / 1000, bp="e", **shared)


def _event(phase: str, name: str, rank: int, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": PROCESS, "tid": rank, **more}
