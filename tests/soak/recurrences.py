"""Random programs with recurrences, and how the oracle finds and reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .tree import (
    Aggregation,
    Define,
    Expression,
    Input,
    Label,
    Number,
    Operation,
    Position,
    Program,
    Read,
    rebuilt,
    tensors_read,
)

if TYPE_CHECKING:
    from .generate import ProgramMaker

MOST_EXTENT = 13  # of the label along which steps go: the oracle evaluates all of them so often
DTYPES = {
    "float64": 30.0,
    "float32": 20.0,
    "int64": 15.0,
    "int32": 8.0,
    "complex128": 8.0,
    "bool": 4.0,
    "uint8": 4.0,
    "float16": 3.0,
}
FORMS = ("elementwise", "second order", "contraction", "semiring", "together", "three together")


# ---- for the oracle -----------------------------------------------------------------------------


def in_groups(statements: Sequence[Define]) -> list[tuple[Define, ...]]:
    """Return statements in order; those that read each other's results are together."""
    places = {statement.name: place for place, statement in enumerate(statements)}
    found = []
    start = 0
    while start < len(statements):
        stop = start + 1
        place = start
        while place < stop:
            for name in tensors_read(statements[place].value):
                stop = max(stop, places.get(name, -1) + 1)
            place += 1
        found.append(tuple(statements[start:stop]))
        start = stop
    return found


def is_recurrence(group: Sequence[Define]) -> bool:
    """Return whether statements that are together need steps."""
    return len(group) > 1 or group[0].name in tensors_read(group[0].value)


def with_indices_inside(node: Expression, sizes: dict[str, int]) -> Expression:
    """Return an expression in which indices are inside where a condition on the label fails."""
    match node:
        case Operation("where", (Operation(">=" | "<", (Position(label), _)), guarded, _)):
            inside = _clamped(guarded, label, sizes)
            node = replace(node, arguments=(node.arguments[0], inside, node.arguments[2]))
    return rebuilt(node, lambda child: with_indices_inside(child, sizes))


def _clamped(node: Expression, label: Label, sizes: dict[str, int]) -> Expression:
    if isinstance(node, Read):
        index: list[Label | Expression] = []
        for entry in node.index:
            match entry:
                case Operation("-" | "+", (Position(read), Number())) if read == label:
                    last = Number(max(0, sizes[label.size] - 1))
                    entry = Operation("minimum", (entry, last))
                    entry = Operation("maximum", (entry, Number(0)))
            index.append(entry)
        return replace(node, index=tuple(index))
    return rebuilt(node, lambda child: _clamped(child, label, sizes))


# ---- programs -----------------------------------------------------------------------------------


