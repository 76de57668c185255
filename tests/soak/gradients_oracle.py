"""Gradients of random programs by complex steps, in numpy: no rule of differentiation is used.

Where an element of a tensor is x + ih with a tiny h, the imaginary part of the loss is h times
its derivative, with no more than the rounding of the loss itself. All elements are stepped at
once: the first axis of every array has a place for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import erf

from . import oracle
from .oracle import Invalid, Value
from .tree import (
    CASTS,
    Aggregation,
    Define,
    Expression,
    Extent,
    Gradient,
    Label,
    Number,
    Operation,
    Position,
    Program,
    Read,
    all_labels,
    program_text,
)

STEP_SIZE = 1e-30
LARGEST = 1e5  # of a value that is compared
# What is computed in a float dtype may be this far from the exact value, relative to the largest
# gradient of the program: sums of up to a few hundred terms, one after another.
TOLERANCE = {"float64": 1e-8, "float32": 3e-3}
# Values that are closer than this might be ordered differently after rounding.
GAP = {"float64": 1e-6, "float32": 2e-3}
NOWHERE = -(2**40)  # an index that was read outside of a tensor


# The slope of the loss along a direction, of which there is a gradient, too: the change of the
# gradients between two points on that line, which are this far from the middle.
SLOPE = "slope"
SLOPE_STEP = 1e-5
SLOPE_GAP = 1e-3


def evaluate(program: Program, strict: bool = False) -> dict[str, Value]:
    """Return every tensor that a program defines; Invalid if rounding may decide a gradient."""
    if not any(isinstance(item.value, Gradient) for item in program.statements):
        return oracle.evaluate(program, strict)
    first: list[Define] = []
    second: list[Define] = []
    for item in program.statements:
        is_second = isinstance(item.value, Gradient) and item.value.loss == SLOPE
        if is_second and "stop(" in program_text(program):
            raise Invalid("what is stopped does not move along the line")
        (second if is_second or item.name == SLOPE else first).append(item)
    with np.errstate(all="ignore"):
        once = replace(program, statements=tuple(first))
        found = _Steps(once).values()
        if second:
            found.update(_second_values(once, second, found))
    return found


def _second_values(
    program: Program, second: Sequence[Define], first: Mapping[str, Value]
) -> dict[str, Value]:
    """Return Σ dX · V + X², where dX · V is the slope of the loss, and its gradient."""
    inputs = {item.name: item for item in program.inputs}
    slope, *others = second
    match slope.value:
        case Aggregation(
            "sum", _, Operation("+", (Operation("*", (dx, v)), Operation("**", (x, two))))
        ):
            gradient, direction, own = dx.tensor, v.tensor, x.tensor
        case _:
            raise Invalid("another slope")
    if two != Number(2) or inputs[direction].values.shape != inputs[own].values.shape:
        raise Invalid("another slope")
    vector = inputs[direction].values
    value = (first[gradient].value * vector).sum() + (inputs[own].values ** 2).sum()
    found = {SLOPE: replace(first[gradient], value=np.array(value), unsure=np.array(False))}
    sides = []
    for step in (SLOPE_STEP, -SLOPE_STEP):
        moved = inputs[own]
        moved = replace(moved, values=moved.values + step * vector)
        changed = tuple({**inputs, moved.name: moved}.values())
        sides.append(_Steps(replace(program, inputs=changed), SLOPE_GAP).values())
    for statement in others:
        assert isinstance(statement.value, Gradient)
        name = f"d{statement.value.element.tensor}"
        value = (sides[0][name].value - sides[1][name].value) / (2 * SLOPE_STEP)
        value += 2 * inputs[own].values
        if (np.abs(value) > LARGEST).any():
            raise Invalid(f"{statement.name} is large")
        scale = max(1.0, float(np.abs(value).max(initial=0.0)))
        # The third derivative is unknown, and so is how far the gradients are from a line.
        found[statement.name] = Value(value, 1e-5 * scale + 1e3 * first[name].error, 0.0, False)
    return found


class _Steps:
    """Evaluates a program with steps of all tensors that it has gradients by."""

    def __init__(self, program: Program, gap: float | None = None) -> None:
        self.program = program
        self.gradients = {}
        for statement in program.statements:
            if isinstance(statement.value, Gradient):
                self.gradients[statement.name] = statement.value
        dtypes = {item.values.dtype.name for item in program.inputs}
        self.precision = "float32" if "float32" in dtypes else "float64"
        self.gap = gap or GAP[self.precision]
        self.places: dict[str, slice] = {}
        self.count = 0
        self.tensors: dict[str, np.ndarray] = {}

    def values(self) -> dict[str, Value]:
        program = self.program
        shapes = {item.name: item.values.shape for item in program.inputs}
        for statement in program.statements:
            shapes[statement.name] = tuple(program.sizes[label.size] for label in statement.labels)
        for gradient in self.gradients.values():
            name = gradient.element.tensor
            if name not in self.places:
                size = math.prod(shapes[name])
                self.places[name] = slice(self.count, self.count + size)
                self.count += size
        dtypes = {}
        for item in program.inputs:
            self.keep(item.name, item.values[np.newaxis])
            dtypes[item.name] = item.values.dtype
        for statement in program.statements:
            if statement.name not in self.gradients:
                evaluator = Evaluator(program.sizes, self.tensors, statement, self.gap)
                self.keep(statement.name, evaluator.result())
        return self.compared(dtypes)

    def keep(self, name: str, values: np.ndarray) -> None:
        """Keep the value of a tensor, with a step of each of its elements if it needs them."""
        if values.dtype.kind == "f":
            values = values.astype(np.complex128)
        if not np.isfinite(values).all():
            raise Invalid(f"{name} is no number")
        if name in self.places and values.size:
            place = self.places[name]
            values = np.repeat(values, self.count, 0) if len(values) == 1 else values.copy()
            own = values[place].reshape(-1, math.prod(values.shape[1:]))
            own += 1j * STEP_SIZE * np.eye(len(own))
            values[place] = own.reshape(values[place].shape)
        self.tensors[name] = values

    def compared(self, dtypes: Mapping[str, np.dtype]) -> dict[str, Value]:
        """Return the values to compare with; their errors are relative to the largest of them."""
        found: dict[str, np.ndarray] = {}
        for name, gradient in self.gradients.items():
            loss = self.tensors.get(gradient.loss)
            tensor = self.tensors[gradient.element.tensor]
            if loss is None or loss.ndim != 1 or loss.dtype != np.complex128:
                raise Invalid(f"{gradient.loss} has no gradient")
            parts = np.broadcast_to(loss.imag, self.count)[self.places[gradient.element.tensor]]
            dtype = dtypes.get(gradient.element.tensor, np.dtype("float64"))
            found[name] = (parts / STEP_SIZE).reshape(tensor.shape[1:]).astype(dtype)
        for statement in self.program.statements:
            if statement.name not in found:
                values = self.tensors[statement.name][0]
                found[statement.name] = values.real if values.dtype.kind == "c" else values
        scale = 1.0
        for name in (*self.gradients, *(item.loss for item in self.gradients.values())):
            if not np.isfinite(found[name]).all() or (np.abs(found[name]) > LARGEST).any():
                raise Invalid(f"{name} is not a number, or is large")
            scale = max(scale, float(np.abs(found[name]).max(initial=0.0)))
        error = TOLERANCE[self.precision] * scale
        return {
            name: Value(array, np.full(array.shape, error), 0.0, np.zeros(array.shape, bool))
            for name, array in found.items()
        }


def _finite(values: np.ndarray) -> np.ndarray:
    """Return values that have no inf: a product with it is nan even where its adjoint is 0.

    There may be nan, which is what a branch that is not taken reads outside of a tensor.
    """
    if np.isinf(values).any():
        raise Invalid("something is infinite")
    return values


SMOOTH: dict[str, Callable[[Any], Any]] = {
    "neg": np.negative,
    "exp": np.exp,
    "log": np.log,
    "log1p": lambda z: np.log(1 + z),
    "sqrt": np.sqrt,
    "rsqrt": lambda z: 1 / np.sqrt(z),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "gelu": lambda z: 0.5 * z * (1 + erf(z / math.sqrt(2))),
}
OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "&": np.logical_and,
    "|": np.logical_or,
}
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
}


@dataclass
class Evaluator:
    """Evaluates one statement. The steps have the first axis, every label has one of its own.

    A tensor that is read outside of its bounds is nan there. So it does no harm in the branch of a
    `where` that is not taken, and else shows in the result.
    """

    sizes: Mapping[str, int]
    tensors: Mapping[str, np.ndarray]
    statement: Define
    gap: float

    def __post_init__(self) -> None:
        self.axes = {label: axis for axis, label in enumerate(all_labels(self.statement), 1)}

    def result(self) -> np.ndarray:
        found = self.value(self.statement.value)
        shape = tuple(self.sizes[label.size] for label in self.statement.labels)
        kept = found.reshape(found.shape[: 1 + len(shape)])
        return np.broadcast_to(kept, (len(found), *shape))

    def value(self, node: Expression) -> np.ndarray:
        """Return complex numbers for floats, else integers or bools."""
        if isinstance(node, Number | Extent):
            number = node.value if isinstance(node, Number) else self.sizes[node.size] + node.plus
            array = np.array(number, complex if isinstance(number, float) else None)
            return array.reshape([1] * (1 + len(self.axes)))
        if isinstance(node, Position):
            return self._positions(node.label)
        if isinstance(node, Read):
            return self._read(node)
        if isinstance(node, Operation):
            return self._operation(node.name, [self._argument(node, x) for x in node.arguments])
        assert isinstance(node, Aggregation)
        return _finite(self._aggregation(node))

    def _argument(self, node: Operation, argument: Expression) -> np.ndarray:
        """Return an argument: the max of nothing is infinite, but maximum(max, 0) is not."""
        if node.name in ("maximum", "minimum") and isinstance(argument, Aggregation):
            return self._aggregation(argument)
        return self.value(argument)

    def _positions(self, label: Label) -> np.ndarray:
        shape = [1] * (1 + len(self.axes))
        shape[self.axes[label]] = self.sizes[label.size]
        return np.arange(self.sizes[label.size]).reshape(shape)

    def _read(self, node: Read) -> np.ndarray:
        tensor = self.tensors[node.tensor]
        outside: Any = False
        steps = np.arange(len(tensor)).reshape(-1, *[1] * len(self.axes))
        places: list[np.ndarray] = [steps]
        for entry, extent in zip(node.index, tensor.shape[1:], strict=True):
            place = self._positions(entry) if isinstance(entry, Label) else self.value(entry)
            if place.dtype.kind not in "iu":
                raise Invalid("an index is no integer")
            if isinstance(entry, Number) and entry.value < 0:
                place = place + extent
            outside = outside | (place < 0) | (place >= extent)
            places.append(np.clip(place, 0, max(0, extent - 1)))
        if not tensor.size:
            shape = np.broadcast_shapes(*(place.shape for place in places))
            return np.full(shape, np.nan if tensor.dtype.kind == "c" else NOWHERE).astype(
                tensor.dtype
            )
        found = tensor[tuple(places)]
        if np.any(outside):
            found = np.where(
                outside, {"c": np.nan, "b": False}.get(found.dtype.kind, NOWHERE), found
            )
        return found

    # ---- operations -----------------------------------------------------------------------------

    def _sure(self, difference: np.ndarray) -> None:
        """Raise Invalid where rounding could change a sign, unless nothing depends on it."""
        if difference.dtype != np.complex128:
            return
        is_near = np.abs(difference.real) < self.gap
        is_same = np.abs(difference.real) <= 1e-13
        is_same &= np.abs(difference.imag) <= 1e-13 * STEP_SIZE
        if np.any(is_near & ~is_same):
            raise Invalid("rounding decides")

    def _operation(self, name: str, arguments: list[np.ndarray]) -> np.ndarray:
        if name in COMPARISONS:
            left, right = arguments
            self._sure(left - right)
            return COMPARISONS[name](left.real, right.real)[:1]
        if name == "where":
            condition, this, that = arguments
            return np.where(condition, this, that)
        if name in ("//", "%"):
            return self._divided(name, *arguments)
        if name == "**":
            return self._power(*arguments)
        if name in OF_TWO:
            return OF_TWO[name](*arguments)
        if name in ("maximum", "minimum"):
            return self._of_two(name, *arguments)
        x = arguments[0]
        if name == "clip":
            return self._of_two("minimum", self._of_two("maximum", x, arguments[1]), arguments[2])
        if name == "abs":
            self._sure(x)
            return np.where(x.real < 0, -x, x)
        if name == "relu":
            return self._of_two("maximum", x, np.zeros_like(x))
        if name == "sign":
            self._sure(x)
            return np.sign(x.real)[:1] + (0j if x.dtype.kind == "c" else 0)
        if name == "floor":
            self._sure(x - np.round(x.real))
            return np.floor(x.real)[:1] + 0j
        if name == "stop":
            return x.real[:1] + 0j
        if name == "~":
            return ~x
        if name in CASTS:
            return self._cast(name, x)
        return SMOOTH[name](x)

    def _cast(self, name: str, x: np.ndarray) -> np.ndarray:
        if name in ("float32", "float64"):
            return x.astype(np.complex128)
        if x.dtype.kind == "c":
            self._sure(x - np.round(x.real))
            x = x.real[:1]
        return x.astype(name)

    def _divided(self, name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if x.dtype.kind != "c" and y.dtype.kind != "c":
            return x // y if name == "//" else x % y
        quotient = x / y
        self._sure(quotient - np.round(quotient.real))
        whole = np.floor(quotient.real)[:1] + 0j
        return whole if name == "//" else x - whole * y

    def _power(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        exponent = y.reshape(-1)[0]
        if y.size == 1 and y.dtype.kind in "iu" and 0 < exponent < 9:
            return math.prod([x] * int(exponent))
        return np.exp(y * np.log(x + 0j))

    def _of_two(self, name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        difference = x - y
        self._sure(difference)
        is_first = difference.real >= 0 if name == "maximum" else difference.real <= 0
        return np.where(is_first | (x != x), x, y)

    # ---- aggregations ---------------------------------------------------------------------------

    def _aggregation(self, node: Aggregation) -> np.ndarray:
        axes = tuple(self.axes[label] for label in node.labels)
        body = self.value(node.body)
        shape = list(body.shape)
        for label, axis in zip(node.labels, axes, strict=True):
            shape[axis] = self.sizes[label.size]
        if math.prod(shape) > oracle.MOST_POINTS:
            raise Invalid("the program is too large")
        body = np.broadcast_to(body, shape)
        count = math.prod(self.sizes[label.size] for label in node.labels)
        if node.name.startswith("cum"):
            return self._scan(node.name, body, axes[0])
        if count == 0 and node.name not in ("sum", "prod", "any", "all", "count"):
            raise Invalid(f"{node.name} of nothing")
        return self._reduced(node.name, body, axes, count)

    def _reduced(self, name: str, x: np.ndarray, axes: tuple[int, ...], count: int) -> np.ndarray:
        def total(values: np.ndarray) -> np.ndarray:
            return values.sum(axes, keepdims=True)

        if name in ("max", "min", "argmax", "argmin"):
            return self._extreme(name, x, axes)
        if name == "sum":
            return total(x)
        if name == "prod":
            return x.prod(axes, keepdims=True)
        if name in ("any", "all"):
            return (np.any if name == "any" else np.all)(x, axis=axes, keepdims=True)
        if name == "count":
            if x.dtype.kind == "c":
                raise Invalid("rounding decides")
            return total((x != 0).astype(np.int64))
        if name == "mean":
            return total(x) / count
        if name in ("var", "std", "layernorm"):
            distance = x - total(x) / count
            variance = total(distance * distance) / count
            if name == "layernorm":
                return distance / np.sqrt(variance + 1e-5)
            return variance if name == "var" else self._root(variance)
        if name == "norm":
            return self._root(total(x * x))
        if name == "rmsnorm":
            return x / np.sqrt(total(x * x) / count + 1e-6)
        shift = _finite(x.real.max(axes, keepdims=True))
        exponentials = np.exp(x - shift)
        if name == "softmax":
            return exponentials / total(exponentials)
        assert name == "logsumexp", name
        return shift + np.log(total(exponentials))

    def _root(self, x: np.ndarray) -> np.ndarray:
        if np.any(np.abs(x.real) < self.gap):
            raise Invalid("the derivative of a root is infinite")
        return np.sqrt(x)

    def _extreme(self, name: str, x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        moved = np.moveaxis(x, axes, range(-len(axes), 0))
        kept = moved.shape[: x.ndim - len(axes)]
        lines = moved.reshape(*kept, math.prod(moved.shape[len(kept) :]))
        places = (np.argmax if name.endswith("max") else np.argmin)(lines.real[:1], -1)[..., None]
        chosen = np.take_along_axis(lines, places, -1)
        difference = lines - chosen
        if name.startswith("arg"):
            own = np.arange(lines.shape[-1]) == places
            if np.any((np.abs(difference.real) < self.gap) & ~own):
                raise Invalid("rounding decides")
            return np.expand_dims(places[..., 0], sorted(axes))
        self._sure(difference)
        return np.expand_dims(chosen[..., 0], sorted(axes))

    def _scan(self, name: str, x: np.ndarray, axis: int) -> np.ndarray:
        if name == "cumsum":
            return np.cumsum(x, axis)
        if name == "cumprod":
            return np.cumprod(x, axis)
        rows = []
        for row in np.moveaxis(x, axis, 0):
            best = (
                self._of_two("maximum" if name == "cummax" else "minimum", rows[-1], row)
                if rows
                else row
            )
            rows.append(best)
        return np.moveaxis(np.array(rows), 0, axis) if rows else x
