"""Training becomes statements: gradients, their clipping, and the next values of parameters."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod, sqrt

import numpy as np

from einmpi.errors import InputError, nearest_of
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.eingraph import Vertex
from einmpi.graph.einsum import element_text
from einmpi.graph.scalar import Names
from einmpi.language.scope import mark_values
from einmpi.language.syntax import Declaration, Statement, entries
from einmpi.training.precision import rounded_program
from einmpi.training.settings import Optimizer, Program, Rule, Training
from einmpi.units import counted

RATE = "train_rate"
_DUE = "train_due"  # whether this batch is the last one of an update
_NORM = "train_norm"
_CLIP = "train_clip"
_SCALE = "train_scale"
_SCALED_LOSS = "train_loss"
_FINITE = "train_finite"  # whether all gradients are
_CHANGES = "train_changes"  # whether this step changes parameters
_HALF = ("float16", "bfloat16")
_EPS_OF_CLIP = 1e-6  # torch's


@dataclass(frozen=True)
class State:
    """A carried tensor of an optimiser, which starts with zeros.

    It is stored where the parameter `like` is, which has the same labels; "" if none has.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    like: str = ""


@dataclass
class WrittenOut:
    """What a training adds to a program, and what it carries from step to step."""

    program: str | None = None  # the program itself, if it is not as it was
    changed: tuple[str, ...] = ()  # its statements that are not
    statements: list[str] = field(default_factory=list)
    state: list[State] = field(default_factory=list)
    carry: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The new statements, one a line."""
        return "\n".join(self.statements)

    @property
    def shown(self) -> tuple[str, ...]:
        """All statements that the program did not have."""
        return (*self.changed, *self.statements)


@dataclass(frozen=True)
class _Tensor:
    """A tensor in a text of an optimiser: {x}, or with another label {x:short=other}."""

    name: str
    labels: tuple[str, ...]
    roles: Mapping[str, str]

    def __format__(self, change: str) -> str:
        old, _, new = (self.roles.get(role, "") for role in change.partition("="))
        return element_text(self.name, [new if label == old else label for label in self.labels])


@dataclass(frozen=True)
class _Parameter:
    """An input that is trained, with the labels of its dimensions."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    labels: tuple[str, ...]
    rule: Rule  # how it changes
    new_labels: tuple[str, str]  # two more, which nothing else is called

    @property
    def optimizer(self) -> Optimizer:
        """How parameters with so many dimensions change."""
        return self.rule.optimizer.of(len(self.shape))

    @property
    def roles(self) -> dict[str, str]:
        """The labels that an optimiser knows by what they are; none without a matrix."""
        if len(self.labels) < 2:
            return {}
        row, column = self.labels[-2:]
        rows, columns = self.shape[-2:]
        short, long = (column, row) if rows > columns else (row, column)
        other, third = self.new_labels
        roles = {"row": row, "column": column, "short": short, "long": long}
        return roles | {"other": other, "third": third}

    def tensor(self, name: str) -> _Tensor:
        """Return a tensor of the optimiser."""
        labels = list(self.labels)
        if name in self.optimizer.labels:
            labels = []
            for role in self.optimizer.labels[name].split():
                labels += self.labels[:-2] if role == "…" else [self.roles[role]]
        return _Tensor(f"{self.name}_{name}", tuple(labels), self.roles)

    def constants(self) -> dict[str, str]:
        """Return the numbers that depend on the shape and the dtype alone."""
        rows, columns = self.shape[-2:] if len(self.shape) > 1 else (1, 1)
        real = DTYPES[self.dtype].real
        found = {
            "sum": f"sum[{','.join(self.labels)}]" if self.labels else "",
            "elements": str(prod(self.shape)),
            "machine": repr(float(np.finfo("float32" if real in _HALF else real).eps)),
            "ratio": repr(sqrt(max(1.0, rows / columns))),
        }
        return found | self.roles

    def element(self, name: str) -> str:
        """Return the element of a tensor with the labels of the parameter."""
        return element_text(name, self.labels)

    def number(self, name: str) -> str:
        """Return a tensor without dimensions in the precision in which the parameter changes."""
        real = DTYPES[self.dtype].real
        if real == "float64":
            return name
        return f"float32({name})" if real in _HALF else f"{real}({name})"

    def rounded(self, expression: str) -> str:
        """Return an expression as a value of the parameter's dtype."""
        return f"{self.dtype}({expression})" if self.dtype in _HALF else expression


