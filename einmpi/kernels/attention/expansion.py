"""Kernels of a chain as expressions of tensors: elementwise kernels between them are written out.

Two kernels that compute the same then have the same expression, however they were cut.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np

from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import (
    Arg,
    Call,
    Const,
    Element,
    Index,
    Scalar,
    labels_in,
    relabel,
    walk,
)
from einmpi.schedule.compute import Kernel

# Kernels of a whole chain compute in float32. They leave out conversions to it, and the rounding
# of a kernel's result, but not rounding that a program asks for inside of a kernel.
WIDE_CAST = "float32"
RESULT_CASTS = ("float16", "bfloat16")


Names: TypeAlias = dict[str, str]  # for labels of a kernel
T = TypeVar("T")


class NoMatchError(Exception):
    """Some kernels are not what a pattern asks for."""


def require(condition: bool) -> None:
    """Raise NoMatchError if a condition does not hold."""
    if not condition:
        raise NoMatchError


def only(found: Collection[T]) -> T:
    """Return what is alone; raise NoMatchError if there are none, or several."""
    require(len(found) == 1)
    return next(iter(found))


def element_of(node: Scalar) -> Element:
    """Return an element of a tensor; raise NoMatchError for any other expression."""
    if not isinstance(node, Element):
        raise NoMatchError
    return node


@dataclass(frozen=True)
class Factors:
    """A product: a number times numerators, over denominators."""

    number: float
    numerators: tuple[Scalar, ...]
    denominators: tuple[Scalar, ...]


class Expansion:
    """The kernels of a chain, by the names of the slots that they write."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.producers = {kernel.target.name: kernel for kernel in kernels}

    def is_given(self, element: Element) -> bool:
        """Tell whether a tensor comes from outside of the chain."""
        return element.tensor not in self.producers

    def body(self, kernel: Kernel, names: Mapping[str, str]) -> Scalar:
        """Return what a kernel aggregates, or computes, with its labels renamed.

        Elements are of tensors from outside of the chain, or of results of aggregations.
        """
        require(not kernel.select)
        function = kernel.einsum.function
        if isinstance(function, Call) and function.op in RESULT_CASTS:
            function = function.args[0]
        return self._expand(function, kernel, names)

    def _expand(self, node: Scalar, kernel: Kernel, names: Mapping[str, str]) -> Scalar:
        if isinstance(node, Arg):
            return self._operand(node.position, kernel, names)
        if isinstance(node, Index):
            return _index_value(node.label, kernel, names)
        if isinstance(node, Call):
            arguments = tuple([self._expand(part, kernel, names) for part in node.args])
            return arguments[0] if node.op == WIDE_CAST else Call(node.op, arguments)
        return node

    def _operand(self, position: int, kernel: Kernel, names: Mapping[str, str]) -> Scalar:
        slot = kernel.operands[position]
        labels = []
        for entry in kernel.einsum.operands[position]:
            if not isinstance(entry, str):
                raise NoMatchError  # a gather
            labels.append(names[entry])
        require(len(set(labels)) == len(labels))  # no diagonal
        producer = self.producers.get(slot.name)
        if producer is None or producer.einsum.aggregated:
            return Element(slot.name, tuple(labels))
        inner_names = dict(zip(producer.einsum.output, labels, strict=True))
        return self.body(producer, inner_names)

    def anchored(self, kernel: Kernel, anchors: Sequence[Element]) -> tuple[Scalar, Names]:
        """Return what a kernel aggregates with the labels that anchors have, and these names.

        An anchor is an element that occurs in it, maybe with other labels.
        """
        own = {label: label for label in kernel.einsum.labels}
        body = self.body(kernel, own)
        elements = [part for part in walk(body) if isinstance(part, Element)]
        names: Names = {}
        for anchor in anchors:
            found = [element for element in elements if element.tensor == anchor.tensor]
            require(bool(found))
            for label, name in zip(labels_in(found[0].index), anchor.index, strict=True):
                assert isinstance(name, str)
                require(names.setdefault(label, name) == name)
        require(set(names) == set(own) and len(set(names.values())) == len(names))
        return relabel(body, names), names

    def aggregation(self, element: Element, name: str, bound: str) -> Scalar:
        """Return what the kernel of an element aggregates by `name`, over one label: `bound`."""
        kernel = self.producers.get(element.tensor)
        if kernel is None or kernel.einsum.aggregation != name:
            raise NoMatchError
        einsum = kernel.einsum
        require(len(einsum.output) == len(element.index))
        names = {only(einsum.aggregated): bound}
        for label, entry in zip(einsum.output, element.index, strict=True):
            assert isinstance(entry, str)
            names[label] = entry
        return self.body(kernel, names)

    def split_sum(self, kernel: Kernel) -> tuple[Factors, Element]:
        """Return the element that a kernel sums, and what it is multiplied by after the sum.

        Such factors are in an elementwise kernel that follows.
        """
        output = kernel.einsum.output
        if kernel.einsum.aggregated:
            return Factors(1.0, (), ()), Element(kernel.target.name, output)
        outside = factors_of(self.body(kernel, {label: label for label in output}))
        return replace(outside, numerators=()), element_of(only(outside.numerators))


def _index_value(label: str, kernel: Kernel, names: Mapping[str, str]) -> Scalar:
    """Return a label as a number: the index that position 0 stands for on this rank, and on."""
    runs = dict(kernel.index).get(label, ((0, kernel.einsum.extent[label]),))
    start, _ = only(runs)  # else its indices have gaps here
    index = Index(names[label])
    return index if start == 0 else Call("+", (index, Const(start)))


def number_of(node: Scalar) -> float | None:
    """Return the value of an expression that reads nothing; None of any other."""
    if isinstance(node, Const):
        return None if isinstance(node.value, complex) else float(node.value)
    if not isinstance(node, Call):
        return None
    values = []
    for part in node.args:
        value = number_of(part)
        if value is None:
            return None
        values.append(value)
    with np.errstate(all="ignore"):
        return float(OPERATIONS[node.op].function(*values))


def factors_of(node: Scalar) -> Factors:
    """Return an expression as a product; what is neither a product nor a quotient is one factor."""
    number = number_of(node)
    if number is not None:
        return Factors(number, (), ())
    if not isinstance(node, Call) or node.op not in ("*", "/", "neg"):
        return Factors(1.0, (node,), ())
    first, *others = [factors_of(part) for part in node.args]
    if not others:
        return replace(first, number=-first.number)
    (second,) = others
    if node.op == "*":
        return Factors(
            first.number * second.number,
            first.numerators + second.numerators,
            first.denominators + second.denominators,
        )
    require(second.number != 0)
    return Factors(
        first.number / second.number,
        first.numerators + second.denominators,
        first.denominators + second.numerators,
    )
