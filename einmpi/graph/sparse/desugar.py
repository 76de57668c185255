"""A graph over sparse tensors as a graph over their stored elements, which the engine runs.

y[i] ← Σ[i,j](A[i,j] × x[j]) becomes y[i] ← Σ[q](where(row[q] == i, A[q] × x[column[q]], 0)): A has
become the stored elements, row and column are their keys. Names of tensors stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from hashlib import blake2b
from math import isfinite, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.errors import InputError, nearest_of
from einmpi.graph.aggregations import AGGREGATIONS
from einmpi.graph.eingraph import EinGraph, Vertex, make_vertex, type_over
from einmpi.graph.einsum import einsum_over, make_einsum
from einmpi.graph.recurrences import Group, in_groups
from einmpi.graph.rewrite import prune
from einmpi.graph.scalar import (
    Arg,
    Call,
    Const,
    Element,
    Index,
    Names,
    Number,
    Scalar,
    labels_of,
    rebuild,
    unlike,
)
from einmpi.graph.sparse.background import (
    And,
    At,
    Support,
    aggregate_of,
    in_dtype,
    number_of,
    typed,
)
from einmpi.graph.sparse.coordinates import Coordinates
from einmpi.graph.sparse.formats import LIKE, Analysis, Demand, Format, Formats, as_dense, wrong
from einmpi.graph.sparse.patterns import (
    Iteration,
    Pattern,
    Patterns,
    join,
    looked_up,
    projected,
    projection,
    stored_at,
    union,
)

# Dense tensors that sparse ones lead to are refused if they have more elements than this, and more
# than so many times all that is given.
MOST_ELEMENTS = 10**5
MOST_TIMES_GIVEN = 4


@dataclass(frozen=True)
class Desugared:
    """A graph over stored elements.

    `arrays` are the inputs that it has besides those of the program: keys, and places of stored
    elements. `patterns` and `formats` are those of the sparse tensors of the program.
    """

    graph: EinGraph
    arrays: Mapping[str, npt.NDArray[Any]]
    patterns: Mapping[str, Pattern]
    formats: Mapping[str, Format]

    def implicit(self, name: str) -> Number:
        """Return the implicit value of a sparse tensor."""
        number = number_of(self.formats[name].implicit)
        assert number is not None, f"nobody looks at what is not stored of {name}"
        return number


def desugar(
    graph: EinGraph,
    given: Mapping[str, Coordinates],
    requested: Mapping[str, str],
    gradients: Mapping[str, str],
) -> Desugared:
    """Return a graph as written, over the stored elements of the given inputs.

    `requested` are formats that the user wants. `gradients` has tensors and the inputs by which
    they are derivatives. InputError for what cannot be computed from stored elements.
    """
    wanted = {}
    for name, request in requested.items():
        wanted[name] = LIKE + request if request in graph.by_name else request
        by = wanted[name].removeprefix(LIKE)
        if by != wanted[name] and by not in given:
            raise InputError(
                "formats", f"{name} is {wanted[name]}, which is dense", "a sparse input"
            )
    likes = {}
    for name, by in gradients.items():
        if by in given and wanted.get(name, LIKE + by) == LIKE + by:
            likes[name] = by
    return _Desugaring(graph, given, wanted, likes).run()


def check_formats(where: str, formats: Mapping[str, str], graph: EinGraph) -> None:
    """Refuse formats of unknown tensors, and unknown formats."""
    for name, request in formats.items():
        if name not in graph.by_name:
            raise InputError(where, f"unknown tensor {name!r}", nearest_of(graph.by_name, name))
        inputs = [vertex.name for vertex in graph.inputs]
        known = ("dense", "sparse", *inputs, *(LIKE + each for each in inputs))
        if request not in known:
            expected = '"dense", "sparse", or "like A" with the name of an input'
            raise InputError(where, f"the format of {name} is {request!r:.60}", expected)


def zero_of(vertex: Vertex) -> Scalar:
    """Return 0 in the dtype of a vertex."""
    return typed(in_dtype(0, vertex.dtype), vertex.dtype)


class _Desugaring:
    """Makes the vertices over stored elements, one for each of the program or several."""

    def __init__(
        self,
        graph: EinGraph,
        given: Mapping[str, Coordinates],
        requested: Mapping[str, str],
        gradients: Mapping[str, str],
    ) -> None:
        self.graph = graph
        self.gradients = gradients
        self.names = Names(graph.by_name)
        self.all_patterns = Patterns()
        self.patterns: dict[str, Pattern] = {}
        self.vertices: dict[str, Vertex] = {}  # of the new graph
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        self.array_names: dict[tuple[str, bytes], str] = {}
        self.requested = requested
        self.given_elements = 0
        formats = {}
        for vertex in graph.inputs:
            if vertex.name not in given:
                self.vertices[vertex.name] = vertex
                self.given_elements += vertex.elements
                continue
            tensor = given[vertex.name]
            keys = tuple(range(len(tensor.keys)))
            implicit = typed(tensor.implicit, vertex.dtype)
            formats[vertex.name] = Format(keys, implicit, vertex.name)
            extents = vertex.bound[: len(keys)]
            self.patterns[vertex.name] = self.all_patterns.of(vertex.name, tensor.keys, extents)
            self.vertices[vertex.name] = replace(vertex, bound=tensor.values.shape)
            self.given_elements += tensor.values.size
        self.formats = Formats(graph, formats, requested)

    def run(self) -> Desugared:
        """Return the new graph."""
        computed: list[Vertex] = []
        inside: set[str] = set()  # of recurrences
        for part in in_groups(self.graph.vertices):
            if isinstance(part, Group):
                computed += part.vertices
                inside.update(vertex.name for vertex in part.vertices)
            elif part.einsum is not None:
                computed.append(part)
        given = dict(self.formats.known)
        for vertex in computed:
            self._find_format(vertex, vertex.name in inside)
        demands = self.formats.demands(self.gradients)
        self.formats.known = given
        for vertex in self._ordered(computed, demands, inside):
            self._lower(vertex, demands.get(vertex.name))
        graph = prune(EinGraph(self._inputs_first(), self.graph.outputs))
        arrays = {name: array for name, array in self.arrays.items() if name in graph.by_name}
        return Desugared(graph, arrays, self.patterns, self.formats.known)

    def _find_format(self, vertex: Vertex, is_recurrent: bool) -> None:
        sparse = self.formats.sparse_operands(vertex)
        if sparse and is_recurrent:
            name = vertex.inputs[min(sparse)]
            what = (
                f"{vertex.name} is computed one index after another, from {name}, which is sparse"
            )
            raise wrong(vertex, what, "a dense tensor", as_dense(name))
        by = self.gradients.get(vertex.name)
        if by is not None:
            keys = self.formats.known[by].keys
            self.formats.known[vertex.name] = Format(keys, zero_of(vertex), by)
            return
        analysis = self.formats.analysis(vertex)
        if analysis is not None and analysis.format is not None:
            self.formats.known[vertex.name] = analysis.format

    def _ordered(
        self, computed: Sequence[Vertex], demands: dict[str, Demand], inside: set[str]
    ) -> list[Vertex]:
        """Return the vertices, each after those whose keys it is computed at.

        Of demands that wait for each other, one is dropped.
        """
        waiting = list(computed)
        done = set(self.vertices)
        found = []
        while waiting:
            for vertex in waiting:
                needed = set(vertex.inputs) - inside
                if vertex.name in demands:
                    needed.update(owner for owner, _ in demands[vertex.name].owners)
                if needed <= done:
                    break
            else:
                vertex = next(vertex for vertex in waiting if vertex.name in demands)
                del demands[vertex.name]
                continue
            waiting.remove(vertex)
            done.add(vertex.name)
            found.append(vertex)
        return found

    def _inputs_first(self) -> tuple[Vertex, ...]:
        vertices = self.vertices.values()
        inputs = [vertex for vertex in vertices if vertex.is_input]
        return (*inputs, *(vertex for vertex in vertices if not vertex.is_input))

    # ---- one vertex -----------------------------------------------------------------------------

    def _lower(self, vertex: Vertex, demand: Demand | None) -> None:
        """Add a vertex to the new graph."""
        name = vertex.name
        like = self.requested.get(name, "").removeprefix(LIKE)
        if demand is not None:
            implicit = zero_of(vertex) if name in self.gradients else None
            self._compute_at(vertex, demand.dimensions, self._demanded(vertex, demand), implicit)
        elif name in self.gradients:
            keys = self.formats.known[self.gradients[name]].keys
            self._realign(vertex, keys, self.patterns[self.gradients[name]], zero_of(vertex))
        elif self.requested.get(name, "").startswith(LIKE):
            self._realign(vertex, self.formats.known[like].keys, self.patterns[like], None)
        else:
            self._lower_freely(vertex)

    def _lower_freely(self, vertex: Vertex) -> None:
        """Add a vertex that is computed wherever its support is."""
        analysis = self.formats.analysis(vertex)
        if analysis is None:
            self.vertices[vertex.name] = vertex
            return
        facts = analysis.facts
        einsum = vertex.computed_einsum
        if facts.support is None:
            assert facts.background is not None
            function = Body(self, vertex).plain(facts.background)
            self.add(vertex, einsum.output, function, einsum.aggregation, einsum.aggregated)
            return
        body = Body(self, vertex, self._iteration(vertex, facts.support))
        if analysis.format is not None:
            self.formats.known[vertex.name] = analysis.format
            self._lower_sparse(vertex, analysis.format, body)
        else:
            DenseResult(self, vertex, analysis, body).add()

    def _demanded(self, vertex: Vertex, demand: Demand) -> Pattern:
        """Return the keys at which a tensor is needed."""
        found = None
        labels = tuple(map(str, demand.dimensions))
        extents = tuple(vertex.bound[dimension] for dimension in demand.dimensions)
        extent = dict(zip(labels, extents, strict=True))
        for owner, dimensions in demand.owners:
            columns = [self.formats.known[owner].keys.index(each) for each in dimensions]
            keys, _ = projection(self.patterns[owner], columns)
            part = Iteration(labels, keys, {})
            found = part if found is None else union(found, part, extent)
        assert found is not None
        return self.all_patterns.of(vertex.name, found.keys, extents)

    def _compute_at(
        self, vertex: Vertex, dimensions: Sequence[int], pattern: Pattern, implicit: Scalar | None
    ) -> None:
        """Add a tensor that is computed at some keys of its dimensions alone."""
        einsum = vertex.computed_einsum
        labels = tuple(einsum.output[dimension] for dimension in dimensions)
        body = Body(self, vertex, Iteration(labels, pattern.keys, {}))
        output = [label for label in einsum.output if label not in labels]
        self.formats.known[vertex.name] = Format(tuple(dimensions), implicit, pattern.name)
        self.patterns[vertex.name] = pattern
        if not pattern.stored:
            self.add(vertex, (body.q, *output), zero_of(vertex), None, (), body.extent)
            return
        value = body.value(einsum.function)
        self.add(
            vertex, (body.q, *output), value, einsum.aggregation, einsum.aggregated, body.extent
        )

    def _realign(
        self, vertex: Vertex, keys: Sequence[int], pattern: Pattern, implicit: Scalar | None
    ) -> None:
        """Add a tensor with the pattern of another one, from how it is computed otherwise."""
        einsum = vertex.computed_einsum
        whole = replace(vertex, name=self.names.take_new(vertex.name))
        self._lower_freely(whole)
        own = self.formats.known.get(whole.name)
        if implicit is None:
            fits = own is not None and own.keys == tuple(keys)
            if fits and self.patterns[whole.name].extents == pattern.extents:
                fits = bool((looked_up(pattern, self.patterns[whole.name].keys) >= 0).all())
            else:
                fits = False
            if not fits:
                what = f"{vertex.name} has stored elements where {pattern.name} has none"
                raise wrong(vertex, what, f'formats: {vertex.name} = "sparse" or "dense"')
            implicit = None if own is None else own.implicit
        copy = einsum_over(einsum.output, (einsum.output,), Arg(0), None, (), einsum.extent)
        self.formats.graph = replace(
            self.formats.graph, vertices=(*self.formats.graph.vertices, whole)
        )
        copied = replace(vertex, einsum=copy, inputs=(whole.name,))
        self._compute_at(copied, keys, pattern, implicit)

    def _lower_sparse(self, vertex: Vertex, result: Format, body: Body) -> None:
        """Add the stored elements of a result, whose pattern is that of the support."""
        einsum = vertex.computed_einsum
        labels = [einsum.output[dimension] for dimension in result.keys]
        extents = [einsum.extent[label] for label in labels]
        tile = [label for label in einsum.output if label not in labels]
        keys, place = projected(body.iteration.columns(labels), extents)
        pattern = self.all_patterns.of(vertex.name, keys, extents)
        self.patterns[vertex.name] = pattern
        if not pattern.stored:
            self.add(vertex, (body.q, *tile), zero_of(vertex), None, (), body.extent)
            return
        others = [label for label in einsum.aggregated if label not in body.iteration.labels]
        if pattern.stored == body.iteration.count:  # no two of them come together
            body = Body(self, vertex, body.iteration.taken(np.argsort(place)))
            value = body.value(einsum.function)
            aggregation = einsum.aggregation if others else None
            if aggregation is None and body.dtype_of(value) != vertex.dtype:
                value = Call(vertex.dtype, (value,))
            self.add(vertex, (body.q, *tile), value, aggregation, others, body.extent)
            return
        place_label = unlike("p", body.extent)
        index = Element(self.array(f"{vertex.name}_place", place), (body.q,))
        value = body.scattered([(place_label, index)], body.value(einsum.function))
        extent = {**body.extent, place_label: pattern.stored}
        aggregated = (body.q, *others)
        self.add(vertex, (place_label, *tile), value, einsum.aggregation, aggregated, extent)

    # ---- iterations -----------------------------------------------------------------------------

    def _iteration(self, vertex: Vertex, support: Support) -> Iteration:
        """Return the combinations of keys in a support."""
        extent = vertex.computed_einsum.extent
        if isinstance(support, At):
            name = vertex.inputs[support.position]
            each = self.formats.known[name]
            labels = self.formats.key_labels(vertex.computed_einsum, support.position, each)
            return stored_at(support.position, self.patterns[name], labels)
        parts = [self._iteration(vertex, part) for part in support.parts]
        combine = join if isinstance(support, And) else union
        return reduce(lambda a, b: combine(a, b, extent), parts)

    # ---- new vertices ---------------------------------------------------------------------------

    def array(self, stem: str, values: npt.NDArray[Any]) -> str:
        """Return the name of an input with these values; equal ones are one."""
        stored = np.ascontiguousarray(values)
        key = (stored.dtype.name, blake2b(stored.data, digest_size=16).digest())
        if key not in self.array_names:
            name = self.names.take_new(stem)
            self.array_names[key] = name
            self.arrays[name] = stored
            self.vertices[name] = Vertex(name, stored.shape, stored.dtype.name)
        return self.array_names[key]

    def add(
        self,
        vertex: Vertex,
        output: Sequence[str],
        expression: Scalar,
        aggregation: str | None,
        aggregated: Sequence[str],
        extent: Mapping[str, int] | None = None,
        name: str | None = None,
    ) -> str:
        """Add a vertex that computes a tensor of the program, or under a new name a part of it."""
        if extent is None:
            extent = vertex.computed_einsum.extent
        einsum, inputs = make_einsum(output, expression, aggregation, aggregated, extent)
        added = make_vertex(
            name or vertex.name, einsum, inputs, self.vertices, (vertex.name,), vertex.places
        )
        self.vertices[added.name] = added
        return added.name

    def check_size(self, vertex: Vertex, elements: int) -> None:
        """Refuse a dense tensor that is much larger than all that is given."""
        is_large = elements > MOST_ELEMENTS and elements > MOST_TIMES_GIVEN * self.given_elements
        if is_large and self.requested.get(vertex.name) != "dense":
            what = (
                f"{vertex.name} needs all {elements:,} elements, {self.given_elements:,} are stored"
            )
            raise wrong(vertex, what, as_dense(vertex.name))


class Body:
    """The function of a vertex over the combinations of an iteration, numbered by a new label."""

    def __init__(
        self, desugaring: _Desugaring, vertex: Vertex, iteration: Iteration | None = None
    ) -> None:
        self.desugaring = desugaring
        self.vertex = vertex
        self.einsum = vertex.computed_einsum
        self.sparse = desugaring.formats.sparse_operands(vertex)
        self.expressions = desugaring.formats.expressions(vertex)
        self.q = unlike("q", self.einsum.extent)
        self.extent = dict(self.einsum.extent)
        self.iteration = iteration or Iteration((), (np.zeros(0, np.int64),), {})
        if iteration is not None:
            self.extent[self.q] = iteration.count
            self.iteration = self._with_all(iteration)
        self.elements: list[Scalar] = []
        for k in range(len(vertex.inputs)):
            self.elements.append(self._element(k))

    def _with_all(self, iteration: Iteration) -> Iteration:
        """Return an iteration with the places of all sparse operands."""
        at = dict(iteration.at)
        formats = self.desugaring.formats
        for k, each in self.sparse.items():
            if k in at:
                continue
            name = self.vertex.inputs[k]
            labels = formats.key_labels(self.einsum, k, each)
            missing = [label for label in labels if label not in iteration.labels]
            if missing:
                what = f"{self.vertex.name} needs {name}[{','.join(labels)}] at all {missing[0]}"
                raise wrong(self.vertex, what, as_dense(name))
            at[k] = looked_up(self.desugaring.patterns[name], iteration.columns(labels))
        return replace(iteration, at=at)

    # ---- elements -------------------------------------------------------------------------------

    def _element(self, operand: int) -> Scalar:
        """Return an operand at a combination."""
        name = self.vertex.inputs[operand]
        entries = self.einsum.operands[operand]
        if operand not in self.sparse:
            return Element(name, tuple(self._entry(entry) for entry in entries))
        each = self.sparse[operand]
        at = self.iteration.at.get(operand, np.zeros(0, np.int64))
        implicit = each.implicit or typed(
            in_dtype(1, self.vertex_dtype(name)), self.vertex_dtype(name)
        )
        if not (at >= 0).any():
            return implicit
        place: str | Scalar = self.q
        stored = self.desugaring.patterns[name].stored
        if len(at) != stored or not np.array_equal(at, np.arange(stored)):
            place = self._column(f"{name}_place", np.maximum(at, 0))
        tile = [self._entry(entry) for d, entry in enumerate(entries) if d not in each.keys]
        element = Element(name, (place, *tile))
        if (at >= 0).all() or each.implicit is None:
            return element
        return Call("where", (self._is_stored(operand), element, implicit))

    def vertex_dtype(self, name: str) -> str:
        """Return the dtype of a tensor."""
        return self.desugaring.vertices[name].dtype

    def _column(self, stem: str, values: npt.NDArray[Any]) -> Scalar:
        return Element(self.desugaring.array(stem, values), (self.q,))

    def _is_stored(self, operand: int) -> Scalar:
        stem = f"{self.vertex.inputs[operand]}_stored"
        return self._column(stem, self.iteration.at[operand] >= 0)

    def key(self, label: str) -> Scalar:
        """Return the value of a label of the iteration at a combination."""
        return self._column(f"{self.vertex.name}_{label}", self.iteration.column(label))

    def _entry(self, entry: str | Scalar) -> str | Scalar:
        if isinstance(entry, str):
            return self.key(entry) if entry in self.iteration.labels else entry
        return rebuild(entry, self._leaf)

    def _leaf(self, node: Scalar) -> Scalar:
        if isinstance(node, Arg):
            return self.elements[node.position]
        if isinstance(node, Index) and node.label in self.iteration.labels:
            return self.key(node.label)
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
            is_everywhere = (self.iteration.at[support.position] >= 0).all()
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
            index = []
            for entry in entries:
                index.append(entry if isinstance(entry, str) else rebuild(entry, leaf))
            elements.append(Element(name, tuple(index)))
        return rebuild(node, leaf)

    def dtype_of(self, value: Scalar) -> str:
        """Return the dtype of an expression over tensors of the new graph."""
        return np.dtype(type_over(value, self.desugaring.vertices)).name

    def scattered(
        self,
        places: Sequence[tuple[str, Scalar]],
        value: Scalar,
        aggregation: str | None = None,
    ) -> Scalar:
        """Return values where labels have certain values, and elsewhere what changes nothing."""
        if not places:
            return value
        record = AGGREGATIONS[aggregation or self.einsum.required_aggregation]
        condition: Scalar | None = None
        for label, index in places:
            equal = Call("==", (index, Index(label)))
            condition = equal if condition is None else Call("&", (condition, equal))
        assert condition is not None
        neutral = record.empty
        if neutral is None:
            neutral = record.neutral(np.dtype(self.dtype_of(value)))
        return Call("where", (condition, value, Const(neutral)))


class DenseResult:
    """A dense tensor that is computed from sparse ones: from what is stored, and from the rest."""

    def __init__(
        self, desugaring: _Desugaring, vertex: Vertex, analysis: Analysis, body: Body
    ) -> None:
        self.desugaring = desugaring
        self.vertex = vertex
        self.einsum = vertex.computed_einsum
        self.body = body
        self.background = analysis.facts.background
        self.own = [label for label in self.einsum.output if label in body.iteration.labels]
        labels = body.iteration.labels
        self.others = [label for label in self.einsum.aggregated if label not in labels]
        self.keys = [label for label in self.einsum.aggregated if label in labels]

    def add(self) -> None:
        """Add the vertices of the result."""
        self.desugaring.check_size(self.vertex, self.vertex.elements)
        if self.background is None:
            what = (
                f"{self.vertex.name} needs elements that are not stored, and that are not computed"
            )
            raise wrong(self.vertex, what, "an expression that the stored elements decide")
        number = number_of(self.background)
        if self.einsum.aggregation is None:
            self._add_filled(self.background)
        elif number is not None:
            self._add_counted(number)
        else:
            self._add_corrected(self.background)

    def _finish(self, expression: Scalar) -> None:
        self.desugaring.add(self.vertex, self.einsum.output, expression, None, ())

    def _scatter(
        self,
        value: Scalar,
        aggregation: str,
        ending: str = "",
        output: Sequence[str] | None = None,
    ) -> Element:
        """Add the aggregates of what is stored, by the labels of the result or some of them.

        They are the result itself, or with an ending of its name a part of it.
        """
        body = self.body
        places = [(label, body.key(label)) for label in self.own]
        others = self.others
        if output is None:
            output = self.einsum.output
        else:
            others = []
        name = self.desugaring.names.take_new(f"{self.vertex.name}_{ending}") if ending else None
        scattered = body.scattered(places, value, aggregation)
        stored = self.desugaring.add(
            self.vertex, output, scattered, aggregation, (body.q, *others), body.extent, name
        )
        return Element(stored, tuple(output))

    def _add_filled(self, background: Scalar) -> None:
        """Add a result without aggregation: the background where nothing is stored."""
        plain = self._in_dtype(self.body.plain(background))
        if not self.body.iteration.count:
            self._finish(plain)
            return
        value = self.body.value(self.einsum.function)
        aggregation = "any" if self.vertex.dtype == "bool" else "sum"
        stored = self._scatter(value, aggregation, "stored")
        inside = self._scatter(Const(True), "any", "inside", self.own)
        self._finish(Call("where", (inside, self._in_dtype(stored), plain)))

    def _in_dtype(self, value: Scalar) -> Scalar:
        dtype = self.vertex.dtype
        return value if self.body.dtype_of(value) == dtype else Call(dtype, (value,))

    def _add_counted(self, background: Number) -> None:
        """Add a result whose background is constant: it is taken as often as nothing is stored."""
        aggregation = self.einsum.required_aggregation
        dtype = self.vertex.dtype
        body = self.body
        total = prod(self.einsum.extent[label] for label in self.keys)
        times = prod(self.einsum.extent[label] for label in self.others)
        count = body.iteration.count
        if not count:
            number = aggregate_of(aggregation, background, total * times, dtype)
            self._finish(typed(number, dtype))
            return
        value = body.value(self.einsum.function)
        is_neutral = self.desugaring.formats.is_neutral(self.vertex, background)
        if is_neutral or (not self.own and count == total):
            self._scatter(value, aggregation)
            return
        stored = self._scatter(value, aggregation, "stored")
        record = AGGREGATIONS[aggregation]
        if not self.own:
            rest = typed(
                aggregate_of(aggregation, background, (total - count) * times, dtype), dtype
            )
            self._finish(Call(record.operation, (stored, rest)))
            return
        counted = self._scatter(Const(1), "sum", "count", self.own)
        missing = Call("-", (Const(total), counted))
        if record.is_idempotent:
            rest = typed(in_dtype(background, dtype), dtype)
        else:
            number = background
            if isinstance(number, int):
                number = in_dtype(int(number), "int64")
            all_missing = Call("*", (missing, Const(times)))
            op = "*" if aggregation == "sum" else "**"
            rest = Call(dtype, (Call(op, (Const(number), all_missing)),))
        combined = Call(record.operation, (stored, rest))
        self._finish(Call("where", (Call(">", (missing, Const(0))), combined, stored)))

    def _add_corrected(self, background: Scalar) -> None:
        """Add a sum: that of all backgrounds, and how much what is stored differs from them."""
        vertex = self.vertex
        for k, each in self.body.sparse.items():
            number = number_of(each.implicit)
            if number is not None and not isfinite(abs(number)):
                self._refuse(f"what is not stored of {vertex.inputs[k]} is {number}")
        if self.einsum.aggregation != "sum":
            self._refuse(f"{self.einsum.aggregation} needs the elements that are not stored")
        plain = self._in_dtype(self.body.plain(background))
        free = labels_of(plain)
        elements = prod(self.einsum.extent[label] for label in free)
        self.desugaring.check_size(vertex, elements)
        kept = [label for label in self.einsum.output if label in free]
        gone = [label for label in self.einsum.aggregated if label in free]
        times = prod(
            self.einsum.extent[label] for label in self.einsum.aggregated if label not in gone
        )
        rest = self.desugaring.add(
            vertex,
            kept,
            plain,
            "sum" if gone else None,
            gone,
            name=self.desugaring.names.take_new(f"{vertex.name}_rest"),
        )
        whole: Scalar = Call("*", (Const(times), Element(rest, tuple(kept))))
        if self.body.iteration.count:
            here = self._in_dtype(self.body.value(background))
            value = Call("-", (self._in_dtype(self.body.value(self.einsum.function)), here))
            whole = Call("+", (self._scatter(value, "sum", "stored"), whole))
        self._finish(whole)

    def _refuse(self, why: str) -> None:
        what = f"{self.vertex.name}: {why}, and these depend on their position"
        hint = "an expression that the stored elements decide"
        raise wrong(self.vertex, what, as_dense(self.vertex.name), hint)
