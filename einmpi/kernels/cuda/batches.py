"""A contraction as batches of matrix products: which labels are rows, columns and batches.

Each way to compute it has an estimated time; the fastest way within the limits of cuBLAS wins.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from einmpi.kernels.contraction import Contraction, Labels, Strides, size_of
from einmpi.kernels.cuda.scalar_source import plain
from einmpi.kernels.lowering import ArrayLayout, candidate_lowerings

# Estimates in seconds, of which only the ratios matter.
SECONDS_PER_CALL = 5e-6
SECONDS_PER_COPIED_BYTE = 1e-12
SECONDS_PER_MULTIPLY_ADD = 5e-14  # in float32
CUBLAS_LIMIT = 2**31  # extents and strides between lines must be smaller


@dataclass(frozen=True)
class Storage:
    """How the elements of an array, or of its temporary copy, are stored."""

    copy_order: Labels | None  # of a dense copy, slowest label first; None: the array itself
    stride: Mapping[str, int]  # in elements, of the labels that the product uses


@dataclass(frozen=True)
class Batches:
    """A contraction as batches of matrix products."""

    storages: tuple[Storage, ...]  # of both factors and the output
    # Each loop with its labels from the slowest to the fastest. The first loop is the batch of a
    # call; the others are calls.
    loops: tuple[Labels, ...]
    rows: Labels
    depth: Labels
    columns: Labels

    @property
    def sides(self) -> tuple[tuple[Labels, Labels], ...]:
        """The rows and columns of both factors and of the output."""
        return (self.rows, self.depth), (self.depth, self.columns), (self.rows, self.columns)


@lru_cache(maxsize=4096)
def choose_batches(contraction: Contraction, dtypes: Labels, strides: Strides) -> Batches | None:
    """Return the cheapest way to compute a contraction; None if it is not a matrix product."""
    extent = dict(contraction.extents)
    dtype = plain(dtypes[-1])
    layouts = _array_layouts(contraction, dtypes, strides)
    if not _is_matrix_product(*(tuple(layout.stride) for layout in layouts)):
        return None
    best = None
    lowest_cost = 0.0
    for lowering in candidate_lowerings(layouts, extent, dtype):
        if lowering.kernel != "matmul":
            continue
        rows, depth, columns = lowering.matrix
        if not rows and not columns:
            continue
        storages = _storages(layouts, lowering.copies, extent, dtype)
        loops = _merge_loops(lowering.loops, storages, extent)
        batches = Batches(storages, loops, rows, depth, columns)
        if not _within_limits(batches, extent):
            continue
        cost = _seconds(batches, extent, np.dtype(dtype).itemsize)
        if best is None or cost < lowest_cost:
            best = batches
            lowest_cost = cost
    return best


def _array_layouts(contraction: Contraction, dtypes: Labels, strides: Strides) -> list[ArrayLayout]:
    """Return the strides of each array, and whether it has to be copied.

    Copies take care of labels that only one array has: a factor is summed over them, and the
    output repeats along them. They also convert to the dtype of the output.
    """
    extent = dict(contraction.extents)
    labels = []  # of each array, without those that have a single value
    for index in contraction.indices:
        labels.append(dict.fromkeys(label for label in index if extent[label] > 1))
    users = Counter(itertools.chain.from_iterable(labels))
    layouts = []
    for array, own_labels in enumerate(labels):
        shared = [label for label in own_labels if users[label] > 1]
        needs_copy = len(shared) < len(own_labels) or dtypes[array] != dtypes[-1]
        stride = dict.fromkeys(shared, 0)
        for label, step in zip(contraction.indices[array], strides[array], strict=True):
            if label in stride:
                stride[label] += step  # a label that occurs twice goes along the diagonal
        order = tuple(sorted(shared, key=lambda label: -abs(stride[label])))
        layouts.append(ArrayLayout(stride, order, needs_copy, needs_copy))
    return layouts


def _storages(
    layouts: Sequence[ArrayLayout],
    copy_orders: Sequence[Labels | None],
    extent: Mapping[str, int],
    dtype: str,
) -> tuple[Storage, ...]:
    """Return how each array, or its copy, is stored."""
    itemsize = np.dtype(dtype).itemsize
    storages = []
    for layout, copy_order in zip(layouts, copy_orders, strict=True):
        if copy_order is None:
            in_elements = {label: step // itemsize for label, step in layout.stride.items()}
            storages.append(Storage(None, in_elements))
        else:
            storages.append(Storage(copy_order, dense_strides(copy_order, extent)))
    return tuple(storages)


def _is_matrix_product(left: Labels, right: Labels, output: Labels) -> bool:
    """Tell whether there are rows, columns and a depth."""
    has_depth = any(label not in output for label in left)
    has_rows = any(label in output and label not in right for label in left)
    has_columns = any(label in output and label not in left for label in right)
    return has_depth and has_rows and has_columns


def dense_strides(order: Labels, extent: Mapping[str, int]) -> dict[str, int]:
    """Return the strides in elements of a dense array, whose slowest label is the first."""
    return {label: size_of(order[k + 1 :], extent) for k, label in enumerate(order)}


def _merge_loops(
    loops: Labels, storages: Sequence[Storage], extent: Mapping[str, int]
) -> tuple[Labels, ...]:
    """Merge loops that follow one another in every array; return them with the longest first."""

    groups: list[Labels] = [(label,) for label in loops]
    pair = _pair_to_merge(groups, storages, extent)
    while pair is not None:
        outer, inner = pair
        groups.remove(outer)
        groups.remove(inner)
        groups.append(outer + inner)
        pair = _pair_to_merge(groups, storages, extent)
    return tuple(sorted(groups, key=lambda group: (-size_of(group, extent), group)))


def _pair_to_merge(
    groups: Sequence[Labels], storages: Sequence[Storage], extent: Mapping[str, int]
) -> tuple[Labels, Labels] | None:
    """Return two loops of which one step of the first is the whole length of the second."""
    for outer, inner in itertools.permutations(groups, 2):
        merges = True
        for storage in storages:
            step = storage.stride.get(outer[-1], 0)
            length = storage.stride.get(inner[0], 0) * extent[inner[0]]
            merges = merges and step == length
        if merges:
            return outer, inner
    return None


def _seconds(batches: Batches, extent: Mapping[str, int], itemsize: int) -> float:
    """Estimate how long a product takes."""
    calls = prod(size_of(group, extent) for group in batches.loops[1:])
    batch = size_of(batches.loops[0], extent) if batches.loops else 1
    copied = 0
    for storage in batches.storages:
        if storage.copy_order is not None:
            copied += size_of(storage.copy_order, extent)
    # A small matrix takes as long as one tile of cuBLAS's kernels.
    rows = max(size_of(batches.rows, extent), 64)
    columns = max(size_of(batches.columns, extent), 64)
    depth = max(size_of(batches.depth, extent), 16)
    return (
        SECONDS_PER_CALL * calls
        + SECONDS_PER_COPIED_BYTE * copied * itemsize
        + SECONDS_PER_MULTIPLY_ADD * (calls * batch * rows * columns * depth)
    )


def _within_limits(batches: Batches, extent: Mapping[str, int]) -> bool:
    """Tell whether cuBLAS takes these extents and strides."""
    matrix = (batches.rows, batches.depth, batches.columns)
    numbers = [size_of(group, extent) for group in (*matrix, *batches.loops[:1])]
    fastest_labels = [group[-1] for group in matrix if group]
    for storage in batches.storages:
        numbers += [storage.stride[label] for label in fastest_labels if label in storage.stride]
    return all(number < CUBLAS_LIMIT for number in numbers)
