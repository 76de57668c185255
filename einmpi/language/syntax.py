"""Text → Python's syntax tree, with positions and limits; whole-number arithmetic on sizes. Nothing is evaluated."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from einmpi.errors import InputError, one_of

MAX_DEPTH = 200
# One character for one: columns stay true.
_GLYPHS = str.maketrans({"←": "=", "×": "*"})
_INTEGER_OPS = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
}


@dataclass(frozen=True)
class Source:
    """A text and where it stands: its first line is line `line` of `name`, shifted right by `column`."""

    name: str
    text: str
    line: int = 1
    column: int = 0

    @cached_property
    def lines(self) -> list[str]:
        return [line.removesuffix("\r") for line in self.text.split("\n")]

    def at(self, node: ast.AST) -> str:
        """ "name:line:column" of a node, as an editor counts."""
        row, offset = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        before = (
            self.lines[row - 1].translate(_GLYPHS).encode()[:offset]
            if row <= len(self.lines)
            else b""
        )
        return self.position(row, len(before.decode(errors="ignore")) + 1)

    def position(self, row: int, column: int) -> str:
        return f"{self.name}:{self.line + row - 1}:{column + (self.column if row == 1 else 0)}"


@dataclass(frozen=True)
class Statement:
    """NAME[label, label:extent, …] = value."""

    name: str
    labels: tuple[tuple[str, ast.expr | None], ...]
    value: ast.expr
    node: ast.AST


@dataclass(frozen=True)
class Declaration:
    """NAME: dtype[extent, …], an input."""

    name: str
    dtype: str
    shape: tuple[ast.expr, ...]
    node: ast.AST


def parse(source: Source) -> list[ast.stmt]:
    """The statements of a text, or one InputError."""
    for row, line in enumerate(source.lines, 1):
        column = next(
            (k for k, char in enumerate(line, 1) if not char.isprintable() and char != "\t"), None
        )
        if column is not None:
            what = f"character {line[column - 1]!r} in the program"
            raise InputError(source.position(row, column), what, "printable characters")
    text = "\n".join(line.lstrip() for line in source.lines).translate(_GLYPHS)
    shift = _shift(source)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python's about texts such as 1if
            tree = ast.parse(text)
    except SyntaxError as error:
        row, column = error.lineno or 1, error.offset or 1
        message = (error.msg or "").split(" (<unknown>")[0].split(";")[0]
        where = source.position(row, column + (shift[row - 1] if row <= len(shift) else 0))
        raise InputError(
            where, f"syntax error: {message}", "one statement a line: NAME[labels] = expression"
        ) from None
    except (RecursionError, MemoryError):
        where = source.position(_deep_line(text), 1)
        raise InputError(
            where, "an expression here is nested too deeply", _depth_allowed()
        ) from None
    for statement in tree.body:
        _check(source, statement, shift)
    return tree.body


def _check(source: Source, statement: ast.stmt, shift: Sequence[int]) -> None:
    """Undo the removed indentation; refuse integers that are too large and expressions that are too deep."""
    waiting: list[tuple[ast.AST, int]] = [(statement, 1)]
    while waiting:
        node, depth = waiting.pop()
        if isinstance(node, (ast.expr, ast.stmt)):
            node.col_offset += shift[node.lineno - 1]
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, int)
                and node.value > 2**63
            ):
                raise InputError(source.at(node), "this integer is too large", "less than 2**63")
        below = depth + (
            len(node.ops) if isinstance(node, ast.Compare) else 1
        )  # a chain has a level for each
        if below > MAX_DEPTH:
            raise InputError(
                source.at(statement), "this expression is nested too deeply", _depth_allowed()
            )
        waiting += [(child, below) for child in ast.iter_child_nodes(node)]


def _deep_line(text: str) -> int:
    """The first line that Python's parser gives up on by itself."""
    for row, line in enumerate(text.split("\n"), 1):
        try:
            ast.parse(line)
        except SyntaxError:
            continue
        except (RecursionError, MemoryError):
            return row
    return 1


