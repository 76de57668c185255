"""The tree of a random program, and its text in the language of the package.

No code of the package is used here: the oracle evaluates this tree, not what a parser made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

INFIX = (
    "+",
    "-",
    "*",
    "/",
    "//",
    "%",
    "**",
    "<",
    "<=",
    ">",
    ">=",
    "==",
    "!=",
    "&",
    "|",
    "^",
    "<<",
    ">>",
)
CASTS = (
    *("float16", "float32", "float64", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
# Macros that keep the labels in their brackets: these are bound by something around them.
KEEPING = ("softmax", "rmsnorm", "layernorm", "cumsum", "cumprod", "cummax", "cummin")
STEP = "step"  # the tensor that has the number of a step of a loop
LABEL_NAMES = (*"ijklmnpqrstuvw", *(f"{letter}{number}" for number in range(9) for letter in "ij"))


@dataclass(frozen=True)
class Label:
    """A label; `number` is its identity within a statement, `size` the name of its extent."""

    number: int
    size: str


@dataclass(frozen=True)
class Number:
    """A constant."""

    value: bool | int | float | complex


@dataclass(frozen=True)
class Position:
    """A label as a number: the value of its index."""

    label: Label


@dataclass(frozen=True)
class Extent:
    """The extent of a size as a number, plus something."""

    size: str
    plus: int = 0


@dataclass(frozen=True)
class Read:
    """A tensor at an index; an entry that is not a label is a gather or a constant index."""

    tensor: str
    index: tuple[Label | Expression, ...]


@dataclass(frozen=True)
class Operation:
    """An infix operator, "neg", "~", a function, a cast, or a macro without labels."""

    name: str
    arguments: tuple[Expression, ...]


@dataclass(frozen=True)
class Aggregation:
    """An aggregation, or a macro over labels such as mean and softmax."""

    name: str
    labels: tuple[Label, ...]
    body: Expression
    implicit: bool = False


@dataclass(frozen=True)
class Gradient:
    """The gradient of a tensor without dimensions by another tensor, at the statement's labels."""

    loss: str
    element: Read


Expression: TypeAlias = Number | Position | Extent | Read | Operation | Aggregation | Gradient


@dataclass(frozen=True)
class Define:
    """The statement that defines a tensor.

    With `index_on_left` it is written with an index left of =, if its value has the form for that.
    """

    name: str
    labels: tuple[Label, ...]
    value: Expression
    index_on_left: bool = False


@dataclass(frozen=True)
class Input:
    """An input: its dimensions by the names of their sizes, and its values.

    If `indexes` names a size, the values are indices below it.
    """

    name: str
    dimensions: tuple[str, ...]
    values: np.ndarray
    indexes: str | None = None


@dataclass(frozen=True)
class Until:
    """The condition that ends a loop: a tensor without dimensions is above a limit."""

    tensor: str
    limit: float


@dataclass(frozen=True)
class Loop:
    """How a program is repeated: the tensors that become inputs of the next step, and its end."""

    steps: int
    carry: Mapping[str, str]
    until: Until | None = None
    record: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """Inputs and statements. A statement reads inputs and earlier statements.

    Those of a recurrence follow one another, and read each other at other indices.
    """

    sizes: Mapping[str, int]
    inputs: tuple[Input, ...]
    statements: tuple[Define, ...]
    outputs: tuple[str, ...] | None = None  # None: the tensors that no statement reads
    loop: Loop | None = None

    def output_names(self) -> tuple[str, ...]:
        if self.outputs is not None:
            return self.outputs
        used = set()
        for statement in self.statements:
            if not isinstance(statement.value, Gradient):  # which does not use its loss
                used |= tensors_read(statement.value)
        return tuple(item.name for item in self.statements if item.name not in used)

    def needed(self) -> set[str]:
        """Return the names of the tensors that the outputs depend on, and of the outputs."""
        found = set(self.output_names())
        if self.loop is not None:
            found |= {*self.loop.carry.values(), *self.loop.record}
        size = 0
        while size != len(found):  # the statements of a recurrence read each other's results
            size = len(found)
            for statement in reversed(self.statements):
                if statement.name in found:
                    found |= tensors_read(statement.value)
        return found


