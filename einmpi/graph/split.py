"""Products of many tensors under a distributive ⊕ become binary vertices, in opt_einsum's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.arithmetic import call, infer
from einmpi.graph.dtypes import Type
from einmpi.graph.eingraph import EinGraph, Vertex, make_vertex
from einmpi.graph.einsum import make_einsum, reopen
from einmpi.graph.labels import fresh, unique
from einmpi.graph.scalar import Call, Const, Element, Scalar, labels_of


def split(graph: EinGraph) -> EinGraph:
    """Products of many tensors under a distributive ⊕ become binary vertices, in opt_einsum's order."""
    taken = {vertex.name for vertex in graph.vertices}
    known: dict[str, Vertex] = {}
    for vertex in graph.vertices:
        if vertex.einsum is not None and vertex.einsum.aggregation is not None:
            _Splitter(vertex, known, taken).split()
        else:
            known[vertex.name] = vertex
    return replace(graph, vertices=tuple(known.values()))


@dataclass
class _Splitter:
    vertex: Vertex
    known: dict[str, Vertex]
    taken: set[str]

    def __post_init__(self) -> None:
        assert self.vertex.einsum is not None
        self.einsum = self.vertex.einsum
        self.aggregation = self.einsum.aggregation
        self.expression = reopen(self.einsum, self.vertex.inputs)
        self.op = _distributed(self.aggregation, self.expression)

    def type(self, expression: Scalar) -> Type:
        def leaf(node: Scalar) -> Type:
            assert isinstance(node, Element)
            return np.dtype(self.known[node.tensor].dtype)

        return infer(expression, leaf)

    def split(self) -> None:
        factors = _factors(self.expression, self.op)
        constants = [factor for factor in factors if not labels_of(factor)]
        tensors = [factor for factor in factors if labels_of(factor)]
        if not self.pays(constants, tensors):
            self.known[self.vertex.name] = self.vertex
            return
        # In any order the product is computed in the dtype that it has as written.
        dtype = np.dtype(self.type(self.expression))
        tensors = [
            factor if np.dtype(self.type(factor)) == dtype else _cast(factor, dtype.name)
            for factor in tensors
        ]
        before = len(self.known)
        tensors, left = self.reduce_alone(tensors)
        product = self.contract(tensors, left, None if constants else self.vertex.name)
        if constants:
            self.emit(self.product([product, *constants]), self.einsum.output, (), self.vertex.name)
        if len(self.known) == before + 1:
            self.known[self.vertex.name] = self.vertex  # one vertex after all: as it was written

    def pays(self, constants: Sequence[Scalar], tensors: Sequence[Scalar]) -> bool:
        """Whether splitting keeps the meaning and does anything."""
        einsum, kinds = (
            self.einsum,
            {np.dtype(self.type(factor)).kind for factor in (*constants, *tensors)},
        )
        used = unique(*(labels_of(factor) for factor in tensors))
        if (
            not self.op
            or 0 in einsum.bound
            or set(used) != set(einsum.labels)
            or 0 in dict(einsum.extents).values()
        ):
            return False
        if (self.op in ("&", "|") and kinds != {"b"}) or (self.op == "+" and "b" in kinds):
            return False  # bits of integers do not distribute; a sum of bools is another bool
        if all(set(labels_of(factor)) == set(einsum.labels) for factor in tensors):
            return False  # one pass over the operands does it all
        alone = any(
            sum(x in labels_of(factor) for factor in tensors) == 1 for x in einsum.aggregated
        )
        plain = all(is_plain(factor) for factor in tensors)
        return bool(constants or alone or len(tensors) > 2 or not plain)

    def reduce_alone(self, tensors: list[Scalar]) -> tuple[list[Scalar], list[str]]:
        """A label in one factor only is aggregated there, before the product."""
        left = list(self.einsum.aggregated)
        if len(tensors) == 1:
            return tensors, left
        counts = {label: sum(label in labels_of(factor) for factor in tensors) for label in left}
        reduced = []
        for factor in tensors:
            alone = [label for label in left if counts[label] == 1 and label in labels_of(factor)]
            if alone:
                output = [label for label in labels_of(factor) if label not in alone]
                factor = self.emit(factor, output, alone)
            reduced.append(factor)
        return reduced, [label for label in left if counts[label] != 1]

    def contract(self, tensors: list[Scalar], left: list[str], name: str | None) -> Scalar:
        """The product of the factors with `left` aggregated, two factors at a time."""
        output = self.einsum.output
        if not left or len(tensors) == 1:
            return self.emit(self.product(tensors), output, left, name)
        order = contraction_order(
            [labels_of(factor) for factor in tensors], output, self.einsum.extent
        )
        queue = list(enumerate(tensors))  # with the place in the program of the first factor in it
        for pair in order:
            sides = sorted((queue[k] for k in pair), key=lambda entry: entry[0])
            queue = [entry for k, entry in enumerate(queue) if k not in pair]
            joined = unique(*(labels_of(side) for _, side in sides))
            later = set(output).union(*(labels_of(factor) for _, factor in queue))
            done = [label for label in joined if label in left and label not in later]
            wanted = [label for label in joined if label not in done] if queue else output
            product = self.product([self.materialise(side, joined) for _, side in sides])
            # A product that no later factor adds a label to is part of the vertex that aggregates it.
            inline = (
                queue
                and not done
                and all(set(labels_of(factor)) <= set(joined) for _, factor in queue)
            )
            made = product if inline else self.emit(product, wanted, done, None if queue else name)
            queue.append((sides[0][0], made))
        return queue[0][1]

    def materialise(self, factor: Scalar, joined: Sequence[str]) -> Scalar:
        """A computed factor is computed once, not once for every combination of the other factor's labels."""
        if is_plain(factor) or set(labels_of(factor)) == set(joined):
            return factor
        return self.emit(factor, labels_of(factor), ())

    def product(self, factors: Sequence[Scalar]) -> Scalar:
        result = factors[0]
        for factor in factors[1:]:
            result = call(self.op, result, factor)
        return result

    def emit(
        self,
        expression: Scalar,
        output: Sequence[str],
        aggregated: Sequence[str],
        name: str | None = None,
    ) -> Scalar:
        if name is None:
            name = fresh(self.vertex.name, self.taken)
            self.taken.add(name)
        aggregation = self.aggregation if aggregated else None
        einsum, inputs = make_einsum(
            output, expression, aggregation, aggregated, self.einsum.extent
        )
        self.known[name] = make_vertex(name, einsum, inputs, self.known)
        return Element(name, tuple(output))