def _shift(source: Source) -> list[int]:
    return [len(line) - len(line.lstrip()) for line in source.lines]


def _depth_allowed() -> str:
    return f"at most {MAX_DEPTH} levels; split it into several statements"


def statements(source: Source) -> Iterator[Statement | Declaration]:
    for node in parse(source):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.value is None
        ):
            yield _declaration(source, node.target.id, node.annotation)
            continue
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            raise InputError(
                source.at(node),
                "this is not a statement of the language",
                "NAME[labels] = expression",
            )
        target = node.targets[0]
        if isinstance(target, ast.Name):
            yield Statement(target.id, (), node.value, target)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            labels = tuple(_label(source, entry) for entry in entries(target.slice))
            yield Statement(target.value.id, labels, node.value, target)
        else:
            raise InputError(
                source.at(target), "this cannot be assigned to", "NAME or NAME[labels]"
            )


def entries(node: ast.expr) -> list[ast.expr]:
    """The parts between the commas of a subscript."""
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def _label(source: Source, node: ast.expr) -> tuple[str, ast.expr | None]:
    if isinstance(node, ast.Name):
        return node.id, None
    if (
        isinstance(node, ast.Slice)
        and isinstance(node.lower, ast.Name)
        and node.upper
        and not node.step
    ):
        return node.lower.id, node.upper
    raise InputError(
        source.at(node), f"{ast.unparse(node)} is not a label", "a name, or name:extent"
    )


def labels_in_brackets(source: Source, node: ast.expr) -> tuple[tuple[str, ast.expr | None], ...]:
    """The labels of agg[j, k:extent]."""
    return tuple(_label(source, entry) for entry in entries(node))


def _declaration(source: Source, name: str, node: ast.expr) -> Declaration:
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        shape = tuple(entries(node.slice))
        return Declaration(name, node.value.id, shape, node)
    if isinstance(node, ast.Name):
        return Declaration(name, node.id, (), node)
    raise InputError(
        source.at(node), "this is not a declaration of an input", "NAME: dtype[extent, extent]"
    )


def integer(source: Source, node: ast.expr, sizes: Mapping[str, int]) -> int:
    """Whole-number arithmetic over sizes: + - * // % ** and brackets."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in sizes:
            known = one_of(sizes, node.id) if sizes else "no size stands before it"
            raise InputError(source.at(node), f"unknown size {node.id!r}", known)
        return sizes[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -integer(source, node.operand, sizes)
    if isinstance(node, ast.BinOp) and type(node.op) in _INTEGER_OPS:
        left, right = integer(source, node.left, sizes), integer(source, node.right, sizes)
        return _apply(source, node, _INTEGER_OPS[type(node.op)], left, right)
    raise InputError(
        source.at(node),
        f"{ast.unparse(node)[:60]} is not whole-number arithmetic",
        "whole numbers, earlier sizes, + - * // % ** and brackets",
    )


def _apply(source: Source, node: ast.expr, op: str, left: int, right: int) -> int:
    if op in ("//", "%") and right == 0:
        raise InputError(source.at(node), "division by zero")
    if op == "**" and (right < 0 or (abs(left) > 1 and right * (abs(left).bit_length() - 1) >= 63)):
        raise InputError(source.at(node), f"{left}**{right} is not a whole number below 2**63")
    if op in ("//", "%"):
        result = left // right if op == "//" else left % right
    else:
        result = (
            left**right
            if op == "**"
            else {"+": left + right, "-": left - right, "*": left * right}[op]
        )
    if abs(result) >= 2**63:
        raise InputError(source.at(node), "this number is larger than 2**63")
    return result


def integer_text(source: Source, sizes: Mapping[str, int]) -> int:
    """`integer` of a text that is one expression."""
    body = parse(source)
    if len(body) != 1 or not isinstance(body[0], ast.Expr):
        raise InputError(
            source.position(1, 1), f"{source.text!r} is not one expression", "such as s // 10"
        )
    return integer(source, body[0].value, sizes)