# ---- walking ------------------------------------------------------------------------------------


def children(node: Expression) -> tuple[Expression, ...]:
    if isinstance(node, Operation):
        return node.arguments
    if isinstance(node, Aggregation):
        return (node.body,)
    if isinstance(node, Read):
        return tuple(entry for entry in node.index if not isinstance(entry, Label))
    if isinstance(node, Gradient):
        return (node.element,)
    return ()


def walk(node: Expression) -> Iterator[Expression]:
    yield node
    for child in children(node):
        yield from walk(child)


def tensors_read(node: Expression) -> set[str]:
    found = {part.tensor for part in walk(node) if isinstance(part, Read)}
    return found | {node.loss} if isinstance(node, Gradient) else found


def rebuilt(node: Expression, change: Callable[[Expression], Expression]) -> Expression:
    """Return the node with `change` applied to each of its children."""
    if isinstance(node, Operation):
        return replace(node, arguments=tuple(change(argument) for argument in node.arguments))
    if isinstance(node, Aggregation):
        return replace(node, body=change(node.body))
    if isinstance(node, Read):
        index = []
        for entry in node.index:
            index.append(entry if isinstance(entry, Label) else change(entry))
        return replace(node, index=tuple(index))
    return node


def indexing_labels(node: Expression, enter_implicit: bool = True) -> set[Label]:
    """Return the labels that stand alone as an index."""
    if isinstance(node, Aggregation) and node.implicit and not enter_implicit:
        return set()
    found: set[Label] = set()
    if isinstance(node, Read):
        found.update(entry for entry in node.index if isinstance(entry, Label))
    for child in children(node):
        found |= indexing_labels(child, enter_implicit)
    return found


def all_labels(statement: Define) -> list[Label]:
    """Return the labels of a statement: those on the left, then those that aggregations bind."""
    found = dict.fromkeys(statement.labels)
    for node in walk(statement.value):
        if isinstance(node, Aggregation):
            found.update(dict.fromkeys(node.labels))
    return list(found)


# ---- text ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Style:
    """How a program is written: the names of labels, and whether extents that are clear stand."""

    names: tuple[str, ...] = LABEL_NAMES
    shows_extents: bool = False


PLAIN = Style()


def program_text(program: Program, style: Style = PLAIN) -> str:
    return "\n".join(statement_text(item, program.sizes, style) for item in program.statements)


@dataclass(frozen=True)
class Scattered:
    """The parts of ⊕(where(index == place, body, neutral))."""

    place: Label
    index: Expression
    body: Expression


def scattered_parts(statement: Define) -> Scattered | None:
    """Return the parts of a statement that can be written with an index left of =."""
    node = statement.value
    if not isinstance(node, Aggregation) or not isinstance(node.body, Operation):
        return None
    if node.body.name != "where":
        return None
    condition, body, otherwise = node.body.arguments
    if not isinstance(condition, Operation) or condition.name != "==":
        return None
    index, place = condition.arguments
    if not isinstance(place, Position) or not isinstance(otherwise, Number):
        return None
    neutral: dict[str, object] = {"sum": 0, "prod": 1, "any": False, "all": True}
    neutral.update({"max": -np.inf, "min": np.inf})
    value = neutral.get(node.name)
    if type(otherwise.value) is not type(value) or otherwise.value != value:
        return None
    used = set(indexing_labels(index)) | set(indexing_labels(body))
    for part in (*walk(index), *walk(body)):
        if isinstance(part, Position):
            used.add(part.label)
        if isinstance(part, Aggregation):
            return None
    is_read = any(isinstance(part, Read) for part in walk(index))
    bound = [label for label in node.labels if label in indexing_labels(index)]
    if place.label not in statement.labels or place.label in used or not is_read or not bound:
        return None
    return Scattered(place.label, index, body)


