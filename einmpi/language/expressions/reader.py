"""What all parts of an expression are read with: tensors, guards, names of macros, operations."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from einmpi.errors import InputError, OperationError
from einmpi.graph.arithmetic import call, call_type
from einmpi.graph.index_arithmetic import Guard
from einmpi.graph.scalar import Call, Const, Number, Scalar, labels_of
from einmpi.graph.segments import without_guard
from einmpi.language.parameters import adapting_type, with_cast_parameters
from einmpi.language.scope import Scope
from einmpi.language.symbols import SymbolTable, TypedScalar
from einmpi.language.vocabulary import call_form


@dataclass(frozen=True)
class MacroNames:
    """The names in the body of a macro; empty outside of macros.

    `values` are its argument, options and intermediate values. `labels` is what L stands for.
    `condition` says which values belong to a scattered result.
    """

    values: Mapping[str, TypedScalar] = field(default_factory=dict)
    labels: tuple[str, ...] | None = None
    condition: TypedScalar | None = None


class ExpressionReader(ABC):
    """Reads the expressions of a statement; its state is what is around the one being read.

    `scattered` has the indices left of =, each with the label that stands for it.
    """

    def __init__(
        self, symbols: SymbolTable, scattered: Mapping[str, ast.expr] | None = None
    ) -> None:
        self.symbols = symbols
        self.scattered = scattered or {}
        self.has_scattered = False  # whether an aggregation has taken them into account
        self.is_inside_scattered = False  # such an aggregation is around what is being read
        self.scattered_guard: Scalar | None = None  # its condition, one of `guards`
        self.known = symbols.known
        self.where = symbols.where
        self.macro = MacroNames()  # of the macro whose body is being read
        self.guards: list[Guard] = []  # the conditions of `where` around what is being read

    @abstractmethod
    def expression(self, node: ast.expr, scope: Scope) -> TypedScalar:
        """Return the expression of a syntax tree, adding the vertices that it needs."""

    def apply(self, op: str, arguments: Sequence[TypedScalar], node: ast.AST) -> TypedScalar:
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

    def name_value(self, value: TypedScalar, scope: Scope, node: ast.AST) -> TypedScalar:
        """Make a value that is used more than once a tensor, so that expressions do not double.

        Not if conditions of `where` around it have labels that it does not have itself: the tensor
        would be larger by these labels.
        """
        if not isinstance(value.scalar, Call):
            return value
        scalar: Scalar = value.scalar
        if self.scattered_guard is not None:
            scalar = without_guard(scalar, self.scattered_guard)
        unguarded = scalar
        for condition, _ in self.guards:
            unguarded = without_guard(unguarded, condition)
        if set(labels_of(unguarded)) != set(labels_of(scalar)):
            return value
        named = TypedScalar(scalar, value.type)
        return self.symbols.emit_temporary(named, None, (), scope, node)

    def wrong_call(self, node: ast.Call, name: str) -> InputError:
        """Return the error for a call with the wrong arguments or brackets."""
        hint = ""
        if any(keyword.arg in ("axis", "dim") for keyword in node.keywords):
            hint = f"labels take the place of an axis: {name}[j](X[i,j])"
        elif name in ("max", "min") and len(node.args) > 1:
            hint = f"{name}imum(x, y) is that of two values"
        what = f"{name} is not called like this"
        return InputError(self.where(node), what, call_form(name), hint)

    def not_a_tensor(self, node: ast.AST, name: str) -> InputError:
        """Return the error for a function that is used like a tensor."""
        return InputError(self.where(node), f"{name} is a function", f"a call: {call_form(name)}")


def constant(value: Number) -> TypedScalar:
    """Return a constant as an expression; its type is one of Python."""
    return TypedScalar(Const(value), type(value))
