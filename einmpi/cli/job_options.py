"""The job of a command line: the job file, and what flags change in it, both checked."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace

from einmpi.cli.options import CHECKPOINT_INTERVAL
from einmpi.errors import InputError, one_of
from einmpi.files.specs import Number
from einmpi.job.backends import backend_names
from einmpi.job.job import (
    SHARED_MODES,
    Job,
    loop_of,
    with_half,
    with_overlap_mode,
    with_shared,
    with_strict,
)
from einmpi.job.job_file import read_job
from einmpi.job.parameters import parse_number
from einmpi.language.half_steps import HALF_MODES
from einmpi.planner.moving.overlap import MODES
from einmpi.units import parse_seconds


def load_job(options: argparse.Namespace) -> Job:
    """Return the job file with the settings, the dtype, --strict, --half and --overlap."""
    from einmpi.files.load import describe

    settings: dict[str, Number] = {}
    for setting in options.set:
        name, _, text = setting.partition("=")
        value = parse_number(text)
        if value is None:
            problem = f"{text!r} is not a number"
            raise InputError(f"--set {setting}", problem, "--set NAME=NUMBER")
        settings[name] = value
    job = read_job(options.job, describe, settings, options.dtype, options.steps)
    if options.half is not None:
        if options.half not in HALF_MODES:
            problem = f"unknown mode {options.half!r}"
            raise InputError("--half", problem, one_of(HALF_MODES, options.half))
        job = with_half(job, options.half)
    if options.overlap is not None:
        if options.overlap not in MODES:
            problem = f"unknown mode {options.overlap!r}"
            raise InputError("--overlap", problem, one_of(MODES, options.overlap))
        job = with_overlap_mode(job, options.overlap)
    return with_strict(job, True) if options.strict else job


def checked_job(options: argparse.Namespace) -> Job:
    """Return the job to run, after everything that can be checked before the run."""
    from einmpi.compiled.outputs import check_targets

    if options.command == "run":
        _check_run_flags(options)
    job = with_run_flags(load_job(options), options)
    if job.loop is not None and options.command == "run":
        _check_loop_flags(options, job)
    elif options.command == "run":
        checkpoint_interval(options)
        if options.trace_steps is not None:
            raise InputError("--trace-steps", "the job has no loop", "a job with a [loop]")
    check_targets(job)
    return job


def with_backend(job: Job, options: argparse.Namespace) -> Job:
    """Return the job with the backend of the command line, if there is one."""
    if options.backend is None:
        return job
    if options.backend not in backend_names():
        problem = f"unknown backend {options.backend!r}"
        raise InputError("--backend", problem, one_of(backend_names(), options.backend))
    return replace(job, backend=options.backend)


def with_run_flags(job: Job, options: argparse.Namespace) -> Job:
    """Return the job with the --backend, --shared and --fast-math of the command line."""
    job = with_backend(job, options)
    if options.shared is not None:
        if options.shared not in SHARED_MODES:
            problem = f"unknown mode {options.shared!r}"
            raise InputError("--shared", problem, one_of(SHARED_MODES, options.shared))
        job = with_shared(job, options.shared)
    return replace(job, fast_math=job.fast_math or options.fast_math)


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
