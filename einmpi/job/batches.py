"""What differs from step to step: batches of rows, and a validation, which takes other inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from einmpi.errors import InputError, nearest_of, one_of
from einmpi.files.specs import InputSpec
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.scalar import MAX_EXTENT
from einmpi.language.toml_document import Place, check_count, show
from einmpi.units import counted, show_shape

# ---- batches -------------------------------------------------------------------------------------


ROWS = "rows"  # the input that has the number of rows in the batch of a step, without padding
EPOCH = "epoch"  # the input that has the number of the pass over all rows, from 0
MOST_STEPS = 2**53  # also of epochs, and of steps between validations
_SHUFFLE_KEYS = ("seed", "block")
LAST = ("drop", "pad")  # what happens to the rows after the last full batch; the first by default


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
    place: Place,
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
        check_count(place("epochs"), "epochs", epochs, MOST_STEPS)
    pads_last = last == "pad"
    if not pads_last and rows < batch:
        what = f"{batched[0].name} has {counted(rows, 'row')}, fewer than a batch of {batch}"
        raise InputError(batched[0].place, what, f"at least {batch}", 'or last = "pad"')
    names = tuple(spec.name for spec in batched)
    found_shuffle = _make_shuffle(place, shuffle, batched)
    return Batches(names, rows, batch, pads_last, found_shuffle, epochs)


def _rows_and_batch(spec: InputSpec) -> tuple[int, int]:
    """Return the number of rows that an input has, and of those that a step takes."""
    assert spec.rows is not None and spec.shape
    if spec.rows == 0:
        raise InputError(spec.place, f"{spec.name} has 0 rows", "at least 1, for batches")
    return spec.rows, spec.shape[0]


def _make_shuffle(place: Place, shuffle: Any, batched: Sequence[InputSpec]) -> Shuffle | None:
    """Return the checked shuffle.

    A block has by default as many rows as the largest chunk of the files.
    """
    if shuffle is None:
        return None
    given = shuffle if isinstance(shuffle, Mapping) else {"seed": shuffle}
    for key in given:
        if key not in _SHUFFLE_KEYS:
            what = f"shuffle has {key!r:.60}"
            raise InputError(place("shuffle"), what, one_of(_SHUFFLE_KEYS, str(key)))
    seed = given.get("seed")
    if type(seed) is not int or not 0 <= seed < 2**64:
        what = "shuffle has no seed" if seed is None else f"the seed of shuffle is {show(seed)}"
        raise InputError(place("shuffle"), what, "an integer from 0 to 2**64 - 1")
    block = given.get("block")
    if block is None:
        block = max(spec.chunk_rows for spec in batched)
    check_count(place("shuffle"), "the block of shuffle", block, MAX_EXTENT)
    return Shuffle(seed, block)


# ---- validation ----------------------------------------------------------------------------------


VALIDATION_KEYS = ("inputs", "every", "record", "patience", "keep", "goal")
PREFIX = "validation_"  # of the columns of a history
SINCE_BEST = "validations_since_best"
GOALS = ("min", "max")  # what is best of the first number; the first by default
KEPT = ("last", "best")  # which values of carried tensors are results; the first by default


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
    written : EinGraph or None
        The program over what is stored of its sparse inputs, if it has others than the steps.
    given : mapping of str to array
        Inputs that are there already, as that graph needs them.
    """

    every: int
    record: tuple[str, ...]
    inputs: tuple[InputSpec, ...]
    batches: Batches | None
    patience: int | None = None
    keep: str = KEPT[0]
    goal: str = GOALS[0]
    written: EinGraph | None = None
    given: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

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
    place: Place,
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
    if type(every) is not int or not 1 <= every <= MOST_STEPS:
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
    pads_last = batches is not None and batches.pads_last
    own_batches = make_batches(place, found, last="pad" if pads_last else None)
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
    if is_batched and spec.key_dimensions:
        raise InputError(
            where, f"{spec.name} is sparse, and cannot come in batches", "a dense tensor"
        )
    if is_batched and whole_shape:
        rows = whole_shape[0]
        shape = (vertex.bound[0], *whole_shape[1:])
        shown = "×".join(["rows", *map(str, vertex.bound[1:])])
    if shape != vertex.bound or spec.dtype != vertex.dtype:
        what = f"{spec.name} is {spec.dtype} {show_shape(whole_shape)}"
        raise InputError(where, what, f"{vertex.dtype} {shown}, as in the steps")
    return replace(spec, shape=shape, rows=rows, place=where)


def _check_validated(place: Place, graph: EinGraph, record: Sequence[Any]) -> None:
    if not record:
        raise InputError(place("record"), "there is nothing to record", 'record = ["NAME"]')
    for number, name in enumerate(record):
        where = place("record", number)
        vertex = computed_number(graph, where, name)
        if vertex.dtype.startswith("complex"):
            raise InputError(where, f"{name} is {vertex.dtype}", "a real number")


# ---- tensors of a step ---------------------------------------------------------------------------


def computed(graph: EinGraph, where: str, name: Any) -> Vertex:
    """Return the vertex of a tensor that a step computes."""
    names = [vertex.name for vertex in graph.computed]
    if name not in names:
        raise InputError(where, f"{name} is not computed", nearest_of(names, str(name)))
    return graph[name]


def computed_number(graph: EinGraph, where: str, name: Any) -> Vertex:
    """Return the vertex of a tensor without dimensions that a step computes, to be recorded."""
    vertex = computed(graph, where, name)
    if vertex.bound:
        what = f"{name} is recorded, but is {kind_of_tensor(vertex)}"
        raise InputError(where, what, "a tensor without dimensions")
    return vertex


def kind_of_tensor(vertex: Vertex) -> str:
    """Return the dtype and the extents of a tensor, for messages."""
    extents = ", ".join(map(str, vertex.bound))
    return f"{vertex.dtype}[{extents}]" if vertex.bound else f"{vertex.dtype} without dimensions"
