"""A program in half precision: inputs are rounded, and tensors that lead to the loss are too."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.einsum import element_text
from einmpi.language.macros import GRADIENT, called_name
from einmpi.language.syntax import Declaration, Statement, entries
from einmpi.training.settings import Program, Training

_FULL = ("float32", "float64")


@dataclass(frozen=True)
class Rounded:
    """A program whose tensors with dimensions that lead to the loss are in half precision.

    Attributes
    ----------
    text : str
        The statements, each in the row in which it was.
    changed : tuple of str
        Those that are not as they were.
    casts : tuple of str
        The statements that round inputs.
    names : tuple of str
        What these define.
    """

    text: str
    changed: tuple[str, ...]
    casts: tuple[str, ...]
    names: tuple[str, ...]


def rounded_program(
    training: Training, program: Program, labels_of: Callable[[Vertex], Sequence[str]]
) -> Rounded:
    """Return a program that computes a loss in half precision.

    `labels_of` returns labels for the dimensions of an input.
    """
    items = program.items
    precision = training.precision
    rounding = _Rounding(training, program)
    statements = [rounding.changed(item) for item in items]
    casts = []
    for name in rounding.read:
        labels = ",".join(labels_of(program.graph[name]))
        casts.append(f"{rounding.inputs[name]}[{labels}] = {precision}({name}[{labels}])")
    # A statement whose numbers have made it wider again is rounded as a whole, the first of them
    # first: then those that read it may be as they should.
    positions = {item.name: number for number, item in enumerate(items)}
    dtypes = program.dtypes_of("\n".join([_text(items, statements), *casts]))
    too_wide = [
        name for name in program.graph.by_name if name in rounding.narrow and dtypes[name] in _FULL
    ]
    while too_wide:
        first = positions[too_wide[0]]
        statements[first] = rounding.rounded_whole(items[first])
        dtypes = program.dtypes_of("\n".join([_text(items, statements), *casts]))
        too_wide = [name for name in too_wide if dtypes[name] in _FULL]
    shown = []
    for item, statement in zip(items, statements, strict=True):
        if statement != written_statement(item):
            shown.append(statement)
    text = _text(items, statements)
    names = tuple(rounding.inputs[name] for name in rounding.read)
    return Rounded(text, tuple(shown), tuple(casts), names)


def _text(items: Sequence[Statement | Declaration], statements: Sequence[str]) -> str:
    """Return statements as a text, in which each has the row that it had."""
    rows: dict[int, list[str]] = {}
    for item, statement in zip(items, statements, strict=True):
        row = getattr(item.node, "lineno", 1)
        rows.setdefault(row, []).append(statement)
    return "\n".join("; ".join(rows.get(row, [])) for row in range(1, max(rows) + 1))


def written_statement(item: Statement | Declaration, value: ast.expr | None = None) -> str:
    """Return the text of a statement, with another value if one is given."""
    if isinstance(item, Declaration):
        extents = ", ".join(ast.unparse(extent) for extent in item.shape)
        return f"{item.name}: {item.dtype}[{extents}]"
    labels = []
    for label, extent in item.labels:
        labels.append(label if extent is None else f"{label}:{ast.unparse(extent)}")
    target = element_text(item.name, labels)
    text = ast.unparse(item.value if value is None else value)
    return f"{target} = {_without_spaces_in_brackets(text)}"


def _without_spaces_in_brackets(text: str) -> str:
    """Return a text with W[i,j] for W[i, j], as programs are written."""
    found = ""
    open_brackets: list[str] = []
    for character in text:
        if character in "[(":
            open_brackets.append(character)
        elif character in "])":
            open_brackets.pop()
        is_in_index = len(open_brackets) > 0 and open_brackets[-1] == "["
        if character == " " and is_in_index and found.endswith(","):
            continue
        found += character
    return found


class _Rounding:
    """Which tensors of a program are rounded, and how its statements change by that."""

    def __init__(self, training: Training, program: Program) -> None:
        graph = program.graph
        self.graph = graph
        self.precision = str(training.precision)
        leading = _leading_to(graph, training.loss)
        self.inputs: dict[str, str] = {}  # inputs that can be rounded → names of the rounded ones
        for vertex in graph.inputs:
            if vertex.name in leading and vertex.bound and vertex.dtype in _FULL:
                self.inputs[vertex.name] = f"{vertex.name}_{self.precision}"
        self.read: dict[str, None] = {}  # those of them that a statement reads rounded, in order
        self.narrow: set[str] = set()  # statements whose result is rounded
        self.wide: set[str] = set()  # tensors of full precision that rounded statements may read
        for item in program.items:
            if not isinstance(item, Statement) or graph[item.name].dtype not in _FULL:
                continue
            is_narrow = item.name in leading and len(item.labels) > 0
            if is_narrow and not _is_cast(item.value):
                self.narrow.add(item.name)
            else:
                self.wide.add(item.name)
        for vertex in graph.inputs:
            is_number = not vertex.bound and vertex.dtype in _FULL
            if is_number and vertex.name not in program.constants:
                self.wide.add(vertex.name)

    def changed(self, item: Statement | Declaration) -> str:
        """Return a statement that reads its operands in the precision in which it computes."""
        if isinstance(item, Declaration):
            return written_statement(item)
        read = self.read_narrow if item.name in self.narrow else self.read_wide
        return written_statement(item, _Reads(read).visit(_copied(item.value)))

    def rounded_whole(self, item: Statement | Declaration) -> str:
        """Return a statement whose result is rounded in the end."""
        assert isinstance(item, Statement)
        value = _Reads(self.read_narrow).visit(_copied(item.value))
        return written_statement(item, _cast(self.precision, value))

    def read_narrow(self, node: Any, name: str) -> ast.expr:
        """Return what reads a tensor in half precision: its element, or a number."""
        if name in self.inputs:
            self.read[name] = None
            node.value = ast.Name(self.inputs[name], ast.Load())
        return _cast(self.precision, node) if name in self.wide else node

    def read_wide(self, node: Any, name: str) -> ast.expr:
        """Return what reads a tensor in the precision that it had before it was rounded."""
        return _cast(self.graph[name].dtype, node) if name in self.narrow else node


class _Reads(ast.NodeTransformer):
    """Changes how an expression reads tensors: `read` returns what takes the place of each."""

    def __init__(self, read: Callable[[Any, str], ast.expr]) -> None:
        self.read = read

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        node.slice = _visited_index(self, node.slice)
        if isinstance(node.value, ast.Name):
            return self.read(node, node.value.id)
        node.value = self.visit(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if not _is_gradient(node):
            self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.read(node, node.id)


def _is_gradient(node: ast.Call) -> bool:
    """Return whether a call is `grad`; the tensors that it names stay as the program has them."""
    return isinstance(node.func, ast.Name) and node.func.id == GRADIENT


def _visited_index(visitor: ast.NodeTransformer, index: ast.expr) -> ast.expr:
    """Return what is in brackets, with tensors changed that an index reads; labels stay."""
    found: list[ast.expr] = []
    for entry in entries(index):
        is_label = isinstance(entry, ast.Name)
        found.append(entry if is_label else visitor.visit(entry))
    return found[0] if len(found) == 1 else ast.Tuple(found, ast.Load())


def _cast(dtype: str, node: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(dtype, ast.Load()), [node], [])


def _copied(node: ast.expr) -> ast.expr:
    """Return a copy of an expression: the statements of the program stay as they are."""
    return ast.parse(ast.unparse(node), mode="eval").body


def _is_cast(node: ast.expr) -> bool:
    """Return whether an expression is a cast to full precision, which the program asks for."""
    called = called_name(node)
    return called is not None and called[0] in _FULL


def _leading_to(graph: EinGraph, loss: str) -> set[str]:
    """Return the tensors that a loss is computed from, and itself."""
    found = {loss}
    for vertex in reversed(graph.vertices):
        if vertex.name in found:
            found.update(vertex.inputs)
    return found
