"""What a loop repeats and when it ends, checked against the program of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from einmpi.errors import InputError, nearest_of
from einmpi.graph.eingraph import EinGraph, Vertex
from einmpi.graph.labels import unique
from einmpi.job.job import Job
from einmpi.language.parse import parse_program
from einmpi.language.syntax import Source, Statement, parse, statements

MOST_STEPS = 2**53
STEP = "step"  # the input that has the number of the step, from 0
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
    record : tuple of str
        Tensors without dimensions whose values are kept for every step.
    """

    steps: int
    carry: Mapping[str, str]
    until: EinGraph | None = None
    record: tuple[str, ...] = ()

    @property
    def watched(self) -> tuple[str, ...]:
        """The tensors whose values all ranks look at after a step."""
        condition = () if self.until is None else [vertex.name for vertex in self.until.inputs]
        return unique(self.record, condition)


def make_loop(
    job: Job,
    where: str,
    steps: int,
    carry: Mapping[str, str],
    until: Source | None = None,
    record: Iterable[str] = (),
) -> Loop:
    """Return a checked loop over the program of a job; `where` is the place for messages."""
    if type(steps) is not int or not 1 <= steps <= MOST_STEPS:
        raise InputError(where, f"steps is {steps!r}", f"an integer from 1 to 2**53 = {MOST_STEPS}")
    if not carry:
        raise InputError(where, "nothing is carried", 'carry = { INPUT = "TENSOR" }')
    for name, output in carry.items():
        _check_carried(job.written, where, name, output)
    outputs = list(carry.values())
    for output in outputs:
        if outputs.count(output) > 1:
            names = " and ".join(name for name in carry if carry[name] == output)
            raise InputError(where, f"{output} becomes {names}", "one input for each tensor")
    recorded = tuple(record)
    for name in recorded:
        _check_recorded(job.written, where, name)
    condition = None if until is None else _condition(job, where, until)
    return Loop(steps, dict(carry), condition, recorded)


def _check_carried(graph: EinGraph, where: str, name: str, output: str) -> None:
    """Refuse an input that cannot become the tensor that is to follow it."""
    inputs = [vertex.name for vertex in graph.inputs]
    if name not in inputs:
        raise InputError(where, f"{name} is carried, but is no input", nearest_of(inputs, name))
    before = graph[name]
    after = _computed(graph, where, output)
    if (before.bound, before.dtype) != (after.bound, after.dtype):
        raise InputError(
            where, f"{output} is {_kind(after)}", f"{_kind(before)}, because it becomes {name}"
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


def _condition(job: Job, where: str, source: Source) -> EinGraph:
    """Return the graph of a condition over tensors without dimensions, sizes and parameters."""
    graph = job.written
    body = parse(source)
    if len(body) != 1 or not hasattr(body[0], "value") or hasattr(body[0], "targets"):
        raise InputError(where, f"{source.text!r} is not a condition", 'a condition such as "n < 1"')
    start = f"{_CONDITION} = "
    column = source.column - len(start)
    assigned = Source(source.name, start + source.text, source.line, column)
    (item,) = statements(assigned)
    assert isinstance(item, Statement)
    numbers = {}
    for vertex in graph.vertices:
        if not vertex.bound:
            numbers[vertex.name] = (), vertex.dtype
    types = {spec.name: type(spec.value) for spec in job.inputs if spec.value is not None}
    numbers.setdefault(STEP, ((), "int64"))
    for spec in job.inputs:
        if spec.value is not None:
            numbers.setdefault(spec.name, ((), spec.dtype or ""))
    parsed = parse_program(assigned, numbers, job.sizes, [_CONDITION], [item], types)
    vertex = parsed[_CONDITION]
    if vertex.bound or vertex.dtype != "bool":
        raise InputError(where, f"{source.text!r} is {_kind(vertex)}", "a condition: true or false")
    return parsed
