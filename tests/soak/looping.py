"""Random loops: a program whose tensors become its inputs in the next step, and its unrolled value.

No code of the package is used here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from .generate import MOST_STEPS, THEMES, ProgramMaker, without_unused_inputs
from .oracle import Invalid, Value, evaluate, exact
from .tree import (
    STEP,
    Aggregation,
    Define,
    Expression,
    Input,
    Loop,
    Number,
    Operation,
    Program,
    Read,
    Until,
    walk,
)

_ATTEMPTS = 12
_MOST_NODES = 45  # of one statement
_BOUNDING = ("tanh", "sin", "cos")


@dataclass(frozen=True)
class LoopValues:
    """What a loop gives: steps, results of the last one, and values of every step."""

    steps: int
    is_done: bool
    outputs: Mapping[str, Value]
    history: Mapping[str, list[Value]]


def evaluate_loop(program: Program, strict: bool) -> LoopValues:
    """Evaluate a loop step by step; Invalid if rounding decides whether it ends."""
    loop = program.loop
    assert loop is not None
    inputs = {item.name: item.values for item in program.inputs}
    carried: dict[str, Value] = {}
    history: dict[str, list[Value]] = {name: [] for name in loop.record}
    is_done = False
    values: dict[str, Value] = {}
    number = 0
    for number in range(loop.steps):
        step = exact(np.array(number, np.int64))
        values = evaluate(program, strict, {**carried, STEP: step})
        for name, output in loop.carry.items():
            if output not in values or name not in inputs:
                raise Invalid(f"{name} is not carried")
            found = values[output].value
            if (found.shape, found.dtype) != (inputs[name].shape, inputs[name].dtype):
                raise Invalid(f"{output} cannot become {name}")
            carried[name] = values[output]
        for name, rows in history.items():
            rows.append(values[name])
        is_done = loop.until is not None and _holds(loop.until, values)
        if is_done:
            break
    names = [name for name in program.output_names() if name not in loop.carry.values()]
    outputs = {**carried, **{name: values[name] for name in names}}
    return LoopValues(number + 1, is_done, outputs, history)


def _holds(until: Until, values: Mapping[str, Value]) -> bool:
    value = values[until.tensor]
    distance = float(value.value) - until.limit
    if np.any(value.unsure) or not abs(distance) > 4 * float(np.max(value.error)):
        raise Invalid("rounding decides whether the loop ends")
    return distance > 0


# ---- making one ---------------------------------------------------------------------------------


def make_loop(maker: ProgramMaker, program: Program) -> Program | None:
    """Return the program with a loop around it, or None if none was found that has a value."""
    draw = maker.draw
    usable = []
    for item in program.inputs:
        if item.indexes is None and item.values.dtype.kind in "biufc":
            usable.append(item)
    if not usable:
        return None
    maker.keep_inputs(program)
    carry = {}
    for item in draw.shuffled(usable)[: draw.between(1, 2)]:
        name = f"N{len(carry) + 1}"
        if _add_next(maker, item, name):
            carry[item.name] = name
    if not carry:
        return None
    _add_scalar(maker, carry[next(iter(carry))])
    loop = Loop(draw.between(1, MOST_STEPS), carry)
    looped = without_unused_inputs(replace(maker.current(tuple(maker.statements)), loop=loop))
    try:
        evaluate_loop(looped, maker.strict)
        looped = _with_record(maker, looped)
        evaluate_loop(looped, maker.strict)
    except Invalid:
        return None
    return looped


def _add_next(maker: ProgramMaker, item: Input, name: str) -> bool:
    """Add a statement whose result an input becomes in the next step."""
    draw = maker.draw
    for _ in range(_ATTEMPTS):
        maker.labels_made = 0
        labels = [maker.label(size) for size in item.dimensions]
        own: Expression = Read(item.name, tuple(labels))
        other = maker.themed(draw.one(THEMES[:-2]), labels)
        value = maker.combined(own, other)
        if draw.chance(0.3):
            early = Operation("<", (Read(STEP, ()), Number(draw.between(1, 3))))
            value = Operation("where", (early, value, own))
        elif draw.chance(0.3):
            value = maker.joined("+", value, Read(STEP, ()))
        kind = item.values.dtype.kind
        if kind != "c":
            value = maker.real(value)
        if kind == "f" and draw.chance(0.6):
            value = Operation(draw.one(_BOUNDING), (Operation("float64", (value,)),))
        value = Operation(item.values.dtype.name, (value,))
        statement = Define(name, tuple(labels), value)
        if sum(1 for _ in walk(value)) <= _MOST_NODES and maker.keep_if_valid(statement):
            return True
    return False


def _add_scalar(maker: ProgramMaker, tensor: str) -> None:
    """Add a tensor without dimensions, to be recorded."""
    maker.labels_made = 0
    labels = tuple(maker.label(size) for size in maker.dimensions[tensor])
    value = maker.real(Read(tensor, labels))
    if labels:
        value = Aggregation(maker.draw.one(("sum", "max", "min", "mean")), labels, value)
    maker.keep_if_valid(Define("R1", (), Operation("float64", (value,))))


def _with_record(maker: ProgramMaker, program: Program) -> Program:
    """Return a loop that records what is certain and finite in every step, and ends by it."""
    loop = program.loop
    assert loop is not None
    scalars = [item.name for item in program.statements if not item.labels]
    everything = replace(program, loop=replace(loop, record=tuple(scalars)))
    record = []
    history = evaluate_loop(everything, maker.strict).history
    for name, rows in history.items():
        if all(np.isfinite(row.value).all() and not np.any(row.unsure) for row in rows):
            record.append(name)
    loop = replace(loop, record=tuple(record))
    if "R1" in record and maker.draw.chance(0.5):
        row = maker.draw.one(history["R1"])
        limit = float(row.value) - maker.draw.one((0.25, 0.0, 100.0))
        ending = replace(program, loop=replace(loop, until=Until("R1", limit)))
        try:
            evaluate_loop(ending, maker.strict)
        except Invalid:
            pass
        else:
            return ending
    return replace(program, loop=loop)
