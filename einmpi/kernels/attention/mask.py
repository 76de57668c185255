"""Masks that compare a row with a column: where(t <= s + 3, …) keeps a band of a matrix."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from einmpi.graph.scalar import Call, Const, Index, Scalar
from einmpi.kernels.attention.expansion import NoMatchError, only, require

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
        require(left.row == right.row)
        return Band(left.row, max(left.lower, right.lower), min(left.upper, right.upper))
    require(condition.op in OPPOSITE)
    operator = OPPOSITE[condition.op] if is_negated else condition.op
    terms = _terms(Call("-", condition.args))
    constant = terms.pop("", 0)
    row = only([label for label, count in terms.items() if count and label != column])
    require(terms[column] * terms[row] == -1)
    # column - row + constant, or its negative, is compared with 0.
    distance = -constant * terms[column]
    is_upper = (operator in ("<=", "<")) == (terms[column] > 0)
    strictness = 1 if operator in ("<", ">") else 0
    if is_upper:
        return Band(row, upper=distance - strictness)
    return Band(row, lower=distance + strictness)


def _terms(node: Scalar) -> Counter[str]:
    """Return how often each label is added in a sum; the constant is that of the name ""."""
    match node:
        case Index(label):
            return Counter({label: 1})
        case Const(int(value)):
            return Counter({"": int(value)})
        case Call("+" | "-" as op, (left, right)):
            terms = _terms(left)
            if op == "+":
                terms.update(_terms(right))
            else:
                terms.subtract(_terms(right))
            return terms
    raise NoMatchError