def is_plain(expression: Scalar) -> bool:
    """An element indexed by labels alone, each once: no gather, no diagonal."""
    if not isinstance(expression, Element):
        return False
    return len({entry for entry in expression.index if isinstance(entry, str)}) == len(
        expression.index
    )


def _distributed(aggregation: str | None, expression: Scalar) -> str:
    """The ⊗ at the root that the aggregation distributes over, or ""."""
    op = expression.op if isinstance(expression, Call) else ""
    op = "*" if op in ("/", "neg") else op
    if aggregation is None or op not in AGGREGATIONS[aggregation].distributes_over:
        return ""
    return op


def _cast(factor: Scalar, dtype: str) -> Scalar:
    if isinstance(factor, Call) and factor.op == "/" and factor.args[0] == Const(1.0):
        return Call("/", (Const(1.0), Call(dtype, (factor.args[1],))))
    return Call(dtype, (factor,))


def _factors(expression: Scalar, op: str) -> list[Scalar]:
    if isinstance(expression, Call) and op:
        if expression.op == op:
            return [factor for arg in expression.args for factor in _factors(arg, op)]
        if op == "*" and expression.op == "/":
            over, under = expression.args
            if isinstance(over, Const) and over.value == 1:
                return [expression]  # a reciprocal is a factor already
            return [*_factors(over, op), call("/", Const(1.0), under)]
        if op == "*" and expression.op == "neg":
            return [Const(-1), *_factors(expression.args[0], op)]
    return [expression]


def contraction_order(
    factors: Sequence[Sequence[str]], output: Sequence[str], extent: Mapping[str, int]
) -> list[tuple[int, ...]]:
    """opt_einsum's pairs of positions, each pair replaced by one factor at the end of the list."""
    if len(factors) == 2:
        return [(0, 1)]
    from opt_einsum import paths  # costs start-up time, and few programs need it

    # Numbers instead of labels: the order of a set of strings differs from run to run.
    number = {label: k for k, label in enumerate(unique(*factors, output))}
    inputs = [frozenset(number[label] for label in labels) for labels in factors]
    sizes = {number[label]: max(1, extent[label]) for label in number}
    pairs = paths.auto(inputs, frozenset(number[label] for label in output), sizes, None)
    return [tuple(pair) for pair in pairs]
