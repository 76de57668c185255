"""What is trained and how: the settings of [train] and of `einmpi.train`, checked."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf, isfinite
from pathlib import Path
from typing import Any

from einmpi.errors import InputError, nearest_of, one_of
from einmpi.graph.eingraph import EinGraph
from einmpi.language.syntax import Declaration, Statement
from einmpi.language.toml_document import Place, check_count, show

# ---- optimizers ----------------------------------------------------------------------------------
#
# The optimisers: for each a record with its options, its state and its statements, from a file.


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
    from 1. An option, a number or a tensor is written by its name, and {m_next} is the next {m}.
    {sum} sums over all labels of the parameter, {elements} is how many elements it has, and
    {machine} the precision of its dtype. The last two dimensions are a matrix, with labels {row}
    and {column}; {short} is the one with the smaller extent and {long} the other, {other} and
    {third} are further labels of the extent of {short}. {x:short=other} is {x} with another label.

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
        Tensors that are carried, and their next values. They start with zeros.
    between : mapping of str to str
        Tensors that are computed from these, in order, for the update.
    labels : mapping of str to str
        For tensors of both kinds that do not have the labels of the parameter, those that they
        have: "… row" are the labels before the matrix, and that of its rows.
    vectors : Optimizer or None
        What parameters with fewer than two dimensions change by, if it is not this: in a file the
        name of another, or a table of what is different.
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
    between: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    vectors: Optimizer | None = None
    decay: float = 0.0
    is_decoupled: bool = False
    is_linear: bool = False

    def of(self, dimensions: int) -> Optimizer:
        """Return what parameters with so many dimensions change by."""
        return self.vectors if self.vectors is not None and dimensions < 2 else self


@cache
def optimizers() -> dict[str, Optimizer]:
    """Return the optimisers, by name. The file is read when it is first needed."""
    text = Path(__file__).with_name("optimizers.toml").read_text(encoding="utf-8")
    found: dict[str, Optimizer] = {}
    for name, table in tomllib.loads(text).items():
        if "options" in table:
            table["options"] = {key: Option(**each) for key, each in table["options"].items()}
        vectors = table.pop("vectors", None)
        if "like" in table:
            record = replace(found[table.pop("like")], name=name, **table)
        else:
            record = Optimizer(name, **table)
        if isinstance(vectors, str):
            record = replace(record, vectors=found[vectors])
        elif vectors is not None:
            record = replace(record, vectors=replace(record, **vectors))
        found[name] = record
    return found


PRECISIONS = ("bfloat16", "float16")
MOST_COUNTED = 2**31  # batches or updates
FIRST_SCALE = 65536.0  # torch's, as the next one
STEPS_UNTIL_GROWTH = 2000
_COMMON_OPTIONS = ("name", "rate", "decay", "clip")
_NAMES_IN_TORCH = {"lr": "rate", "weight_decay": "decay", "max_norm": "clip"}
_POSITIVE = "a number above 0"


@dataclass(frozen=True)
class Rule:
    """How some of the parameters change.

    Attributes
    ----------
    parameters : tuple of str
        Which of them.
    optimizer : Optimizer
        How they change.
    options : mapping of str to float
        The numbers of the optimiser, by name.
    rate : float or str
        The rate, or an expression in the language.
    decay : float
        The decay of weights.
    suffix : str
        The end of the names of numbers that only this rule has.
    keys : tuple
        Where it is in the settings.
    """

    parameters: tuple[str, ...]
    optimizer: Optimizer
    options: Mapping[str, float]
    rate: float | str
    decay: float
    suffix: str
    keys: tuple[str | int, ...]


@dataclass(frozen=True)
class Training:
    """What is trained and how.

    Attributes
    ----------
    loss : str
        The tensor without dimensions that becomes less.
    parameters : tuple of str
        The inputs that change.
    rules : tuple of Rule
        How they change: those of the groups, and last that of all others.
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
    rules: tuple[Rule, ...]
    clip: float | None
    accumulate: int
    precision: str | None
    scale: float
    growth: int
    place: Place


@dataclass(frozen=True)
class Program:
    """A program that is to be trained.

    Attributes
    ----------
    graph : EinGraph
        The program as written.
    items : sequence of Statement or Declaration
        Its statements.
    taken : collection of str
        All names that mean something in it.
    earlier : collection of str
        The names of tensors of earlier loops, which a state cannot have.
    carried, batched : collection of str
        Inputs that cannot be parameters.
    constants : collection of str
        Numbers that take the dtype of what they are combined with.
    dtypes_of : callable
        Returns the dtypes of the tensors of another text with the same inputs.
    """

    graph: EinGraph
    items: Sequence[Statement | Declaration]
    taken: Collection[str]
    dtypes_of: Callable[[str], Mapping[str, str]]
    earlier: Collection[str] = ()
    carried: Collection[str] = ()
    batched: Collection[str] = ()
    constants: Collection[str] = ()


