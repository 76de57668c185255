"""The history of a loop: a row of recorded values for every step, in a file while it runs.

A killed run leaves the rows that it has written. What validations have found so far follows from
the history, so a run that is resumed knows it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from math import isnan, nan
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.errors import EinmpiError
from einmpi.files.atomic import FAILURES, cannot_write, draft_path, make_draft, publish, reason_of
from einmpi.files.claims import Claim
from einmpi.files.hdf5.opening import GrowingTable, draft_table
from einmpi.graph.dtypes import DTYPES
from einmpi.job.batches import Validation
from einmpi.job.outputs import HistorySpec

# HDF5 takes about a millisecond to write rows, however many.
SECONDS_BETWEEN_WRITES = 0.1

Array: TypeAlias = npt.NDArray[Any]


class Validated:
    """The numbers of the last validation, and which one was the best so far."""

    def __init__(self, validation: Validation, rows: Mapping[str, Any]) -> None:
        self.validation = validation
        self.last = dict.fromkeys(validation.columns, nan)
        self.last_step: int | None = None
        self.best = nan  # the first number of the best one
        self.best_step: int | None = None
        self.since_best = 0
        for step in range(len(rows[validation.columns[0]])):
            numbers = {name: float(rows[name][step]) for name in validation.columns}
            was_validated = not all(map(isnan, numbers.values()))
            if was_validated or validation.is_due(step, False):
                self.add(step, numbers)

    def add(self, step: int, numbers: Mapping[str, float]) -> bool:
        """Note the numbers of the validation after a step; return whether it is the best so far."""
        self.last = dict(numbers)
        self.last_step = step
        number = numbers[self.validation.columns[0]]
        is_better = number < self.best if self.validation.goal == "min" else number > self.best
        if self.best_step is None or is_better or (isnan(self.best) and not isnan(number)):
            self.best = number
            self.best_step = step
            self.since_best = 0
            return True
        self.since_best += 1
        return False

    @property
    def readable(self) -> dict[str, Array]:
        """The numbers that a condition may read, by name."""
        numbers = (*self.last.values(), self.best, self.since_best)
        found = {}
        for (name, dtype), number in zip(self.validation.readable.items(), numbers, strict=True):
            found[name] = np.array(number, dtype)
        return found


class CsvHistory:
    """A history in CSV. Each row is written at once, with all digits. Only rank 0 writes it."""

    def __init__(self, spec: HistorySpec, claim: Claim) -> None:
        self.spec = spec
        self.claim = claim
        self.descriptor: int | None = None

    def start(self, rows: Mapping[str, Array]) -> None:
        """Begin the table anew, with the rows of the steps that are done."""
        lines = [",".join(["step", *rows]) + "\n"]
        columns = list(rows.values())
        for step in range(len(columns[0])):
            lines.append(_csv_line(step, [column[step] for column in columns]))
        try:
            draft, target = _new_draft(self.spec, self.claim)
            with open(draft, "w", encoding="utf-8") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
            with self.claim.publishing():
                publish(draft, target)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
            self.descriptor = os.open(target, flags)
        except OSError as error:
            raise _failure(self.spec, error) from None

    def append(self, step: int, row: Mapping[str, Array]) -> None:
        """Add the row of a step."""
        assert self.descriptor is not None
        try:
            # One call, so that a row is never without its end for long.
            os.write(self.descriptor, _csv_line(step, row.values()).encode())
        except OSError as error:
            raise _failure(self.spec, error) from None

    def close(self) -> None:
        """Write what is still to be written, and close the file."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class TableHistory:
    """A history in HDF5: a table with a column for the step and one for each recorded tensor.

    Rows are written at once, or together with those of the last tenth of a second.
    """

    def __init__(self, spec: HistorySpec, claim: Claim) -> None:
        self.spec = spec
        self.claim = claim
        self.table: GrowingTable | None = None
        self.dtype = np.dtype([("step", np.int64)])
        self.waiting: list[tuple[Any, ...]] = []  # rows that are not written yet
        self.last_write = 0.0

    def start(self, rows: Mapping[str, Array]) -> None:
        columns: list[tuple[str, Any]] = [("step", np.int64)]
        for name, values in rows.items():
            columns.append((name, DTYPES[values.dtype.name].file_dtype))
        self.dtype = np.dtype(columns)
        count = len(next(iter(rows.values())))
        done = np.empty(count, self.dtype)
        done["step"] = np.arange(count)
        for name, values in rows.items():
            done[name] = values
        try:
            draft, target = _new_draft(self.spec, self.claim)
            draft_table(draft, target, self.spec.inside, done)
            with self.claim.publishing():
                publish(draft, target)
            self.table = GrowingTable(target, self.spec.inside)
        except (*FAILURES, KeyError) as error:
            raise _failure(self.spec, error) from None

    def append(self, step: int, row: Mapping[str, Array]) -> None:
        values = [value[()] for value in row.values()]
        self.waiting.append((step, *values))
        if time.monotonic() - self.last_write >= SECONDS_BETWEEN_WRITES:
            self._write()

    def _write(self) -> None:
        assert self.table is not None
        rows = np.array(self.waiting, self.dtype)
        self.waiting.clear()
        try:
            self.table.append(rows)
        except FAILURES as error:
            raise _failure(self.spec, error) from None
        self.last_write = time.monotonic()

    def close(self) -> None:
        if self.table is None:
            return
        try:
            if self.waiting:
                self._write()
        finally:
            self.table.close()
            self.table = None


HistoryFile: TypeAlias = CsvHistory | TableHistory  # it grows by a row a step


def history_file(spec: HistorySpec, claim: Claim) -> HistoryFile:
    """Return the history of a run that has claimed its file."""
    return TableHistory(spec, claim) if spec.inside else CsvHistory(spec, claim)


def _new_draft(spec: HistorySpec, claim: Claim) -> tuple[str, str]:
    """Make an empty draft; return its path and that of the file whose place it takes."""
    target = os.path.realpath(spec.file)  # a link stays a link
    draft = draft_path(target, claim.token)
    make_draft(draft, target, None)
    return draft, target


def _failure(spec: HistorySpec, error: BaseException) -> EinmpiError:
    return cannot_write(spec.place, spec.file, reason_of(error))


def _csv_line(step: int, values: Any) -> str:
    """Return a row: numbers with all their digits, truth values as 0 or 1."""
    texts = [str(step)]
    for value in values:
        number = value.item()
        if isinstance(number, bool):
            number = int(number)
        texts.append(repr(number))
    return ",".join(texts) + "\n"
