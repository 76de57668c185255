"""Steps of scripts over DistArrays: expressions, changes in place, indices, assignments, views."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .arrays_case import Step, array_text, list_text
from .arrays_operands import (
    ANY_KIND,
    OPERATORS,
    REAL,
    UFUNCS,
    Operand,
    OperandMaker,
    cast_slack,
    kinds_up_to,
    operator_ulps,
    ufunc_ulps,
)
from .generate import make_values

OPERATOR_WEIGHTS = {operator: weight for operator, (_, weight) in OPERATORS.items()}
IN_PLACE_WEIGHTS = {
    operator: weight
    for operator, weight in OPERATOR_WEIGHTS.items()
    if operator[0] not in "<=!>" or operator in ("<<", ">>")
}


class StepMaker(OperandMaker):
    """Makes the steps that are no calls of functions."""

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
        ulps = operator_ulps(operator, (first.value, second.value))
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
            given += ", where=True"
        return self.bind(f"np.{name}({given})", "ufunc", 0.0, ulps, ufunc.nout)

    def kinds_of(self, ufunc: np.ufunc) -> str:
        """Return the kinds of numbers that a ufunc takes."""
        if ufunc is np.reciprocal:
            return "fc"  # of the integer 0 it is not defined
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
        kinds = ANY_KIND if draw.chance(0.1) else kinds_up_to(target.dtype.kind)
        value = self.operand(target.shape, kinds)
        ulps = operator_ulps(operator, (target, value.value))
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
        kinds = ANY_KIND if draw.chance(0.3) else kinds_up_to(array.dtype.kind)
        if selected.ndim and draw.chance(0.25):
            operator = draw.weighted(IN_PLACE_WEIGHTS)
        value = self.value_for(selected.shape, kinds)
        if not selected.size and np.ndim(value.value) > selected.ndim:
            raise ValueError("numpy does not look at the shape of values that go nowhere")
        if not selected.ndim and np.ndim(value.value):
            raise ValueError("numpy takes some of these, and its versions differ in which")
        if not _is_view(selected, array) and np.shares_memory(value.value, array):
            raise ValueError("numpy reads some values after it has replaced them")
        slack = cast_slack(value.value, array.dtype)
        if isinstance(value.value, np.generic) and (slack or not _fits(value.value, array.dtype)):
            raise ValueError("numpy refuses it with some keys, and casts it with others")
        ulps = 0.0
        if operator:
            ulps = operator_ulps(operator, (array, value.value))
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


def _fits(number: np.generic, dtype: np.dtype) -> bool:
    if number.dtype.kind not in "iu" or dtype.kind not in "iu":
        return True
    return np.iinfo(dtype).min <= int(number) <= np.iinfo(dtype).max


def _is_view(value: Any, source: np.ndarray) -> bool:
    return isinstance(value, np.ndarray) and (not value.size or np.shares_memory(value, source))


# What makes each kind of step.
MAKERS: dict[str, Callable[[StepMaker], Step | None]] = {
    "operators": StepMaker.operators,
    "ufunc": StepMaker.ufunc,
    "in place": StepMaker.in_place,
    "out=": StepMaker.out,
    "index": StepMaker.index,
    "assign": StepMaker.assign,
    "view": StepMaker.view,
    "number": StepMaker.python_number,
}
