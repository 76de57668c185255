"""Compiled loops prepared once: a call sets the addresses of its arrays, and runs the kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.graph.einsum import EinSum
from einmpi.kernels.cpu.compiled import (
    MIN_THREADED_VALUES,
    CompiledKernel,
    bind_to_arrays,
    check_gathers,
    chunk_count,
    compute_by_compiled_loops,
    is_addressable,
    kernel_of,
    pool,
    shares_of,
)
from einmpi.kernels.loop_nest import counted
from einmpi.kernels.operands import Array
from einmpi.kernels.prepared import NumpyCall, PreparedCall, address_of

Jobs: TypeAlias = npt.NDArray[np.int64]  # a row of parameters for each thread


def prepare_by_compiled_loops(
    einsum: EinSum,
    operands: Sequence[Array],
    out: Array,
    index: Mapping[str, Array],
    threads: int,
) -> PreparedCall:
    """Return `compute_by_compiled_loops` for arrays that are stored as these are.

    What needs copies of arrays, or chunks that are aggregated at the end, is not prepared.
    """

    def compute(operands: Sequence[Array], out: Array) -> None:
        compute_by_compiled_loops(einsum, operands, out, index, threads)

    if einsum.calls() == 0 or chunk_count(einsum) > 1:
        return compute
    if not all(map(is_addressable, (*operands, out))):
        return compute
    index_values = {label: counted(indices) for label, indices in index.items()}
    bound, views = bind_to_arrays(einsum, operands, out, index_values)
    has_empty_gather = any(
        dimension.extent == 0 for dimensions in bound.gathered for dimension in dimensions
    )
    if bound.packed or has_empty_gather:
        return compute

    # Each call of the kernel has a row of parameters: those of one thread.
    parameters = bound.values.copy()
    offsets = []  # of a view in its array, with the place of its address
    label_values = []
    for position, view in enumerate(views):
        place = bound.position["A", position, 0]
        if position < len(operands):
            offset = address_of(view.array) - address_of(operands[position])
            offsets.append((place, offset))
        else:
            label_values.append((place, view.array))
    out_place = bound.position["A", len(views), 0]
    box = tuple((0, axis.extent) for axis in bound.axes)
    for loop, (start, stop) in enumerate(box):
        parameters[2 * loop] = start
        parameters[2 * loop + 1] = stop
    used_threads = threads if einsum.calls() >= MIN_THREADED_VALUES else 1
    shares = list(shares_of(bound, box, 1, used_threads))
    template = np.empty((len(shares), len(parameters)), np.int64)
    for row, (loop, share) in zip(template, shares, strict=True):
        row[:] = parameters
        row[2 * loop : 2 * loop + 2] = share
    is_gather = any(letter == "L" for letter, _, _ in bound.position)
    nest = bound.nest
    kernel: CompiledKernel | None = None

    def jobs_for(operands: Sequence[Array], out: Array) -> Jobs:
        jobs = template.copy()
        for (place, offset), array in zip(offsets, operands, strict=True):
            jobs[:, place] = address_of(array) + offset
        for place, values in label_values:
            jobs[:, place] = address_of(values)
        jobs[:, out_place] = address_of(out)
        return jobs

    def run_kernel(operands: Sequence[Array], out: Array) -> None:
        nonlocal kernel
        if kernel is None:
            kernel = kernel_of(nest)
        jobs = jobs_for(operands, out)
        if len(jobs) > 1:
            list(pool(threads).map(kernel, map(address_of, jobs)))
        else:
            kernel(address_of(jobs))
        if is_gather:
            check_gathers(bound, list(jobs))

    def bind(operands: Sequence[Array], out: Array) -> Callable[[], object]:
        if is_gather or len(template) > 1:
            return partial(run_kernel, operands, out)
        return _BoundKernel(kernel_of(nest), jobs_for(operands, out))

    return NumpyCall(run_kernel, bind)


class _BoundKernel:
    """A kernel with its parameters, for one thread and arrays that stay the same."""

    def __init__(self, kernel: CompiledKernel, jobs: Jobs) -> None:
        self.kernel = kernel
        self.jobs = jobs
        self.address = address_of(jobs)

    def __call__(self) -> None:
        self.kernel(self.address)
