"""Random programs. A program follows from its seed and number alone, on every machine."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from .drive import BACKEND_VARIABLE
from .oracle import Invalid, Value, evaluate, exact
from .recurrences import RecurrenceMaker
from .tree import (
    STEP,
    Aggregation,
    Define,
    Expression,
    Extent,
    Input,
    Label,
    Number,
    Operation,
    Position,
    Program,
    Read,
    indexing_labels,
    tensors_read,
    walk,
)

THEMES = (
    "product",
    "semiring",
    "aggregation",
    "nested",
    "gather",
    "diagonal",
    "mask",
    "index",
    "macro",
    "elementwise",
    "scatter",
    "mixed",
)
# Programs about something that the themes seldom make.
SPECIAL_THEMES = (
    *("long integers", "bfloat16", "label and float", "number in brackets"),
    "recurrence",
)
DTYPES = (
    *("float64", "float32", "int64", "int32", "bool", "complex128", "complex64", "float16"),
    *("int8", "int16", "uint8", "uint16", "uint32", "uint64"),
)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
MOST_POINTS = 2**13  # of the index space of one aggregation
MOST_STEPS = 5  # of a loop


class Draw:
    """A source of choices. It uses only random(), whose sequence Python promises to keep."""

    def __init__(self, *key: Any) -> None:
        self._random = random.Random("/".join(map(str, key))).random

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def below(self, limit: int) -> int:
        return int(self._random() * limit)

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def share(self) -> float:
        return self._random()

    def one(self, choices: Sequence[Any]) -> Any:
        return choices[self.below(len(choices))]

    def weighted(self, weights: dict[Any, float]) -> Any:
        point = self._random() * sum(weights.values())
        for choice, weight in weights.items():
            point -= weight
            if point < 0:
                return choice
        return next(iter(weights))

    def shuffled(self, choices: Sequence[Any]) -> list[Any]:
        left = list(choices)
        order = []
        while left:
            order.append(left.pop(self.below(len(left))))
        return order


# ---- values -------------------------------------------------------------------------------------

VALUES = {"plain": 62.0, "wide": 12.0, "extreme": 13.0, "not finite": 13.0}
_EXTREME_INTEGERS = (-1, 0, 1, 2, 3, 7, 46341, 65536, 2**20, 2**31 - 1, -(2**31), 2**31 - 2)
_EXTREME_LONG_INTEGERS = (2**31, 2**32, 3037000500, 2**53 + 1, 2**63 - 1, -(2**63), 2**62)


def make_values(draw: Draw, kind: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of a kind of values. Ordinary numbers are exact in every dtype."""
    count = math.prod(shape)
    numpy_dtype = np.dtype(dtype)
    if numpy_dtype.kind == "b":
        numbers: list[Any] = [draw.chance(0.5) for _ in range(count)]
    elif numpy_dtype.kind in "iu":
        numbers = [_integer(draw, kind, numpy_dtype) for _ in range(count)]
    elif numpy_dtype.kind == "f":
        numbers = [_float(draw, kind, numpy_dtype) for _ in range(count)]
    else:
        part = np.dtype("float32" if dtype == "complex64" else "float64")
        numbers = []
        for _ in range(count):
            numbers.append(complex(_float(draw, kind, part), _float(draw, kind, part)))
    return np.array(numbers, numpy_dtype).reshape(shape)


def _integer(draw: Draw, kind: str, dtype: np.dtype) -> int:
    limits = np.iinfo(dtype)
    return min(max(_any_integer(draw, kind, dtype), limits.min), limits.max)


def _any_integer(draw: Draw, kind: str, dtype: np.dtype) -> int:
    if kind == "extreme" and draw.chance(0.6):
        if dtype.itemsize == 8 and draw.chance(0.5):
            return draw.one(_EXTREME_LONG_INTEGERS)
        return draw.one(_EXTREME_INTEGERS)
    if kind == "wide":
        return draw.between(-1000, 1000)
    return draw.between(-4, 5)


def _float(draw: Draw, kind: str, dtype: np.dtype) -> float:
    if kind == "not finite" and draw.chance(0.15):
        return draw.one((math.inf, -math.inf, math.nan))
    if kind == "extreme" and draw.chance(0.3):
        limits = np.finfo(dtype)
        smallest = [limits.tiny, limits.smallest_subnormal]
        if os.environ.get(BACKEND_VARIABLE) == "cupy":
            smallest = [limits.eps, limits.eps]  # kernels on GPUs flush smaller numbers to 0
        return float(draw.one((limits.max, -limits.max, *smallest, limits.eps, 0.0, -0.0, 1.0)))
    if kind == "wide":
        return draw.between(-2000, 2000) / 8
    return draw.between(-64, 64) / 16


