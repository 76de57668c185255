"""Elements of tensors: their indices, and the checks that these stay inside of the tensor."""

from __future__ import annotations

import ast

import numpy as np

from einmpi.errors import InputError, nearest_of
from einmpi.graph.arithmetic import call
from einmpi.graph.eingraph import Vertex
from einmpi.graph.index_arithmetic import (
    arithmetic_labels,
    clamped,
    guarded_index,
    interval_of,
    is_remainder,
)
from einmpi.graph.scalar import Call, Const, Element, Index, Scalar, labels_of
from einmpi.language.expressions.reader import ExpressionReader
from einmpi.language.indices import (
    index_from_start,
    reach_of_branch,
    stays_inside,
)
from einmpi.language.scope import Scope, Value
from einmpi.language.symbols import TypedScalar
from einmpi.language.syntax import entries
from einmpi.language.vocabulary import is_callable


def read_element(reader: ExpressionReader, node: ast.Subscript, scope: Scope) -> TypedScalar:
    """Return TENSOR[indices], each index a label, a number or an expression."""
    tensor = _tensor_of(reader, node)
    parts = entries(node.slice)
    if len(parts) != len(tensor.bound):
        what = f"{reader.symbols.written(node)} has the wrong number of indices"
        written = reader.symbols.written_name(tensor.name)
        expected = f"{len(tensor.bound)}, one for each dimension of {written}"
        raise InputError(reader.where(node), what, expected)
    index: list[str | Scalar] = []
    for part, extent in zip(parts, tensor.bound, strict=True):
        if not isinstance(part, ast.Name):
            index.append(_computed_index(reader, part, extent, scope))
        elif _has_other_extent(part.id, extent, scope):
            at_label = Call("+", (Index(part.id), Const(0)))
            index.append(_checked_index(reader, at_label, extent, scope, part))
        else:
            index.append(part.id)
    if 0 in tensor.bound and _is_guarded_by_where(reader):
        return _element_of_empty(reader, tensor, index, scope, node)
    return TypedScalar(Element(tensor.name, tuple(index)), np.dtype(tensor.dtype))


def _tensor_of(reader: ExpressionReader, node: ast.Subscript) -> Vertex:
    assert isinstance(node.value, ast.Name)
    name = node.value.id
    if is_callable(name):
        raise reader.not_a_tensor(node, name)
    if name not in reader.known:
        expected = nearest_of(reader.known, name)
        raise InputError(reader.where(node), f"unknown tensor {name!r}", expected)
    return reader.known[name]


def _has_other_extent(label: str, extent: int, scope: Scope) -> bool:
    """Return whether a label is known to go through less, or more, than this dimension."""
    owner = scope.owner(label)
    if owner is None or label not in owner.extents:
        return False
    return owner.extents[label][0] != extent


# ---- indices that are computed ------------------------------------------------------------------


def _computed_index(reader: ExpressionReader, node: ast.expr, extent: int, scope: Scope) -> Scalar:
    """Return an index that is computed: by a tensor, by arithmetic on labels, or a constant."""
    scalar, kind = reader.expression(node, scope)
    dtype = np.dtype(kind)
    if dtype.kind not in "iu":
        what = f"the index {reader.symbols.written(node)} is {dtype.name}"
        hint = "for a label, take a name that is no number" if isinstance(node, Value) else ""
        raise InputError(reader.where(node), what, "an integer", hint)
    if isinstance(scalar, Const):
        return Const(index_from_start(reader.where(node), int(scalar.value.real), extent))
    return _checked_index(reader, scalar, extent, scope, node)


def _checked_index(
    reader: ExpressionReader, scalar: Scalar, extent: int, scope: Scope, node: ast.expr
) -> Scalar:
    """Return an index that stays inside of its dimension where it is used, or raise."""
    labels = arithmetic_labels(scalar)
    if labels is None:
        if is_remainder(scalar, extent):
            return scalar
        return guarded_index(scalar, reader.guards)
    bounds = {}
    for label in labels:
        label_extent = reader.symbols.extent(scope, label, node)
        if label_extent == 0:
            return scalar  # nothing is read
        bounds[label] = 0, label_extent - 1
    reached = interval_of(scalar, bounds)
    if reached is None:  # it may wrap around
        return guarded_index(scalar, reader.guards)
    low, high = reached
    if low >= 0 and high < extent:
        return scalar
    if stays_inside(scalar, bounds, reader.guards, extent):
        return clamped(scalar, low, high, extent)
    hint = "give its labels extents, such as i:n-1, or use where(i > 0, ..., ...)"
    if reader.guards:
        reached_in_branch = reach_of_branch(scalar, bounds, reader.guards)
        if reached_in_branch is None or extent == 0:
            # It depends on values, and is checked in the run.
            return guarded_index(scalar, reader.guards)
        low, high = reached_in_branch
        hint = "the condition of where has to exclude the rest"
    what = f"the index {reader.symbols.written(node)} goes from {low} to {high}"
    raise InputError(reader.where(node), what, f"0 to {extent - 1}", hint)


# ---- tensors without elements -------------------------------------------------------------------


def _is_guarded_by_where(reader: ExpressionReader) -> bool:
    """Return whether a condition is around the element, other than that of an index left of =."""
    return any(condition is not reader.scattered_guard for condition, _ in reader.guards)


def _element_of_empty(
    reader: ExpressionReader,
    tensor: Vertex,
    index: list[str | Scalar],
    scope: Scope,
    node: ast.AST,
) -> TypedScalar:
    """Return an element of a tensor without elements, by an index that a condition guards.

    It is read from a tensor with one element instead, a sum of nothing. Where the condition
    holds after all, the index is 1 and out of range.
    """
    symbols = reader.symbols
    dtype = np.dtype(tensor.dtype)
    summed: list[str] = []  # the labels of dimensions with extent 0, which the sum is over
    kept: list[str] = []
    kept_index: list[str | Scalar] = []
    outside: Scalar = Const(1)
    sum_scope = Scope(None, [symbols.names.take_new("slice") for _ in index])
    labels = sum_scope.bound
    for label, entry, extent in zip(labels, index, tensor.bound, strict=True):
        sum_scope.register(label, extent, label)
        if extent > 0 or isinstance(entry, str) or _has_no_values(reader, entry, scope, node):
            kept.append(label)
            kept_index.append(entry)
            continue
        summed.append(label)
        if arithmetic_labels(entry) is None:  # values decide, and they remain in use
            outside = call("maximum", outside, entry)
    if not summed:
        return TypedScalar(Element(tensor.name, tuple(index)), dtype)
    single = symbols.names.take_new("slice")
    sum_scope.bound = (*labels, single)
    sum_scope.register(single, 1, single)
    name = symbols.names.take_new(symbols.current.name)
    symbols.slices[name] = symbols.written_name(tensor.name)
    values = TypedScalar(Element(tensor.name, labels), dtype)
    aggregation = "any" if tensor.dtype == "bool" else "sum"
    total = symbols.emit(name, (single, *kept), values, aggregation, summed, sum_scope, node)
    element = Element(name, (guarded_index(outside, reader.guards), *kept_index))
    if total.type == dtype:
        return TypedScalar(element, dtype)
    return TypedScalar(Call(tensor.dtype, (element,)), dtype)


def _has_no_values(reader: ExpressionReader, entry: Scalar, scope: Scope, node: ast.AST) -> bool:
    """Return whether an index has no values, because one of its labels has none."""
    return any(reader.symbols.extent(scope, label, node) == 0 for label in labels_of(entry))
