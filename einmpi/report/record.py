"""A recorder of when a rank does its steps. Rank 0 gathers the records of all ranks."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Span:
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


class _Meeting(NamedTuple):
    """One exchange or reduction of a group of ranks."""

    kind: str
    vertex: str
    group: tuple[int, ...]
    number: int  # the group may do the same several times


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
        found: dict[_Meeting, dict[int, int]] = {}
        counts: Counter[tuple[int, str, str, tuple[int, ...]]] = Counter()
        for place, span in enumerate(self.spans):
            if len(span.group) < 2:
                continue
            # The members of a group meet in the same order, so counting on each rank matches them.
            key = span.rank, span.kind, span.vertex, span.group
            meeting = _Meeting(span.kind, span.vertex, span.group, counts[key])
            counts[key] += 1
            found.setdefault(meeting, {})[span.rank] = place
        return list(found.values())


Times: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Work:
    """What a step does, and how much of it."""

    kind: str
    vertex: str
    nbytes: int = 0
    operations: int = 0
    group: tuple[int, ...] = ()
    to: int | None = None


def work_of(step: Step) -> Work | None:
    """Return what a step is about; None for a step that reports leave out."""
    if not step.kind or step.background:
        return None  # transfers in the background are recorded when they are done
    return _work_of(step)


def _work_of(step: Step) -> Work:
    operations = sum(times * kernel.einsum.operations() for kernel, times in step.work)
    receiver = None
    if step.transfer is not None:
        receiver = next((rank for rank, _ in step.transfer.outgoing()), None)
    return Work(step.kind, step.vertex, step.nbytes, operations, step.group, receiver)


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

    def gathered(self, own: OwnSpans) -> list[Record]:
        """Return the spans of all ranks on rank 0, by its clock."""
        clocks_after = compare_clocks(self.comm)
        records = gather_records(self.comm, own.record())
        if self.comm.rank == 0:
            for record, before, after in zip(records, self.clocks, clocks_after, strict=True):
                record.times = on_first_clock(record.times, before, after)
        return records

    def finish(self) -> Timeline | None:
        """Return the timeline of all ranks on rank 0, None on the others."""
        own = OwnSpans()
        own.add(self.taken())
        records = self.gathered(own)
        return timeline_of([[record] for record in records]) if self.comm.rank == 0 else None


class OwnSpans:
    """The spans of this rank, in the form in which it sends them."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}  # each with its number
        self.groups: dict[tuple[int, ...], int] = {}
        self.times: list[tuple[float, float]] = []
        self.rows: list[tuple[int, ...]] = []

    def add(self, done: Done, during: str = "", repeats: int = 1) -> None:
        """Add steps that have been done; `repeats` of them in one span each.

        `during` says in which step of a loop that was.
        """
        times = done.starts.tolist(), done.ends.tolist()
        for step, start, end in zip(done.steps, *times, strict=True):
            work = work_of(step)
            if work is not None:
                self._add(step, work, start, end, during, repeats)
        for step, start, end in done.transfers:
            self._add(step, _work_of(step), start, end, during, repeats)

    def _add(
        self, step: Step, work: Work, start: float, end: float, during: str, repeats: int
    ) -> None:
        row = (
            KINDS.index(work.kind),
            self._number_of(work.vertex),
            self._number_of(" ".join(str(step).split())),
            self._number_of(during),
            work.nbytes * repeats,
            work.operations * repeats,
            self.groups.setdefault(work.group, len(self.groups)),
            _NO_RECEIVER if work.to is None else work.to,
            int(step.background),
        )
        self.rows.append(row)
        self.times.append((start, end))

    def _number_of(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))

    def record(self) -> Record:
        times = np.array(self.times).reshape(-1, 2)
        rows = np.array(self.rows, np.int64).reshape(-1, _COLUMNS)
        index = json.dumps([list(self.texts), list(self.groups)]).encode()
        return Record(times, rows, index)


_COLUMNS = 9  # kind, vertex, label, during, bytes, operations, group, to, background
_NO_RECEIVER = -1  # for steps that send nothing to a single rank


@dataclass
class Record:
    """The spans of a rank in the form in which it sends them."""

    times: Times  # start and end of each span
    numbers: npt.NDArray[np.int64]  # _COLUMNS of each; texts and group refer to the index
    index: bytes  # JSON: each text once, each group once


def gather_records(comm: Comm, own: Record) -> list[Record]:
    """Return the records of all ranks on rank 0. This does not count as data moved."""
    records = [own]
    with uncounted(comm):
        if comm.rank > 0:
            _send(comm, own)
        else:
            for rank in range(1, comm.size):
                records.append(_receive(comm, rank))
    return records


