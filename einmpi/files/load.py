"""Where tensors come from: generated or in files."""

from __future__ import annotations

import numpy as np

from einmpi.comm.base import ALONE
from einmpi.errors import InputError
from einmpi.files.datasets import Dataset
from einmpi.files.formats import find
from einmpi.files.generate import fill_box
from einmpi.files.reading import Reading
from einmpi.files.specs import InputSpec
from einmpi.schedule.layout import on_one_rank


def describe(spec: InputSpec) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of an input; no values are read."""
    if spec.file is None:
        assert spec.shape is not None and spec.dtype is not None
        return spec.shape, spec.dtype
    found = find(spec)
    return found.wanted, found.dtype.name


def find_planned(spec: InputSpec, shape: tuple[int, ...], dtype: str) -> Dataset:
    """How an input lies in its file, if it has the shape and dtype that were planned for."""
    found = find(spec)
    if found.wanted != tuple(shape) or found.dtype.name != dtype:
        raise InputError(
            spec.place,
            f"{spec.name} in {spec.file} is {found.dtype.name}{list(found.wanted)} now",
            f"{dtype}{list(shape)}, as planned",
        )
    return found


def load(spec: InputSpec, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """The values of an input, whole."""
    array = np.empty(shape, dtype)
    if spec.file is None:
        fill_box(spec, shape, tuple(slice(0, extent) for extent in shape), array)
    else:
        layout = on_one_rank(tuple(shape) or (1,))
        region = layout.region(())
        Reading(find_planned(spec, shape, dtype), layout, 0, array, region, region).finish(ALONE)
    return array