def make_training(
    place: Place,
    loss: Any,
    parameters: Any,
    optimizer: Any,
    accumulate: Any = None,
    precision: Any = None,
    scale: Any = None,
    growth: Any = None,
    groups: Any = None,
) -> Training:
    """Return checked settings. What they say of the program is checked when it is written out."""
    if not isinstance(loss, str):
        what = "there is no loss" if loss is None else f"the loss is {show(loss)}"
        raise InputError(place("loss"), what, "the name of a tensor without dimensions")
    names = _checked_names(place, parameters)
    if isinstance(optimizer, str):
        optimizer = {"name": optimizer}
    record = _checked_optimizer(partial(place, "optimizer"), optimizer, _COMMON_OPTIONS)
    rules = _checked_groups(place, names, optimizer, groups)
    in_groups = [name for rule in rules for name in rule.parameters]
    others = tuple(name for name in names if name not in in_groups)
    clip = optimizer.get("clip")
    rules.append(_rule(place, ("optimizer",), record, optimizer, others, ""))
    return Training(
        loss=loss,
        parameters=names,
        rules=tuple(rules),
        clip=None if clip is None else _positive(place("optimizer", "clip"), "clip", clip),
        accumulate=_checked_count(place, "accumulate", accumulate, 1),
        precision=_checked_precision(place, precision, {"scale": scale, "growth": growth}),
        scale=FIRST_SCALE if scale is None else _positive(place("scale"), "scale", scale),
        growth=_checked_count(place, "growth", growth, STEPS_UNTIL_GROWTH),
        place=place,
    )


def _rule(
    place: Place,
    keys: tuple[str | int, ...],
    record: Optimizer,
    given: Mapping[str, Any],
    parameters: tuple[str, ...],
    suffix: str,
) -> Rule:
    """Return how some parameters change; `given` has the numbers of the optimiser."""
    at = partial(place, *keys)

    def number(key: str, option: Option) -> float:
        value = given.get(key)
        if value is None:
            return option.default
        return _number(at(key), key, value, option.range_text, option.allows)

    return Rule(
        parameters=parameters,
        optimizer=record,
        options={key: number(key, option) for key, option in record.options.items()},
        rate=_checked_rate(at("rate"), given, record),
        decay=number("decay", Option(record.decay, "the decay of weights")),
        suffix=suffix,
        keys=keys,
    )


def _checked_groups(
    place: Place, names: Sequence[str], optimizer: Mapping[str, Any], groups: Any
) -> list[Rule]:
    """Return the rules of groups: what they do not say is as in the table of the optimiser."""
    expected = 'a list such as [{ parameters = ["b1"], rate = 0.1 }]'
    if not isinstance(groups, list | tuple | None):
        raise InputError(place("groups"), f"groups is {show(groups)}", expected)
    rules: list[Rule] = []
    seen: list[str] = []
    for index, group in enumerate(groups or ()):
        at = partial(place, "groups", index)
        if not isinstance(group, Mapping):
            raise InputError(at(), f"groups has {show(group)}", expected)
        own = {key: value for key, value in group.items() if key != "parameters"}
        common = {key: value for key, value in optimizer.items() if key != "clip"}
        if own.get("name", common["name"]) != common["name"]:
            common = {}  # the options of another optimiser
        given = common | own
        record = _checked_optimizer(at, given, ("parameters", *_COMMON_OPTIONS[:-1]))
        parameters = _checked_names(at, group.get("parameters"))
        for number, name in enumerate(parameters):
            if name not in names or name in seen:
                what, expected = f"{name} is not trained", nearest_of(names, name)
                if name in seen:
                    what, expected = f"{name} is in two groups", "each name once"
                raise InputError(at("parameters", number), what, expected)
        seen += parameters
        keys = ("groups", index)
        rules.append(_rule(place, keys, record, given, parameters, f"_{index + 1}"))
    return rules


def _checked_optimizer(place: Place, optimizer: Any, common: Sequence[str]) -> Optimizer:
    """Return the record of an optimiser whose table has its name and options.

    `common` are the keys that all of them have.
    """
    example = '{ name = "adamw", rate = 0.001 }'
    if not isinstance(optimizer, Mapping):
        what = "there is no optimizer"
        if optimizer is not None:
            what = f"the optimizer is {show(optimizer)}"
        raise InputError(place(), what, f"a table such as {example}")
    name = optimizer.get("name")
    if not isinstance(name, str):
        what = "the optimizer has no name"
        if name is not None:
            what = f"the name of the optimizer is {show(name)}"
        raise InputError(place("name"), what, one_of(optimizers()))
    if name not in optimizers():
        what = f"unknown optimizer {name!r:.60}"
        raise InputError(place("name"), what, one_of(optimizers(), name))
    record = optimizers()[name]
    known = (*common, *record.options)
    for key in optimizer:
        if key not in known:
            what = f"{name} has no option {show(key)}"
            hint = ""
            if key in _NAMES_IN_TORCH:
                hint = f"{key} of torch is called {_NAMES_IN_TORCH[key]} here"
            raise InputError(place(key), what, one_of(known, str(key)), hint)
    return record


def _checked_names(place: Place, parameters: Any) -> tuple[str, ...]:
    expected = 'a list of inputs such as ["W1", "b1"]'
    if not parameters:
        raise InputError(place("parameters"), "there are no parameters to train", expected)
    if not isinstance(parameters, list | tuple):
        raise InputError(place("parameters"), f"parameters is {show(parameters)}", expected)
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


def _checked_rate(where: str, optimizer: Mapping[str, Any], record: Optimizer) -> float | str:
    rate = optimizer.get("rate")
    if rate is None or isinstance(rate, str):
        return record.rate if rate is None else rate
    expected = f'{_POSITIVE}, or an expression such as "0.1 * 0.99**step"'
    return _positive(where, "rate", rate, expected)


def _checked_count(place: Place, key: str, given: int | None, default: int) -> int:
    if given is None:
        return default
    check_count(place(key), key, given, MOST_COUNTED)
    return given


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
