"""Training becomes statements: gradients, their clipping, and the next values of parameters."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from einmpi.errors import InputError, nearest_of
from einmpi.graph.dtypes import DTYPES
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.labels import Names
from einmpi.language.syntax import Declaration, Statement, entries
from einmpi.training.settings import Training
from einmpi.units import counted

RATE = "train_rate"
_DUE = "train_due"  # whether this batch is the last one of an update
_NORM = "train_norm"
_CLIP = "train_clip"
_HALF = ("float16", "bfloat16")
_EPS_OF_CLIP = 1e-6  # torch's


@dataclass(frozen=True)
class State:
    """A carried tensor of an optimiser, which starts with zeros."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass
class WrittenOut:
    """The statements of a training, and what they carry from step to step."""

    statements: list[str] = field(default_factory=list)
    state: list[State] = field(default_factory=list)
    carry: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The statements, one a line."""
        return "\n".join(self.statements)


@dataclass(frozen=True)
class _Parameter:
    """An input that is trained, with the labels of its dimensions."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    labels: tuple[str, ...]

    def element(self, name: str) -> str:
        """Return the element of a tensor with the labels of the parameter."""
        return f"{name}[{','.join(self.labels)}]" if self.labels else name

    def number(self, name: str) -> str:
        """Return a tensor without dimensions in the precision in which the parameter changes."""
        real = DTYPES[self.dtype].real
        if real == "float64":
            return name
        return f"float32({name})" if real in _HALF else f"{real}({name})"

    def rounded(self, expression: str) -> str:
        """Return an expression as a value of the parameter's dtype."""
        return f"{self.dtype}({expression})" if self.dtype in _HALF else expression


def write_out(
    training: Training,
    graph: EinGraph,
    items: Sequence[Statement | Declaration],
    taken: Collection[str],
    earlier: Collection[str] = (),
    carried: Collection[str] = (),
    batched: Collection[str] = (),
) -> WrittenOut:
    """Return the statements that train a program.

    `graph` is that of the program as written, `items` its statements. `taken` are all names that
    mean something in it, `earlier` those of tensors of earlier loops, which a state cannot have.
    Inputs that are `carried` or `batched` cannot be parameters.
    """
    _check_loss(training, graph)
    parameters = []
    for number, name in enumerate(training.parameters):
        vertex = _checked_parameter(training, graph, number, carried, batched)
        labels = _labels_in_use(vertex, items, taken)
        parameters.append(_Parameter(name, vertex.bound, vertex.dtype, labels))
    writer = _Writer(training, parameters, earlier)
    writer.write()
    place = training.place()
    for name in writer.defined:
        if name in taken:
            what = f"{name} is in the program, but training writes it out"
            raise InputError(place, what, "another name in the program")
    return writer.found


# ---- checks -------------------------------------------------------------------------------------


