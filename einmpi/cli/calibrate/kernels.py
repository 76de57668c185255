"""How fast a rank computes while all ranks of its node do: matrix products and another kernel."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.api import program
from einmpi.cli.calibrate.clock import measure_seconds
from einmpi.comm.base import Comm
from einmpi.graph.einsum import EinSum
from einmpi.kernels.cpu.dispatch import compute_einsum
from einmpi.planner.machine import PRODUCTS

PRODUCT = "Z[i,k] = sum(A[i,j] * B[j,k])"
# Stands for all kernels that are not products: half arithmetic and half memory, as in a softmax.
OTHER = "Z[i,j] = exp(X[i,j] - C[i])"
_OTHER_ROWS = 2048
_OTHER_COLUMNS = 1024
_SMALLEST_MATRIX = 256  # rows
_LARGEST_MATRIX = 2048
_LONG_ENOUGH = 0.01  # seconds of a product that is large enough to show the speed of BLAS
_USUAL_SIZES = 3  # of matrices that are measured before a product takes that long

Array = npt.NDArray[Any]


def product_times(comm: Comm, threads: int, budget: float) -> dict[str, float]:
    """Return the seconds per operation of a matrix product, by dtype."""
    found = {}
    budget_per_size = budget / len(PRODUCTS) / _USUAL_SIZES
    for dtype in PRODUCTS:
        rows = _SMALLEST_MATRIX // 2
        seconds = 0.0
        while seconds < _LONG_ENOUGH and rows < _LARGEST_MATRIX:
            rows *= 2
            einsum, operands, result = kernel(PRODUCT, dtype, A=(rows, rows), B=(rows, rows))
            multiply = partial(compute_einsum, einsum, operands, result, {}, threads)
            seconds = measure_seconds(comm, multiply, budget_per_size)
        found[dtype] = seconds / einsum.operations()
    return found


def other_time(comm: Comm, threads: int, budget: float) -> float:
    """Return the seconds per operation of a kernel that is not a product."""
    shapes = {"X": (_OTHER_ROWS, _OTHER_COLUMNS), "C": (_OTHER_ROWS,)}
    einsum, operands, result = kernel(OTHER, "float64", **shapes)
    evaluate = partial(compute_einsum, einsum, operands, result, {}, threads)
    return measure_seconds(comm, evaluate, budget) / einsum.operations()


def kernel(text: str, dtype: str, **shapes: Any) -> tuple[EinSum, list[Array], Array]:
    """Return the EinSum of a statement that computes Z, operands for it, and an array for Z."""
    vertex = program(text, **shapes, dtype=dtype).graph["Z"]
    operands = []
    for name in vertex.inputs:
        shape = shapes[name]
        numbers = np.arange(prod(shape)) % 7
        operands.append(numbers.reshape(shape).astype(dtype))
    return vertex.computed_einsum, operands, np.zeros(vertex.bound, vertex.dtype)
