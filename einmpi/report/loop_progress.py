"""How far a loop has come: its steps and the values that it records, by rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy.typing as npt

from einmpi.comm.base import Comm
from einmpi.process.abort import on_abort
from einmpi.report.progress import Progress
from einmpi.schedule.schedule import Schedule
from einmpi.schedule.steps import Step

OnStep: TypeAlias = Callable[[Step], None]
OnRow: TypeAlias = Callable[[int, Mapping[str, npt.NDArray[Any]]], None]


class LoopProgress:
    """Shows the steps of a loop, and notes for a launcher which step a rank is in."""

    def __init__(
        self, comm: Comm, schedule: Schedule, steps: int, quiet: bool, which: str = ""
    ) -> None:
        self.steps = steps
        self.which = which  # of several loops, as a text before the step
        self.progress: Progress | None = None
        if comm.rank == 0 and not quiet:
            self.progress = Progress(comm, schedule, steps)

    @contextmanager
    def shown(self, note: Callable[[str], None]) -> Iterator[tuple[OnStep | None, OnRow]]:
        """Show progress in a with block.

        Yield the functions to call at the start of each step of the schedule, and at the end of
        each step of the loop.
        """

        def on_row(number: int, row: Mapping[str, npt.NDArray[Any]]) -> None:
            text = f"{self.which}step {number + 1} of {self.steps}"
            note(text)
            if self.progress is not None:
                self.progress.note = lambda: _row_text(text, row)

        note(f"{self.which}step 0 of {self.steps}")
        if self.progress is None:
            yield None, on_row
            return
        self.progress.open()
        with on_abort(self.progress.close):
            try:
                yield self.progress, on_row
            finally:
                self.progress.close()


def _row_text(step: str, row: Mapping[str, npt.NDArray[Any]]) -> str:
    values = [f"{name} {value.item():.6g}" for name, value in row.items()]
    return "  ".join([step, *values])
