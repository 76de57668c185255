"""Text to Python's syntax tree, with positions and limits, and integer arithmetic on sizes.

Nothing is evaluated as Python.
"""

from __future__ import annotations

import ast
import operator
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from einmpi.errors import InputError, nearest_of
from einmpi.garbage import without_garbage_search
from einmpi.graph.matrices import MATRIX_FUNCTIONS, result_names
from einmpi.units import counted

MAX_DEPTH = 200  # levels of an expression
MAX_STATEMENTS = 20_000  # of a program: more would take minutes to plan
INTEGER_ARITHMETIC = "integers, earlier sizes, + - * // % ** and brackets"
_SMALL_INTEGER = "an integer less than 2**63"
_DEPTH = f"at most {MAX_DEPTH} levels"
_DEPTH_HINT = "split it into several statements"
# Python's parser, which in 3.11 fails at times if several threads use it.
PYTHON_PARSER = threading.Lock()
# Fields of nodes that hold contexts, operators and names.
_FIELDS_OF_NO_NODE = frozenset({"ctx", "op", "ops", "id"})
# One character for one, so that columns do not shift.
_GLYPHS = str.maketrans({"←": "=", "×": "*"})
_INTEGER_OPS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@dataclass(frozen=True)
class Source:
    """A text and its place: its first line is line `line` of `name`, shifted right by `column`."""

    name: str
    text: str
    line: int = 1
    column: int = 0

    @cached_property
    def lines(self) -> list[str]:
        return [line.removesuffix("\r") for line in self.text.split("\n")]

    def at(self, node: ast.AST) -> str:
        """Return "name:line:column" of a node, as an editor counts."""
        row = getattr(node, "lineno", 1)
        offset = getattr(node, "col_offset", 0)  # Python counts bytes
        line = self.lines[row - 1] if 1 <= row <= len(self.lines) else ""
        if line.isascii():
            column = min(offset, len(line))
        else:
            before = line.translate(_GLYPHS).encode()[:offset]
            column = len(before.decode(errors="ignore"))
        return self.position(row, column + 1)

    def position(self, row: int, column: int) -> str:
        """Return "name:line:column" of a row and a column of the text, both counted from 1."""
        if row == 1:
            column += self.column
        return f"{self.name}:{self.line + row - 1}:{column}"


@dataclass(frozen=True)
class Statement:
    """A statement "NAME[label, label:extent, index:extent, …] = value".

    `scattered` has each index and its position among the labels, where its text stands for a label.
    """

    name: str
    labels: tuple[tuple[str, ast.expr | None], ...]
    value: ast.expr
    node: ast.AST
    scattered: tuple[tuple[int, ast.expr], ...] = ()

    @property
    def trees(self) -> tuple[ast.expr, ...]:
        """The expressions of a statement: its indices left of =, and its value."""
        return (*(index for _, index in self.scattered), self.value)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of these expressions, those of one after those of another."""
        found: list[ast.AST] = []
        for tree in self.trees:
            found.extend(ast.walk(tree))
        return tuple(found)

    @property
    def target(self) -> str:
        """What is left of =, without extents."""
        if not self.labels:
            return self.name
        return f"{self.name}[{','.join(label for label, _ in self.labels)}]"


@dataclass(frozen=True)
class Declaration:
    """The declaration of an input, "NAME: dtype[extent, …]"."""

    name: str
    dtype: str
    shape: tuple[ast.expr, ...]
    node: ast.AST


def parse(source: Source) -> list[ast.stmt]:
    """Return the statements of a text; InputError if it is not syntactically right."""
    _check_characters(source)
    text = "\n".join(line.lstrip() for line in source.lines).translate(_GLYPHS)
    indentation = [len(line) - len(line.lstrip()) for line in source.lines]
    try:
        with PYTHON_PARSER, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about texts such as 1if
            tree = ast.parse(text)
    except SyntaxError as error:
        row = error.lineno or 1
        column = error.offset or 1
        if row <= len(indentation):
            column += indentation[row - 1]
        message = (error.msg or "").split(" (<unknown>")[0].split(";")[0]
        expected = "one statement a line: NAME[labels] = expression"
        where = source.position(row, column)
        raise InputError(where, f"syntax error: {message}", expected) from None
    except (RecursionError, MemoryError):
        where = source.position(_too_deep_line(text), 1)
        what = "an expression here is nested too deeply"
        raise InputError(where, what, _DEPTH, _DEPTH_HINT) from None
    if len(tree.body) > MAX_STATEMENTS:
        what = f"the program has {len(tree.body)} statements"
        raise InputError(source.name, what, f"at most {MAX_STATEMENTS}")
    for statement in tree.body:
        _check(source, statement, indentation)
    return tree.body


def _check_characters(source: Source) -> None:
    """Refuse control characters and invisible ones; Python's own message about them is poor."""
    for row, line in enumerate(source.lines, 1):
        if line.isprintable():
            continue
        for column, character in enumerate(line, 1):
            if not character.isprintable() and character != "\t":
                what = f"character {character!r} in the program"
                raise InputError(source.position(row, column), what, "printable characters")


