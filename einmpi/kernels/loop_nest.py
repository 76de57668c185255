"""Nests of loops: what the source of a compiled CPU kernel depends on, and the extents, strides
and addresses that it is given when it runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.caches import bounded_cache
from einmpi.graph.einsum import EinSum
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Call, IndexEntries, Scalar, gathers_in, walk

INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)
COUNTER_STEP = 8  # the stride of a Counter, that of int64

Range: TypeAlias = tuple[int, int]  # start and stop
BLOCK_STEPS = 128  # steps of an aggregated loop before their partial result joins the total
# What a kernel reads that finds values by keys: for each x the row of y, where these begin, and the
# column of each y; for each result its column; for each row where x and results begin. Then memory
# for the place of each column, and for the sums of a row.
MATCHES = ("match", "first_y", "column", "own_column", "first_x", "first_p", "place", "sums")
# With what other parameters than 0 a kernel of all places begins.
INITIAL = {"lowest": INT64_MAX, "highest": INT64_MIN, "end_place": INT64_MAX}


@dataclass(frozen=True)
class Access:
    """How a kernel reads or writes an array."""

    dtype: str
    loops: tuple[int, ...]  # in which its address changes
    dense: bool  # contiguous along the lanes
    gathers: tuple[Scalar, ...] = ()  # an index expression for each gathered dimension
    counts: bool = False  # a Counter: nothing is read
    is_checked: bool = True  # the indices of gathers: they may be out of range


@dataclass(frozen=True)
class Nest:
    """All that the source of a kernel depends on: its loops and what is computed in them.

    Loops are numbered from the outermost inwards, those of the output before the aggregated ones.
    Three of them have a special part. The *lanes* are computed in vectors: they are the last loop
    of the output, or the last loop of all. The *rows*, the output's loop before the lanes, and the
    *steps*, the last aggregated loop, are unrolled, so that a loaded value is used several times.
    """

    function: Scalar  # over Args: labels whose values are used are operands too
    reads: tuple[Access, ...]
    out: Access
    aggregation: str | None
    output_loops: int
    loops: int
    aggregates_lanes: bool
    has_rows: bool
    width: int  # lanes that are computed at a time
    # The operand with the places to which values go, if the output is scattered.
    place: int | None = None
    # The operand with the first value of each segment, if the outermost loop goes over segments:
    # the first aggregated loop then goes over the values of one. The next operand has their ends.
    segments: int | None = None
    has_short_segments: bool = False  # none is longer than BLOCK_STEPS
    # Each begins where the one before ends, and no other loop is outside of its values.
    has_adjacent_segments: bool = False
    # The first of the operands with the keys by which values of two loops are found (see MATCHES).
    matches: int | None = None
    short_sum: int = 0  # how many lanes are aggregated, if that is part of the source
    # Parameters that are part of the source, with their values.
    constants: tuple[tuple[str, int], ...] = ()
    # Of sums over few rows, how many values of each loop are written out, and whether no factor is
    # taken out of a sum.
    tiles: tuple[int, ...] = ()
    is_strict: bool = False

    @property
    def lane(self) -> int:
        """The loop of the lanes."""
        return self.loops - 1 if self.aggregates_lanes else self.output_loops - 1

    @property
    def row(self) -> int | None:
        """The loop of the rows."""
        return self.output_loops - 2 if self.has_rows else None

    @property
    def step(self) -> int | None:
        """The loop of the steps."""
        return self.loops - 1 if self.loops > self.output_loops else None

    @property
    def unrolled(self) -> tuple[int, int]:
        """How many rows and how many steps are computed at a time.

        Unrolling repeats ⊗ in the source, once for each row and step. The longer ⊗ is, the less
        it is repeated: it would take long to compile, and there would be too few registers.
        """
        nodes = walk(self.function)
        calls = [node for node in nodes if isinstance(node, Call)]
        long_calls = sum(OPERATIONS[call.op].cpu_is_long for call in calls)
        weight = len(nodes) + 8 * long_calls
        if any(read.dtype.startswith("complex") for read in self.reads):
            weight *= 3
        if weight > 16:
            return 1, 1
        rows = 2 if self.has_rows else 1
        steps = 4 if weight <= 8 else 2
        return rows, steps

    def parameters(self) -> list[str]:
        """Return the names of a kernel's parameters, in the order in which it finds them in memory.

        Loops have `start0` and `stop0`, arrays, the output being the last one, `array0`, their
        address. The other names are those of `loop_arguments`. To `lowest0_1` and `highest0_1` the
        kernel writes the least and the greatest index that it met in a gather. If the output is
        scattered, the kernel takes the values with places from `first_place` to `end_place`.
        """
        names = []
        for loop in range(self.loops):
            names += [f"start{loop}", f"stop{loop}"]
        for array, access in enumerate((*self.reads, self.out)):
            names.append(f"array{array}")
            names += [f"stride{array}_{loop}" for loop in access.loops]
            for number in range(len(access.gathers)):
                names.append(f"gather_stride{array}_{number}")
                if access.is_checked:
                    for role in ("gather_extent", "lowest", "highest"):
                        names.append(f"{role}{array}_{number}")
        if self.place is not None:
            names += ["first_place", "end_place"]
        return names


@dataclass(frozen=True)
class IndexedArray:
    """An array and what indexes its dimensions: labels, or expressions over Args."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes on a CPU, in elements on a GPU
    index: IndexEntries
    first: int | None = None  # of a Counter, where it begins


