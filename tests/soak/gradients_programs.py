"""Random programs with a loss and its gradients: what is read, and from where, is the point.

Indices are gathers, arithmetic on labels, and both at once; they may be inside of their tensors
only where a condition around them holds. Values that rounding decides about are drawn again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from .generate import Draw
from .gradients_oracle import SLOPE, Evaluator, evaluate
from .oracle import Invalid
from .tree import (
    KEEPING,
    Aggregation,
    Define,
    Expression,
    Gradient,
    Input,
    Label,
    Number,
    Operation,
    Position,
    Program,
    Read,
    children,
    walk,
)

THEMES = ("gather", "arithmetic", "guard", "scan", "segment", "aggregation", "mixed")
ATTEMPTS = 400  # to draw a program that has a sure gradient
MOST_ELEMENTS = 60  # of one tensor
MOST_POINTS = 1200  # of the labels of one statement together
MOST_NODES = 60  # of one statement
MOST_NESTED_GATHERS = 2
_EXTENTS = {
    0: 0.4,
    1: 4.0,
    2: 10.0,
    3: 14.0,
    4: 14.0,
    5: 12.0,
    6: 12.0,
    7: 5.0,
    8: 8.0,
    11: 3.0,
    12: 6.0,
}
AGGREGATIONS = (  # and how likely they are; those with other names are made of some
    "sum 5, prod 2, max 2, min 2, mean 1, var 1, logsumexp 1, std 0.3, norm 0.7, chosen 1, any 0.5"
)
NEVER_CHOSEN = {
    "softmax": -math.inf,
    "logsumexp": -math.inf,
    "max": -math.inf,
    "cummax": -math.inf,
    "min": math.inf,
    "cummin": math.inf,
}
# What has no derivative, or is not differentiated.
_FLAT = ("<", "<=", ">", ">=", "==", "!=", "&", "|", "~", "//", "floor", "sign", "stop", "int64")
_FLAT_AGGREGATIONS = ("any", "all", "count", "argmax", "argmin")

# The values that labels have where an expression is used: conditions around it restrict them.
Scope = Mapping[Label, tuple[int, ...]]


def make_program(draw: Draw, theme: str) -> Program:
    """Return a program with gradients that are sure."""
    for _ in range(ATTEMPTS):
        program = _Maker(draw, theme).program()
        if program is None:
            continue
        try:
            evaluate(program)
        except Invalid:
            continue
        return program
    raise AssertionError(f"no program of the theme {theme} in {ATTEMPTS} attempts")


def reached(node: Expression) -> set[str]:
    """Return the tensors that the derivative of an expression leads to."""
    if isinstance(node, Read):
        return {node.tensor}
    if isinstance(node, Operation) and node.name in _FLAT:
        return set()
    if isinstance(node, Aggregation) and node.name in _FLAT_AGGREGATIONS:
        return set()
    inner = children(node)
    if isinstance(node, Operation) and node.name == "where":
        inner = inner[1:]
    return set().union(*(reached(child) for child in inner))


def used_labels(node: Expression) -> set[Label]:
    """Return the labels that an expression depends on, except those that it aggregates."""
    if isinstance(node, Position):
        return {node.label}
    found = set().union(*(used_labels(child) for child in children(node)))
    if isinstance(node, Read):
        found.update(entry for entry in node.index if isinstance(entry, Label))
    if isinstance(node, Aggregation) and node.name not in KEEPING:
        found.difference_update(node.labels)
    return found


def _weights(text: str) -> dict[str, float]:
    """Return how likely choices are, from "choice weight, choice weight"."""
    pairs = (part.rsplit(maxsplit=1) for part in text.split(","))
    return {choice.strip(): float(weight) for choice, weight in pairs}


class _Maker:
    """Makes one program, statement by statement."""

    def __init__(self, draw: Draw, theme: str) -> None:
        self.draw = draw
        self.theme = theme
        self.sizes: dict[str, int] = {}
        self.inputs: list[Input] = []
        self.statements: list[Define] = []
        self.shapes: dict[str, tuple[int, ...]] = {}  # of float tensors
        self.masks: dict[str, tuple[int, ...]] = {}
        self.indices: dict[str, np.ndarray] = {}
        self.labels_made = 0
        self.gathers_around = 0
        self.dtype = "float32" if draw.chance(0.08) else "float64"

    def program(self) -> Program | None:
        draw = self.draw
        for number in range(draw.weighted({1: 3.0, 2: 5.0, 3: 3.0})):
            self.add_floats("ABC"[number])
        for number in range(draw.weighted({0: 2.0, 1: 5.0, 2: 3.0})):
            self.add_indices("KLM"[number])
        if draw.chance(0.3):
            self.add_mask("G")
        for number in range(draw.weighted({0: 2.0, 1: 5.0, 2: 4.0, 3: 2.0})):
            statement = self.statement(f"T{number + 1}")
            if sum(1 for _ in walk(statement.value)) > MOST_NODES:
                return None
            self.statements.append(statement)
            self.shapes[statement.name] = tuple(
                self.sizes[label.size] for label in statement.labels
            )
        self.statements.append(self.loss())
        return self.with_gradients()

    # ---- inputs ---------------------------------------------------------------------------------

    def extent(self) -> int:
        return self.draw.weighted(_EXTENTS)

    def shape(self, dimensions: int) -> tuple[int, ...]:
        shape = tuple(self.extent() for _ in range(dimensions))
        while math.prod(shape) > MOST_ELEMENTS:
            shape = shape[1:]
        return shape

    def add_input(self, name: str, values: np.ndarray) -> None:
        dimensions = tuple(self.size(extent) for extent in values.shape)
        self.inputs.append(Input(name, dimensions, values))

    def size(self, extent: int) -> str:
        name = f"n{extent}"
        self.sizes[name] = extent
        return name

    def add_floats(self, name: str) -> None:
        shape = self.shape(self.draw.weighted({0: 1.0, 1: 8.0, 2: 9.0, 3: 4.0}))
        numbers = [3 * self.draw.share() - 1.5 for _ in range(math.prod(shape))]
        dtype = "float64" if self.draw.chance(0.2) else self.dtype
        self.add_input(name, np.array(numbers, dtype).reshape(shape))
        self.shapes[name] = shape

    def add_indices(self, name: str) -> None:
        """Add a tensor of indices; some of them are negative."""
        shape = self.shape(self.draw.weighted({1: 7.0, 2: 3.0}))
        extents = [extent for known in self.shapes.values() for extent in known if extent]
        limit = self.draw.one(extents) if extents else 4
        low = -1 if self.draw.chance(0.15) else 0
        odd = 0.2 if self.draw.chance(0.15) else 0.0  # how many of them are no index at all
        numbers = []
        for _ in range(math.prod(shape)):
            least, most = (-9, 50) if self.draw.chance(odd) else (low, limit - 1)
            numbers.append(self.draw.between(least, most))
        dtype = self.draw.one(("int64", "int32", "int16"))
        self.indices[name] = np.array(numbers, dtype).reshape(shape)
        self.add_input(name, self.indices[name])

    def add_mask(self, name: str) -> None:
        shape = self.shape(self.draw.between(1, 2))
        numbers = [self.draw.chance(0.6) for _ in range(math.prod(shape))]
        self.add_input(name, np.array(numbers, bool).reshape(shape))
        self.masks[name] = shape

    # ---- statements -----------------------------------------------------------------------------

    def label(self, extent: int) -> Label:
        self.labels_made += 1
        return Label(self.labels_made, self.size(extent))

    def whole(self, labels: tuple[Label, ...]) -> dict[Label, tuple[int, ...]]:
        return {label: tuple(range(self.sizes[label.size])) for label in labels}

    def new_labels(self, scope: Scope, count: int) -> tuple[Label, ...]:
        """Return new labels; few enough that the statement does not become too large."""
        points = math.prod(max(1, self.sizes[label.size]) for label in scope)
        extents = [extent for known in self.shapes.values() for extent in known]
        labels = []
        for _ in range(count):
            extent = self.draw.one(extents) if extents and self.draw.chance(0.6) else self.extent()
            while extent > 1 and points * extent > MOST_POINTS:
                extent //= 2
            points *= max(1, extent)
            labels.append(self.label(extent))
        return tuple(labels)

    def is_likely(self, theme: str, often: float, seldom: float) -> bool:
        return self.draw.chance(often if self.theme == theme else seldom)

    def statement(self, name: str) -> Define:
        if self.is_likely("segment", 0.7, 0.12) and self.indices:
            return self.scattered(name)
        labels = self.new_labels({}, self.draw.weighted({0: 1.0, 1: 6.0, 2: 6.0, 3: 2.0}))
        while math.prod(self.sizes[label.size] for label in labels) > MOST_ELEMENTS:
            labels = labels[1:]
        return Define(name, labels, self.floats(self.whole(labels), 3))

    def scattered(self, name: str) -> Define:
        """Values go to places that an index says."""
        draw = self.draw
        aggregation = draw.weighted({"sum": 5.0, "max": 2.0, "min": 2.0, "prod": 2.0})
        place = self.label(max(1, self.extent()))
        others = self.new_labels({place: ()}, draw.weighted({0: 4.0, 1: 4.0}))
        bound = self.new_labels(
            dict.fromkeys((place, *others), ()), draw.weighted({1: 7.0, 2: 3.0})
        )
        scope = self.whole((*others, *bound))
        index = self.index(self.sizes[place.size], scope, must_fit=False)
        # A value that goes nowhere may read what it likes.
        is_kept = _both(
            Operation(">=", (index, Number(0))),
            Operation("<", (index, Number(self.sizes[place.size]))),
        )
        scope = dict(self.narrowed(scope, is_kept)[0])
        if draw.chance(0.25):
            scope.update(self.whole((place,)))
        body = self.floats(scope, 2)
        neutral = {"sum": 0, "prod": 1, "max": -math.inf, "min": math.inf}[aggregation]
        if draw.chance(0.3):
            index_text = Operation("==", (Position(place), index))
        else:
            index_text = Operation("==", (index, Position(place)))
        chosen = Operation("where", (index_text, body, Number(neutral)))
        value: Expression = Aggregation(aggregation, bound, chosen)
        labels = draw.shuffled((place, *others))
        if aggregation in ("max", "min") and draw.chance(0.7):
            # An empty segment is infinite.
            nearest = {"max": ("maximum", -2.75), "min": ("minimum", 2.75)}[aggregation]
            value = Operation(nearest[0], (value, Number(nearest[1])))
        return Define(name, tuple(labels), value, index_on_left=draw.chance(0.7))

    def loss(self) -> Define:
        """Add up all tensors that no statement reads, and something else."""
        draw = self.draw
        read: set[str] = set()
        for statement in self.statements:
            read |= reached(statement.value)
        terms: list[Expression] = []
        for statement in self.statements:
            if statement.name in read and not draw.chance(0.2):
                continue
            terms.append(self.term(statement))
        if not terms or draw.chance(0.4):
            terms.append(self.aggregate({}, 3, "sum 2, mean 1, norm 1, max 1"))
        total = terms[0]
        for term in terms[1:]:
            total = Operation("+", (total, term))
        if self.dtype == "float32":
            total = Operation("float64", (total,))
        return Define("loss", (), total)

    def term(self, statement: Define) -> Expression:
        labels = tuple(self.label(self.sizes[label.size]) for label in statement.labels)
        element: Expression = Read(statement.name, labels)
        scope = self.whole(labels)
        body = self.draw.weighted(
            {
                Operation("**", (element, Number(2))): 3.0,
                Operation("sin", (element,)): 2.0,
                Operation("*", (element, self.leaf(scope))): 3.0,
                element: 1.0,
            }
        )
        return Aggregation("sum", labels, body) if labels else body

    def with_gradients(self) -> Program | None:
        leading = {"loss"}
        for statement in reversed(self.statements):
            if statement.name in leading:
                leading |= reached(statement.value)
        gradients = []
        for item in self.inputs:
            if item.name in leading:
                gradients.append(self.gradient(item.name, item.values.shape))
        if not gradients:
            return None
        for statement in self.statements[:-1]:
            is_exact = self.dtype == "float64"
            if statement.name in leading and is_exact and self.draw.chance(0.15):
                gradients.append(self.gradient(statement.name, self.shapes[statement.name]))
        if self.dtype == "float64" and self.draw.chance(0.1):
            gradients += self.second_gradients(gradients)
        used = {"loss"}
        kept: list[Define] = []
        for statement in reversed(self.statements):
            if statement.name in used:
                kept.insert(0, statement)
                for node in walk(statement.value):
                    if isinstance(node, Read):
                        used.add(node.tensor)
        inputs = tuple(item for item in self.inputs if item.name in {*used, "V"})
        return Program(dict(self.sizes), inputs, (*kept, *gradients))

    def gradient(self, name: str, shape: tuple[int, ...], loss: str = "loss") -> Define:
        labels = tuple(self.label(extent) for extent in shape)
        prefix = "d" if loss == "loss" else "h"
        return Define(f"{prefix}{name}", labels, Gradient(loss, Read(name, labels)))

    def second_gradients(self, gradients: list[Define]) -> list[Define]:
        """Return the slope of the loss along a direction, plus squares, and its gradient.

        The squares are there because a slope that is constant has no gradient.
        """
        known = {item.name for item in self.inputs}
        steps = [item for item in gradients if item.value.element.tensor in known]
        chosen = self.draw.one(steps)
        if not chosen.labels:
            return []
        shape = tuple(self.sizes[label.size] for label in chosen.labels)
        numbers = [2 * self.draw.share() - 1 for _ in range(math.prod(shape))]
        self.add_input("V", np.array(numbers).reshape(shape))
        labels = tuple(self.label(extent) for extent in shape)
        name = chosen.value.element.tensor
        product = Operation("*", (Read(chosen.name, labels), Read("V", labels)))
        squares = Operation("**", (Read(name, labels), Number(2)))
        slope = Aggregation("sum", labels, Operation("+", (product, squares)))
        return [Define(SLOPE, (), slope), self.gradient(name, shape, SLOPE)]

    # ---- expressions ----------------------------------------------------------------------------

    def floats(self, scope: Scope, depth: int) -> Expression:
        draw = self.draw
        if depth <= 0 or draw.chance(0.12):
            return self.leaf(scope)
        if self.is_likely("guard", 0.4, 0.12) and scope:
            return self.guarded(scope, depth)
        if self.is_likely("scan", 0.4, 0.08) and scope:
            return self.scan(scope, depth)
        if self.is_likely("aggregation", 0.45, 0.2):
            return self.aggregate(scope, depth)
        kind = draw.weighted({"two": 6.0, "one": 3.0, "choice": 1.0, "leaf": 1.0})
        if kind == "leaf":
            return self.leaf(scope)
        if kind == "one":
            return self.function(self.floats(scope, depth - 1))
        if kind == "choice":
            condition = self.condition(scope)
            inside, outside = self.narrowed(scope, condition)
            branches = (self.floats(inside, depth - 1), self.floats(outside, depth - 2))
            return Operation("where", (condition, *branches))
        left = self.floats(scope, depth - 1)
        right = self.floats(scope, depth - 2)
        name = draw.weighted(
            {"*": 6.0, "+": 3.0, "-": 3.0, "/": 1.5, "maximum": 1.0, "minimum": 1.0}
        )
        if name == "/":
            right = Operation("+", (Number(1.5), Operation("**", (right, Number(2)))))
        return Operation(name, (left, right))

    def function(self, x: Expression) -> Expression:
        name = self.draw.weighted(
            _weights(
                "sin 3, tanh 3, exp 2, sigmoid 1, silu 1, gelu 1, log1p 1, sqrt 1, rsqrt 1, abs 2,"
                "relu 2, ** 2, neg 1, clip 1, stop 0.5, % 0.7, power 0.7"
            )
        )
        square = Operation("**", (x, Number(2)))
        if name == "exp":
            return Operation("exp", (Operation("tanh", (x,)),))
        if name == "log1p":
            return Operation("log1p", (square,))
        if name in ("sqrt", "rsqrt"):
            return Operation(name, (Operation("+", (square, Number(0.5))),))
        if name == "**":
            return Operation("**", (x, Number(self.draw.between(1, 3))))
        if name == "power":
            return Operation("**", (Operation("+", (square, Number(0.5))), Number(1.5)))
        if name == "clip":
            return Operation("clip", (x, Number(-0.7), Number(0.9)))
        if name == "%":
            return Operation("%", (x, Number(0.75)))
        if name == "stop":
            return Operation("+", (Operation("stop", (x,)), self.function(x)))
        return Operation(name, (x,))

    def leaf(self, scope: Scope) -> Expression:
        draw = self.draw
        if draw.chance(0.06):
            return Number(draw.between(-20, 20) / 8)
        if draw.chance(0.06) and scope:
            return Operation("*", (Number(0.25), Position(draw.one(list(scope)))))
        known = list(self.shapes)
        if self.statements and draw.chance(0.4):
            known = [item.name for item in self.statements]
        name = draw.one(known)
        if draw.chance(0.08) and scope and len(self.shapes[name]) == 1:
            return self.padded(name, scope)
        return self.read(name, self.shapes, scope)

    def padded(self, name: str, scope: Scope) -> Expression:
        """Return an element of a vector, or a number where the index is outside of it."""
        (extent,) = self.shapes[name]
        index = self.index(extent, scope, must_fit=False)
        inside = _both(Operation(">=", (index, Number(0))), Operation("<", (index, Number(extent))))
        return Operation("where", (inside, Read(name, (index,)), Number(0.5)))

    def read(self, name: str, shapes: Mapping[str, tuple[int, ...]], scope: Scope) -> Expression:
        """Return an element of a tensor: a number if it has none."""
        if 0 in shapes[name] and all(scope.values()):
            return Number(0.5)
        shape = shapes[name]
        if len(shape) > 1 and self.draw.chance(0.1):
            fitting = [label for label in scope if self.sizes[label.size] <= math.prod(shape)]
            if fitting:
                return Read(name, self.unravelled(shape, self.draw.one(fitting)))
        return Read(name, tuple(self.entry(extent, scope) for extent in shape))

    def unravelled(self, shape: tuple[int, ...], label: Label) -> tuple[Expression, ...]:
        """Return the indices of a tensor whose elements are counted by one label."""
        index: list[Expression] = []
        before = self.draw.chance(0.5)
        for place, extent in enumerate(shape):
            rest = math.prod(shape[place + 1 :])
            own: Expression = Position(label)
            if place and before:
                own = Operation("%", (own, Number(extent * rest)))
            if rest > 1 or place == 0:
                own = Operation("//", (own, Number(rest)))
            if place and not before:
                own = Operation("%", (own, Number(extent)))
            index.append(own)
        return tuple(index)

    # ---- indices --------------------------------------------------------------------------------

    def entry(self, extent: int, scope: Scope) -> Label | Expression:
        """Return an index of a dimension: often a label that has its extent."""
        whole = []
        for label in scope:
            if self.sizes[label.size] == extent:
                whole.append(label)
        is_odd = self.theme in ("arithmetic", "gather", "guard", "mixed")
        if whole and self.draw.chance(0.35 if is_odd else 0.6):
            return self.draw.one(whole)
        return self.index(extent, scope)

    def index(self, extent: int, scope: Scope, must_fit: bool = True) -> Expression:
        """Return an index that stays inside of a dimension where the scope has values."""
        for _ in range(12):
            index = self.any_index(extent, scope)
            if isinstance(index, Position) and self.sizes[index.label.size] != extent:
                continue  # a label that stands alone has the extent of the dimension
            if self.fits(index, extent if must_fit else None, scope):
                return index
        return Number(self.draw.below(max(1, extent)))

    def fits(self, index: Expression, extent: int | None, scope: Scope) -> bool:
        """Return whether an index is inside of a dimension for all values of labels."""
        found = self.known_values(index, scope)
        if found is None:
            return False
        # Labels that the index does not depend on say nothing, even if they have no values.
        places = [[0]]
        for label, size in zip(scope, found.shape[1:], strict=True):
            is_used = size == self.sizes[label.size]
            places.append(list(scope[label]) if is_used else [0])
        used = found[np.ix_(*places)]
        if not used.size:
            return True
        if extent is None:
            return used.min() >= -1000  # whatever it reads is inside
        return used.min() >= 0 and used.max() < extent

    def known_values(self, node: Expression, scope: Scope) -> np.ndarray | None:
        """Return an expression for all values of labels; None if it depends on floats."""
        tensors = {}
        for item in self.inputs:
            if item.values.dtype.kind != "f":
                tensors[item.name] = item.values[np.newaxis]
        try:
            return Evaluator(self.sizes, tensors, Define("", tuple(scope), node), 0.0).value(node)
        except (Invalid, IndexError, KeyError):
            return None

    def narrowed(self, scope: Scope, condition: Expression) -> tuple[Scope, Scope]:
        """Return the values of labels where a condition holds, and where it does not.

        That is known if it depends on one label, and on no floats. If it always holds, or never,
        nothing is said: the program is refused if the branch that is not taken is outside.
        """
        labels = used_labels(condition) & set(scope)
        holds = self.known_values(condition, scope)
        if len(labels) != 1 or holds is None:
            return scope, scope
        (label,) = labels
        known = np.broadcast_to(holds.reshape(-1), self.sizes[label.size])
        inside = tuple(value for value in scope[label] if known[value])
        outside = tuple(value for value in scope[label] if not known[value])
        if not inside or not outside:
            return scope, scope
        return {**scope, label: inside}, {**scope, label: outside}

    def any_index(self, extent: int, scope: Scope) -> Expression:
        """Return some index, of labels and of gathers."""
        draw = self.draw
        if not scope or draw.chance(0.08):
            return Number(draw.below(max(1, extent)))

        def number(low: int, high: int) -> Number:
            return Number(draw.between(low, max(low, high)))

        term = self.index_term(scope)
        kind = draw.weighted(
            _weights(
                "itself 2, shift 4, mirror 3, // 3, % 3, periodic 3, % // 2, // % 2, stride 2,"
                "two 3, digits 2, edge 1.5, choice 0.7, mirrored periodic 1, two periodic 1,"
                "difference 1, twice 0.7"
            )
        )
        if kind == "shift":
            return _sum(term, draw.between(-3, 4))
        if kind == "mirror":
            return Operation("-", (number(extent - 3, extent + 1), term))
        if kind in ("//", "%"):
            return Operation(kind, (term, number(1, 6)))
        if kind == "periodic":
            return Operation("%", (_sum(term, draw.between(-3, 7)), Number(max(1, extent))))
        if kind == "mirrored periodic":
            mirrored = Operation("-", (number(0, extent), term))
            return Operation("%", (mirrored, Number(max(1, extent))))
        if kind == "% //":
            return Operation("//", (Operation("%", (term, number(1, 8))), number(1, 4)))
        if kind == "// %":
            return Operation("%", (Operation("//", (term, number(1, 4))), number(1, 6)))
        if kind == "stride":
            scaled = Operation("*", (number(2, 3), term))
            return _sum(scaled, draw.between(-2, 2))
        if kind == "edge":
            if draw.chance(0.5):
                return Operation("minimum", (_sum(term, draw.between(0, 3)), Number(extent - 1)))
            return Operation("maximum", (_sum(term, -draw.between(0, 3)), Number(0)))
        if kind == "choice":
            condition = Operation("<", (term, number(1, 4)))
            return Operation("where", (condition, term, number(0, extent - 1)))
        other = self.index_term(scope)
        if kind == "two":
            return _sum(Operation("+", (term, other)), draw.between(-2, 1))
        if kind == "two periodic":
            return Operation("%", (Operation("+", (term, other)), Number(max(1, extent))))
        if kind == "digits":
            width = number(2, 4)
            if isinstance(other, Position) and draw.chance(0.5):
                width = Number(max(1, self.sizes[other.label.size]))
            return Operation("+", (Operation("*", (term, width)), other))
        if kind == "difference" and term != other:  # i - i seems to have values other than 0
            return _sum(Operation("-", (term, other)), draw.between(0, extent))
        if kind == "twice":
            return self.index_of(self.any_index(extent, scope), extent, scope)
        return term

    def index_of(self, index: Expression, extent: int, scope: Scope) -> Expression:
        """Return arithmetic on an index that is arithmetic already."""
        return Operation(
            self.draw.one(("//", "%")), (index, Number(self.draw.between(1, max(1, extent))))
        )

    def index_term(self, scope: Scope) -> Expression:
        is_gather = self.is_likely("gather", 0.55, 0.25)
        if self.indices and is_gather and self.gathers_around < MOST_NESTED_GATHERS:
            self.gathers_around += 1
            read = self.read_index(scope)
            self.gathers_around -= 1
            if isinstance(read, Read):
                return read
        return Position(self.draw.one(list(scope)))

    def read_index(self, scope: Scope) -> Expression:
        shapes = {name: values.shape for name, values in self.indices.items()}
        return self.read(self.draw.one(list(shapes)), shapes, scope)

    # ---- conditions -----------------------------------------------------------------------------

    def condition(self, scope: Scope) -> Expression:
        """Return a condition that says nothing of single labels."""
        draw = self.draw
        if draw.chance(0.15):
            both = (self.condition(scope), self.condition(scope))
            return Operation(draw.one("&|"), both)
        if scope and draw.chance(0.25):
            label = draw.one(list(scope))
            index = self.index(self.sizes[label.size], scope, must_fit=False)
            sides = (index, Position(label)) if draw.chance(0.5) else (Position(label), index)
            return Operation(draw.weighted({"==": 4.0, "<": 1.0, "!=": 1.0}), sides)
        if self.masks and draw.chance(0.4):
            mask = self.read(draw.one(list(self.masks)), self.masks, scope)
            if isinstance(mask, Read):
                return mask
        if len(scope) > 1 and draw.chance(0.4):
            one, two = draw.shuffled(list(scope))[:2]
            return Operation(draw.one(("<", "<=", "==", ">")), (Position(one), Position(two)))
        if self.indices and draw.chance(0.4):
            comparison = draw.one(("<", ">=", "=="))
            return Operation(comparison, (self.read_index(scope), Number(draw.between(0, 4))))
        return Operation(draw.one(("<", ">")), (self.leaf(scope), Number(draw.share() - 0.5)))

    def guarded(self, scope: Scope, depth: int) -> Expression:
        """Return a choice by the value of a label: each branch may read what it has values for."""
        draw = self.draw
        label = draw.one(list(scope))
        extent = self.sizes[label.size]
        own = Position(label)
        low = draw.between(0, max(0, extent - 1))
        high = draw.between(low, max(low, extent - 1))
        kind = draw.weighted({"<": 3.0, ">=": 3.0, "between": 2.0, "==": 1.0, "!=": 1.0, "~": 0.5})
        if kind == "between":
            first = Operation(">=", (own, Number(low)))
            condition = _both(first, Operation("<", (own, Number(high + 1))))
        elif kind == "~":
            condition = Operation("~", (Operation("<", (own, Number(low))),))
        else:
            condition = Operation(kind, (own, Number(low)))
            if draw.chance(0.3) and kind in ("<", ">="):
                mirrored = {"<": ">", ">=": "<="}[kind]
                condition = Operation(mirrored, (Number(low), own))
        inside, outside = self.narrowed(scope, condition)
        this = self.floats(inside, depth - 1)
        that = Number(0) if draw.chance(0.4) else self.floats(outside, depth - 2)
        return Operation("where", (condition, this, that))

    # ---- scans and aggregations -----------------------------------------------------------------

    def scan(self, scope: Scope, depth: int) -> Expression:
        draw = self.draw
        label = draw.one(list(scope))
        name = draw.weighted(
            _weights(
                "cumsum 3, cumprod 2, cummax 2, cummin 2, softmax 1.5, rmsnorm 0.7, layernorm 0.7"
            )
        )
        inner = {**scope, **self.whole((label,))}  # all values of the label are scanned
        body = self.floats(inner, depth - 1)
        if label not in used_labels(body):
            body = Operation("+", (body, Operation("*", (Number(0.25), Position(label)))))
        return Aggregation(name, (label,), self.masked(name, body, inner))

    def masked(self, name: str, body: Expression, scope: Scope) -> Expression:
        """Return values of which some are infinite, where these do not count: a causal mask."""
        if name not in NEVER_CHOSEN or not self.draw.chance(0.2):
            return body
        return Operation("where", (self.condition(scope), body, Number(NEVER_CHOSEN[name])))

    def aggregate(self, scope: Scope, depth: int, names: str = AGGREGATIONS) -> Expression:
        draw = self.draw
        name = draw.weighted(_weights(names))
        labels = self.new_labels(scope, draw.weighted({1: 6.0, 2: 3.0}))
        inner = {**scope, **self.whole(labels)}
        if name == "any":
            found = Aggregation(draw.one(("any", "all")), labels, self.condition(inner))
            return Operation("where", (found, self.leaf(scope), Number(0.5)))
        if name == "chosen":
            return self.chosen(scope, labels[:1])
        body = self.floats(inner, depth - 1)
        return Aggregation(name, labels, self.masked(name, body, inner))

    def chosen(self, scope: Scope, labels: tuple[Label, ...]) -> Expression:
        """Return the element at the index of the greatest of some values."""
        extent = self.sizes[labels[0].size]
        fitting = []
        for name, shape in self.shapes.items():
            if shape and 0 not in shape and shape[0] >= extent:
                fitting.append(name)
        values = self.leaf({**scope, **self.whole(labels)})
        if not fitting:
            return Aggregation("max", labels, values)
        place = Aggregation(self.draw.one(("argmax", "argmin")), labels, values)
        name = self.draw.one(fitting)
        rest = tuple(self.entry(extent, scope) for extent in self.shapes[name][1:])
        return Read(name, (place, *rest))


def _both(one: Expression, two: Expression) -> Expression:
    return Operation("&", (one, two))


def _sum(term: Expression, number: int) -> Expression:
    """Return a term plus a number, as people write it."""
    if number == 0:
        return term
    return Operation("+" if number > 0 else "-", (term, Number(abs(number))))
