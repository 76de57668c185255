"""Move elements of DistArrays by their indices: each rank asks their owners for those it needs."""

from __future__ import annotations

from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.comm.base import Comm, even_nodes
from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.requests import Integers, request_elements
from einmpi.planner.mesh import Mesh
from einmpi.schedule.layout import Cuts, Layout, axes_that_cut, even_layout, rank_of
from einmpi.schedule.regions import indices, shape

Array: TypeAlias = npt.NDArray[Any]


def layout_for(comm: Comm, bound: tuple[int, ...]) -> Layout:
    """Return a layout for a new tensor: the first dimensions that are long enough are cut."""
    mesh = Mesh(comm.size, even_nodes(comm) or 1)
    return even_layout(mesh, bound)


def cuts_of_last_dimensions(layout: Layout, ndim: int) -> Cuts:
    """Return the same cuts for a tensor of `ndim` dimensions, the last of which are the layout's.

    Numpy's broadcasting aligns shapes in this way: new dimensions come first.
    """
    new_dimensions = ndim - len(layout.bound)
    cuts: list[int | None] = []
    for cut in layout.cuts:
        if cut is None:
            cuts.append(None)
        else:
            cuts.append(cut + new_dimensions)
    return tuple(cuts)


def block_indices(layout: Layout, rank: int) -> list[Integers]:
    """Return the indices of a rank's block, for each dimension; none for a rank without a block."""
    region = layout.block(rank)
    if region is None:
        return [np.arange(0) for _ in layout.bound]
    return [indices(runs) for runs in region]


def block_of_idle_rank(layout: Layout, dtype: np.dtype[Any]) -> Array:
    """Return what a rank that is not in the mesh has as its block: an array without elements.

    A tensor without dimensions has one element, so there the array needs a dimension.
    """
    ndim = max(len(layout.bound), 1)
    return np.empty((0,) * ndim, dtype)


def empty_block(layout: Layout, rank: int, dtype: np.dtype[Any]) -> Array:
    """Return an array for a rank's block, to be filled."""
    region = layout.block(rank)
    if region is None:
        return block_of_idle_rank(layout, dtype)
    return np.empty(shape(region), dtype)


def positions_of(places: Integers, bound: tuple[int, ...]) -> tuple[Integers, ...]:
    """Return the index in each dimension of elements, by their places in row-major order."""
    if not bound:
        return ()  # numpy unravels no indices into a shape without dimensions
    return np.unravel_index(places, bound)


def on_one_rank(source: DistArray, local: Array) -> DistArray:
    """Return a tensor whose only block was computed from that of another one."""
    layout = layout_for(source.own_comm, local.shape)
    return DistArray(local, layout, source.own_comm)


def fetch(source: DistArray, places: Integers) -> Array:
    """Return the elements that this rank needs, by their places in row-major order.

    All ranks call it, each with its own places.
    """
    local = np.ascontiguousarray(source.host).reshape(-1)
    owners = _owners(source.layout, places, source.own_comm.rank)

    def answer(wanted: Integers) -> Array:
        return local[_local_places(source, wanted)]

    return request_elements(source.own_comm, source.dtype, places, owners, answer)


def _owners(layout: Layout, places: Integers, rank: int) -> Integers:
    """Return a rank that holds each element: this one if it does, else the nearest copy.

    The digits of an owner on the axes that cut a dimension depend on the index of the element
    there. On the other axes all ranks hold the same, and this rank's own digits are taken.
    """
    mesh = layout.mesh
    own_digits = (0,) * len(mesh.factors)
    if rank < mesh.ranks:
        own_digits = mesh.digits(rank)
    first_digits = list(own_digits)
    for axis, cut in enumerate(layout.cuts):
        if cut is not None:
            first_digits[axis] = 0
    owners = np.full(places.size, rank_of(mesh, first_digits), np.int64)
    if not places.size:
        return owners

    for dimension, positions in enumerate(positions_of(places, layout.bound)):
        for axis in axes_that_cut(layout.cuts, dimension):
            ranks_between_digits = prod(mesh.factors[axis + 1 :])
            digits = _digits(layout, dimension, axis)[positions]
            owners += ranks_between_digits * digits
    return owners


def _digits(layout: Layout, dimension: int, axis: int) -> Integers:
    """Return, for each index of a dimension, the digit on an axis of the ranks that hold it."""
    axes = len(layout.cuts)
    cuts: list[int | None] = [None] * axes
    cuts[axis] = dimension
    cut_by_axis = Layout(layout.mesh, layout.bound, tuple(cuts))
    digit_of_index = np.zeros(layout.bound[dimension], np.int64)
    for digit in range(layout.mesh.factors[axis]):
        digits = [0] * axes
        digits[axis] = digit
        runs = cut_by_axis.runs(dimension, digits)
        digit_of_index[indices(runs)] = digit
    return digit_of_index


def _local_places(source: DistArray, places: Integers) -> Integers:
    """Return the places in this rank's block of elements that it holds."""
    if not places.size:
        return places
    block = block_indices(source.layout, source.own_comm.rank)
    local_places = np.zeros(places.size, np.int64)
    for own_indices, positions in zip(block, positions_of(places, source.shape), strict=True):
        local_positions = np.searchsorted(own_indices, positions)
        local_places = local_places * len(own_indices) + local_positions
    return local_places