@dataclass(frozen=True)
class Counter:
    """The values of a label whose indices follow one another: computed, not read.

    It looks like the array of these values. A value is the address of its element, divided by
    COUNTER_STEP; so kernels find it as they find elements, by addresses and strides.
    """

    start: int
    extent: int

    dtype: ClassVar[np.dtype[np.int64]] = np.dtype(np.int64)
    strides: ClassVar[tuple[int, ...]] = (COUNTER_STEP,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.extent,)

    @property
    def __array_interface__(self) -> dict[str, tuple[int, bool]]:
        return {"data": (self.start * COUNTER_STEP, True)}


def counted(values: npt.NDArray[np.int64] | Counter) -> npt.NDArray[np.int64] | Counter:
    """Return ascending values of a label as a Counter, if they follow one another."""
    if isinstance(values, Counter):
        return values
    if len(values) == 0 or values[-1] - values[0] != len(values) - 1:
        return values
    return Counter(int(values[0]), len(values))


class Axis(NamedTuple):
    """A loop, with the strides of all arrays along it, the output's last.

    Labels that every array walks through like a single one share an axis.
    """

    extent: int
    aggregated: bool
    strides: tuple[int, ...]


def outer_and_inner(axes: Iterable[Axis]) -> tuple[list[Axis], list[Axis]]:
    """Return the loops of the output, and the aggregated loops."""
    outer = []
    inner = []
    for axis in axes:
        if axis.aggregated:
            inner.append(axis)
        else:
            outer.append(axis)
    return outer, inner


def densest(axes: Iterable[Axis], arrays: Sequence[IndexedArray]) -> Axis:
    """Return the loop along which most arrays are contiguous, of equal ones the last.

    Without any, return a loop of a single value.
    """
    sizes = [np.dtype(array.dtype).itemsize for array in arrays]
    found = Axis(1, False, (0,) * len(arrays))
    most = 0
    for axis in axes:
        dense = sum(stride == size for stride, size in zip(axis.strides, sizes, strict=True))
        if dense >= most:
            found, most = axis, dense
    return found


class GatheredDimension(NamedTuple):
    """A dimension whose index is computed: its stride and its extent."""

    stride: int
    extent: int


