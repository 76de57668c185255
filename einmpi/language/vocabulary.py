"""The words of the language, and how a call of one is written."""

from __future__ import annotations

import ast
from math import inf, nan, pi

from einmpi.graph.einsum import AGGREGATIONS, SYMBOLS
from einmpi.graph.scalar import FUNCTIONS
from einmpi.language.macros import MACROS

CONSTANTS = {"inf": inf, "nan": nan, "pi": pi}
REDUCTIONS = {
    **{name: name for name in AGGREGATIONS},
    **SYMBOLS,
    **{n: n for n, m in MACROS.items() if m.reduces},
}
CALLABLES = (*AGGREGATIONS, *MACROS, *FUNCTIONS)
RESERVED = frozenset([*CALLABLES, *SYMBOLS, *CONSTANTS])


def called_name(node: ast.AST) -> tuple[str, ast.expr | None] | None:
    """(name, labels in brackets) of name(...) or name[labels](...)."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name, None
        case ast.Call(func=ast.Subscript(value=ast.Name(id=name), slice=labels)):
            return name, labels
    return None


def how_to_call(name: str) -> str:
    """How a function is written."""
    labels = "[labels]" if name in MACROS and MACROS[name].needs_labels else ""
    return f"{name}{labels}(...)"
