"""One EinSum: output labels, operands' labels, the scalar function ⊗ and the aggregation ⊕ (paper, section 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

import numpy as np

from einmpi.errors import OperationError
from einmpi.graph.aggregations import AGGREGATIONS, aggregate_type
from einmpi.graph.arithmetic import infer
from einmpi.graph.dtypes import Type
from einmpi.graph.labels import project, unique
from einmpi.graph.notation import element_text, text
from einmpi.graph.scalar import (
    Arg,
    Call,
    Const,
    Element,
    Index,
    Scalar,
    labels_of,
    rebuild,
    walk,
)

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


def einsum_type(einsum: EinSum, types: Sequence[Type]) -> np.dtype[Any]:
    """The dtype of the result, given the operands'; TypeError with the reason where there is none."""

    def leaf(node: Scalar) -> Type:
        assert isinstance(node, Arg)
        return types[node.position]

    for index in einsum.operands:
        for entry in index:
            if not isinstance(entry, (str, Const)) and np.dtype(infer(entry, leaf)).kind != "i":
                found = np.dtype(infer(entry, leaf)).name
                raise OperationError(f"an index is {found}", "an integer")
    return aggregate_type(einsum.aggregation, infer(einsum.function, leaf))
