"""Validation of a training: numbers of the program for other inputs, every so many steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from einmpi.errors import InputError, nearest_of
from einmpi.files.specs import InputSpec
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.job.batches import Batches
from einmpi.language.toml_document import show
from einmpi.units import counted, show_shape

PREFIX = "validation_"  # of the columns of a history
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
    """

    every: int
    record: tuple[str, ...]
    inputs: tuple[InputSpec, ...]
    batches: Batches | None

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the numbers in a history."""
        return tuple(f"{PREFIX}{name}" for name in self.record)

    @property
    def steps(self) -> int:
        """The number of batches."""
        return 1 if self.batches is None else self.batches.steps_an_epoch

    @property
    def identity(self) -> str:
        """A text that is the same for validations that compute the same numbers."""
        inputs = tuple(replace(spec, place="") for spec in self.inputs)
        return repr(replace(self, inputs=inputs))

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
) -> Validation:
    """Return a checked validation of a program; `inputs` have their whole shapes.

    Inputs that are `carried` cannot be among them.
    """
    if type(every) is not int or not 1 <= every <= MOST_STEPS_BETWEEN:
        what = "every is missing" if every is None else f"every is {show(every)}"
        raise InputError(place("every"), what, "after how many steps to validate, such as 100")
    _check_record(place, graph, record)
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
    return Validation(every, tuple(record), tuple(found), _batches_of(place, batches, found))


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


def _check_record(place: Callable[..., str], graph: EinGraph, record: Sequence[Any]) -> None:
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