@dataclass(frozen=True)
class BoundNest:
    """A nest with the extents and strides of the arrays that it is to run on."""

    nest: Nest
    axes: tuple[Axis, ...]  # one for each loop
    packed: tuple[int, ...]  # the operands that are copied first
    gathered: tuple[tuple[GatheredDimension, ...], ...]  # of each operand

    @property
    def box(self) -> list[Range]:
        """The whole of each loop."""
        return [(0, axis.extent) for axis in self.axes]

    @cached_property
    def position(self) -> dict[str, int]:
        """The position of each parameter."""
        return {name: k for k, name in enumerate(self.nest.parameters())}

    @cached_property
    def addresses(self) -> list[int]:
        """The positions of the addresses of all arrays, the output's last."""
        return [self.position[f"array{array}"] for array in range(len(self.nest.reads) + 1)]

    @cached_property
    def values(self) -> npt.NDArray[np.int64]:
        """The parameters for the whole nest; addresses are left 0."""
        known = loop_arguments(self.axes, self.gathered)
        for loop, axis in enumerate(self.axes):
            known[f"stop{loop}"] = axis.extent
        found = [known.get(name, INITIAL.get(role_of(name), 0)) for name in self.position]
        return np.array(found, np.int64)


def role_of(name: str) -> str:
    """Return what a parameter is, without the numbers of its loop, array or dimension."""
    return name.rstrip("0123456789_")


def loop_arguments(
    axes: Sequence[Axis], gathered: Sequence[Sequence[GatheredDimension]]
) -> dict[str, int]:
    """Return the arguments of a kernel by name, on any device.

    `extent0` belongs to a loop, `stride0_1` to an array and a loop, `gather_stride0_1` and
    `gather_extent0_1` to an array and one of its gathered dimensions.
    """
    found = {}
    for loop, axis in enumerate(axes):
        found[f"extent{loop}"] = axis.extent
        for array, stride in enumerate(axis.strides):
            found[f"stride{array}_{loop}"] = stride
    for array, dimensions in enumerate(gathered):
        for number, dimension in enumerate(dimensions):
            found[f"gather_stride{array}_{number}"] = dimension.stride
            found[f"gather_extent{array}_{number}"] = dimension.extent
    return found


def accesses_of(
    arrays: Sequence[IndexedArray],
    axes: Sequence[Axis],
    lane: Axis | None = None,
    packed: Container[int] = (),
) -> tuple[Access, ...]:
    """Return how loops in this order access arrays; packed ones are dense along the lanes."""
    accesses = []
    for k, array in enumerate(arrays):
        is_dense = k in packed
        if lane is not None and lane.strides[k] == np.dtype(array.dtype).itemsize:
            is_dense = True
        loops = tuple(loop for loop, axis in enumerate(axes) if axis.strides[k])
        counts = array.first is not None
        accesses.append(Access(array.dtype, loops, is_dense, gathers_in(array.index), counts))
    return tuple(accesses)


def axes_of(
    arrays: Sequence[IndexedArray], extents: Sequence[tuple[str, int]], merges_sums: bool = True
) -> list[Axis]:
    """Return an axis for each label of more than one value, merged where arrays allow it.

    A label that an array lacks has the stride 0 in it. If no label has more than one value, return
    a single axis of extent 1. The output is the last array. Unless it `merges_sums`, each
    aggregated label has an axis of its own, and they stay in their order.
    """
    tables = [stride_by_entry(array.index, array.strides) for array in arrays]
    output = arrays[-1].index
    axes = []
    for label, extent in extents:
        if extent > 1:
            strides = tuple(table.get(label, 0) for table in tables)
            axes.append(Axis(extent, label not in output, strides))
    if not axes:
        return [Axis(1, False, (0,) * len(arrays))]
    if merges_sums:
        return _merge_axes(axes)
    outer, inner = outer_and_inner(axes)
    return _merge_axes(outer) + inner


def stride_by_entry(index: IndexEntries, strides: Sequence[int]) -> dict[str | Scalar, int]:
    """Return the stride of each label of an array.

    A label that occurs twice walks along both dimensions at once, on the diagonal.
    """
    table: dict[str | Scalar, int] = {}
    for entry, stride in zip(index, strides, strict=True):
        table[entry] = table.get(entry, 0) + stride
    return table


def _merge_axes(axes: list[Axis]) -> list[Axis]:
    """Merge pairs of axes until no axis continues another one.

    The outer axis continues the inner one if, in every array, its stride is the length of the
    inner axis: then both together are walked through like a single, longer axis. Fewer and longer
    loops fill vectors better.
    """
    for outer, inner in itertools.permutations(axes, 2):
        continued = tuple(stride * inner.extent for stride in inner.strides)
        if outer.aggregated == inner.aggregated and outer.strides == continued:
            rest = [axis for axis in axes if axis is not outer and axis is not inner]
            merged = Axis(outer.extent * inner.extent, outer.aggregated, inner.strides)
            return _merge_axes([*rest, merged])
    return axes


