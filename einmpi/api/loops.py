"""Repeat a program, or train it: tensors of one step are inputs of the next."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from einmpi.api.jobs import check_job
from einmpi.arguments import as_int, known_name, named_values, optional_names, optional_text
from einmpi.comm.agreement import comm_of_program, together
from einmpi.errors import InputError, nearest_of
from einmpi.files.reading import rows_of_chunks_in
from einmpi.files.specs import InputSpec
from einmpi.job.batches import (
    EPOCH,
    ROWS,
    VALIDATION_KEYS,
    Batches,
    Validation,
    make_batches,
    make_validation,
)
from einmpi.job.job import (
    Job,
    loop_of,
    options_of,
    trained_job,
    with_numbers_of_steps,
    with_settings,
)
from einmpi.job.loop import Loop, StepProgram, make_loop, numbers_of_steps, refuse_step_as_input
from einmpi.job.settings import only_settings, split_settings, takes_settings
from einmpi.language.syntax import Source
from einmpi.training.settings import Training, make_training
from einmpi.units import counted

if TYPE_CHECKING:
    from einmpi.loops.running import LoopResult


# Gets the number of a step and what was recorded; if it returns True, the step is the last.
OnStep: TypeAlias = Callable[[int, dict[str, Any]], object]


class LoopArguments(NamedTuple):
    """The arguments of `einmpi.loop` that describe one loop; the job decides where one is None."""

    carry: Mapping[str, str] | None = None
    steps: int | None = None
    epochs: int | None = None
    until: str | None = None
    record: Sequence[str] | None = None
    batch: Sequence[str] | None = None
    shuffle: int | Mapping[str, int] | None = None
    last: str | None = None
    start: LoopResult | None = None
    on_step: OnStep | None = None


@takes_settings
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
    start: LoopResult | None = None,
    on_step: OnStep | None = None,
    **settings: Any,
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
    start : LoopResult, optional
        The result of an earlier call to go on from: its `state`, the number of its steps and its
        history are those of this one before its first step. With the same arguments besides `steps`
        or `epochs`, which count all steps, the bits are those of a single call.
    on_step : callable, optional
        Called as ``on_step(step, numbers)`` on all ranks after each step, with its number from 0
        and a dict of what it has recorded. If it returns True on any rank, this step is the last.
    {settings} : optional
        As for `plan`.

    Returns
    -------
    LoopResult
        With `outputs`, the last values of what is carried and the outputs of the last step;
        `history`, the recorded values as arrays; `steps`, their number; `is_done`, whether the
        condition holds; and `state`, the last values of all that is carried. If the job has several
        loops, `earlier` has those that came first.

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
    arguments = LoopArguments(
        carry=carry,
        steps=steps,
        until=until,
        record=record,
        batch=batch,
        epochs=epochs,
        shuffle=shuffle,
        last=last,
        start=start,
        on_step=on_step,
    )
    return run_loops(job, inputs, comm, arguments, only_settings("loop", settings))


@takes_settings
def train(
    job: Job,
    inputs: Mapping[str, Any] | None = None,
    comm: Any = None,
    *,
    loss: str,
    parameters: Sequence[str],
    optimizer: str | Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]] | None = None,
    accumulate: int | None = None,
    precision: str | None = None,
    scale: float | None = None,
    growth: int | None = None,
    validation: Mapping[str, Any] | None = None,
    **options: Any,
) -> LoopResult:
    """Train a program: change some of its inputs so that a loss becomes less.

    Statements are added to the program: gradients, and the next values of parameters and of the
    optimiser's state, which starts with zeros. Then it is run as by `loop`. All ranks call this
    function.

    Parameters
    ----------
    job : Job
        The program of a step, which computes the loss.
    inputs : mapping of str to array, DistArray or h5py dataset, optional
        The inputs of the first step by name, as for `loop`.
    comm : mpi4py communicator, optional
        The ranks; by default all that mpirun started, or this process alone.
    loss : str
        The tensor that becomes less: a real number, without dimensions.
    parameters : sequence of str
        The inputs that change.
    optimizer : str or mapping
        The name of an optimiser, or ``{"name": "adamw", "rate": 0.001, "decay": 0.01}``. The rate
        is a number, or an expression of `step`, `steps` and tensors without dimensions.
    groups : sequence of mapping, optional
        What is different for some of the parameters, such as
        ``[{"parameters": ["b1"], "rate": 0.1, "decay": 0}]``: options, or another optimiser.
    accumulate : int, optional
        The number of batches whose mean gradient makes one update; 1 by default.
    precision : {"bfloat16", "float16"}, optional
        The dtype in which the loss and its gradients are computed.
    scale, growth : optional
        With float16, what the loss is multiplied by at first, and after how many updates that
        doubles; 65536 and 2000 by default.
    validation : mapping, optional
        What is computed for other inputs, such as
        ``{"inputs": {"X": X, "y": y}, "every": 100, "record": ["accuracy"]}``: tensors without
        dimensions, by default the loss, after every so many steps and after the last. Inputs that
        come in batches are given with all their rows, and have the mean over all batches. With
        ``"patience": 5`` the loop ends after 5 validations in a row of which none is the best so
        far: none has a smaller first number, or with ``"goal": "max"`` a greater one. With
        ``"keep": "best"`` the parameters in `outputs` are those of the best validation.
    **options
        Further arguments of `loop`: `steps` or `epochs`, `batch`, `record`, `until`, `on_step`,
        `start` and others.
        `carry` is for inputs besides the parameters.
    {settings} : optional
        As for `plan`.

    Returns
    -------
    LoopResult
        With `outputs`, the last values of the parameters and the outputs of the last step, and
        `history`, the recorded values; those of the validation as "validation_accuracy" and so on,
        nan for steps without one. `state` has the last values of the parameters and of the
        optimiser's state, with which another call goes on: ``start=found``.

    Raises
    ------
    InputError
        An argument is wrong; the same error on all ranks.

    Examples
    --------
    >>> job = einmpi.program("loss = sum((w[i] - 3)**2)", w=(2,))
    >>> found = einmpi.train(
    ...     job,
    ...     {"w": np.zeros(2)},
    ...     loss="loss",
    ...     parameters=["w"],
    ...     optimizer={"name": "momentum", "rate": 0.05},
    ...     steps=200,
    ...     record=["loss"],
    ... )
    >>> found.outputs["w"].gather().round(3)
    array([3., 3.])
    """
    given, others = split_settings(options)
    for name in others:
        if name not in LoopArguments._fields:
            raise TypeError(f"train() got an unexpected keyword argument {name!r}")
    if check_job("train", job).loops:
        raise InputError("train", "the job has several loops", "a program, or a job with one loop")
    training = make_training(
        lambda *_: "train",
        loss,
        parameters,
        optimizer,
        as_int(accumulate),
        precision,
        scale,
        as_int(growth),
        groups,
    )
    return run_loops(job, inputs, comm, LoopArguments(**others), given, training, validation)


def run_loops(
    job: Job,
    inputs: Mapping[str, Any] | None,
    comm: Any,
    arguments: LoopArguments,
    settings: Mapping[str, Any],
    training: Training | None = None,
    validation: Mapping[str, Any] | None = None,
) -> LoopResult:
    """Run the loops of a job, as `loop` does; `training` adds statements to its program.

    `validation` says what is computed for other inputs.
    """
    from einmpi.compiled.sparse import has_sparse, stored_job, with_coordinates
    from einmpi.compiled.sparse_inputs import validated_inputs, with_sparse_inputs
    from einmpi.loops.sequence import LoopSequence

    def check() -> Job:
        checked = checked_loops(job, given, arguments, settings, training, validation)
        if arguments.on_step is not None and not callable(arguments.on_step):
            what = f"on_step is {type(arguments.on_step).__name__}"
            raise InputError("loop", what, "a function of a step and its numbers")
        if arguments.start is not None:
            _check_start(loop_of(checked), arguments.start)
        return checked

    def loops_of(checked: Job) -> str:
        steps_before = None if arguments.start is None else arguments.start.steps
        loops = [each.loop for each in checked.one_after_another()]
        return repr((loops, steps_before, arguments.on_step is not None))

    own_comm = comm_of_program(comm)
    given = together(own_comm, lambda: named_values("inputs", inputs))
    checked_job = together(own_comm, check, loops_of)
    stored = None
    start = arguments.start
    given = with_sparse_inputs(own_comm, checked_job, given)
    others = {} if validation is None else named_values("validation", validation.get("inputs"))
    validated = validated_inputs(own_comm, checked_job, others)
    if any(map(has_sparse, (given, *validated))):
        given = with_coordinates(own_comm, checked_job, given)
        for number, each in enumerate(checked_job.one_after_another()):
            validated[number] = with_coordinates(own_comm, each, validated[number])
        stored = stored_job(own_comm, checked_job, given, validated=validated)
        checked_job, given = stored.job, stored.inputs(given)
        if start is not None:
            outputs, state = (stored.values(each) for each in (start.outputs, start.state))
            start = replace(start, outputs=outputs, state=state)
    loops = LoopSequence(checked_job, own_comm, options_of)
    loops.runs[0].start = start
    for run in loops.runs:
        run.on_step = arguments.on_step
    result = loops.run(given, validation_inputs={} if stored is not None else others)
    if stored is None:
        return result
    return replace(
        result, outputs=stored.results(result.outputs), state=stored.results(result.state)
    )


def _check_start(loop: Loop, start: Any) -> None:
    """Refuse what a loop cannot go on from."""
    from einmpi.loops.running import LoopResult

    what = ""
    if not isinstance(start, LoopResult):
        what = f"start is {type(start).__name__}"
    elif missing := [name for name in loop.carry if name not in start.state]:
        what = f"start has no state {missing[0]}"
    elif missing := [name for name in loop.columns if name not in start.history]:
        what = f"start has not recorded {missing[0]}"
    elif start.steps >= loop.steps:
        what = f"start has {counted(start.steps, 'step')}, and the loop {loop.steps}"
    elif not _has_kept_best(loop, start):
        what = "start has not kept the best parameters"
    if what:
        expected = "the result of a call with the same arguments and fewer steps"
        raise InputError("loop", what, expected)


def _has_kept_best(loop: Loop, start: LoopResult) -> bool:
    """Return whether a result has the copies that a loop keeps of its best validation, if any."""
    from einmpi.loops.history import Validated

    if not loop.kept_best:
        return True
    assert loop.validation is not None
    are_copies = all(start.outputs[name] is not start.state[name] for name in loop.kept_best)
    return are_copies and Validated(loop.validation, start.history).best_step == start.best_step


def checked_loops(
    job: Job,
    inputs: Mapping[str, Any],
    arguments: LoopArguments,
    settings: Mapping[str, Any],
    training: Training | None,
    validation: Mapping[str, Any] | None,
) -> Job:
    """Return the job with all that a call says about its loops; refuse what is wrong."""
    changed = with_settings(check_job("loop", job), settings)
    if changed.loops:
        _refuse_arguments(arguments)
    else:
        changed = _with_loop(changed, inputs, arguments, training, validation)
    for each in changed.one_after_another():
        options_of(each)  # refuses wrong arguments
    return changed


def _with_loop(
    job: Job,
    inputs: Mapping[str, Any],
    arguments: LoopArguments,
    training: Training | None,
    validation: Mapping[str, Any] | None,
) -> Job:
    """Return the job with the loop that the arguments describe."""
    job = _with_batched_inputs(job, arguments.batch, inputs)
    batches = _checked_batches(job, arguments)
    if job.loop is None:  # else the program was read as that of a loop
        job = with_numbers_of_steps(job, batches is not None)
    if training is None:
        loop = _checked_loop(job, arguments, batches, None)
    else:
        job, loop = _with_training(job, arguments, batches, training, validation)
    return replace(job, loop=loop)


def _with_training(
    job: Job,
    arguments: LoopArguments,
    batches: Batches | None,
    training: Training,
    validation: Mapping[str, Any] | None,
) -> tuple[Job, Loop]:
    """Return the job with the statements that train its parameters, and its loop."""
    carry: Mapping[str, str] = {} if job.loop is None else job.loop.carry
    if arguments.carry is not None:
        carry = named_values("loop", arguments.carry)
    most_steps = _most_steps(job, as_int(arguments.steps), batches)
    trained, written = trained_job(job, training, carry, most_steps, batches)
    carry = {**carry, **written.carry}
    checked = None
    if validation is not None:
        checked = _checked_validation(trained, batches, validation, training, carry)
    loop = replace(
        _checked_loop(trained, arguments._replace(carry=carry), batches, checked),
        results=job.written.outputs,
        written_out=written.shown,
        state={each.name: each.like for each in written.state},
    )
    return trained, loop


def _checked_validation(
    job: Job,
    batches: Batches | None,
    given: Mapping[str, Any],
    training: Training,
    carried: Collection[str],
) -> Validation:
    """Return the validation that a mapping with `inputs`, `every` and `record` describes."""
    from einmpi.compiled.given_inputs import as_array
    from einmpi.sparse_array import is_sparse, outline_spec

    settings = named_values("validation", given)
    for key in settings:
        known_name("validation", key, VALIDATION_KEYS, "key")
    specs = []
    for name, array in named_values("validation", settings.get("inputs")).items():
        if is_sparse(array):
            specs.append(replace(outline_spec(name, array), place="validation"))
            continue
        found = as_array(name, array)
        specs.append(InputSpec(name, tuple(found.shape), np.dtype(found.dtype).name))
    record = optional_names("validation", "record", settings.get("record"))
    if record is None:
        record = [training.loss]
    return make_validation(
        lambda *_: "validation",
        job.written,
        batches,
        specs,
        as_int(settings.get("every")),
        record,
        carried,
        as_int(settings.get("patience")),
        settings.get("keep"),
        settings.get("goal"),
    )


def _most_steps(job: Job, steps: int | None, batches: Batches | None) -> int | None:
    """Return the most steps that arguments or the job give, None if they give none."""
    if steps is None and batches is not None and batches.epochs is not None:
        return batches.epochs * batches.steps_an_epoch
    if steps is None and job.loop is not None:
        return job.loop.steps
    return steps


def _refuse_arguments(arguments: LoopArguments) -> None:
    """Refuse arguments that describe one loop, for a job that has several."""
    for name, value in arguments._replace(on_step=None)._asdict().items():
        if value is not None:
            what = f"{name} is given, but the job has several loops"
            raise InputError("loop", what, f"the {name} of the job file")


def _checked_loop(
    job: Job, arguments: LoopArguments, batches: Batches | None, validation: Validation | None
) -> Loop:
    """Return the loop that the arguments describe, and the job where they leave something out."""
    known = job.loop
    carry, until, record = arguments.carry, arguments.until, arguments.record
    steps = _most_steps(job, as_int(arguments.steps), batches)
    if known is not None:
        carry = known.carry if carry is None else carry
        record = known.record if record is None else record
        if validation is None and known.validation is not None:
            validation = known.validation
            if until is None:  # the condition has it
                validation = replace(validation, patience=None)
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
    checked = make_loop(
        program, lambda *_: "loop", steps, carry, condition, names, validation=validation
    )
    checked = replace(checked, batches=batches)
    if known is None:
        return checked
    return replace(
        checked,
        stop_at_nan=known.stop_at_nan,
        results=known.results,
        written_out=known.written_out,
        state=known.state,
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
    from einmpi.sparse_array import is_sparse

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
        if is_sparse(inputs[name]):
            what = f"{name} is sparse, and cannot come in batches"
            raise InputError("loop", what, "a dense tensor")
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


def _checked_batches(job: Job, arguments: LoopArguments) -> Batches | None:
    """Return the batches that the arguments describe, and the job where they leave out a key."""
    known = None if job.loop is None else job.loop.batches
    steps, epochs = as_int(arguments.steps), as_int(arguments.epochs)
    shuffle, last = arguments.shuffle, arguments.last
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
