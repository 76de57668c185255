"""Random scripts over DistArrays. numpy runs each step as it is made, and so decides what is valid.

A script follows from its seed and number alone, on every machine.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .arrays_case import KNOWN, ArrayCase, Step, array_text, list_text, number_text, plain_array
from .case import cut
from .generate import DTYPES, VALUES, Draw, make_values

RANKS = {1: 22.0, 2: 24.0, 3: 24.0, 4: 16.0, 5: 14.0}
MOST_ELEMENTS = 300
MOST_DIMENSIONS = 5
MOST_LIVE = 6  # arrays; more of them take longer to compare after each step
RAISING_SHARE = 0.2  # of the steps for which numpy raises: DistArrays have to raise, too
ERRORS = (ValueError, TypeError, IndexError, OverflowError, ZeroDivisionError, AttributeError)
ANY_KIND = "biufc"
REAL = "biuf"
_EXTENTS = {0: 2.0, 1: 7.0, 2: 9.0, 3: 12.0, 4: 10.0, 5: 10.0, 6: 6.0, 7: 8.0, 11: 4.0, 13: 2.0}


def make_array_case(seed: int, number: int, ranks: int | None = None) -> ArrayCase:
    """Return a case. It depends on nothing but the seed, the number and a given number of ranks."""
    draw = Draw("arrays", seed, number)
    drawn_ranks = draw.weighted(RANKS)
    maker = ScriptMaker(draw)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        maker.make()
    ranks = ranks or drawn_ranks
    # From other numbers, so that a script is the same on any number of ranks.
    draw = Draw("parts", seed, number)
    parts = {}
    for name, array in maker.inputs.items():
        if draw.chance(0.5):
            parts[name] = cut(draw, ranks, array.shape)
    return ArrayCase(seed, number, ranks, maker.inputs, tuple(maker.steps), parts)


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
OPERATOR_WEIGHTS = {operator: weight for operator, (_, weight) in OPERATORS.items()}
IN_PLACE_WEIGHTS = {
    operator: weight
    for operator, weight in OPERATOR_WEIGHTS.items()
    if operator[0] not in "<=!>" or operator in ("<<", ">>")
}


def ufunc_ulps(name: str, operands: Iterable[Any]) -> float:
    is_complex = any(np.asarray(operand).dtype.kind == "c" for operand in operands)
    if name in (EXACT_UFUNCS if is_complex else EXACT_REAL_UFUNCS):
        return 0.0
    return 16.0


# ---- scripts ------------------------------------------------------------------------------------


class ScriptMaker:
    """Makes one script, step by step."""

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

    def make(self) -> None:
        draw = self.draw
        for name in "abc"[: draw.between(1, 3)]:
            values = make_values(draw, self.values, self.dtype(), self.shape())
            self.inputs[name] = values
            self.names[name] = values.copy()
            self.live.append(name)
        wanted = draw.between(2, 10)
        attempts = 0
        while len(self.steps) < wanted and attempts < 8 * wanted:
            attempts += 1
            if len(self.live) > MOST_LIVE:
                step: Step | None = Step(f"del {draw.one(self.live)}", "del")
            else:
                step = self.step()
            if step is not None:
                self.add(step)

    def step(self) -> Step | None:
        draw = self.draw
        kind = draw.weighted(STEPS)
        try:
            if kind == "function":
                name = draw.weighted(FUNCTION_WEIGHTS)
                return FUNCTIONS[name](self, name)
            return MAKERS[kind](self)
        except ERRORS:
            return None  # what the maker wanted to look at has no value

    def add(self, step: Step) -> None:
        """Keep a step that numpy can run, and some of those for which it raises."""
        names = dict(self.names)
        try:
            exec(step.text, names)
        except ERRORS as error:
            if self.draw.chance(RAISING_SHARE) and not isinstance(error, AttributeError):
                self.steps.append(step)
            return
        del names["__builtins__"]
        for name, value in names.items():
            if self.names.get(name) is not value and name not in KNOWN:
                if any(each.size > MOST_ELEMENTS for each in arrays_in(value)):
                    return
                if any(each.ndim > MOST_DIMENSIONS for each in arrays_in(value)):
                    return
                if isinstance(value, np.generic | bool | int | float | complex):
                    names[name] = np.asarray(value)  # DistArrays have no scalars
        self.names = names
        self.live = [name for name, value in names.items() if type(value) is np.ndarray]
        self.steps.append(step)

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

    # ---- operands -------------------------------------------------------------------------------

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

    # ---- expressions ----------------------------------------------------------------------------

    def operators(self) -> Step:
        """Return an expression of operators."""
        draw = self.draw
        first = self.array()
        text, ulps = self.operation(first)
        if draw.chance(0.3):
            text = draw.one((f"-({text})", f"abs({text})", f"~({text})", f"+({text})"))
            ulps = max(ulps, 16.0) if text.startswith("abs") else ulps
        elif draw.chance(0.35) and not ulps:
            # Of exact operations only: what is rounded differently must not be subtracted.
            inner = Operand(f"({text})", self.value_of(text))
            text, ulps = self.operation(inner)
        return self.bind(text, "operators", 0.0, ulps)

    def operation(self, first: Operand) -> tuple[str, float]:
        operator = self.draw.weighted(OPERATOR_WEIGHTS)
        kinds = {"&": "biu", "|": "biu", "^": "biu", "<<": "iu", ">>": "iu"}.get(operator, ANY_KIND)
        second = self.operand(np.shape(first.value), kinds)
        if operator == "**" and np.asarray(first.value).dtype.kind == "b":
            raise ValueError("numpy's operator makes int8 of bools ** 2, and its function does not")
        operands = [first, second]
        if self.draw.chance(0.3):
            operands.reverse()
        name = OPERATORS[operator][0]
        ulps = ufunc_ulps(name, (first.value, second.value))
        return f"{operands[0].text} {operator} {operands[1].text}", ulps

    def ufunc(self) -> Step:
        """Return a call of any ufunc, or of one of its methods."""
        draw = self.draw
        name = draw.one(list(UFUNCS))
        ufunc = UFUNCS[name]
        first = self.array(kinds=self.kinds_of(ufunc))
        operands = [first]
        if ufunc.nin == 2:
            operands.append(self.operand(first.value.shape, self.kinds_of(ufunc)))
            if draw.chance(0.3):
                operands.reverse()
        values = [operand.value for operand in operands]
        given = ", ".join(operand.text for operand in operands)
        ulps = ufunc_ulps(name, values)
        if ufunc.nin == 2 and draw.chance(0.06):
            small = self.array(most=1)
            return self.bind(f"np.{name}.outer({small.text}, {first.text})", "ufunc", 0.0, ulps)
        if draw.chance(0.05):
            given += f", dtype={self.dtype()!r}"
            ulps = 16.0
        elif draw.chance(0.02):
            given += ", where=True" if draw.chance(0.5) else f", where={first.text} != 0"
        return self.bind(f"np.{name}({given})", "ufunc", 0.0, ulps, ufunc.nout)

    def kinds_of(self, ufunc: np.ufunc) -> str:
        """Return the kinds of numbers that a ufunc takes."""
        letters = "".join(np.dtype(types[0]).kind for types in ufunc.types if types[0] not in "OmM")
        return "".join(kind for kind in ANY_KIND if kind in letters) or REAL

    def in_place(self) -> Step:
        """Return a change of an array, or of a part of it."""
        draw = self.draw
        name = draw.one(self.live)
        target = self.names[name]
        choice = draw.share()
        if choice < 0.08:
            return Step(f"{name}.fill({self.number().text})", "in place")
        if choice < 0.14:
            axis = self.axis(target.ndim, several=False, none=False)
            return Step(f"{name}.sort({axis})", "in place")
        if choice < 0.2 and target.ndim > 1:
            return Step(f"for row in {name}: row[...] = {self.number().text}", "in place")
        operator = draw.weighted(IN_PLACE_WEIGHTS)
        kinds = ANY_KIND if draw.chance(0.1) else _kinds_up_to(target.dtype.kind)
        value = self.operand(target.shape, kinds)
        ulps = ufunc_ulps(OPERATORS[operator][0], (target, value.value))
        return Step(f"{name} {operator}= {value.text}", "in place", 0.0, ulps)

    def out(self) -> Step:
        """Return a ufunc whose result goes into an array, or into a part of it."""
        draw = self.draw
        name = draw.one(self.live)
        text = name
        if draw.chance(0.4) and self.names[name].ndim:
            text += f"[{self.basic_key(self.names[name].shape)}]"
        target = self.value_of(text)
        if not isinstance(target, np.ndarray):
            text, target = name, self.names[name]
        ufunc = draw.one([each for each in UFUNCS.values() if each.nout == 1])
        first = self.operand(target.shape, self.kinds_of(ufunc))
        given = first.text
        values = [first.value]
        if ufunc.nin == 2:
            second = self.array(kinds=self.kinds_of(ufunc), shape=target.shape)
            given += f", {second.text}"
            values.append(second.value)
        if draw.chance(0.1):
            given += ", casting='unsafe'"
        slack = math.inf if target.dtype.kind in "iu" else 0.0
        if all(np.asarray(value).dtype.kind in "biu" for value in values):
            slack = 0.0
        if ufunc.nin == 1 and draw.chance(0.3):
            return Step(f"np.copyto({text}, {given})", "out=", cast_slack(values[0], target.dtype))
        ulps = 16.0 if target.dtype.kind in "fc" else 0.0
        return self.bind(f"np.{ufunc.__name__}({given}, out={text})", "out=", slack, ulps)

    # ---- indices --------------------------------------------------------------------------------

    def index(self) -> Step:
        array = self.array(least=1)
        return self.bind(f"{array.text}[{self.key(array)}]", "index")

    def basic_key(self, shape: tuple[int, ...]) -> str:
        """Return integers, slices, None and ...; few are out of range."""
        draw = self.draw
        parts = []
        for extent in shape[: draw.between(1, len(shape)) if shape else 0]:
            if draw.chance(0.35) and extent:
                parts.append(str(draw.between(-extent, extent - 1)))
            else:
                parts.append(self.slice(extent))
        if draw.chance(0.2):
            place = draw.below(len(parts) + 1)
            if len(parts) == len(shape) and draw.chance(0.9):
                del parts[place:]  # the dimensions from there on are those of ...
            parts.insert(place, "...")
        if draw.chance(0.12):
            parts.insert(draw.below(len(parts) + 1), "None")
        if draw.chance(0.015):
            parts.append(draw.one(("99", "-99", "0", "1.5")))
        return ", ".join(parts) or "..."

    def slice(self, extent: int) -> str:
        draw = self.draw
        limit = extent + 1
        start = draw.between(-limit, limit) if draw.chance(0.5) else ""
        stop = draw.between(-limit, limit) if draw.chance(0.5) else ""
        step = draw.one(("", "", "", ":1", ":2", ":3", ":-1", ":-2"))
        return f"{start}:{stop}{step}"

    def key(self, array: Operand) -> str:
        """Return what selects elements: of all kinds."""
        draw = self.draw
        shape = array.value.shape
        choice = draw.weighted(
            {
                "basic": 40.0,
                "list": 14.0,
                "lists": 9.0,
                "mask": 13.0,
                "row mask": 6.0,
                "beside": 9.0,
            }
        )
        if choice == "basic" or not shape:
            return self.basic_key(shape)
        if choice == "mask":
            if array.value.dtype.kind in REAL and draw.chance(0.4):
                return f"{array.text} {draw.one(('>', '<=', '=='))} {draw.between(-1, 3)}"
            return self.mask(shape)
        if choice == "row mask":
            return self.mask(shape[: draw.between(1, len(shape))])
        if choice == "lists":
            count = draw.between(1, len(shape))
            table = () if draw.chance(0.1) else (draw.between(0, 4),)
            if draw.chance(0.3):
                table = (*table, draw.between(1, 3))
            parts = []
            for extent in shape[:count]:
                parts.append(self.table(extent, self.shape_within(table)))
            if draw.chance(0.15):
                parts.append("...")
            return ", ".join(parts)
        place = draw.below(len(shape))
        parts = []
        for extent in shape[:place]:
            parts.append(":" if draw.chance(0.7) else self.basic_key((extent,)))
        if choice == "beside":
            parts.append(self.mask(shape[place : place + 1]))
        else:
            count = (draw.between(0, 5),) if draw.chance(0.8) else (draw.between(1, 2), 2)
            parts.append(self.table(shape[place], count))
        for extent in shape[place + 1 :]:
            if draw.chance(0.4):
                break
            parts.append(self.slice(extent) if draw.chance(0.6) else self.basic_key((extent,)))
        return ", ".join(parts)

    def mask(self, shape: tuple[int, ...]) -> str:
        draw = self.draw
        if draw.chance(0.03):
            shape = (*shape[:-1], shape[-1] + 1)
        values = make_values(draw, "plain", "bool", shape)
        if draw.chance(0.1):
            values[...] = draw.chance(0.5)
        for name in self.live:
            if self.names[name].shape == shape and draw.chance(0.15):
                return f"{name} != 0"
        if draw.chance(0.45):
            return f"D({array_text(values)})"
        if len(shape) == 1 and draw.chance(0.2):
            return list_text(values.tolist())
        return array_text(values)

    def table(self, extent: int, shape: tuple[int, ...]) -> str:
        """Return a table of indices: a list, an array or a DistArray."""
        draw = self.draw
        if not extent:
            raise ValueError("there are no indices")
        limit = extent + draw.chance(0.02)
        numbers = [draw.between(-limit, limit - 1) for _ in range(math.prod(shape))]
        dtype = draw.one(("int64", "int64", "int32", "uint8"))
        values = np.array(numbers, np.int64).reshape(shape)
        if dtype == "uint8":
            values = abs(values) % max(extent, 1)
        text = array_text(values.astype(dtype))
        if draw.chance(0.25):
            return f"D({text})"
        if draw.chance(0.5) and values.size:
            return list_text(values.tolist())
        return text

    def assign(self) -> Step | None:
        """Return an assignment to elements, or an operation in place on them; also of views."""
        draw = self.draw
        name = draw.one(self.live)
        text = name
        if draw.chance(0.3) and self.names[name].ndim:
            text += self.view_of(self.names[name])
            if not _is_view(self.value_of(text), self.names[name]):
                text = name
        array = self.value_of(text)
        if not isinstance(array, np.ndarray):
            text, array = name, self.names[name]
        key = self.key(Operand(text, array))
        selected = np.asarray(self.value_of(f"{text}[{key}]"))
        operator = ""
        kinds = ANY_KIND if draw.chance(0.3) else _kinds_up_to(array.dtype.kind)
        if selected.ndim and draw.chance(0.25):
            operator = draw.weighted(IN_PLACE_WEIGHTS)
        value = self.value_for(selected.shape, kinds)
        slack = cast_slack(value.value, array.dtype)
        ulps = 0.0
        if operator:
            ulps = ufunc_ulps(OPERATORS[operator][0], (array, value.value))
            if array.dtype.kind in "iu" and np.asarray(value.value).dtype.kind in "fc":
                slack = math.inf
        return Step(f"{text}[{key}] {operator}= {value.text}", "assign", slack, ulps)

    def value_for(self, shape: tuple[int, ...], kinds: str) -> Operand:
        """Return a value to assign to a selection of some shape."""
        draw = self.draw
        if draw.chance(0.1):
            # Elements of another array, or of the same one, that overlap with those assigned to.
            source = self.array(kinds=kinds)
            if source.value.ndim == len(shape):
                key = ", ".join(f":{extent}" for extent in shape) or "..."
                text = f"{source.text}[{key}]"
                return Operand(text, self.value_of(text))
        if draw.chance(0.04):
            shape = (1, *shape)
        return self.operand(shape, kinds)

    # ---- views ----------------------------------------------------------------------------------

    def view_of(self, array: np.ndarray) -> str:
        """Return what follows an expression to make a view of its value."""
        draw = self.draw
        shape = array.shape
        choice = draw.weighted(
            {"key": 40.0, "T": 10.0, "reshape": 14.0, "ravel": 6.0, "method": 8.0, "part": 5.0}
        )
        if choice == "T":
            return draw.one((".T", ".mT")) if array.ndim >= 2 else ".T"
        if choice == "reshape":
            return f".reshape({self.other_shape(array)})"
        if choice == "ravel":
            return draw.one((".ravel()", ".reshape(-1)"))
        if choice == "method" and array.ndim >= 2:
            order = draw.shuffled(range(array.ndim))
            first, second = order[:2]
            return draw.one(
                (f".swapaxes({first}, {second})", f".transpose({', '.join(map(str, order))})")
            )
        if choice == "part":
            return draw.one((".real", ".imag", ".squeeze()"))
        return f"[{self.basic_key(shape)}]"

    def other_shape(self, array: np.ndarray) -> str:
        """Return another shape of as many elements; few have another number."""
        draw = self.draw
        left = array.size
        shape = []
        while left > 1 and len(shape) < 3 and draw.chance(0.8):
            divisors = [number for number in range(1, left + 1) if left % number == 0]
            shape.append(draw.one(divisors))
            left //= shape[-1]
        if not array.size:
            return list_text(draw.shuffled(array.shape)) if array.ndim else "0"
        shape.append(left)
        shape = draw.shuffled(shape)
        if draw.chance(0.4):
            shape[draw.below(len(shape))] = -1
        if draw.chance(0.03):
            shape.append(2)
        return list_text(shape)

    def view(self) -> Step:
        """Give a name to a view; sometimes of a view, or to the same array."""
        draw = self.draw
        name = draw.one(self.live)
        if draw.chance(0.06):
            return self.bind(name, "view")
        text = name + self.view_of(self.names[name])
        if draw.chance(0.3):
            text += self.view_of(np.asarray(self.value_of(text)))
        return self.bind(self.settled(text, self.names[name]), "view")

    def settled(self, text: str, source: np.ndarray) -> str:
        """Return the text of a view; where numpy copies elements, DistArrays may do either."""
        value = self.value_of(text)
        may_copy = ".reshape" in text or ".ravel" in text
        if may_copy and isinstance(value, np.ndarray) and not _is_view(value, source):
            return f"{text}.copy()"
        return text

    # ---- numbers --------------------------------------------------------------------------------

    def python_number(self) -> Step:
        """Return a step whose result is a number, or something else of Python."""
        draw = self.draw
        array = self.array()
        text = array.text
        choice = draw.below(8)
        if choice == 0:
            index = [str(draw.below(max(1, extent))) for extent in array.value.shape]
            return self.bind(f"({text}.item({', '.join(index)}),)", "number")
        if choice == 1:
            return self.bind(f"({text}.tolist(),)", "number")
        if choice == 2:
            return self.bind(f"(len({text}),)", "number")
        if choice == 3:
            convert = draw.one(("float", "int", "complex", "bool"))
            return self.bind(f"({convert}({self.array(most=0).text}),)", "number")
        if choice == 4:
            name = draw.one(("shape", "ndim", "size"))
            return self.bind(f"(np.{name}({text}),)", "number")
        if choice == 5:
            name = draw.one(("iscomplexobj", "isrealobj"))
            return self.bind(f"(np.{name}({text}),)", "number")
        if choice == 6:
            other = self.operand(array.value.shape)
            return self.bind(f"(np.result_type({text}, {other.text}),)", "number")
        name = draw.one(("shape", "ndim", "size", "dtype", "nbytes", "itemsize"))
        return self.bind(f"({text}.{name},)", "number")

    def python_function(self, name: str) -> Step:
        array = self.array()
        other = self.operand(array.value.shape)
        given = array.text if name in PYTHON_RESULTS[:5] else f"{array.text}, {other.text}"
        return self.bind(f"(np.{name}({given}),)", "number")

    # ---- reductions -----------------------------------------------------------------------------

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

    def called(self, name: str, array: str, options: Sequence[str]) -> str:
        """Return a call of a function, or of the method of the same name."""
        if name in METHODS and self.draw.chance(0.35):
            return f"{array}.{name}({', '.join(options)})"
        return f"np.{name}({', '.join([array, *options])})"

    def reduction(self, name: str) -> Step:
        draw = self.draw
        least = 1 if name in CUMULATIVE else 0
        array = self.array(least, kinds=REAL if name in REAL_REDUCTIONS else ANY_KIND)
        value = array.value
        several = name not in ("argmax", "argmin", "cumsum", "cumprod", *CUMULATIVE)
        options = []
        if draw.chance(0.85) or name in CUMULATIVE:
            none = name not in CUMULATIVE or value.ndim <= 1
            options.append(f"axis={self.axis(value.ndim, several, none)}")
        if several and draw.chance(0.25):
            options.append(f"keepdims={draw.chance(0.7)}")
        slack, ulps = self.reduction_rounding(name, value)
        base = name.removeprefix("nan").removeprefix("cum")
        if base in ("sum", "prod", "mean") and draw.chance(0.15):
            dtype = self.dtype()
            options.append(f"dtype={dtype!r}")
            slack, ulps = self.reduction_rounding(name, value.astype(dtype))
            slack = max(slack, cast_slack(value, np.dtype(dtype)))
            if np.dtype(dtype).kind in "biu" and base == "mean":
                slack = math.inf
        if base in ("var", "std") and draw.chance(0.3):
            options.append(f"ddof={draw.one((0, 1, 1, 2, 0.5))}")
        if name in CUMULATIVE and draw.chance(0.4):
            options.append("include_initial=True")
        ufunc = REDUCE_METHODS.get(name)
        if ufunc is not None and value.ndim and draw.chance(0.12):
            method = "accumulate" if name.startswith("cum") else "reduce"
            axis = self.axis(value.ndim, several, several)
            options = [f"axis={axis}"] if draw.chance(0.8) else []
            text = f"np.{ufunc}.{method}({', '.join([array.text, *options])})"
            return self.bind(text, "reduction", slack, ulps)
        return self.bind(self.called(name, array.text, options), "reduction", slack, ulps)

    def reduction_rounding(self, name: str, value: np.ndarray) -> tuple[float, float]:
        """Return the slack and ulps of a reduction: sums may be added in any order."""
        base = name.removeprefix("nan").removeprefix("cumulative_").removeprefix("cum")
        sizes = spread(value)
        if base == "prod":
            return product_rounding(value)
        if base in ("sum", "mean"):
            return sizes.sum_slack, 4.0
        if base == "var":
            return sizes.square_slack, 4.0
        if base == "std":
            # Both compute the mean first, so that a deviation of 0 is off by that rounding only.
            return (math.inf if sizes.is_wild else sizes.count**2 * sizes.most), 8.0
        return 0.0, 0.0

    def norm(self, _: str) -> Step:
        draw = self.draw
        array = self.array()
        sizes = spread(array.value)
        slack = sizes.sum_slack
        limit = np.finfo(array.value.dtype).max if array.value.dtype.kind in "fc" else 1e300
        if float(limit) < 4 * sizes.square_slack:
            slack = math.inf
        options = []
        if draw.chance(0.5):
            options.append(f"ord={draw.one(('None', '1', '2', 'inf', 'np.inf', '-inf', '0', '3'))}")
        if draw.chance(0.6):
            options.append(f"axis={self.axis(array.value.ndim)}")
        if draw.chance(0.2):
            options.append("keepdims=True")
        text = f"np.linalg.norm({', '.join([array.text, *options])})"
        return self.bind(text, "reduction", slack, 8.0)

    def diff(self, _: str) -> Step:
        array = self.array(least=1)
        options = [f"axis={self.axis(array.value.ndim, several=False, none=False)}"]
        if self.draw.chance(0.4):
            options.append(f"n={self.draw.between(0, 3)}")
        return self.bind(f"np.diff({', '.join([array.text, *options])})", "reduction")

    # ---- statistics -----------------------------------------------------------------------------

    def average(self, _: str) -> Step:
        draw = self.draw
        array = self.array()
        value = array.value
        axis = self.axis(value.ndim, several=draw.chance(0.1))
        options = [f"axis={axis}"]
        if draw.chance(0.7):
            shape = value.shape
            if axis.lstrip("-").isdigit() and draw.chance(0.6):
                shape = (value.shape[int(axis)],)
            weights = abs(make_values(draw, "plain", self.dtype("iuf"), shape)) + 1
            options.append(f"weights={draw.one(('', 'D'))}({array_text(weights)})")
        if draw.chance(0.2):
            options.append("keepdims=True")
        slack = 16 * spread(value).sum_slack
        return self.bind(f"np.average({', '.join([array.text, *options])})", "statistics", slack, 8)

    def quantile(self, name: str) -> Step:
        draw = self.draw
        array = self.array(kinds=REAL if draw.chance(0.95) else "c")
        if not array.value.size and name != "median":
            raise ValueError("numpy raises an IndexError that says nothing about it")
        options = []
        if name != "median":
            fractions = [draw.one((0, 1, 0.5, 0.25, 0.1, 0.9, 1 / 3)) for _ in range(3)]
            if name == "percentile":
                fractions = [100 * fraction for fraction in fractions]
            options.append(draw.one((str(fractions[0]), list_text(fractions[: draw.below(4)]))))
        options.append(f"axis={self.axis(array.value.ndim, several=draw.chance(0.05))}")
        if draw.chance(0.25):
            options.append("keepdims=True")
        slack = 16 * spread(array.value).most
        if array.value.dtype.kind == "f" and slack > float(np.finfo(array.value.dtype).max) / 64:
            slack = math.inf
        given = ", ".join([array.text, *options])
        return self.bind(f"np.{name}({given})", "statistics", slack, 8.0)

    def covariance(self, name: str) -> Step:
        draw = self.draw
        array = self.array(least=1, most=2)
        value = array.value
        options = []
        if draw.chance(0.3):
            options.append(self.array(shape=value.shape).text)
        if draw.chance(0.3):
            options.append(f"rowvar={draw.chance(0.5)}")
        if name == "cov" and draw.chance(0.3):
            options.append(draw.one(("bias=True", "ddof=0", "ddof=1")))
        text = f"np.{name}({', '.join([array.text, *options])})"
        slack = 4 * spread(value).square_slack
        if name == "corrcoef" or not value.size:
            # A variance near 0 divides rounding errors.
            variances = np.abs(np.diagonal(np.atleast_2d(self.value_of(text.replace(name, "cov")))))
            most = spread(value).most
            is_safe = np.isfinite(variances).all() and (variances > 1e-3 * most**2).all()
            slack = 1e5 * value.size if is_safe else math.inf
        return self.bind(text, "statistics", slack, 8.0)

    def counts(self, name: str) -> Step:
        draw = self.draw
        if name == "bincount":
            array = self.array(most=2, kinds="biu")
            text = f"(abs({array.text}) % 5)"
            if array.value.ndim != 1:
                text += ".ravel()"
            options = []
            if draw.chance(0.3):
                options.append(f"minlength={draw.between(0, 9)}")
            slack = 0.0
            if draw.chance(0.3):
                weights = self.array(kinds=REAL, shape=(array.value.size,))
                options.append(f"weights={weights.text}")
                slack = spread(weights.value).sum_slack
            return self.bind(f"np.bincount({', '.join([text, *options])})", "statistics", slack, 4)
        array = self.array(kinds=REAL)
        edges = list_text(sorted({draw.between(-9, 9) / 2 for _ in range(draw.between(2, 5))}))
        if name == "digitize":
            if draw.chance(0.3):
                edges = f"{edges}[::-1]"
            right = draw.one(("", ", right=True"))
            return self.bind(f"np.digitize({array.text}, {edges}{right})", "statistics")
        options = [draw.one((edges, "3", "5", f"D(np.array({edges}))"))]
        if draw.chance(0.3):
            options.append("range=(-3, 3)")
        slack = 0.0
        if draw.chance(0.25):
            weights = self.partner(array.value.shape, REAL)
            options.append(f"weights={weights.text}")
            slack = spread(weights.value).sum_slack
        if draw.chance(0.15):
            options.append("density=True")
            slack = math.inf if slack else 8.0
        slack += 16 * spread(array.value).most
        given = ", ".join([array.text, *options])
        return self.bind(f"np.histogram({given})", "statistics", slack, 8.0)

    # ---- order ----------------------------------------------------------------------------------

    def sorting(self, name: str) -> Step:
        array = self.array(least=1)
        options = []
        if self.draw.chance(0.8):
            options.append(f"axis={self.axis(array.value.ndim, several=False)}")
        if name == "argsort":
            options.append("kind='stable'")
            return self.bind(f"np.argsort({', '.join([array.text, *options])})", "order")
        return self.bind(f"np.sort({', '.join([array.text, *options])})", "order")

    def searchsorted(self, _: str) -> Step:
        draw = self.draw
        array = self.array(least=1, most=1, kinds=REAL)
        values = self.operand(self.shape(), REAL)
        side = draw.one(("", ", side='right'"))
        ordered = f"np.sort({array.text})"
        if draw.chance(0.3):
            return self.bind(f"{ordered}.searchsorted({values.text}{side})", "order")
        return self.bind(f"np.searchsorted({ordered}, {values.text}{side})", "order")

    def unique(self, name: str) -> Step:
        draw = self.draw
        array = self.array()
        if name == "unique_values":  # in any order
            return self.bind(f"np.sort(np.unique_values({array.text}))", "order")
        options = []
        if name == "unique":
            for option in ("return_index", "return_inverse", "return_counts"):
                if draw.chance(0.3):
                    options.append(f"{option}=True")
            if draw.chance(0.1):
                options.append("equal_nan=False")
        return self.bind(f"np.{name}({', '.join([array.text, *options])})", "order")

    def isin(self, _: str) -> Step:
        array = self.array()
        test = self.array() if self.draw.chance(0.5) else self.operand(self.shape())
        invert = self.draw.one(("", ", invert=True"))
        return self.bind(f"np.isin({array.text}, {test.text}{invert})", "order")

    def places(self, name: str) -> Step:
        array = self.array(least=1)
        if name == "nonzero" and self.draw.chance(0.3):
            return self.bind(f"{array.text}.nonzero()", "order")
        return self.bind(f"np.{name}({array.text})", "order")

    # ---- products -------------------------------------------------------------------------------

    def product(self, name: str) -> Step | None:
        """Return a product of two arrays whose contracted extents are equal, in most cases."""
        draw = self.draw
        left = self.array(least=0 if draw.chance(0.05) else 1, most=3)
        shape = left.value.shape
        extent = shape[-1] if shape else 1
        text = ""
        if name == "vdot":
            right = self.partner(shape if draw.chance(0.7) else (left.value.size,))
        elif name == "outer":
            right = self.array(most=2)
        elif name == "inner":
            right = self.partner((*self.shape(0, 1), extent))
        elif name == "vecdot":
            right = self.partner((*self.shape_within(shape[:-1]), extent))
        elif name == "tensordot":
            return self.tensordot(left)
        else:
            contracted = (extent,) if draw.chance(0.4) else (extent, draw.one(self.extents))
            stack: tuple[int, ...] = ()
            if len(contracted) > 1 and draw.chance(0.3):
                stack = shape[:-2] if name == "matmul" else (draw.between(1, 3),)
            right = self.partner((*stack, *contracted))
        slack = _product_slack((left.value, right.value))
        if name == "matmul" and draw.chance(0.6):
            text = f"{left.text} @ {right.text}"
        elif name == "dot" and draw.chance(0.3):
            text = f"{left.text}.dot({right.text})"
        return self.bind(text or f"np.{name}({left.text}, {right.text})", "product", slack, 4.0)

    def tensordot(self, left: Operand) -> Step:
        draw = self.draw
        shape = left.value.shape
        count = draw.below(len(shape) + 1)
        others = self.shape(0, 2)[: max(0, 3 - count)]
        if draw.chance(0.5):
            right = self.partner((*shape[len(shape) - count :], *others))
            axes = str(count)
        else:
            chosen = draw.shuffled(range(len(shape)))[:count]
            right = self.partner((*(shape[axis] for axis in chosen), *others))
            axes = f"({chosen}, {list(range(count))})"
        slack = _product_slack((left.value, right.value))
        text = f"np.tensordot({left.text}, {right.text}, {axes})"
        return self.bind(text, "product", slack, 4.0)

    def diagonals(self, name: str) -> Step:
        draw = self.draw
        array = self.array(least=2)
        options = []
        if draw.chance(0.4):
            options.append(f"offset={draw.between(-3, 3)}")
        if array.value.ndim > 2 and draw.chance(0.5) and name == "diagonal":
            first, second = draw.shuffled(range(array.value.ndim))[:2]
            options.append(f"axis1={first}, axis2={second}")
        slack = spread(array.value).sum_slack if name == "trace" else 0.0
        return self.bind(self.called(name, array.text, options), "product", slack, 4.0)

    def einsum(self, _: str) -> Step:
        draw = self.draw
        operands = [self.array(most=3) for _ in range(draw.weighted({1: 3.0, 2: 6.0, 3: 2.0}))]
        extents: dict[str, int] = {}
        texts = []
        for operand in operands:
            labels = ""
            for extent in operand.value.shape:
                known = [label for label, other in extents.items() if other == extent]
                if known and draw.chance(0.65):
                    labels += draw.one(known)
                else:
                    label = "ijklmnopq"[len(extents)]
                    extents[label] = extent
                    labels += label
            texts.append(labels)
        subscripts = ",".join(texts)
        if draw.chance(0.8):
            kept = [label for label in draw.shuffled(list(extents)) if draw.chance(0.5)]
            subscripts += f"->{''.join(kept)}"
        if math.prod(extents.values()) > 20_000:
            raise ValueError("too many products")
        slack = _product_slack([operand.value for operand in operands])
        slack *= max(1, math.prod(extents.values()))
        given = ", ".join(operand.text for operand in operands)
        return self.bind(f"np.einsum({subscripts!r}, {given})", "product", slack, 4.0)

    # ---- matrices and transforms ----------------------------------------------------------------

    def matrices(self, name: str) -> Step:
        """Return a function of matrices that rounding cannot make singular, or of any."""
        draw = self.draw
        if draw.chance(0.2):
            array = self.array(least=2, most=3, kinds="iuf")
            extent = min(array.value.shape[-2:])
            array = Operand(f"{array.text}[..., :{extent}, :{extent}]", None)
            slack = math.inf
        else:
            extent = draw.between(1, 4)
            stack = (draw.between(1, 4),) if draw.chance(0.5) else ()
            dtype = draw.one(("float64", "float32", "complex128", "complex64"))
            values = make_values(draw, "plain", dtype, (*stack, extent, extent)) / 8
            values = values + values.conj().mT + 4 * np.eye(extent)
            array = Operand(f"D({array_text(values.astype(dtype))})", values)
            slack = 1e4
        given = array.text
        if name == "linalg.matrix_power":
            given += f", {draw.between(0, 3)}"
        if name == "linalg.qr" and draw.chance(0.3):
            given += f", {draw.one(('reduced', 'complete', 'r'))!r}"
        if name == "linalg.svd" and draw.chance(0.5):
            given += ", full_matrices=False"
        if name == "linalg.solve":
            columns = () if draw.chance(0.3) else (draw.between(1, 3),)
            right = self.partner((extent, *columns), "f")
            given += f", {right.text}"
            slack *= spread(right.value).most + 1
        return self.bind(f"np.{name}({given})", "matrices", slack, 1e4)

    def transform(self, name: str) -> Step:
        draw = self.draw
        array = self.array(least=1, most=3)
        options = []
        if draw.chance(0.6):
            axis = self.axis(array.value.ndim, several=False, none=False)
            options.append(f"axes=({axis},)" if name.endswith("n") else f"axis={axis}")
        if name.endswith("shift"):
            options = [option.replace("axis", "axes") for option in options]
        elif draw.chance(0.3):
            options.append(f"norm={draw.one(('ortho', 'forward', 'backward'))!r}")
        text = f"np.{name}({', '.join([array.text, *options])})"
        slack = 0.0 if name.endswith("shift") else 8 * spread(array.value).sum_slack
        if not np.isfinite(array.value).all():
            slack = math.inf
        return self.bind(text, "transforms", slack, 8.0)

    # ---- shapes ---------------------------------------------------------------------------------

    def shaped(self, name: str) -> Step:
        """Return the array with its dimensions in another order, or with more or fewer of them."""
        draw = self.draw
        array = self.array()
        text, ndim = array.text, array.value.ndim
        order = draw.shuffled(range(ndim))
        given = {
            "transpose": draw.one(("", str(tuple(order)), str([each - ndim for each in order]))),
            "permute_dims": str(tuple(order)),
            "swapaxes": f"{draw.between(-1, ndim - 1)}, {draw.between(-1, ndim - 1)}",
            "moveaxis": draw.one(("0, -1", "-1, 0", f"{list(range(ndim))}, {order}")),
            "expand_dims": draw.one(("0", "-1", str(ndim), "(0, 2)", "(1, 0)")),
            "squeeze": draw.one(("", self.axis(ndim))),
            "reshape": self.other_shape(array.value),
            "flip": draw.one(("", self.axis(ndim))),
            "rot90": draw.one(("", "2", "3", "0", "-1", "1, (1, 0)")),
        }.get(name, "")
        call = f"np.{name}({text}, {given})" if given else f"np.{name}({text})"
        return self.bind(self.settled(call, array.value), "shape")

    def broadcast(self, name: str) -> Step:
        draw = self.draw
        array = self.array(most=3)
        shape = array.value.shape
        if name == "broadcast_to":
            wide = tuple(draw.between(0, 3) if extent == 1 else extent for extent in shape)
            if draw.chance(0.5):
                wide = (draw.between(0, 3), *wide)
            return self.bind(f"np.broadcast_to({array.text}, {wide})", "shape")
        if name == "broadcast_arrays":
            other = self.partner(self.shape_within(shape))
            # numpy returns views that warn when they are written to.
            text = f"[each.copy() for each in np.broadcast_arrays({array.text}, {other.text})]"
            return self.bind(text, "shape")
        vectors = [self.array(least=1, most=1) for _ in range(draw.between(1, 3))]
        indexing = draw.one(("", ", indexing='ij'"))
        given = ", ".join(f"{vector.text}[:4]" for vector in vectors)
        return self.bind(f"np.meshgrid({given}{indexing})", "shape")

    def joined(self, name: str) -> Step:
        """Return arrays that are joined along a dimension."""
        draw = self.draw
        first = self.array(least=0 if name == "stack" else 1, most=3)
        shape = first.value.shape
        axes = {"vstack": 0, "hstack": 1, "dstack": 2, "column_stack": 1}
        axis = axes.get(name, draw.below(max(1, len(shape))))
        parts = [first.text]
        for _ in range(draw.between(0, 2)):
            other = list(shape)
            if name != "stack" and axis < len(shape) and len(shape) > 1:
                other[axis] = draw.one(self.extents)
            elif name in ("concatenate", "hstack"):
                other[-1] = draw.one(self.extents)
            parts.append(self.partner(other).text)
        if name == "append":
            given = f"{first.text}, {parts[-1]}"
            options = f", axis={axis}" if draw.chance(0.6) else ""
            return self.bind(f"np.append({given}{options})", "shape")
        parts = draw.shuffled(parts)
        text = f"np.{name}([{', '.join(parts)}]"
        if name == "concatenate" and draw.chance(0.2):
            text += f", dtype={self.dtype()!r}, casting={draw.one(('same_kind', 'unsafe'))!r}"
            return self.bind(f"{text}, axis={axis})", "shape", math.inf)
        if name in ("concatenate", "stack") and draw.chance(0.7):
            text += f", axis={draw.one((axis, axis - len(shape), 'None'))}"
        return self.bind(f"{text})", "shape")

    def divided(self, name: str) -> Step:
        """Return the parts of an array, which are views."""
        draw = self.draw
        array = self.array(least=1)
        shape = array.value.shape
        axis = {"vsplit": 0, "hsplit": min(1, len(shape) - 1)}.get(name, draw.below(len(shape)))
        if name == "unstack":
            return self.bind(f"np.unstack({array.text}, axis={axis})", "shape")
        extent = shape[axis]
        divisors = [number for number in range(1, max(2, extent + 1)) if extent % number == 0]
        sections = str(draw.one(divisors))
        if name == "array_split" or draw.chance(0.05):
            sections = str(draw.between(1, 5))
        if draw.chance(0.4):
            sections = list_text(sorted(draw.between(0, extent) for _ in range(draw.between(1, 3))))
        text = f"np.{name}({array.text}, {sections}"
        if name in ("split", "array_split"):
            text += f", axis={axis}"
        return self.bind(f"{text})", "shape")

    def moved(self, name: str) -> Step:
        """Return the elements of an array at other places, repeated, or with others around them."""
        draw = self.draw
        array = self.array(most=3)
        text, shape = array.text, array.value.shape
        axis = self.axis(len(shape), several=False)
        extent = shape[int(axis)] if axis != "None" and -len(shape) <= int(axis) < len(shape) else 0
        if name == "roll":
            several = self.axis(len(shape))
            shift = draw.one(("1", "-2", "3", "100", "(1, 2)"))
            return self.bind(f"np.roll({text}, {shift}, axis={several})", "shape")
        if name == "repeat":
            counts = list_text([draw.below(3) for _ in range(extent)])
            times = draw.one(("2", "1", "0", "3", counts))
            return self.bind(self.called("repeat", text, [times, f"axis={axis}"]), "shape")
        if name == "tile":
            times = draw.one(("2", "(2, 1)", "(1, 2, 2)", "0", "(1,)", "[2, 2]"))
            return self.bind(f"np.tile({text}, {times})", "shape")
        if name == "take":
            extent = extent if axis != "None" else array.value.size
            table = self.table(extent, draw.one(((), (3,), (2, 2), (0,), (1,))))
            return self.bind(self.called("take", text, [table, f"axis={axis}"]), "shape")
        if name == "take_along_axis":
            places = f"np.argsort({text}, axis={axis}, kind='stable')"
            if draw.chance(0.5) and axis != "None":
                other = [1 if draw.chance(0.2) else each for each in shape]
                other[int(axis)] = draw.between(0, 3)
                places = self.table(extent, tuple(other))
            return self.bind(f"np.take_along_axis({text}, {places}, axis={axis})", "shape")
        widths = [(draw.between(0, 2), draw.between(0, 3)) for _ in shape]
        width = draw.one(("1", "(1, 2)", str(widths), "2", "0"))
        mode = draw.one(("constant", "constant", "edge", "reflect", "symmetric", "wrap"))
        options = f", mode={mode!r}"
        if mode == "constant" and draw.chance(0.6):
            options = f", constant_values={self.number(_kinds_up_to(array.value.dtype.kind)).text}"
        return self.bind(f"np.pad({text}, {width}{options})", "shape")

    # ---- elements -------------------------------------------------------------------------------

    def elementwise(self, name: str) -> Step:
        draw = self.draw
        array = self.array(least=1 if name.startswith("tri") else 0)
        text, value = array.text, array.value
        if name == "where":
            condition = text if draw.chance(0.5) else f"{text} != 0"
            given = f"{self.operand(value.shape).text}, {self.operand(value.shape).text}"
            if draw.chance(0.1):
                return self.bind(f"np.where({condition})", "elements")
            return self.bind(f"np.where({condition}, {given})", "elements")
        if name == "clip":
            low, high = (self.operand(value.shape, REAL).text for _ in range(2))
            given = draw.one((f"{low}, {high}", f"None, {high}", f"{low}, None", f"min={low}"))
            if draw.chance(0.3):
                return self.bind(f"{text}.clip({given})", "elements")
            return self.bind(f"np.clip({text}, {given})", "elements")
        if name in ("round", "around"):
            decimals = draw.one(("", ", 1", ", 2", ", -1", ", decimals=3"))
            return self.bind(f"np.{name}({text}{decimals})", "elements", 0.0, 16.0)
        if name == "nan_to_num":
            options = draw.one(("", ", nan=2.5", ", posinf=7, neginf=-7", ", copy=True"))
            return self.bind(f"np.nan_to_num({text}{options})", "elements")
        if name in ("tril", "triu"):
            return self.bind(f"np.{name}({text}, {draw.between(-2, 2)})", "elements")
        if name == "angle":
            return self.bind(f"np.angle({text})", "elements", 0.0, 16.0)
        return self.bind(f"np.{name}({text})", "elements")

    def converted(self, name: str) -> Step:
        """Return an array of another dtype, or of the same shape."""
        draw = self.draw
        array = self.array()
        dtype = self.dtype()
        slack = cast_slack(array.value, np.dtype(dtype))
        if name == "astype":
            text = f"{array.text}.astype({dtype!r})"
            if draw.chance(0.4):
                copied = draw.one(("", ", copy=False"))
                text = f"np.astype({array.text}, np.dtype({dtype!r}){copied})"
            return self.bind(text, "elements", slack)
        option = f", dtype={dtype!r}" if draw.chance(0.4) else ""
        if name == "empty_like":  # its elements may be anything
            return self.bind(f"np.zeros_like(np.empty_like({array.text}{option}))", "elements")
        given = array.text
        if name == "full_like":
            number = self.number()
            given += f", {number.text}"
            slack = cast_slack(number.value, np.dtype(dtype) if option else array.value.dtype)
        return self.bind(f"np.{name}({given}{option})", "elements", slack)

    def compared(self, name: str) -> Step:
        array = self.array()
        other = self.operand(array.value.shape)
        if self.draw.chance(0.3):
            other = Operand(f"{array.text} + 0", array.value)
        nan = self.draw.one(("", ", equal_nan=True"))
        text = f"np.{name}({array.text}, {other.text}{nan})"
        return self.bind(text if name == "isclose" else f"({text},)", "elements")


def _are_broadcast(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    try:
        np.broadcast_shapes(shape, other)
    except ValueError:
        return False
    return True


def _is_view(value: Any, source: np.ndarray) -> bool:
    return isinstance(value, np.ndarray) and (not value.size or np.shares_memory(value, source))


def _kinds_up_to(kind: str) -> str:
    return {"b": "b", "i": "bi", "u": "bu", "f": "biuf", "c": ANY_KIND}[kind]


def _product_slack(values: Sequence[Any]) -> float:
    """Return how far sums of products in any two orders may be apart, in units of eps."""
    slack = 1.0
    for value in values:
        sizes = spread(value)
        # BLAS may leave out what is multiplied by 0, so that 0 × inf is 0.
        slack *= sizes.count * max(sizes.most, 1e-300) if sizes.is_finite else math.inf
    return 4 * slack


def arrays_in(value: Any) -> list[np.ndarray]:
    """Return the arrays of a result, which may be a tuple or a list of them."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, tuple | list):
        return [array for part in value for array in arrays_in(part)]
    return []


