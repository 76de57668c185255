"""Kernel steps on the CPU: which parts of its operands each EinSum of a kernel reads, prepared
once for all calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.graph.einsum import EinSum
from einmpi.kernels.cpu.dispatch import ONCE, prepare_einsum, worth_compiling
from einmpi.kernels.cpu.updates.product_updates import number_operands
from einmpi.kernels.cpu.updates.scattered_updates import (
    ScatteredUpdate,
    can_change,
    changed_rows,
    find_row_update,
    prepare_factor,
)
from einmpi.kernels.index_sets import Part, split_index_sets
from einmpi.kernels.prepared import (
    NumpyCall,
    PreparedCall,
    ViewMaker,
    bare_call,
    bound_call,
    view_maker,
)
from einmpi.kernels.views import view_operands
from einmpi.schedule.blocked_updates import SparseBlockedUpdate
from einmpi.schedule.regions import indices
from einmpi.schedule.slots import names_of
from einmpi.schedule.steps import Kernel

HostArray: TypeAlias = npt.NDArray[Any]
# An update of rows of a target, given the arrays of slots, and the row that each value goes to.
ScatteredUpdateCall: TypeAlias = Callable[[Mapping[str, HostArray], HostArray, HostArray], bool]


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
    step: Kernel, operands: Sequence[HostArray], target: HostArray, options: KernelOptions
) -> PreparedCall:
    """Return a kernel as a function of arrays that are stored as these are."""
    dtypes = tuple([array.dtype.name for array in operands])
    calls = []
    for part in split_index_sets(step.einsum, step.index, dtypes):
        views = _views(step, part, operands, target)
        numbers = views.einsum.labels_as_numbers
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
        calls.append(_on_views(call, step, part, views, operands, target))
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


def select_operands(
    step: Kernel,
    operands: Sequence[Any],
    as_index: Callable[[npt.NDArray[np.intp]], Any] = np.asarray,
) -> list[Any]:
    """Return what a kernel takes of its operands, which may be of any library.

    `as_index` turns indices into what these arrays accept as an index.
    """
    chosen = list(operands)
    for operand, dimension, runs in step.select:
        taken = slice(*runs[0]) if len(runs) == 1 else as_index(indices(runs))
        chosen[operand] = chosen[operand][(slice(None),) * dimension + (taken,)]
    return chosen


def prepare_scattered_update(
    step: SparseBlockedUpdate,
    arrays: Mapping[str, HostArray],
    places: HostArray,
    target: HostArray,
    options: KernelOptions,
) -> ScatteredUpdateCall | None:
    """Return an update of the rows that get values as one compiled pass; None if there is none."""
    product = step.product
    form = step.form
    dtype = step.update.target.dtype
    dtypes = {dtype, product.target.dtype, step.update.operands[form.old].dtype}
    einsum = product.einsum
    if dtypes not in ({"float32"}, {"float64"}) or step.dimension != 0 or product.select:
        return None
    values = places.size * prod(product.target.shape[1:])
    if values < worth_compiling(options.repetition) or not can_change(target, target.shape[-1]):
        return None
    update = find_row_update(form.operation, form.multiple, form.change, step.update.einsum)
    if update is None:
        return None
    operands = [arrays[slot.name] for slot in product.operands]
    index = {label: indices(runs) for label, runs in product.index if label != step.label}
    prepared = ScatteredUpdate(einsum, operands, index, places, update, dtype, options.threads)
    if not prepared.is_possible:
        return None
    factor_of = prepare_factor(update, dtype)
    names = names_of(product.operands)
    extent = product.target.shape[0]

    def compute(arrays: Mapping[str, HostArray], places: HostArray, target: HostArray) -> bool:
        factor = factor_of(number_operands(step.update, arrays))
        if factor is None:
            return False
        operands = [arrays[name] for name in names]
        prepared.compute(operands, changed_rows(places, extent), target, factor)
        return True

    return compute
