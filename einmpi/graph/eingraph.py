"""EinGraph: a directed acyclic graph of EinSums, with bounds and dtypes inferred (paper, section 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np

from einmpi.graph.einsum import EinSum, einsum_type


@dataclass(frozen=True)
class Vertex:
    """The paper's triple (bound, EinSum, inputs), with a name and a dtype. An input has no EinSum.

    `origin` names the tensors of the program that were fused into this vertex, itself last.
    """

    name: str
    bound: tuple[int, ...]
    dtype: str
    einsum: EinSum | None = None
    inputs: tuple[str, ...] = ()
    origin: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_input(self) -> bool:
        return self.einsum is None

    @property
    def elements(self) -> int:
        return prod(self.bound)

    @property
    def nbytes(self) -> int:
        return self.elements * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        if self.einsum is None:
            return f"{self.name}: {self.dtype}" + (
                f"[{', '.join(map(str, self.bound))}]" if self.bound else ""
            )
        known = self.einsum.bounded_labels()
        labels = [
            x if x in known else f"{x}:{e}"
            for x, e in zip(self.einsum.output, self.bound, strict=True)
        ]
        target = f"{self.name}[{','.join(labels)}]" if labels else self.name
        return f"{target} ← {self.einsum.show(self.inputs)}"


@dataclass(frozen=True)
class EinGraph:
    """Vertices in an order in which every tensor is made before it is used; inputs first. Names are the edges."""

    vertices: tuple[Vertex, ...]
    outputs: tuple[str, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Vertex]:
        return {vertex.name: vertex for vertex in self.vertices}

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
        """For each vertex the tensors that nobody reads after it and that are no outputs: they can go then."""
        reader = {name: vertex.name for vertex in self.vertices for name in vertex.inputs}
        ends: dict[str, list[str]] = {vertex.name: [] for vertex in self.vertices}
        for name, last in reader.items():
            if name not in self.outputs:
                ends[last].append(name)
        return {name: tuple(names) for name, names in ends.items()}

    @cached_property
    def inputs(self) -> tuple[Vertex, ...]:
        return tuple(vertex for vertex in self.vertices if vertex.is_input)

    @property
    def computed(self) -> tuple[Vertex, ...]:
        return tuple(vertex for vertex in self.vertices if not vertex.is_input)

    def operations(self) -> int:
        """Scalar operations of the whole graph."""
        return sum(
            vertex.einsum.operations() for vertex in self.vertices if vertex.einsum is not None
        )

    def __getitem__(self, name: str) -> Vertex:
        return self.by_name[name]

    def __str__(self) -> str:
        """One line a vertex; `einmpi.language.parse.parse_graph` reads it back."""
        lines = [str(vertex) for vertex in self.vertices]
        return "\n".join([*lines, f"outputs: {', '.join(self.outputs)}"])


def make_vertex(
    name: str,
    einsum: EinSum,
    inputs: tuple[str, ...],
    known: Mapping[str, Vertex],
    origin: tuple[str, ...] = (),
) -> Vertex:
    """A computed vertex, with its bound and dtype inferred; TypeError where the dtypes do not go together."""
    dtype = einsum_type(einsum, [np.dtype(known[tensor].dtype) for tensor in inputs])
    return Vertex(name, einsum.bound, dtype.name, einsum, inputs, origin or (name,))