# ---- tables -------------------------------------------------------------------------------------

CUMULATIVE = ("cumulative_sum", "cumulative_prod")
REAL_REDUCTIONS = ("ptp",)
REDUCE_METHODS = {
    "sum": "add",
    "prod": "multiply",
    "max": "maximum",
    "min": "minimum",
    "any": "logical_or",
    "all": "logical_and",
    "cumsum": "add",
    "cumprod": "multiply",
}
METHODS = {
    *("sum", "prod", "max", "min", "any", "all", "mean", "var", "std", "argmax", "argmin"),
    *("cumsum", "cumprod", "trace", "diagonal", "take", "repeat"),
}
PYTHON_RESULTS = ("shape", "ndim", "size", "iscomplexobj", "isrealobj", "result_type")
STEPS = {
    "operators": 10.0,
    "ufunc": 10.0,
    "in place": 8.0,
    "out=": 3.0,
    "index": 9.0,
    "assign": 14.0,
    "view": 12.0,
    "function": 34.0,
    "number": 2.0,
}
MAKERS: dict[str, Callable[[ScriptMaker], Step | None]] = {
    "operators": ScriptMaker.operators,
    "ufunc": ScriptMaker.ufunc,
    "in place": ScriptMaker.in_place,
    "out=": ScriptMaker.out,
    "index": ScriptMaker.index,
    "assign": ScriptMaker.assign,
    "view": ScriptMaker.view,
    "number": ScriptMaker.python_number,
}
# What makes a call of each function: all that DistArrays take, by their names in numpy. A weight
# is shared by the functions of a row.
_ROWS: tuple[tuple[Callable[..., Step | None], float, str], ...] = (
    (ScriptMaker.reduction, 14, "sum prod max min any all mean var std argmax argmin ptp"),
    (ScriptMaker.reduction, 4, "count_nonzero cumsum cumprod cumulative_sum cumulative_prod"),
    (ScriptMaker.reduction, 5, "nansum nanprod nanmax nanmin nanmean nanvar nanstd"),
    (ScriptMaker.norm, 2, "linalg.norm"),
    (ScriptMaker.diff, 1, "diff"),
    (ScriptMaker.average, 1.5, "average"),
    (ScriptMaker.quantile, 3, "median quantile percentile"),
    (ScriptMaker.covariance, 1.5, "cov corrcoef"),
    (ScriptMaker.counts, 2.5, "bincount histogram digitize"),
    (ScriptMaker.sorting, 4, "sort argsort"),
    (ScriptMaker.searchsorted, 1.5, "searchsorted"),
    (ScriptMaker.unique, 3, "unique unique_all unique_counts unique_inverse unique_values"),
    (ScriptMaker.isin, 1, "isin"),
    (ScriptMaker.places, 2, "nonzero argwhere"),
    (ScriptMaker.product, 9, "matmul dot vdot inner outer tensordot vecdot"),
    (ScriptMaker.diagonals, 2, "trace diagonal"),
    (ScriptMaker.einsum, 3, "einsum"),
    (ScriptMaker.matrices, 1, "linalg.cholesky linalg.det linalg.eigh linalg.eigvalsh linalg.inv"),
    (ScriptMaker.matrices, 1, "linalg.matrix_norm linalg.matrix_power linalg.matrix_rank"),
    (ScriptMaker.matrices, 1, "linalg.pinv linalg.qr linalg.slogdet linalg.svd linalg.svdvals"),
    (ScriptMaker.matrices, 0.5, "linalg.solve"),
    (ScriptMaker.transform, 1.5, "fft.fft fft.ifft fft.rfft fft.irfft fft.hfft fft.ihfft"),
    (ScriptMaker.transform, 1.5, "fft.fftn fft.ifftn fft.rfftn fft.irfftn"),
    (ScriptMaker.transform, 0.5, "fft.fftshift fft.ifftshift"),
    (ScriptMaker.shaped, 4, "transpose permute_dims matrix_transpose swapaxes moveaxis reshape"),
    (
        ScriptMaker.shaped,
        5,
        "expand_dims squeeze ravel flip rot90 atleast_1d atleast_2d atleast_3d",
    ),
    (ScriptMaker.broadcast, 2, "broadcast_to broadcast_arrays meshgrid"),
    (ScriptMaker.joined, 6, "concatenate stack vstack hstack column_stack dstack append"),
    (ScriptMaker.divided, 4, "split array_split hsplit vsplit unstack"),
    (ScriptMaker.moved, 6, "roll repeat tile take take_along_axis pad"),
    (ScriptMaker.elementwise, 7, "where clip round around real imag angle nan_to_num tril triu"),
    (ScriptMaker.elementwise, 1, "copy"),
    (ScriptMaker.converted, 4, "astype zeros_like ones_like full_like empty_like"),
    (ScriptMaker.compared, 2, "isclose allclose array_equal"),
    (ScriptMaker.python_function, 1, " ".join(PYTHON_RESULTS)),
)
FUNCTIONS: dict[str, Callable[..., Step | None]] = {}
FUNCTION_WEIGHTS: dict[str, float] = {}
for _maker, _weight, _names in _ROWS:
    for _name in _names.split():
        FUNCTIONS[_name] = _maker
        FUNCTION_WEIGHTS[_name] = _weight / len(_names.split())
