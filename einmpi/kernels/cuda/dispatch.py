"""One EinSum on a GPU: matrix products by cuBLAS, everything else by one generated kernel.

The first call with arrays of a given shape prepares all that it can; further calls only launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Call, IndexEntries
from einmpi.kernels.contraction import Contraction, exact_contraction, required_contraction
from einmpi.kernels.cuda import capture, driver
from einmpi.kernels.cuda.blas import Generate, prepare_product
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.kernels.cuda.nest import (
    BLOCK_THREADS,
    PACK_BYTES,
    Options,
    WorkSplit,
    compile_kernel,
    is_in_place,
    key_of,
    prepare_launch,
)
from einmpi.kernels.cuda.problem import Problem
from einmpi.kernels.cuda.scalar_source import Fold
from einmpi.kernels.cuda.scan import prepare_scan
from einmpi.kernels.cuda.scatter import SortedScatter
from einmpi.kernels.cuda.source import kernel_source
from einmpi.kernels.cuda.work_split import split_work
from einmpi.kernels.distances import (
    DISTANCE_DTYPES,
    as_gather,
    picking,
    recognise_distance,
    recognise_weighted_difference,
    squared_norms,
)
from einmpi.kernels.index_sets import LabelRuns
from einmpi.kernels.loop_nest import IndexedArray
from einmpi.kernels.lowering import MAX_TEMPORARY_BYTES, MIN_MATRIX_SIDE
from einmpi.kernels.operands import apply_constant_indices, check_index_range, number_operands
from einmpi.kernels.prepared import PreparedCall, PreparedCalls
from einmpi.schedule.regions import indices, length, whole

# ---- distance ------------------------------------------------------------------------------------
#
# Sums of differences by cuBLAS, where the user allows more rounding: sums that contain a
# product.
#
# Squared distances are |x|² + |y|² − 2 x·y, weighted sums of differences are x·Σw − w·y.
# Generated kernels compute what comes before the matrix product, which is then added to it.


# With fewer terms, a kernel that adds up the differences is faster: it writes the output once.
MIN_TERMS = 64


class _SumWithProduct(NamedTuple):
    """An EinSum as other EinSums, of which the last gives the target, plus a matrix product."""

    # Each with the numbers of its operands: those of the whole EinSum, then earlier results.
    before: tuple[tuple[EinSum, tuple[int, ...]], ...]
    product: Contraction
    factors: tuple[int, int]  # of the product
    is_positive: bool  # rounding may leave less than 0, which becomes 0


def prepare_sum_with_product(
    einsum: EinSum, operands: Sequence[DeviceArray], target: DeviceArray, generate: Generate
) -> PreparedCall | None:
    """Return a function that fills the target.

    Return None if the EinSum is not such a sum, or if a generated kernel is the better way to
    compute it.
    """
    dtype = target.dtype
    if dtype.name not in DISTANCE_DTYPES or any(array.dtype != dtype for array in operands):
        return None
    form = _as_distance(einsum, dtype.kind == "f") or _as_weighted_difference(einsum)
    if form is None or prod(einsum.extent[label] for label in einsum.aggregated) < MIN_TERMS:
        return None
    factors = [operands[number] for number in form.factors]
    # No TF32: between near points, it would not leave enough digits.
    product = prepare_product(form.product, factors, target, tf32=False, add_to_target=True)
    if product is None or product.copies[2] or product.temporary_bytes > MAX_TEMPORARY_BYTES:
        return None
    multiply = product.prepared(generate)
    cupy = driver.cupy()

    def call(operands: Sequence[DeviceArray], target: DeviceArray) -> None:
        arrays = list(operands)
        *sums, (last, last_numbers) = form.before
        for each, numbers in sums:
            result = cupy.empty(each.bound, dtype)
            generate(each, [arrays[number] for number in numbers], result)
            arrays.append(result)
        generate(last, [arrays[number] for number in last_numbers], target)
        multiply([operands[number] for number in form.factors], target)
        if form.is_positive:
            cupy.maximum(target, 0, out=target)  # nan stays

    return call


def _as_distance(einsum: EinSum, is_real: bool) -> _SumWithProduct | None:
    distance = recognise_distance(einsum)
    if distance is None or (distance.absolute and not is_real):
        return None
    x, y = [squared_norms(distance.product, operand) for operand in (0, 1)]
    extents = tuple((label, einsum.extent[label]) for label in einsum.output)
    function = Call("+", (Arg(0), Arg(1)))
    total = EinSum(einsum.output, (x.output, y.output), function, None, (), extents)
    product = required_contraction(distance.product)
    product = replace(product, scale=-2 * product.scale)
    return _SumWithProduct(((x, (0, 0)), (y, (1, 1)), (total, (2, 3))), product, (0, 1), is_real)


def _as_weighted_difference(einsum: EinSum) -> _SumWithProduct | None:
    difference = recognise_weighted_difference(einsum)
    if difference is None:
        return None
    product = required_contraction(difference.product)
    scaled = difference.scaled
    if difference.is_positive:
        scaled = replace(scaled, function=Call("neg", (scaled.function,)))
    else:
        product = replace(product, scale=-product.scale)
    weights = difference.weights
    before = ((difference.sums, (weights,)), (scaled, (difference.kept, 3)))
    return _SumWithProduct(before, product, (weights, difference.summed), is_positive=False)


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

    The extents of the EinSum are those of the arrays. The others are Options.
    """
    options = Options(index, fast_math, tf32, strict)
    key = (*map(key_of, (*operands, target)), is_in_place(operands, target), options)
    prepared = CALLS.get(einsum, key, lambda: prepare_einsum(einsum, operands, target, options))
    prepared(operands, target)


