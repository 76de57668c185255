"""Scattered and picked values, by the form where(index == label, body, neutral) of ⊗.

Y[k,f] ← ⊕[e](where(dst[e] == k, X[e,f], neutral)) scatters: each e has one k. Y[e,f] ←
⊕[k](where(src[e] == k, X[k,f], neutral)) picks: only one k has a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from einmpi.graph.aggregations import Aggregation
from einmpi.graph.scalar import (
    Arg,
    Call,
    Const,
    Element,
    Index,
    IndexEntries,
    Number,
    Scalar,
    gathers_in,
    labels_in,
    labels_of,
    unique,
    walk,
    with_gathers,
)


@dataclass(frozen=True)
class Segments:
    """⊕ of values into the places that indices give.

    Attributes
    ----------
    labels
        The scattered labels of the output.
    indices
        For each of them the index that a value goes to, over Args. A value goes nowhere if an
        index is not one of the label's.
    index_labels
        The labels that the indices depend on.
    body
        The values, over Args.
    masked
        What takes the place of values that go elsewhere: the neutral element of ⊕, or any number
        if ⊕ is idempotent.
    operands
        The indices of the operands, which may assume that a value goes to its place.
    """

    labels: tuple[str, ...]
    indices: tuple[Scalar, ...]
    index_labels: tuple[str, ...]
    body: Scalar
    masked: Number
    operands: tuple[IndexEntries, ...]


@dataclass(frozen=True)
class Pick:
    """The one value of an aggregated label that an index picks.

    `index` and `body` are over Args. If the index is none of the label's, `masked` is the result.
    """

    label: str
    index: Scalar
    body: Scalar
    masked: Number


def find_pick(
    function: Scalar,
    operands: Sequence[IndexEntries],
    aggregated: Sequence[str],
    record: Aggregation,
) -> Pick | None:
    """Return what an EinSum with this ⊗ and ⊕ picks; None if it is of another form."""
    match function:
        case Call("where", (condition, body, Const(masked))):
            pass
        case _:
            return None
    found = _compared_label(condition, aggregated, {})
    if found is None or masked != record.empty:
        return None
    label, index = found
    if label in used_labels(index, operands):
        return None
    for entries in operands:
        # An index that is arithmetic on the label would have to be computed from the other index.
        if any(label in labels_of(gather) for gather in gathers_in(entries)):
            return None
    return Pick(label, index, body, masked)


def find_segments(
    function: Scalar, operands: Sequence[IndexEntries], output: Sequence[str], record: Aggregation
) -> Segments | None:
    """Return what an EinSum with this ⊗ and ⊕ scatters; None if it is of another form."""
    match function:
        case Call("where", (Call() as condition, chosen, Const(masked))):
            pass
        case _:
            return None
    indices: dict[str, Scalar] = {}
    for comparison in conjuncts(condition):
        found = _compared_label(comparison, output, indices)
        if found is None:
            return None
        label, index = found
        indices[label] = index
    # Taking the number once must be the same as taking it for each value that goes elsewhere.
    if not record.is_idempotent and masked != record.empty:
        return None
    entries = tuple(_index_with_other_guard(index, condition, None) for index in operands)
    index_labels = unique(*(used_labels(index, entries) for index in indices.values()))
    if not set(indices).isdisjoint(index_labels):
        return None
    body = without_guard(chosen, condition)
    return Segments(tuple(indices), tuple(indices.values()), index_labels, body, masked, entries)


def conjuncts(condition: Scalar) -> list[Scalar]:
    """Return the conditions that & joins."""
    if isinstance(condition, Call) and condition.op == "&":
        left, right = condition.args
        return conjuncts(left) + conjuncts(right)
    return [condition]


def _compared_label(
    comparison: Scalar, labels: Sequence[str], taken: dict[str, Scalar]
) -> tuple[str, Scalar] | None:
    """Return which of the labels is in index == label, in either order, and the index."""
    if not isinstance(comparison, Call) or comparison.op != "==":
        return None
    left, right = comparison.args
    for label, index in ((right, left), (left, right)):
        if isinstance(label, Index) and label.label in labels and label.label not in taken:
            return label.label, index
    return None


def used_labels(node: Scalar, operands: Sequence[IndexEntries]) -> tuple[str, ...]:
    """Return the labels that an expression over Args depends on, given the operands' indices."""
    found: dict[str, None] = {}
    waiting = [node]
    while waiting:
        for part in walk(waiting.pop()):
            if isinstance(part, Index):
                found[part.label] = None
            elif isinstance(part, Arg):
                index = operands[part.position]
                found.update(dict.fromkeys(labels_in(index)))
                waiting.extend(gathers_in(index))
    return tuple(found)


def without_guard(node: Scalar, condition: Scalar, inside: Scalar | None = None) -> Scalar:
    """Return an expression where a condition is known to hold: where(condition, x, …) is x.

    If it may not hold, but nothing is used then, `inside` guards the indices instead.
    """
    if isinstance(node, Call):
        if node.op == "where" and node.args[0] == condition:
            return without_guard(node.args[1], condition, inside)
        return Call(node.op, tuple(without_guard(arg, condition, inside) for arg in node.args))
    return with_other_guard(node, condition, inside)


def with_other_guard(node: Scalar, condition: Scalar, other: Scalar | None) -> Scalar:
    """Return an expression with another condition in its wheres; without these if it is None."""
    if isinstance(node, Call):
        changed = [with_other_guard(arg, condition, other) for arg in node.args]
        if node.op == "where" and node.args[0] == condition:
            return changed[1] if other is None else Call("where", (other, *changed[1:]))
        return Call(node.op, tuple(changed))
    if isinstance(node, Element):
        return Element(node.tensor, _index_with_other_guard(node.index, condition, other))
    return node


def _index_with_other_guard(
    index: IndexEntries, condition: Scalar, other: Scalar | None
) -> IndexEntries:
    return with_gathers(index, lambda gather: with_other_guard(gather, condition, other))
