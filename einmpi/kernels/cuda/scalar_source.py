"""⊗ as text of a CUDA kernel: each operation, in the dtype in which numpy computes it, calls one of cuda_words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS, aggregate_type
from einmpi.graph.arithmetic import compute_types, infer
from einmpi.graph.dtypes import DTYPES, Type
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Arg, Call, Const, Scalar, walk
from einmpi.kernels.powers import whole_power

# The type in which numbers of a dtype are computed, and the type in which they lie in memory. Half
# precision is computed in single precision and rounded when it is stored, once a vertex.
COMPUTED = {name: dtype.cuda_type for name, dtype in DTYPES.items()}
STORED = {name: dtype.cuda_stored for name, dtype in DTYPES.items()}
HALVES = tuple(name for name, dtype in DTYPES.items() if dtype.is_half)

Read = Callable[[int], str]  # the text of an operand's element, in its computed type


@dataclass
class Steps:
    """Statements that compute expressions, one a step. What was computed once is used again."""

    types: Sequence[str]  # of the operands
    read: Read
    prefix: str = "v"
    lines: list[str] = field(default_factory=list)
    known: dict[Scalar, str] = field(default_factory=dict)

    def kind(self, node: Scalar) -> Type:
        return kind_of(node, self.types)

    def value(self, node: Scalar, dtype: str) -> str:
        """The value of an expression in a dtype."""
        if isinstance(node, Const):
            return number(node.value, dtype)
        if node not in self.known:
            text = self.read(node.position) if isinstance(node, Arg) else self.apply(node)
            self.known[node] = self.keep(text, np.dtype(self.kind(node)).name)
        return convert(self.known[node], np.dtype(self.kind(node)).name, dtype)

    def keep(self, text: str, dtype: str) -> str:
        name = f"{self.prefix}{len(self.lines)}"
        self.lines.append(f"const {COMPUTED[dtype]} {name} = {text};")
        return name

    def apply(self, node: Scalar) -> str:
        assert isinstance(node, Call)
        dtypes = compute_types(node.op, [self.kind(arg) for arg in node.args])
        if OPERATIONS[node.op].is_cast:
            text = self.value(node.args[0], dtypes[0])
            if node.op not in HALVES:
                return convert(text, dtypes[0], node.op)
            return f"load(Cell<{STORED[node.op]}>::of({convert(text, dtypes[0], _half_source(dtypes[0]))}))"
        args = [self.value(arg, dtype) for arg, dtype in zip(node.args, dtypes, strict=True)]
        if node.op == "**":
            return self.power(node, args, dtypes[-1])
        return operation(node.op, args)

    def power(self, node: Call, args: Sequence[str], dtype: str) -> str:
        """Small whole powers as products by repeated squaring, in the order of numpy."""
        power = whole_power(node.args[1], np.dtype(plain(dtype)).kind)
        if power is None:
            return (
                f"root_power({args[0]})"
                if args[1] == number(0.5, dtype)
                else f"power({', '.join(args)})"
            )
        base, result = args[0], ""
        while power:
            if power & 1:
                result = f"mul({result}, {base})" if result else base
            power >>= 1
            if power:
                base = self.keep(f"mul({base}, {base})", dtype)
        return result or number(1, dtype)


def operation(name: str, args: Sequence[str]) -> str:
    """Return the text of an operation on arguments that have the type in which it is computed."""
    text = OPERATIONS[name].cuda
    for k, arg in enumerate(args):
        text = text.replace(f"{{{k}}}", arg)
    return text


def kind_of(node: Scalar, types: Sequence[str]) -> Type:
    # What is computed from bfloat16 is what would be from float16: only where it is stored do the two differ.
    return infer(node, lambda leaf: np.dtype(plain(types[leaf.position])))  # type: ignore[union-attr]


def plain(dtype: str) -> str:
    return "float16" if dtype == "bfloat16" else dtype


def width_of(dtype: str) -> int:
    """Bytes of a number in the type in which it is computed."""
    return {"bool": 1, "int": 4, "float": 4, "Complex<double>": 16}.get(COMPUTED[dtype], 8)


def weight_of(node: Scalar) -> int:
    """About how long the text of an expression is once it is compiled."""
    parts = walk(node)
    return len(parts) + 8 * sum(
        isinstance(part, Call) and OPERATIONS[part.op].is_function for part in parts
    )


def _half_source(dtype: str) -> str:
    """The dtype from which a number is rounded to half precision, once."""
    return "float64" if dtype == "float64" else "float32"


def number(value: Any, dtype: str) -> str:
    """A constant in a dtype, with every bit of it."""
    exact = np.dtype(plain(dtype)).type(value).item()
    kind, word = np.dtype(plain(dtype)).kind, COMPUTED[dtype]
    if dtype in HALVES:
        exact = float(np.float32(value))  # computed in single precision
    if kind == "c":
        part = "float32" if dtype == "complex64" else "float64"
        return f"{word}{{{number(exact.real, part)}, {number(exact.imag, part)}}}"
    if kind == "f" and math.isnan(exact):
        return f"not_a_number(({word})0)"
    if kind == "f" and math.isinf(exact):
        return f"{'-' if exact < 0 else ''}infinity(({word})0)"
    if kind == "f":
        return f"({exact.hex()}{'f' if word == 'float' else ''})"
    return ("false", "true")[exact] if kind == "b" else f"(({word})0x{exact % 2**64:x}ULL)"


def convert(text: str, found: str, wanted: str) -> str:
    """A value of one dtype in the computed type of another one."""
    return text if COMPUTED[found] == COMPUTED[wanted] else f"Cast<{COMPUTED[wanted]}>::of({text})"


def stored(text: str, found: str, wanted: str) -> str:
    """A value as it lies in memory in a dtype."""
    if STORED[wanted] == COMPUTED[wanted]:
        return convert(text, found, wanted)
    source = _half_source(found) if wanted in HALVES else wanted
    return f"Cell<{STORED[wanted]}>::of({convert(text, found, source)})"


@dataclass(frozen=True)
class Fold:
    """The text of ⊕ over the values of ⊗."""

    aggregation: str
    function: Scalar
    types: tuple[str, ...]

    @property
    def dtype(self) -> str:
        return aggregate_type(self.aggregation, kind_of(self.function, self.types)).name

    @property
    def in_parts(self) -> bool:
        """Whether sums are kept in parts, each of a few values, and these added up in a wider type."""
        is_rounded = AGGREGATIONS[self.aggregation].is_rounded
        return is_rounded and DTYPES[self.dtype].kind in "fc"

    @property
    def total(self) -> str:
        if self.in_parts:
            return DTYPES[self.dtype].accumulator
        return "float32" if self.dtype in HALVES else self.dtype

    @property
    def repeats(self) -> bool:
        """Whether a value may be taken twice."""
        return AGGREGATIONS[self.aggregation].is_idempotent

    def start(self, dtype: str) -> str:
        neutral = AGGREGATIONS[self.aggregation].neutral(np.dtype(plain(dtype)))
        return number(neutral, dtype)

    def join(self, a: str, b: str) -> str:
        return operation(AGGREGATIONS[self.aggregation].operation, (a, b))

    def take(self, steps: Steps, total: str) -> str:
        """⊕ of a total and of one more value. The last product of a sum and the sum are one rounding."""
        pair = self._factors()
        if pair:
            first, second = (steps.value(node, self.dtype) for node in pair)
            return f"muladd({first}, {second}, {total})"
        return self.join(total, steps.value(self.function, self.dtype))

    def _factors(self) -> tuple[Scalar, ...]:
        """The two factors of ⊗, where it is a real product under a sum."""
        node = self.function
        if (
            not isinstance(node, Call)
            or self.aggregation != "sum"
            or np.dtype(plain(self.dtype)).kind != "f"
        ):
            return ()
        types = compute_types(node.op, [kind_of(arg, self.types) for arg in node.args])
        if {COMPUTED[dtype] for dtype in types} != {COMPUTED[self.dtype]}:
            return ()
        if node.op == "**" and isinstance(node.args[1], Const) and node.args[1].value == 2:
            return node.args[0], node.args[0]
        return node.args if node.op == "*" else ()
