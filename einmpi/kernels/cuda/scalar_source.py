"""⊗ and ⊕ as text of a CUDA kernel, each operation in the dtype in which numpy computes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS, aggregate_type
from einmpi.graph.arithmetic import compute_types, infer
from einmpi.graph.dtypes import DTYPES, Type
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Arg, Call, Const, Number, Scalar, walk
from einmpi.kernels.prepared import whole_power

# The C++ type in which numbers of a dtype are computed, and the type that they have in memory. Half
# precision is computed in single precision and rounded when it is stored, once for each vertex.
COMPUTED = {name: dtype.cuda_type for name, dtype in DTYPES.items()}
STORED = {name: dtype.cuda_stored for name, dtype in DTYPES.items()}
HALVES = tuple(name for name, dtype in DTYPES.items() if dtype.is_half)

ReadText: TypeAlias = Callable[[int], str]  # the text of an operand's element, in COMPUTED type


@dataclass
class Steps:
    """Statements that compute expressions, one operation each.

    `types` are the dtypes of the operands. `known` has the names of the values that are computed
    already, which are used again.
    """

    types: Sequence[str]
    read: ReadText
    prefix: str = "v"
    lines: list[str] = field(default_factory=list)
    known: dict[Scalar, str] = field(default_factory=dict)

    def kind(self, node: Scalar) -> Type:
        """Return the type of an expression."""
        return kind_of(node, self.types)

    def value(self, node: Scalar, dtype: str) -> str:
        """Return the value of an expression in a dtype."""
        if isinstance(node, Const):
            return number(node.value, dtype)
        own_dtype = np.dtype(self.kind(node)).name
        if node not in self.known:
            text = self.read(node.position) if isinstance(node, Arg) else self.apply(node)
            self.known[node] = self.keep(text, own_dtype)
        return convert(self.known[node], own_dtype, dtype)

    def keep(self, text: str, dtype: str) -> str:
        """Assign an expression to a new name and return the name."""
        name = f"{self.prefix}{len(self.lines)}"
        self.lines.append(f"const {COMPUTED[dtype]} {name} = {text};")
        return name

    def apply(self, node: Scalar) -> str:
        """Return the text of an operation on the values of its arguments."""
        assert isinstance(node, Call)
        dtypes = compute_types(node.op, [self.kind(arg) for arg in node.args])
        args = []
        for arg, dtype in zip(node.args, dtypes, strict=True):
            args.append(self.value(arg, dtype))
        if OPERATIONS[node.op].is_cast:
            return _cast(args[0], dtypes[0], node.op)
        if node.op == "**":
            return self.power(node, args, dtypes[-1])
        return operation(node.op, args)

    def power(self, node: Call, args: Sequence[str], dtype: str) -> str:
        """Return the text of a power; small whole powers are products, in the order of numpy."""
        power = whole_power(node.args[1], DTYPES[dtype].kind)
        if power is None and args[1] == number(0.5, dtype):
            return f"root_power({args[0]})"
        if power is None:
            return operation("**", args)
        base = args[0]
        result = ""
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
    """Return the type of an expression over operands of these dtypes.

    bfloat16 operands count as float16: the two are computed alike and stored differently.
    """

    def leaf(part: Scalar) -> Type:
        assert isinstance(part, Arg)
        return np.dtype(plain(types[part.position]))

    return infer(node, leaf)


def plain(dtype: str) -> str:
    """Return a dtype that numpy itself knows: float16 for bfloat16."""
    return "float16" if dtype == "bfloat16" else dtype


def width_of(dtype: str) -> int:
    """Return the bytes of a number in the type in which it is computed."""
    return 4 if dtype in HALVES else DTYPES[dtype].itemsize


def weight_of(node: Scalar) -> int:
    """Return roughly how long the text of an expression is once it is compiled."""
    weight = 0
    for part in walk(node):
        is_function = isinstance(part, Call) and OPERATIONS[part.op].is_function
        weight += 9 if is_function else 1
    return weight


# ---- numbers ------------------------------------------------------------------------------------


def number(value: Number, dtype: str) -> str:
    """Return a constant in a dtype, with every bit of it."""
    kind = DTYPES[dtype].kind
    c_type = COMPUTED[dtype]
    exact = np.dtype(plain(dtype)).type(value).item()
    if dtype in HALVES:
        exact = float(np.float32(value.real))  # computed in single precision
    if kind == "c":
        part = DTYPES[dtype].real
        return f"{c_type}{{{number(exact.real, part)}, {number(exact.imag, part)}}}"
    if kind == "b":
        return "true" if exact else "false"
    if kind in "iu":
        return f"(({c_type})0x{exact % 2**64:x}ULL)"
    if math.isnan(exact):
        return f"not_a_number(({c_type})0)"
    if math.isinf(exact):
        sign = "-" if exact < 0 else ""
        return f"{sign}infinity(({c_type})0)"
    suffix = "f" if c_type == "float" else ""
    return f"({exact.hex()}{suffix})"


def convert(text: str, found: str, wanted: str) -> str:
    """Return a value of one dtype in the computed type of another one."""
    if COMPUTED[found] == COMPUTED[wanted]:
        return text
    return f"Cast<{COMPUTED[wanted]}>::of({text})"


def stored(text: str, found: str, wanted: str) -> str:
    """Return a value as memory holds it in a dtype."""
    if STORED[wanted] == COMPUTED[wanted]:
        return convert(text, found, wanted)
    source = _half_source(found) if wanted in HALVES else wanted
    return f"Cell<{STORED[wanted]}>::of({convert(text, found, source)})"


def _cast(text: str, found: str, wanted: str) -> str:
    """Return the value of a cast; one to half precision rounds as storing does."""
    if wanted in HALVES:
        return f"load({stored(text, found, wanted)})"
    return convert(text, found, wanted)


def _half_source(dtype: str) -> str:
    """Return the dtype from which a number is rounded to half precision, once."""
    return "float64" if dtype == "float64" else "float32"


# ---- aggregations -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fold:
    """The text of ⊕ over the values of ⊗. `types` are the dtypes of the operands."""

    aggregation: str
    function: Scalar
    types: tuple[str, ...]

    @property
    def dtype(self) -> str:
        """The dtype of the aggregate."""
        return aggregate_type(self.aggregation, kind_of(self.function, self.types)).name

    @property
    def in_parts(self) -> bool:
        """Whether a few values at a time are aggregated, and these parts in a wider type."""
        is_rounded = AGGREGATIONS[self.aggregation].is_rounded
        return is_rounded and DTYPES[self.dtype].kind in "fc"

    @property
    def total(self) -> str:
        """The dtype of totals."""
        if self.in_parts:
            return DTYPES[self.dtype].accumulator
        return "float32" if self.dtype in HALVES else self.dtype

    @property
    def repeats(self) -> bool:
        """Whether a value may be aggregated twice."""
        return AGGREGATIONS[self.aggregation].is_idempotent

    def start(self, dtype: str) -> str:
        """Return the text of the neutral element in a dtype."""
        neutral = AGGREGATIONS[self.aggregation].neutral(np.dtype(plain(dtype)))
        return number(neutral, dtype)

    def join(self, a: str, b: str) -> str:
        """Return the text of ⊕ of two values."""
        return operation(AGGREGATIONS[self.aggregation].operation, (a, b))

    def take(self, steps: Steps, total: str) -> str:
        """Return the text of ⊕ of a total and one more value.

        In a sum of products the last product and the sum are rounded once.
        """
        factors = self._factors()
        if factors:
            first = steps.value(factors[0], self.dtype)
            second = steps.value(factors[1], self.dtype)
            return f"muladd({first}, {second}, {total})"
        return self.join(total, steps.value(self.function, self.dtype))

    def _factors(self) -> tuple[Scalar, ...]:
        """Return the two factors of ⊗ if it is a real product under a sum, else nothing."""
        node = self.function
        if not isinstance(node, Call) or self.aggregation != "sum":
            return ()
        if DTYPES[self.dtype].kind != "f":
            return ()
        types = compute_types(node.op, [kind_of(arg, self.types) for arg in node.args])
        if any(COMPUTED[dtype] != COMPUTED[self.dtype] for dtype in types):
            return ()
        if node.op == "*":
            return node.args
        if node.op == "**" and isinstance(node.args[1], Const) and node.args[1].value == 2:
            return node.args[0], node.args[0]
        return ()
