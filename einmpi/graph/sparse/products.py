"""Products of two sparse matrices, without a list of all pairs of elements that are multiplied.

C[i,k] ← Σ[j](A[i,j] × B[j,k]) becomes C[p] ← Σ[x,y](where((j of x == j of y) & (i of x == i of p)
& (k of y == k of p), A[x] × B[y], 0)): kernels find the pairs by their keys, row by row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from einmpi.graph.eingraph import Vertex
from einmpi.graph.scalar import Call, Element, Scalar, unlike
from einmpi.graph.sparse.background import And, At, Support
from einmpi.graph.sparse.combinations import Body
from einmpi.graph.sparse.patterns import Iteration, stored_at
from einmpi.graph.sparse.sorting import Column, Keys, key_dtype, sorting_order
from einmpi.kernels.cpu.compiled import supports_compiled_loops
from einmpi.kernels.cpu.key_loops import (
    MIN_COMPILED,
    list_keys,
    run_loop,
    starts_in,
    taken,
)
from einmpi.kernels.fixed_lists import fix

if TYPE_CHECKING:
    from einmpi.graph.sparse.desugar import Desugaring

MIN_PAIRS = MIN_COMPILED  # with fewer, it is no work to list them
MOST_IN_TABLES = 2**23  # rows or columns, unless a matrix stores half as many elements
MOST_SORTED_AT_ONCE = 64  # keys of a row of the result; numpy sorts longer ones


class _Factor(NamedTuple):
    """A matrix whose elements are sorted by the first of two labels, and the keys of these."""

    operand: int
    elements: Iteration
    keys: Keys


class Product:
    """The product of two sparse matrices that a vertex is."""

    def __init__(
        self, desugaring: Desugaring, vertex: Vertex, left: _Factor, right: _Factor
    ) -> None:
        self.desugaring = desugaring
        self.vertex = vertex
        self.left = left
        self.right = right
        self.labels = vertex.computed_einsum.labels  # of rows, of columns, and in between
        i, k, j = (vertex.computed_einsum.extent[label] for label in self.labels)
        self.extents = i, k
        self.starts = starts_in(left.keys[0], i), starts_in(right.keys[0], j)
        lengths = taken(np.diff(self.starts[1]), left.keys[1])
        self.pairs = int(lengths.sum(dtype=np.int64))

    def keys(self) -> Keys:
        """Return the keys of the result."""
        rows, columns = self.extents
        most = min(self.pairs, rows * columns)
        begin = np.zeros(rows + 1, key_dtype(most + 1))
        mark = np.zeros(columns, np.uint32)
        row_of = np.empty(most, key_dtype(rows))
        found = np.empty(most, key_dtype(columns))
        first, second = self.starts
        longest = np.array([MOST_SORTED_AT_ONCE], np.uint64)
        given = (first, self.left.keys[1], second, self.right.keys[1], longest)
        elements = max(self.pairs, MIN_COMPILED)  # it is never done on lists of Python
        run_loop(list_keys, given, (mark, begin, row_of, found), elements)
        for row in np.flatnonzero(np.diff(begin) > MOST_SORTED_AT_ONCE).tolist():
            found[begin[row] : begin[row + 1]].sort()
        for column in (row_of, found):
            column.resize(int(begin[-1]), refcheck=False)  # what is given back was never used
        fix(row_of)
        starts_in(row_of, rows, begin)
        return row_of, found

    def add(self) -> None:
        """Add the stored elements of the result, whose keys are known."""
        desugaring = self.desugaring
        vertex = self.vertex
        einsum = vertex.computed_einsum
        pattern = desugaring.patterns[vertex.name]
        i, k, j = self.labels
        extent = dict(einsum.extent)
        new = []
        for name, size in (
            ("x", self.left.elements.count),
            ("y", self.right.elements.count),
            ("p", pattern.stored),
        ):
            new.append(unlike(name, extent))
            extent[new[-1]] = size
        x, y, p = new

        def listed(stem: str, values: Column, label: str) -> Scalar:
            return Element(desugaring.array(f"{vertex.name}_{stem}", values), (label,))

        elements: dict[int, Scalar] = {}
        for factor, label in ((self.left, x), (self.right, y)):
            at = factor.elements.at(factor.operand)
            place = label if at is None else listed("place", at, label)
            elements[factor.operand] = Element(vertex.inputs[factor.operand], (place,))
        pairs = (
            (listed(j, self.left.keys[1], x), listed(j, self.right.keys[0], y)),
            (listed(i, self.left.keys[0], x), listed(i, pattern.keys[0], p)),
            (listed(k, self.right.keys[1], y), listed(k, pattern.keys[1], p)),
        )
        body = Body(desugaring, vertex, None, [elements[0], elements[1]])
        value = body.chosen(
            [Call("==", pair) for pair in pairs],
            body.value(einsum.function),
            einsum.required_aggregation,
        )
        desugaring.add(vertex, (p,), value, einsum.aggregation, (x, y), extent, matches=self.pairs)


def find_product(desugaring: Desugaring, vertex: Vertex, support: Support) -> Product | None:
    """Return the product that a vertex is; None if it is none, or if its pairs are to be listed."""
    einsum = vertex.computed_einsum
    is_of_two = support in (And((At(0), At(1))), And((At(1), At(0)))) and len(einsum.operands) == 2
    if not is_of_two or len(einsum.output) != 2 or len(einsum.aggregated) != 1:
        return None
    dtypes = [desugaring.vertices[name].dtype for name in vertex.inputs]
    if not supports_compiled_loops(einsum, dtypes):
        return None
    i, k, j = einsum.labels
    sides = [set(entries) for entries in einsum.operands]
    wanted = [{i, j}, {j, k}]
    if einsum.labels_as_numbers or wanted not in (sides, sides[::-1]):
        return None
    factors = []
    operands = (0, 1) if wanted == sides else (1, 0)
    for operand, order in zip(operands, ((i, j), (j, k)), strict=True):
        pattern = desugaring.patterns[vertex.inputs[operand]]
        most = max(MOST_IN_TABLES, 2 * pattern.stored)
        if len(pattern.keys) != 2 or max(pattern.extents) > most or not pattern.stored:
            return None
        elements = stored_at(operand, pattern, tuple(map(str, einsum.operands[operand])))
        if elements.labels != order:
            elements = elements.taken(sorting_order(elements.columns(order)))
        factors.append(_Factor(operand, elements, elements.columns(order)))
        for column in factors[-1].keys:
            fix(column)
    product = Product(desugaring, vertex, *factors)
    return product if product.pairs >= MIN_PAIRS else None
