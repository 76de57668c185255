"""How fast a rank computes while all ranks of its node do: a matrix product in each dtype, and another kernel."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy as np

from einmpi.api import program
from einmpi.cli.calibrate.clock import seconds_of
from einmpi.comm.base import Comm
from einmpi.graph.einsum import EinSum
from einmpi.kernels.cpu.dispatch import compute_einsum
from einmpi.planner.machine import PRODUCTS

PRODUCT = "Z[i,k] = sum(A[i,j] * B[j,k])"
# Of the kernels that are no products: half arithmetic, half memory, as in softmax and most of what stands beside it.
OTHER = "Z[i,j] = exp(X[i,j] - C[i])"
_LEAST, _MOST = 256, 2048  # rows of a matrix
_LONG = 0.01  # seconds of a product that is large enough for BLAS
_ROWS, _COLUMNS = 2048, 1024


def product_times(comm: Comm, threads: int, budget: float) -> dict[str, float]:
    """Seconds for an operation of a matrix product, by dtype."""
    found = {}
    for dtype in PRODUCTS:
        rows, seconds = _LEAST // 2, 0.0
        while seconds < _LONG and rows < _MOST:
            rows *= 2
            einsum, operands, out = kernel(PRODUCT, dtype, A=(rows, rows), B=(rows, rows))
            work = partial(compute_einsum, einsum, operands, out, {}, threads)
            seconds = seconds_of(comm, work, budget / len(PRODUCTS) / 3)  # 3 sizes or so
        found[dtype] = seconds / einsum.operations()
    return found


def other_time(comm: Comm, threads: int, budget: float) -> float:
    """Seconds for an operation of another kernel."""
    einsum, operands, out = kernel(OTHER, "float64", X=(_ROWS, _COLUMNS), C=(_ROWS,))
    return (
        seconds_of(comm, partial(compute_einsum, einsum, operands, out, {}, threads), budget)
        / einsum.operations()
    )


def kernel(text: str, dtype: str, **shapes: Any) -> tuple[EinSum, list[np.ndarray], np.ndarray]:
    """A statement that makes Z: its EinSum, operands with some numbers, and the array for the result."""
    vertex = program(text, **shapes, dtype=dtype).graph["Z"]
    assert vertex.einsum is not None
    operands = [
        (np.arange(prod(shapes[name])) % 7).reshape(shapes[name]).astype(dtype)
        for name in vertex.inputs
    ]
    return vertex.einsum, operands, np.zeros(vertex.bound, vertex.dtype)
