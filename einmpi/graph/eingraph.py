"""EinGraph: a directed acyclic graph of EinSums with extents and dtypes (paper, section 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from einmpi.graph.arithmetic import infer
from einmpi.graph.dtypes import Type
from einmpi.graph.einsum import EinSum, einsum_type, element_text
from einmpi.graph.scalar import Element, Scalar


class StoredForm(NamedTuple):
    """How the elements of an input lie in its file."""

    itemsize: int
    chunks: tuple[int, ...] | None  # None: in one piece
    first: tuple[int, ...]  # where in the chunks the tensor begins
    is_reversed: bool = False  # the first dimension varies fastest


@dataclass(frozen=True)
class Recurrence:
    """Vertices that follow one another in a graph and are computed `steps` times, in this order.

    `carry` has tensors that are computed before, and the vertices among them that take their
    places after each step. A recurrence has the name of the first tensor that it computes.
    """

    name: str
    steps: int
    carry: tuple[tuple[str, str], ...]

    @cached_property
    def starts(self) -> frozenset[str]:
        """The tensors that are there before the first step, and change in each."""
        return frozenset(start for start, _ in self.carry)


@dataclass(frozen=True)
class Known:
    """The elements of an input that are known before anything is planned.

    Such are the keys of what a sparse tensor stores: they say what ranks have to fetch. Equal
    arrays have equal digests, by which they are compared.
    """

    values: npt.NDArray[Any] = field(compare=False, repr=False)
    digest: str


class Stored(NamedTuple):
    """What a tensor holds of a sparse one, of which it has the stored elements or tiles."""

    elements: int
    places: int  # that the sparse tensor has for them
    largest: int | None  # block of elements in the same rows; None: they are not kept together
    is_assumed: bool = False  # nobody has looked at the keys yet: they may be anywhere


class Aligned(NamedTuple):
    """An aggregated and a scattered label of a vertex that ranks cut alike.

    On the mesh that is planned for, values of a block go to places in the block with the same
    number.
    """

    aggregated: str
    scattered: str


@dataclass(frozen=True)
class Vertex:
    """The paper's triple (bound, EinSum, inputs), with a name and a dtype.

    An input has no EinSum. `origin` names the tensors of the program that were fused into this
    vertex, itself last. `places` are where the program computes indices of gathers for it, or
    else where its own statement is.
    """

    name: str
    bound: tuple[int, ...]
    dtype: str
    einsum: EinSum | None = None
    inputs: tuple[str, ...] = ()
    origin: tuple[str, ...] = field(default=(), compare=False)
    places: tuple[str, ...] = field(default=(), compare=False)
    # The planner has added it as a step to a later vertex; the program does not know it.
    is_auxiliary: bool = field(default=False, compare=False)
    # How many elements it changes where it is written over one of its inputs, in a loop. If this
    # is not known, all of them.
    changed: int | None = field(default=None, compare=False)
    recurrence: Recurrence | None = None  # whose steps compute it; None: it is computed once
    known: Known | None = None  # of an input, if its elements are known
    aligned: tuple[Aligned, ...] = ()
    stored: Stored | None = field(default=None, compare=False)
    # Another result of the same function of the same matrices, which is computed with this one.
    computed_with: str = ""

    @property
    def steps(self) -> int:
        """How often it is computed."""
        return 1 if self.recurrence is None else self.recurrence.steps

    @property
    def has_steps(self) -> bool:
        """Whether many steps compute it, with all that they use in memory."""
        is_of_matrices = self.einsum is not None and self.einsum.matrix is not None
        return is_of_matrices or self.recurrence is not None

    def is_fixed(self, operand: Vertex) -> bool:
        """Return whether an operand is the same in all steps that compute it."""
        if self.recurrence is None:
            return True
        is_changing = operand.recurrence == self.recurrence
        return not is_changing and operand.name not in self.recurrence.starts

    def moves_of(self, operand: Vertex) -> int:
        """Return how often an operand moves to it."""
        return 1 if self.is_fixed(operand) else self.steps

    @property
    def is_input(self) -> bool:
        """Whether the tensor is given rather than computed."""
        return self.einsum is None

    @cached_property
    def dimension_made(self) -> Mapping[str, int]:
        """The labels that cut a dimension of the result, and this dimension."""
        found = dict(self.computed_einsum.output_dimensions)
        for each in self.aligned:
            found[each.aggregated] = found[each.scattered]
        return found

    @cached_property
    def partial_labels(self) -> tuple[str, ...]:
        """The labels of which ranks that share them make partial results."""
        aggregated = self.computed_einsum.aggregated
        if self.computed_einsum.matrix is not None:
            return ()
        return tuple(label for label in aggregated if label not in self.dimension_made)

    @property
    def computed_einsum(self) -> EinSum:
        """The EinSum of a vertex that is not an input."""
        assert self.einsum is not None, f"{self.name} is an input"
        return self.einsum

    @property
    def located_name(self) -> str:
        """The name after the place in the program, for messages, such as "job.toml:3:1: Z"."""
        return ": ".join(filter(None, (" or ".join(self.places), self.name)))

    @property
    def elements(self) -> int:
        """The number of elements of the tensor."""
        return prod(self.bound)

    def operations(self) -> int:
        """Return the number of scalar operations that compute it."""
        if self.computed_with:
            return 0
        operations = self.steps * self.computed_einsum.operations()
        if self.changed is None:
            return operations
        return operations * self.changed // max(1, self.elements)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return self.elements * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        if self.einsum is None:
            shape = f"[{', '.join(map(str, self.bound))}]" if self.bound else ""
            return f"{self.name}: {self.dtype}{shape}"
        return f"{self._repetition()}{self._assigned_element()} ← {self.einsum.show(self.inputs)}"

    @property
    def summary(self) -> str:
        """The vertex as a line for people; that of a scan in blocks is in words."""
        if self.einsum is None:
            return str(self)
        shown = self.einsum.summary(self.inputs)
        return f"{self._repetition()}{self._assigned_element()} ← {shown}"

    def _repetition(self) -> str:
        return "" if self.recurrence is None else f"{self.steps} times: "

    def _assigned_element(self) -> str:
        """Return the text Z[i,k], with extents that do not follow from operands."""
        bounded = self.computed_einsum.bounded_labels()
        labels = []
        for label, extent in zip(self.computed_einsum.output, self.bound, strict=True):
            labels.append(label if label in bounded else f"{label}:{extent}")
        return element_text(self.name, labels)


@dataclass(frozen=True)
class EinGraph:
    """Vertices in an order in which every tensor is computed before it is used.

    Inputs come first. The names of tensors are the edges.
    """

    vertices: tuple[Vertex, ...]
    outputs: tuple[str, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Vertex]:
        """The vertices by their names."""
        return {vertex.name: vertex for vertex in self.vertices}

    @cached_property
    def position(self) -> Mapping[str, int]:
        """The place of each vertex in the order."""
        return {vertex.name: number for number, vertex in enumerate(self.vertices)}

    @cached_property
    def _output_set(self) -> frozenset[str]:
        return frozenset(self.outputs)

    def is_output(self, name: str) -> bool:
        """Return whether a tensor is an output; the time does not depend on their number."""
        return name in self._output_set

    @cached_property
    def consumers(self) -> Mapping[str, tuple[str, ...]]:
        """The vertices that read each tensor, each once."""
        found: dict[str, dict[str, None]] = {vertex.name: {} for vertex in self.vertices}
        for vertex in self.vertices:
            for name in vertex.inputs:
                found[name][vertex.name] = None
        return {name: tuple(readers) for name, readers in found.items()}

    @cached_property
    def last_reads(self) -> Mapping[str, tuple[str, ...]]:
        """For each vertex, the tensors that it is the last to read; outputs are never freed.

        All steps of a recurrence read what is computed before, up to its last vertex. What is
        carried from step to step is there as long as the result, which takes its memory.
        """
        last_reader: dict[str, str] = {}
        for vertex in self.vertices:
            for name in vertex.inputs:
                last_reader[name] = vertex.name
                if vertex.recurrence not in (None, self[name].recurrence):
                    last_reader[name] = self.members[vertex.recurrence][-1].name
        for result, start in self.carried.items():
            last_reader[start] = last_reader.get(result, result)
        freed: dict[str, list[str]] = {vertex.name: [] for vertex in self.vertices}
        results = {start: result for result, start in self.carried.items()}
        for name, reader in last_reader.items():
            if not self.is_output(results.get(name, name)):
                freed[reader].append(name)
        return {name: tuple(names) for name, names in freed.items()}

    @cached_property
    def members(self) -> Mapping[Recurrence, tuple[Vertex, ...]]:
        """The vertices of each recurrence, in the order of a step."""
        found: dict[Recurrence, list[Vertex]] = {}
        for vertex in self.vertices:
            if vertex.recurrence is not None:
                found.setdefault(vertex.recurrence, []).append(vertex)
        return {recurrence: tuple(vertices) for recurrence, vertices in found.items()}

    def computed_at(self, vertex: Vertex) -> list[Vertex]:
        """Return a vertex and those that are computed with it."""
        return [vertex, *self._computed_with.get(vertex.name, ())]

    @cached_property
    def _computed_with(self) -> Mapping[str, list[Vertex]]:
        found: dict[str, list[Vertex]] = {}
        for vertex in self.vertices:
            if vertex.computed_with:
                found.setdefault(vertex.computed_with, []).append(vertex)
        return found

    @cached_property
    def carried(self) -> Mapping[str, str]:
        """The results of recurrences, and the tensors whose places and layouts they take."""
        found: dict[str, str] = {}
        for recurrence in self.members:
            found.update({result: start for start, result in recurrence.carry})
        return found

    @cached_property
    def inputs(self) -> tuple[Vertex, ...]:
        """The vertices that are given."""
        return tuple(vertex for vertex in self.vertices if vertex.is_input)

    @cached_property
    def computed(self) -> tuple[Vertex, ...]:
        """The vertices that are computed, in the order of computation."""
        return tuple(vertex for vertex in self.vertices if not vertex.is_input)

    def operations(self) -> int:
        """Return the number of scalar operations of the whole graph."""
        total = 0
        for vertex in self.vertices:
            if vertex.einsum is not None:
                total += vertex.operations()
        return total

    def __getitem__(self, name: str) -> Vertex:
        return self.by_name[name]

    def __str__(self) -> str:
        """One line for each vertex; `einmpi.language.parse.parse_graph` reads it back.

        The steps of a recurrence are for people only.
        """
        lines = [str(vertex) for vertex in self.vertices]
        lines.append(f"outputs: {', '.join(self.outputs)}")
        return "\n".join(lines)


def type_over(expression: Scalar, known: Mapping[str, Vertex]) -> Type:
    """Return the dtype of an expression over elements of known tensors."""

    def leaf(node: Scalar) -> Type:
        assert isinstance(node, Element)
        return np.dtype(known[node.tensor].dtype)

    return infer(expression, leaf)


def make_vertex(
    name: str,
    einsum: EinSum,
    inputs: tuple[str, ...],
    known: Mapping[str, Vertex],
    origin: tuple[str, ...] = (),
    places: tuple[str, ...] = (),
) -> Vertex:
    """Return a computed vertex with its bound and dtype; OperationError if it has no dtype."""
    dtype = einsum_type(einsum, [np.dtype(known[tensor].dtype) for tensor in inputs])
    return Vertex(name, einsum.bound, dtype.name, einsum, inputs, origin or (name,), places)
