"""Repeat a program: tensors of one step are inputs of the next."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from einmpi.api.loop_arguments import LoopArguments, checked_loops
from einmpi.api.planning import Settings
from einmpi.arguments import named_values
from einmpi.comm.agreement import together
from einmpi.job.job import Job
from einmpi.training.settings import Training

if TYPE_CHECKING:
    from einmpi.loops.result import LoopResult


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
    arguments = LoopArguments(
        carry=carry,
        steps=steps,
        until=until,
        record=record,
        batch=batch,
        epochs=epochs,
        shuffle=shuffle,
        last=last,
    )
    settings = Settings(
        strategy, memory, recompute, pin, machine, fast_math, strict, half, overlap, shared
    )
    return run_loops(job, inputs, comm, arguments, settings)


def run_loops(
    job: Job,
    inputs: Mapping[str, Any] | None,
    comm: Any,
    arguments: LoopArguments,
    settings: Settings,
    training: Training | None = None,
    validation: Mapping[str, Any] | None = None,
) -> LoopResult:
    """Run the loops of a job, as `loop` does; `training` adds statements to its program.

    `validation` says what is computed for other inputs.
    """
    from einmpi.comm.programs import comm_of_program
    from einmpi.loops.sequence import LoopSequence

    def check() -> Job:
        return checked_loops(job, given, arguments, settings, training, validation)

    def loops_of(checked: Job) -> str:
        return repr([each.loop for each in checked.one_after_another()])

    own_comm = comm_of_program(comm)
    given = together(own_comm, lambda: named_values("inputs", inputs))
    checked_job = together(own_comm, check, loops_of)
    loops = LoopSequence(checked_job, own_comm, settings.options)
    others = {} if validation is None else named_values("validation", validation.get("inputs"))
    return loops.run(given, validation_inputs=others)