# ---- programs -----------------------------------------------------------------------------------

_EXTENTS = {
    0: 2.0,
    1: 8.0,
    2: 12.0,
    3: 12.0,
    4: 12.0,
    5: 10.0,
    6: 8.0,
    7: 8.0,
    8: 8.0,
    11: 5.0,
    12: 5.0,
    13: 5.0,
    16: 4.0,
    17: 3.0,
    23: 2.0,
    48: 1.0,
}
_KIND_ORDER = "buifc"
_OPERATORS = {
    "+": 4.0,
    "-": 3.0,
    "*": 5.0,
    "/": 1.2,
    "//": 0.6,
    "%": 0.7,
    "**": 0.5,
    "maximum": 1.0,
    "minimum": 1.0,
    "arctan2": 0.3,
    "clip": 0.5,
    "<": 0.4,
    ">=": 0.4,
    "==": 0.3,
    "!=": 0.3,
    "&": 0.3,
    "|": 0.3,
    "^": 0.2,
    "<<": 0.2,
    ">>": 0.2,
}
_MORE_MACROS = ("std", "norm", "count", "argmin", "argmax")


def without_unused_inputs(program: Program) -> Program:
    """Return the program without inputs that no statement reads."""
    used: set[str] = set()
    for statement in program.statements:
        used |= tensors_read(statement.value)
    inputs = tuple(item for item in program.inputs if item.name in used)
    return replace(program, inputs=inputs)


