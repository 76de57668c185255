"""Where the rows of batches come from: a file, an array, or a generator."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.files.datasets import Dataset, Reader, check_unchanged
from einmpi.files.formats import open_reader
from einmpi.files.generate import fill_box
from einmpi.files.reading import read_selected_box
from einmpi.files.specs import InputSpec
from einmpi.loops.batch_order import Numbers
from einmpi.schedule.regions import Box, Region, boxes, packed

Array: TypeAlias = npt.NDArray[Any]


class RowSource(Protocol):
    """The rows of an input that comes in batches."""

    def read_box(self, there: Box, target: Array, here: Box) -> None:
        """Put a box of the tensor at a place in the target."""

    def check(self) -> None:
        """Refuse a file that has changed."""

    def close(self) -> None: ...


class DatasetRows:
    """Rows of a dataset in a file. It is opened when it is first read, and stays open."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.reader: Reader | None = None

    def read_box(self, there: Box, target: Array, here: Box) -> None:
        if self.reader is None:
            self.reader = open_reader(self.dataset)
        read_selected_box(self.reader, self.dataset, there, target, here)

    def check(self) -> None:
        check_unchanged(self.dataset)

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()
            self.reader = None


@dataclass
class ArrayRows:
    """Rows of an array that every rank has, or of an object that is indexed like one."""

    array: Any

    def read_box(self, there: Box, target: Array, here: Box) -> None:
        target[here] = self.array[there]

    def check(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class GeneratedRows:
    """Rows of a generated tensor."""

    spec: InputSpec

    def read_box(self, there: Box, target: Array, here: Box) -> None:
        assert self.spec.whole_shape is not None
        fill_box(self.spec, self.spec.whole_shape, there, target[here])

    def check(self) -> None: ...

    def close(self) -> None: ...


def read_rows(source: RowSource, rows: Numbers, columns: Region, target: Array) -> None:
    """Put rows of a source, in this order, into a target that has their columns densely.

    `columns` is the region of the dimensions after the first.
    """
    if isinstance(source, ArrayRows) and isinstance(source.array, np.ndarray):
        if source.array.shape[1:] == target.shape[1:]:
            # With "raise", numpy would copy the target first.
            np.take(source.array, rows, axis=0, out=target, mode="clip")
            return
        for there, here in boxes(columns, packed(columns)):
            chosen: Any = (rows, *there)
            target[(slice(None), *here)] = source.array[chosen]
        return
    for start, stop in _consecutive(rows):
        first = int(rows[start])
        there_rows = slice(first, first + stop - start)
        for there, here in boxes(columns, packed(columns)):
            source.read_box((there_rows, *there), target, (slice(start, stop), *here))


def _consecutive(rows: Numbers) -> Iterator[tuple[int, int]]:
    """Yield the stretches of numbers each of which is one more than that before it."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    bounds = [0, *breaks.tolist(), len(rows)]
    for start, stop in itertools.pairwise(bounds):
        if start < stop:
            yield start, stop
