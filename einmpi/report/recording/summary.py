"""Where the time of a run went, vertex by vertex: computing, moving and waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from einmpi.planner.text.summary import Note, Row
from einmpi.report.recording.record import Span, Timeline
from einmpi.units import show_bytes, show_count

MAX_ROWS = 20  # vertices that have a row of their own: those that took longest


@dataclass(frozen=True)
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


@dataclass
class _Sums:
    """What all spans of a tensor add up to."""

    kernel: dict[int, float] = field(default_factory=dict)  # seconds of each rank
    communication: float = 0.0
    waiting: float = 0.0
    hidden: float = 0.0
    operations: int = 0
    nbytes: int = 0

    def add(self, span: Span, waited: float) -> None:
        """Add a span, in which its rank waited for the last one of its group.

        Of a transfer in the background, this is how long the rank waited for the transfer itself.
        """
        took = span.end - span.start
        if span.background:
            self.hidden += took - waited
            self.communication += waited
            self.nbytes += span.nbytes
        elif span.kind == "kernel":
            self.kernel[span.rank] = self.kernel.get(span.rank, 0.0) + took
            self.operations += span.operations
        else:
            self.waiting += waited
            self.communication += took - waited
            self.nbytes += span.nbytes

    def times(self, name: str, ranks: int) -> VertexTimes:
        return VertexTimes(
            name,
            kernel=sum(self.kernel.values()) / ranks,
            slowest_kernel=max(self.kernel.values(), default=0.0),
            communication=self.communication / ranks,
            waiting=self.waiting / ranks,
            operations=self.operations,
            nbytes=self.nbytes,
            hidden=self.hidden / ranks,
        )


def vertex_times(timeline: Timeline, names: Sequence[str]) -> tuple[VertexTimes, ...]:
    """Return the times of every tensor that was computed or moved, in the order of `names`."""
    sums: dict[str, _Sums] = {}
    for span, waited in zip(timeline.spans, _waits(timeline), strict=True):
        if span.kind in ("kernel", "exchange", "reduce"):
            sums.setdefault(span.vertex, _Sums()).add(span, waited)
    busy_ranks = len({span.rank for span in timeline.spans})
    known = set(names)
    order = [name for name in names if name in sums]
    order += [name for name in sums if name not in known]
    return tuple(sums[name].times(name, busy_ranks) for name in order)


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
        shown.append(_total(f"{len(others)} others", others))
    if len(order) > 1:
        shown.append(_total("in all", order))
    heads: Row = ("vertex", "computing s", "moving s", "waiting s", "GFLOP/s", "GB/s", "imbalance")
    has_hidden = any(vertex.hidden for vertex in shown)
    if has_hidden:
        heads += ("hidden s",)
    if any(vertex.words is not None for vertex in shown):
        heads += ("words",)
    return [heads, *(_row(vertex, has_hidden) for vertex in shown)]


def summary_notes(peak: int, planned: int) -> list[Note]:
    return [("peak memory", f"{show_bytes(peak)} a rank, {show_bytes(planned)} planned")]


def _total(name: str, vertices: Sequence[VertexTimes]) -> VertexTimes:
    first, *others = vertices
    total = replace(first, name=name)
    for vertex in others:
        words = None
        if total.words is not None:
            words = total.words + (vertex.words or 0)
        total = VertexTimes(
            name,
            total.kernel + vertex.kernel,
            total.slowest_kernel + vertex.slowest_kernel,
            total.communication + vertex.communication,
            total.waiting + vertex.waiting,
            total.operations + vertex.operations,
            total.nbytes + vertex.nbytes,
            words,
            total.hidden + vertex.hidden,
        )
    return total


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
