"""One EinSum: output labels, operands' labels, the scalar function ⊗ and the aggregation ⊕ (paper, section 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

import numpy as np

from einmpi.graph.arithmetic import infer
from einmpi.graph.labels import project, unique
from einmpi.graph.scalar import (
    Arg,
    Call,
    Const,
    Element,
    Index,
    Scalar,
    Type,
    element_text,
    labels_of,
    rebuild,
    text,
    walk,
)


@dataclass(frozen=True)
class Aggregation:
    """A commutative, associative ⊕: its numpy ufunc, its neutral element (None: there is none), its symbol."""

    ufunc: str
    neutral: int | bool | None
    symbol: str
    takes_complex: bool = True


AGGREGATIONS: dict[str, Aggregation] = {
    "sum": Aggregation("add", 0, "Σ"),
    "prod": Aggregation("multiply", 1, "Π"),
    "max": Aggregation("maximum", None, "max", False),
    "min": Aggregation("minimum", None, "min", False),
    "any": Aggregation("logical_or", False, "any"),
    "all": Aggregation("logical_and", True, "all"),
}
SYMBOLS = {rule.symbol: name for name, rule in AGGREGATIONS.items()}

# An operand's index: a label for a plain dimension, an expression over Args and Indexes for a gathered one.
OperandIndex: TypeAlias = tuple[str | Scalar, ...]


@dataclass(frozen=True)
class EinSum:
    """⊕ over `aggregated` of ⊗ over the operands, for every value of the `output` labels."""

    output: tuple[str, ...]
    operands: tuple[OperandIndex, ...]
    function: Scalar
    aggregation: str | None
    aggregated: tuple[str, ...]
    extents: tuple[
        tuple[str, int], ...
    ]  # of every label: the output's first, then the aggregated ones

    @property
    def labels(self) -> tuple[str, ...]:
        return self.output + self.aggregated

    @property
    def extent(self) -> dict[str, int]:
        return dict(self.extents)

    @property
    def bound(self) -> tuple[int, ...]:
        """The extents of the output."""
        return project([extent for _, extent in self.extents], self.output, self.labels)

    @property
    def is_elementwise(self) -> bool:
        return not self.aggregated

    def calls(self) -> int:
        """How often ⊗ is applied: the size of the joined index space."""
        return prod(extent for _, extent in self.extents)

    def operations(self) -> int:
        """Scalar operations: the steps of ⊗, and one for ⊕, for every combination of labels."""
        steps = sum(isinstance(node, Call) for node in walk(self.function))
        return self.calls() * (steps + bool(self.aggregated))

    def __str__(self) -> str:
        return self.show([f"x{k}" for k in range(len(self.operands))])

    def show(self, tensors: Sequence[str]) -> str:
        """The right-hand side in the paper's notation, with the operands' tensor names."""
        shown: list[str] = []
        for tensor, index in zip(tensors, self.operands, strict=True):
            shown.append(element_text(tensor, index, shown))
        body = text(self.function, shown)
        if self.aggregation is None:
            return body
        unbounded = set(self.aggregated) - set(self.bounded_labels())
        listed = ",".join(f"{x}:{self.extent[x]}" if x in unbounded else x for x in self.aggregated)
        return f"{AGGREGATIONS[self.aggregation].symbol}[{listed}]({body})"

    @cached_property
    def labels_as_numbers(self) -> tuple[str, ...]:
        """Labels whose values are used, as in X[i] + i."""
        gathers = [
            entry for entries in self.operands for entry in entries if not isinstance(entry, str)
        ]
        used = {
            node.label
            for tree in (self.function, *gathers)
            for node in walk(tree)
            if isinstance(node, Index)
        }
        return tuple(label for label in self.labels if label in used)

    def bounded_labels(self) -> tuple[str, ...]:
        """Labels whose extent follows from an operand."""
        return unique(entry for index in self.operands for entry in index if isinstance(entry, str))


def close(expression: Scalar) -> tuple[Scalar, tuple[OperandIndex, ...], tuple[str, ...]]:
    """Elements become numbered operands: (function over Args, operands' indices, their tensors).

    The same element twice is one operand. A gather's index tensors come before the tensor they index.
    """
    position: dict[tuple[str, OperandIndex], int] = {}

    def leaf(node: Scalar) -> Scalar:
        if not isinstance(node, Element):
            return node
        index = tuple(e if isinstance(e, str) else rebuild(e, leaf) for e in node.index)
        return Arg(position.setdefault((node.tensor, index), len(position)))

    function = rebuild(expression, leaf)
    return function, tuple(index for _, index in position), tuple(tensor for tensor, _ in position)


def reopen(einsum: EinSum, tensors: Sequence[str]) -> Scalar:
    """The inverse of `close`: the function with its operands written as Elements."""
    elements: list[Scalar] = []

    def leaf(node: Scalar) -> Scalar:
        return elements[node.position] if isinstance(node, Arg) else node

    for tensor, index in zip(tensors, einsum.operands, strict=True):
        elements.append(
            Element(tensor, tuple(e if isinstance(e, str) else rebuild(e, leaf) for e in index))
        )
    return rebuild(einsum.function, leaf)


def make_einsum(
    output: Sequence[str],
    expression: Scalar,
    aggregation: str | None,
    aggregated: Sequence[str],
    extent: Mapping[str, int],
) -> tuple[EinSum, tuple[str, ...]]:
    """An EinSum and the tensors it reads, from an expression over Elements."""
    function, operands, tensors = close(expression)
    needed = unique(labels_of(expression))
    missing = [label for label in needed if label not in output and label not in aggregated]
    assert not missing, f"labels {missing} are neither in the output nor aggregated"
    extents = tuple((label, extent[label]) for label in (*output, *aggregated))
    return EinSum(
        tuple(output), operands, function, aggregation, tuple(aggregated), extents
    ), tensors


def aggregate_type(aggregation: str | None, kind: Type) -> np.dtype[Any]:
    """The dtype of an aggregate, by numpy's rules: sums of bool and int32 are int64; any and all are bool."""
    dtype = np.dtype(kind)
    if aggregation is None:
        return dtype
    if dtype.kind == "c" and not AGGREGATIONS[aggregation].takes_complex:
        raise TypeError(f"{aggregation} does not take complex numbers")
    if aggregation in ("any", "all"):
        return np.dtype(bool)
    if aggregation in ("sum", "prod") and dtype.kind in "bi":
        return np.dtype(np.int64)
    return dtype


def einsum_type(einsum: EinSum, types: Sequence[Type]) -> np.dtype[Any]:
    """The dtype of the result, given the operands'; TypeError with the reason where there is none."""

    def leaf(node: Scalar) -> Type:
        assert isinstance(node, Arg)
        return types[node.position]

    for index in einsum.operands:
        for entry in index:
            if not isinstance(entry, (str, Const)) and np.dtype(infer(entry, leaf)).kind != "i":
                raise TypeError(
                    f"an index must be an integer, not {np.dtype(infer(entry, leaf)).name}"
                )
    return aggregate_type(einsum.aggregation, infer(einsum.function, leaf))
