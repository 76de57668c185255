"""Random scripts over DistArrays. numpy runs each step as it is made, and so decides what is valid.

A script follows from its seed and number alone, on every machine.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from .arrays_case import KNOWN, ArrayCase, Step
from .arrays_functions import FUNCTION_WEIGHTS, FUNCTIONS, FunctionMaker
from .arrays_operands import MOST_DIMENSIONS, MOST_ELEMENTS
from .arrays_steps import MAKERS
from .case import cut
from .generate import Draw, make_values

RANKS = {1: 22.0, 2: 24.0, 3: 24.0, 4: 16.0, 5: 14.0}
MOST_LIVE = 6  # arrays; more of them take longer to compare after each step
RAISING_SHARE = 0.2  # of the steps for which numpy raises: DistArrays have to raise, too
ERRORS = (ValueError, TypeError, IndexError, OverflowError, ZeroDivisionError, AttributeError)
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


class ScriptMaker(FunctionMaker):
    """Makes one script, step by step."""

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
            # Before it refuses a power, numpy has stored those before it.
            is_clean = "**=" not in step.text and "power" not in step.text
            is_clean = is_clean and not isinstance(error, AttributeError)
            if self.draw.chance(RAISING_SHARE) and is_clean:
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


def arrays_in(value: Any) -> list[np.ndarray]:
    """Return the arrays of a result, which may be a tuple or a list of them."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, tuple | list):
        return [array for part in value for array in arrays_in(part)]
    return []
