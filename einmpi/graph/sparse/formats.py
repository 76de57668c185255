"""Which tensors of a program are sparse, by the rules of docs/sparse.md, and where they are needed.

All of it follows from the program and the formats of its inputs, never from what is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from einmpi.errors import InputError
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.einsum import EinSum
from einmpi.graph.scalar import Arg, Number, Scalar, gathers_in, unique, walk
from einmpi.graph.sparse.background import (
    And,
    At,
    Expressions,
    Facts,
    Support,
    aggregate_of,
    number_of,
    same_number,
    typed,
)

LIKE = "like "


@dataclass(frozen=True)
class Format:
    """How a sparse tensor is held: which of its dimensions are keys, and what is not stored.

    The implicit value is a constant; None if nobody looks at what is not stored. `pattern` is the
    tensor whose pattern it has: itself, if that is known only when the keys are.
    """

    keys: tuple[int, ...]
    implicit: Scalar | None
    pattern: str


class Demand(NamedTuple):
    """Where alone a tensor is needed: in some of its dimensions only at keys of other tensors.

    Each of `owners` is a tensor, and its dimensions in the order of `dimensions`.
    """

    dimensions: tuple[int, ...]
    owners: tuple[tuple[str, tuple[int, ...]], ...]


class Analysis(NamedTuple):
    """What is known of a vertex that reads sparse tensors."""

    facts: Facts
    labels: tuple[str, ...]  # the keys of its support
    format: Format | None  # of its result; None: dense


def wrong(vertex: Vertex, what: str, expected: str, hint: str = "") -> InputError:
    """Return the error about a vertex, with its place in the program."""
    return InputError(" or ".join(vertex.places) or "program", what, expected, hint)


def as_dense(name: str) -> str:
    """Return the advice to take a tensor for a dense one."""
    return f'formats: {name} = "dense" if that is wanted'


class Formats:
    """The formats of the tensors of a graph, as far as they are known.

    `requested` has what the user says of results: "dense", "sparse" or "like A".
    """

    def __init__(
        self, graph: EinGraph, known: Mapping[str, Format], requested: Mapping[str, str]
    ) -> None:
        self.graph = graph
        self.known = dict(known)
        self.requested = requested

    def sparse_operands(self, vertex: Vertex) -> dict[int, Format]:
        """Return the formats of the operands that are sparse, by position."""
        found = {}
        for k, name in enumerate(vertex.inputs):
            if name in self.known:
                found[k] = self.known[name]
        return found

    def expressions(self, vertex: Vertex) -> Expressions:
        """Return what tells the background and the support of a vertex's expressions."""
        implicit = {k: each.implicit for k, each in self.sparse_operands(vertex).items()}
        return Expressions(implicit, [self.graph[name].dtype for name in vertex.inputs])

    def analysis(self, vertex: Vertex) -> Analysis | None:
        """Return what a vertex computes of sparse tensors, None if it reads none."""
        einsum = vertex.computed_einsum
        sparse = self.sparse_operands(vertex)
        if not sparse:
            return None
        self._check(vertex, sparse)
        facts = self.expressions(vertex).facts(einsum.function)
        if facts.support is None:
            return Analysis(facts, (), None)
        unlike = self._unlike_keys(vertex, facts.support)
        if unlike is not None:
            lists = " and ".join(f"[{','.join(each)}]" for each in unlike)
            what = f"{vertex.name} combines sparse tensors with keys {lists}"
            hint = as_dense(vertex.inputs[min(sparse)])
            raise wrong(vertex, what, "the same keys, or a product of them", hint)
        labels = self._labels(vertex, facts.support)
        return Analysis(facts, labels, self._result(vertex, facts, labels))

    def key_labels(self, einsum: EinSum, operand: int, sparse: Format) -> tuple[str, ...]:
        """Return the labels of the keys of an operand."""
        entries = einsum.operands[operand]
        return tuple(str(entries[dimension]) for dimension in sparse.keys)

    def _check(self, vertex: Vertex, sparse: Mapping[int, Format]) -> None:
        """Refuse sparse operands that are read at other places than those of labels."""
        einsum = vertex.computed_einsum
        for k, each in sparse.items():
            name = vertex.inputs[k]
            if any(not isinstance(einsum.operands[k][dimension], str) for dimension in each.keys):
                what = (
                    f"{vertex.name} reads {name} by a gather or index arithmetic, and it is sparse"
                )
                hint = "a product with a sparse selector takes rows; or " + as_dense(name)
                raise wrong(vertex, what, "labels in place of its keys", hint)
            if einsum.scan is not None and einsum.scan.scanned in self.key_labels(einsum, k, each):
                what = f"{vertex.name} is a scan along a key of {name}, which is sparse"
                raise wrong(vertex, what, "a scan along a dense dimension", as_dense(name))
        for index in einsum.operands:
            for node in [part for gather in gathers_in(index) for part in walk(gather)]:
                if isinstance(node, Arg) and node.position in sparse:
                    name = vertex.inputs[node.position]
                    what = f"{vertex.name} takes {name}, which is sparse, for an index"
                    raise wrong(vertex, what, "a dense tensor", as_dense(name))

    def _labels(self, vertex: Vertex, support: Support) -> tuple[str, ...]:
        """Return the key labels of a support."""
        einsum = vertex.computed_einsum
        if isinstance(support, At):
            name = vertex.inputs[support.position]
            return unique(self.key_labels(einsum, support.position, self.known[name]))
        parts = [self._labels(vertex, part) for part in support.parts]
        return unique(*parts)

    def without_keys(self, vertex: Vertex) -> list[int]:
        """Return operands of which one has to be dense, so that a vertex can be computed.

        They do not have the keys of the others where one or another of them is stored; or they are
        needed at keys that the others do not have.
        """
        sparse = self.sparse_operands(vertex)
        facts = self.expressions(vertex).facts(vertex.computed_einsum.function)
        if not sparse or facts.support is None:
            return []
        if self._unlike_keys(vertex, facts.support) is not None:
            return list(sparse)
        labels = set(self._labels(vertex, facts.support))
        keys = {k: self.key_labels(vertex.computed_einsum, k, each) for k, each in sparse.items()}
        return [k for k in sparse if not labels.issuperset(keys[k])]

    def _unlike_keys(
        self, vertex: Vertex, support: Support
    ) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Return two lists of key labels, of parts of which one or the other is stored."""
        if isinstance(support, At):
            return None
        for part in support.parts:
            found = self._unlike_keys(vertex, part)
            if found is not None:
                return found
        lists = [self._labels(vertex, part) for part in support.parts]
        for labels in lists:
            if not isinstance(support, And) and set(labels) != set(lists[0]):
                return lists[0], labels
        return None

    def _result(self, vertex: Vertex, facts: Facts, labels: Sequence[str]) -> Format | None:
        """Return the format of a result; None if it is dense."""
        einsum = vertex.computed_einsum
        request = self.requested.get(vertex.name, "")
        own = [label for label in einsum.output if label in labels]
        number = number_of(facts.background)
        is_first = list(einsum.output[: len(own)]) == own
        is_sparse = number is not None and len(own) >= 2
        if self.graph.is_output(vertex.name) and not is_first:
            is_sparse = False
        if request == "sparse" or request.startswith(LIKE):
            if number is None or not own or not is_first:
                what = f"{vertex.name} has no pattern: what is not stored has no single value"
                if number is not None:
                    what = f"the keys of {vertex.name} do not come first"
                raise wrong(vertex, what, f'formats: {vertex.name} = "dense"')
            is_sparse = True
        if not is_sparse or request == "dense":
            return None
        assert number is not None
        implicit = self._implicit(vertex, number, labels)
        keys = tuple(d for d, label in enumerate(einsum.output) if label in labels)
        return Format(keys, typed(implicit, vertex.dtype), vertex.name)

    def _implicit(self, vertex: Vertex, background: Number, labels: Sequence[str]) -> Number:
        """Return the implicit value of a sparse result."""
        einsum = vertex.computed_einsum
        if einsum.aggregation is None:
            return background
        own = [label for label in einsum.aggregated if label in labels]
        if not own or self.is_neutral(vertex, background):
            count = 1
            for label in einsum.aggregated:
                count *= einsum.extent[label]
            return aggregate_of(einsum.aggregation, background, count, vertex.dtype)
        what = (
            f"{vertex.name} would be sparse, with {background} for each element that is not stored"
        )
        raise wrong(vertex, what, as_dense(vertex.name))

    def is_neutral(self, vertex: Vertex, background: Number) -> bool:
        """Return whether a background changes no aggregate of a vertex."""
        record = AGGREGATIONS[vertex.computed_einsum.required_aggregation]
        return same_number(background, record.neutral(np.dtype(vertex.dtype)))

    # ---- demand ---------------------------------------------------------------------------------

    def demands(self, gradients: Mapping[str, str]) -> dict[str, Demand]:
        """Return the tensors that are needed at the keys of sparse ones only.

        All formats must be known. `gradients` has tensors and those by which they are derivatives:
        implicit elements are constants, so they are demanded where something is stored.
        """
        found: dict[str, Demand] = {}
        for vertex in reversed(self.graph.computed):
            demand: Demand | None = None
            if vertex.name in gradients:
                keys = self.known[vertex.name].keys
                demand = Demand(keys, ((gradients[vertex.name], keys),))
            elif vertex.name not in self.known and not self.graph.is_output(vertex.name):
                demand = self._demand(vertex, found)
            if demand is not None and self._can_be_computed(vertex, demand):
                found[vertex.name] = demand
        return found

    def _demand(self, vertex: Vertex, found: Mapping[str, Demand]) -> Demand | None:
        """Return where all readers need a tensor; None if one needs it elsewhere."""
        dimensions: tuple[int, ...] | None = None
        owners: dict[tuple[str, tuple[int, ...]], None] = {}
        for name in self.graph.consumers[vertex.name]:
            reader = self.graph[name]
            einsum = reader.computed_einsum
            for index in einsum.operands:
                for gather in gathers_in(index):
                    read = [part.position for part in walk(gather) if isinstance(part, Arg)]
                    if vertex.name in [reader.inputs[k] for k in read]:
                        return None
            for k, operand in enumerate(reader.inputs):
                if operand != vertex.name:
                    continue
                limit = self._limit(reader, k, found)
                if limit is None:
                    return None
                own, owner, owner_dimensions = limit
                if dimensions not in (None, own):
                    return None
                dimensions = own
                owners[owner, owner_dimensions] = None
        return None if dimensions is None else Demand(dimensions, tuple(owners))

    def _limit(
        self, reader: Vertex, operand: int, found: Mapping[str, Demand]
    ) -> tuple[tuple[int, ...], str, tuple[int, ...]] | None:
        """Return the dimensions of an operand in which a reader needs it at some keys only.

        With them come the tensor that has the keys, and its dimensions.
        """
        einsum = reader.computed_einsum
        candidates: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = []
        if reader.name in found:
            demand = found[reader.name]
            labels = tuple(einsum.output[dimension] for dimension in demand.dimensions)
            if len(demand.owners) == 1:
                candidates.append((demand.owners[0][0], labels, demand.owners[0][1]))
        else:
            within = self.expressions(reader).needed_within(einsum.function, operand)
            sparse = self.sparse_operands(reader)
            for k in sorted(within or ()):
                labels = self.key_labels(einsum, k, sparse[k])
                candidates.append((reader.inputs[k], labels, sparse[k].keys))
        for owner, labels, dimensions in candidates:
            entries = einsum.operands[operand]
            own = tuple(d for d, entry in enumerate(entries) if entry in labels)
            taken = [entries[d] for d in own]
            if len(own) >= 2 and len(set(taken)) == len(own) and len(set(labels)) == len(labels):
                return own, owner, tuple(dimensions[labels.index(str(each))] for each in taken)
        return None

    def _can_be_computed(self, vertex: Vertex, demand: Demand) -> bool:
        """Return whether all that a vertex reads of sparse tensors is at the demanded keys."""
        einsum = vertex.computed_einsum
        labels = {einsum.output[dimension] for dimension in demand.dimensions}
        for k, each in self.sparse_operands(vertex).items():
            if not labels.issuperset(self.key_labels(einsum, k, each)):
                return False
        return True
