"""One EinSum on a GPU: matrix products by cuBLAS, everything else by one generated kernel.

The first call with arrays of a given shape prepares all that it can; further calls only launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Scalar
from einmpi.graph.segments import Segments
from einmpi.kernels.contraction import exact_contraction
from einmpi.kernels.contraction_split import MAX_TEMPORARY_BYTES, MIN_MATRIX_SIDE
from einmpi.kernels.cuda import driver
from einmpi.kernels.cuda.blas import MatrixProduct, prepare_product
from einmpi.kernels.cuda.capture import watch
from einmpi.kernels.cuda.distance import prepare_distance
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.kernels.cuda.launch import (
    Launch,
    compile_kernel,
    is_in_place,
    key_of,
    prepare_launch,
)
from einmpi.kernels.cuda.nest import BLOCK_THREADS, PACK_BYTES, CudaNest, Parameter, WorkSplit
from einmpi.kernels.cuda.problem import Problem
from einmpi.kernels.cuda.scalar_source import Fold
from einmpi.kernels.cuda.scan import prepare_scan
from einmpi.kernels.cuda.scatter import SortedScatter
from einmpi.kernels.cuda.source import kernel_source
from einmpi.kernels.cuda.weighted_difference import prepare_weighted_difference
from einmpi.kernels.cuda.work_split import problem_of, split_work
from einmpi.kernels.loop_nest import IndexedArray
from einmpi.kernels.operands import apply_constant_indices, check_index_range, number_operands
from einmpi.kernels.picks import as_gather, out_of_range
from einmpi.kernels.prepared import PreparedCalls
from einmpi.schedule.regions import Runs, indices, length, whole

PreparedCall: TypeAlias = Callable[[Sequence[DeviceArray], DeviceArray], None]
# For labels whose values are used: the indices that positions along the label stand for.
LabelRuns: TypeAlias = tuple[tuple[str, Runs], ...]
RunsOf: TypeAlias = Callable[[Problem], WorkSplit]

CALLS = PreparedCalls()
PARTS_LABEL = "parts, joined"  # no label of a program can look like this


def compute_einsum(
    einsum: EinSum,
    operands: Sequence[DeviceArray],
    target: DeviceArray,
    index: LabelRuns = (),
    fast_math: bool = False,
    tf32: bool = False,
    strict: bool = False,
) -> None:
    """Fill `target`, which shares no memory with operands, or is one that is read where it writes.

    The extents of the EinSum are those of the arrays. `fast_math` allows methods that round more;
    `tf32` allows float32 products with a fraction of ten bits; `strict` allows only methods that
    give inf and nan where the program as written does.
    """
    in_place = is_in_place(operands, target)
    key = (*map(key_of, operands), key_of(target), in_place, index, fast_math, tf32, strict)

    def prepare() -> PreparedCall:
        return prepare_einsum(einsum, operands, target, index, fast_math, tf32, strict)

    CALLS.get(einsum, key, prepare)(operands, target)


def prepare_einsum(
    einsum: EinSum,
    operands: Sequence[DeviceArray],
    target: DeviceArray,
    index: LabelRuns,
    fast_math: bool,
    tf32: bool,
    strict: bool,
) -> PreparedCall:
    """Return the call for all arrays with the dtypes, extents, strides and alignment of these."""
    watch.prepare_calls()
    if 0 in einsum.bound:
        return lambda operands, target: None
    if any(einsum.extent[label] == 0 for label in einsum.aggregated):
        return _fill_with_neutral(einsum)
    for array in operands:
        if any(stride % array.itemsize for stride in array.strides):
            return _with_contiguous_operands(einsum, index, fast_math, tf32, strict)
    if einsum.segments is not None:
        return _prepare_scatter(einsum, einsum.segments, operands, target, index, fast_math)
    if einsum.pick is not None:
        pick = _prepare_pick(einsum, operands, target, index, fast_math, tf32, strict)
        if pick is not None:
            return pick
    if fast_math:
        distance = prepare_distance(einsum, operands, target, compute_generated)
        if distance is not None:
            return distance
        difference = prepare_weighted_difference(einsum, operands, target, compute_generated)
        if difference is not None:
            return difference
    scan = prepare_scan(einsum, operands, target, index)
    if scan is not None:
        return scan
    names = (array.dtype.name for array in operands)
    contraction = exact_contraction(einsum, names, strict)
    if contraction is not None:
        product = prepare_product(contraction, operands, target, tf32)
        if product is not None:
            return _prepare_matrix_product(einsum, product, fast_math, tf32, strict)
    return _prepare_generated(einsum, operands, target, index, fast_math)


def _prepare_pick(
    einsum: EinSum,
    operands: Sequence[DeviceArray],
    target: DeviceArray,
    index: LabelRuns,
    fast_math: bool,
    tf32: bool,
    strict: bool,
) -> PreparedCall | None:
    """Return the call that reads only what an index picks; None if it cannot be done so."""
    label = einsum.required_pick.label
    runs = dict(index).get(label, whole(einsum.extent[label]))
    if len(runs) != 1:
        return None  # the label's indices have gaps here
    gather = as_gather(einsum, runs[0][0], tuple([array.dtype for array in operands]))
    if gather is None:
        return None
    gathering, numbers = gather
    arrays = [operands[number] for number in numbers]
    prepared = prepare_einsum(gathering, arrays, target, index, fast_math, tf32, strict)

    def call(operands: Sequence[DeviceArray], target: DeviceArray) -> None:
        try:
            prepared([operands[number] for number in numbers], target)
        except IndexError as error:
            if einsum.picked_extent is None:
                raise
            raise out_of_range(einsum) from error

    return call


def _fill_with_neutral(einsum: EinSum) -> PreparedCall:
    """Return the call for an aggregation over nothing."""
    neutral = AGGREGATIONS[einsum.required_aggregation].empty
    if neutral is None:
        raise ValueError(f"{einsum.required_aggregation} of nothing has no value")
    return lambda operands, target: target.fill(neutral)


def _with_contiguous_operands(
    einsum: EinSum, index: LabelRuns, fast_math: bool, tf32: bool, strict: bool
) -> PreparedCall:
    """Return the call for operands whose strides are not whole elements: it copies them."""

    def call(operands: Sequence[DeviceArray], target: DeviceArray) -> None:
        copies = [driver.contiguous(array) for array in operands]
        compute_einsum(einsum, copies, target, index, fast_math, tf32, strict)

    return call


# ---- matrix products ----------------------------------------------------------------------------


def _prepare_matrix_product(
    einsum: EinSum, product: MatrixProduct, fast_math: bool, tf32: bool, strict: bool
) -> PreparedCall:
    """Return the call for a matrix product, in halves if its temporary copies are large."""
    if not product.temporary_bytes:
        return product
    if product.temporary_bytes > MAX_TEMPORARY_BYTES:
        # Halving a shorter label would make the matrices thin.
        long_labels = [
            x for x in product.halvable_labels if einsum.extent[x] >= 2 * MIN_MATRIX_SIDE
        ]
        if long_labels:
            longest = max(long_labels, key=lambda label: einsum.extent[label])
            return _in_halves(einsum, longest, fast_math, tf32, strict)
    return product.with_copies(compute_generated)


def _in_halves(
    einsum: EinSum, label: str, fast_math: bool, tf32: bool, strict: bool
) -> PreparedCall:
    """Return the call that computes one half of a label after the other."""
    size = einsum.extent[label]
    halves = []
    for start, stop in ((0, size // 2), (size // 2, size)):
        extents = []
        for name, extent in einsum.extents:
            extents.append((name, stop - start if name == label else extent))
        halves.append((slice(start, stop), replace(einsum, extents=tuple(extents))))

    def call(operands: Sequence[DeviceArray], target: DeviceArray) -> None:
        for part, half in halves:
            views = []
            for array, entries in zip(operands, einsum.operands, strict=True):
                views.append(_part_of(array, entries, label, part))
            target_view = _part_of(target, einsum.output, label, part)
            compute_einsum(half, views, target_view, (), fast_math, tf32, strict)

    return call


def _part_of(array: DeviceArray, entries: Sequence[Any], label: str, part: slice) -> DeviceArray:
    """Return the view of a part of a label."""
    return array[tuple(part if entry == label else slice(None) for entry in entries)]


# ---- scattered results --------------------------------------------------------------------------


def _prepare_scatter(
    einsum: EinSum,
    segments: Segments,
    operands: Sequence[DeviceArray],
    target: DeviceArray,
    index: LabelRuns,
    fast_math: bool,
) -> PreparedCall:
    """Return the call for scattered results: find the places, sort by them, fold each run."""
    dtypes = [array.dtype.name for array in operands]
    scatter = SortedScatter(einsum, segments, dtypes, dict(index))
    prepared: list[PreparedCall] = []

    def call(operands: Sequence[DeviceArray], target: DeviceArray) -> None:
        watch.need_host()
        places = []
        for index_einsum, used in scatter.index_einsums:
            values = driver.cupy().empty(index_einsum.bound, np.int64)
            arrays = [operands[number] for number in used]
            compute_einsum(index_einsum, arrays, values, scatter.index_runs)
            places.append(values)
        arrays = scatter.fold_operands(operands, places)
        if not prepared:
            prepared.append(
                _prepare_generated(
                    scatter.fold_einsum,
                    arrays,
                    target,
                    scatter.fold_runs,
                    fast_math,
                    scatter.split,
                )
            )
        prepared[0](arrays, target)

    return call


# ---- generated kernels --------------------------------------------------------------------------


def compute_generated(einsum: EinSum, operands: Sequence[DeviceArray], target: DeviceArray) -> None:
    """Fill `target` by a generated kernel, even if cuBLAS could do it."""
    key = ("generated", *map(key_of, operands), key_of(target))
    CALLS.get(einsum, key, lambda: _prepare_generated(einsum, operands, target, (), False))(
        operands, target
    )


def _prepare_generated(
    einsum: EinSum,
    operands: Sequence[DeviceArray],
    target: DeviceArray,
    index: LabelRuns,
    fast_math: bool,
    split_runs_of: RunsOf | None = None,
) -> PreparedCall:
    """Return the call of a generated kernel.

    Labels whose values are used become further operands: a counter if the values are consecutive,
    else an array of indices. `split_runs_of` shares the work of scattered results.
    """
    watch.prepare_calls()
    function, entries, labels = number_operands(einsum)
    layouts = []
    offsets = []  # in bytes, from an operand to what is left of it without constant indices
    aligned = target.data.ptr % PACK_BYTES == 0
    for array, own_entries in zip(operands, entries, strict=False):
        view, view_entries = apply_constant_indices(array, own_entries)
        layouts.append(IndexedArray(view.dtype.name, view.shape, view.strides, view_entries))
        offsets.append(view.data.ptr - array.data.ptr)
        aligned = aligned and view.data.ptr % PACK_BYTES == 0
    cupy = driver.cupy()
    first_values: dict[int, int] = {}  # of the operands that are counters
    index_arrays: list[DeviceArray] = []  # empty for counters
    for number, label in enumerate(labels, len(operands)):
        runs = dict(index).get(label, whole(einsum.extent[label]))
        if len(runs) == 1:
            first_values[number] = runs[0][0]
            index_arrays.append(cupy.asarray(indices(())))
        else:
            index_arrays.append(cupy.asarray(indices(runs)))
            aligned = False
        layouts.append(IndexedArray("int64", (length(runs),), (8,), (label,)))
    kernel = _GeneratedKernel(
        einsum,
        function,
        tuple(layouts),
        first_values,
        aligned,
        fast_math,
        split_runs_of,
        is_in_place(operands, target),
    )
    run_kernel = kernel.prepare(target)

    def call(operands: Sequence[DeviceArray], target: DeviceArray) -> None:
        addresses = [
            array.data.ptr + offset for array, offset in zip(operands, offsets, strict=True)
        ]
        run_kernel([*addresses, *(array.data.ptr for array in index_arrays)], target)

    return call


@dataclass(frozen=True)
class _GeneratedKernel:
    """A kernel for an EinSum; a second kernel follows it if the sums are split into parts."""

    einsum: EinSum
    function: Scalar
    layouts: tuple[IndexedArray, ...]  # of the operands
    first_values: Mapping[int, int]
    aligned: bool
    fast_math: bool
    split_runs_of: RunsOf | None = None
    in_place: bool = False  # the target is one of the operands

    def split(self, target: DeviceArray) -> WorkSplit:
        layout = IndexedArray(target.dtype.name, target.shape, target.strides, self.einsum.output)
        work = (
            self.function,
            self.layouts,
            layout,
            self.einsum.aggregation,
            self.einsum.extents,
            tuple(self.first_values.items()),
            self.aligned,
        )
        if self.split_runs_of is not None:
            return self.split_runs_of(problem_of(*work))
        return split_work(*work)

    def prepare(self, target: DeviceArray) -> Callable[[list[int], DeviceArray], None]:
        """Return a function of the operands' addresses and the target."""
        split = self.split(target)
        if split.parts > 1:
            return self.prepare_parts(target)
        launch = _launch(split, self.first_values, self.fast_math, self.in_place)
        return lambda addresses, target: launch([*addresses, target.data.ptr])

    def prepare_parts(self, target: DeviceArray) -> Callable[[list[int], DeviceArray], None]:
        """Return a function that computes parts of the sums, and then joins the parts."""
        einsum = self.einsum
        types = tuple(layout.dtype for layout in self.layouts)
        total_type = Fold(einsum.required_aggregation, self.function, types).total
        cupy = driver.cupy()
        split = self.split(cupy.empty(target.shape, total_type))
        launch = _launch(split, self.first_values, self.fast_math)
        shape = (split.parts, *target.shape)
        extents = [(label, extent) for label, extent in einsum.extents if label in einsum.output]
        join = EinSum(
            einsum.output,
            ((PARTS_LABEL, *einsum.output),),
            Arg(0),
            einsum.required_aggregation,
            (PARTS_LABEL,),
            (*extents, (PARTS_LABEL, split.parts)),
        )

        def run_both(addresses: list[int], target: DeviceArray) -> None:
            parts = cupy.empty(shape, total_type)
            launch([*addresses, parts.data.ptr])
            compute_generated(join, [parts], target)

        return run_both