def write_out(training: Training, program: Program) -> WrittenOut:
    """Return the statements that train a program."""
    graph = program.graph
    mark_values(program.items, graph.by_name)
    _check_loss(training, program)
    rules = {name: rule for rule in training.rules for name in rule.parameters}
    parameters = []
    for number, name in enumerate(training.parameters):
        vertex = _checked_parameter(training, program, number, rules[name].optimizer)
        labels = _labels_in_use(vertex, program.items, program.taken)
        names = Names({*program.taken, *labels})
        new_labels = names.take_new("i"), names.take_new("j")
        shape = vertex.bound
        parameters.append(_Parameter(name, shape, vertex.dtype, labels, rules[name], new_labels))
    writer = _Writer(training, parameters, program.earlier, graph[training.loss].dtype)
    if training.precision is not None:
        rounded = rounded_program(
            training,
            program,
            lambda vertex: _labels_in_use(vertex, program.items, program.taken),
        )
        writer.found.program = rounded.text
        writer.found.changed = rounded.changed
        writer.found.statements += rounded.casts
        writer.defined += rounded.names
    writer.write()
    for name in writer.defined:
        if name in program.taken:
            what = f"{name} is in the program, but training writes it out"
            raise InputError(training.place(), what, "another name in the program")
    return writer.found


# ---- checks -------------------------------------------------------------------------------------


def _check_loss(training: Training, program: Program) -> None:
    graph = program.graph
    computed = [item.name for item in program.items if isinstance(item, Statement)]
    place = training.place("loss")
    if training.loss not in computed:
        what = f"the loss {training.loss} is not computed"
        raise InputError(place, what, nearest_of(computed, training.loss))
    vertex = graph[training.loss]
    expected = "a real number without dimensions"
    if vertex.bound:
        what = f"the loss {training.loss} has {counted(len(vertex.bound), 'dimension')}"
        raise InputError(place, what, expected)
    if DTYPES[vertex.dtype].kind != "f":
        raise InputError(place, f"the loss {training.loss} is {vertex.dtype}", expected)


def _checked_parameter(
    training: Training, program: Program, number: int, optimizer: Optimizer
) -> Vertex:
    graph = program.graph
    name = training.parameters[number]
    place = training.place("parameters", number)
    inputs = [vertex.name for vertex in graph.inputs]
    if name not in inputs:
        what = f"{name} is no input of the program"
        raise InputError(place, what, nearest_of(inputs, name))
    if name in program.carried:
        what = f"{name} is trained, but the loop carries it already"
        raise InputError(place, what, "no entry for it in carry")
    if name in program.batched:
        what = f"{name} is trained, but comes in batches"
        raise InputError(place, what, "an input that a step can replace")
    vertex = graph[name]
    kind = DTYPES[vertex.dtype].kind
    if kind not in "fc":
        what = f"{name} is {vertex.dtype}"
        raise InputError(place, what, "a parameter of floating-point or complex numbers")
    if training.precision is not None and vertex.dtype not in ("float32", "float64"):
        what = f"{name} is {vertex.dtype}"
        expected = f"float32 or float64, which a step rounds to {training.precision}"
        raise InputError(place, what, expected)
    if kind == "c" and not optimizer.is_linear:
        what = f"{name} is {vertex.dtype}, and {optimizer.name} takes real parameters"
        hint = "use sgd, momentum or nesterov, or train real and imaginary parts"
        raise InputError(place, what, "a parameter of floating-point numbers", hint)
    return vertex


def _labels_in_use(
    vertex: Vertex, items: Sequence[Statement | Declaration], taken: Collection[str]
) -> tuple[str, ...]:
    """Return the labels with which a program reads a tensor first, else new ones."""
    for item in items:
        if not isinstance(item, Statement):
            continue
        for tree in item.trees:
            for node in ast.walk(tree):
                match node:
                    case ast.Subscript(value=ast.Name(id=name)) if name == vertex.name:
                        labels = _distinct_labels(node)
                        if len(labels) == len(vertex.bound):
                            return labels
    names = Names(taken)
    return tuple(names.take_new("i") for _ in vertex.bound)


def _distinct_labels(node: ast.Subscript) -> tuple[str, ...]:
    """Return the labels in brackets; none if they are not just labels, each of them once."""
    labels: list[str] = []
    for entry in entries(node.slice):
        if not isinstance(entry, ast.Name) or entry.id in labels:
            return ()
        labels.append(entry.id)
    return tuple(labels)


# ---- statements ---------------------------------------------------------------------------------


