"""What a vertex computes at combinations of keys, as expressions over stored elements.

The combinations are numbered by a new label, which ranks cut into blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.eingraph import Vertex, type_over
from einmpi.graph.scalar import (
    Arg,
    Call,
    Const,
    Element,
    Index,
    Scalar,
    rebuild,
    unlike,
    with_gathers,
)
from einmpi.graph.sparse.background import (
    And,
    At,
    Support,
    in_dtype,
    typed,
)
from einmpi.graph.sparse.coordinates import MOST_UNEVEN
from einmpi.graph.sparse.formats import as_dense, wrong
from einmpi.graph.sparse.patterns import (
    Iteration,
    Parts,
    at_same_keys,
    divided,
    looked_up,
    over_keys,
    parts_of,
)
from einmpi.graph.sparse.sorting import key_dtype

if TYPE_CHECKING:
    from einmpi.graph.sparse.desugar import Desugaring

# How many times fewer parts of results there have to be elsewhere than results on other ranks, so
# that ranks send parts.
LEAST_TIMES_FEWER = 1.25


class Aggregate(NamedTuple):
    """Aggregates of the values at combinations, as a tensor of the new graph.

    Attributes
    ----------
    vertex
        The vertex of the program that it is, or is a part of.
    value
        The values, over all combinations and tiles.
    aggregation, output
        Of the new tensor.
    others
        Labels that are aggregated, and are no keys.
    name
        Of the new tensor, if it is not the vertex itself.
    """

    vertex: Vertex
    value: Scalar
    aggregation: str
    output: Sequence[str]
    others: Sequence[str] = ()
    name: str | None = None


# For labels of a result the index that each combination goes to.
Goals: TypeAlias = Mapping[str, npt.NDArray[np.integer[Any]]]


class Combinations:
    """Combinations of keys, numbered by a new label."""

    def __init__(
        self,
        desugaring: Desugaring,
        stem: str,
        iteration: Iteration,
        extent: Mapping[str, int],
        most_uneven: float = MOST_UNEVEN,
    ) -> None:
        self.desugaring = desugaring
        self.stem = stem  # of the names of new inputs
        self.iteration = divided(iteration, extent, desugaring.ranks, most_uneven)
        self.q = unlike("q", extent)
        self.extent = {**extent, self.q: self.iteration.blocks.size}

    def column(
        self, stem: str, values: npt.NDArray[np.integer[Any]], extent: int, empty: int | None = None
    ) -> Scalar:
        """Return indices of a dimension of this extent, one for each combination.

        At empty places of blocks they are a number, or repeat what is before.
        """
        narrow = values.astype(key_dtype(extent), copy=False)
        spread = self.iteration.blocks.spread(narrow, empty)
        return Element(self.desugaring.array(stem, spread), (self.q,))

    def goal(self, label: str, numbers: npt.NDArray[np.integer[Any]]) -> Scalar:
        """Return where combinations go along a label; what is at empty places goes nowhere."""
        extent = self.extent[label]
        return self.column(f"{self.stem}_to_{label}", numbers, extent, empty=extent)

    def dtype_of(self, value: Scalar) -> str:
        """Return the dtype of an expression over tensors of the new graph."""
        return np.dtype(type_over(value, self.desugaring.vertices)).name

    def converted(self, value: Scalar, dtype: str) -> Scalar:
        """Return an expression over tensors of the new graph in a dtype."""
        return value if self.dtype_of(value) == dtype else Call(dtype, (value,))

    def aggregate(self, wanted: Aggregate, goals: Goals, is_divided: bool) -> str:
        """Add a tensor with the aggregates of values that go to the same place; return its name.

        `is_divided` says whether each block of combinations goes to the same block of the result.
        """
        ranks = self.desugaring.ranks
        if ranks > 1 and not is_divided and goals:
            extents = [self.extent[label] for label in goals]
            columns = tuple(goals.values())
            parts = parts_of(self.iteration, tuple(goals), columns, extents, ranks)
            if LEAST_TIMES_FEWER * parts.elsewhere <= (ranks - 1) * prod(extents):
                return self._aggregate_in_parts(wanted, parts)
        return self._aggregate_at_once(wanted, goals)

    def _aggregate_at_once(self, wanted: Aggregate, goals: Goals) -> str:
        value = wanted.value
        conditions = []
        for label, numbers in goals.items():
            conditions.append(Call("==", (self.goal(label, numbers), Index(label))))
        if not goals and self.iteration.blocks.places is not None:
            # All that is no empty place goes to the only result.
            label = self.iteration.labels[0]
            goal = self.goal(label, self.iteration.column(label))
            conditions.append(Call("<", (goal, Const(self.extent[label]))))
        if conditions:
            value = self.chosen(conditions, value, wanted.aggregation)
        aggregated = (self.q, *wanted.others)
        return self.desugaring.add(
            wanted.vertex,
            wanted.output,
            value,
            wanted.aggregation,
            aggregated,
            self.extent,
            wanted.name,
        )

    def chosen(self, conditions: Sequence[Scalar], value: Scalar, aggregation: str) -> Scalar:
        """Return a value where all conditions hold, elsewhere what changes no aggregate."""
        rule = AGGREGATIONS[aggregation]
        neutral = rule.empty
        if neutral is None:
            neutral = rule.neutral(np.dtype(self.dtype_of(value)))
        condition = reduce(lambda a, b: Call("&", (a, b)), conditions)
        return Call("where", (condition, value, Const(neutral)))

    def _aggregate_in_parts(self, wanted: Aggregate, parts: Parts) -> str:
        """Add aggregates by way of those of each rank, of which ranks fetch what they need."""
        part = unlike("part", self.extent)
        self.extent[part] = parts.blocks.size
        goals = parts.results.labels
        tile = [label for label in wanted.output if label not in goals]
        name = self.desugaring.names.take_new(f"{wanted.vertex.name}_parts")
        of_ranks = wanted._replace(output=(part, *tile), name=name)
        first = self._aggregate_at_once(of_ranks, {part: parts.blocks.placed(parts.of)})
        extent = {label: self.extent[label] for label in wanted.output}
        # However uneven: each result is put together where it is, and there are few parts.
        ranks = self.desugaring.ranks
        results = Combinations(self.desugaring, first, parts.results, extent, most_uneven=ranks)
        order = results.iteration.at(0)
        assert order is not None
        place = results.column(f"{first}_place", parts.blocks.placed(order), parts.blocks.size)
        return results._aggregate_at_once(
            wanted._replace(value=Element(first, (place, *tile)), others=()),
            {label: results.iteration.column(label) for label in goals},
        )


class Body(Combinations):
    """The function of a vertex over the combinations of an iteration, if there is one.

    If its `elements` are given, all of them are stored at all combinations.
    """

    def __init__(
        self,
        desugaring: Desugaring,
        vertex: Vertex,
        iteration: Iteration | None = None,
        elements: Sequence[Scalar] = (),
    ) -> None:
        self.vertex = vertex
        self.einsum = vertex.computed_einsum
        self.sparse = desugaring.formats.sparse_operands(vertex)
        self.expressions = desugaring.formats.expressions(vertex)
        super().__init__(
            desugaring, vertex.name, iteration or Iteration((), ()), self.einsum.extent
        )
        if iteration is not None:
            self.iteration = self._with_all(self.iteration)
        self.elements = list(elements)
        for k in range(len(self.elements), len(vertex.inputs)):
            self.elements.append(self._element(k))

    def _with_all(self, iteration: Iteration) -> Iteration:
        """Return an iteration with the places of all sparse operands."""
        found = dict(iteration.found)
        formats = self.desugaring.formats
        for k, each in self.sparse.items():
            if k in iteration.operands:
                continue
            name = self.vertex.inputs[k]
            labels = formats.key_labels(self.einsum, k, each)
            missing = [label for label in labels if label not in iteration.labels]
            if missing:
                what = f"{self.vertex.name} needs {name}[{','.join(labels)}] at all {missing[0]}"
                raise wrong(self.vertex, what, as_dense(name))
            pattern = self.desugaring.patterns[name]
            own = over_keys(labels, pattern.keys, (k,))
            same = at_same_keys(iteration, own) if not found else None
            if same is not None:
                iteration = same
            else:
                found[k] = looked_up(pattern, iteration.columns(labels))
        return replace(iteration, found=found)

    # ---- elements -------------------------------------------------------------------------------

    def _element(self, operand: int) -> Scalar:
        """Return an operand at a combination."""
        name = self.vertex.inputs[operand]
        entries = self.einsum.operands[operand]
        if operand not in self.sparse:
            return Element(name, tuple(self._entry(entry) for entry in entries))
        each = self.sparse[operand]
        implicit = each.implicit or typed(
            in_dtype(1, self.vertex_dtype(name)), self.vertex_dtype(name)
        )
        iteration = self.iteration
        if operand not in iteration.operands or not iteration.has_some(operand):
            return implicit
        place: str | Scalar = self.q
        pattern = self.desugaring.patterns[name]
        at = iteration.at(operand)
        is_same = iteration.count == pattern.stored and iteration.blocks == pattern.blocks
        if not is_same or not (at is None or np.array_equal(at, np.arange(pattern.stored))):
            elements = np.arange(iteration.count) if at is None else at
            if operand in iteration.found:
                elements = np.maximum(elements, 0)
            place = self.column(
                f"{name}_place", pattern.blocks.placed(elements), pattern.blocks.size
            )
        tile = [self._entry(entry) for d, entry in enumerate(entries) if d not in each.keys]
        element = Element(name, (place, *tile))
        if iteration.is_at_all(operand) or each.implicit is None:
            return element
        return Call("where", (self._is_stored(operand), element, implicit))

    def vertex_dtype(self, name: str) -> str:
        """Return the dtype of a tensor."""
        return self.desugaring.vertices[name].dtype

    def _is_stored(self, operand: int) -> Scalar:
        stem = f"{self.vertex.inputs[operand]}_stored"
        is_stored = self.iteration.blocks.spread(self.iteration.found[operand] >= 0, False)
        return Element(self.desugaring.array(stem, is_stored), (self.q,))

    def key(self, label: str) -> Scalar:
        """Return the value of a label of the iteration at a combination."""
        stem = f"{self.vertex.name}_{label}"
        return self.column(stem, self.iteration.column(label), self.einsum.extent[label])

    def _entry(self, entry: str | Scalar) -> str | Scalar:
        if isinstance(entry, str):
            return self.key(entry) if entry in self.iteration.labels else entry
        return rebuild(entry, self._leaf)

    def _leaf(self, node: Scalar) -> Scalar:
        if isinstance(node, Arg):
            return self.elements[node.position]
        if isinstance(node, Index) and node.label in self.iteration.labels:
            return Call("int64", (self.key(node.label),))
        return node

    # ---- expressions ----------------------------------------------------------------------------

    def value(self, node: Scalar) -> Scalar:
        """Return an expression over Args at a combination.

        Where something annihilates because it is not stored, other factors do not matter.
        """
        if not isinstance(node, Call):
            return self._leaf(node)
        call = Call(node.op, tuple(self.value(argument) for argument in node.args))
        found = self.expressions.annihilation(node)
        if found is None:
            return call
        if found.support is None:
            return found.result
        stored = self._presence(found.support)
        return call if stored is None else Call("where", (stored, call, found.result))

    def _presence(self, support: Support) -> Scalar | None:
        """Return whether a combination is in a support; None if all are."""
        if isinstance(support, At):
            is_everywhere = self.iteration.is_at_all(support.position)
            return None if is_everywhere else self._is_stored(support.position)
        parts = [self._presence(part) for part in support.parts]
        if not isinstance(support, And) and None in parts:
            return None
        found = None
        for part in parts:
            if part is not None:
                op = "&" if isinstance(support, And) else "|"
                found = part if found is None else Call(op, (found, part))
        return found

    def plain(self, node: Scalar) -> Scalar:
        """Return an expression over dense operands, for all values of its labels."""
        elements: list[Scalar] = []

        def leaf(part: Scalar) -> Scalar:
            return elements[part.position] if isinstance(part, Arg) else part

        for name, entries in zip(self.vertex.inputs, self.einsum.operands, strict=True):
            index = with_gathers(entries, lambda gather: rebuild(gather, leaf))
            elements.append(Element(name, index))
        return rebuild(node, leaf)