# ---- loop choice ---------------------------------------------------------------------------------
#
# The fastest loops for an EinSum: which label becomes the vector lanes, which the rows, which
# the outer loops. Only extents and strides decide, so every run gets the same loops.


PACKED_BYTES = 2**22  # of an operand that are copied at a time, to be contiguous along the lanes
MIN_PACKED_LANES = 512  # that such a copy has, if there are so many
MIN_PACKED_READS = 8  # how often such a copy must be read to be worth it
STRIP_BYTES = 2**15  # of lanes without rows: memory streams, and they fit into the first cache
AGGREGATED_LANES_BYTES = 2**7  # of lanes aggregated into one result: they fit into registers
NARROW_TILE_LANES = 32  # of a tile, if there are no more
TILE_LANES = 128


@bounded_cache(4096)
def bind_nest(
    function: Scalar,
    operands: tuple[IndexedArray, ...],
    target: IndexedArray,
    aggregation: str | None,
    extents: tuple[tuple[str, int], ...],
    summed_lane: str | None = None,
) -> BoundNest:
    """Return the fastest loops for an EinSum on arrays with these strides.

    Parameters
    ----------
    function
        ⊗ over Args, one for each operand.
    operands, target
        The arrays that the loops read, and the one that they write.
    aggregation
        The name of ⊕, or None if there is no aggregation.
    extents
        The extent of every label.
    summed_lane
        If values have to be aggregated in an order that follows from their labels alone: the
        aggregated label of the lanes, "" if they are a label of the output.
    """
    arrays = (*operands, target)
    choice = _LoopChoice(
        axes=axes_of(arrays, extents, summed_lane is None),
        itemsizes=[np.dtype(array.dtype).itemsize for array in arrays],
        is_gathered=[bool(gathers_in(array.index)) for array in arrays],
    )
    # Of equally good axes the last one: its label is the last of an index.
    possible = list(choice.axes)
    if summed_lane is not None:
        possible, summed = outer_and_inner(choice.axes)
        labels = [label for label, n in extents if n > 1 and label not in target.index]
        if summed_lane in labels:
            possible = [summed[labels.index(summed_lane)]]
    nothing = Axis(1, False, (0,) * len(arrays))
    lane = min(reversed(possible), key=choice.cost_of_lanes, default=nothing)
    axes, has_rows = choice.loop_order(lane)
    packed = tuple(k for k in range(len(operands)) if choice.is_packed(k, lane))
    *reads, out = accesses_of(arrays, axes, lane, packed)
    if has_rows:
        width = NARROW_TILE_LANES if lane.extent <= NARROW_TILE_LANES else TILE_LANES
    elif lane.aggregated:
        width = AGGREGATED_LANES_BYTES // max(choice.itemsizes)
    else:
        width = STRIP_BYTES // max(choice.itemsizes)
    nest = Nest(
        function=function,
        reads=tuple(reads),
        out=out,
        aggregation=aggregation if choice.aggregates else None,
        output_loops=sum(not axis.aggregated for axis in axes),
        loops=len(axes),
        aggregates_lanes=lane.aggregated,
        has_rows=has_rows,
        width=width,
    )
    return BoundNest(nest, axes, packed, tuple(map(gathered_dimensions, operands)))


def summed_lane(einsum: EinSum) -> str:
    """Return the aggregated label of the lanes where values are aggregated in one order: or "".

    It follows from how operands are indexed alone. Lanes are contiguous in a tensor that has all
    labels.
    """
    last = einsum.aggregated[-1]
    for entries in einsum.operands:
        if entries[-1:] == (last,) and set(einsum.labels) <= set(entries):
            return last
    return ""


def gathered_dimensions(array: IndexedArray) -> tuple[GatheredDimension, ...]:
    """Return the dimensions of an array that are indexed by expressions."""
    dimensions = []
    for entry, stride, extent in zip(array.index, array.strides, array.shape, strict=True):
        if not isinstance(entry, str):
            dimensions.append(GatheredDimension(stride, extent))
    return tuple(dimensions)


