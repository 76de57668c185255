"""Labels of which quotients and remainders are indices, as in scale[o,i//64], become several
labels: one for the blocks, others inside of them. All indices are then plain labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from einmpi.caches import bounded_cache
from einmpi.graph.einsum import EinSum
from einmpi.graph.index_arithmetic import Affine, affine_of_call
from einmpi.graph.scalar import Call, Const, Index, Scalar, walk
from einmpi.kernels.operands import Array, expressions_of


class InBlocks(NamedTuple):
    """An EinSum over parts of labels, and how it sees the operands and the output."""

    einsum: EinSum
    # For each dimension of each operand where its part that is read begins, and the part's shape.
    dimensions: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]
    shape: tuple[int, ...]

    def views(self, operands: Sequence[Array]) -> list[Array]:
        """Return the operands with their dimensions split; nothing is copied."""
        views = []
        for array, dimensions in zip(operands, self.dimensions, strict=True):
            part: list[Any] = [slice(start, start + prod(shape)) for start, shape in dimensions]
            shape = [extent for _, shape in dimensions for extent in shape]
            views.append(array[(*part, ...)].reshape(shape))
        return views


@bounded_cache(1024)
def in_blocks(einsum: EinSum, starts: tuple[tuple[str, int], ...]) -> InBlocks | None:
    """Return an EinSum over parts of its labels; None if that does not make all indices labels.

    `starts` has the first index of labels that do not begin at 0.
    """
    if einsum.has_special_form or einsum.is_pass_of_scan:
        return None
    splitter = _Splitter(einsum, dict(starts))
    if not splitter.parts:
        return None
    operands = []
    dimensions = []
    for index in einsum.operands:
        entries: list[str] = []
        found = []
        for entry in index:
            read = splitter.dimension(entry)
            if read is None:
                return None
            entries += read[0]
            found.append(read[1:])
        operands.append(tuple(entries))
        dimensions.append(tuple(found))
    function = splitter.function(einsum.function)
    if function is None:
        return None
    output = splitter.names(einsum.output)
    split = replace(
        einsum,
        output=output,
        operands=tuple(operands),
        function=function,
        aggregated=splitter.names(einsum.aggregated),
        extents=tuple((name, splitter.extent[name]) for name in splitter.names(einsum.labels)),
    )
    return InBlocks(split, tuple(dimensions), tuple(splitter.extent[name] for name in output))


@dataclass
class _Splitter:
    """Splits labels of an EinSum."""

    einsum: EinSum
    starts: Mapping[str, int]

    def __post_init__(self) -> None:
        self.extent = dict(self.einsum.extents)
        self.parts: dict[str, Affine] = {}  # a label as the sum of its parts
        for label, extent in self.einsum.extents:
            divisors = self._divisors(label)
            sizes = [extent, *divisors, 1]
            start = self.starts.get(label, 0)
            if not divisors or start % divisors[0] or any(a % b for a, b in pairwise(sizes)):
                continue
            terms = []
            for number, (size, weight) in enumerate(pairwise(sizes)):
                terms.append((f"{label}.{number}", weight))
                self.extent[f"{label}.{number}"] = size // weight
            self.parts[label] = Affine(start, tuple(terms))

    def _divisors(self, label: str) -> list[int]:
        """Return by what a label is divided in quotients and remainders, the greatest first."""
        found = set()
        for expression in expressions_of(self.einsum):
            for node in walk(expression):
                match node:
                    case Call("//" | "%", (dividend, Const(int(divisor)))) if divisor > 1:
                        scale = 1
                        while isinstance(dividend, Call) and dividend.op in ("//", "%"):
                            if dividend.op == "//" and isinstance(dividend.args[1], Const):
                                scale *= int(dividend.args[1].value.real)
                            dividend = dividend.args[0]
                        if dividend == Index(label):
                            found.add(scale * divisor)
        return sorted(found, reverse=True)

    def names(self, labels: Sequence[str]) -> tuple[str, ...]:
        """Return the parts of some labels, and the others as they are."""
        found: list[str] = []
        for label in labels:
            found += dict(self.parts[label].terms) if label in self.parts else [label]
        return tuple(found)

    def dimension(self, entry: str | Scalar) -> tuple[list[str], int, tuple[int, ...]] | None:
        """Return the labels of a dimension, and where its part begins and the part's shape."""
        if isinstance(entry, str):
            names = list(self.names([entry]))
            return names, 0, tuple(self.extent[name] for name in names)
        linear = self.linear(entry)
        if linear is None or linear.constant < 0:
            return None
        terms = sorted(linear.terms, key=lambda term: -term[1])
        names = [name for name, _ in terms]
        shape = tuple(self.extent[name] for name in names)
        for number, (_, weight) in enumerate(terms):
            if weight != prod(shape[number + 1 :]):
                return None
        return names, linear.constant, shape

    def linear(self, node: Scalar) -> Affine | None:
        """Return an index as a number plus weights times parts of labels; None for all else."""
        match node:
            case Const(int(value)):
                return Affine(value, ())
            case Index(label):
                return self.parts.get(label)
            case Call("//" | "%" as op, (one, Const(int(divisor)))) if divisor > 0:
                left = self.linear(one)
                return None if left is None else self._divided(left, op, divisor)
            case Call(op, args):
                return affine_of_call(op, [self.linear(arg) for arg in args])
        return None

    def _divided(self, linear: Affine, op: str, divisor: int) -> Affine | None:
        """Return a quotient or a remainder; None if what remains may reach the divisor."""
        most = linear.constant % divisor
        whole = []
        rest = []
        for name, weight in linear.terms:
            if weight % divisor == 0:
                whole.append((name, weight // divisor))
            elif weight < 0:
                return None
            else:
                rest.append((name, weight))
                most += weight * (self.extent[name] - 1)
        if most >= divisor:
            return None
        if op == "//":
            return Affine(linear.constant // divisor, tuple(whole))
        return Affine(linear.constant % divisor, tuple(rest))

    def function(self, node: Scalar) -> Scalar | None:
        """Return ⊗ with parts of labels for labels; None if it uses one in another way."""
        if isinstance(node, Index) and node.label not in self.parts:
            return node
        linear = self.linear(node)
        if linear is not None:
            total: Scalar = Const(linear.constant)
            for name, weight in linear.terms:
                term: Scalar = Index(name)
                if weight != 1:
                    term = Call("*", (term, Const(weight)))
                total = term if total == Const(0) else Call("+", (total, term))
            return node if isinstance(node, Const) else total
        if not isinstance(node, Call):
            return node
        args = [self.function(arg) for arg in node.args]
        found = tuple(arg for arg in args if arg is not None)
        return Call(node.op, found) if len(found) == len(args) else None
