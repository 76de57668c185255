"""What a loop repeats and when it ends, its batches and its validation, all checked."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from einmpi.arguments import named_values
from einmpi.errors import InputError, nearest_of, one_of
from einmpi.files.specs import InputSpec
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.rewrite import prune
from einmpi.graph.scalar import MAX_EXTENT, unique
from einmpi.job.outputs import HistorySpec
from einmpi.language.parse import parse_program
from einmpi.language.syntax import Source, parse
from einmpi.language.toml_document import show
from einmpi.units import counted, show_shape

# ---- batches -------------------------------------------------------------------------------------


ROWS = "rows"  # the input that has the number of rows in the batch of a step, without padding
EPOCH = "epoch"  # the input that has the number of the pass over all rows, from 0
LAST = ("drop", "pad")  # what happens to the rows after the last full batch; the first by default
MOST_EPOCHS = 2**53


@dataclass(frozen=True)
class Shuffle:
    """A new order of the rows in each epoch.

    Attributes
    ----------
    seed : int
        What the orders depend on.
    block : int
        How many neighbouring rows are read together; 1 if each row moves on its own.
    """

    seed: int
    block: int


@dataclass(frozen=True)
class Batches:
    """The inputs of which each step of a loop takes the next rows.

    Attributes
    ----------
    names : tuple of str
        The inputs.
    rows : int
        The number of rows that each of them has.
    batch : int
        The number of rows that a step takes.
    pads_last : bool
        Whether the rows after the last full batch are a batch too, padded with zeros; if not they
        are left out.
    shuffle : Shuffle or None
        How the order of the rows changes; None if they keep that of the files.
    epochs : int or None
        How often all rows are taken; None if the number of steps says when the loop ends.
    """

    names: tuple[str, ...]
    rows: int
    batch: int
    pads_last: bool = False
    shuffle: Shuffle | None = None
    epochs: int | None = None

    @property
    def steps_an_epoch(self) -> int:
        """The number of batches that all rows make."""
        full = self.rows // self.batch
        return full + 1 if self.pads_last and self.rows_after_last else full

    @property
    def rows_after_last(self) -> int:
        """The number of rows after the last full batch."""
        return self.rows % self.batch

    def epoch_of(self, step: int) -> int:
        """Return the number of the pass over all rows that a step belongs to."""
        return step // self.steps_an_epoch

    def first_of(self, step: int) -> int:
        """Return how many rows of its epoch the steps before a step have taken."""
        return step % self.steps_an_epoch * self.batch

    def count_of(self, step: int) -> int:
        """Return the number of rows of a step, without padding."""
        return min(self.batch, self.rows - self.first_of(step))


def make_batches(
    place: Callable[..., str],
    specs: Iterable[InputSpec],
    epochs: Any = None,
    shuffle: Any = None,
    last: Any = None,
) -> Batches | None:
    """Return the checked batches of a loop, None if no input comes in batches.

    `place` says for messages where a key of the loop is. `shuffle` is a seed, or a mapping with
    `seed` and `block`.
    """
    specs = tuple(specs)
    batched = [spec for spec in specs if spec.rows is not None]
    if not batched:
        for key, value in (("epochs", epochs), ("shuffle", shuffle), ("last", last)):
            if value is not None:
                what = f"there is {key}, but no input comes in batches"
                raise InputError(place(key), what, 'an input with batch = "SIZE"')
        return None
    rows, batch = _rows_and_batch(batched[0])
    for spec in batched[1:]:
        other_rows, other_batch = _rows_and_batch(spec)
        if other_rows != rows:
            what = f"{spec.name} has {counted(other_rows, 'row')}"
            expected = f"{rows}, as {batched[0].name}: their batches go together"
            raise InputError(spec.place, what, expected)
        if other_batch != batch:
            what = f"the batches of {spec.name} have {counted(other_batch, 'row')}"
            expected = f"{batch}, as those of {batched[0].name}"
            raise InputError(spec.place, what, expected)
    for spec in specs:
        if spec.name in (ROWS, EPOCH):
            what = f"in a loop with batches, {spec.name} is a number of each step"
            raise InputError(spec.place, what, "another name")
    last = _choice(place("last"), "last", last, LAST)
    if epochs is not None:
        _check_epochs(place, epochs)
    pads_last = last == "pad"
    if not pads_last and rows < batch:
        what = f"{batched[0].name} has {counted(rows, 'row')}, fewer than a batch of {batch}"
        raise InputError(batched[0].place, what, f"at least {batch}", 'or last = "pad"')
    names = tuple(spec.name for spec in batched)
    found_shuffle = _make_shuffle(place, shuffle, batched)
    return Batches(names, rows, batch, pads_last, found_shuffle, epochs)


def _check_epochs(place: Callable[..., str], epochs: Any) -> None:
    if type(epochs) is not int or not 1 <= epochs <= MOST_EPOCHS:
        expected = f"an integer from 1 to 2**53 = {MOST_EPOCHS}"
        raise InputError(place("epochs"), f"epochs is {epochs!r:.60}", expected)


def _rows_and_batch(spec: InputSpec) -> tuple[int, int]:
    """Return the number of rows that an input has, and of those that a step takes."""
    assert spec.rows is not None and spec.shape
    if spec.rows == 0:
        raise InputError(spec.place, f"{spec.name} has 0 rows", "at least 1, for batches")
    return spec.rows, spec.shape[0]


def _make_shuffle(
    place: Callable[..., str], shuffle: Any, batched: Sequence[InputSpec]
) -> Shuffle | None:
    """Return the checked shuffle.

    A block has by default as many rows as the largest chunk of the files.
    """
    if shuffle is None:
        return None
    keys = {"seed": shuffle, "block": None}
    if isinstance(shuffle, Mapping):
        for key in shuffle:
            if key not in keys:
                what = f"shuffle has {key!r:.60}"
                raise InputError(place("shuffle"), what, one_of(tuple(keys), str(key)))
        keys = {"seed": None, "block": None, **shuffle}
    seed = keys["seed"]
    if type(seed) is not int or not 0 <= seed < 2**64:
        what = "shuffle has no seed" if seed is None else f"the seed of shuffle is {show(seed)}"
        raise InputError(place("shuffle"), what, "an integer from 0 to 2**64 - 1")
    block = keys["block"]
    if block is None:
        block = max(spec.chunk_rows for spec in batched)
    if type(block) is not int or not 1 <= block <= MAX_EXTENT:
        expected = f"an integer from 1 to 2**39 = {MAX_EXTENT}"
        raise InputError(place("shuffle"), f"the block of shuffle is {block!r:.60}", expected)
    return Shuffle(seed, block)


# ---- validation ----------------------------------------------------------------------------------


PREFIX = "validation_"  # of the columns of a history
SINCE_BEST = "validations_since_best"
GOALS = ("min", "max")  # what is best of the first number; the first by default
KEPT = ("last", "best")  # which values of carried tensors are results; the first by default
MOST_STEPS_BETWEEN = 2**53


@dataclass(frozen=True)
class Validation:
    """Numbers of the program that are computed for other inputs.

    Attributes
    ----------
    every : int
        After how many steps; also after the last one.
    record : tuple of str
        Tensors without dimensions.
    inputs : tuple of InputSpec
        What takes the place of inputs of the program.
    batches : Batches or None
        Those of them that come in batches. A number is then the mean over all batches, weighted by
        their rows.
    patience : int or None
        After how many validations in a row that are not the best so far the loop ends.
    keep : str
        Whether the values of the last step are results, or those of the best validation.
    goal : str
        Whether the best validation is that with the least first number, or with the greatest.
    """

    every: int
    record: tuple[str, ...]
    inputs: tuple[InputSpec, ...]
    batches: Batches | None
    patience: int | None = None
    keep: str = KEPT[0]
    goal: str = GOALS[0]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the numbers in a history."""
        return tuple(f"{PREFIX}{name}" for name in self.record)

    @property
    def readable(self) -> dict[str, str]:
        """The numbers that a condition may read, with their dtypes."""
        names = (*self.columns, f"best_{self.columns[0]}")
        return {**dict.fromkeys(names, "float64"), SINCE_BEST: "int64"}

    @property
    def steps(self) -> int:
        """The number of batches."""
        return 1 if self.batches is None else self.batches.steps_an_epoch

    @property
    def identity(self) -> str:
        """A text that is the same for validations that compute and keep the same numbers."""
        inputs = tuple(replace(spec, place="") for spec in self.inputs)
        return repr(replace(self, inputs=inputs, patience=None))

    def is_due(self, step: int, is_last: bool) -> bool:
        """Return whether the numbers are computed after a step."""
        return is_last or (step + 1) % self.every == 0


