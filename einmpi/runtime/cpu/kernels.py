"""Kernel steps on the CPU: which parts of its operands each EinSum of a kernel reads, prepared
once for all calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from einmpi.graph.einsum import EinSum
from einmpi.kernels.cpu.dispatch import ONCE, prepare_einsum
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
from einmpi.runtime.array_parts import select_operands
from einmpi.runtime.backend import HostArray
from einmpi.schedule.regions import indices
from einmpi.schedule.steps import Kernel


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