def _check(source: Source, statement: ast.stmt, indentation: Sequence[int]) -> None:
    """Undo the removed indentation; refuse integers that are too large and too deep expressions."""
    waiting: list[tuple[ast.AST, int]] = [(statement, 1)]
    while waiting:
        node, depth = waiting.pop()
        if isinstance(node, ast.expr | ast.stmt):
            node.col_offset += indentation[node.lineno - 1]
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, int) and value > 2**63:
            what = "this integer is too large"
            raise InputError(source.at(node), what, "an integer less than 2**63")
        # A chain of comparisons becomes an expression with a level for each of them.
        levels = len(node.ops) if isinstance(node, ast.Compare) else 1
        if depth + levels > MAX_DEPTH:
            what = "this expression is nested too deeply"
            raise InputError(source.at(statement), what, _DEPTH, _DEPTH_HINT)
        for child in children(node):
            waiting.append((child, depth + levels))


def children(node: ast.AST) -> list[ast.AST]:
    """Return the nodes directly below a node, without contexts and operators.

    Those are most of what Python's own function yields, and long programs are walked often.
    """
    found: list[ast.AST] = []
    for name in node._fields:
        if name in _FIELDS_OF_NO_NODE:
            continue
        value = getattr(node, name, None)
        if isinstance(value, list):
            found.extend([item for item in value if isinstance(item, ast.AST)])
        elif isinstance(value, ast.AST):
            found.append(value)
    return found


def _too_deep_line(text: str) -> int:
    """Return the first line that Python's parser itself gives up on."""
    for row, line in enumerate(text.split("\n"), 1):
        try:
            ast.parse(line)
        except SyntaxError:
            continue
        except (RecursionError, MemoryError):
            return row
    return 1


@without_garbage_search
def statements(source: Source) -> list[Statement | Declaration]:
    """Return the statements and declarations of a program."""
    found: list[Statement | Declaration] = []
    for node in parse(source):
        for single in _one_by_one(source, node):
            found.append(_statement(source, single))
    return found


def _one_by_one(source: Source, node: ast.stmt) -> list[ast.stmt]:
    """Return a statement for each result of a function of matrices that has several."""
    match node:
        case ast.Assign(
            targets=[ast.Tuple(elts=targets) as left],
            value=ast.Call(func=ast.Name(id=name), args=args, keywords=[]) as value,
        ) if name in MATRIX_FUNCTIONS:
            names = result_names(MATRIX_FUNCTIONS[name])
            if len(names) != len(targets):
                what = f"{name} has {counted(len(names), 'result')}"
                raise InputError(source.at(left), what, "a name for each of them")
            found: list[ast.stmt] = []
            for target, result in zip(targets, names, strict=True):
                function = ast.copy_location(ast.Name(result, ast.Load()), value.func)
                call = ast.copy_location(ast.Call(function, args, []), value)
                found.append(ast.copy_location(ast.Assign([target], call), node))
            return found
    return [node]


def _statement(source: Source, node: ast.stmt) -> Statement | Declaration:
    match node:
        case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=None):
            return _declaration(source, name, annotation)
        case ast.Assign(targets=[ast.Name(id=name) as target], value=value):
            return Statement(name, (), value, target)
        case ast.Assign(
            targets=[ast.Subscript(value=ast.Name(id=name), slice=labels) as target],
            value=value,
        ):
            return _definition(source, name, labels, value, target)
        case ast.Assign(targets=[target]):
            what = "this cannot be assigned to"
            raise InputError(source.at(target), what, "NAME or NAME[labels]")
    what = "this is not a statement of the language"
    raise InputError(source.at(node), what, "NAME[labels] = expression")


