"""Compiled loops over lists of indices that never change: these are looked at once, and loops need
not test whether they are in range. Short sums over what they gather are computed in registers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from typing import NamedTuple, TypeAlias

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, IndexEntries
from einmpi.kernels.cpu.compiled import (
    MIN_THREADED_VALUES,
    JobTemplate,
    OperandView,
    chunk_count,
    indexed_array,
    is_addressable,
    operand_views,
    shares_of,
)
from einmpi.kernels.fixed_lists import identity_of, is_within
from einmpi.kernels.loop_nest import (
    AGGREGATED_LANES_BYTES,
    BLOCK_STEPS,
    Axis,
    BoundNest,
    GatheredDimension,
    IndexedArray,
    Nest,
    accesses_of,
    axes_of,
    bind_nest,
    gathered_dimensions,
    outer_and_inner,
)
from einmpi.kernels.operands import Array, number_operands
from einmpi.kernels.prepared import PreparedCall

Finish: TypeAlias = Callable[[Array, Array], None]


class Loops(NamedTuple):
    """Loops for some operands and an output.

    They read these operands in each call, and lists that never change where they are; and take
    `memory`, arrays of such shapes and dtypes. If `finish` is given, they fill an array of this
    shape, of which it makes the output.
    """

    template: JobTemplate
    taken: Sequence[int]
    shape: tuple[int, ...] = ()
    finish: Finish | None = None
    memory: Sequence[tuple[tuple[int, ...], str]] = ()


class _Made(NamedTuple):
    """The loops that were made for some lists, if there are any."""

    identities: Hashable = None
    loops: Loops | None = None
    lists: Sequence[Array | None] = (None,)


# Makes loops for some operands and an output, if their lists never change.
MakeLoops: TypeAlias = Callable[[Sequence[Array], Array], Loops | None]
Gathered: TypeAlias = tuple[tuple[GatheredDimension, ...], ...]  # of each array

MIN_LANES = 4  # that are summed at a time


class KnownIndicesCall:
    """A kernel by loops that were made for lists of indices, as long as it gets these."""

    def __init__(
        self,
        lists: Iterable[int],
        make: MakeLoops,
        threads: int,
        otherwise: PreparedCall,
    ) -> None:
        self.lists = tuple(dict.fromkeys(lists))  # the operands that are lists
        self.make = make
        self.threads = threads
        self.otherwise = otherwise
        self.made = _Made()

    def __call__(self, operands: Sequence[Array], out: Array) -> None:
        lists = [operands[k] for k in self.lists]
        made = self.made
        if not all(map(is_, made.lists, lists)):
            made = self._made_for(lists, operands, out)
        loops = made.loops
        if loops is None:
            self.otherwise(operands, out)
            return
        template = loops.template
        target = out if loops.finish is None else np.empty(loops.shape, out.dtype)
        memory = [np.empty(shape, dtype) for shape, dtype in loops.memory]
        template.run([*[operands[k] for k in loops.taken], *memory, target], self.threads)
        if loops.finish is not None:
            loops.finish(target, out)

    def _made_for(self, lists: Sequence[Array], operands: Sequence[Array], out: Array) -> _Made:
        """Return the loops for these lists: others may be the same, such as views of one array."""
        identities = tuple(map(identity_of, lists))
        made = self.made
        loops = made.loops if made.identities == identities else self.make(operands, out)
        self.made = _Made(identities, loops, (None,) if None in identities else lists)
        return self.made


def index_lists(einsum: EinSum) -> list[int]:
    """Return the operands whose elements are indices of others."""
    positions = []
    for entries in einsum.operands:
        positions += [entry.position for entry in entries if isinstance(entry, Arg)]
    return positions


def place_operands(
    template: JobTemplate,
    views: Sequence[OperandView],
    operands: Sequence[Array],
    taken: Sequence[int],
    lists: Collection[int],
) -> list[int]:
    """Place what loops read, of the operands in `taken`; return those that each call gives.

    Those in `lists` stay where they are, if they never change.
    """
    given: list[Array | None] = []
    in_calls = []
    for k in taken:
        stays = k in lists and identity_of(operands[k]) is not None
        given.append(None if stays else operands[k])
        if not stays:
            in_calls.append(k)
    template.place_views(views, given)
    return in_calls


def known_to_be_within(einsum: EinSum, operands: Sequence[Array]) -> tuple[int, ...]:
    """Return the operands none of whose indices can be out of range, since lists never change."""
    found = []
    for number, entries in enumerate(einsum.operands):
        if _are_within(entries, operands[number].shape, operands):
            found.append(number)
    return tuple(found)


def _are_within(entries: IndexEntries, shape: Sequence[int], operands: Sequence[Array]) -> bool:
    for entry, extent in zip(entries, shape, strict=True):
        if not isinstance(entry, str):
            is_list = isinstance(entry, Arg) and is_within(operands[entry.position], extent)
            if not is_list:
                return False
    return True


def dense_strides(
    arrays: Sequence[IndexedArray], axes: Sequence[Axis], gathered: Gathered
) -> tuple[tuple[str, int], ...]:
    """Return the strides of arrays along which their elements follow one another.

    Where few values are aggregated, to multiply by strides takes longer than all else.
    """
    found = []
    for number, array in enumerate(arrays):
        size = np.dtype(array.dtype).itemsize
        for loop, axis in enumerate(axes):
            if axis.strides[number] == size:
                found.append((f"stride{number}_{loop}", size))
        for k, dimension in enumerate(gathered[number]):
            if dimension.stride == size:
                found.append((f"gather_stride{number}_{k}", size))
    return tuple(found)


# ---- gathers -------------------------------------------------------------------------------------


def prepare_known_gathers(
    einsum: EinSum,
    operands: Sequence[Array],
    out: Array,
    index: Mapping[str, Array],
    threads: int,
    otherwise: PreparedCall,
) -> PreparedCall:
    """Return an EinSum that reads operands at listed indices; `otherwise` if lists may change."""
    lists = index_lists(einsum)
    if not lists or einsum.calls() == 0 or chunk_count(einsum) > 1:
        return otherwise
    if not all(map(is_addressable, (*operands, out))):
        return otherwise
    used_threads = threads if einsum.calls() >= MIN_THREADED_VALUES else 1
    make = partial(_gather_loops, einsum, index, used_threads)
    return KnownIndicesCall(lists, make, used_threads, otherwise)


def _gather_loops(
    einsum: EinSum,
    index: Mapping[str, Array],
    threads: int,
    operands: Sequence[Array],
    out: Array,
) -> Loops | None:
    within = known_to_be_within(einsum, operands)
    if len(within) < len(operands):
        return None
    views = operand_views(einsum, operands, index)
    reads = tuple(indexed_array(*view) for view in views)
    bound = _bind_gathers(einsum, reads, indexed_array(out, einsum.output))
    if bound.packed:
        return None
    template = JobTemplate(bound, *shares_of(bound, bound.box, 1, threads))
    taken = range(len(operands))
    in_calls = place_operands(template, views, operands, taken, index_lists(einsum))
    template.place(-1, out, out)
    return Loops(template, in_calls)


@bounded_cache(4096)
def _bind_gathers(
    einsum: EinSum, reads: tuple[IndexedArray, ...], target: IndexedArray
) -> BoundNest:
    """Return loops for arrays with these strides, whose indices are not tested."""
    function = number_operands(einsum).function
    bound = _bind_short_sums(einsum, reads, target)
    if bound is None:
        bound = bind_nest(function, reads, target, einsum.aggregation, einsum.extents)
    nest = bound.nest
    accesses = tuple(replace(access, is_checked=False) for access in nest.reads)
    constants = dense_strides((*reads, target), bound.axes, (*bound.gathered, ()))
    return replace(bound, nest=replace(nest, reads=accesses, constants=constants))


def _bind_short_sums(
    einsum: EinSum, reads: tuple[IndexedArray, ...], target: IndexedArray
) -> BoundNest | None:
    """Return loops whose lanes are a short aggregated label; None if there is none."""
    arrays = (*reads, target)
    outer, aggregated = outer_and_inner(axes_of(arrays, einsum.extents))
    if len(aggregated) != 1 or not outer:
        return None
    (lane,) = aggregated
    sizes = [np.dtype(array.dtype).itemsize for array in arrays]
    width = AGGREGATED_LANES_BYTES // max(sizes)
    while lane.extent % width:
        width //= 2
    if width < MIN_LANES or lane.extent > BLOCK_STEPS * width:
        return None
    if any(stride not in (0, size) for stride, size in zip(lane.strides, sizes, strict=True)):
        return None
    outer.sort(key=lambda axis: -abs(axis.strides[-1]))
    axes = (*outer, lane)
    *accesses, out = accesses_of(arrays, axes, lane)
    nest = Nest(
        function=number_operands(einsum).function,
        reads=tuple(accesses),
        out=out,
        aggregation=einsum.aggregation,
        output_loops=len(outer),
        loops=len(axes),
        aggregates_lanes=True,
        has_rows=False,
        width=width,
        short_sum=lane.extent,
    )
    return BoundNest(nest, axes, (), tuple(map(gathered_dimensions, reads)))
