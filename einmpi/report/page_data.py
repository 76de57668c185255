"""The data that the script of a report page draws from, in few bytes: layouts and the timeline."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.planner.plan import Plan
from einmpi.report.movement import LayoutUse, layouts_of
from einmpi.report.recording.timeline import KINDS, Timeline

MAX_SPANS = 250_000
MAX_LABEL_CHARACTERS = 1 << 20
MAX_READERS_NAMED = 3
REGION = re.compile(r"\[[^]]*:[^]]*\]")


def layouts_data(plan: Plan) -> dict[str, Any]:
    """Return the mesh, and of each tensor: name, dtype, bound, names of dimensions, layouts.

    A layout is a text that says when the tensor has it, and the cut of each mesh axis. The script
    works out the blocks from this as schedule/regions.py does; a test compares the two.
    """
    tensors = []
    for vertex in plan.graph.vertices:
        layouts = []
        for cuts, use in layouts_of(plan, vertex.name).items():
            layouts.append([_use_text(use), *cuts])
        dimensions = _dimensions(plan.graph, vertex)
        tensors.append([vertex.name, vertex.dtype, vertex.bound, dimensions, layouts])
    extents: set[int] = set()
    for vertex in plan.graph.vertices:
        extents.update(vertex.bound)
    return {
        "mesh": plan.mesh.factors,
        "windows": {str(extent): plan.mesh.windows(extent) for extent in sorted(extents)},
        "tensors": tensors,
    }


def _use_text(use: LayoutUse) -> str:
    """Return when a tensor has a layout: "made, kept; read by B, C, D and 3 more"."""
    parts = []
    if use.events:
        parts.append(", ".join(use.events))
    if use.readers:
        readers = f"read by {', '.join(use.readers[:MAX_READERS_NAMED])}"
        others = len(use.readers) - MAX_READERS_NAMED
        if others > 0:
            readers += f" and {others} more"
        parts.append(readers)
    return "; ".join(parts)


def _dimensions(graph: EinGraph, vertex: Vertex) -> list[str]:
    """Return the labels of a tensor's dimensions; those of an input come from its first reader."""
    if vertex.einsum is not None:
        return list(vertex.einsum.output)
    names = [f"dimension {number}" for number in range(len(vertex.bound))]
    readers = graph.consumers[vertex.name]
    if readers:
        reader = graph[readers[0]]
        index = reader.computed_einsum.operands[reader.inputs.index(vertex.name)]
        for number, entry in enumerate(index):
            if isinstance(entry, str):
                names[number] = entry
    return names


# ---- the timeline --------------------------------------------------------------------------------


class _SpanContent(NamedTuple):
    """What the page says about a span. Spans that do the same share it."""

    kind: str
    vertex: str
    label: str
    nbytes: int
    operations: int


@dataclass(frozen=True)
class _PageSpan:
    """A span in whole microseconds."""

    start: int
    end: int
    work: _SpanContent

    @property
    def length(self) -> int:
        return self.end - self.start


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """Return each distinct step once, and the spans of each rank in base 64.

    A span is three numbers: the gap before it, its length, and the number of its step relative to
    the step after that of the span before.
    """
    tracks, merged = _merge_down_to(_tracks(timeline), MAX_SPANS)
    numbers_of: dict[_SpanContent, int] = {}
    texts = []
    for track in tracks:
        numbers: list[int] = []
        end_before = 0
        step_before = -1
        for span in track:
            step = numbers_of.setdefault(span.work, len(numbers_of))
            numbers.append(_zigzag(span.start - end_before))
            numbers.append(span.length)
            numbers.append(_zigzag(step - step_before - 1))
            end_before = span.end
            step_before = step
        texts.append(base64.b64encode(_variable_length(numbers)).decode())
    steps = []
    for work in numbers_of:
        kind = KINDS.index(work.kind)
        steps.append([kind, work.vertex, work.label, work.nbytes, work.operations])
    return {
        "seconds": timeline.seconds,
        "kinds": KINDS,
        "steps": steps,
        "tracks": texts,
        "ranks": timeline.ranks,  # each has as many tracks; the second one is what moves meanwhile
        "merged": merged,
    }


def _tracks(timeline: Timeline) -> list[list[_PageSpan]]:
    origin = min((span.start for span in timeline.spans), default=0.0)
    tracks_per_rank = 2 if timeline.has_background else 1
    tracks: list[list[_PageSpan]] = [[] for _ in range(tracks_per_rank * timeline.ranks)]
    labels = _labels(timeline)
    for span in timeline.spans:
        start = round((span.start - origin) * 1e6)
        end = round((span.end - origin) * 1e6)
        label = labels[span.label]
        work = _SpanContent(span.kind, span.vertex, label, span.nbytes, span.operations)
        track = tracks_per_rank * span.rank + int(span.background)
        tracks[track].append(_PageSpan(start, max(start, end), work))
    return tracks


def _labels(timeline: Timeline) -> dict[str, str]:
    """Return each label on one line, and without regions if there is too much text.

    Regions make the labels of the same step differ from rank to rank.
    """
    lines = {span.label: " ".join(span.label.split()) for span in timeline.spans}
    if sum(map(len, lines)) <= MAX_LABEL_CHARACTERS:
        return lines
    return {label: REGION.sub("[…]", line) for label, line in lines.items()}


def _merge_down_to(tracks: list[list[_PageSpan]], most: int) -> tuple[list[list[_PageSpan]], int]:
    """Merge neighbouring short spans until at most so many are left.

    Return them, and the length in microseconds below which spans were merged.
    """
    limit = 0
    found = tracks
    while sum(map(len, found)) > most:
        limit = max(1, 2 * limit)
        found = [_merge_shorter_than(track, limit) for track in tracks]
        if limit > 1 << 50:  # each rank has one span by now: there are more ranks than spans wanted
            break
    return found, limit


def _merge_shorter_than(track: list[_PageSpan], limit: int) -> list[_PageSpan]:
    found: list[_PageSpan] = []
    for is_short, group in groupby(track, key=lambda span: span.length < limit):
        spans = list(group)
        if is_short and len(spans) > 1:
            found.append(_merged(spans))
        else:
            found += spans
    return found


def _merged(spans: list[_PageSpan]) -> _PageSpan:
    """Return one span of the kind that took longest."""
    time = dict.fromkeys(KINDS, -1)
    nbytes = 0
    operations = 0
    for span in spans:
        time[span.work.kind] = max(0, time[span.work.kind]) + span.length
        nbytes += span.work.nbytes
        operations += span.work.operations
    kind = max(KINDS, key=lambda each: time[each])
    work = _SpanContent(kind, "", f"{len(spans)} short steps", nbytes, operations)
    return _PageSpan(spans[0].start, spans[-1].end, work)


def _zigzag(number: int) -> int:
    """Map small numbers of either sign to small numbers that are not negative."""
    return 2 * number if number >= 0 else -2 * number - 1


def _variable_length(numbers: Iterable[int]) -> bytes:
    """Encode seven bits a byte, low bits first; the high bit says that more follow."""
    encoded = bytearray()
    for number in numbers:
        while number > 127:
            encoded.append(number & 127 | 128)
            number >>= 7
        encoded.append(number)
    return bytes(encoded)
