"""What a loop repeats, what it carries from step to step, and when it ends, all checked."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from einmpi.arguments import named_values
from einmpi.errors import InputError, nearest_of
from einmpi.files.specs import InputSpec
from einmpi.graph.eingraph import EinGraph
from einmpi.graph.rewrite import prune
from einmpi.graph.scalar import unique
from einmpi.job.batches import (
    EPOCH,
    MOST_STEPS,
    ROWS,
    SINCE_BEST,
    Batches,
    Validation,
    computed,
    computed_number,
    kind_of_tensor,
)
from einmpi.job.outputs import HistorySpec
from einmpi.language.parse import parse_program
from einmpi.language.syntax import Source, parse
from einmpi.language.toml_document import Place, check_count

STEP = "step"  # the input that has the number of the step, from 0
NUMBERS_OF_STEPS = (STEP, ROWS, EPOCH)
_CONDITION = "until"  # the tensor that the condition of a loop becomes


@dataclass(frozen=True)
class Loop:
    """A program that is repeated.

    Attributes
    ----------
    steps : int
        The most steps.
    carry : mapping of str to str
        For inputs, the tensor of a step that they become in the next one.
    until : EinGraph or None
        The condition after which no further step follows: its only output, computed from tensors
        without dimensions.
    until_text : str
        The condition as it is written.
    record : tuple of str
        Tensors without dimensions whose values are kept for every step.
    history : HistorySpec or None
        Where a row of recorded values goes for every step.
    stop_at_nan : bool
        Whether a recorded value that is nan ends the run.
    batches : Batches or None
        The inputs of which each step takes the next rows.
    results : tuple of str or None
        The tensors of the last step that are results, besides those that are carried; None for the
        outputs of the job.
    written_out : tuple of str
        The statements that training has added to the program.
    state : mapping of str to str
        What is carried for an optimiser, and the parameter that has the same labels, or "". It is a
        result only if it is stored.
    validation : Validation or None
        Numbers that are computed for other inputs, every so many steps.
    """

    steps: int
    carry: Mapping[str, str]
    until: EinGraph | None = None
    until_text: str = ""
    record: tuple[str, ...] = ()
    history: HistorySpec | None = None
    stop_at_nan: bool = True
    batches: Batches | None = None
    results: tuple[str, ...] | None = None
    written_out: tuple[str, ...] = ()
    state: Mapping[str, str] = field(default_factory=dict)
    validation: Validation | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of its history: recorded tensors, and numbers of the validation."""
        return self.record if self.validation is None else self.record + self.validation.columns

    @property
    def watched(self) -> tuple[str, ...]:
        """The tensors whose values all ranks look at after a step."""
        validated = () if self.validation is None else self.validation.readable
        return unique(self.record, [name for name in self._read if name not in validated])

    @property
    def _read(self) -> list[str]:
        """What the condition reads."""
        return [] if self.until is None else [vertex.name for vertex in self.until.inputs]

    @property
    def needs_validation(self) -> bool:
        """Whether results depend on what a validation finds."""
        return bool(self.kept_best) or not set(self._read).issubset(self.watched)

    @property
    def kept_best(self) -> tuple[str, ...]:
        """What is carried and, as a result, has the values of the best validation."""
        if self.validation is None or self.validation.keep == "last":
            return ()
        return tuple(name for name in self.carry if name not in self.state)

    def numbers(self, step: int) -> dict[str, int]:
        """Return the numbers of a step that programs and conditions may read, by name."""
        found = {STEP: step}
        if self.batches is not None:
            found[ROWS] = self.batches.count_of(step)
            found[EPOCH] = self.batches.epoch_of(step)
        return found


@dataclass(frozen=True)
class StepProgram:
    """What a loop may refer to: the program of a step, its sizes and its parameters."""

    graph: EinGraph  # as written
    sizes: Mapping[str, int]
    inputs: Sequence[InputSpec]


def make_loop(
    program: StepProgram,
    place: Place,
    steps: int,
    carry: Mapping[str, str],
    until: Source | None = None,
    record: Iterable[str] = (),
    may_carry_nothing: bool = False,
    validation: Validation | None = None,
) -> Loop:
    """Return a checked loop over a program.

    `place` says for messages where a key of the loop is, such as "carry", "x".
    """
    check_count(place("steps"), "steps", steps, MOST_STEPS)
    if not carry and not may_carry_nothing:
        raise InputError(place("carry"), "nothing is carried", 'carry = { INPUT = "TENSOR" }')
    becomes: dict[str, str] = {}  # tensor of a step → the input that it becomes
    for name, output in named_values(place("carry"), carry).items():
        where = place("carry", name)
        if not isinstance(output, str):
            raise InputError(where, f"{name} becomes {output!r}", "the name of a tensor")
        _check_carried(program.graph, where, name, output)
        if any(spec.name == name and spec.rows is not None for spec in program.inputs):
            what = f"{name} is carried, but comes in batches"
            raise InputError(where, what, "an input that a step can replace")
        other = becomes.setdefault(output, name)
        if other != name:
            what = f"{output} becomes {other} and {name}"
            raise InputError(where, what, "one input for each tensor")
    recorded = tuple(record)
    for number, name in enumerate(recorded):
        computed_number(program.graph, place("record", number), name)
    readable: Mapping[str, str] = {}
    if validation is not None:
        readable = validation.readable
        if validation.patience is not None:
            until = _with_patience(until, place("until"), validation.patience)
    condition = None if until is None else _condition(program, place("until"), until, readable)
    text = "" if until is None else until.text.strip()
    return Loop(steps, dict(carry), condition, text, recorded, validation=validation)