def prepare_einsum(
    einsum: EinSum, operands: Sequence[DeviceArray], target: DeviceArray, options: Options
) -> PreparedCall:
    """Return the call for all arrays with the dtypes, extents, strides and alignment of these."""
    capture.prepare_calls()
    if 0 in einsum.bound:
        return lambda operands, target: None
    if any(einsum.extent[label] == 0 for label in einsum.aggregated):
        return _fill_with_neutral(einsum)
    for array in operands:
        if any(stride % array.itemsize for stride in array.strides):
            return _with_contiguous_operands(einsum, options)
    if einsum.segments is not None:
        return _prepare_scatter(einsum, operands, options)
    call = None
    if einsum.pick is not None:
        call = _prepare_pick(einsum, operands, target, options)
    if call is None and options.fast_math:
        call = prepare_sum_with_product(einsum, operands, target, compute_generated)
    if call is None:
        call = prepare_scan(einsum, operands, target, options.runs)
    if call is None:
        call = _prepare_matrix_product(einsum, operands, target, options)
    return call or _prepare_generated(einsum, operands, target, options)


def _prepare_pick(
    einsum: EinSum, operands: Sequence[DeviceArray], target: DeviceArray, options: Options
) -> PreparedCall | None:
    """Return the call that reads only what an index picks; None if it cannot be done so."""
    label = einsum.required_pick.label
    runs = dict(options.runs).get(label, whole(einsum.extent[label]))
    if len(runs) != 1:
        return None  # the label's indices have gaps here
    gather = as_gather(einsum, runs[0][0], tuple([array.dtype for array in operands]))
    if gather is None:
        return None
    gathering, numbers = gather
    arrays = [operands[number] for number in numbers]
    return picking(einsum, prepare_einsum(gathering, arrays, target, options), numbers)


def _fill_with_neutral(einsum: EinSum) -> PreparedCall:
    """Return the call for an aggregation over nothing."""
    neutral = AGGREGATIONS[einsum.required_aggregation].empty
    if neutral is None:
        raise ValueError(f"{einsum.required_aggregation} of nothing has no value")
    return lambda operands, target: target.fill(neutral)


def _with_contiguous_operands(einsum: EinSum, options: Options) -> PreparedCall:
    """Return the call for operands whose strides are not whole elements: it copies them."""

    def call(operands: Sequence[DeviceArray], target: DeviceArray) -> None:
        compute_einsum(einsum, list(map(driver.contiguous, operands)), target, *options)

    return call


# ---- matrix products ----------------------------------------------------------------------------


