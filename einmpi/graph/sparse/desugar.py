"""A graph over sparse tensors as a graph over their stored elements, which the engine runs.

y[i] ← Σ[i,j](A[i,j] × x[j]) becomes y[i] ← Σ[q](where(row[q] == i, A[q] × x[column[q]], 0)): A has
become the stored elements, row and column are their keys. Names of tensors stay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from hashlib import blake2b
from math import isfinite, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from einmpi.errors import InputError, nearest_of
from einmpi.graph.eingraph import EinGraph, Known, Stored, Vertex, make_vertex
from einmpi.graph.einsum import einsum_over, make_einsum
from einmpi.graph.recurrences import Group, in_groups
from einmpi.graph.rewrite import prune
from einmpi.graph.scalar import Arg, Names, Number, Scalar, unique, unlike
from einmpi.graph.sparse.background import (
    And,
    At,
    Support,
    in_dtype,
    number_of,
    typed,
)
from einmpi.graph.sparse.combinations import Aggregate, Body
from einmpi.graph.sparse.coordinates import Coordinates
from einmpi.graph.sparse.dense_results import DenseResult
from einmpi.graph.sparse.formats import LIKE, Demand, Format, Formats, as_dense, wrong
from einmpi.graph.sparse.patterns import (
    Iteration,
    Pattern,
    Patterns,
    join,
    looked_up,
    over_keys,
    projection,
    stored_at,
    union,
)
from einmpi.graph.sparse.products import find_product
from einmpi.graph.sparse.sorting import are_equal

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


def implicit_value(name: str, tensor: Format) -> Number:
    """Return the implicit value of a sparse tensor of this name and format."""
    number = number_of(tensor.implicit)
    assert number is not None, f"nobody looks at what is not stored of {name}"
    return number


def desugar(
    graph: EinGraph,
    given: Mapping[str, Coordinates],
    requested: Mapping[str, str],
    gradients: Mapping[str, str],
    ranks: int,
    arrays: Mapping[str, Vertex],
    taken: Collection[str],
    finds_pairs: bool = False,
) -> Desugared:
    """Return a graph as written, over the stored elements of the given inputs.

    `requested` are formats that the user wants. `gradients` has tensors and the inputs by which
    they are derivatives. So many `ranks` share the stored elements. It may use the `arrays` that
    graphs before it have got, and gives no new input a name that is `taken`. With `finds_pairs`,
    kernels of one rank find the pairs of elements that are multiplied. InputError for what cannot
    be computed from stored elements.
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
    finds_pairs = finds_pairs and ranks == 1
    return Desugaring(graph, given, wanted, likes, ranks, arrays, taken, finds_pairs).run()


def check_formats(where: str, formats: Mapping[str, str], graphs: Sequence[EinGraph]) -> None:
    """Refuse formats of tensors that are in none of the graphs, and unknown formats."""
    names = [name for graph in graphs for name in graph.by_name]
    inputs = [vertex.name for graph in graphs for vertex in graph.inputs]
    for name, request in formats.items():
        if name not in names:
            raise InputError(where, f"unknown tensor {name!r}", nearest_of(names, name))
        known = ("dense", "sparse", *inputs, *(LIKE + each for each in inputs))
        if request not in known:
            expected = '"dense", "sparse", or "like A" with the name of an input'
            raise InputError(where, f"the format of {name} is {request!r:.60}", expected)


def zero_of(vertex: Vertex) -> Scalar:
    """Return 0 in the dtype of a vertex."""
    return typed(in_dtype(0, vertex.dtype), vertex.dtype)


