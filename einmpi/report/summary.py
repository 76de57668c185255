"""Where the time of a run went: computing, moving and waiting, vertex by vertex."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from einmpi.planner.text.explain import Row
from einmpi.planner.text.summary import Note
from einmpi.report.timeline import Timeline
from einmpi.units import show_bytes

_SHOWN = 20  # vertices that took longest


@dataclass(frozen=True)
class VertexTimes:
    """Seconds are the mean of the ranks that have steps; operations and bytes are those of all ranks."""

    name: str
    kernel: float = 0.0
    slowest_kernel: float = 0.0  # of the rank that computed longest
    communication: float = 0.0
    waiting: float = 0.0
    operations: int = 0
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        return self.kernel + self.communication + self.waiting

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "seconds_kernel": self.kernel,
            "seconds_communication": self.communication,
            "seconds_waiting": self.waiting,
            "operations": self.operations,
            "bytes": self.nbytes,
        }


def vertex_times(timeline: Timeline, names: Sequence[str]) -> tuple[VertexTimes, ...]:
    """Of every tensor that was computed or moved, in the order of `names`."""
    names = list(dict.fromkeys([*names, *(span.vertex for span in timeline.spans)]))
    busy = len({span.rank for span in timeline.spans}) or 1
    kernels: dict[str, dict[int, float]] = {name: {} for name in names}  # seconds of each rank
    moving, waiting = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    operations, nbytes = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    seen = set()
    for span, wait in zip(timeline.spans, _waits(timeline), strict=True):
        name, took = span.vertex, span.end - span.start
        if span.kind == "kernel":
            kernels[name][span.rank] = kernels[name].get(span.rank, 0.0) + took
            operations[name] += span.operations
        elif span.kind in ("exchange", "reduce"):
            waiting[name] += wait
            moving[name] += took - wait
            nbytes[name] += span.nbytes
        else:
            continue
        seen.add(name)
    return tuple(
        VertexTimes(
            name,
            sum(kernels[name].values()) / busy,
            max(kernels[name].values(), default=0.0),
            moving[name] / busy,
            waiting[name] / busy,
            operations[name],
            nbytes[name],
        )
        for name in names
        if name in seen
    )


def _waits(timeline: Timeline) -> list[float]:
    """Of each span: how long the rank was there before the last one of its group came."""
    found = [0.0] * len(timeline.spans)
    for members in timeline.meetings():
        last = max(timeline.spans[place].start for place in members.values())
        for place in members.values():
            span = timeline.spans[place]
            found[place] = min(last, span.end) - span.start
    return found


# ---- as a table -----------------------------------------------------------------------------------------------------


def summary_rows(vertices: Sequence[VertexTimes]) -> list[Row]:
    """A row for each of the slowest vertices, one for the others, one for all; the head first."""
    order = sorted(vertices, key=lambda each: -each.seconds)  # of equal ones the first stays so
    shown = order if len(order) <= _SHOWN + 1 else order[:_SHOWN]
    others = order[len(shown) :]
    rows = [*shown, *([_sum(f"{len(others)} others", others)] if others else ())]
    if len(order) > 1:
        rows.append(_sum("in all", order))
    head: Row = ("vertex", "computing s", "moving s", "waiting s", "GFLOP/s", "GB/s", "imbalance")
    return [head, *map(_row, rows)]


def summary_notes(peak: int, planned: int) -> list[Note]:
    return [("peak memory", f"{show_bytes(peak)} a rank, {show_bytes(planned)} planned")]


def _sum(name: str, vertices: Sequence[VertexTimes]) -> VertexTimes:
    return VertexTimes(
        name,
        sum(each.kernel for each in vertices),
        sum(each.slowest_kernel for each in vertices),
        sum(each.communication for each in vertices),
        sum(each.waiting for each in vertices),
        sum(each.operations for each in vertices),
        sum(each.nbytes for each in vertices),
    )


def _row(vertex: VertexTimes) -> Row:
    return (
        vertex.name,
        f"{vertex.kernel:.4f}",
        f"{vertex.communication:.4f}",
        f"{vertex.waiting:.4f}",
        _rate(vertex.operations, vertex.kernel),
        _rate(vertex.nbytes, vertex.communication),
        f"{vertex.slowest_kernel / vertex.kernel:.2f}" if vertex.kernel else "–",
    )


def _rate(amount: int, seconds: float) -> str:
    if not amount or not seconds:
        return "–"
    rate = amount / seconds / 1e9
    return f"{rate:.1f}" if rate >= 0.1 else f"{rate:.1g}"
