"""How fast a rank computes while all ranks of its node do: matrix products and another kernel."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.api import program
from einmpi.cli.calibrate.clock import Action, Figure
from einmpi.cli.job_options import with_flags
from einmpi.compiled.backends import Workplace
from einmpi.graph.einsum import EinSum
from einmpi.job.job import Job
from einmpi.planner.machine import PRODUCTS
from einmpi.schedule.slots import Slot
from einmpi.schedule.step import Kernel

PRODUCT = "Z[i,k] = sum(A[i,j] * B[j,k])"
# Stands for all kernels that are not products: half arithmetic and half memory, as in a softmax.
OTHER = "Z[i,j] = exp(X[i,j] - C[i])"
_COLUMNS = 1024  # of the other kernel
_ROWS = tuple(2**power for power in range(11, 17))
# Rows, and as many columns. The last ones are for GPUs.
_MATRICES = (256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)

Array = npt.NDArray[Any]


def job_to_measure(options: argparse.Namespace) -> Job:
    """Return a job that asks for the backend of the command line."""
    job = program(PRODUCT, A=(1, 1), B=(1, 1))
    return with_flags(replace(job, path="--backend"), options)


def products(workplace: Workplace, budget: float) -> dict[str, Figure]:
    """Return the figures of an operation of a matrix product, by dtype."""
    found = {}
    for dtype in PRODUCTS:
        action_of = partial(_product, workplace, dtype)
        found[dtype] = _figure(
            workplace, action_of, _product_operations, _MATRICES, budget / len(PRODUCTS)
        )
    return found


def other(workplace: Workplace, budget: float) -> Figure:
    """Return the figure of an operation of a kernel that is not a product."""

    def action_of(rows: int) -> Action:
        shapes = {"X": (rows, _COLUMNS), "C": (rows,)}
        return MeasuredKernel.of(workplace, OTHER, "float64", shapes).compute

    def operations(rows: int) -> int:
        return 2 * rows * _COLUMNS

    return _figure(workplace, action_of, operations, _ROWS, budget)


def _figure(
    workplace: Workplace,
    action_of: Callable[[int], Action],
    units_of: Callable[[int], int],
    sizes: Sequence[int],
    budget: float,
) -> Figure:
    """Return a figure that makes the arrays of a size once, not in each round."""
    return Figure(workplace.comm, lru_cache(maxsize=1)(action_of), units_of, sizes, budget)


def _product(workplace: Workplace, dtype: str, rows: int) -> Action:
    shapes = {"A": (rows, rows), "B": (rows, rows)}
    return MeasuredKernel.of(workplace, PRODUCT, dtype, shapes).compute


def _product_operations(rows: int) -> int:
    return 2 * rows**3


@dataclass(frozen=True)
class MeasuredKernel:
    """A kernel with the arrays of a backend that it reads and writes."""

    workplace: Workplace
    step: Kernel
    operands: list[Any]
    result: Any

    @classmethod
    def of(
        cls, workplace: Workplace, text: str, dtype: str, shapes: Mapping[str, tuple[int, ...]]
    ) -> MeasuredKernel:
        """Return the kernel of a statement that computes Z from tensors of these shapes."""
        given: dict[str, Any] = dict(shapes)
        vertex = program(text, **given, dtype=dtype).graph["Z"]
        operands = []
        slots = []
        for name in vertex.inputs:
            array = workplace.backend.allocate(shapes[name], dtype)
            workplace.backend.from_host(_numbers(shapes[name], dtype), array)
            operands.append(array)
            slots.append(Slot(name, shapes[name], dtype))
        result = workplace.backend.allocate(vertex.bound, vertex.dtype)
        target = Slot("Z", vertex.bound, vertex.dtype)
        step = Kernel("Z", target, tuple(slots), vertex.computed_einsum, (), ())
        return cls(workplace, step, operands, result)

    @property
    def einsum(self) -> EinSum:
        """What is computed."""
        return self.step.einsum

    def compute(self) -> None:
        """Compute it, and return when this is done."""
        self.workplace.backend.compute_kernel(self.step, self.operands, self.result)
        self.workplace.backend.wait()


def _numbers(shape: tuple[int, ...], dtype: str) -> Array:
    """Return an array of numbers from 0 to 6."""
    numbers = np.zeros(shape, np.int8)
    for dimension, extent in enumerate(shape):
        along = np.arange(extent) % 7
        numbers += along.astype(np.int8).reshape((-1,) + (1,) * (len(shape) - dimension - 1))
    numbers %= 7
    return numbers.astype(dtype)
