"""Functions of whole rows of DistArrays: some dimensions are whole on a rank, others are cut."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from einmpi.arrays.moving import layout_for
from einmpi.arrays.selected import first_long_enough
from einmpi.comm.agreement import together
from einmpi.compiled.dist_array import DistArray
from einmpi.schedule.layout import Layout


def with_whole_axes(array: DistArray, axes: Collection[int]) -> DistArray:
    """Return the tensor in a layout that does not cut these dimensions.

    Ranks that cut them cut others instead. If no other is long enough, they hold copies.
    """
    layout = array.layout
    comm = array.own_comm
    if layout.mesh.ranks != comm.size:
        layout = layout_for(comm, array.shape)
    other_dimensions = [dimension for dimension in range(array.ndim) if dimension not in axes]
    cuts: list[int | None] = []
    for axis, cut in enumerate(layout.cuts):
        candidates = list(other_dimensions)
        if cut in candidates:
            candidates.insert(0, cut)
        if cut is None:
            cuts.append(None)
        else:
            cuts.append(first_long_enough(layout.mesh, array.shape, cuts, axis, candidates))
    wanted = Layout(layout.mesh, array.shape, tuple(cuts))
    if wanted == array.layout:
        return array
    return array.redistribute(wanted)


def along_axes(
    function: Callable[[Any], Any], array: DistArray, axes: int | Sequence[int]
) -> DistArray:
    """Apply a function to blocks in which some dimensions are whole.

    The function keeps the other dimensions; of these it may change the extents.
    """
    whole_axes = normalize_axis_tuple(axes, array.ndim)
    source = with_whole_axes(array, whole_axes)
    local = together(array.own_comm, lambda: np.ascontiguousarray(function(source.host)))
    bound = list(array.shape)
    for axis in whole_axes:
        bound[axis] = local.shape[axis]
    layout = Layout(source.layout.mesh, tuple(bound), source.layout.cuts)
    return DistArray(local, layout, array.own_comm)
