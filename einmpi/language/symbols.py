"""The vertices of a program, one after another: names, labels and their extents, dtypes, and what is refused."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from einmpi.errors import InputError, OperationError, one_of
from einmpi.graph.aggregations import AGGREGATIONS, with_empty_value
from einmpi.graph.dtypes import DTYPES, Type, check_installed, cpu_dtypes
from einmpi.graph.eingraph import Vertex, make_vertex
from einmpi.graph.einsum import make_einsum
from einmpi.graph.labels import MAX_EXTENT, fresh
from einmpi.graph.scalar import Element, Scalar, labels_of
from einmpi.language.scope import Scope, occurrences
from einmpi.language.syntax import Source, Statement, integer
from einmpi.language.vocabulary import is_reserved

Piece: TypeAlias = tuple[Scalar, Type]  # an expression and its dtype


class Vertices:
    """The tensors that are known so far, by name; new ones are added in the order in which they are needed."""

    def __init__(self, source: Source, sizes: Mapping[str, int], names: set[str]) -> None:
        self.source, self.sizes = source, sizes
        self.taken = set(names)
        self.known: dict[str, Vertex] = {}
        self.current: Statement  # the one being built: it names the temporaries
        self.site: ast.AST | None = None  # the macro call being expanded: errors point at it

    def where(self, node: ast.AST) -> str:
        return self.source.at(self.site or node)

    # ---- tensors ----------------------------------------------------------------------------------------------------

    def add_input(self, name: str, shape: Sequence[int], dtype: str, place: str) -> None:
        check_installed(place, dtype)
        if dtype not in DTYPES:
            raise InputError(
                place, f"dtype {dtype!r} of {name} is not supported", one_of(cpu_dtypes(), dtype)
            )
        if not name.isidentifier() or is_reserved(name) or name in self.sizes:
            raise InputError(
                place, f"{name!r} cannot name a tensor", "a name that is no size and no function"
            )
        self.add(Vertex(name, tuple(int(extent) for extent in shape), dtype), place)

    def add(self, vertex: Vertex, place: str) -> None:
        for extent in vertex.bound:
            if not 0 <= extent <= MAX_EXTENT:
                raise InputError(
                    place, f"{vertex.name} has extent {extent}", f"0 to 2**39 = {MAX_EXTENT}"
                )
        if vertex.nbytes >= 2**63:
            raise InputError(
                place,
                f"{vertex.name} would have {vertex.elements} elements",
                "less than 2**63 bytes",
            )
        self.known[vertex.name] = vertex

    def emit(
        self,
        name: str,
        output: Sequence[str],
        piece: Piece,
        aggregation: str | None,
        aggregated: Sequence[str],
        scope: Scope,
        node: ast.AST,
    ) -> Piece:
        extent = {label: self.extent(scope, label, node) for label in (*output, *aggregated)}
        einsum, tensors = make_einsum(output, piece[0], aggregation, aggregated, extent)
        empty = [label for label in aggregated if extent[label] == 0]
        if (
            empty
            and aggregation
            and AGGREGATIONS[aggregation].empty is None
            and 0 not in einsum.bound
        ):
            raise InputError(
                self.where(node),
                f"{aggregation} over {empty[0]}, which has extent 0",
                "an extent of at least 1",
                f"only {', '.join(with_empty_value())} have a value for nothing",
            )
        try:
            vertex = make_vertex(name, einsum, tensors, self.known)
        except OperationError as error:
            raise error.at(self.where(node)) from None
        self.add(vertex, self.where(node))
        return Element(name, tuple(output)), np.dtype(vertex.dtype)

    def emit_temporary(
        self,
        piece: Piece,
        aggregation: str | None,
        aggregated: Sequence[str],
        scope: Scope,
        node: ast.AST,
    ) -> Piece:
        name = fresh(self.current.name, self.taken)
        self.taken.add(name)
        output = [label for label in labels_of(piece[0]) if label not in aggregated]
        return self.emit(name, output, piece, aggregation, aggregated, scope, node)

    # ---- labels -----------------------------------------------------------------------------------------------------

    def open(self, parent: Scope | None, bound: Iterable[str], body: ast.AST) -> Scope:
        """A new scope over `body`; labels that occur directly in it and that no scope binds are `loose`."""
        scope = Scope(parent, bound)
        found = occurrences(body, self.known)
        for entry in found:
            if not entry.nested and scope.owner(entry.label) is None:
                scope.loose.setdefault(entry.label, entry.node)
        for entry in found:
            owner = scope.owner(entry.label)
            if owner is not None and entry.extent is not None:
                clash = owner.register(entry.label, entry.extent, entry.tensor)
                if clash:
                    raise InputError(self.where(entry.node), clash, "one extent a label")
        return scope

    def fix_extent(self, scope: Scope, label: str, node: ast.expr | None) -> None:
        """The extent written as label:extent."""
        if node is not None:
            extent = integer(self.source, node, self.sizes)
            if not 0 <= extent <= MAX_EXTENT:
                raise InputError(
                    self.where(node),
                    f"label {label} has extent {extent}",
                    f"0 to 2**39 = {MAX_EXTENT}",
                )
            clash = scope.register(label, extent, f"{label}:{ast.unparse(node)}")
            if clash:
                raise InputError(self.where(node), clash, "one extent a label")

    def extent(self, scope: Scope, label: str, node: ast.AST) -> int:
        owner = scope.owner(label)
        if owner is not None and label in owner.extents:
            return owner.extents[label][0]
        if label in self.sizes:
            return self.sizes[label]
        raise InputError(
            self.where(node),
            f"label {label} has no extent: no tensor here is indexed by it",
            f"write {label}:EXTENT",
        )

    def refuse_twice(self, labels: Sequence[str], where: str, node: ast.AST) -> None:
        for label in labels:
            if labels.count(label) > 1:
                raise InputError(
                    self.where(node), f"label {label} stands twice in {where}", "each label once"
                )

    def refuse_loose(self, scope: Scope) -> None:
        """A label left over that nobody aggregates is an error, never a silent sum."""
        top = scope.top()
        for label, node in top.loose.items():
            shown = (
                f"{self.current.name}[{','.join(top.bound)}]" if top.bound else self.current.name
            )
            raise InputError(
                self.source.at(node),
                f"label {label} is neither in the output {shown} nor aggregated",
                f"add it to the output or aggregate it with {', '.join(AGGREGATIONS)}",
            )
