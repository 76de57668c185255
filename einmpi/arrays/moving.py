"""Move elements of DistArrays: to the ranks that need them, by places or by selections."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from einmpi.arrays.creation import layout_for
from einmpi.arrays.dist_array import DistArray, takes_symbols
from einmpi.arrays.exchange import Array, Integers, Piece, Places, move_pieces, request_elements
from einmpi.arrays.record import block_extents
from einmpi.comm.base import Comm
from einmpi.errors import InputError
from einmpi.kernels.reference import as_numpy
from einmpi.planner.mesh import Extent, Mesh, shown_orders, sides
from einmpi.schedule.layout import Layout, axes_that_cut, digits_along, rank_of
from einmpi.schedule.regions import Runs, indices

# The indices of one dimension of the source, in the order of the result: those of a slice, or any.
Chosen: TypeAlias = range | Integers
# Places of elements that move, in one dimension: first in the result, then in the source.
PlacesInBoth: TypeAlias = tuple[Places, Places]


def common_comm(where: str, arrays: Sequence[DistArray]) -> Comm:
    """Return the communicator of some DistArrays; refuse those that are on different ones."""
    comm = arrays[0].own_comm
    for array in arrays:
        if array.own_comm is not comm:
            raise InputError(
                where, "the operands are on different communicators", "DistArrays on the same ranks"
            )
    return comm


def distributed(value: Any, comm: Comm, where: str = "", what: str = "an operand") -> DistArray:
    """Return a DistArray as it is, and an array distributed over some ranks.

    `where` and `what` are the words of an error for what is no array.
    """
    if isinstance(value, DistArray):
        return value
    return DistArray.from_global(as_numpy(where, what, value) if where else value, comm)


def gathered(value: Any, where: str = "", what: str = "") -> Any:
    """Return an array that every rank has whole; words as for `distributed`."""
    if isinstance(value, DistArray):
        return value.gather()
    return as_numpy(where, what, value) if where else value


def along(array: Any, dimension: int, part: Any) -> Any:
    """Return a part of a tensor, given by a slice or indices of one dimension."""
    return array[(slice(None),) * dimension + (part,)]


def with_other_dimensions(
    layout: Layout, bound: Sequence[int], dimension_of: Callable[[int], int | None]
) -> Layout:
    """Return a layout for another shape. A function says what dimensions that are cut become."""
    cuts = [None if cut is None else dimension_of(cut) for cut in layout.cuts]
    orders = [0] * len(bound)
    for dimension, order in enumerate(layout.orders):
        becomes = dimension_of(dimension) if dimension in layout.cuts else None
        if becomes is not None:
            orders[becomes] = order
    return Layout(layout.mesh, tuple(bound), tuple(cuts), (), shown_orders(orders))


def broadcast_layout(layout: Layout, bound: tuple[int, ...]) -> Layout:
    """Return the same cuts for a tensor to whose shape numpy's broadcasting adds dimensions."""
    added = len(bound) - len(layout.bound)
    return with_other_dimensions(layout, bound, lambda cut: cut + added)


def block_indices(layout: Layout, rank: int) -> list[Integers]:
    """Return the indices of a rank's block, for each dimension; none for a rank without a block."""
    region = layout.block(rank)
    if region is None:
        return [np.arange(0) for _ in layout.bound]
    return [indices(runs) for runs in region]


# ---- elements that ranks ask for, by their places -----------------------------------------------


def positions_of(places: Integers, bound: tuple[int, ...]) -> tuple[Integers, ...]:
    """Return the index in each dimension of elements, by their places in row-major order."""
    if not bound:
        return ()  # numpy unravels no indices into a shape without dimensions
    return np.unravel_index(places, bound)


def on_one_rank(source: DistArray, local: Array) -> DistArray:
    """Return a tensor whose only block was computed from that of another one."""
    return source._with_block(local, layout_for(source.own_comm, local.shape))


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
    first_digits = list(_digits_in(mesh, rank))
    for axis in layout.cutting_axes():
        first_digits[axis] = 0
    first = rank_of(mesh, first_digits)
    owners = np.full(places.size, first, np.int64)
    for dimension, positions in enumerate(positions_of(places, layout.bound)):
        axes = axes_that_cut(layout.cuts, dimension)
        added = np.zeros(layout.bound[dimension], np.int64)  # to the first rank, for each index
        for digits in digits_along(mesh, axes, first_digits):
            added[indices(layout.runs(dimension, digits))] = rank_of(mesh, digits) - first
        owners += added[positions]
    return owners