def make_validation(
    place: Callable[..., str],
    graph: EinGraph,
    batches: Batches | None,
    inputs: Sequence[InputSpec],
    every: Any,
    record: Sequence[Any],
    carried: Collection[str],
    patience: Any = None,
    keep: Any = None,
    goal: Any = None,
) -> Validation:
    """Return a checked validation of a program; `inputs` have their whole shapes.

    Inputs that are `carried` cannot be among them.
    """
    if type(every) is not int or not 1 <= every <= MOST_STEPS_BETWEEN:
        what = "every is missing" if every is None else f"every is {show(every)}"
        raise InputError(place("every"), what, "after how many steps to validate, such as 100")
    if patience is not None and (type(patience) is not int or patience < 1):
        expected = "a number of validations, at least 1"
        raise InputError(place("patience"), f"patience is {show(patience)}", expected)
    keep = _choice(place("keep"), "keep", keep, KEPT)
    goal = _choice(place("goal"), "goal", goal, GOALS)
    _check_validated(place, graph, record)
    known = [vertex.name for vertex in graph.inputs]
    batched = () if batches is None else batches.names
    found = []
    for spec in inputs:
        where = spec.place or place("inputs")
        if spec.name not in known:
            what = f"no step reads an input {spec.name}"
            raise InputError(where, what, nearest_of(known, spec.name))
        if spec.name in carried:
            what = f"{spec.name} is carried from step to step"
            raise InputError(where, what, "inputs that stay the same, or come in batches")
        found.append(_as_in_steps(where, spec, graph[spec.name], spec.name in batched))
    names = [spec.name for spec in found]
    for name in batched:
        if name in known and name not in names:
            what = f"{name} comes in batches, and is not among the inputs of the validation"
            raise InputError(place("inputs"), what, f"an entry for {name}")
    own_batches = _batches_of(place, batches, found)
    return Validation(every, tuple(record), tuple(found), own_batches, patience, keep, goal)


