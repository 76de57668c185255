"""Repeat a program: tensors of one step are inputs of the next."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from einmpi.api.planning import check_job, options_of
from einmpi.arguments import named_values
from einmpi.comm.agreement import together
from einmpi.job.job import Job
from einmpi.language.syntax import Source

if TYPE_CHECKING:
    from einmpi.loops.running import LoopResult


def loop(
    job: Job,
    inputs: Mapping[str, Any] | None = None,
    comm: Any = None,
    *,
    carry: Mapping[str, str],
    steps: int,
    until: str | None = None,
    record: Sequence[str] = (),
    strategy: str | None = None,
    memory: int | str | None = None,
    pin: Mapping[str, Sequence[int]] | None = None,
    machine: str | os.PathLike[str] | None = None,
) -> LoopResult:
    """Run the program of a job step after step. All ranks call it."""
    from einmpi.comm.programs import comm_of_program
    from einmpi.job.loop import Loop, StepProgram, make_loop
    from einmpi.loops.running import LoopRun
    from einmpi.planner.plan import Options

    own_comm = comm_of_program(comm)

    def check() -> tuple[Loop, Options]:
        check_job("loop", job)
        condition = None if until is None else Source("until", until)
        program = StepProgram(job.written, job.sizes, job.inputs)
        checked = make_loop(program, lambda *_: "loop", steps, carry, condition, record)
        return checked, options_of(job, strategy, memory, pin, machine)

    checked, options = together(own_comm, check)
    given = named_values("inputs", inputs)
    run = LoopRun(job, checked, own_comm, options)
    run.prepare(given)
    return run.run()
