"""Move elements of DistArrays by their indices: each rank asks their owners for those it needs."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.comm.base import Comm, even_nodes
from einmpi.compiled.dist_array import DistArray
from einmpi.compiled.requests import Integers, request_elements
from einmpi.planner.mesh import Mesh
from einmpi.schedule.layout import Layout, axes_that_cut, even_layout, rank_of
from einmpi.schedule.regions import indices

Array: TypeAlias = npt.NDArray[Any]


def layout_for(comm: Comm, shape: tuple[int, ...]) -> Layout:
    """Return a layout for a new tensor: the first dimensions that are long enough are cut."""
    return even_layout(Mesh(comm.size, even_nodes(comm) or 1), shape)


def block_indices(layout: Layout, rank: int) -> list[Integers]:
    """Return the indices of a rank's block, for each dimension; none for a rank without a block."""
    region = layout.block(rank)
    if region is None:
        return [np.arange(0) for _ in layout.bound]
    return [indices(runs) for runs in region]


def flat_indices(parts: list[Integers], shape: tuple[int, ...]) -> Integers:
    """Return the places, in row-major order, of all combinations of indices."""
    flat = np.zeros((), np.int64)
    for part, extent in zip(parts, shape, strict=True):
        flat = flat[..., np.newaxis] * extent + part
    return flat.reshape(-1)


def on_one_rank(source: DistArray, local: Array) -> DistArray:
    """Return a tensor whose only block was computed from that of another one."""
    return DistArray(local, layout_for(source.own_comm, local.shape), source.own_comm)


def rearranged(
    source: DistArray, shape: tuple[int, ...], places: Callable[[Layout], Integers]
) -> DistArray:
    """Return a tensor of another shape whose elements are those of the source at some places.

    `places` gives, for the elements of this rank's block of a layout, their places in row-major
    order in the source.
    """
    comm = source.own_comm
    layout = layout_for(comm, shape)
    block = layout.block(comm.rank)
    values = fetch(source, places(layout) if block is not None else np.arange(0))
    if block is None:
        return DistArray(np.empty((0,) * (len(shape) or 1), source.dtype), layout, comm)
    extents = [len(part) for part in block_indices(layout, comm.rank)]
    return DistArray(values.reshape(extents), layout, comm)


def fetch(source: DistArray, places: Integers) -> Array:
    """Return elements by their places in row-major order, each rank its own. All ranks call it."""
    local = np.ascontiguousarray(source.host).reshape(-1)
    owners = _owners(source.layout, places, source.own_comm.rank)
    return request_elements(
        source.own_comm,
        source.dtype,
        places,
        owners,
        lambda wanted: local[_local_places(source, wanted)],
    )


def _owners(layout: Layout, places: Integers, rank: int) -> Integers:
    """Return a rank that holds each element: this one if it does, else the nearest copy."""
    mesh = layout.mesh
    digits = mesh.digits(rank) if rank < mesh.ranks else (0,) * len(mesh.factors)
    copies = [digit if cut is None else 0 for digit, cut in zip(digits, layout.cuts, strict=True)]
    owners = np.full(places.size, rank_of(mesh, copies), np.int64)
    if not places.size:
        return owners
    positions = np.unravel_index(places, layout.bound) if layout.bound else ()
    for dimension, position in enumerate(positions):
        for axis in axes_that_cut(layout.cuts, dimension):
            weight = prod(mesh.factors[axis + 1 :])
            owners += weight * _digits(layout, dimension, axis)[position]
    return owners


def _digits(layout: Layout, dimension: int, axis: int) -> Integers:
    """Return, for each index of a dimension, the digit on an axis of the ranks that hold it."""
    extent = layout.bound[dimension]
    found = np.zeros(extent, np.int64)
    for digit in range(layout.mesh.factors[axis]):
        cuts = tuple(dimension if other == axis else None for other in range(len(layout.cuts)))
        digits = [digit if other == axis else 0 for other in range(len(layout.cuts))]
        found[indices(Layout(layout.mesh, layout.bound, cuts).runs(dimension, digits))] = digit
    return found


def _local_places(source: DistArray, places: Integers) -> Integers:
    """Return the places in this rank's block of elements that it holds."""
    if not places.size:
        return places
    positions = np.unravel_index(places, source.shape) if source.shape else ()
    found = np.zeros(places.size, np.int64)
    for held, position in zip(
        block_indices(source.layout, source.own_comm.rank), positions, strict=True
    ):
        found = found * len(held) + np.searchsorted(held, position)
    return found
