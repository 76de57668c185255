"""Repeat a program: tensors of one step are inputs of the next."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from einmpi.api.planning import check_job, options_of, truth_value
from einmpi.arguments import as_int, named_values, optional_names, optional_text
from einmpi.comm.agreement import together
from einmpi.errors import InputError, nearest_of, one_of
from einmpi.files.load import rows_of_chunks_in
from einmpi.files.specs import InputSpec
from einmpi.job.batches import EPOCH, ROWS, Batches, make_batches
from einmpi.job.job import Job, with_half, with_overlap_mode, with_shared, with_strict
from einmpi.job.loop import (
    Loop,
    StepProgram,
    make_loop,
    numbers_of_steps,
    refuse_step_as_input,
)
from einmpi.job.trained import trained_job
from einmpi.job.validation import Validation, make_validation
from einmpi.language.syntax import Source
from einmpi.training.settings import Training
from einmpi.training.write_out import WrittenOut

if TYPE_CHECKING:
    from einmpi.loops.result import LoopResult
    from einmpi.planner.plan import Options


def loop(
    job: Job,
    inputs: Mapping[str, Any] | None = None,
    comm: Any = None,
    *,
    carry: Mapping[str, str] | None = None,
    steps: int | None = None,
    until: str | None = None,
    record: Sequence[str] | None = None,
    batch: Sequence[str] | None = None,
    epochs: int | None = None,
    shuffle: int | Mapping[str, int] | None = None,
    last: str | None = None,
    strategy: str | None = None,
    memory: int | str | None = None,
    recompute: str | Sequence[str] | None = None,
    pin: Mapping[str, Sequence[int]] | None = None,
    machine: str | os.PathLike[str] | None = None,
    fast_math: bool | None = None,
    strict: bool | None = None,
    half: str | None = None,
    overlap: str | None = None,
    shared: str | None = None,
) -> LoopResult:
    """Run a program again and again; tensors of one step are inputs of the next.

    What is carried stays where it is on the ranks. What never changes is computed once, before the
    first step. All ranks call this function. No file is written, not even the history that a job
    file names.

    Parameters
    ----------
    job : Job
        The program of a step. If it is from a job file with a ``[loop]``, that gives the values of
        `carry`, `steps`, `until` and `record` that are left out here, and says what comes in
        batches, and how. If it has several loops, one after another, none of these may be given.
    inputs : mapping of str to array, DistArray or h5py dataset, optional
        The inputs of the first step by name. Those that are missing are generated or read as the
        job says. Those that come in batches are given with all their rows.
    comm : mpi4py communicator, optional
        The ranks; by default all that mpirun started, or this process alone.
    carry : mapping of str to str
        For inputs, the tensor of a step that they become in the next one.
    steps : int
        The most steps.
    until : str, optional
        A condition over tensors without dimensions, sizes and parameters; the step after which it
        holds is the last one.
    record : sequence of str, optional
        Tensors without dimensions whose values are kept for every step.
    batch : sequence of str, optional
        Inputs of which each step takes the next rows, as many as the program says that they have.
        They are arrays, which all ranks have, or h5py datasets.
    epochs : int, optional
        In place of `steps`: how often all rows are taken.
    shuffle : int or mapping, optional
        The seed of a new order of the rows in each epoch; or ``{"seed": 7, "block": 1024}``, if
        blocks of so many rows are to be read together.
    last : {"drop", "pad"}, optional
        Whether the rows after the last full batch are left out, or padded with zeros.
    strategy, memory, recompute, pin, machine, fast_math, strict, half, overlap, shared : optional
        As for `compile`.

    Returns
    -------
    LoopResult
        With `outputs`, the last values of what is carried and the outputs of the last step;
        `history`, the recorded values as arrays; `steps`, their number; and `is_done`, whether the
        condition holds. If the job has several loops, `earlier` has those that came first.

    Raises
    ------
    InputError
        An argument is wrong; the same error on all ranks.
    EinmpiError
        A value cannot be computed with, such as an index in a gather that is out of range.

    Examples
    --------
    >>> job = einmpi.program("y = (x + a / x) / 2; change = abs(y - x)", x=(), a=())
    >>> start = {"x": 1.0, "a": 2.0}
    >>> root = einmpi.loop(job, start, carry={"x": "y"}, steps=50, until="change < 1e-12")
    >>> root.steps, round(float(root.outputs["x"]), 6)
    (6, 1.414214)
    """
    return run_loops(
        job,
        inputs,
        comm,
        None,
        carry=carry,
        steps=steps,
        until=until,
        record=record,
        batch=batch,
        epochs=epochs,
        shuffle=shuffle,
        last=last,
        strategy=strategy,
        memory=memory,
        recompute=recompute,
        pin=pin,
        machine=machine,
        fast_math=fast_math,
        strict=strict,
        half=half,
        overlap=overlap,
        shared=shared,
    )


def run_loops(
    job: Job,
    inputs: Mapping[str, Any] | None,
    comm: Any,
    training: Training | None,
    *,
    validation: Mapping[str, Any] | None = None,
    carry: Mapping[str, str] | None = None,
    steps: int | None = None,
    until: str | None = None,
    record: Sequence[str] | None = None,
    batch: Sequence[str] | None = None,
    epochs: int | None = None,
    shuffle: int | Mapping[str, int] | None = None,
    last: str | None = None,
    strategy: str | None = None,
    memory: int | str | None = None,
    recompute: str | Sequence[str] | None = None,
    pin: Mapping[str, Sequence[int]] | None = None,
    machine: str | os.PathLike[str] | None = None,
    fast_math: bool | None = None,
    strict: bool | None = None,
    half: str | None = None,
    overlap: str | None = None,
    shared: str | None = None,
) -> LoopResult:
    """Run the loops of a job, as `loop` does; `training` adds statements to its program.

    `validation` says what is computed for other inputs.
    """
    from einmpi.comm.programs import comm_of_program
    from einmpi.loops.sequence import LoopSequence

    def check() -> Job:
        changed = check_job("loop", job)
        if fast_math is not None:
            changed = replace(changed, fast_math=truth_value("fast_math", fast_math))
        if strict is not None:
            changed = with_strict(changed, truth_value("strict", strict))
        if half is not None:
            changed = with_half(changed, half)
        if overlap is not None:
            changed = with_overlap_mode(changed, overlap)
        if shared is not None:
            changed = with_shared(changed, shared)
        if changed.loops:
            _refuse_arguments(
                {
                    "carry": carry,
                    "steps": steps,
                    "epochs": epochs,
                    "until": until,
                    "record": record,
                    "batch": batch,
                    "shuffle": shuffle,
                    "last": last,
                }
            )
        else:
            changed = _with_batched_inputs(changed, batch, given)
            batches = _checked_batches(changed, as_int(steps), as_int(epochs), shuffle, last)
            own_carry = carry
            written = WrittenOut()
            results = None
            if training is not None:
                results = changed.written.outputs
                most_steps = _most_steps(changed, as_int(steps), batches)
                known_carry = {} if changed.loop is None else changed.loop.carry
                if carry is not None:
                    known_carry = named_values("loop", carry)
                changed, written = trained_job(changed, training, known_carry, most_steps, batches)
                own_carry = {**known_carry, **written.carry}
            checked = _checked_loop(changed, own_carry, as_int(steps), until, record, batches)
            if training is not None:
                state = tuple(each.name for each in written.state)
                checked = replace(checked, results=results, written_out=written.shown, state=state)
            if validation is not None:
                own_validation = _checked_validation(
                    changed, batches, validation, training, checked.carry
                )
                checked = replace(checked, validation=own_validation)
            changed = replace(changed, loop=checked)
        for each in changed.one_after_another():
            options(each)  # refuses wrong arguments
        return changed

    def options(of_job: Job) -> Options:
        return options_of(of_job, strategy, memory, pin, machine, recompute=recompute)

    def loops_of(checked: Job) -> str:
        return repr([each.loop for each in checked.one_after_another()])

    own_comm = comm_of_program(comm)
    given = together(own_comm, lambda: named_values("inputs", inputs))
    checked_job = together(own_comm, check, loops_of)
    loops = LoopSequence(checked_job, own_comm, options)
    others = {} if validation is None else named_values("validation", validation.get("inputs"))
    return loops.run(given, validation_inputs=others)


def _checked_validation(
    job: Job,
    batches: Batches | None,
    given: Mapping[str, Any],
    training: Training | None,
    carried: Collection[str],
) -> Validation:
    """Return the validation that a mapping with `inputs`, `every` and `record` describes."""
    from einmpi.compiled.given_inputs import as_array

    settings = named_values("validation", given)
    keys = ("inputs", "every", "record")
    for key in settings:
        if key not in keys:
            raise InputError("validation", f"unknown key {key!r:.60}", one_of(keys, key))
    specs = []
    for name, array in named_values("validation", settings.get("inputs")).items():
        found = as_array(name, array)
        specs.append(InputSpec(name, tuple(found.shape), np.dtype(found.dtype).name))
    record = optional_names("validation", "record", settings.get("record"))
    if record is None and training is not None:
        record = [training.loss]
    return make_validation(
        lambda *_: "validation",
        job.written,
        batches,
        specs,
        as_int(settings.get("every")),
        record or (),
        carried,
    )


def _most_steps(job: Job, steps: int | None, batches: Batches | None) -> int | None:
    """Return the most steps that arguments or the job give, None if they give none."""
    if steps is None and batches is not None and batches.epochs is not None:
        return batches.epochs * batches.steps_an_epoch
    if steps is None and job.loop is not None:
        return job.loop.steps
    return steps


def _refuse_arguments(given: Mapping[str, object]) -> None:
    """Refuse arguments that describe one loop, for a job that has several."""
    for name, value in given.items():
        if value is not None:
            what = f"{name} is given, but the job has several loops"
            raise InputError("loop", what, f"the {name} of the job file")


def _checked_loop(
    job: Job,
    carry: Mapping[str, str] | None,
    steps: int | None,
    until: str | None,
    record: Sequence[str] | None,
    batches: Batches | None,
) -> Loop:
    """Return the loop that the arguments describe, and the job where they leave something out."""
    known = job.loop
    steps = _most_steps(job, steps, batches)
    if known is not None:
        carry = known.carry if carry is None else carry
        record = known.record if record is None else record
        if until is None and known.until is not None:
            until = known.until_text
    if carry is None or steps is None:
        missing = "carry" if carry is None else "steps"
        expected = "carry={...} and steps=..."
        if carry is not None:
            expected = "steps=..., or epochs=... with batches"
        raise InputError("loop", f"{missing} is not given", expected)
    condition = None
    if optional_text("loop", "until", until, "change < 1e-6") is not None:
        condition = Source("until", str(until))
    names = optional_names("loop", "record", record) or ()
    program = StepProgram(job.written, job.sizes, job.inputs)
    if known is None:  # else the number of the step is an input of the job
        refuse_step_as_input(job.inputs, "loop")
    _check_numbers_of_steps(job, carry, batches)
    checked = make_loop(program, lambda *_: "loop", steps, carry, condition, names)
    checked = replace(checked, batches=batches)
    if known is None:
        return checked
    return replace(
        checked,
        stop_at_nan=known.stop_at_nan,
        results=known.results,
        written_out=known.written_out,
        state=known.state,
        validation=known.validation,
    )


def _check_numbers_of_steps(job: Job, carry: Mapping[str, str], batches: Batches | None) -> None:
    """Refuse an input called `step`, or with batches `rows` or `epoch`, that is no number."""
    names = numbers_of_steps(batches is not None)
    for vertex in job.written.inputs:
        if vertex.name in names and (vertex.bound or vertex.name in carry):
            what = f"in a loop, {vertex.name} is a number of each step"
            raise InputError("loop", what, "another name")


def _with_batched_inputs(job: Job, names: Sequence[str] | None, inputs: Mapping[str, Any]) -> Job:
    """Return a job that knows how many rows the inputs have that come in batches."""
    from einmpi.compiled.given_inputs import as_array
    from einmpi.files.datasets import Dataset

    specs = {spec.name: spec for spec in job.inputs}
    for name in optional_names("loop", "batch", names) or ():
        known = specs.get(name)
        if known is not None and known.rows is not None:
            continue
        found = [vertex.name for vertex in job.written.inputs]
        if name not in found:
            what = f"{name} comes in batches, but no step reads an input {name}"
            raise InputError("loop", what, nearest_of(found, name))
        vertex = job.written[name]
        if name not in inputs:
            what = f"{name} comes in batches, and is not given"
            raise InputError("loop", what, "an array with all its rows")
        array = as_array(name, inputs[name])
        if not vertex.bound or not array.shape:
            what = f"{name} has no dimensions, and cannot come in batches"
            raise InputError("loop", what, "a tensor with rows")
        specs[name] = InputSpec(
            name,
            shape=vertex.bound,
            dtype=vertex.dtype,
            place="loop",
            rows=array.shape[0],
            chunk_rows=rows_of_chunks_in(array) if isinstance(array, Dataset) else 1,
        )
    return replace(job, inputs=tuple(specs.values()))


def _checked_batches(
    job: Job,
    steps: int | None,
    epochs: int | None,
    shuffle: int | Mapping[str, int] | None,
    last: str | None,
) -> Batches | None:
    """Return the batches that the arguments describe, and the job where they leave out a key."""
    known = None if job.loop is None else job.loop.batches
    if steps is not None and epochs is not None:
        raise InputError("loop", "there are both steps and epochs", "one of the two")
    if known is not None:
        if steps is None and epochs is None:
            epochs = known.epochs
        if shuffle is None and known.shuffle is not None:
            shuffle = {"seed": known.shuffle.seed, "block": known.shuffle.block}
        if last is None:
            last = "pad" if known.pads_last else "drop"
    specs = job.inputs
    if known is not None:  # the numbers of a step are inputs of its job
        specs = tuple(spec for spec in specs if spec.name not in (ROWS, EPOCH))
    return make_batches(lambda *_: "loop", specs, epochs, shuffle, last)
