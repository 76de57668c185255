"""Statements that are a function of whole matrices, such as Q[i,k], R[k,j] = qr(A[i,j])."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import numpy as np

from einmpi.errors import InputError
from einmpi.graph.matrices import MATRIX_FUNCTIONS, MATRIX_RESULTS, MatrixFunction, result_names
from einmpi.graph.scalar import Call, Element
from einmpi.language.macros import called_name
from einmpi.language.scope import Scope
from einmpi.language.symbols import SymbolTable, TypedScalar
from einmpi.language.syntax import Statement, entries

Letters = dict[str, tuple[str, int]]  # the label and the extent of each letter of a function


def is_of_matrices(node: ast.expr) -> bool:
    """Return whether a value is a function of matrices."""
    called = called_name(node)
    return called is not None and (called[0] in MATRIX_FUNCTIONS or called[0] in MATRIX_RESULTS)


def add_matrix_statement(symbols: SymbolTable, item: Statement) -> None:
    """Add the vertex of a statement that is a result of a function of matrices."""
    symbols.current = item
    called = called_name(item.value)
    assert isinstance(item.value, ast.Call) and called is not None
    where = symbols.where(item.value)
    if called[0] not in MATRIX_RESULTS:
        record = MATRIX_FUNCTIONS[called[0]]
        raise InputError(where, f"{record.name} has several results", call_form(record))
    matrix = MATRIX_RESULTS[called[0]]
    record = matrix.record
    operands = [_operand(symbols, argument) for argument in item.value.args]
    scope = Scope(None, ())
    for operand in operands if len(operands) == len(record.operands) else ():
        bound = symbols.known[operand.tensor].bound
        for label, extent in zip(map(str, operand.index), bound, strict=True):
            conflict = scope.register(label, extent, operand.tensor)
            if conflict:
                raise InputError(where, conflict, "the same extent everywhere")
    letters = _letters(record, operands, scope)
    if letters is None or item.value.keywords:
        what = f"{ast.unparse(item.value)[:60]} does not suit {record.name}"
        raise InputError(where, what, call_form(record))
    if record.is_square and letters["i"][1] != letters["j"][1]:
        what = f"a matrix of {letters['i'][1]} × {letters['j'][1]} is not square"
        raise InputError(where, what, f"a square one for {record.name}")
    given = [label for label, _ in item.labels]
    output = [str(label) for label in operands[0].index[:-2]]
    for letter in matrix.letters:
        if letter == "k" and letter not in "".join(record.operands):
            label = given[len(output)] if len(output) < len(given) else letter
            if not given or label in scope.extents:
                label = symbols.names.take_new(letter)
            letters[letter] = label, min(letters["i"][1], letters["j"][1])
        output += [letters[letter][0]] if letter in letters else []
    if given and given != output:
        what = f"the result of {called[0]} has other labels than {item.target}"
        raise InputError(symbols.where(item.node), what, f"{item.name}[{','.join(output)}]")
    for label, extent in letters.values():
        scope.register(label, extent, label)
    gone = [label for label in scope.extents if label not in output]
    scope.bound = (*output, *gone)
    value = TypedScalar(Call(called[0], tuple(operands)), np.dtype(bool))
    symbols.emit(item.name, output, value, None, gone, scope, item.value)


def _operand(symbols: SymbolTable, node: ast.expr) -> Element:
    """Return the tensor that a function of matrices takes, with its labels."""
    match node:
        case ast.Subscript(value=ast.Name(id=name)) if name in symbols.known:
            labels = [entry.id for entry in entries(node.slice) if isinstance(entry, ast.Name)]
            if len(labels) == len(entries(node.slice)) == len(symbols.known[name].bound):
                symbols.refuse_repeated(labels, symbols.written(node), node)
                return Element(name, tuple(labels))
    what = f"{symbols.written(node)[:60]} is no tensor with its labels"
    hint = "give what is computed a name in a statement of its own"
    raise InputError(symbols.where(node), what, "NAME[labels]", hint)


def _letters(record: MatrixFunction, operands: Sequence[Element], scope: Scope) -> Letters | None:
    """Return what the letters of a function stand for; None if the operands do not suit it."""
    if len(operands) != len(record.operands) or len(operands[0].index) < 2:
        return None
    *stacked, rows, columns = map(str, operands[0].index)
    found = {"i": rows, "j": columns}
    for operand, names in zip(operands[1:], record.operands[1:], strict=True):
        own = [label for label in map(str, operand.index) if label not in stacked]
        if own[:1] != [rows] or columns in own or len(own) > len(names):
            return None
        found.update(zip(names[1:], own[1:], strict=False))
    return {letter: (label, scope.extents[label][0]) for letter, label in found.items()}


def call_form(record: MatrixFunction) -> str:
    """Return how a function is written, such as X[j,k] = solve(A[i,j], B[i,k])."""
    results = []
    for name, call in zip(record.results, result_names(record), strict=True):
        letters = ",".join(record.results[name])
        results.append((name.upper() or call.upper()[:1]) + (f"[{letters}]" if letters else ""))
    operands = []
    for name, letters in zip("AB", record.operands, strict=False):
        operands.append(f"{name}[{','.join(letters)}]")
    return f"{', '.join(results)} = {record.name}({', '.join(operands)})"
