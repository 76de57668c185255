"""Chains that are softmax attention or its gradients, computed by kernels for tensor cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np

from einmpi.graph.scalar import Element
from einmpi.kernels.attention.gradients import find_gradients
from einmpi.kernels.attention.pattern import (
    COLUMN_LABEL,
    CONTRACTED_LABEL,
    Attention,
    Labels,
    find_attention,
)
from einmpi.kernels.cuda import capture, driver
from einmpi.kernels.cuda.attention.backward import (
    PRODUCTS_GIVEN,
    PRODUCTS_IN_A_PASS,
    PRODUCTS_OF_RESULTS,
)
from einmpi.kernels.cuda.attention.forward import BATCH_DIMENSIONS
from einmpi.kernels.cuda.attention.launches import (
    Problem,
    Scores,
    Stored,
    prepare_attention,
    prepare_column_gradients,
    prepare_row_gradients,
    prepare_row_numbers,
    supports,
)
from einmpi.kernels.cuda.driver import DeviceArray
from einmpi.schedule.compute import Compute
from einmpi.schedule.regions import names_of

# ---- storage -------------------------------------------------------------------------------------
#
# How the tensors of attention lie in memory, with at most three dimensions of batches.


# An extent, and for each tensor, by its name in the kernels, a stride in bytes.
Dimension: TypeAlias = tuple[int, dict[str, int]]
NO_DIMENSION: Dimension = (1, {})


class Storage:
    """The arrays of some elements, which are named as kernels name them: q, k, v, …"""

    def __init__(
        self, elements: Mapping[str, Element], arrays: Mapping[str, DeviceArray], labels: Labels
    ) -> None:
        self.elements = elements
        self.arrays = {name: arrays[element.tensor] for name, element in elements.items()}
        self.labels = labels
        self.extent = dict(labels.extents)

    def stride(self, name: str, label: str | None) -> int:
        """Return the stride of a label in an array: 0 where the array does not have it."""
        index = self.elements[name].index
        if label is None or label not in index or self.extent[label] == 1:
            return 0
        return int(self.arrays[name].strides[index.index(label)])

    def batches(self, most_own: int) -> list[Dimension] | None:
        """Return three dimensions of batches; those whose members share K and V are the last.

        Return None if batches do not lie in so few dimensions, with at most `most_own` others.
        """
        own = self._merged(self.labels.own_batches)
        shared = self._merged(self.labels.shared_batches)
        if not shared and len(own) < BATCH_DIMENSIONS:
            shared = [NO_DIMENSION]
        missing = BATCH_DIMENSIONS - len(own) - len(shared)
        if missing < 0 or len(own) > most_own:
            return None
        return [NO_DIMENSION] * missing + own + shared

    def _merged(self, labels: Sequence[str]) -> list[Dimension]:
        """Return the dimensions of labels; labels that lie like one are one."""
        found: list[Dimension] = []
        for label in labels:
            size = self.extent[label]
            if size == 1:
                continue
            strides = {name: self.stride(name, label) for name in self.elements}
            whole = {name: stride * size for name, stride in strides.items()}
            if found and found[-1][1] == whole:
                found[-1] = found[-1][0] * size, strides
            else:
                found.append((size, strides))
        return found

    def stored(self, name: str, batches: Sequence[Dimension], row: str | None, head: str) -> Stored:
        """Return an array as three dimensions of batches, rows and a head, given by labels."""
        array = self.arrays[name]
        rows = 1 if row is None else self.extent[row]
        shape = [size for size, _ in batches]
        head_stride = array.strides[self.elements[name].index.index(head)]
        return Stored(
            array.dtype.name,
            (*shape, rows, self.extent[head]),
            (*self.number_strides(name, batches, row), head_stride),
            array.data.ptr,
        )

    def number_strides(
        self, name: str, batches: Sequence[Dimension], row: str | None
    ) -> tuple[int, ...]:
        """Return the strides of an array along batches and rows."""
        strides = [each.get(name, 0) for _, each in batches]
        return (*strides, self.stride(name, row))


# ---- prepared ------------------------------------------------------------------------------------
#
# What a CUDA kernel for whole chains answers when it is asked to prepare one.


# The arrays of all slots that a chain reads and writes, by the name of the slot.
Arrays: TypeAlias = Mapping[str, DeviceArray]


@dataclass(frozen=True)
class PreparedChain:
    """A chain prepared for arrays that are stored as some are."""

    compute: Callable[[Arrays], None]  # on arrays with the same shapes, strides and dtypes
    workspace: int = 0  # bytes of memory that it takes besides

    def call(self, arrays: Arrays) -> int:
        """Compute the chain; return the bytes that it took besides."""
        self.compute(arrays)
        return self.workspace


# Returns None if the kernel does not support the chain, or arrays that are stored in this way.
PrepareChain: TypeAlias = Callable[[Compute, Arrays], PreparedChain | None]


# Tensors with the columns of the scores as their rows, and those with the head of V.
COLUMN_TENSORS = ("k", "v", "d_k", "d_v")
VALUE_TENSORS = ("v", "o", "d_o", "d_v")
ROW_NUMBERS = ("maxima", "totals", "given")  # arrays with a number for each row


def prepare_attention_chain(step: Compute, arrays: Arrays) -> PreparedChain | None:
    """Prepare a chain that computes attention; None if it is no attention, or not supported."""
    attention = find_attention(step.kernels, names_of(step.writes))
    if attention is None:
        return None
    elements = attention.elements
    problem = _problem(attention, arrays, BATCH_DIMENSIONS)
    if problem is None:
        return None
    launch = prepare_attention(problem)
    return PreparedChain(lambda arrays: launch(_addresses(elements, arrays)))


def prepare_gradient_chain(step: Compute, arrays: Arrays) -> PreparedChain | None:
    """Prepare a chain that computes gradients of attention; None if it does not, or cannot."""
    gradients = find_gradients(step.kernels, names_of(step.writes))
    if gradients is None:
        return None
    own_batches = set(gradients.labels.own_batches)
    if not all(own_batches <= set(gradients.elements[name].index) for name in ("k", "v")):
        return None  # dK or dV would be a sum over it
    # The last dimension of batches is summed over.
    problem = _problem(gradients, arrays, BATCH_DIMENSIONS - 1)
    return None if problem is None else _prepare_gradients(gradients, problem)


def _problem(found: Attention, arrays: Arrays, most_own_batches: int) -> Problem | None:
    """Return what kernels are given; None if they do not support how the arrays are stored."""
    labels = found.labels
    storage = Storage(found.elements, arrays, labels)
    batches = storage.batches(most_own_batches)
    number_dtype = _number_dtype(storage)
    if batches is None or number_dtype is None:
        return None
    tensors = {}
    strides = {}
    for name in found.elements:
        if name in ROW_NUMBERS:
            strides[name] = storage.number_strides(name, batches, labels.row)
            continue
        row = COLUMN_LABEL if name in COLUMN_TENSORS else labels.row
        head = labels.value if name in VALUE_TENSORS else CONTRACTED_LABEL
        tensors[name] = storage.stored(name, batches, row, head)
    band = found.scores.band
    # As the kernels take it, the fill is not scaled yet.
    fill = found.scores.fill / found.scores.scale
    scores = Scores(found.scores.scale, band.lower, band.upper, fill)
    if not supports(list(tensors.values()), scores):
        return None
    return Problem(tensors, scores, strides, number_dtype, found.divides)


def _prepare_gradients(gradients: Attention, problem: Problem) -> PreparedChain:
    """Return the launches of gradients, which share two numbers in float32 for each row.

    If no statistics of the rows are given, attention itself is computed again for them.
    """
    elements = gradients.elements
    q = problem.tensors["q"]
    numbers_shape = problem.row_numbers_shape
    workspace = 2 * 4 * prod(numbers_shape)
    result_shape: tuple[int, ...] = ()
    if "maxima" in elements:
        first = prepare_row_numbers(problem)
        products = PRODUCTS_GIVEN if "given" in elements else PRODUCTS_IN_A_PASS
    else:
        result_shape = q.shape
        strides = [2 * prod(q.shape[position + 1 :]) for position in range(len(q.shape))]
        results = Stored(q.dtype, q.shape, tuple(strides), 0)
        problem = Problem({**problem.tensors, "o": results}, problem.scores)
        workspace += 2 * prod(q.shape)
        first = prepare_attention(problem)
        products = PRODUCTS_OF_RESULTS
    launches = [first, prepare_row_gradients(problem, products, gradients.factors["d_q"])]
    if "d_k" in elements or "d_v" in elements:
        launches.append(prepare_column_gradients(problem, gradients.factors.get("d_k", 1.0)))

    def compute(arrays: Arrays) -> None:
        cupy = driver.cupy()
        own = {
            "statistics": cupy.empty(numbers_shape, np.float32),
            "products": cupy.empty(numbers_shape, np.float32),
            "o": cupy.empty(result_shape, np.float16),
        }
        addresses = _addresses(elements, arrays)
        addresses |= {name: array.data.ptr for name, array in own.items()}
        for launch in launches:
            launch(addresses)

    return PreparedChain(compute, workspace)


def _addresses(elements: Mapping[str, Element], arrays: Arrays) -> dict[str, int]:
    return {name: arrays[element.tensor].data.ptr for name, element in elements.items()}


def _number_dtype(storage: Storage) -> str | None:
    """Return the dtype of the numbers of rows; None if they have different ones, or another."""
    found = {array.dtype.name for name, array in storage.arrays.items() if name in ROW_NUMBERS}
    if not found:
        return "float32"
    if len(found) > 1 or not found <= {"float32", storage.arrays["q"].dtype.name}:
        return None
    return str(found.pop())


# ---- whole chain ---------------------------------------------------------------------------------
#
# CUDA kernels that compute a whole chain at once, such as attention.
#
# Each is asked whether it can; chains that none of them computes go block by block.


# Asked in this order.
CHAIN_KERNELS: list[PrepareChain] = [prepare_attention_chain, prepare_gradient_chain]


def prepare_chain(step: Compute, arrays: Arrays) -> Callable[[Arrays], int] | None:
    """Return a chain by the first kernel that can compute it; None if none can."""
    capture.prepare_calls()
    for prepare in CHAIN_KERNELS:
        prepared = prepare(step, arrays)
        if prepared is not None:
            return prepared.call
    return None
