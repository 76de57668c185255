"""The layouts of new DistArrays: cut evenly, or into parts that the user wants."""

from __future__ import annotations

from collections.abc import Sequence

from einmpi.comm.base import Comm, even_nodes
from einmpi.errors import InputError
from einmpi.planner.mesh import Mesh
from einmpi.planner.placement import place
from einmpi.schedule.layout import Layout, even_layout
from einmpi.units import counted


def layout_with_parts(comm: Comm, bound: tuple[int, ...], parts: Sequence[int] | None) -> Layout:
    """Return the layout of a tensor over all ranks, with these parts if any are given."""
    mesh = Mesh(comm.size, even_nodes(comm) or 1)
    if parts is None:
        return even_layout(mesh, bound)
    return _cut_into_parts(mesh, bound, parts)


def _cut_into_parts(mesh: Mesh, bound: tuple[int, ...], given: Sequence[int]) -> Layout:
    """Return a layout with this many parts of each dimension; other ranks hold copies."""
    parts = tuple(given) if isinstance(given, Sequence) else (given,)
    are_positive = all(type(part) is int and part > 0 for part in parts)
    if len(parts) == len(bound) and are_positive:
        cuts = place(mesh, bound, parts)
        if mesh.parts(cuts, range(len(bound))) == parts:
            return Layout(mesh, bound, tuple(None if cut == len(bound) else cut for cut in cuts))
    extents = "×".join(map(str, bound))
    shown = "×".join(map(str, parts))
    raise InputError(
        "parts",
        f"{extents} cannot be cut {shown} over {counted(mesh.ranks, 'rank')}",
        mesh.possible_parts(bound),
    )
