"""The optimisers: for each a record with its options, its state and its statements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from einmpi.errors import InputError, one_of


@dataclass(frozen=True)
class Option:
    """A number that an optimiser takes: from `least` to below `end`."""

    default: float
    meaning: str
    least: float = 0.0
    end: float = inf

    def allows(self, number: float) -> bool:
        return self.least <= number < self.end

    @property
    def range_text(self) -> str:
        """The numbers that are allowed, for messages."""
        if self.end == inf:
            return f"a number of at least {self.least:g}"
        return f"a number from {self.least:g} to below {self.end:g}"


@dataclass(frozen=True)
class Optimizer:
    """How the next value of a parameter is computed from its gradient.

    Texts are in the language. In them {W} is the parameter and {g} its gradient, {kept} is {W}
    less its decay where that is decoupled, {rate} the rate, and {count} the number of the update,
    from 1. An option, a number or a state is written by its name, and {m_next} is the next {m}.

    Attributes
    ----------
    name : str
        What job files call it.
    meaning : str
        What it does, for the documentation.
    rate : float
        The rate if none is given.
    update : str
        The next value of the parameter.
    options : mapping of str to Option
        The numbers that it takes, besides those that all take.
    numbers : mapping of str to str
        Tensors without dimensions that all parameters share, by name.
    state : mapping of str to str
        Tensors with the shape of the parameter that are carried, and their next values. They start
        with zeros.
    decay : float
        The decay of weights if none is given.
    is_decoupled : bool
        Whether weights decay on their own, and not by way of the gradient.
    is_linear : bool
        Whether it takes complex parameters: real and imaginary parts do not mix.
    """

    name: str
    meaning: str
    rate: float
    update: str
    options: Mapping[str, Option] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, str] = field(default_factory=dict)
    decay: float = 0.0
    is_decoupled: bool = False
    is_linear: bool = False


_MOMENTUM = Option(0.9, "how much of the last step is taken again", end=1.0)
_BETA_1 = Option(0.9, "how much of the mean of gradients is kept", end=1.0)
_BETA_2 = Option(0.999, "how much of the mean of their squares is kept", end=1.0)
_ADAM_OPTIONS = {
    "beta1": _BETA_1,
    "beta2": _BETA_2,
    "eps": Option(1e-8, "what is added to the root of that mean"),
}
_ADAM_STATE = {
    "m": "{beta1} * {m} + (1 - {beta1}) * {g}",
    "v": "{beta2} * {v} + (1 - {beta2}) * {g}**2",
}
_ADAM_NUMBERS = {
    "size": "{rate} / (1 - {beta1}**{count})",
    "root": "sqrt(1 - {beta2}**{count})",
}
_ADAM_UPDATE = "{kept} - {size} * {m_next} / (sqrt({v_next}) / {root} + {eps})"

_RECORDS = (
    Optimizer(
        name="sgd",
        meaning="gradient descent",
        rate=1e-3,
        update="{kept} - {rate} * {g}",
        is_linear=True,
    ),
    Optimizer(
        name="momentum",
        meaning="gradient descent with momentum",
        rate=1e-3,
        options={"momentum": _MOMENTUM},
        state={"m": "{momentum} * {m} + {g}"},
        update="{kept} - {rate} * {m_next}",
        is_linear=True,
    ),
    Optimizer(
        name="nesterov",
        meaning="gradient descent with Nesterov's momentum",
        rate=1e-3,
        options={"momentum": _MOMENTUM},
        state={"m": "{momentum} * {m} + {g}"},
        update="{kept} - {rate} * ({g} + {momentum} * {m_next})",
        is_linear=True,
    ),
    Optimizer(
        name="adam",
        meaning="Adam; decay is added to the gradient",
        rate=1e-3,
        options=_ADAM_OPTIONS,
        numbers=_ADAM_NUMBERS,
        state=_ADAM_STATE,
        update=_ADAM_UPDATE,
    ),
    Optimizer(
        name="adamw",
        meaning="Adam; weights decay on their own",
        rate=1e-3,
        options=_ADAM_OPTIONS,
        numbers=_ADAM_NUMBERS,
        state=_ADAM_STATE,
        update=_ADAM_UPDATE,
        decay=0.01,
        is_decoupled=True,
    ),
    Optimizer(
        name="adagrad",
        meaning="each element has a rate of its own, which falls with its gradients",
        rate=1e-2,
        options={
            "rate_decay": Option(0.0, "how fast the rate falls with the number of updates"),
            "initial": Option(0.0, "what the sum of squares starts from"),
            "eps": Option(1e-10, "what is added to the root of the sum of squares"),
        },
        numbers={"size": "{rate} / (1 + ({count} - 1) * {rate_decay})"},
        state={"v": "{v} + {g}**2"},
        update="{kept} - {size} * {g} / (sqrt({initial} + {v_next}) + {eps})",
    ),
    Optimizer(
        name="lion",
        meaning="steps of one size, in the direction of the mean gradient's signs",
        rate=1e-4,
        options={
            "beta1": Option(0.9, "how much the mean counts against the gradient", end=1.0),
            "beta2": Option(0.99, "how much of the mean of gradients is kept", end=1.0),
        },
        state={"m": "{beta2} * {m} + (1 - {beta2}) * {g}"},
        update="{kept} - {rate} * sign({beta1} * {m} + (1 - {beta1}) * {g})",
        is_decoupled=True,
    ),
)
OPTIMIZERS: Mapping[str, Optimizer] = {record.name: record for record in _RECORDS}


def optimizer_named(where: str, name: str) -> Optimizer:
    """Return the optimiser with this name."""
    if name not in OPTIMIZERS:
        raise InputError(where, f"unknown optimizer {name!r:.60}", one_of(tuple(OPTIMIZERS), name))
    return OPTIMIZERS[name]
