"""Sweeps: elementwise kernels that read blocks and halos where they are, and aggregates of their
results, prepared once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from einmpi.graph.einsum import EinSum
from einmpi.kernels.cpu.dispatch import prepare_einsum
from einmpi.kernels.cpu.map_and_folds import ChunkedFold, MapAndFolds, MapRows
from einmpi.kernels.halo_parts import HaloPart, split_at_halos
from einmpi.kernels.prepared import PreparedCall, ViewMaker, view_maker
from einmpi.kernels.views import view_operands
from einmpi.runtime.backend import HostArray
from einmpi.runtime.cpu.kernels import KernelOptions, as_strided, prepare_kernel
from einmpi.schedule.halo import Sweep
from einmpi.schedule.regions import indices
from einmpi.schedule.steps import Kernel

SweepCall: TypeAlias = Callable[[Mapping[str, HostArray]], None]  # on the arrays of all slots

MIN_PARTS_OF_A_THIN_PART = 16  # a part with fewer values than this share of all is thin


def prepare_sweep(
    step: Sweep,
    arrays: Mapping[str, HostArray],
    options: KernelOptions,
) -> SweepCall:
    """Return a sweep as a function of arrays that are stored as these are, by their slots."""
    parts = split_at_halos(step)
    assert parts is not None, f"{step} is no sweep"
    operands = [arrays[slot.name] for slot in step.map_reads]
    target = arrays[step.kernel.target.name]
    if step.folds:
        together = _prepare_together(step, parts, arrays, options)
        if together is not None:
            return together
    calls = [_prepare_part(step, part, operands, target, options).compute for part in parts]
    folds = []
    for fold in step.folds:
        fold_operands = [arrays[slot.name] for slot in fold.operands]
        call = prepare_kernel(fold, fold_operands, arrays[fold.target.name], options)
        folds.append((fold, call))

    def sweep(arrays: Mapping[str, HostArray]) -> None:
        operands = [arrays[slot.name] for slot in step.map_reads]
        target = arrays[step.kernel.target.name]
        for compute in calls:
            compute(operands, target)
        for fold, compute in folds:
            compute([arrays[slot.name] for slot in fold.operands], arrays[fold.target.name])

    return sweep


def _prepare_together(
    step: Sweep,
    halo_parts: Sequence[HaloPart],
    arrays: Mapping[str, HostArray],
    options: KernelOptions,
) -> SweepCall | None:
    """Prepare map and folds in turns; None if they are better computed one after another.

    Thin parts of the map are computed first. Several threads share each part, one after another.
    """
    if options.threads > 1:
        return None
    operands = [arrays[slot.name] for slot in step.map_reads]
    target = arrays[step.kernel.target.name]
    label = step.kernel.einsum.output[0]
    thin = []
    large = []
    maps = []
    for halo_part in halo_parts:
        part = _prepare_part(step, halo_part, operands, target, options)
        if halo_part.part.einsum.calls() * MIN_PARTS_OF_A_THIN_PART <= target.size:
            thin.append(part)
            continue
        einsum, views, out = _views(step, halo_part, operands, target)
        first, _ = dict(halo_part.part.positions).get(label, (0, 0))
        rows = MapRows(einsum, views, out, _label_values(halo_part, einsum), first)
        if not rows.is_possible:
            return None
        large.append(part)
        maps.append(rows)
    folds = []
    for fold in step.folds:
        fold_operands = [arrays[slot.name] for slot in fold.operands]
        sources = [k for k, slot in enumerate(fold.operands) if slot == step.kernel.target]
        index = {name: indices(runs) for name, runs in fold.index}
        prepared = ChunkedFold(fold.einsum, fold_operands, arrays[fold.target.name], index, sources)
        if not prepared.is_possible:
            return None
        folds.append(prepared)
    together = MapAndFolds(maps, folds)

    def sweep(arrays: Mapping[str, HostArray]) -> None:
        operands = [arrays[slot.name] for slot in step.map_reads]
        target = arrays[step.kernel.target.name]
        for part in thin:
            part.compute(operands, target)
        part_arrays = [part.views(operands, target) for part in large]
        fold_arrays = []
        for fold in step.folds:
            fold_operands = [arrays[slot.name] for slot in fold.operands]
            fold_arrays.append((fold_operands, arrays[fold.target.name]))
        together.compute(part_arrays, fold_arrays)

    return sweep


class _PreparedPart(NamedTuple):
    """A part of a sweep: a function that computes it, and one that makes its views."""

    compute: PreparedCall
    views: Callable[[Sequence[HostArray], HostArray], tuple[list[HostArray], HostArray]]


def _label_values(halo_part: HaloPart, einsum: EinSum) -> dict[str, HostArray]:
    """Return the indices of labels that are used as numbers."""
    numbers = einsum.labels_as_numbers
    return {label: indices(runs) for label, runs in halo_part.part.index if label in numbers}


def _prepare_part(
    step: Sweep,
    halo_part: HaloPart,
    operands: Sequence[HostArray],
    target: HostArray,
    options: KernelOptions,
) -> _PreparedPart:
    """Prepare a part of a sweep for the arrays that its map reads and writes."""
    einsum, views, out = _views(step, halo_part, operands, target)
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
    for slot, view in zip(halo_part.slots, views, strict=True):
        position = step.map_reads.index(slot)
        make_view = view_maker(operands[position], view)
        if make_view is not None:
            makers.append((position, make_view))
    make_out = view_maker(target, out)

    def make_views(
        operands: Sequence[HostArray], target: HostArray
    ) -> tuple[list[HostArray], HostArray]:
        if make_out is None or len(makers) < len(views):
            _, again, out = _views(step, halo_part, operands, target)
            return again, out
        return [make_view(operands[position]) for position, make_view in makers], make_out(target)

    def compute_part(operands: Sequence[HostArray], target: HostArray) -> None:
        compute(*make_views(operands, target))

    return _PreparedPart(compute_part, make_views)


def _views(
    step: Sweep, halo_part: HaloPart, operands: Sequence[HostArray], target: HostArray
) -> tuple[EinSum, list[HostArray], HostArray]:
    """Return what a part computes, what it reads of the arrays of the step, and what it writes."""
    part = halo_part.part
    kernel = step.kernel
    taken = []
    for number, slot in enumerate(halo_part.slots):
        array = operands[step.map_reads.index(slot)]
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
