"""A loop in one process, step by step, by the reference evaluator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from einmpi.graph.eingraph import EinGraph
from einmpi.job.job import Job, loop_of
from einmpi.job.loop import Loop
from einmpi.kernels.reference import evaluate
from einmpi.loops.batches import batch_of_whole_array
from einmpi.loops.stages import final_names, kept_outputs, numbers_read, written_step

Array: TypeAlias = npt.NDArray[Any]


def evaluate_loops(
    job: Job,
    inputs: Mapping[str, Any],
    arrays_of: Callable[[Job, Mapping[str, Any]], dict[str, Array]],
) -> dict[str, Array]:
    """Evaluate the loops of a job one after another; there may be only one.

    `arrays_of` returns the inputs of a loop, given those of the caller and of earlier loops.
    """
    found: dict[str, Array] = {}  # by earlier loops
    for each in job.one_after_another():
        given = dict(inputs)
        if job.loops:
            given = _inputs_of(each, inputs, found)
        arrays = arrays_of(each, given)
        for spec in each.inputs:
            if spec.value is not None:
                arrays.setdefault(spec.name, np.asarray(spec.value, spec.dtype))
        results = evaluate_loop(each, loop_of(each), arrays)
        if job.loops:
            for name, output in loop_of(each).carry.items():
                found[output] = results[name]
        found |= results
    return {name: found[name] for name in final_names(job)}


def _inputs_of(
    job: Job, inputs: Mapping[str, Any], computed: Mapping[str, Array]
) -> dict[str, Any]:
    """Return the inputs of one of several loops: from earlier loops, or else from the caller."""
    found: dict[str, Any] = {}
    for spec in job.inputs:
        name = spec.name
        if name in computed:
            found[name] = computed[name]
        elif name in inputs:
            found[name] = inputs[name]
    return found


def evaluate_loop(job: Job, loop: Loop, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the last values of what is carried, and the outputs of the last step.

    Each step evaluates the whole program as written; nothing is computed only once. Of inputs that
    come in batches, all rows are given.
    """
    step = written_step(job, loop)
    dtypes = numbers_read(step, loop)
    values = dict(inputs)
    outputs: dict[str, Array] = {}
    for number in range(loop.steps):
        for name, value in loop.numbers(number).items():
            values[name] = np.array(value, dtypes.get(name))
        if loop.batches is not None:
            for name in loop.batches.names:
                if name in step.by_name:
                    values[name] = batch_of_whole_array(loop.batches, inputs[name], number)
        outputs = evaluate(step, values)
        for name, output in loop.carry.items():
            values[name] = outputs[output]
        if loop.until is not None and condition_holds(loop.until, {**values, **outputs}):
            break
    found = {name: outputs[output] for name, output in loop.carry.items()}
    for name in kept_outputs(job, loop):
        found[name] = outputs[name]
    return found


def condition_holds(condition: EinGraph, values: Mapping[str, Array]) -> bool:
    """Return whether the condition of a loop holds, given the values that it reads."""
    inputs = {vertex.name: values[vertex.name] for vertex in condition.inputs}
    (value,) = evaluate(condition, inputs).values()
    return bool(value)