class RecurrenceMaker:
    """Makes a program with one recurrence, and something that reads its result."""

    def __init__(self, maker: ProgramMaker) -> None:
        self.maker = maker
        self.draw = maker.draw

    def program(self) -> Program:
        """Return a program; it may have no value."""
        draw = self.draw
        maker = self.maker
        maker.values = draw.weighted({"plain": 80.0, "wide": 10.0, "not finite": 10.0})
        for number, most in enumerate((MOST_EXTENT, 8, 3)):
            maker.sizes[f"s{number}"] = draw.between(0 if draw.chance(0.05) else 1, most)
        self.dtype = draw.weighted(DTYPES)
        self.form = draw.one(FORMS)
        self.backwards = draw.chance(0.35)
        self.time = maker.label("s0")
        self.row = maker.label("s1")
        labels = [self.time, self.row]
        if draw.chance(0.3):
            labels.append(maker.label("s2"))
        self.labels = tuple(draw.shuffled(labels))
        self.add_input("x", tuple(label.size for label in draw.shuffled(labels)))
        self.add_input("W", ("s1", "s1"))
        self.add_input("a", tuple(label.size for label in labels if label is not self.time))
        count = {"together": 2, "three together": 3}.get(self.form, 1)
        self.names = [f"T{number + 1}" for number in range(count)]
        read = np.result_type(*(item.values.dtype for item in maker.inputs.values()))
        for name in self.names:
            maker.dimensions[name] = tuple(label.size for label in self.labels)
            maker.dtypes[name] = read.name  # about what it will be
        statements = [Define(name, self.labels, self.value(name)) for name in self.names]
        if draw.chance(0.2):
            statements = draw.shuffled(statements)
        outputs = [name for name in self.names if draw.chance(0.6)]
        if draw.chance(0.5):
            statements.append(self.reader())
            outputs.append("Z")
        program = maker.current(tuple(statements))
        return replace(program, outputs=tuple(outputs or self.names[-1:]))

    def add_input(self, name: str, dimensions: tuple[str, ...]) -> None:
        from .generate import make_values

        maker = self.maker
        shape = tuple(maker.sizes[size] for size in dimensions)
        dtype = self.dtype if self.draw.chance(0.85) else self.draw.weighted(DTYPES)
        values = make_values(self.draw, maker.values, dtype, shape)
        if name == "W" and values.dtype.kind in "fc":
            with np.errstate(invalid="ignore"):  # of inf and nan
                values = values / values.dtype.type(8)
        maker.inputs[name] = Input(name, dimensions, values)
        maker.dimensions[name] = dimensions
        maker.dtypes[name] = dtype

    def read(self, name: str, row: Label, shift: int = 0) -> Read:
        """Return a tensor at a row, and at a distance from the label of the steps."""
        if name in self.names:
            order = [(label.size, label) for label in self.labels]
        else:
            known = {label.size: label for label in self.labels}
            order = [(size, known[size]) for size in self.maker.dimensions[name]]
        index: list[Label | Expression] = []
        for size, label in order:
            entry: Label | Expression = row if size == "s1" else label
            if size == "s0" and shift:
                sign = "+" if self.backwards else "-"
                entry = Operation(sign, (Position(self.time), Number(shift)))
            index.append(entry)
        return Read(name, tuple(index))

    def state(self, name: str, row: Label, shift: int) -> Expression:
        """Return a tensor of an earlier step, or something else in the first ones."""
        draw = self.draw
        condition = Operation(">=", (Position(self.time), Number(shift)))
        if self.backwards:
            left = self.maker.sizes["s0"] - shift
            condition = Operation("<", (Position(self.time), Number(left)))
        otherwise: Expression = Number(draw.one((0, 1, 0.0)))
        if draw.chance(0.4):
            otherwise = self.read(draw.one(("x", "a")), row)
        return Operation("where", (condition, self.read(name, row, shift), otherwise))

    def value(self, name: str) -> Expression:
        draw = self.draw
        maker = self.maker
        shift = draw.weighted({1: 70.0, 2: 20.0, 3: 10.0})
        x = self.read("x", self.row)
        place = self.names.index(name)
        if place:  # what the tensors before it are in the same step, and perhaps what it was itself
            x = maker.joined(self.operator(), x, self.read(self.names[place - 1], self.row))
            if draw.chance(0.5):
                return self.limited(x)
        earlier = self.names[-1] if place == 0 else name
        if self.form in ("contraction", "semiring") or (place == 0 and draw.chance(0.2)):
            other = maker.label("s1")
            weight = Read("W", (self.row, other) if draw.chance(0.7) else (other, self.row))
            operator, aggregation = "*", "sum"
            if self.form == "semiring":
                aggregation = draw.one(("max", "min"))
                operator = draw.one(("+", "minimum", "maximum"))
            body = maker.joined(operator, weight, self.state(earlier, other, shift))
            body = maker.real(body) if aggregation != "sum" else body
            found: Expression = Aggregation(aggregation, (other,), body)
        else:
            found = self.state(earlier, self.row, shift)
        if self.form == "second order":
            second = self.state(earlier, self.row, shift + draw.between(1, 2))
            found = maker.joined(self.operator(), found, second)
        return self.limited(maker.joined(self.operator(), found, x))

    def operator(self) -> str:
        weights = {"+": 5.0, "-": 3.0, "*": 2.0, "maximum": 1.0, "minimum": 1.0}
        if self.dtype == "bool":
            weights = {"&": 2.0, "|": 2.0, "==": 1.0, "maximum": 1.0}
        return self.draw.weighted(weights)

    def limited(self, node: Expression) -> Expression:
        """Return an expression that stays small, or the same one."""
        draw = self.draw
        kind = self.maker.kind(node)
        if draw.chance(0.4):
            return node
        if kind == "f":
            return Operation(draw.one(("tanh", "sin", "sigmoid", "abs")), (node,))
        if kind in "iu":
            return Operation("%", (node, Number(draw.between(2, 97))))
        return node

    def reader(self) -> Define:
        """Return a statement that reads the last tensor of the recurrence."""
        draw = self.draw
        name = draw.one(self.names)
        kept = tuple(label for label in self.labels if draw.chance(0.5))
        summed = tuple(label for label in self.labels if label not in kept)
        value: Expression = self.read(name, self.row)
        if draw.chance(0.4):
            value = self.maker.joined("+", value, self.read("x", self.row))
        if not summed:
            return Define("Z", kept, value)
        return Define("Z", kept, Aggregation("sum", summed, value))
