"""The words of the language as they are now: records may be registered at run time."""

from __future__ import annotations

import ast
from math import inf, nan, pi

from einmpi.graph.aggregations import AGGREGATIONS, symbols
from einmpi.graph.operations import OPERATIONS, functions
from einmpi.language.macros import MACROS, SCANS

CONSTANTS = {"inf": inf, "nan": nan, "pi": pi}
GRADIENT = "grad"  # can be called, and may still name a tensor


def callables() -> tuple[str, ...]:
    """Return the names that can be called: aggregations, scans, macros, functions and grad."""
    return (*AGGREGATIONS, *SCANS, *MACROS, *functions(), GRADIENT)


def is_callable(name: str) -> bool:
    """Return whether a name can be called: an aggregation, a scan, a macro or a function."""
    if name in AGGREGATIONS or name in SCANS or name in MACROS:
        return True
    return name in OPERATIONS and OPERATIONS[name].is_function


def is_reserved(name: str) -> bool:
    """Return whether a name is a word of the language, which cannot name a tensor or a size."""
    return is_callable(name) or name in CONSTANTS or name in symbols()


def aggregation_named(name: str) -> str | None:
    """Return the aggregation with this name or symbol, None if there is none."""
    if name in AGGREGATIONS:
        return name
    return symbols().get(name)


def binds_labels(name: str) -> bool:
    """Return whether a call of this name binds labels: an aggregation or a macro that reduces."""
    if name in MACROS:
        return MACROS[name].reduces
    return aggregation_named(name) is not None


def called_name(node: ast.AST) -> tuple[str, ast.expr | None] | None:
    """Return (name, labels in brackets) of name(...) or name[labels](...), else None."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name, None
        case ast.Call(func=ast.Subscript(value=ast.Name(id=name), slice=labels)):
            return name, labels
    return None


def call_form(name: str) -> str:
    """Return how a function, an aggregation, a scan or a macro is called, for messages."""
    if name == GRADIENT:
        return "grad(loss, W[labels])"
    if name in SCANS:
        return f"{name}[label](expression)"
    if name in OPERATIONS:
        return OPERATIONS[name].call_text()
    needs_labels = name in MACROS and MACROS[name].needs_labels
    return f"{name}[labels](expression)" if needs_labels else f"{name}(expression)"
