"""Records when a rank does its steps, and gathers the records of all ranks on rank 0."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from einmpi.checkpoint.save import Checkpoints
from einmpi.comm.base import Comm, uncounted
from einmpi.comm.clocks import Reading, compare_clocks, on_first_clock
from einmpi.report.timeline import KINDS, Span, Timeline
from einmpi.schedule.steps import Step


@dataclass(frozen=True)
class Work:
    """What a step is about, and how much it is."""

    kind: str
    vertex: str
    nbytes: int = 0
    operations: int = 0
    group: tuple[int, ...] = ()
    to: int | None = None


def work_of(step: Step) -> Work | None:
    """Return what a step is about; None for a step that reports leave out."""
    if not step.kind:
        return None
    operations = sum(kernel.einsum.operations() for kernel in step.kernels)
    receiver = None
    if step.transfer is not None:
        receiver = next((rank for rank, _ in step.transfer.outgoing()), None)
    return Work(step.kind, step.vertex, step.nbytes, operations, step.group, receiver)


class Recorder:
    """Hears of the steps of one run. Between `begin` and `finish`, which all ranks call, it only notes the time."""

    def __init__(self, comm: Comm, checkpoints: Checkpoints | None = None) -> None:
        self.comm, self.checkpoints = comm, checkpoints
        self.steps: list[Step] = []
        self.times: list[float] = []
        self.saving: list[
            float
        ] = []  # seconds that checkpoints have taken so far: no part of the step before
        self.clocks: list[Reading] = []

    def __call__(self, step: Step) -> None:
        self.times.append(perf_counter())
        self.steps.append(step)
        if self.checkpoints is not None:
            self.saving.append(self.checkpoints.seconds)

    def begin(self) -> None:
        self.clocks = compare_clocks(self.comm)

    def finish(self) -> Timeline | None:
        """The timeline of all ranks, on rank 0."""
        self.times.append(perf_counter())
        if self.checkpoints is not None:
            self.saving.append(self.checkpoints.seconds)
        own = self._rows()
        after = compare_clocks(self.comm)
        records = _to_first(self.comm, own)
        if self.comm.rank > 0:
            return None
        for record, before, later in zip(records, self.clocks, after, strict=True):
            record.times = on_first_clock(record.times, before, later)
        return _timeline(records)

    def _rows(self) -> _Record:
        texts: dict[str, int] = {}
        groups: dict[tuple[int, ...], int] = {}
        ends = np.array(self.times[1:])
        if self.saving:
            ends -= np.diff(self.saving)
        times, rows = [], []
        for step, start, end in zip(self.steps, self.times, ends.tolist(), strict=False):
            work = work_of(step)
            if work is not None:
                label = " ".join(str(step).split())
                vertex, line = (texts.setdefault(text, len(texts)) for text in (work.vertex, label))
                group, to = (
                    groups.setdefault(work.group, len(groups)),
                    -1 if work.to is None else work.to,
                )
                rows.append(
                    (KINDS.index(work.kind), vertex, line, work.nbytes, work.operations, group, to)
                )
                times.append((start, end))
        index = json.dumps([list(texts), list(groups)]).encode()
        return _Record(
            np.array(times).reshape(-1, 2), np.array(rows, np.int64).reshape(-1, _COLUMNS), index
        )


_COLUMNS = 7  # kind, vertex, label, bytes, operations, group, to


@dataclass
class _Record:
    """The spans of a rank, as it sends them."""

    times: np.ndarray  # start and end of each
    numbers: np.ndarray  # _COLUMNS of each; vertex, label and group are places in the index
    index: bytes  # JSON: each text once, each group once


def _to_first(comm: Comm, own: _Record) -> list[_Record]:
    """Those of all ranks, on rank 0; not counted as moved."""
    records = [own]
    with uncounted(comm):
        if comm.rank > 0:
            index = np.frombuffer(own.index, np.uint8)
            for part in (
                np.array([len(own.times), index.size]),
                own.times.ravel(),
                own.numbers.ravel(),
                index,
            ):
                comm.sendrecv(0, part, None, None)
        for rank in range(1, comm.size) if comm.rank == 0 else ():
            sizes = np.empty(2, np.int64)
            comm.sendrecv(None, None, rank, sizes)
            count, length = map(int, sizes)
            times, numbers = np.empty(2 * count), np.empty(_COLUMNS * count, np.int64)
            index = np.empty(length, np.uint8)
            for part in (times, numbers, index):
                comm.sendrecv(None, None, rank, part)
            records.append(
                _Record(times.reshape(-1, 2), numbers.reshape(-1, _COLUMNS), index.tobytes())
            )
    return records


def _timeline(records: Sequence[_Record]) -> Timeline:
    """The run begins when the first rank does. Ranks share what is alike: a group may have as many members as there are
    ranks."""
    first = min((float(record.times.min()) for record in records if record.times.size), default=0.0)
    shared: dict[Any, Any] = {}
    spans = []
    for rank, record in enumerate(records):
        texts, lists = json.loads(record.index)
        texts = [shared.setdefault(text, text) for text in texts]
        groups = [shared.setdefault(group, group) for group in map(tuple, lists)]
        for (start, end), row in zip(
            (record.times - first).tolist(), record.numbers.tolist(), strict=True
        ):
            kind, vertex, label, nbytes, operations, group, to = row
            spans.append(
                Span(
                    rank,
                    KINDS[kind],
                    texts[vertex],
                    texts[label],
                    start,
                    max(start, end),
                    nbytes,
                    operations,
                    groups[group],
                    None if to < 0 else to,
                )
            )
    return Timeline(len(records), max((span.end for span in spans), default=0.0), tuple(spans))