def _prepare_matrix_product(
    einsum: EinSum, operands: Sequence[DeviceArray], target: DeviceArray, options: Options
) -> PreparedCall | None:
    """Return the call for a matrix product, in halves if its temporary copies are large.

    Return None if it is no matrix product, or if a generated kernel is better.
    """
    dtypes = (array.dtype.name for array in operands)
    contraction = exact_contraction(einsum, dtypes, options.strict)
    if contraction is None:
        return None
    product = prepare_product(contraction, operands, target, options.tf32)
    if product is not None and product.temporary_bytes > MAX_TEMPORARY_BYTES:
        # Halving a shorter label would make the matrices thin.
        long_labels = [
            x for x in product.halvable_labels if einsum.extent[x] >= 2 * MIN_MATRIX_SIDE
        ]
        if long_labels:
            longest = max(long_labels, key=lambda label: einsum.extent[label])
            return _in_halves(einsum, longest, options)
    return None if product is None else product.prepared(compute_generated)


def _in_halves(einsum: EinSum, label: str, options: Options) -> PreparedCall:
    """Return the call that computes one half of a label after the other."""
    size = einsum.extent[label]
    halves = []
    for start, stop in ((0, size // 2), (size // 2, size)):
        extents = {**einsum.extent, label: stop - start}
        halves.append((slice(start, stop), replace(einsum, extents=tuple(extents.items()))))

    def call(operands: Sequence[DeviceArray], target: DeviceArray) -> None:
        for part, half in halves:
            views = []
            for array, entries in zip(operands, einsum.operands, strict=True):
                views.append(_part_of(array, entries, label, part))
            target_view = _part_of(target, einsum.output, label, part)
            compute_einsum(half, views, target_view, *options._replace(runs=()))

    return call


def _part_of(array: DeviceArray, entries: Sequence[Any], label: str, part: slice) -> DeviceArray:
    """Return the view of a part of a label."""
    return array[tuple(part if entry == label else slice(None) for entry in entries)]


# ---- scattered results --------------------------------------------------------------------------


def _prepare_scatter(
    einsum: EinSum, operands: Sequence[DeviceArray], options: Options
) -> PreparedCall:
    """Return the call for scattered results: find the places, sort by them, fold each run."""
    dtypes = [array.dtype.name for array in operands]
    scatter = SortedScatter(einsum, dtypes, dict(options.runs))
    fold_options = Options(scatter.fold_runs, options.fast_math)
    prepared: list[PreparedCall] = []

    def call(operands: Sequence[DeviceArray], target: DeviceArray) -> None:
        capture.need_host()
        places = []
        for index_einsum, used in scatter.index_einsums:
            values = driver.cupy().empty(index_einsum.bound, np.int64)
            arrays = [operands[number] for number in used]
            compute_einsum(index_einsum, arrays, values, scatter.index_runs)
            places.append(values)
        arrays = scatter.fold_operands(operands, places)
        if not prepared:
            fold = scatter.fold_einsum
            prepared.append(_prepare_generated(fold, arrays, target, fold_options, scatter.split))
        prepared[0](arrays, target)

    return call


# ---- generated kernels --------------------------------------------------------------------------


def compute_generated(einsum: EinSum, operands: Sequence[DeviceArray], target: DeviceArray) -> None:
    """Fill `target` by a generated kernel, even if cuBLAS could do it."""
    key = ("generated", *map(key_of, (*operands, target)))
    prepared = CALLS.get(
        einsum, key, lambda: _prepare_generated(einsum, operands, target, Options())
    )
    prepared(operands, target)


def _prepare_generated(
    einsum: EinSum,
    operands: Sequence[DeviceArray],
    target: DeviceArray,
    options: Options,
    split_of: Callable[[Problem], WorkSplit] = split_work,
) -> PreparedCall:
    """Return the call of a generated kernel; `split_of` shares its work among threads.

    Labels whose values are used become further operands: a counter if the values are consecutive,
    else an array of indices.
    """
    capture.prepare_calls()
    function, entries, labels = number_operands(einsum)
    layouts = []
    offsets = []  # in bytes, from an operand to what is left of it without constant indices
    aligned = target.data.ptr % PACK_BYTES == 0
    for array, own_entries in zip(operands, entries, strict=False):
        view, view_entries = apply_constant_indices(array, own_entries)
        layouts.append(_layout(view, view_entries))
        offsets.append(view.data.ptr - array.data.ptr)
        aligned = aligned and view.data.ptr % PACK_BYTES == 0
    index_arrays: list[DeviceArray] = []  # empty for counters
    for label in labels:
        runs = dict(options.runs).get(label, whole(einsum.extent[label]))
        is_counter = len(runs) == 1
        aligned = aligned and is_counter
        index_arrays.append(driver.cupy().asarray(indices(() if is_counter else runs)))
        first = runs[0][0] if is_counter else None
        layouts.append(IndexedArray("int64", (length(runs),), (1,), (label,), first))
    problem = Problem(
        function,
        tuple(layouts),
        _layout(target, einsum.output),
        einsum.aggregation,
        einsum.extents,
        aligned,
    )
    split = split_of(problem)
    if split.parts > 1:
        run_kernel = _prepare_parts(einsum, problem, options.fast_math)
    else:
        run_kernel = _prepare_kernel(split, options.fast_math, is_in_place(operands, target))

    def call(operands: Sequence[DeviceArray], target: DeviceArray) -> None:
        addresses = [
            array.data.ptr + offset for array, offset in zip(operands, offsets, strict=True)
        ]
        run_kernel([*addresses, *(array.data.ptr for array in index_arrays)], target)

    return call


def _layout(array: DeviceArray, entries: IndexEntries) -> IndexedArray:
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return IndexedArray(array.dtype.name, array.shape, strides, entries)


# Calls a kernel with the addresses of its operands, and a target.
RunKernel: TypeAlias = Callable[[list[int], DeviceArray], None]


def _prepare_parts(einsum: EinSum, problem: Problem, fast_math: bool) -> RunKernel:
    """Return a function that computes parts of the sums, and then joins the parts."""
    cupy = driver.cupy()
    aggregation = einsum.required_aggregation
    total_type = Fold(aggregation, problem.function, problem.types).total
    totals = cupy.empty(problem.target.shape, total_type)
    split = split_work(replace(problem, target=_layout(totals, einsum.output)))
    run_kernel = _prepare_kernel(split, fast_math)
    shape = (split.parts, *totals.shape)
    extents = [(label, extent) for label, extent in einsum.extents if label in einsum.output]
    join = EinSum(
        einsum.output,
        ((PARTS_LABEL, *einsum.output),),
        Arg(0),
        aggregation,
        (PARTS_LABEL,),
        (*extents, (PARTS_LABEL, split.parts)),
    )

    def run_both(addresses: list[int], target: DeviceArray) -> None:
        parts = cupy.empty(shape, total_type)
        run_kernel(addresses, parts)
        compute_generated(join, [parts], target)

    return run_both


def _prepare_kernel(split: WorkSplit, fast_math: bool, in_place: bool = False) -> RunKernel:
    """Return a function that starts a kernel, with an error if an index is out of range."""
    nest = split.nest
    arguments = split.arguments
    if any(name.startswith("gather_extent") and not arguments[name] for name in arguments):
        raise IndexError("an index is out of range; this dimension has extent 0")
    grid = ((split.blocks, split.parts), (BLOCK_THREADS,))
    kernel = compile_kernel(kernel_source(nest), fast_math, in_place)
    launch = prepare_launch(kernel, grid, nest.parameters(), arguments)
    if not nest.checked:
        return lambda addresses, target: launch([*addresses, target.data.ptr])
    cupy = driver.cupy()

    def checked(addresses: list[int], target: DeviceArray) -> None:
        capture.need_host()
        addresses = [*addresses, target.data.ptr]
        # Whether an index is out of range, then the lowest and the highest index of each gather.
        report = cupy.zeros(1 + 2 * len(nest.checked), np.int64)
        launch(addresses, report=report.data.ptr)
        if not int(report[0]):
            return
        # Run it once more, to find out how far out of range the indices are.
        report[1::2] = 2**63 - 1
        report[2::2] = -(2**63)
        launch(addresses, report=report.data.ptr, wants_range=1)
        ranges = report[1:].get().reshape(-1, 2).tolist()
        for (array, number), (lowest, highest) in zip(nest.checked, ranges, strict=True):
            check_index_range(lowest, highest, arguments[f"gather_extent{array}_{number}"])

    return checked
