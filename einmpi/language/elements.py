"""Names and elements in expressions: what they mean, and indices that stay inside of tensors."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isinf

import numpy as np

from einmpi.errors import InputError, OperationError, nearest_of
from einmpi.graph.arithmetic import call, call_type
from einmpi.graph.eingraph import Vertex
from einmpi.graph.index_arithmetic import arithmetic_labels, interval_of
from einmpi.graph.scalar import (
    Call,
    Const,
    Element,
    Index,
    Scalar,
    labels_of,
)
from einmpi.language.indices import (
    Guard,
    clamped,
    index_from_start,
    is_guarded,
    is_remainder,
    reach_of_branch,
    stays_inside,
)
from einmpi.language.parameters import adapting_type, with_cast_parameters
from einmpi.language.scope import Scope
from einmpi.language.symbols import SymbolTable, TypedScalar
from einmpi.language.syntax import entries
from einmpi.language.vocabulary import (
    CONSTANTS,
    call_form,
    is_callable,
)


@dataclass(frozen=True)
class MacroNames:
    """The names in the body of a macro; empty outside of macros.

    `values` are its argument, options and intermediate values. `labels` is what L stands for.
    `condition` says which values belong to a scattered result.
    """

    values: Mapping[str, TypedScalar] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None
    condition: TypedScalar | None = None


OUTSIDE_MACROS = MacroNames()


class Elements(ABC):
    """Reads numbers, names and elements of the tensors of a symbol table.

    Expressions inside of indices are left to `expression`, which a subclass adds.
    """

    def __init__(self, symbols: SymbolTable) -> None:
        self.symbols = symbols
        self.known = symbols.known
        self.where = symbols.where
        self.guards: list[Guard] = []  # the conditions of `where` around what is being read
        # The condition of the scattered aggregation around what is being read, one of `guards`.
        self.scattered_guard: Scalar | None = None

    @abstractmethod
    def expression(
        self, node: ast.expr, scope: Scope, macro: MacroNames = OUTSIDE_MACROS
    ) -> TypedScalar:
        """Return the expression of a syntax tree, adding the vertices that it needs."""

    def _apply(self, op: str, arguments: Sequence[TypedScalar], node: ast.AST) -> TypedScalar:
        """Return an operation on expressions; constants are folded."""
        try:
            arguments = with_cast_parameters(op, arguments)
            scalars = tuple(argument.scalar for argument in arguments)
            result = call(op, *scalars)
            if isinstance(result, Const):
                return TypedScalar(result, type(result.value))
            kinds = [argument.type for argument in arguments]
            found = call_type(op, scalars, kinds)
            return TypedScalar(result, adapting_type(op, kinds, found))
        except OperationError as error:
            raise error.at(self.where(node)) from None

    def _constant(self, node: ast.Constant) -> TypedScalar:
        value = node.value
        assert isinstance(value, bool | int | float | complex)
        if isinstance(value, complex) and isinf(value.imag):
            raise InputError(self.where(node), "this number is too large", "a finite number")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            what = "this integer is too large"
            raise InputError(self.where(node), what, "an integer less than 2**63")
        return TypedScalar(Const(value), type(value))

    def _name(self, node: ast.Name, scope: Scope, macro: MacroNames) -> TypedScalar:
        """Return what a name without brackets means: a label, a tensor, a size or a constant."""
        name = node.id
        sizes = self.symbols.sizes
        if name in macro.values:
            return macro.values[name]
        tensor = self.known.get(name)
        if scope.sees(name):
            if tensor is not None and not tensor.bound:
                what = f"{name} is both a label and a tensor here"
                raise InputError(self.where(node), what, "two different names")
            return TypedScalar(Index(name), np.dtype(np.int64))
        if tensor is not None:
            if tensor.bound:
                labels = ", ".join("ijklmnop"[: len(tensor.bound)])
                written = self.symbols.written_name(name)
                what = f"{written} has no labels here"
                raise InputError(self.where(node), what, f"labels, such as {written}[{labels}]")
            if name in self.symbols.parameters:
                return TypedScalar(Element(name, ()), self.symbols.parameters[name])
            return TypedScalar(Element(name, ()), np.dtype(tensor.dtype))
        if name in sizes:
            return TypedScalar(Const(sizes[name]), int)
        if name in CONSTANTS:
            return TypedScalar(Const(CONSTANTS[name]), float)
        if is_callable(name):
            raise self._not_a_tensor(node, name)
        scalars = [vertex.name for vertex in self.known.values() if not vertex.bound]
        expected = nearest_of([*scalars, *sizes, *CONSTANTS], name)
        raise InputError(self.where(node), f"unknown name {name!r}", expected)

    def _not_a_tensor(self, node: ast.AST, name: str) -> InputError:
        return InputError(self.where(node), f"{name} is a function", f"a call: {call_form(name)}")

    def _element(self, node: ast.Subscript, scope: Scope, macro: MacroNames) -> TypedScalar:
        assert isinstance(node.value, ast.Name)
        name = node.value.id
        if is_callable(name):
            raise self._not_a_tensor(node, name)
        if name not in self.known:
            raise InputError(
                self.where(node), f"unknown tensor {name!r}", nearest_of(self.known, name)
            )
        tensor = self.known[name]
        parts = entries(node.slice)
        if len(parts) != len(tensor.bound):
            what = f"{self.symbols.written(node)} has the wrong number of indices"
            written = self.symbols.written_name(name)
            expected = f"{len(tensor.bound)}, one for each dimension of {written}"
            raise InputError(self.where(node), what, expected)
        index: list[str | Scalar] = []
        for part, extent in zip(parts, tensor.bound, strict=True):
            if not isinstance(part, ast.Name):
                index.append(self._computed_index(part, extent, scope, macro))
            elif self._has_other_extent(part.id, extent, scope):
                at_label = Call("+", (Index(part.id), Const(0)))
                index.append(self._checked_index(at_label, extent, scope, part))
            else:
                index.append(part.id)
        is_guarded_by_where = any(c is not self.scattered_guard for c, _ in self.guards)
        if 0 in tensor.bound and is_guarded_by_where:
            return self._element_of_empty(tensor, index, scope, node)
        return TypedScalar(Element(name, tuple(index)), np.dtype(tensor.dtype))

    def _element_of_empty(
        self, tensor: Vertex, index: list[str | Scalar], scope: Scope, node: ast.AST
    ) -> TypedScalar:
        """Return an element of a tensor without elements, by an index that a condition guards.

        It is read from a tensor with one element instead, a sum of nothing. Where the condition
        holds after all, the index is 1 and out of range.
        """
        symbols = self.symbols
        empty: list[str] = []
        kept: list[str] = []
        outside: Scalar = Const(1)
        own_index: list[str | Scalar] = []
        new_index: list[str | Scalar] = []
        own = Scope(None, [symbols.names.take_new("slice") for _ in index])
        for label, entry, extent in zip(own.bound, index, tensor.bound, strict=True):
            own.register(label, extent, label)
            own_index.append(label)
            if extent > 0 or isinstance(entry, str) or self._goes_through_none(entry, scope, node):
                kept.append(label)
                new_index.append(entry)
                continue
            empty.append(label)
            if arithmetic_labels(entry) is None:  # values decide, and they remain in use
                outside = call("maximum", outside, entry)
        if not empty:
            return TypedScalar(Element(tensor.name, tuple(index)), np.dtype(tensor.dtype))
        single = symbols.names.take_new("slice")
        own.bound = (*own.bound, single)
        own.register(single, 1, single)
        name = symbols.names.take_new(symbols.current.name)
        symbols.slices[name] = symbols.written_name(tensor.name)
        values = TypedScalar(Element(tensor.name, tuple(own_index)), np.dtype(tensor.dtype))
        aggregation = "any" if tensor.dtype == "bool" else "sum"
        made = symbols.emit(name, (single, *kept), values, aggregation, empty, own, node)
        element = Element(name, (self._guarded(outside), *new_index))
        if made.type == values.type:
            return TypedScalar(element, values.type)
        return TypedScalar(Call(tensor.dtype, (element,)), values.type)

    def _goes_through_none(self, entry: Scalar, scope: Scope, node: ast.AST) -> bool:
        """Return whether an index has no values, because one of its labels has none."""
        return any(self.symbols.extent(scope, label, node) == 0 for label in labels_of(entry))

    def _has_other_extent(self, label: str, extent: int, scope: Scope) -> bool:
        """Return whether a label is known to go through less, or more, than this dimension."""
        owner = scope.owner(label)
        if owner is None or label not in owner.extents:
            return False
        return owner.extents[label][0] != extent

    # ---- computed indices ------------------------------------------------------------------------

    def _computed_index(
        self, node: ast.expr, extent: int, scope: Scope, macro: MacroNames
    ) -> Scalar:
        """Return an index that is computed: by a tensor, by arithmetic on labels, or a constant."""
        scalar, kind = self.expression(node, scope, macro)
        dtype = np.dtype(kind)
        if dtype.kind not in "iu":
            what = f"the index {self.symbols.written(node)} is {dtype.name}"
            raise InputError(self.where(node), what, "an integer")
        if isinstance(scalar, Const):
            return Const(index_from_start(self.where(node), int(scalar.value.real), extent))
        return self._checked_index(scalar, extent, scope, node)

    def _checked_index(self, scalar: Scalar, extent: int, scope: Scope, node: ast.expr) -> Scalar:
        """Return an index that stays inside of its dimension where it is used, or raise."""
        labels = arithmetic_labels(scalar)
        if labels is None:
            return scalar if is_remainder(scalar, extent) else self._guarded(scalar)
        bounds = {}
        for label in labels:
            label_extent = self.symbols.extent(scope, label, node)
            if label_extent == 0:
                return scalar  # nothing is read
            bounds[label] = 0, label_extent - 1
        reached = interval_of(scalar, bounds)
        if reached is None:  # it may wrap around
            return self._guarded(scalar)
        low, high = reached
        if low >= 0 and high < extent:
            return scalar
        if stays_inside(scalar, bounds, self.guards, extent):
            return clamped(scalar, low, high, extent)
        what = f"the index {self.symbols.written(node)} goes from {low} to {high}"
        hint = "give its labels extents, such as i:n-1, or use where(i > 0, ..., ...)"
        if self.guards:
            taken = reach_of_branch(scalar, bounds, self.guards)
            if taken is None or extent == 0:
                return self._guarded(scalar)  # it depends on values, and is checked in the run
            what = f"the index {self.symbols.written(node)} goes from {taken[0]} to {taken[1]}"
            hint = "the condition of where has to exclude the rest"
        raise InputError(self.where(node), what, f"0 to {extent - 1}", hint)

    def _guarded(self, index: Scalar) -> Scalar:
        """Return an index that is 0 where the conditions of `where` around it do not hold."""
        if is_guarded(index, self.guards):
            return index
        for condition, holds in self.guards:
            if holds:
                index = Call("where", (condition, index, Const(0)))
            else:
                index = Call("where", (condition, Const(0), index))
        return index
