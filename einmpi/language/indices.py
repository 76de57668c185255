"""Indices of tensors: arithmetic on labels, what it reaches, guards against reaching outside."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from einmpi.errors import InputError
from einmpi.graph.index_arithmetic import (
    MIRRORED_COMPARISONS,
    Affine,
    Guard,
    Interval,
    affine_of,
    interval_of,
)
from einmpi.graph.scalar import Call, Const, Index, Scalar
from einmpi.language.syntax import entries

_SYMBOLS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}


@dataclass(frozen=True)
class Reach:
    """An index that is arithmetic, before anything is known of its labels.

    `guarded` says that it is inside a branch of `where`, which may keep it inside of the tensor.
    `inner` are labels that aggregations around it bind, with their extents where these are clear.
    """

    node: ast.expr
    extent: int  # of the dimension that it indexes
    tensor: ast.Subscript
    guarded: bool
    inner: Mapping[str, int | None]

    def mentions(self, label: str) -> bool:
        """Return whether a label of the scope occurs in the index."""
        if label in self.inner:
            return False
        return any(isinstance(part, ast.Name) and part.id == label for part in ast.walk(self.node))


def affine_of_syntax(
    node: ast.expr, is_label: Callable[[str], bool], sizes: Mapping[str, int]
) -> Affine | None:
    """Return an index in the program's text as an affine function; None if it is not one."""
    scalar = _scalar_of(node, is_label, sizes)
    return None if scalar is None else affine_of(scalar)


def _scalar_of(
    node: ast.expr, is_label: Callable[[str], bool], sizes: Mapping[str, int]
) -> Scalar | None:
    match node:
        case ast.Constant(value=int() as value):
            return Const(value)
        case ast.Name(id=name):
            if is_label(name):
                return Index(name)
            return Const(sizes[name]) if name in sizes else None
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _scalar_of(operand, is_label, sizes)
            return None if inner is None else Call("neg", (inner,))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SYMBOLS:
            first = _scalar_of(left, is_label, sizes)
            second = _scalar_of(right, is_label, sizes)
            if first is None or second is None:
                return None
            return Call(_SYMBOLS[type(op)], (first, second))
    return None


def largest_extent(
    affine: Affine, label: str, extents: Mapping[str, int], dimension_extent: int
) -> int:
    """Return the largest extent of a label with which an index stays inside of a dimension.

    `extents` has the extents of the other labels.
    """
    low = high = affine.constant
    factor = 0
    for other, coefficient in affine.terms:
        if other == label:
            factor = coefficient
            continue
        reach = coefficient * (extents[other] - 1)
        low += min(reach, 0)
        high += max(reach, 0)
    assert factor, f"{label} is not in the index"
    if low < 0 or high >= dimension_extent:
        return 0
    steps = (dimension_extent - 1 - high) // factor if factor > 0 else low // -factor
    return steps + 1


def index_from_start(where: str, index: int, extent: int) -> int:
    """Return a number that indexes a dimension, counted from 0; negative ones count from the end.

    Raise InputError, at a place in the program, if it is out of range.
    """
    if -extent <= index < extent:
        return index % extent
    expected = f"an index from {-extent} to {extent - 1}"
    if extent == 0:
        expected = "no index, because this dimension has extent 0"
    raise InputError(where, f"index {index} is out of range", expected)


# ---- guards -------------------------------------------------------------------------------------

_OPPOSITE = {"<": ">=", ">=": "<", ">": "<=", "<=": ">", "==": "!=", "!=": "=="}


def narrow(bounds: Mapping[str, Interval], guards: Sequence[Guard]) -> dict[str, Interval] | None:
    """Return bounds of labels where all guards hold; None if they hold nowhere.

    Conditions that say nothing about a single label are left out, so the bounds may be too wide.
    """
    found = dict(bounds)
    excluded = []
    for condition, holds in guards:
        for comparison, affine in _comparisons(condition, holds):
            if comparison == "!=":
                excluded.append(affine)
            else:
                _apply(comparison, affine, found)
    # A label that is not equal to one end of its interval may then be at another end.
    before = None
    while before != found:
        before = dict(found)
        for affine in excluded:
            _exclude_end(affine, found)
    if any(low > high for low, high in found.values()):
        return None
    return found


