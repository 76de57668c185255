"""When every rank did its steps in a replay: the timeline that reports and trace files show."""

from __future__ import annotations

from array import array

import numpy as np

from einmpi.report.recording.record import OwnSpans, Record, timeline_of
from einmpi.report.recording.timeline import Timeline
from einmpi.simulate.trace_comm import TraceComm

# SimGrid says when each action of a rank is done, and a step is some actions in a row: it lasts
# from the end of the action before its first one to the end of its last one. The first line of a
# trace, init, and the last one, finalize, take no time and are not reported.
_LINES_BEFORE = 1


class StepTimes:
    """Collects the steps of all ranks before a replay, and the times of their actions in it."""

    def __init__(self) -> None:
        # Spans whose times are still numbers of actions.
        self.records: list[Record] = []
        self.ends: list[array[float]] = []  # of each rank: when it has done so many actions

    def add_rank(self, trace: TraceComm) -> None:
        """Note the steps of the next rank."""
        lines = [number for number, _ in trace.steps]
        borders = np.array([*lines, len(trace.lines) - 1], float) - _LINES_BEFORE
        own = OwnSpans()
        own.add([step for _, step in trace.steps], borders[:-1], borders[1:])
        self.records.append(own.record())
        self.ends.append(array("d", [0.0]))

    def on_action(self, rank: int, end: float) -> None:
        """Note that a rank has done its next action."""
        self.ends[rank].append(end)

    def timeline(self) -> Timeline:
        """Return the timeline, after the replay."""
        for record, ends in zip(self.records, self.ends, strict=True):
            record.times = np.array(ends)[record.times.astype(np.intp)]
        return timeline_of([[record] for record in self.records])
