"""Kernel steps on the CPU: which parts of its operands each EinSum of a kernel reads, prepared
once for all calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

import numpy as np

from einmpi.graph.einsum import EinSum
from einmpi.kernels.cpu.dispatch import ONCE, prepare_einsum, worth_compiling
from einmpi.kernels.cpu.map_and_folds import ChunkedFold, MapAndFolds, MapRows
from einmpi.kernels.cpu.panels.parts import prepare_part
from einmpi.kernels.cpu.product_updates import number_operands
from einmpi.kernels.cpu.row_updates import (
    ScatteredUpdate,
    can_change,
    changed_rows,
    find_row_update,
    prepare_factor,
)
from einmpi.kernels.halo_parts import HaloPart, is_exact, split_at_halos, view_operands
from einmpi.kernels.index_sets import Part, split_index_sets
from einmpi.kernels.matrices import results_of_matrices
from einmpi.kernels.prepared import (
    NumpyCall,
    PreparedCall,
    ViewMaker,
    bare_call,
    bound_call,
    view_maker,
)
from einmpi.runtime.backend import PLACES, Arrays, ComputeCall, HostArray, select_operands
from einmpi.schedule.blocked_updates import ScatteredRows
from einmpi.schedule.compute import Compute, Kernel
from einmpi.schedule.regions import Slot, indices, names_of


def compute_matrices(
    einsums: Sequence[EinSum], operands: Sequence[HostArray], *targets: HostArray
) -> None:
    """Compute results of one function of matrices, each to its target."""
    found = results_of_matrices(einsums, operands)
    for target, result in zip(targets, found, strict=True):
        target[...] = result


@dataclass(frozen=True)
class KernelOptions:
    """How kernels may compute: see `compute_einsum`."""

    threads: int = 1
    fast_math: bool = False
    strict: bool = False
    repetition: int = ONCE


class _Views(NamedTuple):
    """What a part of a kernel computes, and the arrays that it reads and writes."""

    einsum: EinSum
    operands: list[HostArray]
    out: HostArray


def prepare_kernel(
    kernel: Kernel, operands: Sequence[HostArray], target: HostArray, options: KernelOptions
) -> PreparedCall:
    """Return a kernel as a function of arrays that are stored as these are."""
    if kernel.part:
        return prepare_part(kernel)
    if kernel.einsum.matrix is not None:
        return partial(compute_matrices, (kernel.einsum,))
    dtypes = tuple([array.dtype.name for array in operands])
    calls = []
    for part in split_index_sets(kernel.einsum, kernel.index, dtypes):
        views = _views(kernel, part, operands, target)
        numbers = set(views.einsum.labels_as_numbers)
        if views.einsum.sums_blocks:
            numbers.add(views.einsum.aggregated[0])
        index = {label: indices(runs) for label, runs in part.index if label in numbers}
        call = prepare_einsum(
            views.einsum,
            views.operands,
            views.out,
            index,
            options.threads,
            options.fast_math,
            options.strict,
            options.repetition,
        )
        calls.append(_on_views(call, kernel, part, views, operands, target))
    if len(calls) == 1:
        return calls[0]

    bare_calls = [bare_call(call) for call in calls]

    def compute_parts(operands: Sequence[HostArray], target: HostArray) -> None:
        for call in bare_calls:
            call(operands, target)

    def bind_parts(operands: Sequence[HostArray], target: HostArray) -> Callable[[], None]:
        bound_calls = [bound_call(call, operands, target) for call in calls]

        def compute_bound_parts() -> None:
            for call in bound_calls:
                call(operands, target)

        return compute_bound_parts

    return NumpyCall(compute_parts, bind_parts)


def _views(step: Kernel, part: Part, operands: Sequence[HostArray], target: HostArray) -> _Views:
    """Return what a part of a kernel reads of the operands, and writes of the target."""
    taken = part.operands(step.einsum, select_operands(step, operands))
    einsum, arrays = view_operands(part.einsum, taken, part.index, as_strided)
    return _Views(einsum, arrays, part.output(step.einsum, target))


def _on_views(
    call: PreparedCall,
    step: Kernel,
    part: Part,
    views: _Views,
    operands: Sequence[HostArray],
    target: HostArray,
) -> PreparedCall:
    """Return a call on the views of a part as a call on the whole arrays of the step."""
    makers: list[tuple[int, ViewMaker]] = []
    is_whole = views.out is target and len(views.operands) == len(operands)
    can_be_made = True
    for position, view in zip(part.taken, views.operands, strict=True):
        is_whole = is_whole and view is operands[position]
        make_view = view_maker(operands[position], view)
        if make_view is None:
            can_be_made = False
        else:
            makers.append((position, make_view))
    if is_whole:
        return call
    make_out = view_maker(target, views.out)
    if make_out is None or not can_be_made:  # a part of the indices is copied in every call

        def compute(operands: Sequence[HostArray], target: HostArray) -> None:
            views = _views(step, part, operands, target)
            call(views.operands, views.out)

        return compute

    call_on_views = bare_call(call)

    def compute_views(operands: Sequence[HostArray], target: HostArray) -> None:
        arrays = [make_view(operands[position]) for position, make_view in makers]
        call_on_views(arrays, make_out(target))

    def bind_views(operands: Sequence[HostArray], target: HostArray) -> Callable[[], None]:
        arrays = [make_view(operands[position]) for position, make_view in makers]
        out = make_out(target)
        return partial(bound_call(call, arrays, out), arrays, out)

    return NumpyCall(compute_views, bind_views)


def as_strided(array: HostArray, shape: tuple[int, ...], strides: tuple[int, ...]) -> HostArray:
    """Return a view that is only read."""
    return np.lib.stride_tricks.as_strided(array, shape, strides, writeable=False)


# ---- fused stencils ------------------------------------------------------------------------------
#
# Elementwise kernels that read blocks and halos where they are, and aggregates of their results,
# prepared once.


MIN_PARTS_OF_A_THIN_PART = 16  # a part with fewer values than this share of all is thin


def prepare_stencil(step: Compute, arrays: Arrays, options: KernelOptions) -> ComputeCall:
    """Return a fused stencil as a function of arrays that are stored as these are."""
    parts = split_at_halos(step)
    assert parts is not None, f"{step} cannot read its halos where they are"
    kernel, *fold_kernels = step.kernels
    reads = map_reads(step)
    operands = [arrays[slot.name] for slot in reads]
    target = arrays[kernel.target.name]
    if fold_kernels:
        together = _prepare_together(step, parts, arrays, options)
        if together is not None:
            return together
    calls = [_prepare_part(step, part, operands, target, options) for part in parts]
    folds = []
    for fold in fold_kernels:
        fold_operands = [arrays[slot.name] for slot in fold.operands]
        call = prepare_kernel(fold, fold_operands, arrays[fold.target.name], options)
        folds.append((fold, call))

    def compute(arrays: Arrays) -> int:
        operands = [arrays[slot.name] for slot in reads]
        target = arrays[kernel.target.name]
        for compute_part in calls:
            compute_part(operands, target)
        for fold, compute_fold in folds:
            compute_fold([arrays[slot.name] for slot in fold.operands], arrays[fold.target.name])
        return 0

    return compute


def _prepare_together(
    step: Compute, halo_parts: Sequence[HaloPart], arrays: Arrays, options: KernelOptions
) -> ComputeCall | None:
    """Prepare map and folds in turns; None if they are better computed one after another.

    Thin parts of the map are computed first, by numpy, unless it is worth while to compile them and
    no bit depends on it. Several threads share each part, one after another.
    """
    if options.threads > 1:
        return None
    kernel, *fold_kernels = step.kernels
    reads = map_reads(step)
    operands = [arrays[slot.name] for slot in reads]
    target = arrays[kernel.target.name]
    compiles_all = options.repetition > ONCE and is_exact(kernel)
    thin = []
    maps = []
    for halo_part in halo_parts:
        is_thin = halo_part.part.einsum.calls() * MIN_PARTS_OF_A_THIN_PART <= target.size
        rows = None
        if not is_thin or compiles_all:
            rows = _rows_of_part(step, halo_part, arrays)
        if rows is not None and rows.is_possible:
            maps.append(rows)
        elif is_thin:
            thin.append(_prepare_part(step, halo_part, operands, target, options))
        else:
            return None
    folds = [chunked_fold(fold, arrays, [kernel.target]) for fold in fold_kernels]
    if not all(fold.is_possible for fold in folds):
        return None
    together = MapAndFolds(maps, folds)

    def compute(arrays: Arrays) -> int:
        operands = [arrays[slot.name] for slot in reads]
        target = arrays[kernel.target.name]
        for compute_part in thin:
            compute_part(operands, target)
        together.compute(arrays)
        return 0

    return compute


def _rows_of_part(step: Compute, halo_part: HaloPart, arrays: Arrays) -> MapRows:
    """Prepare a part of a fused stencil of which some rows are computed at a time."""
    kernel = step.kernels[0]
    target = kernel.target.name, arrays[kernel.target.name]
    operands = [arrays[slot.name] for slot in map_reads(step)]
    einsum, views, out = _views_of_part(step, halo_part, operands, target[1])
    first, _ = dict(halo_part.part.positions).get(kernel.einsum.output[0], (0, 0))
    given = [(slot.name, arrays[slot.name]) for slot in halo_part.slots]
    return MapRows(einsum, views, out, _label_values(halo_part, einsum), given, target, first)


def chunked_fold(kernel: Kernel, arrays: Arrays, of: Collection[Slot]) -> ChunkedFold:
    """Prepare an aggregate of some slots that is computed in chunks."""
    given = [(slot.name, arrays[slot.name]) for slot in kernel.operands]
    target = kernel.target.name, arrays[kernel.target.name]
    index = {label: indices(runs) for label, runs in kernel.index}
    sources = [k for k, slot in enumerate(kernel.operands) if slot in of]
    return ChunkedFold(kernel.einsum, given, target, index, sources)


def map_reads(step: Compute) -> list[Slot]:
    """Return what the elementwise kernel of a fused stencil reads."""
    whole = [block.whole for block in step.halos]
    found = dict.fromkeys(slot for slot in step.kernels[0].operands if slot not in whole)
    for block in step.halos:
        found.update(dict.fromkeys(block.sources))
    return list(found)


def _label_values(halo_part: HaloPart, einsum: EinSum) -> dict[str, HostArray]:
    """Return the indices of labels that are used as numbers."""
    numbers = einsum.labels_as_numbers
    return {label: indices(runs) for label, runs in halo_part.part.index if label in numbers}


def _prepare_part(
    step: Compute,
    halo_part: HaloPart,
    operands: Sequence[HostArray],
    target: HostArray,
    options: KernelOptions,
) -> PreparedCall:
    """Prepare a part of a fused stencil for the arrays that its map reads and writes."""
    einsum, views, out = _views_of_part(step, halo_part, operands, target)
    index = _label_values(halo_part, einsum)
    compute = prepare_einsum(
        einsum,
        views,
        out,
        index,
        options.threads,
        options.fast_math,
        options.strict,
        options.repetition,
    )
    makers: list[tuple[int, ViewMaker]] = []
    reads = map_reads(step)
    for slot, view in zip(halo_part.slots, views, strict=True):
        position = reads.index(slot)
        make_view = view_maker(operands[position], view)
        if make_view is not None:
            makers.append((position, make_view))
    make_out = view_maker(target, out)

    def compute_part(operands: Sequence[HostArray], target: HostArray) -> None:
        if make_out is None or len(makers) < len(views):
            _, again, out = _views_of_part(step, halo_part, operands, target)
            compute(again, out)
            return
        made = [make_view(operands[position]) for position, make_view in makers]
        compute(made, make_out(target))

    return compute_part


def _views_of_part(
    step: Compute, halo_part: HaloPart, operands: Sequence[HostArray], target: HostArray
) -> tuple[EinSum, list[HostArray], HostArray]:
    """Return what a part computes, what it reads of the arrays of the step, and what it writes."""
    part = halo_part.part
    kernel = step.kernels[0]
    reads = map_reads(step)
    taken = []
    for number, slot in enumerate(halo_part.slots):
        array = operands[reads.index(slot)]
        if slot == kernel.operands[part.taken[number]]:  # it has no halo
            array = _selected(kernel, part.taken[number], array)
        taken.append(part.select(array, part.einsum.operands[number]))
    einsum, views = view_operands(part.einsum, taken, part.index, as_strided)
    return einsum, views, part.output(kernel.einsum, target)


def _selected(kernel: Kernel, operand: int, array: HostArray) -> HostArray:
    """Return what a kernel takes of an operand."""
    for chosen, dimension, runs in kernel.select:
        if chosen == operand:
            array = array[(slice(None),) * dimension + (slice(*runs[0]),)]
    return array


# ---- scattered updates ---------------------------------------------------------------------------
#
# Updates of the rows that a scattered sum has values for, as one compiled pass.


def prepare_scattered_update(
    step: Compute, arrays: Arrays, options: KernelOptions
) -> ComputeCall | None:
    """Return an update of the rows that get values as one compiled pass; None if there is none."""
    rows = ScatteredRows(*step.kernels)
    product = rows.product
    form = rows.form
    places = arrays[PLACES]
    target = arrays[rows.update.target.name]
    dtype = rows.update.target.dtype
    dtypes = {dtype, product.target.dtype, rows.update.operands[form.old].dtype}
    einsum = product.einsum
    if einsum.sums_blocks:
        return None
    if dtypes not in ({"float32"}, {"float64"}) or rows.dimension != 0 or product.select:
        return None
    values = places.size * prod(product.target.shape[1:])
    if values < worth_compiling(options.repetition) or not can_change(target, target.shape[-1]):
        return None
    update = find_row_update(form.operation, form.multiple, form.change, rows.update.einsum)
    if update is None:
        return None
    operands = [arrays[slot.name] for slot in product.operands]
    index = {label: indices(runs) for label, runs in product.index if label != rows.label}
    prepared = ScatteredUpdate(einsum, operands, index, places, update, dtype, options.threads)
    if not prepared.is_possible:
        return None
    factor_of = prepare_factor(update, dtype)
    names = names_of(product.operands)
    extent = product.target.shape[0]

    def compute(arrays: Arrays) -> int | None:
        factor = factor_of(number_operands(rows.update, arrays))
        if factor is None:
            return None
        operands = [arrays[name] for name in names]
        target = arrays[rows.update.target.name]
        prepared.compute(operands, changed_rows(arrays[PLACES], extent), target, factor)
        return 0

    return compute