def _definition(
    source: Source, name: str, left: ast.expr, value: ast.expr, target: ast.AST
) -> Statement:
    """Return a statement with labels, of which some may be indices such as dst[e]:n."""
    labels: list[tuple[str, ast.expr | None]] = []
    scattered: list[tuple[int, ast.expr]] = []
    for position, entry in enumerate(entries(left)):
        index = entry.lower if isinstance(entry, ast.Slice) else entry
        extent = entry.upper if isinstance(entry, ast.Slice) and entry.step is None else None
        if index is None or not _is_scattered(index, extent):
            labels.append(_label(source, entry))
            continue
        text = ast.unparse(index)
        if extent is None:
            what = f"the index {text} left of = has no extent"
            raise InputError(source.at(entry), what, f"an extent, written as {text}:EXTENT")
        labels.append((text, extent))
        scattered.append((position, index))
    return Statement(name, tuple(labels), value, target, tuple(scattered))


def _is_scattered(index: ast.expr, extent: ast.expr | None) -> bool:
    """Return whether an entry left of = is an index: it reads a tensor, or computes with labels."""
    if isinstance(index, ast.Name):
        return False
    parts = list(ast.walk(index))
    if any(isinstance(part, ast.Subscript) for part in parts):
        return True
    return extent is not None and any(isinstance(part, ast.Name) for part in parts)


def entries(node: ast.expr) -> list[ast.expr]:
    """Return the parts between the commas of a subscript."""
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def labels_in_brackets(source: Source, node: ast.expr) -> tuple[tuple[str, ast.expr | None], ...]:
    """Return the labels of [j, k:extent], each with its extent if it is written."""
    return tuple(_label(source, entry) for entry in entries(node))


def _label(source: Source, node: ast.expr) -> tuple[str, ast.expr | None]:
    """Return a label and its extent if it is written, of "i" or "i:extent"."""
    match node:
        case ast.Name(id=name):
            return name, None
        case ast.Slice(lower=ast.Name(id=name), upper=ast.expr() as extent, step=None):
            return name, extent
    what = f"{ast.unparse(node)} is not a label"
    raise InputError(source.at(node), what, "a name, or name:extent")


def _declaration(source: Source, name: str, node: ast.expr) -> Declaration:
    """Return the declaration of an input, given what follows its colon."""
    match node:
        case ast.Name(id=dtype):
            return Declaration(name, dtype, (), node)
        case ast.Subscript(value=ast.Name(id=dtype), slice=shape):
            return Declaration(name, dtype, tuple(entries(shape)), node)
    what = "this is not a declaration of an input"
    raise InputError(source.at(node), what, "NAME: dtype[extent, extent]")


# ---- integer arithmetic -------------------------------------------------------------------------


def integer(source: Source, node: ast.expr, sizes: Mapping[str, int]) -> int:
    """Return the value of integer arithmetic over sizes: + - * // % ** and brackets."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        if node.id in sizes:
            return sizes[node.id]
        expected = (
            nearest_of(sizes, node.id) if sizes else "a number, because there are no sizes yet"
        )
        raise InputError(source.at(node), f"unknown size {node.id!r}", expected)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -integer(source, node.operand, sizes)
    if isinstance(node, ast.BinOp) and type(node.op) in _INTEGER_OPS:
        left = integer(source, node.left, sizes)
        right = integer(source, node.right, sizes)
        return _apply(source, node, left, right)
    what = f"{ast.unparse(node)[:60]} is not integer arithmetic"
    raise InputError(source.at(node), what, INTEGER_ARITHMETIC)


def _apply(source: Source, node: ast.BinOp, left: int, right: int) -> int:
    """Return the value of an operation on integers; every step stays below 2**63."""
    if isinstance(node.op, ast.FloorDiv | ast.Mod) and right == 0:
        raise InputError(source.at(node), "division by zero", "a divisor other than 0")
    if isinstance(node.op, ast.Pow):
        if right < 0:
            raise InputError(source.at(node), f"{left}**{right} is not an integer", _SMALL_INTEGER)
        if abs(left) > 1 and right * (abs(left).bit_length() - 1) >= 63:
            raise InputError(source.at(node), f"{left}**{right} is too large", _SMALL_INTEGER)
    result: int = _INTEGER_OPS[type(node.op)](left, right)
    if abs(result) >= 2**63:
        raise InputError(source.at(node), "this number is too large", _SMALL_INTEGER)
    return result


def integer_text(source: Source, sizes: Mapping[str, int]) -> int:
    """Return the value of a text that is one expression of integer arithmetic."""
    body = parse(source)
    if len(body) != 1 or not isinstance(body[0], ast.Expr):
        what = f"{source.text!r} is not one expression"
        raise InputError(source.position(1, 1), what, "an expression such as s // 10")
    return integer(source, body[0].value, sizes)