def _digits_in(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Return the digits of a rank, 0 on all axes if it is not in the mesh."""
    return mesh.digits(rank) if rank < mesh.ranks else (0,) * len(mesh.factors)


def _local_places(source: DistArray, places: Integers) -> Integers:
    """Return the places in this rank's block of elements that it holds."""
    block = block_indices(source.layout, source.own_comm.rank)
    local_places = np.zeros(places.size, np.int64)
    for own_indices, positions in zip(block, positions_of(places, source.shape), strict=True):
        local_positions = np.searchsorted(own_indices, positions)
        local_places = local_places * len(own_indices) + local_positions
    return local_places


# ---- selections, which all ranks know, so that no rank asks for anything ------------------------


def layout_cutting(source: Layout, bound: Sequence[int], dimensions: Sequence[int]) -> Layout:
    """Return a layout in which most elements stay where they are, which cuts some dimensions only.

    Each axis of the mesh cuts the dimension that it cuts in the source. If that is none of them, or
    too short now, it cuts the first of them that is long enough.
    """
    cuts: list[int | None] = []
    for axis, source_cut in enumerate(source.cuts):
        if source_cut is None:
            cuts.append(None)
        else:
            candidates = sorted(dimensions, key=lambda dimension: dimension != source_cut)
            in_orders = sides(bound, source.orders)
            cuts.append(first_long_enough(source.mesh, in_orders, cuts, axis, candidates))
    return Layout(source.mesh, tuple(bound), tuple(cuts), (), source.orders)


def first_long_enough(
    mesh: Mesh,
    bound: Sequence[Extent],
    cuts: Sequence[int | None],
    axis: int,
    candidates: Sequence[int],
) -> int | None:
    """Return the first of some dimensions that one more axis can cut, None if there is none.

    `cuts` are those of the axes before it.
    """
    for dimension in candidates:
        axes = {*axes_that_cut(tuple(cuts), dimension), axis}
        for window in mesh.windows(bound[dimension]):
            if axes <= set(window):
                return dimension
    return None


@takes_symbols
def select_elements(source: DistArray, chosen: Sequence[Chosen]) -> DistArray:
    """Return the elements at all combinations of some indices. All ranks call it.

    The result has as many dimensions as the source. On one rank it is a view if numpy has one.
    """
    if source.is_alone():
        key = [_as_slice(each) if isinstance(each, range) else each for each in chosen]
        return on_one_rank(source, source.local[(*key, ...)])  # an array, never a number
    counts = [len(chosen_indices) for chosen_indices in chosen]
    layout = layout_cutting(source.layout, counts, range(source.ndim))
    local = np.empty(block_extents(layout, source.own_comm.rank), source.dtype)
    copy_selected(source, chosen, layout, local, (0,) * len(counts))
    return source._with_block(local, layout)


def copy_selected(
    source: DistArray,
    chosen: Sequence[Chosen],
    target: Layout,
    local: Array,
    first: Sequence[int],
) -> None:
    """Copy selected elements into this rank's block of another tensor. All ranks call it.

    Parameters
    ----------
    source : DistArray
        The tensor whose elements are selected.
    chosen : sequence of range or array
        The indices that are selected in each dimension; an array in at most one of them.
    target : Layout
        The layout of the other tensor, which has as many dimensions.
    local : array
        This rank's block of it.
    first : sequence of int
        The indices there of the first selected element.
    """

    def pieces_between(sender: int, receiver: int) -> Iterator[Piece]:
        return _pieces_between(source.layout, sender, chosen, target, receiver, first)

    move_pieces(source.own_comm, source.host, local, pieces_between)


def _pieces_between(
    source: Layout,
    sender: int,
    chosen: Sequence[Chosen],
    target: Layout,
    receiver: int,
    first: Sequence[int],
) -> Iterator[Piece]:
    """Yield what a rank has of the elements that another one, or itself, needs, box by box.

    A box is given by its places in the block of the receiver and in that of the sender.
    """
    source_region = source.block(sender)
    target_region = target.block(receiver)
    if source_region is None or target_region is None:
        return
    if not is_provider(source, sender, receiver):
        return
    pieces: list[list[PlacesInBoth]] = []
    for dimension, chosen_indices in enumerate(chosen):
        pieces_of_dimension = _pieces_of_dimension(
            chosen_indices,
            target_region[dimension],
            source_region[dimension],
            first[dimension],
        )
        if not pieces_of_dimension:
            return
        pieces.append(pieces_of_dimension)
    for combination in itertools.product(*pieces):
        places_in_target = tuple(piece[0] for piece in combination)
        places_in_source = tuple(piece[1] for piece in combination)
        yield places_in_target, places_in_source


def is_provider(source: Layout, sender: int, receiver: int) -> bool:
    """Return whether a rank provides its elements to another one, or to itself.

    Of ranks that hold the same, it is the one with the receiver's own digits on the axes that cut
    nothing, or with the digits 0 if the receiver is not in the mesh.
    """
    if sender >= source.mesh.ranks:
        return False
    receiver_digits = _digits_in(source.mesh, receiver)
    sender_digits = source.mesh.digits(sender)
    for axis, cut in enumerate(source.cuts):
        if cut is None and sender_digits[axis] != receiver_digits[axis]:
            return False
    return True


def _pieces_of_dimension(
    chosen: Chosen, target_runs: Runs, source_runs: Runs, first: int
) -> list[PlacesInBoth]:
    """Return where, in one dimension, the elements are that a sender has for a receiver.

    The chosen indices are at the indices of the result from `first` on.
    """
    if not isinstance(chosen, range):
        return _pieces_of_vector(chosen, target_runs, source_runs, first)
    pieces: list[PlacesInBoth] = []
    target_place = 0  # of the start of the run in the block
    for target_start, target_stop in target_runs:
        start = max(target_start - first, 0)
        stop = max(target_stop - first, 0)
        wanted = chosen[start:stop]
        place_of_wanted = target_place + max(first - target_start, 0)
        source_place = 0
        for source_start, source_stop in source_runs:
            positions = _positions_inside(wanted, source_start, source_stop)
            if positions:
                found = wanted[positions.start : positions.stop]
                distance = source_place - source_start
                in_block = range(found.start + distance, found.stop + distance, found.step)
                in_target = range(
                    place_of_wanted + positions.start, place_of_wanted + positions.stop
                )
                pieces.append((_as_slice(in_target), _as_slice(in_block)))
            source_place += source_stop - source_start
        target_place += target_stop - target_start
    return pieces


def _pieces_of_vector(
    chosen: Integers, target_runs: Runs, source_runs: Runs, first: int
) -> list[PlacesInBoth]:
    """Do the work of `_pieces_of_dimension` for indices in any order."""
    target_indices = indices(target_runs) - first
    in_selection = (target_indices >= 0) & (target_indices < len(chosen))
    places_in_target = np.nonzero(in_selection)[0]
    wanted = chosen[target_indices[places_in_target]]
    source_indices = indices(source_runs)
    if not source_indices.size or not wanted.size:
        return []
    places = np.searchsorted(source_indices, wanted)
    places_in_range = np.minimum(places, len(source_indices) - 1)
    is_there = source_indices[places_in_range] == wanted
    if not is_there.any():
        return []
    return [(places_in_target[is_there], places[is_there])]


def _positions_inside(wanted: range, start: int, stop: int) -> range:
    """Return the positions of the numbers of an arithmetic progression in [start, stop)."""
    if wanted.step < 0:
        backwards = _positions_inside(wanted[::-1], start, stop)
        return range(len(wanted) - backwards.stop, len(wanted) - backwards.start)
    return range(bisect_left(wanted, start), bisect_left(wanted, stop))


def _as_slice(places: range) -> slice:
    """Return the slice of an array that has these places."""
    if not places:
        return slice(0)
    # A negative number would count from the end of the array.
    return slice(places.start, None if places.stop < 0 else places.stop, places.step)
