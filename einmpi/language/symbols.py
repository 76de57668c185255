"""The symbol table of a program: its tensors, the extents of labels, and what is rejected."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from einmpi.errors import InputError, OperationError, one_of
from einmpi.graph.aggregations import AGGREGATIONS, with_empty_value
from einmpi.graph.arithmetic import call, compute_types, result_type
from einmpi.graph.dtypes import DTYPES, Type
from einmpi.graph.eingraph import Vertex, make_vertex
from einmpi.graph.einsum import make_einsum
from einmpi.graph.operations import OPERATIONS
from einmpi.graph.scalar import (
    MAX_COUNT,
    MAX_EXTENT,
    Const,
    Element,
    Names,
    Scalar,
    labels_of,
    unique,
)
from einmpi.language.indices import Reach, affine_of_syntax, largest_extent
from einmpi.language.macros import called_name, is_reserved
from einmpi.language.scope import Scope, occurrences, reaches_in
from einmpi.language.syntax import Source, Statement, integer

_EXTENTS = f"an extent from 0 to 2**39 = {MAX_EXTENT}"


class TypedScalar(NamedTuple):
    """An expression and its dtype."""

    scalar: Scalar
    type: Type


class SymbolTable:
    """The tensors known so far, by name. New ones are added in the order they are needed."""

    def __init__(
        self,
        source: Source,
        sizes: Mapping[str, int],
        names: set[str],
        parameters: Mapping[str, type] | None = None,
    ) -> None:
        self.source = source
        self.sizes = sizes
        # Inputs that are numbers: like constants, they take the dtype of the other operand.
        self.parameters = parameters or {}
        self.names = Names(names)
        self.known: dict[str, Vertex] = {}
        self.current: Statement  # the statement being read: temporaries are named after it
        self.slices: dict[str, str] = {}  # vertex of a slice → its text in the program
        self._being_inferred: list[str] = []  # labels whose extent is being looked for
        self.site: ast.AST | None = None  # the macro call being expanded: errors point at it
        self.differentiated: Mapping[str, Sequence[str]] = {}  # loss → tensors that grad is by
        self.gradients: dict[tuple[str, str], str] = {}  # loss, tensor → the gradient
        # Tensors that the statements being read define, and read at other indices.
        self.recurring: frozenset[str] = frozenset()

    @property
    def is_differentiated(self) -> bool:
        """Whether the program has a gradient."""
        return len(self.differentiated) > 0

    def where(self, node: ast.AST) -> str:
        """Return the position to report for a node."""
        return self.source.at(self.site or node)

    def written(self, node: ast.AST) -> str:
        """Return the text of a syntax tree, with slices as they are in the program."""
        renamed: list[tuple[ast.Name, str]] = []
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and part.id in self.slices:
                renamed.append((part, part.id))
        for part, name in renamed:
            part.id = self.slices[name]
        text = ast.unparse(node)
        for part, name in renamed:
            part.id = name
        return text

    def written_name(self, tensor: str) -> str:
        """Return the name of a tensor, or the slice that it stands for."""
        return self.slices.get(tensor, tensor)

    # ---- tensors --------------------------------------------------------------------------------

    def add_input(self, name: str, shape: Sequence[int], dtype: str, place: str) -> None:
        """Add an input that is given at `place`."""
        if dtype not in DTYPES:
            what = f"dtype {dtype!r} of {name} is not supported"
            raise InputError(place, what, one_of(tuple(DTYPES), dtype))
        if not name.isidentifier():
            raise InputError(place, f"{name!r} cannot name a tensor", "a Python identifier")
        if is_reserved(name):
            what = f"{name} is a word of the language and cannot name a tensor"
            raise InputError(place, what, "another name")
        if name in self.sizes:
            what = f"{name} is a size and cannot name a tensor"
            raise InputError(place, what, "another name")
        self._add(Vertex(name, tuple(int(extent) for extent in shape), dtype), lambda: place)

    def _add(self, vertex: Vertex, place: Callable[[], str]) -> None:
        """Add a vertex, unless it is too large. The place is looked up only for an error."""
        for extent in vertex.bound:
            if not 0 <= extent <= MAX_EXTENT:
                raise InputError(place(), f"{vertex.name} has extent {extent}", _EXTENTS)
        if vertex.nbytes >= MAX_COUNT:
            what = f"{vertex.name} would have {vertex.elements} elements"
            raise InputError(place(), what, "less than 2**63 bytes")
        self.known[vertex.name] = vertex

    def emit(
        self,
        name: str,
        output: Sequence[str],
        value: TypedScalar,
        aggregation: str | None,
        aggregated: Sequence[str],
        scope: Scope,
        node: ast.AST,
    ) -> TypedScalar:
        """Add the vertex of an expression and return the element that reads it."""
        extent = {label: self.extent(scope, label, node) for label in (*output, *aggregated)}
        einsum, tensors = make_einsum(output, value.scalar, aggregation, aggregated, extent)
        if aggregation is not None and 0 not in einsum.bound:
            self._check_not_empty(aggregation, aggregated, extent, node)
        try:
            places = (self.source.at(self.current.node),)
            vertex = make_vertex(name, einsum, tensors, self.known, places=places)
        except OperationError as error:
            raise error.at(self.where(node)) from None
        self._add(vertex, lambda: self.where(node))
        return TypedScalar(Element(name, tuple(output)), np.dtype(vertex.dtype))

    def _check_not_empty(
        self, aggregation: str, aggregated: Sequence[str], extent: Mapping[str, int], node: ast.AST
    ) -> None:
        """Refuse an aggregation of no values that has no result."""
        if AGGREGATIONS[aggregation].empty is not None:
            return
        called = called_name(self.site) if self.site is not None else None
        name = called[0] if called is not None else aggregation
        for label in aggregated:
            if extent[label] == 0:
                raise InputError(
                    self.where(node),
                    f"{name} over {label}, which has extent 0",
                    "an extent of at least 1",
                    f"only {', '.join(with_empty_value())} have a value there",
                )

    def emit_temporary(
        self,
        value: TypedScalar,
        aggregation: str | None,
        aggregated: Sequence[str],
        scope: Scope,
        node: ast.AST,
        first_labels: Sequence[str] = (),
    ) -> TypedScalar:
        """Add a vertex named after the statement being read.

        `first_labels` come first in it, if it has them.
        """
        name = self.names.take_new(self.current.name)
        labels = labels_of(value.scalar)
        first = [label for label in first_labels if label in labels]
        output = [label for label in unique(first, labels) if label not in aggregated]
        return self.emit(name, output, value, aggregation, aggregated, scope, node)

    # ---- labels ---------------------------------------------------------------------------------

    def open_scope(
        self,
        parent: Scope | None,
        bound: Sequence[tuple[str, ast.expr | None]],
        body: ast.AST,
        guarded: bool = False,
    ) -> Scope:
        """Return a new scope over `body`, with the labels that it binds and their written extents.

        Labels that occur directly in it and that no scope binds are its loose labels. `guarded`
        says that the body is inside a branch of `where`.
        """
        scope = Scope(parent, (label for label, _ in bound))
        scope.written = {label for label, extent in bound if extent is not None}
        found = occurrences(body, self.known)
        for entry in found:
            if not entry.nested and scope.owner(entry.label) is None:
                scope.loose.setdefault(entry.label, entry.node)
        scope.reaches = reaches_in(body, self.known, scope.sees, self._written_extent)
        for label, node in bound:
            if node is not None and any(reach.mentions(label) for reach in scope.reaches):
                # As in y[i:n-1] = x[i+1] - x[i]: the label need not go through all of x.
                scope.narrowed.add(label)
                self._fix_extent(scope, label, node)
        for entry in found:
            owner = scope.owner(entry.label)
            if owner is None or entry.extent is None:
                continue
            if (entry.guarded or guarded) and entry.label in owner.written:
                continue  # `where` may read less of the tensor than the label goes through
            self._register(owner, entry.label, entry.extent, entry.tensor, entry.node)
        for label, node in bound:
            if node is not None:
                self._fix_extent(scope, label, node)
        return scope

    def _written_extent(self, node: ast.expr) -> int:
        return integer(self.source, node, self.sizes)

    def _fix_extent(self, scope: Scope, label: str, node: ast.expr) -> None:
        """Register the extent that is written as label:extent."""
        extent = integer(self.source, node, self.sizes)
        if not 0 <= extent <= MAX_EXTENT:
            raise InputError(self.where(node), f"label {label} has extent {extent}", _EXTENTS)
        self._register(scope, label, extent, f"{label}:{ast.unparse(node)}", node)

    def _register(
        self, scope: Scope, label: str, extent: int, place: ast.AST | str, node: ast.AST
    ) -> None:
        is_fixed = label in scope.narrowed and label in scope.extents
        if is_fixed and extent >= scope.extents[label][0]:
            return
        conflict = scope.register(label, extent, place, self.written)
        if conflict:
            hint = ""
            if isinstance(place, str) and extent < scope.extents[label][0]:
                hint = f"a slice such as x[:{extent}][{label}] reads less of a tensor"
            raise InputError(self.where(node), conflict, "the same extent everywhere", hint)

    def extent(self, scope: Scope, label: str, node: ast.AST) -> int:
        """Return the extent of a label."""
        owner = scope.owner(label)
        if owner is not None and label in owner.extents:
            return owner.extents[label][0]
        if label in self.sizes:
            return self.sizes[label]
        inferred = self._inferred_extent(scope, label)
        if inferred is not None:
            return inferred
        what = f"label {label} has no extent: no tensor here is indexed by it"
        raise InputError(self.where(node), what, f"an extent, written as {label}:EXTENT")

    def _inferred_extent(self, scope: Scope, label: str) -> int | None:
        """Return the largest extent with which indices such as x[i+k] stay inside of their tensors.

        None if there is no such index, or an extent of another label in it is not known.
        """
        if label in self._being_inferred:
            return None
        self._being_inferred.append(label)
        best = None
        owner = scope.owner(label)
        current: Scope | None = scope if owner is not None else None
        while current is not None:
            for reach in current.reaches:
                extent = self._extent_by(reach, scope, label)
                if extent is not None and (best is None or extent < best[0]):
                    best = extent, reach.tensor
            current = current.parent if current is not owner else None
        self._being_inferred.pop()
        if best is None or owner is None:
            return None
        if best[0] == 0:
            tensor = self.written(best[1])
            what = f"no value of label {label} keeps {tensor} inside of its tensor"
            expected = "a longer tensor or smaller extents"
            hint = f"{label} starts at 0, and where(...) guards an index that leaves its tensor"
            raise InputError(self.where(best[1]), what, expected, hint)
        owner.extents[label] = best
        return best[0]

    def _extent_by(self, reach: Reach, scope: Scope, label: str) -> int | None:
        """Return the largest extent of a label that one index allows; None if it says nothing."""
        if reach.guarded or not reach.mentions(label):
            return None

        def is_label(name: str) -> bool:
            return name in reach.inner or scope.sees(name)

        affine = affine_of_syntax(reach.node, is_label, self.sizes)
        if affine is None or label not in dict(affine.terms):
            return None
        others = {}
        for other, _ in affine.terms:
            if other == label:
                continue
            extent = reach.inner.get(other)
            if other not in reach.inner:
                try:
                    extent = self.extent(scope, other, reach.node)
                except InputError:
                    return None
            if extent is None:
                return None
            others[other] = extent
        return largest_extent(affine, label, others, reach.extent)

    def refuse_repeated(self, labels: Sequence[str], place: str, node: ast.AST) -> None:
        """Refuse a label that is listed twice."""
        for label in labels:
            if labels.count(label) > 1:
                what = f"label {label} occurs twice in {place}"
                raise InputError(self.where(node), what, "each label once")

    def refuse_loose(self, scope: Scope) -> None:
        """Refuse labels that are neither in the output nor aggregated: no sum is implicit."""
        top = scope.top()
        for label, node in top.loose.items():
            names = ", ".join(AGGREGATIONS)
            raise InputError(
                self.source.at(node),
                f"label {label} is neither in the output {self.current.target} nor aggregated",
                f"{label} in the output, or one of {names} over {label}",
            )


# ---- parameters ----------------------------------------------------------------------------------
#
# The dtypes of parameters: like constants, they take the dtype of what they are combined with.


# The types of Python that adapt like those of constants, by the kind of a dtype.
_PYTHON_TYPES: dict[str, type] = {"b": bool, "i": int, "u": int, "f": float, "c": complex}


def with_cast_parameters(op: str, arguments: Sequence[TypedScalar]) -> Sequence[TypedScalar]:
    """Cast parameters, and expressions of nothing else, to the dtype in which `op` computes.

    Like constants they have a type of Python, which takes the dtype of the other operands.
    """
    kinds = tuple(argument.type for argument in arguments)
    are_parameters = [_is_parameter(argument) for argument in arguments]
    if not any(are_parameters) or all(isinstance(kind, type) for kind in kinds):
        return arguments
    if OPERATIONS[op].is_cast:
        return arguments
    result_type(op, kinds)  # raises OperationError for arguments that the operation rejects
    found = []
    for number, dtype in enumerate(compute_types(op, kinds)):
        argument = arguments[number]
        if are_parameters[number]:
            scalar = argument.scalar
            if np.dtype(argument.type).name != dtype:
                scalar = call(dtype, scalar)
            argument = TypedScalar(scalar, np.dtype(dtype))
        found.append(argument)
    return found


def _is_parameter(argument: TypedScalar) -> bool:
    return isinstance(argument.type, type) and not isinstance(argument.scalar, Const)


def adapting_type(op: str, kinds: Sequence[Type], result: Type) -> Type:
    """Return the type of a result: a type of Python if all arguments have one."""
    if all(isinstance(kind, type) for kind in kinds) and not OPERATIONS[op].is_cast:
        return _PYTHON_TYPES[np.dtype(result).kind]
    return result