def _launch(
    split: WorkSplit, first_values: Mapping[int, int], fast_math: bool, in_place: bool = False
) -> Callable[[list[int]], None]:
    """Return a function of the addresses of all arrays that starts a kernel."""
    nest = split.nest
    for array, number in nest.gathers:
        if split.gathered[array][number].extent == 0:
            raise IndexError("an index is out of range; this dimension has extent 0")

    def argument(parameter: Parameter) -> int:
        if parameter.role == "first":
            return first_values[parameter.numbers[0]]
        if parameter.role in ("report", "wants_range"):
            return 0
        return split.argument(parameter)

    grid = ((split.blocks, split.parts), (BLOCK_THREADS,))
    kernel = compiled_nest(nest, fast_math, in_place)
    launch = prepare_launch(kernel, grid, nest.parameters(), argument)
    return _with_index_check(launch, split) if nest.checked else launch


def _with_index_check(launch: Launch, split: WorkSplit) -> Callable[[list[int]], None]:
    """Return the launch of a kernel that gathers, with an error if an index is out of range."""
    cupy = driver.cupy()
    gathers = split.nest.checked
    parameters = list(split.nest.parameters())
    report_position = parameters.index(Parameter("report"))
    wants_range_position = parameters.index(Parameter("wants_range"))

    def checked(addresses: list[int]) -> None:
        watch.need_host()
        # Whether an index is out of range, then the lowest and the highest index of each gather.
        report = cupy.zeros(1 + 2 * len(gathers), np.int64)
        values = list(launch.values)
        for position, array in launch.pointers:
            values[position] = addresses[array]
        values[report_position] = report.data.ptr
        launch.kernel(*launch.grid, tuple(values))
        if not int(report[0]):
            return
        # Run it once more, to find out how far out of range the indices are.
        report[1::2] = 2**63 - 1
        report[2::2] = -(2**63)
        values[wants_range_position] = 1
        launch.kernel(*launch.grid, tuple(values))
        ranges = report[1:].get().reshape(-1, 2).tolist()
        for (array, number), (lowest, highest) in zip(gathers, ranges, strict=True):
            check_index_range(lowest, highest, split.gathered[array][number].extent)

    return checked


@lru_cache(maxsize=4096)
def compiled_nest(nest: CudaNest, fast_math: bool, in_place: bool = False) -> Any:
    return compile_kernel(kernel_source(nest), fast_math, in_place)