def _comparisons(condition: Scalar, holds: bool) -> list[tuple[str, Affine]]:
    """Return what a condition says, as comparisons of affine functions with 0."""
    if not isinstance(condition, Call):
        return []
    if condition.op == "~":
        return _comparisons(condition.args[0], not holds)
    if condition.op == ("&" if holds else "|"):
        left = _comparisons(condition.args[0], holds)
        return left + _comparisons(condition.args[1], holds)
    if condition.op not in _OPPOSITE:
        return []
    difference = affine_of(Call("-", condition.args))
    if difference is None:
        return []
    return [(condition.op if holds else _OPPOSITE[condition.op], difference)]


def _apply(comparison: str, affine: Affine, bounds: dict[str, Interval]) -> None:
    """Narrow the bounds of the label in coefficient · label + constant (comparison) 0."""
    if len(affine.terms) != 1:
        return
    ((label, coefficient),) = affine.terms
    if label not in bounds:
        return
    constant = affine.constant
    if coefficient < 0:  # both sides times -1
        coefficient = -coefficient
        constant = -constant
        comparison = MIRRORED_COMPARISONS[comparison]
    low, high = bounds[label]
    # coefficient · label < -constant, and so on
    if comparison in ("<", "<=", "=="):
        limit = -constant - 1 if comparison == "<" else -constant
        high = min(high, limit // coefficient)
    if comparison in (">", ">=", "=="):
        limit = -constant + 1 if comparison == ">" else -constant
        low = max(low, -(-limit // coefficient))
    bounds[label] = low, high


def _exclude_end(affine: Affine, bounds: dict[str, Interval]) -> None:
    """Narrow the bounds of the label in coefficient · label + constant != 0, at either end."""
    found = _excluded_value(affine)
    if found is None or found[0] not in bounds:
        return
    label, value = found
    low, high = bounds[label]
    if low == value:
        bounds[label] = low + 1, high
    elif high == value:
        bounds[label] = low, high - 1


def _excluded_value(affine: Affine) -> tuple[str, int] | None:
    """Return the label and its only value for which an affine function is 0, if there is one."""
    if len(affine.terms) != 1:
        return None
    ((label, coefficient),) = affine.terms
    if affine.constant % coefficient:
        return None
    return label, -affine.constant // coefficient


def stays_inside(
    index: Scalar, bounds: Mapping[str, Interval], guards: Sequence[Guard], extent: int
) -> bool:
    """Return whether an index stays inside of a dimension wherever the guards hold."""
    narrowed = narrow(bounds, guards)
    if narrowed is None:
        return True  # it is used nowhere
    found = interval_of(index, narrowed)
    return found is not None and found[0] >= 0 and found[1] < extent


def reach_of_branch(
    index: Scalar, bounds: Mapping[str, Interval], guards: Sequence[Guard]
) -> Interval | None:
    """Return what an index reaches where all guards hold; None if that is not known exactly."""
    narrowed = narrow(bounds, guards)
    affine = affine_of(index)
    if narrowed is None or affine is None:
        return None
    if not all(_is_interval(condition, holds, narrowed) for condition, holds in guards):
        return None
    return interval_of(index, narrowed)


def _is_interval(condition: Scalar, holds: bool, narrowed: Mapping[str, Interval]) -> bool:
    """Return whether a condition says nothing but what the narrowed bounds of labels say."""
    if not isinstance(condition, Call):
        return False
    if condition.op == "~":
        return _is_interval(condition.args[0], not holds, narrowed)
    if condition.op == ("&" if holds else "|"):
        return all(_is_interval(argument, holds, narrowed) for argument in condition.args)
    found = _comparisons(condition, holds)
    if len(found) != 1:
        return False
    comparison, affine = found[0]
    if len(affine.terms) != 1:
        return False
    if comparison != "!=":
        return True
    excluded = _excluded_value(affine)
    if excluded is None:
        return True
    label, value = excluded
    if label not in narrowed:
        return False
    low, high = narrowed[label]
    return not low <= value <= high


def has_computed_index(node: ast.AST) -> bool:
    """Return whether an index in a syntax tree is more than a label or a number."""
    for part in ast.walk(node):
        if not isinstance(part, ast.Subscript):
            continue
        for index in entries(part.slice):
            if not isinstance(index, ast.Name | ast.Constant | ast.Slice):
                return True
    return False
