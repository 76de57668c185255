"""Products of many tensors under a distributive ⊕ to vertices with two operands each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from random import Random
from typing import TypeAlias

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.arithmetic import call
from einmpi.graph.dtypes import Type, kind_of
from einmpi.graph.eingraph import EinGraph, Vertex, make_vertex, type_over
from einmpi.graph.einsum import EinSum, make_einsum, reopen
from einmpi.graph.scalar import (
    Call,
    Const,
    Element,
    Names,
    Scalar,
    is_plain,
    labels_of,
    unique,
    walk,
)


def split(graph: EinGraph, strict: bool = False) -> EinGraph:
    """Split products under a distributive aggregation into products of two, in a good order.

    Z[i,l] ← Σ[j,k](A[i,j] × B[j,k] × C[k,l]) becomes

        Z_1[i,k] ← Σ[j](A[i,j] × B[j,k])
        Z[i,l] ← Σ[k](Z_1[i,k] × C[k,l])

    Integers and bools stay the same bit for bit. Floating-point numbers are rounded differently
    and may become another one of inf and nan; if `strict`, they too stay as they are.
    """
    names = Names(vertex.name for vertex in graph.vertices)
    known: dict[str, Vertex] = {}
    for vertex in graph.vertices:
        einsum = vertex.einsum
        if einsum is not None and _distributed_operation(einsum.aggregation, einsum.function):
            ProductSplitter(vertex, einsum, known, names, strict).split()
        else:
            known[vertex.name] = vertex
    return replace(graph, vertices=tuple(known.values()))


MOST_STREAMED_ROWS = 16


@dataclass
class ProductSplitter:
    """Splits one vertex. `known` receives the vertices, `names` has those in use."""

    vertex: Vertex
    einsum: EinSum
    known: dict[str, Vertex]
    names: Names
    strict: bool

    def __post_init__(self) -> None:
        self.aggregation = self.einsum.aggregation
        self.expression = reopen(self.einsum, self.vertex.inputs)
        self.op = _distributed_operation(self.aggregation, self.expression)
        self.dtype = np.dtype(self.type(self.expression))
        self.is_rounded = kind_of(self.dtype) in "fc"

    def type(self, expression: Scalar) -> Type:
        """Return the type of an expression over known tensors."""
        return type_over(expression, self.known)

    def kind(self, expression: Scalar) -> str:
        """Return the kind of numbers of an expression: b, i, u, f or c."""
        return kind_of(np.dtype(self.type(expression)))

    def split(self) -> None:
        """Add the vertices of the product, or the vertex as it is if splitting gains nothing."""
        vertices_before = len(self.known)
        factors: list[Scalar] = []
        if self.op:
            factors = self.factors(self.expression)
        constants, tensors = constants_and_tensors(factors)
        if self.is_valid(factors, tensors):
            if not self.may_reorder(factors):
                self.materialise_factors()
            elif self.is_worthwhile(constants, tensors):
                self.reorder(constants, tensors)
        if len(self.known) <= vertices_before + 1:
            self.known[self.vertex.name] = self.vertex  # one vertex after all: as it was written

    def reorder(self, constants: Sequence[Scalar], tensors: Sequence[Scalar]) -> None:
        """Add the vertices of the product in an order that makes it cheap."""
        # In any order the product is computed in the dtype that it has as written.
        converted = []
        for factor in tensors:
            if np.dtype(self.type(factor)) != self.dtype:
                factor = _cast(factor, self.dtype.name)
            converted.append(factor)
        reduced, remaining = self.aggregate_single_labels(converted)
        product = self.contract(reduced, remaining, None if constants else self.vertex.name)
        if constants:
            scaled = self.product([product, *constants])
            self.emit(scaled, self.einsum.output, (), self.vertex.name)

    def materialise_factors(self) -> None:
        """Add the vertex of the product, and those of factors that it would compute repeatedly.

        In Σ[j](exp(A[i,j]) × B[j,k]) the exponential becomes a vertex. That changes no value. A
        factor that is larger than what it is computed from is left where it is.
        """
        assert isinstance(self.expression, Call)
        if self.expression.op != self.op:
            return
        factors = []
        for factor in self.expression.args:
            labels = set(labels_of(factor))
            for node in walk(factor):
                if isinstance(node, Element) and labels and set(labels_of(node)) == labels:
                    factor = self.materialise(factor, self.einsum.labels)
                    break
            factors.append(factor)
        self.emit(
            self.product(factors), self.einsum.output, self.einsum.aggregated, self.vertex.name
        )

    def factors(self, expression: Scalar) -> list[Scalar]:
        """Return the factors of a product; a divisor becomes a reciprocal, a sign a factor −1.

        -(a × b) / c has the factors −1, a, b and 1.0 / c. A product of int32 in a product of
        int64 or float64 is one factor, because it wraps around on its own.
        """
        if not isinstance(expression, Call) or not self.may_open(expression):
            return [expression]
        if expression.op == self.op:
            factors = []
            for arg in expression.args:
                factors.extend(self.factors(arg))
            return factors
        if self.op == "*" and expression.op == "neg" and self.dtype.kind != "u":
            return [Const(-1), *self.factors(expression.args[0])]
        if self.op == "*" and expression.op == "/":
            dividend, divisor = expression.args
            is_reciprocal = isinstance(dividend, Const) and dividend.value == 1
            if not is_reciprocal:
                return [*self.factors(dividend), call("/", Const(1.0), divisor)]
        return [expression]

    def may_open(self, part: Scalar) -> bool:
        """Return whether a part of the product may be computed in the dtype of the whole."""
        if self.op in AGGREGATIONS[str(self.aggregation)].exact_over:
            return True
        kind = self.kind(part)
        if kind == "b":
            return self.op == "*"  # the product of bools is the same in every dtype
        both_are_rounded = kind in "fc" and self.is_rounded
        return both_are_rounded or np.dtype(self.type(part)) == self.dtype

    def is_valid(self, factors: Sequence[Scalar], tensors: Sequence[Scalar]) -> bool:
        """Return whether splitting keeps the meaning, apart from the values of factors.

        An aggregation over a label that no factor has would be lost, and an empty label has no
        product to split.
        """
        einsum = self.einsum
        used = unique(*(labels_of(factor) for factor in tensors))
        has_empty_label = any(extent == 0 for _, extent in einsum.extents)
        if not self.op or has_empty_label or set(used) != set(einsum.labels):
            return False
        kinds = {self.kind(factor) for factor in factors}
        if self.op in ("&", "|") and kinds != {"b"}:
            return False  # bits of integers do not distribute
        # The sum of bools is another bool.
        return self.op != "+" or "b" not in kinds

    def may_reorder(self, factors: Sequence[Scalar]) -> bool:
        """Return whether factors may be aggregated and multiplied in any order.

        Integers must give the same bits: they wrap around in the dtype of the product, and their
        sum is int64 or uint64. With at most one factor that is not a bool no product wraps around.
        """
        record = AGGREGATIONS[str(self.aggregation)]
        if self.op in record.exact_over:
            return True
        if self.is_rounded:
            return not self.strict
        if self.op not in record.modular_over:
            return False
        numbers = [factor for factor in factors if self.kind(factor) != "b"]
        return self.dtype == record.result_dtype(self.dtype) or len(numbers) <= 1

    def is_worthwhile(self, constants: Sequence[Scalar], tensors: Sequence[Scalar]) -> bool:
        """Return whether splitting does anything."""
        all_labels = set(self.einsum.labels)
        if all(set(labels_of(factor)) == all_labels for factor in tensors):
            return False  # one pass over the operands does it all
        if any(self.is_streamed(factor) for factor in tensors):
            return False
        if constants or len(tensors) > 2:
            return True
        if not all(is_plain(_without_conj(factor)) for factor in tensors):
            return True
        counts = _label_counts(self.einsum.aggregated, tensors)
        return 1 in counts.values()

    def is_streamed(self, factor: Scalar) -> bool:
        """Return whether a factor is computed from small integers, and few results need each.

        Kernels read these and convert them on the way: the factor is larger than they are.
        """
        if is_plain(factor) or self.dtype.kind != "f":
            return False
        extent = self.einsum.extent
        rows = prod(extent[label] for label in self.einsum.labels if label not in labels_of(factor))
        if rows > MOST_STREAMED_ROWS:
            return False
        elements = [node for node in walk(factor) if isinstance(node, Element) and node.index]
        dtypes = [np.dtype(self.type(node)) for node in elements]
        return any(dtype.kind in "iu" and dtype.itemsize < self.dtype.itemsize for dtype in dtypes)

    def aggregate_single_labels(self, tensors: list[Scalar]) -> tuple[list[Scalar], list[str]]:
        """Aggregate a label that only one factor has before the product.

        In Σ[j,k](A[i,j] × B[j] × C[i,k]) only C has k: it becomes Σ[k](C[i,k]), a vertex of its
        own. Return the factors and the labels that are still to be aggregated.
        """
        aggregated = list(self.einsum.aggregated)
        if len(tensors) == 1:
            return tensors, aggregated
        counts = _label_counts(aggregated, tensors)
        single = [label for label in aggregated if counts[label] == 1]
        reduced = []
        for factor in tensors:
            labels = labels_of(factor)
            own = [label for label in single if label in labels]
            if own:
                output = [label for label in labels if label not in own]
                factor = self.emit(factor, output, own)
            reduced.append(factor)
        return reduced, [label for label in aggregated if counts[label] != 1]

    def contract(self, tensors: list[Scalar], remaining: list[str], name: str | None) -> Scalar:
        """Return the product of the factors with `remaining` aggregated, two at a time.

        A label is aggregated as soon as neither the output nor a later factor has it.
        """
        output = self.einsum.output
        if not remaining or len(tensors) == 1:
            return self.emit(self.product(tensors), output, remaining, name)
        labels = [labels_of(factor) for factor in tensors]
        order = contraction_order(labels, output, self.einsum.extent)
        queue = list(enumerate(tensors))  # each with the place of its first factor in the program
        for pair in order:
            # The later position is taken out first, so that the earlier one stays valid.
            sides = [queue.pop(position) for position in sorted(pair, reverse=True)]
            sides.sort(key=lambda entry: entry[0])
            joined = unique(*(labels_of(side) for _, side in sides))
            needed_later = set(output)
            for _, factor in queue:
                needed_later.update(labels_of(factor))
            done = [label for label in joined if label in remaining and label not in needed_later]
            product = self.product([self.materialise(side, joined) for _, side in sides])
            if not queue:
                return self.emit(product, output, done, name)
            # A product that no later factor adds a label to is part of the vertex that
            # aggregates it.
            adds_no_label = all(set(labels_of(factor)) <= set(joined) for _, factor in queue)
            if done or not adds_no_label:
                kept = [label for label in joined if label not in done]
                product = self.emit(product, kept, done)
            queue.append((sides[0][0], product))
        raise AssertionError("the order of a contraction ends with one factor")

    def materialise(self, factor: Scalar, joined: Sequence[str]) -> Scalar:
        """Make a computed factor a vertex, if the product has labels that it does not have.

        In exp(A[i]) × B[i,j] the exponential would be computed for every j.
        """
        if is_plain(factor) or set(labels_of(factor)) == set(joined):
            return factor
        inner = _without_conj(factor)  # kernels conjugate what they multiply
        if inner is not factor and self.type(inner) == self.type(factor):
            return call("conj", self.materialise(inner, joined))
        return self.emit(factor, labels_of(factor), ())

    def product(self, factors: Sequence[Scalar]) -> Scalar:
        """Return ⊗ of all factors, from left to right."""
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
        """Add a vertex and return the element that reads it."""
        if name is None:
            name = self.names.take_new(self.vertex.name)
        aggregation = self.aggregation if aggregated else None
        extent = self.einsum.extent
        einsum, inputs = make_einsum(output, expression, aggregation, aggregated, extent)
        self.known[name] = make_vertex(name, einsum, inputs, self.known, places=self.vertex.places)
        return Element(name, tuple(output))


def _without_conj(factor: Scalar) -> Scalar:
    return factor.args[0] if isinstance(factor, Call) and factor.op == "conj" else factor


def constants_and_tensors(factors: Sequence[Scalar]) -> tuple[list[Scalar], list[Scalar]]:
    """Return the factors without labels, and those with labels."""
    constants = []
    tensors = []
    for factor in factors:
        if labels_of(factor):
            tensors.append(factor)
        else:
            constants.append(factor)
    return constants, tensors


def _label_counts(labels: Sequence[str], factors: Sequence[Scalar]) -> dict[str, int]:
    """Return how many factors have each label."""
    counts = dict.fromkeys(labels, 0)
    for factor in factors:
        for label in labels_of(factor):
            if label in counts:
                counts[label] += 1
    return counts


def _distributed_operation(aggregation: str | None, expression: Scalar) -> str:
    """Return the ⊗ at the root that the aggregation distributes over, or ""."""
    if aggregation is None or not isinstance(expression, Call):
        return ""
    op = "*" if expression.op in ("/", "neg") else expression.op
    return op if op in AGGREGATIONS[aggregation].distributes_over else ""


def _cast(factor: Scalar, dtype: str) -> Scalar:
    """Return a factor in a dtype; of a reciprocal the divisor is converted."""
    if isinstance(factor, Call) and factor.op == "/" and factor.args[0] == Const(1.0):
        return Call("/", (Const(1.0), Call(dtype, (factor.args[1],))))
    return Call(dtype, (factor,))


# ---- the order of a product ----------------------------------------------------------------------


Path: TypeAlias = list[tuple[int, ...]]
_Labels: TypeAlias = frozenset[int]

MOST_FACTORS = 16  # of a product whose best order is searched by dynamic programming
FEW_FACTORS = 9  # with so few it is quick, however many labels they share
# Otherwise it is quick if each factor shares labels with about four others. In all cases tried it
# took at most a quarter of a second.
MOST_NEIGHBOURS = 4
# Greedy orders with random prices, for the products that are left: at most so many, and of large
# products fewer, so that a search joins about as many pairs.
MOST_TRIALS = 128
MOST_FACTORS_OF_ALL_TRIALS = 1 << 13
WEIGHTS_OF_OPERANDS = (1, 2, 4)  # in halves of their elements
LEAST_RANDOM_FACTOR = 64
SPREADS_OF_PRICES = (96, 256, 2048, 16384)  # greatest random factors


def contraction_order(
    factors: Sequence[Sequence[str]], output: Sequence[str], extent: Mapping[str, int]
) -> Path:
    """Return pairs of positions.

    Each pair is taken out of the list of factors, and their product is added at its end. A label
    that only one factor has is in the output.
    """
    if len(factors) == 2:
        return [(0, 1)]
    # Numbers instead of labels: the order of a set of strings differs from run to run.
    number = {label: k for k, label in enumerate(unique(*factors, output))}
    inputs = []
    for labels in factors:
        inputs.append(frozenset(number[label] for label in labels))
    wanted = frozenset(number[label] for label in output)
    sizes = tuple(max(1, extent[label]) for label in number)
    return _order_of_numbered(tuple(inputs), wanted, sizes)


@bounded_cache(1024)  # layers repeat
def _order_of_numbered(
    inputs: tuple[_Labels, ...], output: _Labels, sizes: tuple[int, ...]
) -> Path:
    """Return the order with fewest operations among those found, the first one of equal ones.

    Labels are numbers, and `sizes` has their extents.
    """
    from opt_einsum import path_random, paths  # slow to import, and few programs need it

    extent = dict(enumerate(sizes))

    def operations(order: Path) -> int:
        count, _ = path_random.ssa_path_compute_cost(order, list(inputs), output, extent)
        return int(count)

    # Up to four factors this is the best order, outer products included.
    found = [paths.linear_to_ssa(paths.auto(list(inputs), output, extent))]
    if _is_quick(inputs):
        best = paths.dynamic_programming(list(inputs), output, extent)
        found.append(paths.linear_to_ssa(best))
    elif len(inputs) > FEW_FACTORS:
        for trial in range(min(MOST_TRIALS, MOST_FACTORS_OF_ALL_TRIALS // len(inputs))):
            # A generator of its own: ranks may be threads of one process.
            weight = WEIGHTS_OF_OPERANDS[trial % len(WEIGHTS_OF_OPERANDS)]
            spread = SPREADS_OF_PRICES[trial // len(WEIGHTS_OF_OPERANDS) % len(SPREADS_OF_PRICES)]
            price = _Price(Random(trial), weight, spread)
            found.append(paths.ssa_greedy_optimize(list(inputs), output, extent, None, price))
    fewest = min(found, key=operations)
    return [tuple(pair) for pair in paths.ssa_to_linear(fewest)]


def _is_quick(inputs: Sequence[_Labels]) -> bool:
    """Return whether dynamic programming over all connected sets of factors is quick."""
    if len(inputs) <= FEW_FACTORS:
        return True
    neighbours = 0
    for number, labels in enumerate(inputs):
        neighbours += sum(not labels.isdisjoint(other) for other in inputs[:number])
    return len(inputs) <= MOST_FACTORS and 2 * neighbours <= MOST_NEIGHBOURS * len(inputs)


class _Price:
    """What a pair of factors costs in a greedy order: the elements it adds, times a random number.

    All in whole numbers, as a product may have more elements than a float can count.
    """

    def __init__(self, random: Random, weight: int, spread: int) -> None:
        self.random = random
        self.weight = weight
        self.spread = spread

    def __call__(self, product: int, left: int, right: int, *_: object) -> int:
        added = 2 * product - self.weight * (left + right)
        return added * self.random.randint(LEAST_RANDOM_FACTOR, self.spread)