def _check_loss(training: Training, graph: EinGraph) -> None:
    computed = [vertex.name for vertex in graph.computed]
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
    training: Training,
    graph: EinGraph,
    number: int,
    carried: Collection[str],
    batched: Collection[str],
) -> Vertex:
    name = training.parameters[number]
    place = training.place("parameters", number)
    inputs = [vertex.name for vertex in graph.inputs]
    if name not in inputs:
        what = f"{name} is no input of the program"
        raise InputError(place, what, nearest_of(inputs, name))
    if name in carried:
        what = f"{name} is trained, but the loop carries it already"
        raise InputError(place, what, "no entry for it in carry")
    if name in batched:
        what = f"{name} is trained, but comes in batches"
        raise InputError(place, what, "an input that a step can replace")
    vertex = graph[name]
    kind = DTYPES[vertex.dtype].kind
    if kind not in "fc":
        what = f"{name} is {vertex.dtype}"
        raise InputError(place, what, "a parameter of floating-point or complex numbers")
    if kind == "c" and not training.optimizer.is_linear:
        what = f"{name} is {vertex.dtype}, and {training.optimizer.name} takes real parameters"
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
        self, training: Training, parameters: Sequence[_Parameter], earlier: Collection[str]
    ) -> None:
        self.training = training
        self.parameters = parameters
        self.names = Names(earlier)  # that carried tensors cannot have
        self.found = WrittenOut()
        self.defined: list[str] = []  # all names that are new
        self.rate = repr(training.rate)
        self.condition = ""  # under which parameters change; empty if always

    def define(self, name: str, expression: str, parameter: _Parameter | None = None) -> None:
        """Write the statement of a new tensor, with the labels of a parameter."""
        self.defined.append(name)
        target = name if parameter is None else parameter.element(name)
        self.found.statements.append(f"{target} = {expression}")

    def new_state(self, stem: str, parameter: _Parameter) -> str:
        """Return the name of a new carried tensor with the shape of a parameter."""
        name = self.names.take_new(stem)
        self.defined.append(name)
        self.found.state.append(State(name, parameter.shape, parameter.dtype))
        self.found.carry[name] = f"{name}_next"
        return name

    def write(self) -> None:
        """Write all statements."""
        training = self.training
        if isinstance(training.rate, str):
            self.define(RATE, training.rate)
            self.rate = RATE
        if training.accumulate > 1:
            last = training.accumulate - 1
            self.define(_DUE, f"step % {training.accumulate} == {last}")
            self.condition = _DUE
        self._write_numbers()
        gradients = [self._write_gradient(parameter) for parameter in self.parameters]
        if training.clip is not None:
            self._write_norm(gradients)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            self._write_update(parameter, gradient)

    def _count(self) -> str:
        """Return the number of the update, from 1."""
        if self.training.accumulate > 1:
            return f"(step // {self.training.accumulate} + 1)"
        return "(step + 1)"

    def _write_numbers(self) -> None:
        """Write the tensors without dimensions that all parameters share."""
        words = {"rate": self.rate, "count": self._count(), **self._options()}
        for name, text in self.training.optimizer.numbers.items():
            self.define(f"train_{name}", text.format_map(words))

    def _options(self) -> dict[str, str]:
        return {name: repr(value) for name, value in self.training.options.items()}

    def _write_gradient(self, parameter: _Parameter) -> str:
        """Write the gradient by a parameter, over all batches of an update; return its name."""
        own = parameter.element(parameter.name)
        gradient = f"{parameter.name}_grad"
        self.define(gradient, f"grad({self.training.loss}, {own})", parameter)
        if self.training.accumulate == 1:
            return gradient
        total = self.new_state(f"{parameter.name}_sum", parameter)
        added = f"{parameter.element(total)} + {parameter.element(gradient)}"
        mean = f"{parameter.name}_mean"
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
        optimizer = self.training.optimizer
        own = parameter.element(parameter.name)
        rate = parameter.number(RATE) if self.rate == RATE else self.rate
        words = {
            "W": own,
            "kept": own,
            "g": self._write_descent(parameter, gradient),
            "rate": rate,
            **self._options(),
        }
        if optimizer.is_decoupled and self.training.decay:
            words["kept"] = f"(1 - {rate} * {self.training.decay!r}) * {own}"
        for name in optimizer.numbers:
            words[name] = parameter.number(f"train_{name}")
        tensors = {}
        for name in optimizer.state:
            tensor = self.new_state(f"{parameter.name}_{name}", parameter)
            tensors[name] = tensor
            words[name] = parameter.element(tensor)
            words[f"{name}_next"] = parameter.element(f"{tensor}_next")
        for name, text in optimizer.state.items():
            self._write_next(parameter, tensors[name], text.format_map(words))
        self.found.carry[parameter.name] = f"{parameter.name}_next"
        self._write_next(parameter, parameter.name, optimizer.update.format_map(words))

    def _write_descent(self, parameter: _Parameter, gradient: str) -> str:
        """Write the gradient as the optimiser takes it: clipped, and with decay.

        Return its element.
        """
        element = parameter.element(gradient)
        taken = element
        if self.training.clip is not None:
            taken = f"{parameter.number(_CLIP)} * {element}"
        if self.training.decay and not self.training.optimizer.is_decoupled:
            taken += f" + {self.training.decay!r} * {parameter.element(parameter.name)}"
        if taken == element:
            return element
        descent = f"{parameter.name}_descent"
        self.define(descent, parameter.rounded(taken), parameter)
        return parameter.element(descent)

    def _write_next(self, parameter: _Parameter, name: str, expression: str) -> None:
        """Write the next value of a carried tensor, which stays as it is between updates."""
        if self.condition:
            expression = f"where({self.condition}, {expression}, {parameter.element(name)})"
        self.define(f"{name}_next", parameter.rounded(expression), parameter)