def _choice(where: str, key: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return one of some words, the first by default."""
    if value is not None and value not in allowed:
        raise InputError(where, f"{key} is {show(value)}", one_of(allowed, str(value)))
    return allowed[0] if value is None else str(value)


def _as_in_steps(where: str, spec: InputSpec, vertex: Vertex, is_batched: bool) -> InputSpec:
    """Return an input with the shape that a step reads; of one in batches, that of a batch."""
    whole_shape = spec.shape or ()
    shape = whole_shape
    rows = None
    shown = show_shape(vertex.bound)
    if is_batched and whole_shape:
        rows = whole_shape[0]
        shape = (vertex.bound[0], *whole_shape[1:])
        shown = "×".join(["rows", *map(str, vertex.bound[1:])])
    if shape != vertex.bound or spec.dtype != vertex.dtype:
        what = f"{spec.name} is {spec.dtype} {show_shape(whole_shape)}"
        raise InputError(where, what, f"{vertex.dtype} {shown}, as in the steps")
    return replace(spec, shape=shape, rows=rows)


def _check_validated(place: Callable[..., str], graph: EinGraph, record: Sequence[Any]) -> None:
    if not record:
        raise InputError(place("record"), "there is nothing to record", 'record = ["NAME"]')
    computed = [vertex.name for vertex in graph.computed]
    for number, name in enumerate(record):
        where = place("record", number)
        if name not in computed:
            what = f"{show(name)} is not computed"
            raise InputError(where, what, nearest_of(computed, str(name)))
        if graph[name].bound or graph[name].dtype.startswith("complex"):
            raise InputError(where, f"{name} is no real number", "one without dimensions")


def _batches_of(
    place: Callable[..., str], batches: Batches | None, specs: Sequence[InputSpec]
) -> Batches | None:
    """Return how rows are taken: in their order, as many at a time as in the steps."""
    if batches is None:
        return None
    batched = [spec for spec in specs if spec.rows is not None]
    first = batched[0]
    rows = first.rows or 0
    for spec in batched:
        if spec.rows != rows:
            where = spec.place or place("inputs")
            what = f"{spec.name} has {counted(spec.rows or 0, 'row')}"
            raise InputError(where, what, f"{rows}, as {first.name}")
    least_rows = 1 if batches.pads_last else batches.batch
    if rows < least_rows:
        where = first.place or place("inputs")
        what = f"{first.name} has {counted(rows, 'row')}"
        hint = 'or last = "pad" in the loop'
        raise InputError(where, what, f"at least a batch of {batches.batch}", hint)
    names = tuple(spec.name for spec in batched)
    return Batches(names, rows, batches.batch, batches.pads_last)


# ---- loops ---------------------------------------------------------------------------------------


MOST_STEPS = 2**53
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
    state : tuple of str
        What is carried for an optimiser. It is a result only if it is stored.
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
    state: tuple[str, ...] = ()
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
    place: Callable[..., str],
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
    if type(steps) is not int or not 1 <= steps <= MOST_STEPS:
        expected = f"an integer from 1 to 2**53 = {MOST_STEPS}"
        raise InputError(place("steps"), f"steps is {steps!r}", expected)
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
        _check_recorded(program.graph, place("record", number), name)
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
    after = _computed(graph, where, output)
    if (before.bound, before.dtype) != (after.bound, after.dtype):
        hint = ""
        if before.bound == after.bound:
            hint = f"{before.dtype}(…) around its expression converts it"
        raise InputError(
            where,
            f"{output} is {_kind(after)}",
            f"{_kind(before)}, because it becomes {name}",
            hint,
        )


def _computed(graph: EinGraph, where: str, name: str) -> Vertex:
    """Return the vertex of a tensor that a step computes."""
    computed = [vertex.name for vertex in graph.computed]
    if name not in computed:
        raise InputError(where, f"{name} is not computed", nearest_of(computed, name))
    return graph[name]


def _check_recorded(graph: EinGraph, where: str, name: str) -> None:
    vertex = _computed(graph, where, name)
    if vertex.bound:
        what = f"{name} is recorded, but is {_kind(vertex)}"
        raise InputError(where, what, "a tensor without dimensions")


def _kind(vertex: Vertex) -> str:
    extents = ", ".join(map(str, vertex.bound))
    return f"{vertex.dtype}[{extents}]" if vertex.bound else f"{vertex.dtype} without dimensions"


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
        raise InputError(where, f"{source.text!r} is {_kind(vertex)}", "a condition: true or false")
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
