"""⊗ and ⊕ as text of a CUDA kernel, each operation in the dtype in which numpy computes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from einmpi.graph.dtypes import DTYPES
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import Call, Number, Scalar, walk
from einmpi.kernels.scalar_text import Dialect, FoldTypes, ScalarText, plain

# The C++ type in which numbers of a dtype are computed, and the type that they have in memory. Half
# precision is computed in single precision and rounded when it is stored, once for each vertex.
COMPUTED = {name: dtype.cuda_type for name, dtype in DTYPES.items()}
STORED = {name: dtype.cuda_stored for name, dtype in DTYPES.items()}
HALVES = tuple(name for name, dtype in DTYPES.items() if dtype.is_half)

ReadText: TypeAlias = Callable[[int], str]  # the text of an operand's element, in COMPUTED type


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


def operation(name: str, args: Sequence[str], dtypes: Sequence[str] = ()) -> str:
    """Return the text of an operation on arguments that have the type in which it is computed."""
    if name == "**" and args[1] == number(0.5, dtypes[1]):
        return f"root_power({args[0]})"
    record = OPERATIONS[name]
    return record.with_arguments(record.cuda, args)


# ---- expressions --------------------------------------------------------------------------------


@dataclass
class Steps(ScalarText):
    """Statements in C++; `read` gives the text of an operand's element."""

    dialect = Dialect(number, convert, _cast, operation)
    types: Sequence[str]
    read: ReadText
    prefix: str = "v"
    lines: list[str] = field(default_factory=list)
    known: dict[Hashable, str] = field(default_factory=dict)

    def keep(self, text: str, dtype: str) -> str:
        """Assign an expression to a new name and return the name."""
        name = f"{self.prefix}{len(self.lines)}"
        self.lines.append(f"const {COMPUTED[dtype]} {name} = {text};")
        return name

    def assign(self, node: Scalar, text: str, dtype: str) -> str:
        return self.keep(text, dtype)

    def load(self, operand: int, row: int, step: int) -> str:
        return self.read(operand)


# ---- aggregations -------------------------------------------------------------------------------


class Fold(FoldTypes):
    """The text of ⊕ over the values of ⊗."""

    def start(self, dtype: str) -> str:
        """Return the text of the neutral element in a dtype."""
        return number(self.rule.neutral(np.dtype(plain(dtype))), dtype)

    def join(self, a: str, b: str) -> str:
        """Return the text of ⊕ of two values."""
        return operation(self.rule.operation, (a, b))

    def take(self, steps: Steps, total: str) -> str:
        """Return the text of ⊕ of a total and one more value.

        In a sum of products the last product and the sum are rounded once.
        """
        if self.factors:
            first, second = [steps.value(factor, self.dtype) for factor in self.factors]
            return f"muladd({first}, {second}, {total})"
        return self.join(total, steps.value(self.function, self.dtype))
