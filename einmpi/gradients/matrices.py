"""The adjoints of functions of whole real matrices: statements of the same functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import numpy as np

from einmpi.errors import OperationError, one_of
from einmpi.gradients.adjoint_tensors import PREFIX, AdjointTensors
from einmpi.gradients.contributions import Contribution
from einmpi.graph.derivatives.simple import ZERO, negative, plus, times
from einmpi.graph.eingraph import Vertex
from einmpi.graph.scalar import Call, Const, Element, Index, Scalar


def send_through_matrices(
    adjoints: AdjointTensors, vertex: Vertex, adjoint: Scalar, wanted: Collection[str]
) -> None:
    """Send the adjoint of a result of a function of matrices to the operands that are wanted."""
    function = vertex.computed_einsum.function
    assert isinstance(function, Call)
    rule = RULES.get(function.op)
    if rule is None:
        what = f"the derivative of {function.op} is not known"
        raise OperationError(what, one_of(RULES))
    if np.dtype(vertex.dtype).kind == "c":
        what = f"the derivative of {function.op} of complex matrices is not known"
        raise OperationError(what, "real ones")
    rule(_Statements(adjoints, vertex, adjoint, wanted))


class _Statements:
    """Writes statements over the labels of a function of matrices, and those of its stack.

    The function has the labels `rows` and `columns` of its first operand, and `others` of a new
    dimension, or of columns on the right, which a vector has not. `inner` is a label to sum over,
    with as many values as there are columns.
    """

    def __init__(
        self, adjoints: AdjointTensors, vertex: Vertex, adjoint: Scalar, wanted: Collection[str]
    ) -> None:
        einsum = vertex.computed_einsum
        labels = einsum.matrix_labels
        self.adjoints, self.vertex, self.wanted = adjoints, vertex, wanted
        self.operands = tuple(map(Element, vertex.inputs, einsum.operands))
        self.stack = tuple(map(str, einsum.operands[0][:-2]))
        self.rows, self.columns = labels["i"], labels["j"]
        self.others = tuple(labels[letter] for letter in "k" if letter in labels)
        self.inner = adjoints.names.take_new("p")
        self.extent = {**einsum.extent, self.inner: einsum.extent[self.columns]}
        self.value = Element(vertex.name, einsum.output)
        name = adjoints.as_tensor(vertex.name, einsum.output, adjoint)
        self.adjoint = Element(name, einsum.output)

    def at(self, matrix: Element, *labels: str) -> Element:
        """Return the element of a matrix, or of each one of a stack, with other labels."""
        return Element(matrix.tensor, (*self.stack, *labels))

    def define(
        self, labels: tuple[str, ...], expression: Scalar, summed: tuple[str, ...] = ()
    ) -> Element:
        """Add a tensor with these labels; return its element."""
        output = (*self.stack, *labels)
        name = self.adjoints.names.take_new(PREFIX + self.vertex.name)
        aggregation = "sum" if summed else None
        return self.adjoints.emit(name, output, expression, self.extent, aggregation, summed)

    def called(self, function: str, labels: tuple[str, ...], *operands: Element) -> Element:
        """Add a tensor that a function of matrices returns; return its element."""
        output = (*self.stack, *labels)
        read = dict.fromkeys(str(label) for each in operands for label in each.index)
        gone = tuple(label for label in read if label not in output)
        name = self.adjoints.names.take_new(PREFIX + self.vertex.name)
        return self.adjoints.emit(name, output, Call(function, operands), self.extent, None, gone)

    def result(self, function: str, *labels: str) -> Element:
        """Return a result of the same matrices: that of a vertex that has it, or of a new one."""
        for each in self.adjoints.known.values():
            called = each.einsum and each.einsum.function
            is_alike = isinstance(called, Call) and called.op == function
            if is_alike and each.inputs == self.vertex.inputs:
                return Element(each.name, (*self.stack, *labels))
        return self.called(function, labels, *self.operands)

    def send(self, operand: int, part: Scalar, summed: tuple[str, ...] = ()) -> None:
        """Send a part of its adjoint to an operand, which may be one for all of a stack."""
        element = self.operands[operand]
        if element.tensor in self.wanted:
            labels = tuple(map(str, element.index))
            shared = tuple(label for label in self.stack if label not in labels)
            part_of_adjoint = Contribution(labels, part, (*summed, *shared), dict(self.extent))
            self.adjoints.send(element.tensor, part_of_adjoint)


def _triangular(row: str, column: str, below: Scalar, diagonal: Scalar, above: Scalar) -> Scalar:
    """Return one thing below the diagonal, one on it, and one above it."""
    upper = Call("where", (Call("==", (Index(row), Index(column))), diagonal, above))
    return Call("where", (Call("<", (Index(column), Index(row))), below, upper))


def _cholesky(write: _Statements) -> None:
    """Only the lower triangle is read: an element of it is also the one above the diagonal."""
    i, j, p = write.rows, write.columns, write.inner
    lower, adjoint = write.value, write.adjoint
    upper = write.define((i, j), write.at(lower, j, i))
    product = write.define((i, j), times(write.at(lower, p, i), write.at(adjoint, p, j)), (p,))
    half = times(product, Const(0.5))
    triangle = write.define((i, j), _triangular(i, j, product, half, ZERO))
    left = write.called("solve_upper", (j, p), upper, write.at(triangle, i, p))
    turned = write.define((i, p), write.at(left, p, i))
    found = write.called("solve_upper", (j, p), upper, turned)
    one, two = write.at(found, i, j), write.at(found, j, i)
    write.send(0, _triangular(i, j, plus(one, two), one, ZERO))


def _solve(transposed_by: str, write: _Statements) -> None:
    i, j, right = write.rows, write.columns, write.others
    transposed = write.define((j, i), write.operands[0])
    found = write.called(transposed_by, (i, *right), transposed, write.adjoint)
    write.send(1, found)
    part = negative(times(found, write.value))
    if transposed_by == "solve_upper":
        part = _triangular(i, j, part, part, ZERO)
    elif transposed_by == "solve_lower":
        part = _triangular(i, j, ZERO, part, part)
    write.send(0, part, right)


def _inverse(write: _Statements) -> None:
    i, j, p = write.rows, write.columns, write.inner
    inverse, adjoint = write.value, write.adjoint
    left = write.define((i, p), times(write.at(inverse, j, i), write.at(adjoint, j, p)), (j,))
    write.send(0, negative(times(left, write.at(inverse, j, p))), (p,))


def _orthogonal(name: str, write: _Statements) -> None:
    i, j, (k,), p = write.rows, write.columns, write.others, write.inner
    if write.extent[i] < write.extent[j]:
        what = "the derivative of qr of a matrix with more columns than rows is not known"
        raise OperationError(what, "at least as many rows as columns")
    q, r, adjoint = write.result("qr_q", i, k), write.result("qr_r", k, j), write.adjoint
    if name == "qr_q":
        sides = negative(times(write.at(adjoint, i, k), write.at(q, i, j)))
        product = write.define((k, j), sides, (i,))
    else:
        sides = times(write.at(r, k, p), write.at(adjoint, j, p))
        product = write.define((k, j), sides, (p,))
    symmetric = write.define((k, j), _triangular(k, j, product, product, write.at(product, j, k)))
    factors = times(write.at(q, i, p), write.at(symmetric, p, k))
    turned = write.define((k, i), factors, (p,))
    if name == "qr_q":
        turned = write.define((k, i), plus(write.at(adjoint, i, k), turned))
    write.send(0, write.called("solve_upper", (j, i), r, turned))


RULES: Mapping[str, Callable[[_Statements], None]] = {
    "cholesky": _cholesky,
    "inv": _inverse,
    "qr_q": partial(_orthogonal, "qr_q"),
    "qr_r": partial(_orthogonal, "qr_r"),
    "solve": partial(_solve, "solve"),
    "solve_lower": partial(_solve, "solve_upper"),
    "solve_upper": partial(_solve, "solve_lower"),
}
