"""Tensors by the statements that define them, and programs written from such tensors."""

from __future__ import annotations

import ast
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from einmpi.caches import bounded_cache
from einmpi.graph.einsum import element_text
from einmpi.graph.matrices import MATRIX_RESULTS
from einmpi.job.job import program_job
from einmpi.language.syntax import PYTHON_PARSER, entries

Index: TypeAlias = list[ast.expr]
_CONSTANTS = ("inf", "nan", "pi")
MOST_OPERATIONS = 60  # of an expression that is written out where it is used


@dataclass(frozen=True)
class Definition:
    """A statement such as "out[i,j] = x[i] * y[j]", as a template: which labels there are.

    A scattered result has an index instead of a label: "out[x[i]:5] = sum(y[i])".
    """

    labels: tuple[str, ...]  # of the result
    body: ast.expr
    extents: Mapping[str, int]  # of labels that index an operand, or are written with an extent
    occurrences: Mapping[str, int]  # of each operand
    header: ast.expr | None = None  # of a scattered result

    @property
    def is_of_matrices(self) -> bool:
        """Whether it is a function of whole matrices, which only names stand for."""
        return (
            isinstance(self.body, ast.Call) and getattr(self.body.func, "id", "") in MATRIX_RESULTS
        )

    @property
    def keeps_labels(self) -> bool:
        """Whether labels in brackets are labels of the result too, as those of a scan are."""
        return any(
            isinstance(entry, ast.Name) and entry.id in self.labels
            for node in ast.walk(self.body)
            for entry in _brackets(node)
        )

    @property
    def is_view(self) -> bool:
        """Whether every element is an element of the only operand."""
        name = self.body.value if isinstance(self.body, ast.Subscript) else self.body
        is_element = isinstance(name, ast.Name) and name.id in self.occurrences
        return is_element and len(self.occurrences) == 1

    def reads_once(self, operand: str) -> bool:
        """Return whether each element of an operand is read at most once.

        So it is if every label has a dimension of its own there: as such, shifted or scaled.
        """
        if self.occurrences[operand] != 1:
            return False
        found: list[str] = []
        for entry in self._entries(operand):
            parts = list(ast.walk(entry))
            names = [each.id for each in parts if isinstance(each, ast.Name)]
            operators = [each for each in parts if isinstance(each, ast.operator)]
            is_scaled = all(isinstance(each, ast.Add | ast.Sub | ast.Mult) for each in operators)
            if not is_scaled or len(names) > 1:
                return False
            found += names
        long_labels = {label for label, extent in self.extents.items() if extent > 1}
        return len(found) == len(set(found)) and long_labels <= set(found)

    def reads_by_labels(self, operand: str) -> bool:
        """Return whether an operand is indexed by labels and numbers only, without arithmetic."""
        return all(isinstance(entry, ast.Name | ast.Constant) for entry in self._entries(operand))

    def _entries(self, operand: str) -> Iterator[ast.expr]:
        """Yield what indexes an operand."""
        for node in ast.walk(self.body):
            if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == operand:
                yield from entries(node.slice)

    @property
    def is_aggregate(self) -> bool:
        """Whether the whole body is an aggregation, which is a vertex of its own in any case."""
        return isinstance(self.body, ast.Call) and isinstance(self.body.func, ast.Subscript)


@bounded_cache(4096)
def definition_of(text: str, kinds: tuple[tuple[str, tuple[int, ...]], ...]) -> Definition:
    """Return a statement as a template, given the names and shapes of its operands."""
    with PYTHON_PARSER:
        (statement,) = ast.parse(text).body
    assert isinstance(statement, ast.Assign)
    shapes = dict(kinds)
    extents: dict[str, int] = {}
    labels: list[str] = []
    header = None
    (target,) = statement.targets
    for entry in entries(target.slice) if isinstance(target, ast.Subscript) else ():
        match entry:
            case ast.Name(id=label) | ast.Slice(lower=ast.Name(id=label)) if label not in shapes:
                labels.append(label)
                _note_extent(entry, extents)
            case _:
                header = target
    for node in ast.walk(statement):
        for entry in _brackets(node):
            _note_extent(entry, extents)
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                for entry, size in zip(entries(index), shapes.get(name, ()), strict=False):
                    if isinstance(entry, ast.Name) and entry.id not in shapes:
                        extents[entry.id] = size
    names = [node.id for node in ast.walk(statement) if isinstance(node, ast.Name)]
    occurrences = {name: names.count(name) for name in shapes}
    return Definition(tuple(labels), statement.value, extents, occurrences, header)


