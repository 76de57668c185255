"""What is trained and how: the settings of [train] and of `einmpi.train`, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, TypeAlias

from einmpi.errors import InputError, one_of
from einmpi.language.toml_document import show

# ---- optimizers ----------------------------------------------------------------------------------
#
# The optimisers: for each a record with its options, its state and its statements.


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


# Where a key of the settings is, for messages: place("optimizer", "rate").
Place: TypeAlias = Callable[..., str]

PRECISIONS = ("bfloat16", "float16")
MOST_COUNTED = 2**31  # batches or updates
FIRST_SCALE = 65536.0  # torch's, as the next one
STEPS_UNTIL_GROWTH = 2000
_COMMON_OPTIONS = ("name", "rate", "decay", "clip")
_NAMES_IN_TORCH = {"lr": "rate", "weight_decay": "decay", "max_norm": "clip"}
_POSITIVE = "a number above 0"


@dataclass(frozen=True)
class Training:
    """What is trained and how.

    Attributes
    ----------
    loss : str
        The tensor without dimensions that becomes less.
    parameters : tuple of str
        The inputs that change.
    optimizer : Optimizer
        How they change.
    options : mapping of str to float
        The numbers of the optimiser, by name.
    rate : float or str
        The rate, or an expression in the language.
    decay : float
        The decay of weights.
    clip : float or None
        The greatest norm of all gradients together.
    accumulate : int
        The number of batches whose mean gradient makes one update.
    precision : str or None
        The dtype in which the loss is computed; None for those of the program.
    scale : float
        With float16, what the loss is multiplied by at first.
    growth : int
        With float16, after how many updates the scale is doubled.
    place : Place
        Where a setting is, for messages.
    """

    loss: str
    parameters: tuple[str, ...]
    optimizer: Optimizer
    options: Mapping[str, float]
    rate: float | str
    decay: float
    clip: float | None
    accumulate: int
    precision: str | None
    scale: float
    growth: int
    place: Place


def make_training(
    place: Place,
    loss: Any,
    parameters: Any,
    optimizer: Any,
    accumulate: Any = None,
    precision: Any = None,
    scale: Any = None,
    growth: Any = None,
) -> Training:
    """Return checked settings. What they say of the program is checked when it is written out."""
    if not isinstance(loss, str):
        what = "there is no loss" if loss is None else f"the loss is {show(loss)}"
        raise InputError(place("loss"), what, "the name of a tensor without dimensions")
    names = _checked_names(place, parameters)
    record, given = _checked_optimizer(place, optimizer)
    options = {key: _option(place, given, key, each) for key, each in record.options.items()}
    return Training(
        loss=loss,
        parameters=names,
        optimizer=record,
        options=options,
        decay=_option(place, given, "decay", Option(record.decay, "the decay of weights")),
        clip=_checked_clip(place, given),
        rate=_checked_rate(place, given, record),
        accumulate=_checked_count(place, "accumulate", accumulate, 1),
        precision=_checked_precision(place, precision, {"scale": scale, "growth": growth}),
        scale=FIRST_SCALE if scale is None else _positive(place("scale"), "scale", scale),
        growth=_checked_count(place, "growth", growth, STEPS_UNTIL_GROWTH),
        place=place,
    )


def _checked_optimizer(place: Place, optimizer: Any) -> tuple[Optimizer, Mapping[str, Any]]:
    """Return the record of an optimiser, and what is said about it: its name and options."""
    if isinstance(optimizer, str):
        optimizer = {"name": optimizer}
    example = '{ name = "adamw", rate = 0.001 }'
    if not isinstance(optimizer, Mapping):
        what = "there is no optimizer"
        if optimizer is not None:
            what = f"the optimizer is {show(optimizer)}"
        raise InputError(place("optimizer"), what, f"a table such as {example}")
    name = optimizer.get("name")
    if not isinstance(name, str):
        what = "the optimizer has no name"
        if name is not None:
            what = f"the name of the optimizer is {show(name)}"
        raise InputError(place("optimizer", "name"), what, one_of(tuple(OPTIMIZERS)))
    record = optimizer_named(place("optimizer", "name"), name)
    known = (*_COMMON_OPTIONS, *record.options)
    for key in optimizer:
        if key not in known:
            what = f"{name} has no option {show(key)}"
            hint = ""
            if key in _NAMES_IN_TORCH:
                hint = f"{key} of torch is called {_NAMES_IN_TORCH[key]} here"
            raise InputError(place("optimizer", key), what, one_of(known, str(key)), hint)
    return record, optimizer


def _option(place: Place, optimizer: Mapping[str, Any], key: str, option: Option) -> float:
    """Return a number of the optimiser's table, the default without the key."""
    value = optimizer.get(key)
    if value is None:
        return option.default
    return _number(place("optimizer", key), key, value, option.range_text, option.allows)


def _checked_clip(place: Place, optimizer: Mapping[str, Any]) -> float | None:
    clip = optimizer.get("clip")
    return None if clip is None else _positive(place("optimizer", "clip"), "clip", clip)


def _checked_names(place: Place, parameters: Any) -> tuple[str, ...]:
    expected = 'a list of inputs such as ["W1", "b1"]'
    if not isinstance(parameters, list | tuple):
        what = "there are no parameters to train"
        if parameters is not None:
            what = f"parameters is {show(parameters)}"
        raise InputError(place("parameters"), what, expected)
    if not parameters:
        raise InputError(place("parameters"), "there are no parameters to train", expected)
    for number, name in enumerate(parameters):
        if not isinstance(name, str):
            raise InputError(place("parameters", number), f"parameters has {show(name)}", expected)
        if name in parameters[:number]:
            what = f"{name} is in parameters twice"
            raise InputError(place("parameters", number), what, "each name once")
    return tuple(parameters)


def _number(
    where: str, key: str, value: Any, expected: str, is_allowed: Callable[[float], bool]
) -> float:
    """Return a finite number; refuse all else, and numbers that are not allowed."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not isfinite(value) or not is_allowed(value):
        raise InputError(where, f"{key} is {show(value)}", expected)
    return float(value)


def _positive(where: str, key: str, value: Any, expected: str = _POSITIVE) -> float:
    return _number(where, key, value, expected, lambda number: number > 0)


def _checked_rate(place: Place, optimizer: Mapping[str, Any], record: Optimizer) -> float | str:
    rate = optimizer.get("rate")
    if rate is None or isinstance(rate, str):
        return record.rate if rate is None else rate
    expected = f'{_POSITIVE}, or an expression such as "0.1 * 0.99**step"'
    return _positive(place("optimizer", "rate"), "rate", rate, expected)


def _checked_count(place: Place, key: str, given: Any, default: int) -> int:
    if given is None:
        return default
    if type(given) is not int or not 1 <= given <= MOST_COUNTED:
        expected = f"an integer from 1 to 2**31 = {MOST_COUNTED}"
        raise InputError(place(key), f"{key} is {show(given)}", expected)
    number: int = given
    return number


def _checked_precision(place: Place, precision: Any, scaling: Mapping[str, Any]) -> str | None:
    """Return the precision. What scales the loss needs float16."""
    for key, value in scaling.items():
        if value is not None and precision != "float16":
            what = f"{key} is given, but the loss is not scaled"
            raise InputError(place(key), what, 'precision = "float16"')
    if precision is None:
        return None
    if precision not in PRECISIONS:
        what = f"precision is {show(precision)}"
        raise InputError(place("precision"), what, one_of(PRECISIONS, str(precision)))
    return str(precision)
