"""Floating-point elements that are converted to another dtype while they are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from einmpi.errors import InputError, one_of
from einmpi.files.datasets import Array, Dataset, Reader, strips
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
        for box, part in strips(there, target[place], self.stored.itemsize):
            strip = np.empty(part.shape, self.stored)
            self.reader.read(box, strip, tuple(slice(0, extent) for extent in part.shape))
            part[...] = strip