def _text_with_index(
    statement: Define, parts: Scattered, sizes: Mapping[str, int], style: Style
) -> str:
    """Return a statement with an index left of =."""
    node = statement.value
    assert isinstance(node, Aggregation)
    writer = _Writer(sizes, False, style)
    labels = [label for label in statement.labels if label != parts.place]
    names = {}
    for number, label in enumerate((*labels, *node.labels)):
        names[label] = style.names[number]
    known = indexing_labels(parts.index) | indexing_labels(parts.body)
    left = []
    for label in statement.labels:
        if label == parts.place:
            left.append(f"{writer.text(parts.index, names, len(names))}:{sizes[label.size]}")
        else:
            left.append(writer.label_text(label, names, known))
    bound = [writer.label_text(label, names, known) for label in node.labels]
    body = writer.text(parts.body, names, len(names))
    return f"{statement.name}[{','.join(left)}] = {node.name}[{','.join(bound)}]({body})"


def statement_text(statement: Define, sizes: Mapping[str, int], style: Style = PLAIN) -> str:
    parts = scattered_parts(statement) if statement.index_on_left else None
    if parts is not None:
        return _text_with_index(statement, parts, sizes, style)
    aggregations = [node for node in walk(statement.value) if isinstance(node, Aggregation)]
    writer = _Writer(sizes, all(node.implicit for node in aggregations), style)
    names = {label: style.names[place] for place, label in enumerate(statement.labels)}
    left = statement.name
    if statement.labels:
        known = indexing_labels(statement.value)
        entries = [writer.label_text(label, names, known) for label in statement.labels]
        left += f"[{','.join(entries)}]"
    return f"{left} = {writer.text(statement.value, names, len(names))}"


class _Writer:
    """Writes one statement.

    Aggregations side by side may use the same names if none of them names its labels in brackets.
    """

    def __init__(self, sizes: Mapping[str, int], reuse_names: bool, style: Style) -> None:
        self.sizes = sizes
        self.style = style
        self.reuse_names = reuse_names
        self.names_used = 0

    def label_text(self, label: Label, names: Mapping[Label, str], known: set[Label]) -> str:
        if label in known and not self.style.shows_extents:
            return names[label]
        return f"{names[label]}:{self.sizes[label.size]}"

    def text(self, node: Expression, names: Mapping[Label, str], depth: int) -> str:
        self.names_used = max(self.names_used, depth)
        if isinstance(node, Number):
            return number_text(node.value)
        if isinstance(node, Position):
            return names[node.label]
        if isinstance(node, Extent):
            return str(self.sizes[node.size] + node.plus)
        if isinstance(node, Read):
            entries = []
            for entry in node.index:
                if isinstance(entry, Label):
                    entries.append(names[entry])
                else:
                    entries.append(self.text(entry, names, depth))
            return f"{node.tensor}[{','.join(entries)}]" if entries else node.tensor
        if isinstance(node, Gradient):
            return f"grad({node.loss}, {self.text(node.element, names, depth)})"
        if isinstance(node, Operation):
            arguments = [self.text(argument, names, depth) for argument in node.arguments]
            if node.name in INFIX:
                return f"({arguments[0]} {node.name} {arguments[1]})"
            if node.name == "neg":
                return f"(-{arguments[0]})"
            if node.name == "~":
                return f"(~{arguments[0]})"
            return f"{node.name}({', '.join(arguments)})"
        if node.name in KEEPING:
            entries = [names[label] for label in node.labels]
            return f"{node.name}[{','.join(entries)}]({self.text(node.body, names, depth)})"
        first = depth if self.reuse_names else self.names_used
        inner = dict(names)
        for place, label in enumerate(node.labels):
            inner[label] = self.style.names[first + place]
        head = node.name
        if not node.implicit:
            known = indexing_labels(node.body)
            entries = [self.label_text(label, inner, known) for label in node.labels]
            head += f"[{','.join(entries)}]"
        return f"{head}({self.text(node.body, inner, first + len(node.labels))})"


def number_text(value: bool | int | float | complex) -> str:
    if isinstance(value, complex):
        return f"({value.real!r} + {value.imag!r}j)"
    if isinstance(value, float) and not np.isfinite(value):
        return {"inf": "inf", "-inf": "(-inf)", "nan": "nan"}[str(value)]
    if not isinstance(value, bool) and (value < 0 or str(value).startswith("-")):
        return f"({value!r})"
    return repr(value)
