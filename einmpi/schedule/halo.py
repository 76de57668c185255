"""Operands with index arithmetic, such as u[i+1]: what a rank fetches, and where it lies then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from einmpi.graph.arithmetic import call
from einmpi.graph.einsum import OperandIndex
from einmpi.graph.index_arithmetic import arithmetic_labels
from einmpi.graph.scalar import Const, Scalar
from einmpi.planner.moving.halo import Needed, axes_of_labels, is_inside, most_needed, shares_of
from einmpi.schedule.layout import Layout
from einmpi.schedule.moves import collection
from einmpi.schedule.regions import Region, Runs, locate
from einmpi.schedule.transfers import Moves


def halo_moves(
    source: Layout, needed: Needed, state: Sequence[str | None], rank: int
) -> tuple[Moves | None, Region]:
    """Return the moves that bring what a rank needs, and the region of the tensor it has then.

    There are no moves if every rank has all it needs in its block already.
    """
    mesh = source.mesh
    if is_inside(mesh, needed, source.cuts, state):
        return None, source.region(mesh.digits(rank))
    wanted: list[Region] = []
    for other in range(mesh.ranks):
        wanted.append(_needed_region(source, needed, state, mesh.digits(other)))
    most = most_needed(mesh, needed, state)
    max_elements = max(source.max_elements() * mesh.ranks, most)
    moves = collection(source, wanted, rank, max_elements)
    return replace(moves, largest_block=max(source.max_elements(), most)), wanted[rank]


def _needed_region(
    source: Layout, needed: Needed, state: Sequence[str | None], digits: Sequence[int]
) -> Region:
    region = []
    for dimension in range(len(needed.bound)):
        axes = axes_of_labels(needed.labels(dimension), state)
        shares = shares_of(source.mesh, needed, dimension, axes, digits)
        region.append(needed.runs(dimension, shares))
    return tuple(region)


def index_in_region(entries: OperandIndex, region: Region) -> OperandIndex:
    """Return an index for a buffer that holds only this region, where it begins at 0."""
    found: list[str | Scalar] = []
    for entry, runs in zip(entries, region, strict=True):
        start = runs[0][0] if runs else 0
        if isinstance(entry, str) or arithmetic_labels(entry) is None or not start:
            found.append(entry)
        else:
            found.append(call("-", entry, Const(start)))
    return tuple(found)


def select_in_region(
    operand: int, entries: OperandIndex, region: Region, shares: Mapping[str, Runs]
) -> Iterator[tuple[int, int, Runs]]:
    """Yield what a kernel takes of the dimensions of a region that labels index, if not all."""
    for dimension, entry in enumerate(entries):
        if isinstance(entry, str) and shares[entry] != region[dimension]:
            yield operand, dimension, locate(shares[entry], region[dimension])
