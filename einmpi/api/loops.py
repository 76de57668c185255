"""Repeat a program: tensors of one step are inputs of the next."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from einmpi.api.planning import check_job, options_of, truth_value
from einmpi.arguments import named_values, optional_names, optional_text
from einmpi.comm.agreement import together
from einmpi.errors import InputError
from einmpi.job.job import Job, with_half, with_strict
from einmpi.job.loop import Loop, StepProgram, make_loop
from einmpi.language.syntax import Source

if TYPE_CHECKING:
    from einmpi.loops.running import LoopResult
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
    strategy: str | None = None,
    memory: int | str | None = None,
    pin: Mapping[str, Sequence[int]] | None = None,
    machine: str | os.PathLike[str] | None = None,
    fast_math: bool | None = None,
    strict: bool | None = None,
    half: str | None = None,
) -> LoopResult:
    """Run a program again and again; tensors of one step are inputs of the next.

    What is carried stays where it is on the ranks. What never changes is computed once, before the
    first step. All ranks call this function. No file is written, not even the history that a job
    file names.

    Parameters
    ----------
    job : Job
        The program of a step. If it is from a job file with a ``[loop]``, that gives the values of
        `carry`, `steps`, `until` and `record` that are left out here.
    inputs : mapping of str to array, DistArray or h5py dataset, optional
        The inputs of the first step by name. Those that are missing are generated or read as the
        job says.
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
    strategy, memory, pin, machine, fast_math, strict, half : optional
        As for `compile`.

    Returns
    -------
    LoopResult
        With `outputs`, the last values of what is carried and the outputs of the last step;
        `history`, the recorded values as arrays; `steps`, their number; and `is_done`, whether the
        condition holds.

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
    from einmpi.comm.programs import comm_of_program
    from einmpi.loops.running import LoopRun

    def check() -> tuple[Job, Loop, Options]:
        changed = check_job("loop", job)
        if fast_math is not None:
            changed = replace(changed, fast_math=truth_value("fast_math", fast_math))
        if strict is not None:
            changed = with_strict(changed, truth_value("strict", strict))
        if half is not None:
            changed = with_half(changed, half)
        checked = _checked_loop(changed, carry, steps, until, record)
        return changed, checked, options_of(changed, strategy, memory, pin, machine)

    own_comm = comm_of_program(comm)
    checked_job, checked_loop, options = together(own_comm, check, lambda found: repr(found[1]))
    run = LoopRun(checked_job, checked_loop, own_comm, options)
    run.prepare(named_values("inputs", inputs))
    return run.run()


def _checked_loop(
    job: Job,
    carry: Mapping[str, str] | None,
    steps: int | None,
    until: str | None,
    record: Sequence[str] | None,
) -> Loop:
    """Return the loop that the arguments describe, and the job where they leave something out."""
    known = job.loop
    if known is not None:
        carry = known.carry if carry is None else carry
        steps = known.steps if steps is None else steps
        record = known.record if record is None else record
        if until is None and known.until is not None:
            until = known.until_text
    if carry is None or steps is None:
        missing = "carry" if carry is None else "steps"
        raise InputError("loop", f"{missing} is not given", "carry={...} and steps=...")
    condition = None
    if optional_text("loop", "until", until, "change < 1e-6") is not None:
        condition = Source("until", str(until))
    names = optional_names("loop", "record", record) or ()
    program = StepProgram(job.written, job.sizes, job.inputs)
    checked = make_loop(program, lambda *_: "loop", steps, carry, condition, names)
    if known is None:
        return checked
    return replace(checked, stop_at_nan=known.stop_at_nan)
