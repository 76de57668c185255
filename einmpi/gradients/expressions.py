"""Expressions at other values of their labels, and conditions around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from einmpi.gradients.indices import intervals, reduced
from einmpi.graph.derivatives.simple import ZERO, is_number
from einmpi.graph.eingraph import Vertex
from einmpi.graph.index_arithmetic import (
    Guard,
    arithmetic_labels,
    clamped,
    guarded_index,
    interval_of,
    is_remainder,
)
from einmpi.graph.scalar import (
    Call,
    Const,
    Element,
    Index,
    IndexEntries,
    Scalar,
    is_plain,
    rebuild,
)


def substituted(
    node: Scalar,
    values: Mapping[str, Scalar],
    extent: Mapping[str, int],
    guard: Scalar | None = None,
) -> Scalar:
    """Return an expression at these values of labels.

    Indices of tensors stay inside of them even where a value is no value of its label; what is
    read there must not be used. `extent` has the extents of all labels, old and new. `guard` is the
    condition that a value which is read from a tensor is one of its label.
    """
    inside: dict[str, Scalar] = {}
    for label, value in values.items():
        inside[label] = _inside(value, extent[label], extent, guard)

    def leaf(part: Scalar) -> Scalar:
        if isinstance(part, Index):
            return values.get(part.label, part)
        if isinstance(part, Element):
            return Element(part.tensor, _index(part.index))
        return part

    def index_leaf(part: Scalar) -> Scalar:
        if isinstance(part, Index):
            return inside.get(part.label, part)
        return leaf(part)

    def _index(index: IndexEntries) -> IndexEntries:
        entries: list[str | Scalar] = []
        for entry in index:
            if not isinstance(entry, str):
                entries.append(reduced(rebuild(entry, index_leaf), extent))
            elif entry in values:
                entries.append(_as_entry(inside[entry], extent[entry], extent))
            else:
                entries.append(entry)
        return tuple(entries)

    return rebuild(node, leaf)


def _as_entry(value: Scalar, size: int, extent: Mapping[str, int]) -> str | Scalar:
    """Return a value as an index; a label alone goes through the whole dimension."""
    if not isinstance(value, Index):
        return value
    return value.label if extent[value.label] == size else Call("+", (value, ZERO))


def _inside(value: Scalar, size: int, extent: Mapping[str, int], guard: Scalar | None) -> Scalar:
    """Return a value of a label that is kept in the label's range."""
    bounds = None
    if arithmetic_labels(value) is not None:
        bounds = interval_of(value, intervals(extent))
    if bounds is None:
        return value if guard is None else Call("where", (guard, value, ZERO))
    return clamped(value, bounds[0], bounds[1], size)


def conditions_around(node: Scalar) -> tuple[list[Scalar], Scalar]:
    """Return the conditions of where(…, where(…, x, 0), 0), the outermost first, and x."""
    conditions: list[Scalar] = []
    while isinstance(node, Call) and node.op == "where" and is_number(node.args[2], 0):
        conditions.append(node.args[0])
        node = node.args[1]
    return conditions, node


def under_conditions(conditions: Sequence[Scalar], node: Scalar) -> Scalar:
    """Return where(…, where(…, x, 0), 0), the first condition outermost."""
    for condition in reversed(conditions):
        node = Call("where", (condition, node, ZERO))
    return node


def conjunction(conditions: Sequence[Scalar]) -> Scalar:
    """Return the conditions joined by &; there is at least one."""
    joined = conditions[0]
    for condition in conditions[1:]:
        joined = Call("&", (joined, condition))
    return joined


def with_guarded_indices(
    node: Scalar, bounds: Mapping[str, Vertex], guards: Sequence[Guard] = ()
) -> Scalar:
    """Return an expression whose gathers read nothing where no branch of a `where` needs them.

    Programs have the same indices when they are read. Conditions stay as they are: with guards
    in conditions, which are in other guards, expressions would grow without bound. `bounds` has the
    tensors by their names.
    """
    if isinstance(node, Call) and node.op == "where":
        condition, this, that = node.args
        changed_this = with_guarded_indices(this, bounds, [*guards, (condition, True)])
        changed_that = with_guarded_indices(that, bounds, [*guards, (condition, False)])
        return Call("where", (condition, changed_this, changed_that))
    if isinstance(node, Call):
        arguments = [with_guarded_indices(argument, bounds, guards) for argument in node.args]
        return Call(node.op, tuple(arguments))
    if not isinstance(node, Element):
        return node
    entries: list[str | Scalar] = []
    for entry, extent in zip(node.index, bounds[node.tensor].bound, strict=True):
        is_arithmetic = isinstance(entry, str) or arithmetic_labels(entry) is not None
        if isinstance(entry, str) or is_arithmetic or is_remainder(entry, extent):
            entries.append(entry)
        else:
            entries.append(guarded_index(entry, guards))
    return Element(node.tensor, tuple(entries))


def is_cheap(node: Scalar) -> bool:
    """Return whether an expression is a number, an element, or the product of the two."""
    match node:
        case Const() | Element():
            return not isinstance(node, Element) or is_plain(node)
        case Call("neg", (inner,)) | Call("*", (Const(), inner)) | Call("/", (inner, Const())):
            return is_cheap(inner)
    return False
