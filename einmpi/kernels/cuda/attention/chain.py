"""Chains that are softmax attention or its gradients, computed by kernels for tensor cores."""

from __future__ import annotations

from math import prod

import numpy as np

from einmpi.graph.scalar import Element
from einmpi.kernels.attention.gradients import VALUE_LABEL, AttentionGradients, find_gradients
from einmpi.kernels.attention.pattern import Attention, find_attention
from einmpi.kernels.attention.softmax import COLUMN_LABEL, CONTRACTED_LABEL
from einmpi.kernels.attention.softmax import Scores as FoundScores
from einmpi.kernels.cuda import driver
from einmpi.kernels.cuda.attention.backward import (
    PRODUCTS_GIVEN,
    PRODUCTS_IN_A_PASS,
    PRODUCTS_OF_RESULTS,
)
from einmpi.kernels.cuda.attention.forward import BATCH_DIMENSIONS
from einmpi.kernels.cuda.attention.launches import (
    MAX_COUNT,
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


def prepare_attention_chain(step: Chain, arrays: Arrays) -> PreparedChain | None:
    """Prepare a chain that computes attention; None if it is no attention, or not supported."""
    attention = find_attention(step.parts, names_of(step.writes))
    if attention is None:
        return None
    elements = _named(
        q=attention.q,
        k=attention.k,
        v=attention.v,
        o=attention.o,
        maxima=attention.maximum,
        totals=attention.total,
    )
    problem = _attention_problem(attention, elements, arrays)
    if problem is None or not supports(list(problem.tensors.values()), problem.scores):
        return None
    launch = prepare_attention(problem)

    def compute(arrays: Arrays) -> None:
        launch(_addresses(elements, arrays))

    return PreparedChain(compute)


def _attention_problem(
    attention: Attention, elements: dict[str, Element], arrays: Arrays
) -> Problem | None:
    labels = attention.labels
    storage = Storage(elements, arrays, labels)
    batches = storage.batches(BATCH_DIMENSIONS)
    number_dtype = _number_dtype(storage)
    if batches is None or number_dtype is None:
        return None
    tensors = {
        "q": storage.stored("q", batches, labels.row, CONTRACTED_LABEL),
        "k": storage.stored("k", batches, COLUMN_LABEL, CONTRACTED_LABEL),
        "v": storage.stored("v", batches, COLUMN_LABEL, labels.value),
        "o": storage.stored("o", batches, labels.row, labels.value),
    }
    strides = {}
    for name in elements:
        if name not in tensors:
            strides[name] = storage.number_strides(name, batches, labels.row)
    scores = _kernel_scores(attention.scores)
    return Problem(tensors, scores, strides, number_dtype, attention.divides)


def prepare_gradient_chain(step: Chain, arrays: Arrays) -> PreparedChain | None:
    """Prepare a chain that computes gradients of attention; None if it does not, or cannot."""
    gradients = find_gradients(step.parts, names_of(step.writes))
    if gradients is None:
        return None
    elements = _named(
        q=gradients.q,
        k=gradients.k,
        v=gradients.v,
        d_o=gradients.d_o,
        d_q=gradients.d_q.element,
        d_k=None if gradients.d_k is None else gradients.d_k.element,
        d_v=None if gradients.d_v is None else gradients.d_v.element,
        maxima=gradients.maximum,
        totals=gradients.total,
        given=gradients.products,
    )
    problem = _gradient_problem(gradients, elements, arrays)
    if problem is None or not supports(list(problem.tensors.values()), problem.scores):
        return None
    return _prepare_gradients(gradients, problem, elements)


def _gradient_problem(
    gradients: AttentionGradients, elements: dict[str, Element], arrays: Arrays
) -> Problem | None:
    labels = gradients.labels
    storage = Storage(elements, arrays, labels)
    batches = storage.batches(BATCH_DIMENSIONS - 1)  # the last one is summed over
    number_dtype = _number_dtype(storage)
    if batches is None or number_dtype is None:
        return None
    if set(labels.own_batches) - {*gradients.k.index} or {*labels.own_batches} - {
        *gradients.v.index
    }:
        return None  # dK or dV would be a sum over it
    heads = {"q": CONTRACTED_LABEL, "k": CONTRACTED_LABEL, "v": VALUE_LABEL, "d_o": VALUE_LABEL}
    heads |= {"d_q": CONTRACTED_LABEL, "d_k": CONTRACTED_LABEL, "d_v": VALUE_LABEL}
    tensors = {}
    strides = {}
    for name in elements:
        if name in heads:
            row = COLUMN_LABEL if name in ("k", "v", "d_k", "d_v") else labels.row
            tensors[name] = storage.stored(name, batches, row, heads[name])
        else:
            strides[name] = storage.number_strides(name, batches, labels.row)
    return Problem(tensors, _kernel_scores(gradients.scores), strides, number_dtype)


def _prepare_gradients(
    gradients: AttentionGradients, problem: Problem, elements: dict[str, Element]
) -> PreparedChain:
    """Return the launches of gradients, which share two numbers in float32 for each row.

    If no statistics of the rows are given, attention itself is computed again for them.
    """
    q = problem.tensors["q"]
    numbers_shape = problem.row_numbers_shape
    workspace = 2 * 4 * prod(numbers_shape)
    result_shape: tuple[int, ...] = ()
    if gradients.maximum is None:
        result_shape = q.shape
        strides = [2 * prod(q.shape[position + 1 :]) for position in range(len(q.shape))]
        results = Stored(q.dtype, q.shape, tuple(strides), 0)
        problem = Problem({**problem.tensors, "o": results}, problem.scores)
        workspace += 2 * prod(q.shape)
        first = prepare_attention(problem)
        products = PRODUCTS_OF_RESULTS
    else:
        first = prepare_row_numbers(problem)
        products = PRODUCTS_GIVEN if gradients.products is not None else PRODUCTS_IN_A_PASS
    launches = [first, prepare_row_gradients(problem, products, gradients.d_q.factor)]
    if gradients.d_k is not None or gradients.d_v is not None:
        factor = 1.0 if gradients.d_k is None else gradients.d_k.factor
        launches.append(prepare_column_gradients(problem, factor))

    def compute(arrays: Arrays) -> None:
        cupy = driver.cupy()
        statistics = cupy.empty(numbers_shape, np.float32)
        products = cupy.empty(numbers_shape, np.float32)
        results = cupy.empty(result_shape, np.float16)
        addresses = _addresses(elements, arrays)
        addresses["statistics"] = statistics.data.ptr
        addresses["products"] = products.data.ptr
        addresses["o"] = results.data.ptr
        for launch in launches:
            launch(addresses)

    return PreparedChain(compute, workspace)


def _named(**elements: Element | None) -> dict[str, Element]:
    """Return the elements that there are, by their names in the kernels."""
    return {name: element for name, element in elements.items() if element is not None}


def _addresses(elements: dict[str, Element], arrays: Arrays) -> dict[str, int]:
    return {name: arrays[element.tensor].data.ptr for name, element in elements.items()}


def _number_dtype(storage: Storage) -> str | None:
    """Return the dtype of the numbers of rows; None if they have different ones, or another."""
    value_dtype = storage.arrays["q"].dtype.name
    found = set()
    for name in ("maxima", "totals", "given"):
        if name in storage.arrays:
            found.add(storage.arrays[name].dtype.name)
    if not found:
        return "float32"
    if len(found) > 1 or not found <= {"float32", value_dtype}:
        return None
    (dtype,) = found
    return str(dtype)


def _kernel_scores(scores: FoundScores) -> Scores:
    """Return scale and mask as the kernels take them: their fill is not scaled yet."""
    return Scores(
        scale=scores.scale,
        lower=max(scores.band.lower, -MAX_COUNT),
        upper=min(scores.band.upper, MAX_COUNT),
        fill=scores.fill / scores.scale,
    )
