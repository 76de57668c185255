"""How fast a rank computes while all ranks of its node do: matrix products and another kernel."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.api import program
from einmpi.cli.calibrate.clock import Action, Figure
from einmpi.comm.base import Comm
from einmpi.graph.einsum import EinSum
from einmpi.kernels.cpu.dispatch import compute_einsum
from einmpi.planner.machine import PRODUCTS

PRODUCT = "Z[i,k] = sum(A[i,j] * B[j,k])"
# Stands for all kernels that are not products: half arithmetic and half memory, as in a softmax.
OTHER = "Z[i,j] = exp(X[i,j] - C[i])"
_OTHER_ROWS = 2048
_OTHER_COLUMNS = 1024
_MATRICES = (256, 384, 512, 768, 1024, 1536, 2048)  # rows, and as many columns

Array = npt.NDArray[Any]


def products(comm: Comm, threads: int, budget: float) -> dict[str, Figure]:
    """Return the figures of an operation of a matrix product, by dtype."""
    found = {}
    for dtype in PRODUCTS:
        action_of = partial(_product, dtype, threads)
        share = budget / len(PRODUCTS)
        found[dtype] = Figure(comm, action_of, _product_operations, _MATRICES, share)
    return found


def other(comm: Comm, threads: int, budget: float) -> Figure:
    """Return the figure of an operation of a kernel that is not a product."""

    def action_of(rows: int) -> Action:
        return _action(OTHER, "float64", threads, X=(rows, _OTHER_COLUMNS), C=(rows,))

    def operations(rows: int) -> int:
        return 2 * rows * _OTHER_COLUMNS

    return Figure(comm, action_of, operations, (_OTHER_ROWS,), budget)


def _product(dtype: str, threads: int, rows: int) -> Action:
    return _action(PRODUCT, dtype, threads, A=(rows, rows), B=(rows, rows))


def _product_operations(rows: int) -> int:
    return 2 * rows**3


def _action(text: str, dtype: str, threads: int, **shapes: Any) -> Action:
    einsum, operands, result = kernel(text, dtype, **shapes)
    return partial(compute_einsum, einsum, operands, result, {}, threads)


def kernel(text: str, dtype: str, **shapes: Any) -> tuple[EinSum, list[Array], Array]:
    """Return the EinSum of a statement that computes Z, operands for it, and an array for Z."""
    vertex = program(text, **shapes, dtype=dtype).graph["Z"]
    operands = []
    for name in vertex.inputs:
        shape = shapes[name]
        numbers = np.arange(prod(shape)) % 7
        operands.append(numbers.reshape(shape).astype(dtype))
    return vertex.computed_einsum, operands, np.zeros(vertex.bound, vertex.dtype)
