"""Masks that compare a row with a column: where(t <= s + 3, …) keeps a band of a matrix."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from einmpi.graph.scalar import Call, Const, Index, Scalar
from einmpi.kernels.attention.expansion import NoMatchError

OPPOSITE = {"<=": ">", "<": ">=", ">=": "<", ">": "<="}
NO_BOUND = 2**62  # larger than any difference of indices


@dataclass(frozen=True)
class Band:
    """The scores that are seen: lower ≤ column − row ≤ upper. `row` is None if all are."""

    row: str | None = None
    lower: int = -NO_BOUND
    upper: int = NO_BOUND


ALL_SEEN = Band()


def band_of(condition: Scalar, column: str, is_negated: bool = False) -> Band:
    """Return the band in which a condition holds, or does not hold if `is_negated`."""
    if not isinstance(condition, Call):
        raise NoMatchError
    joined_by = "|" if is_negated else "&"
    if condition.op == joined_by:
        left, right = [band_of(part, column, is_negated) for part in condition.args]
        if left.row != right.row:
            raise NoMatchError
        return Band(left.row, max(left.lower, right.lower), min(left.upper, right.upper))
    if condition.op not in OPPOSITE:
        raise NoMatchError
    operator = OPPOSITE[condition.op] if is_negated else condition.op
    left_side, right_side = condition.args
    return _compared(operator, left_side, right_side, column)


def _compared(operator: str, left: Scalar, right: Scalar, column: str) -> Band:
    """Return the band of a comparison of two sums of labels and integers."""
    terms = _terms(left)
    terms.subtract(_terms(right))
    constant = terms.pop("", 0)
    labels = []
    for label, count in terms.items():
        if count and label != column:
            labels.append(label)
    if len(labels) != 1:
        raise NoMatchError
    (row,) = labels
    if terms[column] * terms[row] != -1:
        raise NoMatchError
    # column - row + constant, or its negative, is compared with 0.
    distance = -constant * terms[column]
    is_upper = operator in ("<=", "<")
    if terms[column] < 0:
        is_upper = not is_upper
    band = Band(row)
    strictness = 1 if operator in ("<", ">") else 0
    if is_upper:
        return replace(band, upper=distance - strictness)
    return replace(band, lower=distance + strictness)


def _terms(node: Scalar) -> Counter[str]:
    """Return how often each label is added in a sum; the constant is that of the name ""."""
    if isinstance(node, Index):
        return Counter({node.label: 1})
    if isinstance(node, Const) and isinstance(node.value, int):
        return Counter({"": int(node.value)})
    if isinstance(node, Call) and node.op in ("+", "-"):
        terms = _terms(node.args[0])
        if node.op == "+":
            terms.update(_terms(node.args[1]))
        else:
            terms.subtract(_terms(node.args[1]))
        return terms
    raise NoMatchError