@dataclass(frozen=True)
class _LoopChoice:
    """The axes and arrays among which the lanes and the order of loops are chosen."""

    axes: Sequence[Axis]
    itemsizes: Sequence[int]  # of the operands, then of the output
    is_gathered: Sequence[bool]

    @property
    def aggregates(self) -> bool:
        """Whether there is anything to aggregate."""
        return any(axis.aggregated for axis in self.axes)

    def cost_of_lanes(self, lane: Axis) -> float:
        """Return the cost of a step with these lanes, relative to a load of a contiguous vector.

        Short lanes fill vectors badly, and aggregated lanes must be combined in the end. Only the
        order of the costs matters.
        """
        output = len(self.itemsizes) - 1
        reads = sum(self._access_cost(array, lane) for array in range(output))
        if lane.aggregated:
            return (reads + 0.5) * (1 + 64 / lane.extent)
        # With aggregation, the output is written only once for many steps.
        writes = (0.25 if self.aggregates else 1.0) * self._access_cost(output, lane)
        return (reads + writes) * (1 + 8 / lane.extent)

    def _access_cost(self, array: int, lane: Axis) -> float:
        """Return the cost of one vector of an array.

        A value that is the same for all lanes is loaded once for many vectors. Lanes that are
        apart in memory are loaded one by one, unless the operand is packed beforehand.
        """
        stride = lane.strides[array]
        if stride == 0:
            return 0.25
        if stride == self.itemsizes[array]:
            return 1.0
        return 1.3 if self.is_packed(array, lane) else 4.0

    def is_packed(self, array: int, lane: Axis) -> bool:
        """Return whether an operand is copied to be contiguous along the lanes.

        It pays for an operand that is not contiguous yet, if the copy is read often enough: once
        for each position of the axes that the operand does not depend on. The copy must fit into
        PACKED_BYTES with all aggregated positions and a minimum of lanes.
        """
        is_output = array == len(self.itemsizes) - 1
        is_contiguous = lane.strides[array] in (0, self.itemsizes[array])
        if is_output or is_contiguous or lane.aggregated or self.is_gathered[array]:
            return False
        own_axes = [axis for axis in self.axes if axis.strides[array]]
        other_axes = [axis for axis in self.axes if not axis.strides[array]]
        reads = prod(axis.extent for axis in other_axes)
        depth = prod(axis.extent for axis in own_axes if axis.aggregated)
        lanes = min(MIN_PACKED_LANES, lane.extent)
        fits = depth * self.itemsizes[array] * lanes <= PACKED_BYTES
        return self.aggregates and reads >= MIN_PACKED_READS and fits

    def loop_order(self, lane: Axis) -> tuple[tuple[Axis, ...], bool]:
        """Return the axes from the outermost loop inwards, and whether there are rows.

        Loops with long strides in the output come first. The steps are the longest aggregated
        loop. The rows are the longest loop that makes use of the same loads.
        """
        outer, inner = outer_and_inner(axis for axis in self.axes if axis is not lane)
        outer.sort(key=lambda axis: -abs(axis.strides[-1]))
        inner.sort(key=lambda axis: axis.extent)
        if lane.aggregated:
            return (*outer, *inner, lane), False
        suitable = [axis for axis in outer if self._suits_as_rows(axis, lane, bool(inner))]
        if not suitable:
            return (*outer, lane, *inner), False
        row = max(suitable, key=lambda axis: axis.extent)
        before = [axis for axis in outer if axis is not row]
        return (*before, row, lane, *inner), True

    def _suits_as_rows(self, row: Axis, lane: Axis, has_steps: bool) -> bool:
        """Return whether rows along this axis save loads.

        With steps, it must use a vector of an operand again that the lanes have loaded. Without,
        it pays to walk in squares through an array that is contiguous along the rows.
        """
        arrays = list(zip(lane.strides, row.strides, self.itemsizes, strict=True))
        if has_steps:
            return any(along and not across for along, across, _ in arrays[:-1])
        return any(across == size and along not in (0, size) for along, across, size in arrays)
