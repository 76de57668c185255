"""The job of a command line: the job file, and what flags change in it, both checked."""

from __future__ import annotations

import argparse
import re
from typing import Any

from einmpi.cli.options import CHECKPOINT_INTERVAL
from einmpi.errors import InputError
from einmpi.files.specs import Number
from einmpi.job.job import Job, loop_of, with_settings
from einmpi.job.job_file import parse_number, read_job
from einmpi.job.settings import SETTINGS
from einmpi.units import parse_seconds


def load_job(options: argparse.Namespace) -> Job:
    """Return the job file with the numbers, the dtype and the settings of the command line."""
    from einmpi.files.load import describe

    numbers: dict[str, Number] = {}
    for setting in options.set:
        name, _, text = setting.partition("=")
        value = parse_number(text)
        if value is None:
            problem = f"{text!r} is not a number"
            raise InputError(f"--set {setting}", problem, "--set NAME=NUMBER")
        numbers[name] = value
    job = read_job(options.job, describe, numbers, options.dtype, options.steps)
    return with_flags(job, options)


def with_flags(job: Job, options: argparse.Namespace) -> Job:
    """Return the job with the settings that flags give."""
    return with_settings(job, given_settings(options), as_flags=True)


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings among the options of a command, without those that are not given."""
    found = {}
    for name in SETTINGS:
        value = getattr(options, name, None)
        if value not in (None, False):  # a switch that is not given
            found[name] = value
    return found


def checked_job(options: argparse.Namespace) -> Job:
    """Return the job to run, after everything that can be checked before the run."""
    from einmpi.compiled.outputs import check_targets

    if options.command == "run":
        _check_run_flags(options)
    job = load_job(options)
    if job.loop is not None and options.command == "run":
        _check_loop_flags(options, job)
    elif options.command == "run":
        checkpoint_interval(options)
        if options.trace_steps is not None:
            raise InputError("--trace-steps", "the job has no loop", "a job with a [loop]")
    check_targets(job)
    return job


def checkpoint_interval(options: argparse.Namespace) -> float:
    """Return the seconds between two checkpoints."""
    return parse_seconds(options.every or CHECKPOINT_INTERVAL, "--every")


def loop_interval(options: argparse.Namespace) -> tuple[float, int]:
    """Return the seconds and the steps between two checkpoints of a loop; one of them is 0."""
    text = options.every or CHECKPOINT_INTERVAL
    match = re.fullmatch(r" *([0-9]{1,15}) *steps? *", text)
    if match is None:
        return parse_seconds(text, "--every"), 0
    steps = int(match[1])
    if steps == 0:
        raise InputError("--every", f"{text!r} requested", "1 step or more")
    return 0.0, steps


def _check_run_flags(options: argparse.Namespace) -> None:
    if options.repeat < 1:
        raise InputError("--repeat", f"{options.repeat} runs requested", "1 or more")
    loop_interval(options)


def _check_loop_flags(options: argparse.Namespace, job: Job) -> None:
    """Refuse flags that a run with a loop does not have."""
    if options.repeat > 1:
        raise InputError("--repeat", "the job has a loop", "--steps to run more steps")
    chosen = traced_steps(options)
    most = max(loop_of(each).steps for each in job.one_after_another())
    if chosen is not None and chosen.start >= most:
        problem = f"{options.trace_steps!r} requested"
        raise InputError("--trace-steps", problem, f"a step from 0 to {most - 1}")


def traced_steps(options: argparse.Namespace) -> range | None:
    """Return the steps of a loop that --trace-steps asks for: 7 or 100:103, as in a slice."""
    text = options.trace_steps
    if text is None:
        return None
    match = re.fullmatch(r" *([0-9]{1,15}) *(?:: *([0-9]{1,15}) *)?", text)
    if match is None:
        raise InputError("--trace-steps", f"{text!r} requested", "a step, or FIRST:END")
    first = int(match[1])
    end = first + 1 if match[2] is None else int(match[2])
    if end <= first:
        raise InputError("--trace-steps", f"{text!r} has no step", "FIRST below END")
    return range(first, end)
