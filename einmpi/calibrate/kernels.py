"""How fast a rank computes while all ranks of its node do: a matrix product in each dtype, and another kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from einmpi.api import program
from einmpi.calibrate.clock import seconds_of
from einmpi.plan.machine import PRODUCTS
from einmpi.runtime.comm import Comm
from einmpi.runtime.kernels import compute

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
        rows = _LEAST
        while True:
            work, operations = _work(PRODUCT, threads, dtype, A=(rows, rows), B=(rows, rows))
            seconds = seconds_of(comm, work, budget / len(PRODUCTS) / 3)
            if seconds >= _LONG or rows == _MOST:
                break
            rows *= 2
        found[dtype] = seconds / operations
    return found


def other_time(comm: Comm, threads: int, budget: float) -> float:
    """Seconds for an operation of another kernel."""
    work, operations = _work(OTHER, threads, "float64", X=(_ROWS, _COLUMNS), C=(_ROWS,))
    return seconds_of(comm, work, budget) / operations


def _work(text: str, threads: int, dtype: str, **shapes: Any) -> tuple[Callable[[], None], int]:
    """A kernel on arrays of its own, and how many operations it does."""
    vertex = program(text, **shapes, dtype=dtype).graph["Z"]
    einsum = vertex.einsum
    assert einsum is not None
    operands = [_numbers(shapes[name], dtype) for name in vertex.inputs]
    out = np.zeros(vertex.bound, vertex.dtype)
    no_index: Mapping[str, np.ndarray] = {}
    return lambda: compute(einsum, operands, out, no_index, threads), einsum.operations()


def _numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Some numbers; nothing takes longer because of them."""
    return (np.arange(np.prod(shape)) % 7).reshape(shape).astype(dtype)
