"""A timeline as a trace file for Perfetto or Chrome: a track for each rank, arrows for messages."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from einmpi.files.replace import replace_file
from einmpi.report.recording.timeline import Span, Timeline

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
