"""The job that a command line asks for: the job file and what the options change, both checked."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace

from einmpi.errors import InputError, one_of
from einmpi.job.job import BACKENDS, Job, read_job
from einmpi.units import parse_seconds

EVERY = "10min"  # between two checkpoints


def load_job(options: argparse.Namespace) -> Job:
    """The job file with the sizes and the dtype of the command line."""
    from einmpi.files.load import describe

    sizes: dict[str, int] = {}
    for setting in options.set:
        name, _, value = setting.partition("=")
        if re.fullmatch(r"-?[0-9]{1,20}", value) is None:
            raise InputError(
                f"--set {setting}", f"{value!r} is not a whole number", "--set NAME=NUMBER"
            )
        sizes[name] = int(value)
    return read_job(options.job, describe, sizes, options.dtype)


def checked_job(options: argparse.Namespace) -> Job:
    """The job of a run, when all that can be checked before it is as it must be."""
    from einmpi.compiled.outputs import check_targets

    if options.command == "run":
        _check_flags(options)
    job = chosen_backend(load_job(options), options)
    check_targets(job)
    return replace(job, fast_math=job.fast_math or options.fast_math)


def chosen_backend(job: Job, options: argparse.Namespace) -> Job:
    """The job, with the backend of the command line if it has one."""
    if options.backend is None:
        return job
    if options.backend not in BACKENDS:
        raise InputError(
            "--backend", f"unknown backend {options.backend!r}", one_of(BACKENDS, options.backend)
        )
    return replace(job, backend=options.backend)


def _check_flags(options: argparse.Namespace) -> None:
    if options.repeat < 1:
        raise InputError("--repeat", f"{options.repeat} times", "1 or more")
    if options.checkpoint is None and (options.resume or options.every):
        raise InputError(
            "--resume" if options.resume else "--every",
            "there is no folder",
            "--checkpoint DIR with it",
        )
    if options.checkpoint is not None and options.repeat > 1:
        raise InputError(
            "--checkpoint", f"does not go with --repeat {options.repeat}", "one of the two"
        )
    seconds_between(options)


def seconds_between(options: argparse.Namespace) -> float:
    """Of two checkpoints."""
    return parse_seconds(options.every or EVERY, "--every")
