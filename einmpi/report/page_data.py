"""The numbers that the script of a report page draws from: layouts of tensors, and the timeline, in few bytes."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.planner.make_plan import Plan
from einmpi.report.movement import ways_it_lies
from einmpi.report.timeline import KINDS, Timeline

MOST_SPANS = 250_000
MOST_LABELS = 1 << 20  # characters
USERS_NAMED = 3


def layouts_data(plan: Plan) -> dict[str, Any]:
    """For each tensor: name, dtype, bound, names of dimensions, and its layouts as (when, cut of each mesh axis).

    The script works out the blocks from this, in the way of schedule/regions.py; a test compares the two.
    """
    tensors = []
    for vertex in plan.graph.vertices:
        layouts = [[_when(*when), *cuts] for cuts, when in ways_it_lies(plan, vertex.name).items()]
        tensors.append(
            [vertex.name, vertex.dtype, vertex.bound, _dimensions(plan.graph, vertex), layouts]
        )
    extents = sorted({extent for vertex in plan.graph.vertices for extent in vertex.bound})
    return {
        "mesh": plan.mesh.factors,
        "windows": {str(e): plan.mesh.windows(e) for e in extents},
        "tensors": tensors,
    }


def _when(made: Sequence[str], users: Sequence[str]) -> str:
    """ "made, kept; for B, C and 3 more"."""
    more = f" and {len(users) - USERS_NAMED} more" if len(users) > USERS_NAMED else ""
    readers = [f"for {', '.join(users[:USERS_NAMED])}{more}"] if users else []
    return "; ".join([*([", ".join(made)] if made else []), *readers])


def _dimensions(graph: EinGraph, vertex: Vertex) -> list[str]:
    """Labels of the dimensions: a computed tensor's own, of an input those with which it is read first."""
    if vertex.einsum is not None:
        return list(vertex.einsum.output)
    for name in graph.consumers[vertex.name][:1]:
        user = graph[name]
        assert user.einsum is not None
        index = user.einsum.operands[user.inputs.index(vertex.name)]
        return [
            entry if isinstance(entry, str) else f"dimension {k}" for k, entry in enumerate(index)
        ]
    return [f"dimension {k}" for k in range(len(vertex.bound))]


# ---- the timeline ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ticks:
    """A span in whole microseconds."""

    start: int
    end: int
    step: tuple[str, str, str, int, int]  # kind, vertex, label, bytes, operations


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """Each distinct step once; each rank's spans as text: numbers of few bytes each, in base 64.

    A span is three numbers: the gap before it, its length, and the number of its step less that of the last one.
    """
    origin = min((span.start for span in timeline.spans), default=0.0)
    tracks: list[list[_Ticks]] = [[] for _ in range(timeline.ranks)]
    labels = _labels(timeline)
    for span in timeline.spans:
        start, end = round((span.start - origin) * 1e6), round((span.end - origin) * 1e6)
        what = span.kind, span.vertex, labels[span.label], span.nbytes, span.operations
        tracks[span.rank].append(_Ticks(start, max(start, end), what))
    tracks, merged = _few(tracks, MOST_SPANS)
    steps: dict[tuple[str, str, str, int, int], int] = {}
    texts = []
    for track in tracks:
        numbers: list[int] = []
        before, last = 0, -1
        for each in track:
            step = steps.setdefault(each.step, len(steps))
            numbers += (
                _zigzag(each.start - before),
                each.end - each.start,
                _zigzag(step - last - 1),
            )
            before, last = each.end, step
        texts.append(base64.b64encode(bytes(_bytes(numbers))).decode())
    return {
        "seconds": timeline.seconds,
        "kinds": KINDS,
        "steps": [[KINDS.index(kind), *rest] for kind, *rest in steps],
        "tracks": texts,
        "merged": merged,
    }


def _labels(timeline: Timeline) -> dict[str, str]:
    """Each label as it is shown: in one line; without regions, which differ from rank to rank, where it is too much."""
    lines = {span.label: " ".join(span.label.split()) for span in timeline.spans}
    if sum(map(len, lines)) <= MOST_LABELS:
        return lines
    return {label: re.sub(r"\[[^]]*:[^]]*\]", "[…]", line) for label, line in lines.items()}


def _few(tracks: list[list[_Ticks]], most: int) -> tuple[list[list[_Ticks]], int]:
    """At most so many spans: neighbours shorter than some time become one. (tracks, that time in microseconds)."""
    short, found = 0, tracks
    while sum(map(len, found)) > most:
        short = max(1, 2 * short)
        found = [_merged(track, short) for track in tracks]
        if short > 1 << 50:  # all are one by now; there are as many ranks as that
            break
    return found, short


def _merged(track: list[_Ticks], short: int) -> list[_Ticks]:
    found: list[_Ticks] = []
    for is_short, group in groupby(track, key=lambda each: each.end - each.start < short):
        spans = list(group)
        if not is_short or len(spans) == 1:
            found += spans
            continue
        time: dict[str, int] = {}
        for each in spans:
            time[each.step[0]] = time.get(each.step[0], 0) + each.end - each.start
        longest = max(KINDS, key=lambda kind: time.get(kind, -1))
        nbytes, operations = (
            sum(each.step[3] for each in spans),
            sum(each.step[4] for each in spans),
        )
        step = (longest, "", f"{len(spans)} short steps", nbytes, operations)
        found.append(_Ticks(spans[0].start, spans[-1].end, step))
    return found


def _zigzag(number: int) -> int:
    """Small numbers of either sign as small numbers."""
    return 2 * number if number >= 0 else -2 * number - 1


def _bytes(numbers: Iterable[int]) -> Iterator[int]:
    """Seven bits a byte, the low ones first; the high bit says that more follow."""
    for number in numbers:
        while number > 127:
            yield number & 127 | 128
            number >>= 7
        yield number
