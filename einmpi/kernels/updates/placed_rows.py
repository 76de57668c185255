"""Updates in place that write one index of a label, which a tensor gives for each of the others.

where(u == at[b], row[b,d], cache[b,u,d]), written over `cache`, writes a row for each b.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from einmpi.graph.einsum import EinSum
from einmpi.graph.labels import unique
from einmpi.graph.scalar import (
    Arg,
    Call,
    Const,
    Index,
    Scalar,
    labels_in,
    walk,
)
from einmpi.kernels.operands import operands_read, with_operands

MOST_VALUE_BYTES = 2**25  # of the values of all rows, which no plan counts


@dataclass(frozen=True)
class PlacedRows:
    """An EinSum whose results are elements of an operand, but for one index of a label.

    Attributes
    ----------
    operand
        The operand that is changed.
    label
        The label of which one index is written.
    place
        That index, an expression of operands with the labels `place_labels`.
    value
        What is written there, an EinSum without the label; `value_operands` are its operands.
    """

    operand: int
    label: str
    place: Scalar
    place_labels: tuple[str, ...]
    place_operands: tuple[int, ...]
    value: EinSum
    value_operands: tuple[int, ...]


@lru_cache(maxsize=1024)
def find_placed_rows(einsum: EinSum) -> PlacedRows | None:
    """Return which rows of an operand an EinSum writes; None if it may change all of it."""
    function = einsum.function
    if not einsum.is_elementwise or not isinstance(function, Call) or function.op != "where":
        return None
    condition, value, old = function.args
    if not isinstance(old, Arg) or einsum.operands[old.position] != einsum.output:
        return None
    if not isinstance(condition, Call) or condition.op != "==":
        return None
    for index, place in (condition.args, condition.args[::-1]):
        if not isinstance(index, Index) or not _is_place(einsum, place, index.label):
            continue
        place_operands = operands_read([place], einsum.operands)
        entries = [labels_in(einsum.operands[position]) for position in place_operands]
        place_labels = unique(*entries)
        written = _value_without(einsum, value, index.label)
        if written is not None:
            found, value_operands = written
            return PlacedRows(
                old.position,
                index.label,
                place,
                place_labels,
                place_operands,
                found,
                value_operands,
            )
    return None


def _is_place(einsum: EinSum, place: Scalar, label: str) -> bool:
    """Return whether an expression is of constants and of operands with other labels, each once."""
    for node in walk(place):
        if isinstance(node, Arg):
            entries = einsum.operands[node.position]
            is_plain = all(isinstance(entry, str) for entry in entries)
            if not is_plain or label in entries or len(set(entries)) < len(entries):
                return False
        elif not isinstance(node, Const | Call):
            return False
    return True


def _value_without(
    einsum: EinSum, value: Scalar, label: str
) -> tuple[EinSum, tuple[int, ...]] | None:
    """Return an expression as an EinSum without a label, and the operands that it reads.

    None if the expression depends on the label.
    """
    positions = operands_read([value], einsum.operands)
    expressions = [value]
    for position in positions:
        for entry in einsum.operands[position]:
            if entry == label:
                return None
            if not isinstance(entry, str):
                expressions.append(entry)
    for expression in expressions:
        if Index(label) in walk(expression):
            return None
    found = replace(
        einsum,
        output=tuple(other for other in einsum.output if other != label),
        function=value,
        extents=tuple((other, extent) for other, extent in einsum.extents if other != label),
    )
    return with_operands(found, positions), positions
