"""Rows of a tensor that scattered sums change, W[i] − rate · Σ values, in one compiled pass.

The sum of a row is in a buffer of the kernel's until the row is changed; it is never in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call, Scalar
from einmpi.kernels import row_writes
from einmpi.kernels.contraction import dense_strides
from einmpi.kernels.cpu.compiled import (
    MIN_THREADED_VALUES,
    JobTemplate,
    built_kernel,
    even_ranges,
    is_addressable,
    run_jobs,
)
from einmpi.kernels.cpu.dispatch import prepare_einsum
from einmpi.kernels.cpu.loop_source import HEAD, SourceLines
from einmpi.kernels.cpu.scalar_source import Lanes, convert, number, operation
from einmpi.kernels.cpu.scatter import Scatter, bind_values, supports_scatter_loops
from einmpi.kernels.index_sets import LabelRuns
from einmpi.kernels.loop_nest import BoundNest, Nest
from einmpi.kernels.operands import Array
from einmpi.kernels.prepared import PreparedCall, address_of, apply
from einmpi.kernels.updates import PlacedRows
from einmpi.schedule.compute import Kernel
from einmpi.schedule.regions import indices

# ---- row writes ----------------------------------------------------------------------------------


def prepare_row_writes(
    kernel: Kernel, operands: Sequence[Array], target: Array, strict: bool, repetition: int
) -> PreparedCall | None:
    """Return a kernel that is written over one of its operands as a write of some of its rows."""

    def prepare(
        einsum: EinSum, operands: Sequence[Array], out: Array, runs: LabelRuns
    ) -> PreparedCall:
        index = {label: indices(own) for label, own in runs}
        return prepare_einsum(einsum, operands, out, index, strict=strict, repetition=repetition)

    device = row_writes.RowDevice(np.empty, prepare, _prepare_write)
    return row_writes.prepare_row_writes(kernel, operands, target, device)


def _prepare_write(rows: PlacedRows, einsum: EinSum, *_: Array) -> row_writes.Write:
    others = rows.value.output
    own = [label for label in others if label not in rows.place_labels]
    labels = (*rows.place_labels, rows.label, *own)
    target_axes = [einsum.output.index(label) for label in labels]
    value_axes = [others.index(label) for label in (*rows.place_labels, *own)]
    positions = list(product(*[range(einsum.extent[label]) for label in rows.place_labels]))

    def write(places: Array, values: Array, target: Array, start: int, stop: int) -> None:
        by_place = target.transpose(target_axes)
        values = values.transpose(value_axes)
        for position in positions:
            place = int(places[position])
            if start <= place < stop:
                by_place[(*position, place - start)] = values[position]

    return write


# ---- row updates ---------------------------------------------------------------------------------


Rows: TypeAlias = npt.NDArray[np.int64]

STRIP_LANES = 512  # of a row that are summed at a time: their sums stay in the first cache
# Parameters after those of the nest: addresses, numbers of rows, and the distance of rows in bytes.
OWN_PARAMETERS = ("order", "starts", "rows", "first_row", "end_row", "target", "distance", "factor")


class ChangedRows(NamedTuple):
    """The rows that get values, and which values, in order, each of them gets."""

    rows: Rows
    starts: Rows  # of each row in `order`, and the end of the last
    order: Rows  # the values, counted in the order of the indices


@dataclass(frozen=True)
class RowUpdate:
    """What happens to a row: its elements plus or minus its sums, times or divided by a number."""

    operation: str  # "+" or "-"
    factor_operation: str  # "*", "/" or "", if there is no factor
    factor: Scalar | None  # over Args of the update


def find_row_update(
    operation: str, multiple: Scalar, change: int, einsum: EinSum
) -> RowUpdate | None:
    """Return an update by a multiple of operand `change`; None if it is more than one factor."""
    match multiple:
        case Arg(position) if position == change:
            return RowUpdate(operation, "", None)
        case Call("*", (left, Arg(position))) if position == change and einsum.is_one_number(left):
            return RowUpdate(operation, "*", left)
        case Call("*" | "/", (Arg(position), right)) if position == change and einsum.is_one_number(
            right
        ):
            return RowUpdate(operation, multiple.op, right)
    return None


def changed_rows(places: npt.NDArray[Any], extent: int) -> ChangedRows:
    """Return which rows of `extent` get values; places of other rows count for nothing."""
    flat = np.asarray(places, np.int64).reshape(-1)
    order = np.argsort(flat, kind="stable")
    places_in_order = flat[order]
    first, end = np.searchsorted(places_in_order, (0, extent))
    order = order[first:end]
    places_in_order = places_in_order[first:end]
    is_first = np.ones(len(order), bool)
    np.not_equal(places_in_order[1:], places_in_order[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    rows = places_in_order[starts]
    return ChangedRows(rows, np.append(starts, len(order)), np.ascontiguousarray(order))


# ---- calls ---------------------------------------------------------------------------------------


class ScatteredUpdate:
    """An update prepared for arrays that are stored like the given ones."""

    def __init__(
        self,
        product: EinSum,
        operands: Sequence[Array],
        index: Mapping[str, Array],
        places: Array,
        update: RowUpdate,
        dtype: str,
        threads: int,
    ) -> None:
        self.dtype = dtype
        self.update = update
        self.threads = threads
        self.template: JobTemplate | None = None
        total_dtype = DTYPES[dtype].accumulator
        scatter = Scatter(product, product.required_segments, tuple(operands), index)
        if not supports_scatter_loops(scatter):
            return
        strides = dense_strides(product.output, product.extent, np.dtype(total_dtype).itemsize)
        bound, views = bind_values(scatter, [places], total_dtype, strides)
        arrays = [view.array for view in views]
        are_views = all(map(np.may_share_memory, arrays, operands))
        if are_views and _is_simple(bound):
            self.template = JobTemplate(bound, 0, bound.box[:1])
            for number, array in enumerate(arrays):
                if number < len(operands):
                    self.template.place(number, array, operands[number])
                elif number > len(operands):  # places are among the parameters in another form
                    self.template.place(number, array, None)

    @property
    def is_possible(self) -> bool:
        return self.template is not None

    def compute(
        self, operands: Sequence[Array], changed: ChangedRows, target: Array, factor: Any
    ) -> None:
        """Change the rows of a target in place."""
        assert self.template is not None
        bound = self.template.bound
        nest = bound.nest
        update = self.update
        dtype = self.dtype
        kernel = built_kernel(
            (nest, dtype, update.operation, update.factor_operation),
            lambda: _source(nest, dtype, update.operation, update.factor_operation),
        )
        factor_array = np.array(factor, dtype)
        own = [
            address_of(changed.order),
            address_of(changed.starts),
            address_of(changed.rows),
            0,
            len(changed.rows),
            address_of(target),
            target.strides[0],
            address_of(factor_array),
        ]
        (parameters,) = self.template.jobs_for(operands)
        lanes = bound.axes[nest.lane].extent
        pieces = 1
        if lanes * len(changed.order) >= MIN_THREADED_VALUES:
            pieces = max(1, min(self.threads, len(changed.rows)))
        jobs = np.tile(np.append(parameters, own), (pieces, 1))
        first_row = len(parameters) + OWN_PARAMETERS.index("first_row")
        jobs[:, first_row : first_row + 2] = even_ranges(0, len(changed.rows), pieces)
        run_jobs(kernel, jobs, self.threads)


def _is_simple(bound: BoundNest) -> bool:
    """Return whether a value is found by the number of its place, along lanes that are rows.

    Nothing but the target may be gathered, and places are stored in the order of their labels.
    """
    nest = bound.nest
    assert nest.place is not None
    is_row = nest.output_loops == 1 and nest.out.dense
    if not is_row or nest.loops == 1 or any(read.gathers for read in nest.reads):
        return False
    distance = np.dtype(np.int64).itemsize
    for axis in reversed(bound.axes[nest.output_loops :]):
        if axis.strides[nest.place] != distance:
            return False
        distance *= axis.extent
    return True


def can_change(target: Array, lanes: int) -> bool:
    """Return whether rows of an array can be changed: they are contiguous, with so many lanes."""
    is_matrix = target.ndim == 2 and target.shape[1] == lanes and is_addressable(target)
    return is_matrix and target.strides[1] == target.itemsize


def prepare_factor(update: RowUpdate, dtype: str) -> Callable[[Sequence[Any]], Any]:
    """Return what computes the factor of an update from operands; None for a wider dtype."""

    def factor_of(numbers: Sequence[Any]) -> Any:
        if update.factor is None:
            return 1
        value = apply(update.factor, numbers, {})
        if isinstance(value, np.ndarray):
            value = value[()]
        return value if np.result_type(np.dtype(dtype), value) == np.dtype(dtype) else None

    return factor_of


# ---- the source ----------------------------------------------------------------------------------


def _source(nest: Nest, dtype: str, sign: str, factor_operation: str) -> str:
    """Return the source of the kernel: rows, strips of a row, then its values in order."""
    total_dtype = nest.out.dtype
    names = nest.parameters()
    text = SourceLines()
    for position, name in enumerate((*names, *OWN_PARAMETERS)):
        text.add(f"{name} = p[{position}]")
    for name in ("order", "starts", "rows"):
        text.add(f"{name} = at(int64, {name})")
    text.add(f"x = at({dtype}, factor)[0]")
    text.add(f"total = stack({total_dtype}, {STRIP_LANES})")
    text.open("for u in range(first_row, end_row):")
    text.open(f"for c in range(start{nest.lane}, stop{nest.lane}, {STRIP_LANES}):")
    text.add(f"n = least({STRIP_LANES}, stop{nest.lane} - c)")
    text.add_lane_loop("n", f"total[{{v}}] = {number(0, total_dtype)}")
    text.open("for q in range(starts[u], starts[u + 1]):")
    text.add("left = order[q]")
    for loop in range(nest.loops - 1, nest.output_loops - 1, -1):
        name = "tj0" if loop == nest.step else f"i{loop}"
        extent = f"(stop{loop} - start{loop})"
        text.add(f"{name} = start{loop} + left % {extent}", f"left //= {extent}")
    lanes = Lanes(nest, "t")
    value = lanes.value(nest.function, total_dtype)
    joined = operation(AGGREGATIONS["sum"].operation, ["total[{v}]", value], [total_dtype])
    text.add(*lanes.before)
    text.add_lane_loop("n", *lanes.inside, f"total[{{v}}] = {joined}")
    text.close()
    itemsize = np.dtype(dtype).itemsize
    text.add(f"w = at({dtype}, target, rows[u], distance, c, {itemsize})")
    multiple = convert("total[{v}]", total_dtype, dtype)
    if factor_operation:
        multiple = f"({operation(factor_operation, [multiple, 'x'], [dtype])})"
    text.add_lane_loop("n", f"w[{{v}}] = {operation(sign, ['w[{v}]', multiple], [dtype])}")
    return HEAD + "\n".join(text.lines) + "\n"
