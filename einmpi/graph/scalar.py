"""Scalar expression trees: the ⊗ of an EinSum, its text, its dtype, its constants (paper, section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from einmpi.graph.labels import unique

Number: TypeAlias = bool | int | float | complex
DTYPES = ("float16", "float32", "float64", "complex64", "complex128", "int32", "int64", "bool")
BFLOAT16 = "bfloat16"  # for GPUs alone; numpy knows it when graph/brain.py has asked for it
CASTS = (*DTYPES, BFLOAT16)
# A weak type is the Python type of a constant: it adapts to the tensor beside it, as in numpy.
Type: TypeAlias = np.dtype[Any] | type


@dataclass(frozen=True)
class Const:
    """A number."""

    value: Number

    def __eq__(
        self, other: object
    ) -> bool:  # 1, 1.0 and True are different constants, and -0.0 is not 0.0
        return isinstance(other, Const) and repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        return hash(repr(self.value))


@dataclass(frozen=True)
class Index:
    """The value of a label: 0, 1, …, extent − 1."""

    label: str


@dataclass(frozen=True)
class Arg:
    """The element of operand number `position`."""

    position: int


@dataclass(frozen=True)
class Element:
    """An element of a named tensor. Each index is a label, or an integer expression (a gather)."""

    tensor: str
    index: tuple[str | Scalar, ...]


@dataclass(frozen=True)
class Call:
    """An operation of OPS applied to arguments."""

    op: str
    args: tuple[Scalar, ...]


Scalar: TypeAlias = Const | Index | Arg | Element | Call


@dataclass(frozen=True)
class Op:
    """How many arguments, the numpy ufunc whose dtypes it follows ("" for its own rule), complex allowed or not."""

    arity: int
    ufunc: str
    takes_complex: bool = True
    precedence: int = 0  # 0: written as a function


OPS: dict[str, Op] = {
    "|": Op(2, "bitwise_or", False, 3),
    "&": Op(2, "bitwise_and", False, 4),
    "<": Op(2, "less", False, 2),
    "<=": Op(2, "less_equal", False, 2),
    ">": Op(2, "greater", False, 2),
    ">=": Op(2, "greater_equal", False, 2),
    "==": Op(2, "equal", True, 2),
    "!=": Op(2, "not_equal", True, 2),
    "+": Op(2, "add", True, 5),
    "-": Op(2, "subtract", True, 5),
    "*": Op(2, "multiply", True, 6),
    "/": Op(2, "true_divide", True, 6),
    "%": Op(2, "remainder", False, 6),
    "neg": Op(1, "negative", True, 7),
    "~": Op(1, "invert", False, 7),
    "**": Op(2, "power", True, 8),
    "where": Op(3, ""),
    "exp": Op(1, "exp"),
    "log": Op(1, "log"),
    "log1p": Op(1, "log1p"),
    "expm1": Op(1, "expm1"),
    "sqrt": Op(1, "sqrt"),
    "rsqrt": Op(1, "sqrt"),
    "abs": Op(1, "absolute"),
    "sign": Op(1, "sign", False),
    "tanh": Op(1, "tanh"),
    "erf": Op(1, "exp", False),
    "sin": Op(1, "sin"),
    "cos": Op(1, "cos"),
    "maximum": Op(2, "maximum", False),
    "minimum": Op(2, "minimum", False),
    "conj": Op(1, "conjugate"),
    "real": Op(1, ""),
    "imag": Op(1, ""),
    **{dtype: Op(1, "") for dtype in CASTS},
}
FUNCTIONS = tuple(name for name, op in OPS.items() if op.precedence == 0)
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


def children(node: Scalar) -> tuple[Scalar, ...]:
    if isinstance(node, Call):
        return node.args
    if isinstance(node, Element):
        return tuple(entry for entry in node.index if not isinstance(entry, str))
    return ()


def walk(node: Scalar) -> list[Scalar]:
    """The node and all below it, left to right, gather indices included."""
    found, waiting = [], [node]
    while waiting:
        part = waiting.pop()
        found.append(part)
        waiting.extend(reversed(children(part)))
    return found


def size(node: Scalar) -> int:
    return len(walk(node))


def labels_of(node: Scalar) -> tuple[str, ...]:
    """Every label the expression depends on: those that index tensors, as they occur, then those used as numbers."""
    return unique(_indexing(node), (part.label for part in walk(node) if isinstance(part, Index)))


def _indexing(node: Scalar) -> Iterator[str]:
    for part in node.index if isinstance(node, Element) else children(node):
        if isinstance(part, str):
            yield part
        else:
            yield from _indexing(part)


def rebuild(node: Scalar, leaf: Callable[[Scalar], Scalar]) -> Scalar:
    """A copy with `leaf` applied to every node that is not a Call; `leaf` looks after gather indices itself."""
    if isinstance(node, Call):
        return Call(node.op, tuple(rebuild(arg, leaf) for arg in node.args))
    return leaf(node)


def relabel(node: Scalar, names: Mapping[str, str]) -> Scalar:
    def leaf(part: Scalar) -> Scalar:
        if isinstance(part, Index):
            return Index(names.get(part.label, part.label))
        if isinstance(part, Element):
            index = tuple(
                names.get(e, e) if isinstance(e, str) else relabel(e, names) for e in part.index
            )
            return Element(part.tensor, index)
        return part

    return rebuild(node, leaf)


# ---- text -----------------------------------------------------------------------------------------------------------


def text(node: Scalar, names: Sequence[str] = ()) -> str:
    """The expression in the paper's notation, readable by the language; `names` are the operands' texts."""
    return _text(node, names)[0]


def _text(node: Scalar, names: Sequence[str]) -> tuple[str, int]:
    if isinstance(node, Const):
        shown = repr(node.value)
        if isinstance(node.value, complex) and not math.isfinite(node.value.imag):
            return f"{node.value.real!r} + {node.value.imag!r} × 1j", 5
        return shown, 7 if shown.startswith("-") else 9
    if isinstance(node, Index):
        return node.label, 9
    if isinstance(node, Arg):
        return (names[node.position] if names else f"x{node.position}"), 9
    if isinstance(node, Element):
        return element_text(node.tensor, node.index, names), 9
    op = OPS[node.op]
    if op.precedence == 0:
        return f"{node.op}({', '.join(text(arg, names) for arg in node.args)})", 9
    shown_args = [_text(arg, names) for arg in node.args]
    if op.arity == 1:
        symbol = "-" if node.op == "neg" else node.op
        return symbol + _bracket(shown_args[0], op.precedence), op.precedence
    # Comparisons would chain and ** binds to the right: brackets keep the tree as it is.
    left = op.precedence + (node.op == "**" or node.op in COMPARISONS)
    symbol = "×" if node.op == "*" else node.op
    shown = f"{_bracket(shown_args[0], left)} {symbol} {_bracket(shown_args[1], op.precedence + 1)}"
    return shown, op.precedence


def _bracket(shown: tuple[str, int], needed: int) -> str:
    return shown[0] if shown[1] >= needed else f"({shown[0]})"


def element_text(tensor: str, index: Sequence[str | Scalar], names: Sequence[str] = ()) -> str:
    if not index:
        return tensor
    return f"{tensor}[{','.join(e if isinstance(e, str) else text(e, names) for e in index)}]"