def _brackets(node: ast.AST) -> list[ast.expr]:
    """Return what is in the brackets of a call such as sum[k](…); nothing for all other nodes."""
    match node:
        case ast.Call(func=ast.Subscript(slice=index)):
            return entries(index)
    return []


def _note_extent(entry: ast.expr, extents: dict[str, int]) -> None:
    """Note the extent that is written after a label."""
    match entry:
        case ast.Slice(lower=ast.Name(id=label), upper=ast.Constant(value=int(extent))):
            extents[label] = extent


def _joined(parts: list[ast.expr]) -> ast.expr:
    """Return what is between brackets, given its parts."""
    return ast.Tuple(parts) if len(parts) > 1 else parts[0]


# ---- tensors -------------------------------------------------------------------------------------


@dataclass(eq=False)
class Node:
    """A tensor: an input, or what a statement computes from other tensors."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    name: str = ""  # of an input, or of what a call between two programs returns
    definition: Definition | None = None
    operands: Mapping[str, Node] = field(default_factory=dict)
    # Whether it, and the operands, must be tensors of their own: `grad` takes their names.
    is_gradient: bool = False
    call: Any = None  # the call between two programs that returns it
    level: int = 0  # how many such calls come before it
    is_separate: bool = False  # whether `grad` tells it from what it is a copy of
    line: str = ""  # of the user's code that computes it

    def __post_init__(self) -> None:
        for operand in self.operands.values():
            self.level = max(self.level, operand.level)

    @property
    def is_computed(self) -> bool:
        """Whether its elements are computed, not found in its operand."""
        return self.definition is not None and not self.definition.is_view

    @property
    def must_be_named(self) -> bool:
        """Whether it is a tensor of its own however it is used."""
        if self.definition is None:
            return True
        is_scattered = self.definition.header is not None
        keeps_labels = self.definition.keeps_labels
        must_be = is_scattered or keeps_labels or self.definition.is_of_matrices
        return must_be or self.is_gradient or self.is_separate


def computed(text: str, operands: Mapping[str, Node], is_gradient: bool = False) -> Node:
    """Return the tensor `out` of a statement. The language says which shape and dtype it has."""
    kinds = tuple((name, node.shape, node.dtype.name) for name, node in operands.items())
    definition = definition_of(text, tuple((name, shape) for name, shape, _ in kinds))
    if is_gradient:
        return Node(operands["x"].shape, operands["x"].dtype, "", definition, dict(operands), True)
    shape, dtype = _kind_of(text, kinds)
    return Node(shape, np.dtype(dtype), "", definition, dict(operands))


def labels_of(shape: Sequence[int]) -> list[str]:
    """Return a label for each dimension."""
    return [f"i{number}" for number in range(len(shape))]


def header_of(shape: Sequence[int]) -> str:
    """Return "out" with a label for each dimension, and its extent."""
    labels = zip(labels_of(shape), shape, strict=True)
    return element_text("out", [f"{label}:{size}" for label, size in labels])


def copied(node: Node) -> Node:
    """Return a tensor with the elements of another one."""
    text = f"{header_of(node.shape)} = {element_text('x', labels_of(node.shape))}"
    return computed(text, {"x": node})


@bounded_cache(4096)
def _kind_of(
    text: str, kinds: tuple[tuple[str, tuple[int, ...], str], ...]
) -> tuple[tuple[int, ...], str]:
    """Return the shape and the dtype of what a statement computes."""
    inputs = {name: (shape, dtype) for name, shape, dtype in kinds}
    vertex = program_job(text, inputs, {}, "float64", ["out"]).written["out"]
    return vertex.bound, vertex.dtype


def in_order(nodes: Iterable[Node], without: Node | None = None) -> list[Node]:
    """Return some nodes and all that they depend on, each after its operands.

    Of what only the node `without` depends on, nothing is among them.
    """
    found: dict[Node, None] = {}
    waiting = list(reversed(list(nodes)))
    while waiting:
        node = waiting[-1]
        needed = [*node.operands.values(), *(node.call.operands if node.call else ())]
        if node is without:
            needed = []
        missing = [each for each in needed if each not in found]
        if missing:
            waiting += reversed(missing)
        else:
            found.setdefault(node)
            waiting.pop()
    return list(found)


def named_nodes(outputs: Sequence[Node]) -> set[Node]:
    """Return the nodes that are tensors of the program; the others are written out in them.

    Such are nodes that are used more than once, or in a statement with more values than they have:
    computing them there would repeat the work.
    """
    named = set(outputs)
    uses: Counter[Node] = Counter()
    nodes = in_order(outputs)
    for node in reversed(nodes):
        if node.must_be_named:
            named.add(node)
        if node.definition is not None and not node.is_computed and node not in named:
            continue  # it is read through
        for name, operand in node.operands.items():
            definition = node.definition
            assert definition is not None
            base = operand
            is_read_once = definition.reads_once(name)
            is_read_by_labels = definition.reads_by_labels(name)
            while not base.must_be_named and not base.is_computed:
                assert base.definition is not None
                ((own_name, below),) = base.operands.items()
                is_read_once = is_read_once and base.definition.reads_once(own_name)
                is_read_by_labels &= base.definition.reads_by_labels(own_name)
                base = below
            uses[base] += definition.occurrences[name]
            if base.definition is not None and base.definition.is_aggregate:
                is_read_once = is_read_by_labels  # the language makes a tensor of it
            is_crossing = base.level < node.level or node.is_gradient
            is_number = base.definition is not None and not base.operands
            if not is_number and (uses[base] > 1 or not is_read_once or is_crossing):
                named.add(base)
        if node.call is not None:
            named.update(node.call.operands)
        if node.definition is not None and node.must_be_named:  # its labels are those of tensors
            named.update(node.operands.values())
    operations: Counter[Node] = Counter()  # in expressions that are written out
    for node in nodes:
        if node not in named and node.definition is not None:
            operations[node] = 1 + sum(operations[operand] for operand in node.operands.values())
            if operations[node] > MOST_OPERATIONS:
                named.add(node)
                operations[node] = 0
    return named


# ---- programs ------------------------------------------------------------------------------------


class Writer:
    """Writes statements for tensors that have names."""

    def __init__(self, names: Mapping[Node, str]) -> None:
        self.names = names
        self.taken = set(names.values())
        self.fresh: Iterator[str] = iter(())
        self.extents: dict[str, int] = {}  # of the labels of a statement
        self.bare: set[str] = set()  # those whose extent follows from a tensor that they index

    def statement(self, node: Node) -> str:
        """Return the statement that defines a tensor."""
        definition = node.definition
        assert definition is not None
        self.fresh = self._free_labels()
        self.extents = {}
        self.bare = set()
        own: dict[str, ast.expr] = {}
        for label in definition.labels:
            own[label] = self._new_label(definition.extents.get(label, -1))
        if definition.header is None:
            for label, size in zip(definition.labels, node.shape, strict=True):
                name = own[label]
                assert isinstance(name, ast.Name)
                self.extents[name.id] = size
        index = list(own.values())
        body = self._written(node, own)  # adds the labels that are aggregated
        if definition.header is not None:
            index = entries(_Substitution(self, node, own).visit(definition.header).slice)
        self._note_bare_labels([body, *index])
        parts: list[str] = []
        for entry in index:
            text = ast.unparse(entry)
            parts.append(self._with_extent(text) if isinstance(entry, ast.Name) else text)
        header = ", ".join(parts)
        kept = {entry.id for entry in index if isinstance(entry, ast.Name)}
        text = ast.unparse(_WithExtents(self, kept).visit(body))
        target = f"{self.names[node]}[{header}]" if header else self.names[node]
        return f"{target} = {text}"

    def _note_bare_labels(self, expressions: Iterable[ast.expr]) -> None:
        """Find the labels that index a tensor as they are, not those in brackets of a sum."""
        self.bare = set()
        for expression in expressions:
            for node in ast.walk(expression):
                match node:
                    case ast.Subscript(value=ast.Name(id=name), slice=index) if name in self.taken:
                        names = [each for each in entries(index) if isinstance(each, ast.Name)]
                        self.bare.update(each.id for each in names)

    def _free_labels(self) -> Iterator[str]:
        for number in range(10**6):
            for letter in string.ascii_lowercase[8:]:  # from i on
                name = f"{letter}{number or ''}"
                if name not in self.taken:
                    yield name

    def _new_label(self, extent: int) -> ast.Name:
        name = next(self.fresh)
        self.extents[name] = extent
        return ast.Name(name)

    def _with_extent(self, label: str) -> str:
        return label if label in self.bare else f"{label}:{self.extents[label]}"

    def element(self, node: Node, index: Index) -> ast.expr:
        """Return an element of a tensor: by its name, or as the expression that it is."""
        if node in self.names:
            written: list[ast.expr] = []
            for entry, size in zip(index, node.shape, strict=True):
                if isinstance(entry, ast.Name) and self.extents.get(entry.id, size) != size:
                    # A label alone has the extent of the dimension.
                    entry = ast.BinOp(entry, ast.Add(), ast.Constant(0))
                written.append(entry)
            name = ast.Name(self.names[node])
            return ast.Subscript(name, _joined(written)) if written else name
        assert node.definition is not None
        return self._written(node, dict(zip(node.definition.labels, index, strict=True)))

    def _written(self, node: Node, labels: dict[str, ast.expr]) -> ast.expr:
        assert node.definition is not None
        written: ast.expr = _Substitution(self, node, labels).visit(node.definition.body)
        return written


class _Substitution(ast.NodeTransformer):
    """Returns a template with labels, and elements of operands, in place of its names."""

    def __init__(self, writer: Writer, node: Node, labels: dict[str, ast.expr]) -> None:
        assert node.definition is not None
        self.writer = writer
        self.operands = node.operands
        self.definition = node.definition
        self.labels = labels

    def generic_visit(self, node: ast.AST) -> ast.AST:
        fields: dict[str, Any] = {}
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                value = [self.visit(each) for each in value]
            elif isinstance(value, ast.expr):
                value = self.visit(value)
            fields[name] = value
        return type(node)(**fields)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        function = node.func
        if isinstance(function, ast.Subscript):
            function = ast.Subscript(function.value, self.visit(function.slice))
        return ast.Call(function, [self.visit(each) for each in node.args], [])

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        found = ast.BinOp(self.visit(node.left), node.op, self.visit(node.right))
        base, number = _shift(found)
        if not isinstance(base, ast.Name) or base.id not in self.writer.extents:
            return found
        # An index such as i + 1 - 1 has one number.
        operator = ast.Add() if number > 0 else ast.Sub()
        return ast.BinOp(base, operator, ast.Constant(abs(number))) if number else base

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        assert isinstance(node.value, ast.Name)
        index = [self.visit(each) for each in entries(node.slice)]
        if node.value.id not in self.operands:  # the name of a scattered result
            return ast.Subscript(node.value, ast.Tuple(index))
        return self.writer.element(self.operands[node.value.id], index)

    def visit_Slice(self, node: ast.Slice) -> ast.expr:
        assert node.lower is not None
        lower: ast.expr = self.visit(node.lower)
        # An extent of a label is written where it is needed; an index of a result needs one.
        if isinstance(node.lower, ast.Name) and node.lower.id not in self.operands:
            return lower
        return ast.Slice(lower, node.upper)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        name = node.id
        if name in self.operands:
            return self.writer.element(self.operands[name], [])
        if name in _CONSTANTS:
            return node
        if name not in self.labels:  # one that is aggregated
            extent = self.definition.extents.get(name, -1)
            self.labels[name] = self.writer._new_label(extent)
        return self.labels[name]


def _shift(node: ast.expr) -> tuple[ast.expr, int]:
    """Return an expression without the integer that is added to it, and that integer."""
    match node:
        case ast.BinOp(
            left=left, op=ast.Add() | ast.Sub() as op, right=ast.Constant(value=int(value))
        ):
            base, number = _shift(left)
            return base, number + (value if isinstance(op, ast.Add) else -value)
    return node, 0


class _WithExtents(ast.NodeTransformer):
    """Adds the extents of aggregated labels that do not follow from tensors."""

    def __init__(self, writer: Writer, kept: set[str]) -> None:
        self.writer = writer
        self.without_extent = writer.bare | kept

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if isinstance(node.func, ast.Subscript):
            written: list[ast.expr] = []
            for entry in entries(node.func.slice):
                # One that is used in several places has its extent already.
                if isinstance(entry, ast.Name) and entry.id not in self.without_extent:
                    entry = ast.Slice(entry, ast.Constant(self.writer.extents[entry.id]))
                written.append(entry)
            node.func.slice = _joined(written)
        node.args = [self.visit(each) for each in node.args]
        return node
