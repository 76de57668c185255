"""What a loop looks at after each step: nans, its condition, validations, and what it records.

Recorded values are a row of the history for every step, in a file while the loop runs. A killed run
leaves the rows that it has written. What validations have found so far follows from the history, so
a run that is resumed knows it.
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
from einmpi.graph.eingraph import EinGraph
from einmpi.job.batches import Validation
from einmpi.job.outputs import HistorySpec
from einmpi.kernels.prepared import Evaluate, prepare_expression
from einmpi.loops.stages import condition_holds
from einmpi.runtime.buffers import Buffers
from einmpi.schedule.steps import SavePoint

# HDF5 takes about a millisecond to write rows, however many.
SECONDS_BETWEEN_WRITES = 0.1

Array: TypeAlias = npt.NDArray[Any]


# ---- nans ----------------------------------------------------------------------------------------
#
# Find the tensor in which nan appears first.


class NanFinder:
    """A Checkpointer that saves nothing: it looks at each tensor as soon as it is computed."""

    seconds = 0.0

    def __init__(self) -> None:
        self.names: list[str] = []  # of tensors with nan in this rank's block

    def restore(self, rank: int, buffers: Buffers) -> None: ...

    def reached(self, point: SavePoint, buffers: Buffers) -> None:
        if point.slot.name not in buffers:  # between fused kernels, or on another rank
            return
        values = np.asarray(buffers.backend.to_host(buffers[point.slot]))
        if values.dtype.kind in "fc" and bool(np.isnan(values).any()):
            self.names.append(point.vertex)


# ---- condition -----------------------------------------------------------------------------------
#
# The condition of a loop, prepared once: it is checked after every step.


# A vertex of the condition as a function of numbers that are known before, with its name and dtype.
_Expression: TypeAlias = tuple[str, np.dtype[Any], tuple[str, ...], Evaluate]


class Condition:
    """A condition over numbers. What is not an expression of numbers is left to the reference."""

    def __init__(self, graph: EinGraph) -> None:
        self.graph = graph
        self.expressions: list[_Expression] | None = _expressions(graph)

    def holds(self, values: Mapping[str, Array]) -> bool:
        """Return whether the condition holds, given the values that it reads."""
        if self.expressions is None:
            return condition_holds(self.graph, values)
        known: dict[str, Any] = dict(values)
        with np.errstate(all="ignore"):
            for name, dtype, operands, evaluate in self.expressions:
                numbers = [known[operand] for operand in operands]
                known[name] = np.asarray(evaluate(numbers)).astype(dtype)
        return bool(known[self.graph.outputs[0]])


def _expressions(graph: EinGraph) -> list[_Expression] | None:
    """Return the computed vertices as expressions; None if one of them is anything else."""
    found = []
    for vertex in graph.vertices:
        einsum = vertex.einsum
        if einsum is None:
            continue
        has_dimensions = bool(einsum.labels) or any(einsum.operands)
        if has_dimensions or not einsum.is_elementwise or einsum.scan is not None:
            return None
        dtypes = [np.dtype(graph[name].dtype) for name in vertex.inputs]
        evaluate = prepare_expression(einsum.function, dtypes, ())
        if evaluate is None:
            return None
        found.append((vertex.name, np.dtype(vertex.dtype), vertex.inputs, evaluate))
    return found


# ---- validations ---------------------------------------------------------------------------------


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


# ---- files ---------------------------------------------------------------------------------------


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
