"""Chains that are softmax attention or its gradients, computed by kernels for tensor cores."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from einmpi.graph.scalar import Element
from einmpi.kernels.attention.gradients import find_gradients
from einmpi.kernels.attention.pattern import Attention, find_attention
from einmpi.kernels.attention.softmax import COLUMN_LABEL, CONTRACTED_LABEL
from einmpi.kernels.cuda import driver
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
from einmpi.kernels.cuda.attention.storage import Storage
from einmpi.kernels.cuda.chains.prepared import Arrays, PreparedChain
from einmpi.schedule.fused.chain import Chain
from einmpi.schedule.slots import names_of

# Tensors with the columns of the scores as their rows, and those with the head of V.
COLUMN_TENSORS = ("k", "v", "d_k", "d_v")
VALUE_TENSORS = ("v", "o", "d_o", "d_v")
ROW_NUMBERS = ("maxima", "totals", "given")  # arrays with a number for each row


def prepare_attention_chain(step: Chain, arrays: Arrays) -> PreparedChain | None:
    """Prepare a chain that computes attention; None if it is no attention, or not supported."""
    attention = find_attention(step.parts, names_of(step.writes))
    if attention is None:
        return None
    elements = attention.elements
    problem = _problem(attention, arrays, BATCH_DIMENSIONS)
    if problem is None:
        return None
    launch = prepare_attention(problem)
    return PreparedChain(lambda arrays: launch(_addresses(elements, arrays)))


def prepare_gradient_chain(step: Chain, arrays: Arrays) -> PreparedChain | None:
    """Prepare a chain that computes gradients of attention; None if it does not, or cannot."""
    gradients = find_gradients(step.parts, names_of(step.writes))
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
