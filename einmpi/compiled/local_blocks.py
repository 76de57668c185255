"""Blocks that the ranks have, as parts of one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.comm.agreement import together
from einmpi.comm.base import Comm
from einmpi.compiled.array_layouts import layout_with_parts
from einmpi.compiled.intervals import (
    intervals_of_block,
    move_between_intervals,
    one_interval,
)
from einmpi.errors import InputError
from einmpi.schedule.layout import Layout
from einmpi.schedule.regions import shape
from einmpi.units import counted

Array: TypeAlias = npt.NDArray[Any]


def shapes_of_blocks(own: Array, comm: Comm) -> list[tuple[int, ...]]:
    """Return the shapes of all ranks' blocks, which have one dtype and number of dimensions."""
    dtypes: list[str] = []
    shapes: list[tuple[int, ...]] = []
    for text in comm.allgather_text(f"{own.dtype.name} {' '.join(map(str, own.shape))}"):
        dtype, *extents = text.split()
        dtypes.append(dtype)
        shapes.append(tuple(map(int, extents)))
    for rank, block_shape in enumerate(shapes):
        if dtypes[rank] != dtypes[0]:
            what = f"the block of rank {rank} is {dtypes[rank]}"
            raise InputError("from_local", what, f"{dtypes[0]}, as on rank 0")
        if len(block_shape) != len(shapes[0]):
            what = f"the block of rank {rank} has shape {block_shape}"
            expected = f"{counted(len(shapes[0]), 'dimension')}, as on rank 0"
            raise InputError("from_local", what, expected)
    return shapes


def whole_shape(shapes: Sequence[tuple[int, ...]], parts: Sequence[int]) -> tuple[int, ...]:
    """Return the extents of a tensor, given those of all blocks.

    In each dimension, every part is on the same number of ranks.
    """
    ndim = len(shapes[0])
    if not isinstance(parts, Sequence) or len(parts) != ndim:
        raise InputError("from_local", f"parts are {parts!r}", f"{ndim} positive integers")
    extents = []
    for dimension in range(ndim):
        total = sum(block[dimension] for block in shapes)
        extents.append(total * int(parts[dimension]) // len(shapes))
    return tuple(extents)


def evened_out(own: Array, shapes: Sequence[tuple[int, ...]], comm: Comm) -> tuple[Array, Layout]:
    """Even out blocks that follow one another in the first dimension.

    Return this rank's new block, and the layout of the tensor.
    """
    lengths = np.array([block[0] for block in shapes])
    inner = shapes[int(lengths.argmax())][1:]

    def check_blocks() -> Layout:
        if own.size and own.shape[1:] != inner:
            problem = f"the block of rank {comm.rank} has shape {own.shape}"
            expected = f"shape ({', '.join(['n', *map(str, inner)])})"
            raise InputError("from_local", problem, expected)
        return layout_with_parts(comm, (int(lengths.sum()), *inner), None)

    layout = together(comm, check_blocks)
    block = layout.block(comm.rank)
    assert block is not None
    width = int(np.prod(inner, dtype=np.int64))
    first_places = np.concatenate(([0], np.cumsum(lengths))) * width
    if shape(block) == own.shape and all(_is_in_place(layout, first_places, width, comm.size)):
        return own, layout
    even = np.empty(shape(block), own.dtype)
    move_between_intervals(
        comm,
        np.ascontiguousarray(own).reshape(-1),
        even.reshape(-1),
        lambda rank: one_interval(first_places[rank], first_places[rank + 1]),
        lambda rank: intervals_of_block(layout, rank),
        # Ranks of an axis that cuts nothing have the same block, and all get it.
        lambda _sender, _receiver: True,
    )
    return even, layout


def _is_in_place(
    layout: Layout, first_places: npt.NDArray[np.int64], width: int, ranks: int
) -> list[bool]:
    """Return for each rank whether its block is where the layout wants it."""
    found = []
    for rank in range(ranks):
        block = layout.block(rank)
        first = int(first_places[rank])
        last = int(first_places[rank + 1])
        rows = ((first // max(width, 1), last // max(width, 1)),)
        whole_inside = tuple(((0, extent),) for extent in layout.bound[1:])
        found.append(block == (rows, *whole_inside))
    return found
