"""What the steps of a script over DistArrays are made of: arrays, numbers, axes, and the rounding
that another order of operations may make.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .arrays_case import KNOWN, Step, array_text, list_text, number_text, plain_array
from .generate import DTYPES, VALUES, Draw, make_values

MOST_ELEMENTS = 300
MOST_DIMENSIONS = 5
ANY_KIND = "biufc"
REAL = "biuf"
_EXTENTS = {0: 2.0, 1: 7.0, 2: 9.0, 3: 12.0, 4: 10.0, 5: 10.0, 6: 6.0, 7: 8.0, 11: 4.0, 13: 2.0}


class Operand(NamedTuple):
    """The text of an expression, and its value in numpy."""

    text: str
    value: Any


# ---- rounding -----------------------------------------------------------------------------------


class Spread(NamedTuple):
    """What bounds the rounding of a sum of some numbers."""

    count: int
    most: float  # the greatest magnitude
    total: float  # the sum of magnitudes
    is_wild: bool  # complex with inf or nan: what comes of them depends on the order of operations
    is_finite: bool

    @property
    def sum_slack(self) -> float:
        """Return how far sums in any two orders may be apart, in units of eps."""
        return math.inf if self.is_wild else self.count * self.total

    @property
    def square_slack(self) -> float:
        """Return the same for sums of squares."""
        return math.inf if self.is_wild else self.count * self.count * self.most**2


def spread(value: Any) -> Spread:
    array = np.asarray(value)
    finite = np.isfinite(array)
    magnitudes = np.abs(array[finite].astype(np.complex128))
    is_wild = array.dtype.kind == "c" and not finite.all()
    most = float(magnitudes.max()) if magnitudes.size else 0.0
    total = float(magnitudes.sum())
    return Spread(max(array.size, 1), most, total, is_wild, bool(finite.all()))


def product_rounding(value: np.ndarray) -> tuple[float, float]:
    """Return the slack and ulps of products of elements, which may over- or underflow midway."""
    if value.dtype.kind in "biu":
        return 0.0, 4.0 * value.size
    limits = np.finfo(value.dtype)
    finite = np.isfinite(value)
    logarithms = np.log2(np.abs(value[finite & (value != 0)].astype(np.complex128)))
    above = logarithms[logarithms > 0].sum()
    below = logarithms[logarithms < 0].sum()
    is_safe = above < limits.maxexp - 2 and below > limits.minexp + 2
    if not is_safe or (value.dtype.kind == "c" and not finite.all()):
        return math.inf, 0.0
    return 0.0, 4.0 * max(value.size, 1)


def cast_slack(value: Any, dtype: np.dtype) -> float:
    """Return inf where a conversion to integers is not defined: of inf, nan and large numbers."""
    array = np.asarray(value)
    if array.dtype.kind not in "fc" or dtype.kind not in "iu":
        return 0.0
    limits = np.iinfo(dtype)
    real = np.real(array).astype(np.float64)
    fits = np.isfinite(array).all() and ((real > limits.min - 1.0) & (real < limits.max)).all()
    return 0.0 if fits else math.inf


# The ufuncs whose result does not depend on how many elements are computed at a time; of complex
# numbers, those that neither multiply nor divide.
EXACT_UFUNCS = {
    *("add", "subtract", "negative", "positive", "conjugate", "maximum", "minimum", "fmax"),
    *("fmin", "equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "isnan"),
    *("isinf", "isfinite", "logical_and", "logical_or", "logical_not", "logical_xor", "sign"),
    *("rint", "floor", "ceil", "trunc"),
}
EXACT_REAL_UFUNCS = EXACT_UFUNCS | {
    *("multiply", "divide", "floor_divide", "remainder", "fmod", "divmod", "square", "sqrt"),
    *("reciprocal", "absolute", "fabs", "copysign", "signbit", "frexp", "ldexp", "modf"),
    *("nextafter", "spacing", "heaviside"),
}
UFUNCS = {
    ufunc.__name__: ufunc
    for ufunc in vars(np).values()
    if isinstance(ufunc, np.ufunc) and ufunc.signature is None and ufunc.__name__ != "isnat"
}
OPERATORS = {
    "+": ("add", 4.0),
    "-": ("subtract", 3.0),
    "*": ("multiply", 4.0),
    "/": ("divide", 2.0),
    "//": ("floor_divide", 1.0),
    "%": ("remainder", 1.0),
    "**": ("power", 0.7),
    "&": ("bitwise_and", 0.7),
    "|": ("bitwise_or", 0.7),
    "^": ("bitwise_xor", 0.7),
    "<<": ("left_shift", 0.3),
    ">>": ("right_shift", 0.3),
    "<": ("less", 0.6),
    "<=": ("less_equal", 0.4),
    "==": ("equal", 0.6),
    "!=": ("not_equal", 0.4),
    ">": ("greater", 0.6),
    ">=": ("greater_equal", 0.4),
}


def ufunc_ulps(name: str, operands: Iterable[Any]) -> float:
    """Return by how many units of rounding results may differ."""
    is_complex = any(np.asarray(operand).dtype.kind == "c" for operand in operands)
    if name in (EXACT_UFUNCS if is_complex else EXACT_REAL_UFUNCS):
        return 0.0
    return 16.0


def operator_ulps(operator: str, operands: Iterable[Any]) -> float:
    """Return the same for an operator; refuse one whose results are not numpy's."""
    values = [np.asarray(operand) for operand in operands]
    if operator == "//":
        for value in values:
            if value.dtype.kind == "f" and np.isinf(value).any():
                raise ValueError("// of infinities has the values of the array API standard")
    return ufunc_ulps(OPERATORS[operator][0], values)


