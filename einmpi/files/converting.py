"""Floating-point elements that are converted to another dtype while they are read."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.files.datasets import STRIP_BYTES, Array, Dataset, Reader
from einmpi.schedule.regions import Box

CONVERTIBLE_DTYPES = ("float16", "bfloat16", "float32", "float64")


def converted(dataset: Dataset, dtype: str) -> Dataset:
    """Return the dataset with its elements converted to a dtype; refuse others than floats."""
    if dataset.dtype.name == dtype:
        return dataset
    if dataset.dtype.name not in CONVERTIBLE_DTYPES:
        what = f"{dataset.title} is {dataset.dtype.name}, which is not converted"
        raise InputError(dataset.where, what, one_of(CONVERTIBLE_DTYPES))
    return replace(dataset, converted=dtype)


class ConvertingReader:
    """Reads elements as they are stored, strip by strip, and converts each strip."""

    def __init__(self, dataset: Dataset, reader: Reader) -> None:
        self.stored = dataset.stored_dtype
        self.reader = reader

    def close(self) -> None:
        self.reader.close()

    def read(self, there: Box, target: Array, here: Box) -> None:
        """Read a box, with dimensions in the file's order, into a box of the target."""
        place: Any = (*here, ...)  # gives an array even for a single element
        part = target[place]
        if part.ndim == 0:
            strip = np.empty((), self.stored)
            self.reader.read(there, strip, ())
            part[...] = strip
            return
        row_bytes = max(1, prod(part.shape[1:]) * self.stored.itemsize)
        rows = max(1, STRIP_BYTES // row_bytes)
        whole_strip = tuple(slice(0, extent) for extent in part.shape[1:])
        first = there[0]
        step = first.step or 1
        for start in range(0, part.shape[0], rows):
            count = min(rows, part.shape[0] - start)
            strip = np.empty((count, *part.shape[1:]), self.stored)
            begin = first.start + start * step
            box = (slice(begin, begin + (count - 1) * step + 1, first.step), *there[1:])
            self.reader.read(box, strip, (slice(0, count), *whole_strip))
            part[start : start + count] = strip