def _send(comm: Comm, record: Record) -> None:
    index = np.frombuffer(record.index, np.uint8)
    sizes = np.array([len(record.times), index.size])
    for part in (sizes, record.times.ravel(), record.numbers.ravel(), index):
        comm.sendrecv(0, part, None, None)


def _receive(comm: Comm, rank: int) -> Record:
    sizes = np.empty(2, np.int64)
    comm.sendrecv(None, None, rank, sizes)
    count, length = map(int, sizes)
    times = np.empty(2 * count)
    numbers = np.empty(_COLUMNS * count, np.int64)
    index = np.empty(length, np.uint8)
    for part in (times, numbers, index):
        comm.sendrecv(None, None, rank, part)
    return Record(times.reshape(-1, 2), numbers.reshape(-1, _COLUMNS), index.tobytes())


def timeline_of(records: Sequence[Sequence[Record]]) -> Timeline:
    """Put the records of all ranks together. The run begins when its first step does.

    Each rank has one or several records, one after another.
    """
    starts = []
    for own_records in records:
        starts += [float(record.times.min()) for record in own_records if record.times.size]
    begin = min(starts, default=0.0)
    # Equal texts and groups are shared by all spans: a group may have as many members as there are
    # ranks.
    shared_texts: dict[str, str] = {}
    shared_groups: dict[tuple[int, ...], tuple[int, ...]] = {}
    spans: list[Span] = []
    for rank, own_records in enumerate(records):
        for record in own_records:
            spans += _spans_of(rank, record, begin, shared_texts, shared_groups)
    return Timeline(len(records), max((span.end for span in spans), default=0.0), tuple(spans))


def _spans_of(
    rank: int,
    record: Record,
    begin: float,
    shared_texts: dict[str, str],
    shared_groups: dict[tuple[int, ...], tuple[int, ...]],
) -> list[Span]:
    own_texts, own_groups = json.loads(record.index)
    texts = [shared_texts.setdefault(text, text) for text in own_texts]
    groups = []
    for members in map(tuple, own_groups):
        groups.append(shared_groups.setdefault(members, members))
    times = (record.times - begin).tolist()
    spans = []
    for (start, end), row in zip(times, record.numbers.tolist(), strict=True):
        kind, vertex, label, during, nbytes, operations, group, to, background = row
        span = Span(
            rank,
            KINDS[kind],
            texts[vertex],
            texts[label],
            start,
            max(start, end),
            nbytes,
            operations,
            groups[group],
            None if to == _NO_RECEIVER else to,
            texts[during],
            bool(background),
        )
        spans.append(span)
    return spans


# ---- trace ---------------------------------------------------------------------------------------
#
# A timeline as a trace file for Perfetto or Chrome: a track for each rank, arrows for messages.


PROCESS = 1  # viewers take process 0 for the idle task of a system


@dataclass(frozen=True)
class _TraceTimes:
    """When a span starts and ends, in whole nanoseconds."""

    start: int
    end: int


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
    ticks = _ticks(timeline)
    for span, tick in zip(timeline.spans, ticks, strict=True):
        yield _span_event(span, tick, _track_of(span, timeline))
    yield from _arrows(timeline, ticks)


def _track_of(span: Span, timeline: Timeline) -> int:
    """Return the track of a span: that of its rank, or the second one of its rank."""
    return span.rank + timeline.ranks if span.background else span.rank


def _span_event(span: Span, tick: _TraceTimes, track: int) -> dict[str, Any]:
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
        ts=tick.start / 1000,
        dur=(tick.end - tick.start) / 1000,
        args=args,
    )


def _ticks(timeline: Timeline) -> list[_TraceTimes]:
    """Round times so that spans on a track do not overlap: viewers leave out those that do."""
    found = []
    end_before: dict[int, int] = {}  # of the last span on each track
    for span in timeline.spans:
        track = _track_of(span, timeline)
        start = max(end_before.get(track, 0), round(span.start * 1e9))
        end = max(start, round(span.end * 1e9))
        end_before[track] = end
        found.append(_TraceTimes(start, end))
    return found


def _arrows(timeline: Timeline, ticks: list[_TraceTimes]) -> Iterator[dict[str, Any]]:
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
            sender = ticks[place]
            receiver = ticks[members[span.to]]
            leaves = sender.start
            arrives = receiver.end - 1
            clocks_agree = leaves < sender.end and max(receiver.start, leaves) <= arrives
            if not clocks_agree:
                continue
            number += 1
            shared = {"cat": span.kind, "id": number}
            track = _track_of(span, timeline)
            other = _track_of(timeline.spans[members[span.to]], timeline)
            yield _event("s", span.vertex, track, ts=leaves / 1000, **shared)
            yield _event("f", span.vertex, other, ts=arrives / 1000, bp="e", **shared)


def _event(phase: str, name: str, rank: int, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": PROCESS, "tid": rank, **more}