def product_slack(values: Sequence[Any]) -> float:
    """Return how far sums of products in any two orders may be apart, in units of eps."""
    slack = 1.0
    for value in values:
        sizes = spread(value)
        # BLAS may leave out what is multiplied by 0, so that 0 × inf is 0.
        slack *= sizes.count * max(sizes.most, 1e-300) if sizes.is_finite else math.inf
    return 4 * slack


# ---- operands -----------------------------------------------------------------------------------


class OperandMaker:
    """Knows the arrays of a script so far, and makes operands for its next step."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.values = draw.weighted(VALUES)
        self.extents = [draw.weighted(_EXTENTS) for _ in range(draw.between(2, 3))]
        weights = (24, 16, 14, 12, 8, 8, 6, 6, 5, 4, 6, 4, 4, 6)
        self.favourite = draw.weighted(dict(zip(DTYPES, weights, strict=True)))
        self.inputs: dict[str, np.ndarray] = {}
        self.names: dict[str, Any] = {**KNOWN, "D": plain_array}  # what a step of numpy sees
        self.live: list[str] = []  # the names of arrays
        self.steps: list[Step] = []
        self.made = 0

    def bind(
        self, text: str, kind: str, slack: float = 0.0, ulps: float = 0.0, count: int = 1
    ) -> Step:
        """Return a step that gives names to the results of an expression."""
        targets = []
        for _ in range(count):
            targets.append(f"r{self.made}")
            self.made += 1
        return Step(f"{', '.join(targets)} = {text}", kind, slack, ulps)

    def value_of(self, text: str) -> Any:
        return eval(text, dict(self.names))

    def dtype(self, kinds: str = ANY_KIND) -> str:
        if np.dtype(self.favourite).kind in kinds and self.draw.chance(0.5):
            return self.favourite
        return self.draw.one([name for name in DTYPES if np.dtype(name).kind in kinds])

    def shape(self, least: int = 0, most: int = 3) -> tuple[int, ...]:
        draw = self.draw
        ndim = draw.weighted({0: 4.0, 1: 24.0, 2: 46.0, 3: 20.0, 4: 6.0})
        shape = [draw.one(self.extents) for _ in range(min(max(ndim, least), most))]
        while math.prod(shape) > MOST_ELEMENTS // 2:
            shape[shape.index(max(shape))] = draw.between(1, 3)
        return tuple(shape)

    def numbers(self, shape: tuple[int, ...], kinds: str = ANY_KIND) -> np.ndarray:
        return make_values(self.draw, self.values, self.dtype(kinds), shape)

    def new(self, shape: tuple[int, ...], kinds: str = ANY_KIND) -> Operand:
        values = self.numbers(shape, kinds)
        return Operand(f"D({array_text(values)})", values)

    def array(
        self,
        least: int = 0,
        most: int = MOST_DIMENSIONS,
        kinds: str = ANY_KIND,
        shape: tuple[int, ...] | None = None,
    ) -> Operand:
        """Return a DistArray: a name, a view of one, or a new one."""
        draw = self.draw
        fitting = []
        for name in self.live:
            value = self.names[name]
            if value.dtype.kind not in kinds or not least <= value.ndim <= most:
                continue
            if shape is None or value.shape == shape:
                fitting.append(name)
        if fitting and draw.chance(0.92):
            text = draw.one(fitting)
            if shape is None and draw.chance(0.25) and self.names[text].ndim:
                text += draw.one((".T", "[::-1]", "[1:]", "[:-1]", "[..., ::2]", "[...]", "[:, :]"))
                if "," in text and self.names[text.partition("[")[0]].ndim < 2:
                    text = text.partition("[")[0]
            return Operand(text, self.value_of(text))
        if shape is None:
            shape = self.shape(least, min(most, 3))
        return self.new(shape, kinds)

    def partner(self, shape: Sequence[int], kinds: str = ANY_KIND) -> Operand:
        """Return an operand that should have this shape; a few have another one."""
        draw = self.draw
        if draw.chance(0.05):
            return self.array(kinds=kinds)
        if draw.chance(0.15):
            values = self.numbers(tuple(shape), kinds)
            return Operand(array_text(values), values)
        return self.array(kinds=kinds, shape=tuple(shape))

    def number(self, kinds: str = ANY_KIND) -> Operand:
        """Return a number of Python or of numpy."""
        draw = self.draw
        kind = draw.one(kinds)
        choices: dict[str, tuple[Any, ...]] = {
            "b": (True, False),
            "i": (0, 1, 2, 3, -1, -2, 5, 7, 100, 300, -129, 2**31, 2**40, 2**63),
            "f": (0.5, 2.0, -1.5, 0.0, 3.25, 1e-3, 1e5, math.inf, -math.inf, math.nan),
            "c": (1j, 2 - 1j, 0.5 + 0j),
        }
        choices["u"] = choices["i"][:8]
        number = draw.one(choices[kind])
        text = f"({number_text(number)})"
        if draw.chance(0.3):
            dtype = self.dtype(kind)
            value = np.array([number]).astype(dtype)[0]
            text = f"np.{dtype.replace('bool', 'bool_')}({number_text(value.item())})"
            return Operand(text, value)
        return Operand(text, number)

    def operand(self, shape: tuple[int, ...], kinds: str = ANY_KIND) -> Operand:
        """Return something that can be broadcast with a shape: in most cases."""
        draw = self.draw
        choice = draw.weighted(
            {"live": 40.0, "number": 24.0, "array": 10.0, "list": 3.0, "new": 16.0, "any": 2.0}
        )
        if choice == "number":
            return self.number(kinds)
        if choice == "any":
            return self.array(kinds=kinds)
        if choice == "live":
            fitting = []
            for name in self.live:
                value = self.names[name]
                if value.dtype.kind in kinds and _are_broadcast(value.shape, shape):
                    fitting.append(name)
            if fitting:
                name = draw.one(fitting)
                return Operand(name, self.names[name])
        values = self.numbers(self.shape_within(shape), kinds)
        if choice == "array":
            return Operand(array_text(values), values)
        if choice == "list" and values.ndim and values.size:
            return Operand(list_text(values.tolist()), np.asarray(values.tolist()))
        return Operand(f"D({array_text(values)})", values)

    def shape_within(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a shape that can be broadcast to another one."""
        draw = self.draw
        first = draw.below(len(shape) + 1) if draw.chance(0.4) else 0
        return tuple(1 if draw.chance(0.2) else extent for extent in shape[first:])

    def axis(self, ndim: int, several: bool = True, none: bool = True) -> str:
        draw = self.draw
        if ndim and draw.chance(0.02):
            return str(draw.one((ndim, -ndim - 1)))
        if not ndim or (none and draw.chance(0.3)):
            return "None" if none else "-1"
        if several and draw.chance(0.25):
            axes = draw.shuffled(range(ndim))[: draw.below(ndim + 1)]
            return f"({', '.join(map(str, axes))}{',' if len(axes) == 1 else ''})"
        return str(draw.between(-ndim, ndim - 1))


def _are_broadcast(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    try:
        np.broadcast_shapes(shape, other)
    except ValueError:
        return False
    return True


def kinds_up_to(kind: str) -> str:
    return {"b": "b", "i": "bi", "u": "bu", "f": "biuf", "c": ANY_KIND}[kind]