class Desugaring:
    """Makes the vertices over stored elements, one for each of the program or several."""

    def __init__(
        self,
        graph: EinGraph,
        given: Mapping[str, Coordinates],
        requested: Mapping[str, str],
        gradients: Mapping[str, str],
        ranks: int,
        arrays: Mapping[str, Vertex],
        taken: Collection[str],
        finds_pairs: bool,
    ) -> None:
        self.ranks = ranks
        self.finds_pairs = finds_pairs
        self.graph = graph
        self.gradients = gradients
        self.taken = sorted({*graph.by_name, *taken, *arrays})
        self.names = Names(self.taken)
        self.all_patterns = Patterns(ranks)
        self.patterns: dict[str, Pattern] = {}
        self.vertices: dict[str, Vertex] = dict(arrays)  # of the new graph
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        for name, vertex in arrays.items():
            assert vertex.known is not None
            self.arrays[name] = vertex.known.values
        self.requested = dict(requested)
        self.source = self._source(given)
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
            pattern = self.all_patterns.of(vertex.name, tensor.keys, extents)
            self.patterns[vertex.name] = pattern
            bound = (pattern.blocks.size, *tensor.values.shape[1:])
            stored = Stored(pattern.stored, prod(extents), pattern.blocks.length)
            self.vertices[vertex.name] = replace(vertex, bound=bound, stored=stored)
            self.given_elements += tensor.values.size
        self.formats = Formats(graph, formats, self.requested)

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
        read = computed
        computed = []
        for vertex in read:
            parts = (vertex,) if vertex.name in inside else self._with_like_keys(vertex)
            for part in parts:
                self._find_format(part, part.name in inside)
            computed += parts
        demands = self.formats.demands(self.gradients)
        self.formats.known = given
        for vertex in self._ordered(computed, demands, inside):
            self._lower(vertex, demands.get(vertex.name))
        graph = prune(EinGraph(self._inputs_first(), self.graph.outputs))
        arrays = {name: array for name, array in self.arrays.items() if name in graph.by_name}
        return Desugared(graph, arrays, self.patterns, self.formats.known)

    def _with_like_keys(self, vertex: Vertex) -> tuple[Vertex, ...]:
        """Return a vertex, after dense copies of tensors that do not have the keys of the others.

        The smallest are copied, as long as a dense tensor of their size is not refused.
        """
        copies: list[Vertex] = []
        while candidates := self.formats.without_keys(vertex):
            einsum = vertex.computed_einsum
            sizes = []
            for k in candidates:
                labels = unique([each for each in einsum.operands[k] if isinstance(each, str)])
                implicit = number_of(self.formats.known[vertex.inputs[k]].implicit)
                # Sums of differences from an infinite background would be nan.
                is_finite = implicit is not None and isfinite(abs(implicit))
                if is_finite and all(isinstance(each, str) for each in einsum.operands[k]):
                    sizes.append((prod(einsum.extent[label] for label in labels), k, labels))
            if not sizes or self.is_large(min(sizes)[0]):
                break
            _, k, labels = min(sizes)
            copy = einsum_over(labels, (einsum.operands[k],), Arg(0), None, (), einsum.extent)
            source = vertex.inputs[k]
            name = self.names.take_new(f"{source}_dense")
            self.requested[name] = "dense"
            known = self.formats.graph.by_name
            copies.append(make_vertex(name, copy, (source,), known, (name,), vertex.places))
            operands = list(einsum.operands)
            operands[k] = labels
            inputs = (*vertex.inputs[:k], name, *vertex.inputs[k + 1 :])
            einsum = replace(einsum, operands=tuple(operands))
            vertex = replace(vertex, einsum=einsum, inputs=inputs)
            vertices = []
            for each in self.formats.graph.vertices:
                vertices += [copies[-1], vertex] if each.name == vertex.name else [each]
            self.formats.graph = replace(self.formats.graph, vertices=tuple(vertices))
        return (*copies, vertex)

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
        if self.finds_pairs and analysis.format is not None:
            product = find_product(self, vertex, facts.support)
            if product is not None:
                self.formats.known[vertex.name] = analysis.format
                self.patterns[vertex.name] = self.all_patterns.of(
                    vertex.name, product.keys(), vertex.bound
                )
                product.add()
                return
        goals = tuple(label for label in einsum.output if label in analysis.labels)
        iteration = self._iteration(vertex, facts.support, goals)
        if analysis.format is not None:
            iteration = iteration.sorted_by(goals)
        body = Body(self, vertex, iteration)
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
        for owner, dimensions in demand.owners:
            columns = [self.formats.known[owner].keys.index(each) for each in dimensions]
            keys, _ = projection(self.patterns[owner], columns)
            part = over_keys(labels, keys)
            found = part if found is None else union(found, part)
        assert found is not None
        return self.all_patterns.of(vertex.name, found.columns(labels), extents)

    def _compute_at(
        self, vertex: Vertex, dimensions: Sequence[int], pattern: Pattern, implicit: Scalar | None
    ) -> None:
        """Add a tensor that is computed at some keys of its dimensions alone."""
        einsum = vertex.computed_einsum
        labels = tuple(einsum.output[dimension] for dimension in dimensions)
        body = Body(self, vertex, over_keys(labels, pattern.keys))
        output = [label for label in einsum.output if label not in labels]
        self.formats.known[vertex.name] = Format(tuple(dimensions), implicit, pattern.name)
        self.patterns[vertex.name] = pattern
        self._add_at_keys(vertex, body, output, einsum.aggregation, einsum.aggregated)

    def _add_at_keys(
        self,
        vertex: Vertex,
        body: Body,
        tile: Sequence[str],
        aggregation: str | None,
        aggregated: Sequence[str],
    ) -> None:
        """Add the tiles of a sparse tensor that has one for each combination of keys."""
        value = zero_of(vertex)
        if self.patterns[vertex.name].stored:
            value = body.value(vertex.computed_einsum.function)
            if aggregation is None:
                value = body.converted(value, vertex.dtype)
        else:
            aggregation, aggregated = None, ()
        self.add(vertex, (body.q, *tile), value, aggregation, aggregated, body.extent)

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
        labels = tuple(einsum.output[dimension] for dimension in result.keys)
        extents = [einsum.extent[label] for label in labels]
        tile = [label for label in einsum.output if label not in labels]
        iteration = body.iteration
        pattern = self.all_patterns.of(vertex.name, iteration.distinct(), extents)
        self.patterns[vertex.name] = pattern
        others = [label for label in einsum.aggregated if label not in iteration.labels]
        if pattern.stored == iteration.count:  # no two of them come together
            aggregation = einsum.aggregation if others else None
            self._add_at_keys(vertex, body, tile, aggregation, others)
            return
        place_label = unlike("p", body.extent)
        body.extent[place_label] = pattern.blocks.size
        assert iteration.result is not None
        is_divided = body.iteration.divided == labels[0] and pattern.blocks.length is not None
        value = body.value(einsum.function)
        output = (place_label, *tile)
        body.aggregate(
            Aggregate(vertex, value, einsum.required_aggregation, output, others),
            {place_label: pattern.blocks.placed(iteration.result)},
            is_divided,
        )

    # ---- iterations -----------------------------------------------------------------------------

    def _iteration(
        self, vertex: Vertex, support: Support, goals: tuple[str, ...] | None = None
    ) -> Iteration:
        """Return the combinations of keys in a support; those of a product are sorted by goals."""
        extent = vertex.computed_einsum.extent
        if isinstance(support, At):
            name = vertex.inputs[support.position]
            each = self.formats.known[name]
            labels = self.formats.key_labels(vertex.computed_einsum, support.position, each)
            return stored_at(support.position, self.patterns[name], labels)
        parts = [self._iteration(vertex, part) for part in support.parts]
        if not isinstance(support, And):
            return reduce(union, parts)
        first = reduce(lambda a, b: join(a, b, extent), parts[:-1])
        return join(first, parts[-1], extent, goals)

    # ---- new vertices ---------------------------------------------------------------------------

    def array(self, stem: str, values: npt.NDArray[Any]) -> str:
        """Return the name of an input with these values; equal ones are one."""
        stored = np.ascontiguousarray(values)
        for name, array in self.arrays.items():
            if are_equal(array, stored):
                return name
        name = self.names.take_new(stem)
        self.arrays[name] = stored
        known = Known(stored, f"{self.source} {name}")
        self.vertices[name] = Vertex(name, stored.shape, stored.dtype.name, known=known)
        return name

    def _source(self, given: Mapping[str, Coordinates]) -> str:
        """Return a text from which, with its name, follows what is in a new input."""
        earlier = [vertex.known for vertex in self.vertices.values()]
        known = (self.graph, self.requested, self.gradients, self.ranks, self.taken, earlier)
        digest = blake2b(repr(known).encode())
        for name, tensor in given.items():
            digest.update(f"{name} {tensor.shape} {tensor.implicit} {tensor.digest}".encode())
        return digest.hexdigest()

    def add(
        self,
        vertex: Vertex,
        output: Sequence[str],
        expression: Scalar,
        aggregation: str | None,
        aggregated: Sequence[str],
        extent: Mapping[str, int] | None = None,
        name: str | None = None,
        matches: int | None = None,
    ) -> str:
        """Add a vertex that computes a tensor of the program, or under a new name a part of it."""
        if extent is None:
            extent = vertex.computed_einsum.extent
        einsum, inputs = make_einsum(output, expression, aggregation, aggregated, extent)
        einsum = replace(einsum, matches=matches)
        added = make_vertex(
            name or vertex.name, einsum, inputs, self.vertices, (vertex.name,), vertex.places
        )
        self.vertices[added.name] = added
        return added.name

    def is_large(self, elements: int) -> bool:
        """Return whether a dense tensor is much larger than all that is given."""
        return elements > MOST_ELEMENTS and elements > MOST_TIMES_GIVEN * self.given_elements

    def check_size(self, vertex: Vertex, elements: int) -> None:
        """Refuse a dense tensor that is much larger than all that is given."""
        if self.is_large(elements) and self.requested.get(vertex.name) != "dense":
            what = (
                f"{vertex.name} needs all {elements:,} elements, {self.given_elements:,} are stored"
            )
            raise wrong(vertex, what, as_dense(vertex.name))