class ProgramMaker:
    """Makes one program, statement by statement; the oracle evaluates each of them at once."""

    def __init__(self, draw: Draw, theme: str, strict: bool, with_bfloat16: bool = False) -> None:
        self.draw = draw
        self.with_bfloat16 = with_bfloat16
        self.theme = theme
        self.strict = strict
        self.values = draw.weighted(VALUES)
        if theme in ("index", "diagonal") and draw.chance(0.5):
            self.values = "plain"
        self.sizes: dict[str, int] = {}
        self.inputs: dict[str, Input] = {}
        self.statements: list[Define] = []
        self.dimensions: dict[str, tuple[str, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.given: dict[str, Value] = {}  # tensors that are no inputs, for the oracle
        self.labels_made = 0

    def program(self) -> Program:
        draw = self.draw
        for number in range(draw.between(2, 4)):
            self.sizes[f"s{number}"] = draw.weighted(_EXTENTS)
        favourite = draw.weighted(
            dict(zip(DTYPES, (30, 18, 12, 10, 6, 7, 5, 6, 3, 3, 4, 3, 3, 4), strict=True))
        )
        for number in range(draw.between(1, 4)):
            dtype = favourite if draw.chance(0.75) else draw.one(DTYPES)
            self.add_input("ABCD"[number], dtype)
        if self.with_bfloat16:
            self.store_floats_in_bfloat16()
        if self.theme in ("gather", "scatter", "mixed"):
            self.add_index_input("n")
        wanted = draw.weighted({1: 45.0, 2: 30.0, 3: 15.0, 4: 10.0})
        attempts = 0
        while len(self.statements) < wanted and attempts < 40:
            attempts += 1
            self.add_statement(f"T{len(self.statements) + 1}")
        return self.pruned(self.current(tuple(self.statements)))

    def special_program(self) -> Program:
        """Return a program of one statement, or a recurrence, that is about the theme."""
        if self.theme == "recurrence":
            return self.recurrence()
        draw = self.draw
        for number in range(3):
            self.sizes[f"s{number}"] = max(1, draw.weighted(_EXTENTS))
        makers = {
            "long integers": self.statistic_of_long_integers,
            "bfloat16": self.product_with_bfloat16,
            "label and float": self.label_compared_with_float,
            "number in brackets": self.number_in_brackets,
        }
        while not self.statements:
            self.inputs.clear()
            self.dimensions.clear()
            self.keep_if_valid(makers[self.theme]())
        return without_unused_inputs(self.current(tuple(self.statements)))

    def recurrence(self) -> Program:
        while True:
            program = RecurrenceMaker(self).program()
            try:
                evaluate(program, self.strict)
            except Invalid:
                continue
            return without_unused_inputs(program)

    def statistic_of_long_integers(self) -> Define:
        """Return a mean or the like of numbers such as time stamps, whose sums wrap around."""
        draw = self.draw
        self.values = draw.one(("extreme", "extreme", "plain"))
        for name in "AB":
            self.add_input(name, draw.one(("int64", "uint64")))
        labels = self.some_labels("A")
        name = draw.one(("mean", "mean", "var", "std", "norm", "logsumexp"))
        return Define("T1", labels, self.aggregation(list(labels), name, ("+", "-"), 1))

    def some_labels(self, tensor: str) -> tuple[Label, ...]:
        sizes = dict.fromkeys(self.dimensions[tensor])
        return tuple(self.label(size) for size in sizes if self.draw.chance(0.5))

    def product_with_bfloat16(self) -> Define:
        """Return a sum of products with a tensor in bfloat16 that no cast makes wider."""
        draw = self.draw
        self.values = draw.one(("plain", "wide"))
        self.add_input("A", "float32")
        self.store_floats_in_bfloat16()
        longer = ("int16", "int32", "int64", "uint16", "uint32", "uint64", "float16")
        self.add_input("B", draw.one(longer))
        names = draw.shuffled("AB")
        labels = {}
        for name in names:
            for size in self.dimensions[name]:
                labels[size] = labels.get(size) or self.label(size)
        reads = []
        for name in names:
            reads.append(Read(name, tuple(labels[size] for size in self.dimensions[name])))
        kept = tuple(label for label in labels.values() if draw.chance(0.4))
        summed = tuple(label for label in labels.values() if label not in kept)
        product = Operation("*", tuple(reads))
        return Define("T1", kept, Aggregation("sum", summed, product) if summed else product)

    def label_compared_with_float(self) -> Define:
        """Return what a label selects, or an index scatters, by a tensor of floats."""
        draw = self.draw
        rows, places = self.label("s0"), self.label("s1")
        extent = self.sizes["s1"]
        numbers = [draw.below(2 * extent + 2) / 2 - 0.5 for _ in range(self.sizes["s0"])]
        if draw.chance(0.3):
            numbers[0] = math.nan
        dtype = draw.one(("float32", "float64", "float16"))
        self.inputs["y"] = Input("y", ("s0",), np.array(numbers, dtype))
        self.dimensions["y"], self.dtypes["y"] = ("s0",), dtype
        dtype = draw.one(("float64", "float32", "int64", "int32"))
        sizes = draw.one((("s0",), ("s0", "s1"), ()))
        values = make_values(draw, "plain", dtype, tuple(self.sizes[size] for size in sizes))
        self.inputs["X"] = Input("X", sizes, values)
        self.dimensions["X"], self.dtypes["X"] = sizes, dtype
        sides = [Position(places), Read("y", (rows,))]
        operator = draw.weighted({"==": 8.0, "!=": 1.0, "<": 1.0, ">=": 1.0})
        condition = Operation(operator, tuple(draw.shuffled(sides)))
        own = Read("X", tuple({"s0": rows, "s1": places}[size] for size in sizes))
        value = Operation("where", (condition, own, Number(0)))
        summed = draw.one(((), (rows,), (places,), (rows, places)))
        kept = tuple(label for label in (rows, places) if label not in summed)
        if not summed:
            return Define("T1", kept, value)
        name = draw.one(("sum", "sum", "max", "prod"))
        return Define("T1", kept, Aggregation(name, summed, value))

    def number_in_brackets(self) -> Define:
        """Return an expression of elements at an index that is a number of the program."""
        draw = self.draw
        target = draw.one(list(self.sizes))
        for name in ("first", "rows"):
            values = np.array(draw.below(self.sizes[target]), draw.one(("int64", "int32")))
            self.inputs[name] = Input(name, (), values, indexes=target)
            self.dimensions[name], self.dtypes[name] = (), values.dtype.name
        sizes = draw.shuffled([target, *(draw.one(list(self.sizes)) for _ in range(2))])
        values = make_values(draw, "plain", "float64", tuple(self.sizes[size] for size in sizes))
        self.inputs["A"] = Input("A", tuple(sizes), values)
        self.dimensions["A"], self.dtypes["A"] = tuple(sizes), "float64"
        labels: list[Label] = []
        summed: list[Label] = []
        index: list[Label | Expression] = []
        for place, size in enumerate(sizes):
            if place == sizes.index(target):
                index.append(Read(draw.one(("first", "rows")), ()))
            else:
                index.append(self.label(size))
                draw.one((labels, summed)).append(index[-1])
        value: Expression = Read("A", tuple(index))
        if draw.chance(0.3):
            value = Operation("+", (value, Read("rows", ())))
        if summed:
            value = Aggregation("sum", tuple(summed), value, implicit=draw.chance(0.7))
        return Define("T1", tuple(labels), value)

    def current(self, statements: tuple[Define, ...]) -> Program:
        return Program(dict(self.sizes), tuple(self.inputs.values()), statements)

    def pruned(self, program: Program) -> Program:
        outputs = None
        if len(program.statements) > 1 and self.draw.chance(0.25):
            # An output that another statement reads, too.
            names = [item.name for item in program.statements]
            chosen = [name for name in names[:-1] if self.draw.chance(0.5)]
            outputs = (*chosen, names[-1])
        return without_unused_inputs(replace(program, outputs=outputs))

    def add_input(self, name: str, dtype: str) -> None:
        draw = self.draw
        count = draw.weighted({0: 4.0, 1: 22.0, 2: 50.0, 3: 20.0, 4: 4.0})
        names = list(self.sizes)
        dimensions = tuple(draw.one(names) for _ in range(count))
        if self.theme == "diagonal" and count >= 2 and draw.chance(0.7):
            dimensions = (dimensions[0], *dimensions[:-1])
        while math.prod(self.sizes[size] for size in dimensions) > 1500:
            dimensions = dimensions[1:]
        shape = tuple(self.sizes[size] for size in dimensions)
        values = make_values(draw, self.values, dtype, shape)
        self.inputs[name] = Input(name, dimensions, values)
        self.dimensions[name] = dimensions
        self.dtypes[name] = dtype

    def store_floats_in_bfloat16(self) -> None:
        """Store inputs in bfloat16, which numpy cannot compute with: what is read is cast."""
        for name, item in self.inputs.items():
            if item.values.dtype.kind == "f":
                with np.errstate(over="ignore"):
                    values = item.values.astype(BFLOAT16)
                self.inputs[name] = replace(item, values=values)
                self.dtypes[name] = BFLOAT16.name

    def add_index_input(self, name: str) -> None:
        """Add a tensor of indices into dimensions of some size."""
        draw = self.draw
        usable = [size for size, extent in self.sizes.items() if extent > 0]
        if not usable:
            return
        target = draw.one(usable)
        dimensions = tuple(draw.one(list(self.sizes)) for _ in range(draw.between(1, 2)))
        shape = tuple(self.sizes[size] for size in dimensions)
        numbers = [draw.below(self.sizes[target]) for _ in range(math.prod(shape))]
        dtype = draw.one(("int64", "int32"))
        values = np.array(numbers, dtype).reshape(shape)
        self.inputs[name] = Input(name, dimensions, values, indexes=target)
        self.dimensions[name] = dimensions
        self.dtypes[name] = dtype

    def add_statement(self, name: str) -> None:
        """Add a statement; one that has no value, or that is too large, is left out."""
        statement = self.statement(name)
        if sum(1 for _ in walk(statement.value)) <= 45:
            self.keep_if_valid(statement)

    def keep_if_valid(self, statement: Define) -> bool:
        """Add a statement, unless it has no value."""
        try:
            found = self.value_of(statement)
        except Invalid:
            return False
        self.statements.append(statement)
        self.dimensions[statement.name] = tuple(label.size for label in statement.labels)
        self.dtypes[statement.name] = found.value.dtype.name
        return True

    def value_of(self, statement: Define) -> Value:
        program = self.current((*self.statements, statement))
        return evaluate(program, self.strict, self.given)[statement.name]

    def keep_inputs(self, program: Program) -> None:
        """Go on with the inputs that a program reads, and with the number of a step."""
        self.inputs = {item.name: item for item in program.inputs}
        kept = {*self.inputs, *(item.name for item in program.statements)}
        for name in list(self.dimensions):
            if name not in kept:
                del self.dimensions[name]
        self.given = {STEP: exact(np.array(0, np.int64))}
        self.dimensions[STEP] = ()
        self.dtypes[STEP] = "int64"

    # ---- statements -----------------------------------------------------------------------------

    def statement(self, name: str) -> Define:
        draw = self.draw
        self.labels_made = 0
        base = self.tensor()
        sizes = draw.shuffled(self.dimensions[base])[
            : draw.weighted({0: 1.0, 1: 4.0, 2: 5.0, 3: 2.0})
        ]
        if draw.chance(0.12):
            sizes.append(draw.one(list(self.sizes)))
        while math.prod(max(1, self.sizes[size]) for size in sizes) > 800:
            sizes.pop()
        labels = [self.label(size) for size in sizes]
        theme = self.theme
        if theme == "mixed" or draw.chance(0.12):
            theme = draw.one(THEMES[:-1])
        if theme == "scatter":
            value = self.scattered(labels)
            return Define(name, tuple(labels), value, index_on_left=draw.chance(0.6))
        value = self.themed(theme, labels)
        if draw.chance(0.15):
            value = self.combined(value, self.expression(labels, 1))
        return Define(name, tuple(labels), value)

    def themed(self, theme: str, labels: list[Label]) -> Expression:
        draw = self.draw
        if theme == "product":
            return self.aggregation(labels, "sum", ("*",), draw.between(2, 4))
        if theme == "semiring":
            pairs = (
                ("max", ("+",)),
                ("min", ("+",)),
                ("max", ("minimum",)),
                ("min", ("maximum",)),
                ("max", ("*",)),
                ("min", ("-",)),
                ("prod", ("*",)),
                ("prod", ("+",)),
                ("sum", ("+", "-")),
                ("any", ("&",)),
                ("all", ("|",)),
                ("any", ("==", "<")),
                ("all", (">=", "!=")),
            )
            name, operators = draw.one(pairs)
            return self.aggregation(labels, name, operators, draw.between(2, 3))
        if theme == "aggregation":
            name = draw.one(("sum", "prod", "max", "min", "any", "all"))
            return self.aggregation(
                labels, name, ("*", "+", "-", "/", "maximum"), draw.between(1, 3)
            )
        if theme == "nested":
            return self.nested(labels)
        if theme == "diagonal":
            if draw.chance(0.5):
                return self.aggregation(
                    labels, "sum", ("*", "+"), draw.between(1, 2), diagonal=True
                )
            return self.expression(labels, 2, diagonal=True)
        if theme == "mask":
            masked = self.masked(labels)
            if draw.chance(0.6):
                return self.aggregation(labels, None, ("*", "+"), 1, masked=True)
            return masked
        if theme == "macro":
            return self.macro(labels)
        if theme == "gather":
            if draw.chance(0.5):
                return self.aggregation(labels, None, ("*", "+"), draw.between(1, 2), gather=True)
            return self.expression(labels, 2, gather=True)
        if theme == "index":
            if draw.chance(0.5):
                return self.aggregation(labels, None, ("*", "+", "-"), 1, positions=True)
            return self.combined(self.position(labels), self.expression(labels, 1))
        return self.expression(labels, 3)

    def scattered(self, labels: list[Label]) -> Expression:
        """Return ⊕ over values that go where an index says, some of them nowhere."""
        draw = self.draw
        name = draw.weighted({"sum": 5.0, "max": 2.0, "min": 1.0, "prod": 1.0, "any": 1.0})
        if not labels:
            return self.aggregation(labels, name, ("*", "+"), 1)
        place = draw.one(labels)
        others = [label for label in labels if label != place]
        node = self.aggregation(others, name, ("*", "+", "-"), draw.between(1, 2))
        if not isinstance(node, Aggregation):
            return node
        scope = [*node.labels, *others]
        index = self.gathered(scope, place.size)
        item = self.inputs.get("n")
        if item is not None:
            fitting = []
            for size in item.dimensions:
                own = [label for label in scope if label.size == size]
                fitting.append(draw.one(own) if own else None)
            if None not in fitting:
                index = Read("n", tuple(fitting))
        if draw.chance(0.4):
            index = Operation(draw.one(("-", "+")), (index, Number(draw.between(1, 3))))
        masked: Expression = Number({"sum": 0, "prod": 1, "any": False}.get(name, 0))
        if name in ("max", "min"):
            masked = self.constant()
            if self.kind(node.body) == "f":
                masked = Number(-math.inf if name == "max" else math.inf)
        sides = (index, Position(place))
        if draw.chance(0.2):
            sides = (Position(place), index)
        body = Operation("where", (Operation("==", sides), node.body, masked))
        return replace(node, body=body, implicit=False)

    def label(self, size: str) -> Label:
        self.labels_made += 1
        return Label(self.labels_made, size)

    def tensor(self) -> str:
        """Return a tensor to read; those that statements define more often."""
        weights = {}
        for name in self.dimensions:
            weights[name] = 1.0 if name in self.inputs else 2.0
            if name in self.inputs and self.inputs[name].indexes:
                weights[name] = 0.2
        return self.draw.weighted(weights)

    # ---- expressions ----------------------------------------------------------------------------

    def expression(self, scope: list[Label], depth: int, **how: bool) -> Expression:
        draw = self.draw
        if depth <= 0 or draw.chance(0.15):
            return self.leaf(scope, **how)
        choice = draw.weighted({"binary": 5.0, "unary": 2.5, "mask": 1.0, "aggregate": 0.8})
        if choice == "binary":
            return self.combined(
                self.expression(scope, depth - 1, **how), self.expression(scope, depth - 1, **how)
            )
        if choice == "unary":
            return self.decorated(self.expression(scope, depth - 1, **how))
        if choice == "mask":
            return self.masked(scope)
        return self.aggregation(scope, None, ("*", "+"), draw.between(1, 2))

    def leaf(self, scope: list[Label], **how: bool) -> Expression:
        draw = self.draw
        if draw.chance(0.12):
            return self.constant()
        if scope and draw.chance(0.08):
            return self.position(scope)
        if draw.chance(0.04):
            return self.random(scope)
        return self.read(scope, **how)

    def random(self, scope: list[Label]) -> Expression:
        """Return a random number of a seed, of labels, and of the step if there is one."""
        draw = self.draw
        arguments: list[Expression] = [Number(draw.between(-3, 9))]
        for label in scope:
            value: Expression = Position(label)
            if draw.chance(0.3):
                value = Operation(draw.one(("*", "-", "//")), (value, Number(draw.between(2, 4))))
            if draw.chance(0.8):
                arguments.append(value)
        if STEP in self.dimensions:
            arguments.append(Read(STEP, ()))
        if len(arguments) == 1:  # a call of constants would be one
            arguments[0] = Operation("int64", (arguments[0],))
        name = draw.one(("uniform", "uniform32", "normal", "bernoulli"))
        if name == "bernoulli":
            arguments.insert(0, Number(draw.one((0.0, 0.25, 0.9, 1.0))))
        return Operation(name, tuple(arguments))

    def constant(self) -> Number:
        draw = self.draw
        if draw.chance(0.5):
            return Number(draw.between(-3, 7))
        if draw.chance(0.05):
            return Number(draw.one((math.inf, -math.inf, math.nan)))
        return Number(draw.one((0.5, 2.0, -1.5, 0.25, 3.0, 0.1, 1e-3)))

    def position(self, scope: list[Label]) -> Expression:
        if not scope:
            return self.constant()
        position: Expression = Position(self.draw.one(scope))
        if self.draw.chance(0.3):
            position = Operation("float32", (position,))
        return position

    def read(
        self,
        scope: list[Label],
        tensor: str | None = None,
        diagonal: bool = False,
        gather: bool = False,
    ) -> Expression:
        draw = self.draw
        name = tensor or self.tensor()
        index: list[Label | Expression] = []
        for size in self.dimensions[name]:
            fitting = [label for label in scope if label.size == size]
            fresh = [label for label in fitting if label not in index]
            if gather and draw.chance(0.5):
                index.append(self.gathered(scope, size))
            elif diagonal and fitting and draw.chance(0.6):
                index.append(draw.one(fitting))
            elif fresh and not draw.chance(0.04):
                index.append(draw.one(fresh))
            elif fitting and draw.chance(0.5):
                index.append(draw.one(fitting))
            else:
                index.append(self.gathered(scope, size))
        node = Read(name, tuple(index))
        if self.dtypes[name] == BFLOAT16.name:
            return Operation(draw.one(("float32", "float64")), (node,))
        return node

    def gathered(self, scope: list[Label], size: str) -> Expression:
        """Return an index into a dimension: from a tensor, by arithmetic, or a constant."""
        draw = self.draw
        extent = max(1, self.sizes[size])
        if STEP in self.dimensions and extent >= MOST_STEPS and draw.chance(0.3):
            return Read(STEP, ())
        suitable = []
        for item in self.inputs.values():
            if item.indexes == size and all(
                any(label.size == needed for label in scope) for needed in item.dimensions
            ):
                suitable.append(item)
        if suitable and draw.chance(0.6):
            item = draw.one(suitable)
            index = []
            for needed in item.dimensions:
                index.append(draw.one([label for label in scope if label.size == needed]))
            return Read(item.name, tuple(index))
        if scope and draw.chance(0.6):
            position = Position(draw.one(scope))
            offset = Number(draw.between(0, extent))
            if draw.chance(0.5):
                shifted = Operation("+", (position, offset))
                return Operation("%", (shifted, Extent(size)))
            return Operation("minimum", (Operation("+", (position, offset)), Extent(size, -1)))
        return Number(draw.below(extent))

    def masked(self, scope: list[Label]) -> Expression:
        draw = self.draw
        left = self.real(self.expression(scope, 1))
        if len(scope) > 1 and draw.chance(0.5):
            left = Position(draw.one(scope))
            right: Expression = Position(draw.one(scope))
        else:
            right = self.real(self.leaf(scope))
        condition = Operation(draw.one(("<", "<=", ">", ">=", "==", "!=")), (left, right))
        if draw.chance(0.3):
            other = Operation(
                draw.one(("<", ">=")), (self.real(self.leaf(scope)), self.real(self.leaf(scope)))
            )
            condition = Operation(draw.one(("&", "|")), (condition, other))
        if draw.chance(0.1):
            condition = Operation("~", (condition,))
        if draw.chance(0.15):
            return condition
        otherwise = self.leaf(scope) if draw.chance(0.4) else self.constant()
        return Operation("where", (condition, self.leaf(scope), otherwise))

    def macro(self, labels: list[Label]) -> Expression:
        draw = self.draw
        usable = [label for label in labels if self.sizes[label.size] > 0]
        if usable and draw.chance(0.5):
            name = draw.one(("softmax", "rmsnorm", "layernorm"))
            body = self.real(self.expression(labels, 1))
            occurring = indexing_labels(body)
            kept = [label for label in draw.shuffled(usable) if label in occurring]
            if kept and draw.chance(0.3):
                return Aggregation(draw.one(("cumsum", "cummax", "cummin")), (kept[0],), body)
            if kept:
                return Aggregation(name, tuple(kept[: draw.between(1, 2)]), body)
        if draw.chance(0.7):
            name = draw.one(("mean", "var", "logsumexp", "mean", *_MORE_MACROS))
            return self.aggregation(labels, name, ("*", "+"), draw.between(1, 2))
        name = draw.one(("relu", "sigmoid", "silu", "rsqrt"))
        return Operation(name, (self.number(self.real(self.expression(labels, 1))),))

    def nested(self, labels: list[Label]) -> Expression:
        draw = self.draw
        outer = draw.one(("sum", "max", "min", "sum", "prod"))
        inner = draw.one(("sum", "max", "min", "any", "mean", "prod"))
        return self.aggregation(labels, outer, ("*", "+"), 1, inner=inner)

    def aggregation(
        self,
        scope: list[Label],
        name: str | None,
        operators: Sequence[str],
        count: int,
        masked: bool = False,
        positions: bool = False,
        inner: str | None = None,
        **how: bool,
    ) -> Expression:
        """Return an aggregation over new labels of some tensors, combined by the operators."""
        draw = self.draw
        if name is None:
            name = draw.weighted(
                {"sum": 5.0, "max": 2.0, "min": 2.0, "prod": 1.0, "any": 1.0, "all": 1.0}
            )
        volume = math.prod(max(1, self.sizes[label.size]) for label in scope)
        needs_values = name in ("max", "min", "mean", "var", "logsumexp", *_MORE_MACROS)
        new: list[Label] = []
        tensors = [self.tensor() for _ in range(count)]
        for tensor in tensors:
            for size in self.dimensions[tensor]:
                extent = self.sizes[size]
                known = [label for label in (*scope, *new) if label.size == size]
                reuse = 0.6 if known else 0.1
                too_large = volume * max(1, extent) > MOST_POINTS or len(new) >= 4
                if draw.chance(reuse) or too_large or (needs_values and extent == 0):
                    continue
                new.append(self.label(size))
                volume *= max(1, extent)
        if not new:
            fitting = [
                size
                for size, extent in self.sizes.items()
                if extent > 0 and volume * extent <= MOST_POINTS
            ]
            if not fitting:
                return self.leaf(scope)
            new.append(self.label(draw.one(fitting)))
        everything = [*new, *scope]
        body: Expression | None = None
        for tensor in tensors:
            factor = self.read(draw.shuffled(everything), tensor, **how)
            if draw.chance(0.12):
                factor = self.decorated(factor)
            body = factor if body is None else self.joined(draw.one(operators), body, factor)
        assert body is not None
        if masked:
            body = self.joined(draw.one(operators), body, self.masked(everything))
        if positions:
            body = self.joined(draw.one(operators), body, self.position(everything))
        if inner is not None:
            body = self.joined(
                draw.one(operators), body, self.aggregation(everything, inner, operators, 1)
            )
        if draw.chance(0.15):
            body = self.joined(draw.one(("*", "+")), body, self.constant())
        if name in ("max", "min"):
            body = self.real(body)
        if name in ("var", "logsumexp", *_MORE_MACROS):
            body = self.real(body)
        direct = indexing_labels(body, enter_implicit=False)
        implicit = all(label in direct for label in new) and draw.chance(0.6)
        if name in ("argmin", "argmax") and len(new) > 1:
            implicit = False  # they count in the order of the labels
        return Aggregation(name, tuple(new), body, implicit)

    # ---- operations that fit their arguments ----------------------------------------------------

    def kind(self, node: Expression) -> str:
        """Return the kind of number of an expression: b, i, f or c."""
        if isinstance(node, Number):
            return np.asarray(node.value).dtype.kind
        if isinstance(node, (Position, Extent)):
            return "i"
        if isinstance(node, Read):
            dtype = np.dtype(self.dtypes[node.tensor])
            return "f" if dtype == BFLOAT16 else dtype.kind
        if isinstance(node, Aggregation):
            inner = self.kind(node.body)
            if node.name in ("any", "all"):
                return "b"
            if node.name in ("argmin", "argmax", "count"):
                return "i"
            if node.name in ("max", "min", "cummax", "cummin"):
                return inner
            if node.name in ("sum", "prod", "cumsum"):
                return "i" if inner == "b" else inner
            return "c" if inner == "c" else "f"
        if node.name in ("<", "<=", ">", ">=", "==", "!=", "isnan", "isfinite", "bernoulli"):
            return "b"
        if node.name in ("uniform", "uniform32", "normal"):
            return "f"
        kinds = [self.kind(argument) for argument in node.arguments]
        if node.name == "where":
            kinds = kinds[1:]
        widest = max(kinds, key=_KIND_ORDER.index)
        if node.name in ("abs", "real", "imag"):
            return "f" if widest == "c" else widest
        functions = ("exp", "log", "log1p", "expm1", "sqrt", "tanh", "sin", "cos", "erf", "rsqrt")
        more = ("log2", "log10", "sinh", "cosh", "tan", "arctan2")
        if node.name in (*functions, *more, "/", "sigmoid", "silu"):
            return "c" if widest == "c" else "f"
        if node.name in ("relu", "**", "%", "//", "<<", ">>") and widest == "b":
            return "i"
        try:
            return np.dtype(node.name).kind
        except TypeError:
            return widest

    def real(self, node: Expression) -> Expression:
        if self.kind(node) != "c":
            return node
        return Operation(self.draw.one(("abs", "real", "imag")), (node,))

    def number(self, node: Expression) -> Expression:
        """Return the expression, or a number made from it if it is a truth value."""
        if self.kind(node) != "b":
            return node
        return Operation(self.draw.one(("int64", "int32", "float64")), (node,))

    def combined(self, x: Expression, y: Expression) -> Expression:
        operator = self.draw.weighted(_OPERATORS)
        return self.joined(operator, x, y)

    def joined(self, operator: str, x: Expression, y: Expression) -> Expression:
        """Return an operation of two expressions that are made to fit it."""
        draw = self.draw
        if isinstance(x, Number) and isinstance(y, Number):
            x = Operation("int64", (x,)) if isinstance(x.value, int) else Operation("float64", (x,))
        real_operators = ("<", "<=", ">", ">=", "%", "//", "maximum", "minimum", "arctan2", "clip")
        if operator in real_operators:
            x, y = self.real(x), self.real(y)
        if operator in ("-", "%", "//", "clip"):
            x = self.number(x)
        if operator in ("&", "|", "^", "<<", ">>"):
            x, y = self.integral(x), self.integral(y)
        if operator == "**":
            return self.power(x)
        if operator == "clip":
            return Operation("clip", (x, Number(draw.between(-3, 1)), y))
        if operator in ("%", "//") and isinstance(y, Number) and y.value == 0:
            y = Number(draw.between(1, 5))
        return Operation(operator, (x, y))

    def power(self, x: Expression) -> Expression:
        x = self.number(x)
        if isinstance(x, Number):
            x = Operation("float64", (x,))
        if self.kind(x) in "iu":
            return Operation("**", (x, Number(self.draw.between(0, 4))))
        if self.kind(x) == "c":
            return Operation("**", (x, Number(2)))
        return Operation("**", (x, Number(self.draw.one((2, 3, 2.0, 0.5, 1, 0, -1.0)))))

    def integral(self, node: Expression) -> Expression:
        """Return an expression of truth values or integers."""
        if self.kind(node) in "biu" and not isinstance(node, Number):
            return node
        if isinstance(node, Number):
            return Operation("int64", (Number(self.draw.between(0, 9)),))
        return Operation(self.draw.one(("!=", "==")), (node, Number(0)))

    def decorated(self, x: Expression) -> Expression:
        """Return a function of one expression."""
        draw = self.draw
        kind = self.kind(x)
        if isinstance(x, Number):
            return x
        choices = ["neg", "abs", "float64", "complex128", "bool"]
        if kind == "b":
            choices = ["~", "int64", "int32", "float32", "float64", "exp"]
        elif kind in "iu":
            choices += [
                "~",
                "sign",
                "floor",
                "isnan",
                "int32",
                "int64",
                "float32",
                "sqrt",
                "tanh",
                "relu",
                "float16",
            ]
        elif kind == "f":
            choices += ["sign", "int64", "int32", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt"]
            choices += ["tanh", "sin", "cos", "relu", "sigmoid", "silu", "float32", "float16"]
            choices += ["complex64", "floor", "ceil", "round", "isnan", "isfinite", "sinh", "cosh"]
            choices += ["tan", "log2", "log10"]
        else:
            choices = ["neg", "abs", "conj", "real", "imag", "complex64", "complex128", "exp"]
            choices += ["round", "isnan", "isfinite"]
        return Operation(draw.one(choices), (x,))
