"""Indices solved for their labels: for which values of labels an index has a given value.

So the adjoint of a convolution is a convolution, and that of a reshape is a reshape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from einmpi.graph.derivatives.simple import ZERO, minus, negative, plus, times
from einmpi.graph.index_arithmetic import (
    Affine,
    Interval,
    affine_of,
    arithmetic_labels,
    interval_of,
)
from einmpi.graph.scalar import Call, Const, Index, Scalar


@dataclass(frozen=True)
class Solution:
    """The values of labels for which an index has a given value.

    Attributes
    ----------
    values
        The labels that are determined, with their values.
    conditions
        Where there is such a value.
    summed
        New labels with their extents: each of their values gives another solution.
    """

    values: Mapping[str, Scalar]
    conditions: tuple[Scalar, ...] = ()
    summed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Equation:
    """`index` has the value of the label `place`, which goes through `size` values.

    `free` are the labels that it may be solved for, `extent` has those of all labels.
    """

    place: str
    size: int
    index: Scalar
    free: Sequence[str]
    extent: Mapping[str, int]


def intervals(extent: Mapping[str, int]) -> dict[str, Interval]:
    """Return the least and the greatest value of each label."""
    return {label: (0, max(0, size - 1)) for label, size in extent.items()}


def as_scalar(affine: Affine) -> Scalar:
    """Return an affine index as an expression."""
    result: Scalar = ZERO
    for label, coefficient in affine.terms:
        result = plus(result, times(Const(coefficient), Index(label)))
    return plus(result, Const(affine.constant))


def reduced(index: Scalar, extent: Mapping[str, int]) -> Scalar:
    """Return an index without needless parts: (8·i + j) % 8 is j if j is less than 8."""
    if isinstance(index, Call):
        index = Call(index.op, tuple(reduced(part, extent) for part in index.args))
    match index:
        case Call("%" | "//", (inner, Const(int(divisor)))) if divisor > 0:
            affine = affine_of(inner)
        case _:
            affine = affine_of(index)
            return index if affine is None else as_scalar(affine)
    if affine is None:
        return index
    whole: list[tuple[str, int]] = []
    rest: list[tuple[str, int]] = []
    for label, coefficient in affine.terms:
        if coefficient % divisor == 0:
            whole.append((label, coefficient // divisor))
        else:
            rest.append((label, coefficient))
    quotient, constant = divmod(affine.constant, divisor)
    remainder = as_scalar(Affine(constant, tuple(rest)))
    bounds = interval_of(remainder, intervals(extent))
    is_small = bounds is not None and bounds[0] >= 0 and bounds[1] < divisor
    if index.op == "%":
        return remainder if is_small else Call("%", (remainder, Const(divisor)))
    multiple = as_scalar(Affine(quotient, tuple(whole)))
    if is_small:
        return multiple
    return plus(multiple, Call("//", (remainder, Const(divisor))))


def solve(equation: Equation, new_label: Callable[[str], str]) -> Solution | None:
    """Return for which values of free labels an index has a given value; None if not known."""
    affine = affine_of(equation.index)
    if affine is not None:
        return _solve_affine(equation, affine)
    match equation.index:
        case Call("%", (inner, Const(int(divisor)))) if divisor > 0:
            return _solve_remainder(equation, inner, divisor, new_label)
        case Call("//", (inner, Const(int(divisor)))) if divisor > 0:
            return _solve_quotient(equation, inner, divisor, new_label)
    return None


def range_conditions(value: Scalar, size: int, extent: Mapping[str, int]) -> tuple[Scalar, ...]:
    """Return the conditions under which a value is one of 0, 1, …, size − 1."""
    bounds = None
    if arithmetic_labels(value) is not None:
        bounds = interval_of(value, intervals(extent))
    conditions = []
    if bounds is None or bounds[0] < 0:
        conditions.append(Call(">=", (value, ZERO)))
    if bounds is None or bounds[1] >= size:
        conditions.append(Call("<", (value, Const(size))))
    return tuple(conditions)


def _solve_affine(equation: Equation, affine: Affine) -> Solution | None:
    """Solve constant + Σ coefficient · label = place."""
    extent = equation.extent
    terms = [term for term in affine.terms if term[0] in equation.free]
    if not terms:
        return None
    terms.sort(key=lambda term: -abs(term[1]))
    if not _is_positional(terms, extent):
        # The sum over the other labels stays: the one that is solved for should be the longest.
        terms = [max(terms, key=lambda term: extent[term[0]])]
    solved = {label for label, _ in terms}
    others = tuple(term for term in affine.terms if term[0] not in solved)
    distance = minus(Index(equation.place), as_scalar(Affine(affine.constant, others)))
    if terms[0][1] < 0:
        distance = negative(distance)
    values: dict[str, Scalar] = {}
    conditions: list[Scalar] = []
    remaining = distance
    for label, coefficient in terms:
        size = abs(coefficient)
        value = remaining
        if size != 1:
            value = reduced(Call("//", (remaining, Const(size))), extent)
            remaining = reduced(Call("%", (remaining, Const(size))), extent)
        else:
            remaining = ZERO
        values[label] = value
        conditions.extend(range_conditions(value, extent[label], extent))
    if remaining != ZERO:
        conditions.append(Call("==", (remaining, ZERO)))
    return Solution(values, tuple(conditions))


def _is_positional(terms: Sequence[tuple[str, int]], extent: Mapping[str, int]) -> bool:
    """Return whether labels are like digits of a number: each value has one solution.

    The terms are sorted by their coefficients, the largest first.
    """
    if len(terms) == 1:
        return True
    reach = 0
    for label, coefficient in reversed(terms):
        if coefficient <= reach:
            return False
        reach += coefficient * (extent[label] - 1)
    return True


def _single_label(equation: Equation, inner: Scalar) -> tuple[str, int, Scalar] | None:
    """Return the only free label of an index, its coefficient 1 or −1, and the rest."""
    affine = affine_of(inner)
    if affine is None:
        return None
    terms = [term for term in affine.terms if term[0] in equation.free]
    if len(terms) != 1 or abs(terms[0][1]) != 1:
        return None
    label, coefficient = terms[0]
    others = tuple(term for term in affine.terms if term[0] != label)
    return label, coefficient, as_scalar(Affine(affine.constant, others))


def _solve_remainder(
    equation: Equation, inner: Scalar, divisor: int, new_label: Callable[[str], str]
) -> Solution | None:
    """Solve (± label + rest) % divisor = place."""
    found = _single_label(equation, inner)
    if found is None:
        return None
    label, sign, rest = found
    extent = dict(equation.extent)
    distance = minus(Index(equation.place), rest)
    if sign < 0:
        distance = negative(distance)
    value = reduced(Call("%", (distance, Const(divisor))), extent)
    summed: dict[str, int] = {}
    size = extent[label]
    if size > divisor:
        turn = new_label("turn")
        summed[turn] = -(-size // divisor)
        extent[turn] = summed[turn]
        value = plus(times(Const(divisor), Index(turn)), value)
    conditions = list(range_conditions(value, size, extent))
    if equation.size > divisor:
        conditions.append(Call("<", (Index(equation.place), Const(divisor))))
    return Solution({label: value}, tuple(conditions), summed)


def _solve_quotient(
    equation: Equation, inner: Scalar, divisor: int, new_label: Callable[[str], str]
) -> Solution | None:
    """Solve (± label + rest) // divisor = place."""
    found = _single_label(equation, inner)
    if found is None:
        return None
    label, sign, rest = found
    extent = dict(equation.extent)
    step = new_label("step")
    extent[step] = divisor
    whole = plus(times(Const(divisor), Index(equation.place)), Index(step))
    value = minus(whole, rest)
    if sign < 0:
        value = negative(value)
    conditions = range_conditions(value, extent[label], extent)
    return Solution({label: value}, conditions, {step: divisor})
