"""Parts of arrays of any library: regions, packed or in place, rows, what a kernel takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.runtime.backend import Array
from einmpi.schedule.regions import Region, boxes, indices, packed, shape
from einmpi.schedule.steps import Kernel

MANY_BOXES = 256  # of a region: as many are faster copied by lists of indices


def select_operands(
    step: Kernel,
    operands: Sequence[Array],
    as_index: Callable[[npt.NDArray[np.intp]], Any] = np.asarray,
) -> list[Array]:
    """Return what a kernel takes of its operands, which may be of any library.

    `as_index` turns indices into what these arrays accept as an index.
    """
    chosen = list(operands)
    for operand, dimension, runs in step.select:
        taken = slice(*runs[0]) if len(runs) == 1 else as_index(indices(runs))
        chosen[operand] = chosen[operand][(slice(None),) * dimension + (taken,)]
    return chosen


def first_rows(array: Array, dimension: int, count: int) -> Array:
    """Return a view of the first indices of a dimension."""
    return array[(slice(None),) * dimension + (slice(0, count),)]


def as_region(packed: Array, region: Region) -> Array:
    """Return a packed region in its shape."""
    return packed.reshape(_cached_shape(region))


def region_indices(region: Region) -> Iterable[tuple[Any, Any]]:
    """Return pairs of indices, into an array and into the packed region of it.

    One pair for each box of the region, or, where there are many, one pair for all of it.
    """
    number_of_boxes = prod(map(len, region))
    if number_of_boxes == 1:
        return (_only_box(region),)
    if number_of_boxes > MANY_BOXES:
        return ((np.ix_(*map(indices, region)), (slice(None),) * len(region)),)
    return boxes(region, packed(region))


@lru_cache(maxsize=4096)
def _cached_shape(region: Region) -> tuple[int, ...]:
    return shape(region)


@lru_cache(maxsize=4096)
def _only_box(region: Region) -> tuple[Any, Any]:
    (box,) = boxes(region, packed(region))
    return box
