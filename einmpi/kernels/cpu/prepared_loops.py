"""Compiled loops prepared once: a call sets the addresses of its arrays, and runs the kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.graph.einsum import EinSum
from einmpi.kernels.cpu.compiled import (
    MIN_THREADED_VALUES,
    CompiledKernel,
    OperandView,
    bind_to_arrays,
    check_gathers,
    chunk_count,
    compute_by_compiled_loops,
    is_addressable,
    kernel_of,
    pool,
    shares_of,
)
from einmpi.kernels.loop_nest import BoundNest, Counter, counted
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

    used_threads = threads if einsum.calls() >= MIN_THREADED_VALUES else 1
    template = _job_template(bound, views, operands, used_threads)
    is_gather = any(letter == "L" for letter, _, _ in bound.position)
    nest = bound.nest
    kernel: CompiledKernel | None = None

    def run_kernel(operands: Sequence[Array], out: Array) -> None:
        nonlocal kernel
        if kernel is None:
            kernel = kernel_of(nest)
        jobs = template.jobs_for(operands, out)
        if len(jobs) > 1:
            list(pool(threads).map(kernel, map(address_of, jobs)))
        else:
            kernel(address_of(jobs))
        if is_gather:
            check_gathers(bound, list(jobs))

    def bind(operands: Sequence[Array], out: Array) -> Callable[[], object]:
        if is_gather or len(template.rows) > 1:
            return partial(run_kernel, operands, out)
        return _BoundKernel(kernel_of(nest), template.jobs_for(operands, out))

    return NumpyCall(run_kernel, bind)


class _JobTemplate(NamedTuple):
    """The parameters of a kernel without the addresses of its arrays, and their places."""

    rows: Jobs
    offsets: list[tuple[int, int]]  # of each operand: the place, and where its view begins
    label_values: list[tuple[int, Array | Counter]]  # the place, and the values of a label
    out_place: int

    def jobs_for(self, operands: Sequence[Array], out: Array) -> Jobs:
        """Return the parameters for some arrays."""
        jobs = self.rows.copy()
        for (place, offset), array in zip(self.offsets, operands, strict=True):
            jobs[:, place] = address_of(array) + offset
        for place, values in self.label_values:
            jobs[:, place] = address_of(values)
        jobs[:, self.out_place] = address_of(out)
        return jobs


def _job_template(
    bound: BoundNest, views: Sequence[OperandView], operands: Sequence[Array], threads: int
) -> _JobTemplate:
    """Return the parameters of loops over the operands and the values of labels in `views`.

    Each call of the kernel has a row of them: those of one thread.
    """
    offsets = []
    label_values = []
    for position, view in enumerate(views):
        place = bound.position["A", position, 0]
        if position < len(operands):
            offsets.append((place, address_of(view.array) - address_of(operands[position])))
        else:
            label_values.append((place, view.array))
    parameters = bound.values.copy()
    box = tuple((0, axis.extent) for axis in bound.axes)
    for loop, (start, stop) in enumerate(box):
        parameters[2 * loop] = start
        parameters[2 * loop + 1] = stop
    shares = list(shares_of(bound, box, 1, threads))
    rows = np.empty((len(shares), len(parameters)), np.int64)
    for row, (loop, share) in zip(rows, shares, strict=True):
        row[:] = parameters
        row[2 * loop : 2 * loop + 2] = share
    return _JobTemplate(rows, offsets, label_values, bound.position["A", len(views), 0])


class _BoundKernel:
    """A kernel with its parameters, for one thread and arrays that stay the same."""

    def __init__(self, kernel: CompiledKernel, jobs: Jobs) -> None:
        self.kernel = kernel
        self.jobs = jobs
        self.address = address_of(jobs)

    def __call__(self) -> None:
        self.kernel(self.address)
