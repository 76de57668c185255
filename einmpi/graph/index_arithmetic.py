"""Indices that are arithmetic on labels and constants, such as u[i+1, 2*j]: what they can reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from einmpi.caches import bounded_cache
from einmpi.graph.scalar import Call, Const, Index, Scalar, walk

LARGEST_INDEX = 2**62  # and more might wrap around in 64 bits
# What a comparison becomes if its sides change places, or both are multiplied by −1.
MIRRORED_COMPARISONS = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
Interval: TypeAlias = tuple[int, int]  # the least value and the greatest one
# A condition, and whether it holds where an expression is used.
Guard: TypeAlias = tuple[Scalar, bool]


def interval_of(entry: Scalar, labels: Mapping[str, Interval]) -> Interval | None:
    """Return bounds of an index, given those of its labels. None if it is no arithmetic.

    The bounds are reached if every label occurs once.
    """
    if isinstance(entry, Index):
        return labels[entry.label]
    if isinstance(entry, Const):
        if type(entry.value) is not int:
            return None
        return entry.value, entry.value
    if not isinstance(entry, Call):
        return None
    arguments: list[Interval] = []
    for argument in entry.args:
        found = interval_of(argument, labels)
        if found is None:
            return None
        arguments.append(found)
    if entry.op in ("//", "%") and not isinstance(entry.args[1], Const):
        return None
    reached = interval_of_call(entry.op, arguments)
    if reached is None or max(-reached[0], reached[1]) >= LARGEST_INDEX:
        return None
    return reached


def intervals_of(entry: Scalar, labels: Mapping[str, Interval]) -> tuple[Interval, ...] | None:
    """Return bounds of an index as `interval_of`, in two intervals where a remainder wraps once.

    Of (i+1)%8 for i from 6 to 7 these are 7 to 7 and 0 to 0.
    """
    match entry:
        case Call("%", (dividend, Const(divisor))) if type(divisor) is int and divisor > 0:
            bounds = interval_of(dividend, labels)
            if bounds is None:
                return None
            low, high = bounds
            if high // divisor == low // divisor + 1 and high - low < divisor - 1:
                return (low % divisor, divisor - 1), (0, high % divisor)
    found = interval_of(entry, labels)
    return None if found is None else (found,)


def interval_of_call(op: str, arguments: list[Interval]) -> Interval | None:
    low, high = arguments[0]
    if op == "neg":
        return -high, -low
    if len(arguments) != 2:
        return None
    other_low, other_high = arguments[1]
    if op == "+":
        return low + other_low, high + other_high
    if op == "-":
        return low - other_high, high - other_low
    if op == "*":
        corners = (low * other_low, low * other_high, high * other_low, high * other_high)
        return min(corners), max(corners)
    if op == "maximum":
        return max(low, other_low), max(high, other_high)
    if op == "minimum":
        return min(low, other_low), min(high, other_high)
    is_divided_by_constant = other_low == other_high and other_low > 0
    if op == "//" and is_divided_by_constant:
        return low // other_low, high // other_low
    if op == "%" and is_divided_by_constant:
        if low // other_low == high // other_low:
            return low % other_low, high % other_low
        return 0, other_low - 1
    return None


@bounded_cache(65536)
def arithmetic_labels(entry: str | Scalar) -> tuple[str, ...] | None:
    """Return the labels of an index that is arithmetic; None for plain labels and for gathers."""
    if isinstance(entry, str):
        return None
    found = [node.label for node in walk(entry) if isinstance(node, Index)]
    labels = tuple(dict.fromkeys(found))
    anywhere = dict.fromkeys(labels, (0, 1))
    return labels if interval_of(entry, anywhere) is not None else None


@bounded_cache(65536)
def major_label(entry: Scalar, extents: tuple[tuple[str, int], ...]) -> str | None:
    """Return the label by which an index changes most: to cut it cuts the dimension into blocks."""
    extent = dict(extents)
    labels = arithmetic_labels(entry) or ()
    best = None
    widest = 0
    for label in labels:
        bounds = dict.fromkeys(labels, (0, 0))
        bounds[label] = 0, max(0, extent[label] - 1)
        found = interval_of(entry, bounds)
        if found is None:
            return None
        width = found[1] - found[0]
        if width > widest:
            best = label
            widest = width
    return best


@dataclass(frozen=True)
class Affine:
    """An index of the form constant + Σ coefficient · label."""

    constant: int
    terms: tuple[tuple[str, int], ...]  # (label, coefficient), each label once


@bounded_cache(65536)
def affine_of(entry: str | Scalar) -> Affine | None:
    """Return an index as an affine function of its labels; None if it is not one."""
    if isinstance(entry, str):
        return Affine(0, ((entry, 1),))
    if isinstance(entry, Index):
        return Affine(0, ((entry.label, 1),))
    if isinstance(entry, Const):
        return Affine(entry.value, ()) if type(entry.value) is int else None
    if not isinstance(entry, Call):
        return None
    return affine_of_call(entry.op, [affine_of(argument) for argument in entry.args])


def affine_of_call(op: str, arguments: Sequence[Affine | None]) -> Affine | None:
    """Return an operation on affine functions as one; None if it is not one."""
    match op, arguments:
        case "neg", [Affine() as one]:
            return _scaled(one, -1)
        case "+", [Affine() as one, Affine() as other]:
            return _added(one, other)
        case "-", [Affine() as one, Affine() as other]:
            return _added(one, _scaled(other, -1))
        case "*", ([Affine() as one, Affine(factor, ())] | [Affine(factor, ()), Affine() as one]):
            return _scaled(one, factor)
    return None


def _scaled(affine: Affine, factor: int) -> Affine:
    terms = [(label, coefficient * factor) for label, coefficient in affine.terms]
    return Affine(affine.constant * factor, tuple(term for term in terms if term[1]))


def _added(one: Affine, two: Affine) -> Affine:
    coefficients = dict(one.terms)
    for label, coefficient in two.terms:
        coefficients[label] = coefficients.get(label, 0) + coefficient
    terms = tuple((label, factor) for label, factor in coefficients.items() if factor)
    return Affine(one.constant + two.constant, terms)


def clamped(index: Scalar, low: int, high: int, extent: int) -> Scalar:
    """Return an index kept inside of a dimension, given its own bounds."""
    if high >= extent:
        index = Call("minimum", (index, Const(extent - 1)))
    if low < 0:
        index = Call("maximum", (index, Const(0)))
    return index


def is_remainder(index: Scalar, extent: int) -> bool:
    """Return whether an index is a remainder that is always inside of a dimension."""
    if not isinstance(index, Call) or index.op != "%":
        return False
    divisor = index.args[1]
    if not isinstance(divisor, Const) or type(divisor.value) is not int:
        return False
    return 0 < divisor.value <= extent


def guarded_index(index: Scalar, guards: Sequence[Guard]) -> Scalar:
    """Return an index that is 0 where the conditions of `where` around it do not hold."""
    guards = list(dict.fromkeys(guards))
    index = _without_guards(index, guards)
    for condition, holds in guards:
        if holds:
            index = Call("where", (condition, index, Const(0)))
        else:
            index = Call("where", (condition, Const(0), index))
    return index


def _without_guards(index: Scalar, guards: Sequence[Guard]) -> Scalar:
    """Return an index without those of the guards that are around it already."""
    match index:
        case Call("where", (condition, this, that)):
            if that == Const(0) and (condition, True) in guards:
                return _without_guards(this, guards)
            if this == Const(0) and (condition, False) in guards:
                return _without_guards(that, guards)
    return index