def _with_patience(until: Source | None, where: str, patience: int) -> Source:
    """Return the condition that also holds after so many validations that are not the best."""
    ends = f"{SINCE_BEST} >= {patience}"
    if until is None:
        return Source(where, ends)
    return replace(until, text=f"({until.text}) | ({ends})", column=until.column - 1)


def refuse_step_as_input(inputs: Iterable[InputSpec], where: str) -> None:
    """Refuse an input or a parameter that the number of the step would silently replace."""
    for spec in inputs:
        if spec.name == STEP:
            what = f"in a loop, {STEP} is the number of the step"
            raise InputError(spec.place or where, what, "another name")


def _check_carried(graph: EinGraph, where: str, name: str, output: str) -> None:
    """Refuse an input that cannot become the tensor that is to follow it."""
    inputs = [vertex.name for vertex in graph.inputs]
    if name in graph.by_name and name not in inputs:
        what = f"{name} is carried, but each step computes it"
        hint = "a [[loop]] without carry, before this one, can compute its first value"
        raise InputError(where, what, "an input", hint)
    if name not in inputs:
        raise InputError(
            where, f"{name} is carried, but no step reads an input {name}", nearest_of(inputs, name)
        )
    before = graph[name]
    after = computed(graph, where, output)
    if (before.bound, before.dtype) != (after.bound, after.dtype):
        hint = ""
        if before.bound == after.bound:
            hint = f"{before.dtype}(…) around its expression converts it"
        raise InputError(
            where,
            f"{output} is {kind_of_tensor(after)}",
            f"{kind_of_tensor(before)}, because it becomes {name}",
            hint,
        )


def _condition(
    program: StepProgram, where: str, source: Source, readable: Mapping[str, str]
) -> EinGraph:
    """Return the graph of a condition over tensors without dimensions, sizes and parameters.

    `readable` are numbers that it may read besides, with their dtypes.
    """
    body = parse(source)
    if len(body) != 1 or not isinstance(body[0], ast.Expr):
        what = f"{source.text!r} is not a condition"
        raise InputError(where, what, 'a condition such as "change < 1e-6"')
    graph = number_graph(program, source, _CONDITION, others=readable)
    vertex = graph[_CONDITION]
    if vertex.bound or vertex.dtype != "bool":
        what = f"{source.text!r} is {kind_of_tensor(vertex)}"
        raise InputError(where, what, "a condition: true or false")
    return graph


def numbers_of_steps(has_batches: bool) -> tuple[str, ...]:
    """Return the names of the numbers that are different in each step."""
    return NUMBERS_OF_STEPS if has_batches else (STEP,)


def number_graph(
    program: StepProgram,
    source: Source,
    name: str,
    with_inputs: bool = False,
    others: Mapping[str, str] | None = None,
) -> EinGraph:
    """Return the graph of an expression over numbers of a step, under a name.

    The numbers are tensors without dimensions that the program computes, sizes and parameters; with
    `with_inputs`, also other inputs without dimensions; and `others`, with their dtypes.
    """
    start = f"{name} = "
    column = source.column - len(start)
    assigned = Source(source.name, start + source.text, source.line, column)
    numbers: dict[str, tuple[tuple[int, ...], str]] = {}
    types = {}
    has_batches = any(spec.rows is not None for spec in program.inputs)
    for number in numbers_of_steps(has_batches):
        if number not in program.sizes:
            numbers[number] = (), "int64"
    for spec in program.inputs:
        if spec.value is not None:
            numbers[spec.name] = (), spec.dtype or ""
            types[spec.name] = type(spec.value)
        elif with_inputs and spec.shape == ():
            numbers[spec.name] = (), spec.dtype or ""
    for vertex in program.graph.computed:
        if not vertex.bound:
            numbers[vertex.name] = (), vertex.dtype
    for other, dtype in (others or {}).items():
        numbers[other] = (), dtype
    return prune(parse_program(assigned, numbers, program.sizes, [name], None, types))
