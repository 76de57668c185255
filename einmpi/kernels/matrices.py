"""Functions of whole matrices on the arrays of a rank, by numpy and LAPACK."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from einmpi.graph.einsum import EinSum
from einmpi.kernels.operands import Array


def results_of_matrices(einsums: Sequence[EinSum], operands: Sequence[Array]) -> list[Array]:
    """Return results of one function of the same operands: those that these EinSums are."""
    first = einsums[0]
    record = first.required_matrix.record
    stacked = first.operands[0][:-2]
    matrices = []
    is_vector = False
    for array, index, letters in zip(operands, first.operands, record.operands, strict=True):
        own = [entry for entry in index if entry not in stacked]
        rows = first.operands[0][-2]
        order = [*(entry for entry in stacked if entry in index), rows]
        order += [entry for entry in own if entry != rows]
        lacking = tuple(place for place, entry in enumerate(stacked) if entry not in index)
        matrix: Any = array.transpose([index.index(entry) for entry in order])
        is_vector = len(own) < len(letters)
        matrices.append(np.expand_dims(matrix[..., None] if is_vector else matrix, lacking))
    dtype = record.result_type("", [matrix.dtype for matrix in matrices])
    found = record.function(*[matrix.astype(dtype, copy=False) for matrix in matrices])
    parts = dict(zip(record.results, found if len(record.results) > 1 else (found,), strict=True))
    results = []
    for einsum in einsums:
        part = parts[einsum.required_matrix.name]
        results.append(part[..., 0] if is_vector else part)
    return results