class _Writer:
    """Writes the statements of a training, in the order in which a person would."""

    def __init__(
        self,
        training: Training,
        parameters: Sequence[_Parameter],
        earlier: Collection[str],
        loss_dtype: str,
    ) -> None:
        self.training = training
        self.parameters = parameters
        self.loss_dtype = loss_dtype
        self.loss = training.loss  # what is differentiated
        self.names = Names(earlier)  # that carried tensors cannot have
        self.found = WrittenOut()
        self.defined: list[str] = []  # all names that are new
        self.exponent = ""  # of the scale of the loss, a carried number
        self.updates = ""  # the number of updates so far, a carried number
        self.condition = ""  # under which parameters change; empty if always

    def define(self, name: str, expression: str, parameter: _Parameter | None = None) -> None:
        """Write the statement of a new tensor, with the labels of a parameter."""
        labels = () if parameter is None else parameter.labels
        self.define_tensor(_Tensor(name, labels, {}), expression)

    def define_tensor(self, tensor: _Tensor, expression: str) -> None:
        """Write the statement of a tensor."""
        self.defined.append(tensor.name)
        self.found.statements.append(f"{tensor} = {expression}")

    def new_state(
        self, stem: str, shape: tuple[int, ...] = (), dtype: str = "int64", like: str = ""
    ) -> str:
        """Return the name of a new carried tensor, by default a whole number."""
        name = self.names.take_new(stem)
        self.defined.append(name)
        self.found.state.append(State(name, shape, dtype, like))
        self.found.carry[name] = f"{name}_next"
        return name

    def write(self) -> None:
        """Write all statements."""
        training = self.training
        for rule in training.rules:
            if isinstance(rule.rate, str):
                self.define(_rate(rule), rule.rate)
        if training.accumulate > 1:
            last = training.accumulate - 1
            self.define(_DUE, f"step % {training.accumulate} == {last}")
            self.condition = _DUE
        if training.precision == "float16":
            self._write_scaled_loss()
        self._write_numbers()
        gradients = [self._write_gradient(parameter) for parameter in self.parameters]
        if training.precision == "float16":
            self._write_next_scale(gradients)
        if training.clip is not None:
            self._write_norm(gradients)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            self._write_update(parameter, gradient)

    def _write_scaled_loss(self) -> None:
        """Write the loss times a scale, which keeps small gradients from becoming 0."""
        self.exponent = self.new_state("train_exponent")
        self.updates = self.new_state("train_updates")
        self.define(_SCALE, f"{self.training.scale!r} * 2.0**{self.exponent}")
        scale = _SCALE if self.loss_dtype == "float64" else f"{self.loss_dtype}({_SCALE})"
        self.define(_SCALED_LOSS, f"{self.training.loss} * {scale}")
        self.loss = _SCALED_LOSS

    def _write_next_scale(self, gradients: Sequence[str]) -> None:
        """Write whether all gradients are finite. If not, nothing changes but the scale."""
        finite = []
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            check = f"isfinite({parameter.element(gradient)})"
            if parameter.labels:
                check = f"all[{','.join(parameter.labels)}]({check})"
            finite.append(check)
        self.define(_FINITE, " & ".join(finite))
        is_changing = _FINITE
        if self.condition:
            is_changing = f"{self.condition} & {_FINITE}"
        self.define(_CHANGES, is_changing)
        good = self.new_state("train_good")  # updates since the scale has changed
        growth = self.training.growth
        exponent = f"where({_FINITE}, {self.exponent} + ({good} + 1) // {growth}"
        exponent += f", {self.exponent} - 1)"
        next_good = f"where({_FINITE}, ({good} + 1) % {growth}, 0)"
        for name, expression in ((self.exponent, exponent), (good, next_good)):
            if self.condition:
                expression = f"where({self.condition}, {expression}, {name})"
            self.define(f"{name}_next", expression)
        self.define(f"{self.updates}_next", f"{self.updates} + {_CHANGES}")
        self.condition = _CHANGES

    def _count(self) -> str:
        """Return the number of the update, from 1."""
        if self.training.precision == "float16":
            return f"({self.updates} + 1)"
        if self.training.accumulate > 1:
            return f"(step // {self.training.accumulate} + 1)"
        return "(step + 1)"

    def _write_numbers(self) -> None:
        """Write the tensors without dimensions that all parameters of a rule share."""
        for parameter in self.parameters:
            rule = parameter.rule
            words = {"rate": _rate(rule), "count": self._count(), **_options(rule)}
            for name, text in parameter.optimizer.numbers.items():
                number = f"train_{name}{rule.suffix}"
                if number not in self.defined:
                    self.define(number, text.format_map(words))

    def _write_gradient(self, parameter: _Parameter) -> str:
        """Write the gradient by a parameter, over all batches of an update; return its name."""
        own = parameter.element(parameter.name)
        gradient = f"{parameter.name}_grad"
        expression = f"grad({self.loss}, {own})"
        if self.training.precision == "float16":
            scaled = f"{gradient}_scaled"  # a tensor of its own: it is stored where a sparse one is
            self.define(scaled, expression, parameter)
            expression = f"{parameter.element(scaled)} / {parameter.number(_SCALE)}"
        self.define(gradient, expression, parameter)
        if self.training.accumulate == 1:
            return gradient
        name = parameter.name
        total = self.new_state(f"{name}_sum", parameter.shape, parameter.dtype, name)
        added = f"{parameter.element(total)} + {parameter.element(gradient)}"
        mean = f"{name}_mean"
        self.define(mean, f"({added}) / {self.training.accumulate}", parameter)
        self.define(f"{total}_next", f"where({_DUE}, 0, {added})", parameter)
        return mean

    def _write_norm(self, gradients: Sequence[str]) -> None:
        """Write the norm of all gradients together, and the factor that makes it small enough."""
        squares = []
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            element = parameter.element(gradient)
            square = f"{element}**2"
            if DTYPES[parameter.dtype].kind == "c":
                square = f"abs({element})**2"
            if parameter.labels:
                square = f"sum[{','.join(parameter.labels)}]({square})"
            squares.append(square)
        self.define(_NORM, f"sqrt({' + '.join(squares)})")
        limit = repr(self.training.clip)
        self.define(_CLIP, f"minimum(1, {limit} / ({_NORM} + {_EPS_OF_CLIP}))")

    def _write_update(self, parameter: _Parameter, gradient: str) -> None:
        """Write the next values of a parameter and of its state."""
        optimizer, rule = parameter.optimizer, parameter.rule
        own = parameter.element(parameter.name)
        rate = _rate(rule)
        if isinstance(rule.rate, str):
            rate = parameter.number(rate)
        tensors: dict[str, _Tensor] = {}
        words: dict[str, str] = {
            "W": own,
            "kept": own,
            "g": self._write_descent(parameter, gradient),
            "rate": rate,
            **parameter.constants(),
            **_options(rule),
        }
        if optimizer.is_decoupled and rule.decay:
            words["kept"] = f"(1 - {rate} * {rule.decay!r}) * {own}"
        for name in optimizer.numbers:
            words[name] = parameter.number(f"train_{name}{rule.suffix}")
        for name in optimizer.state:
            tensor = parameter.tensor(name)
            extents = dict(zip(parameter.labels, parameter.shape, strict=True))
            shape = tuple(extents[label] for label in tensor.labels)
            like = parameter.name if tensor.labels == parameter.labels else ""
            state = self.new_state(tensor.name, shape, parameter.dtype, like)
            tensor = replace(tensor, name=state)
            tensors[name] = tensor
            tensors[f"{name}_next"] = replace(tensor, name=f"{tensor.name}_next")
        for name, text in optimizer.state.items():
            self._write_next(parameter, tensors[name], text.format_map({**words, **tensors}))
        for name, text in optimizer.between.items():
            tensors[name] = parameter.tensor(name)
            self.define_tensor(tensors[name], text.format_map({**words, **tensors}))
        self.found.carry[parameter.name] = f"{parameter.name}_next"
        W = _Tensor(parameter.name, parameter.labels, {})
        self._write_next(parameter, W, optimizer.update.format_map({**words, **tensors}))

    def _write_descent(self, parameter: _Parameter, gradient: str) -> str:
        """Write the gradient as the optimiser takes it: clipped, and with decay.

        Return its element.
        """
        element = parameter.element(gradient)
        taken = element
        if self.training.clip is not None:
            taken = f"{parameter.number(_CLIP)} * {element}"
        if parameter.rule.decay and not parameter.optimizer.is_decoupled:
            taken += f" + {parameter.rule.decay!r} * {parameter.element(parameter.name)}"
        if taken == element:
            return element
        descent = f"{parameter.name}_descent"
        self.define(descent, parameter.rounded(taken), parameter)
        return parameter.element(descent)

    def _write_next(self, parameter: _Parameter, tensor: _Tensor, expression: str) -> None:
        """Write the next value of a carried tensor, which stays as it is between updates."""
        if self.condition:
            expression = f"where({self.condition}, {expression}, {tensor})"
        following = replace(tensor, name=f"{tensor.name}_next")
        self.define_tensor(following, parameter.rounded(expression))


def _rate(rule: Rule) -> str:
    """Return the rate as it is written: a number, or the name of a tensor."""
    return RATE + rule.suffix if isinstance(rule.rate, str) else repr(rule.rate)


def _options(rule: Rule) -> dict[str, str]:
    return {name: repr(value) for name, value in rule.options.items()}
