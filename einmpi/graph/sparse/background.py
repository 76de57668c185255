"""What an expression is where nothing is stored, and where it may be something else.

The background of an expression is its value with each sparse operand replaced by its implicit
value. Its support is where it may differ from that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.arithmetic import compute_types, infer
from einmpi.graph.dtypes import Type
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Arg, Call, Const, Number, Scalar, walk

# ---- constants -----------------------------------------------------------------------------------
#
# A background that is the same everywhere is a constant of a certain dtype: a cast of a number.


def typed(value: Number, dtype: str) -> Scalar:
    """Return a number as a constant of a dtype."""
    return Call(dtype, (Const(value),))


def number_of(node: Scalar | None) -> Number | None:
    """Return the value of a constant, None if an expression is none."""
    match node:
        case Const(value):
            return value
        case Call(op, (Const(value),)) if OPERATIONS[op].is_cast:
            return value
    return None


def same_number(left: Number | None, right: Number | None) -> bool:
    """Return whether two numbers are equal; nan is equal to nan."""
    return left == right or (left != left and right != right)


def as_number(value: object) -> Number:
    """Return a scalar of numpy as a number of Python."""
    number: Number = np.asarray(value).item()
    return number


def in_dtype(value: Number, dtype: str) -> Number:
    """Return a number as it is in a dtype; integers wrap around."""
    with np.errstate(all="ignore"):
        if type(value) is int and np.dtype(dtype).kind in "iu":
            bits = 8 * np.dtype(dtype).itemsize
            return as_number(np.uint64(value % 2**bits).astype(dtype))
        return as_number(np.asarray(value).astype(dtype))


def aggregate_of(aggregation: str, value: Number, count: int, dtype: str) -> Number:
    """Return the aggregate, of some dtype, of a number that is taken `count` times."""
    if AGGREGATIONS[aggregation].is_idempotent:
        return in_dtype(value, dtype)
    if isinstance(value, bool):
        value = int(value)
    if isinstance(value, int):
        if aggregation == "sum":
            return in_dtype(value * count, dtype)
        return in_dtype(pow(value, count, 2**64), dtype)
    with np.errstate(all="ignore"):
        exact = np.asarray(value)
        return in_dtype(as_number(exact * count if aggregation == "sum" else exact**count), dtype)


# ---- support -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class At:
    """Where the operand at a position is stored."""

    position: int


@dataclass(frozen=True)
class And:
    """Where all of the parts are."""

    parts: tuple[Support, ...]


@dataclass(frozen=True)
class Or:
    """Where one of the parts is."""

    parts: tuple[Support, ...]


Support: TypeAlias = At | And | Or


def joined(kind: type[And] | type[Or], supports: Sequence[Support | None]) -> Support | None:
    """Return several supports as one, each once; None if there is none."""
    found: dict[Support, None] = {}
    for support in supports:
        if isinstance(support, kind):
            found.update(dict.fromkeys(support.parts))
        elif support is not None:
            found[support] = None
    if len(found) <= 1:
        return next(iter(found), None)
    return kind(tuple(found))


def everywhere_in(support: Support | None) -> tuple[int, ...]:
    """Return the operands that are stored everywhere in a support."""
    if isinstance(support, At):
        return (support.position,)
    if isinstance(support, And):
        return tuple(part.position for part in support.parts if isinstance(part, At))
    return ()


# ---- expressions ---------------------------------------------------------------------------------


class Facts(NamedTuple):
    """The background of an expression over Args, None if nobody knows it; and its support.

    Without a support it is its background everywhere.
    """

    background: Scalar | None
    support: Support | None


class Annihilation(NamedTuple):
    """What makes the result of an operation a constant, whatever its other arguments are."""

    arguments: tuple[int, ...]
    result: Scalar
    support: Support | None  # outside of it the result is that


class Expressions:
    """Expressions over operands of which some are sparse.

    `implicit` has the constants of sparse operands by position, None where nobody knows them;
    `dtypes` are those of all operands.
    """

    def __init__(self, implicit: Mapping[int, Scalar | None], dtypes: Sequence[str]) -> None:
        self.implicit = implicit
        self.dtypes = dtypes

    def dtype_of(self, node: Scalar) -> Type:
        """Return the dtype of an expression; a type of Python for a number that adapts."""

        def leaf(part: Scalar) -> Type:
            assert isinstance(part, Arg)
            return np.dtype(self.dtypes[part.position])

        return infer(node, leaf)

    def facts(self, node: Scalar) -> Facts:
        """Return the background and the support of an expression."""
        if isinstance(node, Arg) and node.position in self.implicit:
            return Facts(self.implicit[node.position], At(node.position))
        if not isinstance(node, Call):
            return Facts(node, None)
        parts = [self.facts(argument) for argument in node.args]
        if node.op == "where":
            condition, *branches = parts
            number = number_of(condition.background)
            if number is not None and condition.support is not None:
                chosen = branches[0] if number else branches[1]
                background = self._cast(chosen.background, node)
                return Facts(background, joined(Or, [condition.support, chosen.support]))
            first, second = (number_of(branch.background) for branch in branches)
            if first is not None and same_number(first, second):  # whatever the condition is
                background = self._cast(branches[0].background, node)
                return Facts(background, joined(Or, [branch.support for branch in branches]))
        found = self.annihilation(node)
        if found is not None:
            return Facts(found.result, found.support)
        backgrounds: list[Scalar] = []
        support = joined(Or, [part.support for part in parts])
        for part in parts:
            if part.background is None:
                return Facts(None, support)
            backgrounds.append(part.background)
        return Facts(self._folded(node, backgrounds), support)

    def annihilation(self, node: Call) -> Annihilation | None:
        """Return what annihilates in an operation: 0 in a product, ±inf in a sum."""
        parts = [self.facts(argument) for argument in node.args]
        numbers = [number_of(part.background) for part in parts]
        places = tuple(k for k in range(len(parts)) if _annihilates(node.op, numbers[k], k))
        if not places or all(part.support is None for part in parts):
            return None
        number = numbers[places[0]]
        assert number is not None
        if node.op == "-" and places[0] == 1:
            number = -number
        result = typed(as_number(number), np.dtype(self.dtype_of(node)).name)
        if all(each is not None for each in numbers):
            # 0 × inf is nan, not 0.
            known = [part.background for part in parts if part.background is not None]
            value = number_of(self._folded(node, known))
            if not same_number(value, number_of(result)):
                return None
        supports = [parts[k].support for k in places]
        support = None if None in supports else joined(And, supports)
        return Annihilation(places, result, support)

    def _cast(self, background: Scalar | None, node: Call) -> Scalar | None:
        """Return the background of a branch in the dtype of the whole expression."""
        dtype = self.dtype_of(node)
        if background is None or isinstance(dtype, type):
            return background
        return self._folded(Call(np.dtype(dtype).name, node.args[:1]), [background])

    def _folded(self, node: Call, arguments: Sequence[Scalar]) -> Scalar:
        """Return an operation on backgrounds; its value if all of them are constants."""
        call = Call(node.op, tuple(arguments))
        numbers = [number_of(argument) for argument in arguments]
        if any(number is None for number in numbers):
            return call
        types = [self.dtype_of(argument) for argument in arguments]
        values = []
        for number, dtype in zip(numbers, compute_types(node.op, types), strict=True):
            values.append(np.asarray(number).astype(dtype))
        with np.errstate(all="ignore"):
            value = as_number(OPERATIONS[node.op].function(*values))
        result = self.dtype_of(call)
        if isinstance(result, type) and not OPERATIONS[node.op].is_cast:
            return Const(value)
        return typed(value, np.dtype(result).name)

    def needed_within(self, node: Scalar, operand: int) -> frozenset[int] | None:
        """Return the sparse operands outside of whose patterns an operand does not matter.

        None if the expression does not read the operand.
        """
        if isinstance(node, Arg):
            return frozenset() if node.position == operand else None
        if not isinstance(node, Call) or Arg(operand) not in walk(node):
            return None
        limits: dict[int, tuple[int, ...]] = {}  # of each argument
        if node.op == "where":
            condition = self.facts(node.args[0])
            number = number_of(condition.background)
            if number is not None:
                limits[2 if number else 1] = everywhere_in(condition.support)
        found = self.annihilation(node)
        if found is not None:
            for k in range(len(node.args)):
                if k not in found.arguments:
                    limits[k] = everywhere_in(found.support)
        within: frozenset[int] | None = None
        for k, argument in enumerate(node.args):
            inside = self.needed_within(argument, operand)
            if inside is not None:
                inside |= frozenset(limits.get(k, ()))
                within = inside if within is None else within & inside
        return within


def _annihilates(op: str, number: Number | None, place: int) -> bool:
    if number is None:
        return False
    if op in ("*", "&"):
        return number == 0
    if op == "/":
        return place == 0 and number == 0
    return op in ("+", "-") and isinstance(number, float) and math.isinf(number)
