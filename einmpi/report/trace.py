"""A timeline as a trace file that Perfetto and Chrome show: one track a rank, arrows where ranks send to each other."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from einmpi.files.replace import replace_file
from einmpi.report.timeline import Timeline

_PROCESS = 1  # viewers take process 0 for the idle task of a system
Ticks = list[tuple[int, int]]  # start and end of each span, in whole nanoseconds


def write_trace(file: str | os.PathLike[str], timeline: Timeline) -> None:
    """An event a line: traces are large, and so neither this program nor others need all of it at once."""
    replace_file(file, (line.encode() for line in _lines(timeline)))


def _lines(timeline: Timeline) -> Iterator[str]:
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    separator = ""
    for event in events(timeline):
        yield separator + json.dumps(event, ensure_ascii=False)
        separator = ",\n"
    yield "\n]}\n"


def events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _event("M", "process_name", 0, args={"name": "einmpi"})
    for rank in range(timeline.ranks):
        yield _event("M", "thread_name", rank, args={"name": f"rank {rank}"})
        yield _event("M", "thread_sort_index", rank, args={"sort_index": rank})
    ticks = _ticks(timeline)
    for span, (start, end) in zip(timeline.spans, ticks, strict=True):
        amounts = {"bytes": span.nbytes, "operations": span.operations}
        args = {"step": span.label} | {name: amount for name, amount in amounts.items() if amount}
        yield _event(
            "X",
            span.vertex,
            span.rank,
            cat=span.kind,
            ts=start / 1000,
            dur=(end - start) / 1000,
            args=args,
        )
    yield from _arrows(timeline, ticks)


def _ticks(timeline: Timeline) -> Ticks:
    """Nothing on a track overlaps, also where rounding would have it so: viewers leave out what does."""
    found: Ticks = []
    last, now = -1, 0
    for span in timeline.spans:
        if span.rank != last:
            last, now = span.rank, 0
        start = max(now, round(span.start * 1e9))
        now = max(start, round(span.end * 1e9))
        found.append((start, now))
    return found


def _arrows(timeline: Timeline, ticks: Ticks) -> Iterator[dict[str, Any]]:
    """From each step that sends to the same step of one rank that receives: all pairs would hide everything.

    An arrow leaves at the start of its step, and arrives just before the end of the other one: at the end itself the
    next step begins.
    """
    number = 0
    for members in timeline.meetings():
        for place in members.values():
            span = timeline.spans[place]
            if span.to is None or span.to not in members:
                continue
            (leaves, left), (came, gone) = ticks[place], ticks[members[span.to]]
            arrives = gone - 1
            if (
                leaves < left and max(came, leaves) <= arrives
            ):  # else the clocks were not good enough
                number += 1
                yield _event(
                    "s", span.vertex, span.rank, cat=span.kind, ts=leaves / 1000, id=number
                )
                yield _event(
                    "f", span.vertex, span.to, cat=span.kind, ts=arrives / 1000, id=number, bp="e"
                )


def _event(phase: str, name: str, rank: int, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": _PROCESS, "tid": rank, **more}
