"""Describe and load whole inputs, generated or from files."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.comm.local import ALONE
from einmpi.errors import InputError
from einmpi.files.datasets import Dataset
from einmpi.files.formats import find
from einmpi.files.generate import fill_box
from einmpi.files.reading import Reading
from einmpi.files.specs import InputSpec
from einmpi.schedule.layout import on_one_rank


def describe(spec: InputSpec) -> tuple[tuple[int, ...], str]:
    """Return the shape and dtype of an input without reading its elements."""
    if spec.file is None:
        assert spec.shape is not None and spec.dtype is not None
        return spec.shape, spec.dtype
    if spec.declared_shape is not None and spec.declared_dtype is not None and is_missing(spec):
        return spec.declared_shape, spec.convert or spec.declared_dtype
    found = find(spec)
    return found.selected_shape, found.dtype.name


def decoded_bytes(spec: InputSpec) -> int:
    """Return the memory that it takes to decode a chunk of an input."""
    return 0 if spec.file is None or is_missing(spec) else find(spec).decoded


def is_missing(spec: InputSpec) -> bool:
    """Return whether the file of an input does not exist yet."""
    return spec.file is not None and not os.path.lexists(spec.file)


def rows_of_chunks(spec: InputSpec) -> int:
    """Return how many rows of an input are stored together; 1 where it has no chunks."""
    if spec.file is None or is_missing(spec):
        return 1
    return rows_of_chunks_in(find(spec))


def rows_of_chunks_in(dataset: Dataset) -> int:
    """Return how many rows of what is selected of a dataset are stored together."""
    if dataset.chunks is None:
        return 1
    for chunk, selected in zip(dataset.chunks, dataset.ranges(), strict=True):
        if not selected.dropped:
            return max(1, chunk // selected.step)
    return 1


def find_planned(spec: InputSpec, shape: tuple[int, ...], dtype: str) -> Dataset:
    """Look up an input; raise InputError if it lacks the shape and dtype of the plan."""
    found = find(spec)
    if found.selected_shape != tuple(shape) or found.dtype.name != dtype:
        raise InputError(
            spec.place,
            f"{spec.name} in {spec.file} is now {found.dtype.name}{list(found.selected_shape)}",
            f"{dtype}{list(shape)}, as planned",
        )
    return found


def load_array(spec: InputSpec, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    """Return all elements of an input."""
    array = np.empty(shape, dtype)
    if spec.file is None:
        fill_box(spec, shape, tuple(slice(0, extent) for extent in shape), array)
        return array
    dataset = find_planned(spec, shape, dtype)
    layout = on_one_rank(tuple(shape) or (1,))
    region = layout.region(())
    Reading(dataset, layout, 0, array, region, region).finish(ALONE)
    return array
