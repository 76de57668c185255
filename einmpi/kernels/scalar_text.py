"""⊗ and ⊕ as text of a generated kernel, each operation in the dtype in which numpy computes it.

One walker writes expressions for all devices. A device says how it writes numbers, conversions and
operations, where values are read from, and where they are kept.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS, Aggregation, aggregate_type
from einmpi.graph.arithmetic import compute_types, infer
from einmpi.graph.dtypes import DTYPES, Type
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Arg, Call, Const, Number, Scalar

# The greatest exponent of powers that are written as products, by kind of number: numpy's results
# are the same.
MAX_EXPONENT = {"i": 64, "u": 64, "f": 4, "c": 3}


def plain(dtype: str) -> str:
    """Return a dtype that numpy itself knows: float16 for bfloat16."""
    return "float16" if dtype == "bfloat16" else dtype


def kind_of(node: Scalar, types: Sequence[str]) -> Type:
    """Return the type of an expression over operands of these dtypes.

    bfloat16 operands count as float16: the two are computed alike and stored differently.
    """

    def leaf(part: Scalar) -> Type:
        assert isinstance(part, Arg)
        return np.dtype(plain(types[part.position]))

    return infer(node, leaf)


def whole_power(exponent: Scalar, kind: str) -> int | None:
    """Return a constant exponent if the power is written as products, else None."""
    if not isinstance(exponent, Const) or isinstance(exponent.value, complex):
        return None
    if not math.isfinite(exponent.value):
        return None
    power = int(exponent.value)
    if power != exponent.value or not 0 <= power <= MAX_EXPONENT[kind]:
        return None
    return power


class Dialect(NamedTuple):
    """How a device writes scalars."""

    number: Callable[[Number, str], str]  # a constant in a dtype, with every bit of it
    convert: Callable[[str, str, str], str]  # a value of one dtype, in another one
    cast: Callable[[str, str, str], str]  # the same where the program says so
    operation: Callable[[str, Sequence[str], Sequence[str]], str]  # name, arguments, their dtypes


class ScalarText(ABC):
    """Statements that compute expressions, one operation each.

    `types` are the dtypes of the operands. `known` has the names of the values that are computed
    already, which are used again. Where loops are unrolled, a value has a row and a step of them.
    """

    dialect: ClassVar[Dialect]
    types: Sequence[str]
    known: dict[Hashable, str]

    def value(self, node: Scalar, dtype: str, row: int = 0, step: int = 0) -> str:
        """Return the value of an expression in a dtype."""
        if isinstance(node, Const):
            return self.dialect.number(node.value, dtype)
        own_dtype = np.dtype(kind_of(node, self.types)).name
        key = self.key(node, row, step)
        if key not in self.known:
            if isinstance(node, Arg):
                text = self.load(node.position, row, step)
            else:
                text = self.apply(node, row, step)
            self.known[key] = self.assign(node, text, own_dtype)
        return self.dialect.convert(self.known[key], own_dtype, dtype)

    def apply(self, node: Scalar, row: int, step: int) -> str:
        """Return the text of an operation on the values of its arguments."""
        assert isinstance(node, Call)
        dtypes = compute_types(node.op, [kind_of(arg, self.types) for arg in node.args])
        args = []
        for arg, dtype in zip(node.args, dtypes, strict=True):
            args.append(self.value(arg, dtype, row, step))
        if OPERATIONS[node.op].is_cast:
            return self.dialect.cast(args[0], dtypes[0], node.op)
        if node.op == "**":
            return self.power(node, args, dtypes)
        return self.dialect.operation(node.op, args, dtypes)

    def power(self, node: Call, args: Sequence[str], dtypes: Sequence[str]) -> str:
        """Return the text of a power; small whole powers are products, in the order of numpy."""
        dtype = dtypes[-1]
        power = whole_power(node.args[1], DTYPES[dtype].kind)
        if power is None:
            return self.dialect.operation("**", args, dtypes)
        base = args[0]
        result = ""
        while power:
            if power & 1:
                result = self.dialect.operation("*", (result, base), dtypes) if result else base
            power >>= 1
            if power:
                base = self.assign(node, self.dialect.operation("*", (base, base), dtypes), dtype)
        return result or self.dialect.number(1, dtype)

    def key(self, node: Scalar, row: int, step: int) -> Hashable:
        """Return by what a value is known."""
        return node

    @abstractmethod
    def load(self, operand: int, row: int, step: int) -> str:
        """Return the text that reads an element of an operand."""

    @abstractmethod
    def assign(self, node: Scalar, text: str, dtype: str) -> str:
        """Assign a value, which an expression needs, to a new name and return the name."""


@dataclass(frozen=True)
class FoldTypes:
    """In which dtypes ⊕ over the values of ⊗ is computed. `types` are those of the operands."""

    aggregation: str
    function: Scalar
    types: tuple[str, ...]

    @property
    def rule(self) -> Aggregation:
        return AGGREGATIONS[self.aggregation]

    @property
    def dtype(self) -> str:
        """The dtype of the aggregate."""
        return aggregate_type(self.aggregation, kind_of(self.function, self.types)).name

    @property
    def in_parts(self) -> bool:
        """Whether a few values at a time are aggregated, and these parts in a wider type."""
        return self.rule.is_rounded and DTYPES[self.dtype].kind in "fc"

    @property
    def total(self) -> str:
        """The dtype of totals."""
        if self.in_parts:
            return DTYPES[self.dtype].accumulator
        return computed(self.dtype)

    @property
    def factors(self) -> tuple[Scalar, ...]:
        """The two factors of ⊗ if it is a real product, or a square, under a sum; else none."""
        node = self.function
        if not isinstance(node, Call) or self.aggregation != "sum":
            return ()
        if DTYPES[self.dtype].kind != "f":
            return ()
        types = compute_types(node.op, [kind_of(arg, self.types) for arg in node.args])
        if any(computed(dtype) != computed(self.dtype) for dtype in types):
            return ()
        if node.op == "*":
            return node.args
        if node.op == "**" and isinstance(node.args[1], Const) and node.args[1].value == 2:
            return node.args[0], node.args[0]
        return ()


def computed(dtype: str) -> str:
    """Return the dtype in which numbers of a dtype are computed: float32 for half precision."""
    return "float32" if DTYPES[dtype].is_half else dtype
