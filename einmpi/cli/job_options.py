"""The job of a command line: the job file and what flags change in it; the files flags ask for."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from typing import Any

from einmpi.cli.options import CHECKPOINT_INTERVAL
from einmpi.errors import InputError, printable
from einmpi.files.atomic import check_replaceable, replace_file
from einmpi.files.reading import describe
from einmpi.files.specs import Number
from einmpi.job.job import Job, loop_of, with_settings
from einmpi.job.job_file import parse_number, read_job
from einmpi.job.settings import SETTINGS
from einmpi.planner.plan import Plan
from einmpi.process.environment import current_date
from einmpi.units import parse_seconds


def load_job(options: argparse.Namespace) -> Job:
    """Return the job file with what the command line replaces in it."""
    replaced: dict[str, Number | str] = {}
    for setting in options.set:
        name, _, text = setting.partition("=")
        number = parse_number(text)
        if number is None and not is_file_name(text):
            problem = f"{text!r} is no number and no file"
            raise InputError(f"--set {setting}", problem, "NAME=NUMBER or NAME=FILE")
        replaced[name] = text if number is None else number
    job = read_job(options.job, describe, replaced, options.dtype, options.steps)
    return with_flags(job, options)


def is_file_name(text: str) -> bool:
    """Return whether the value of --set is the name of a file rather than a number."""
    return parse_number(text) is None and ("." in text or "/" in text)


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


def check(options: argparse.Namespace) -> None:
    """Parse a job, infer shapes and inspect its files: the command `einmpi check`."""
    from einmpi.compiled.sparse_inputs import check_over_expected
    from einmpi.report.describe import describe_job

    job = load_job(options)
    check_over_expected(job)
    if not options.quiet:
        print(describe_job(job))


def checked_job(options: argparse.Namespace) -> Job:
    """Return the job to run, after everything that can be checked before the run."""
    from einmpi.compiled.outputs import check_targets

    if options.command == "run":
        _check_run_flags(options)
    job = load_job(options)
    if job.loop is not None and options.command == "run":
        _check_loop_flags(options, job)
    elif options.command == "run":
        checkpoint_interval(options, in_steps=False)
        if options.trace_steps is not None:
            raise InputError("--trace-steps", "the job has no loop", "a job with a [loop]")
    check_targets(job)
    return job


def checkpoint_interval(options: argparse.Namespace, in_steps: bool = True) -> tuple[float, int]:
    """Return the seconds and the steps between two checkpoints; one of them is 0.

    Only in a loop it may be in steps.
    """
    text = options.every or CHECKPOINT_INTERVAL
    match = re.fullmatch(r" *([0-9]{1,15}) *steps? *", text)
    if match is None or not in_steps:
        return parse_seconds(text, "--every"), 0
    steps = int(match[1])
    if steps == 0:
        raise InputError("--every", f"{text!r} requested", "1 step or more")
    return 0.0, steps


def _check_run_flags(options: argparse.Namespace) -> None:
    if options.repeat < 1:
        raise InputError("--repeat", f"{options.repeat} runs requested", "1 or more")
    checkpoint_interval(options)


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


# ---- files that flags ask for --------------------------------------------------------------------


FLAGS = ("json", "metrics", "report", "trace", "plot", "out", "save", "memory-curve")
# Values that name no file: standard output, or a curve that is only printed.
_NO_FILE = {"json": "-", "out": "-", "memory-curve": ""}


def check_files(options: argparse.Namespace, job: Job | None = None) -> None:
    """Refuse files that cannot be written, or that the command uses for something else."""
    uses = {os.path.realpath(file): use for file, use in _files_in_use(options, job)}
    for flag in FLAGS:
        file = getattr(options, flag.replace("-", "_"), None)
        if file is None or file == _NO_FILE.get(flag):
            continue
        place = f"--{flag} {file}"
        path = os.path.realpath(file)
        # Several flags may write to a device such as /dev/null.
        is_plain = os.path.isfile(file) or not os.path.exists(file)
        if path in uses and is_plain:
            raise InputError(place, f"this is {uses[path]}", "another file to write")
        if flag == "report" and is_plain and not file.lower().endswith((".html", ".htm")):
            raise InputError(place, "a report is written as HTML", "FILE.html")
        uses[path] = f"also the file of --{flag}"
        check_replaceable(file, place)


def _files_in_use(options: argparse.Namespace, job: Job | None) -> Iterable[tuple[str, str]]:
    """Yield the files that the command reads or writes anyway, and what they are."""
    if job is not None and isinstance(job.machine, str):
        yield job.machine, "the machine file of the job"
    if options.checkpoint is not None:
        yield options.checkpoint, "the folder of --checkpoint"
    if options.machine is not None:
        yield options.machine, "the file of --machine"
    if getattr(options, "platform", None) is not None:
        yield options.platform, "the file of --platform"
    if job is None:
        return
    yield job.path, "the job file"
    for source in job.inputs:
        if source.file is not None:
            yield source.file, f"the file of {source.name} in the job"
    for target in job.outputs:
        yield target.file, f"the file of {target.name} in the job"
    for history in job.histories:
        yield history.file, "the history of the job"


def print_or_write(options: argparse.Namespace, text: str, data: object) -> None:
    """Print the text, unless --quiet is given, and write the data to the file of --json.

    With `--json -` print the data instead of the text.
    """
    if options.json == "-":
        print(json.dumps(data, indent=1))
        return
    if options.json is not None:
        replace_file(options.json, [json.dumps(data, indent=1).encode(), b"\n"])
    if not options.quiet:
        print(text)


def write_job_report(
    options: argparse.Namespace,
    job: Job,
    plan: Plan,
    details: Mapping[str, str] | None = None,
    **more: Any,
) -> None:
    """Write the page of --report; `details` are lines below its title."""
    from einmpi.report.html import write_report

    title = printable(job.title or job.source.name)
    if details is None:
        sizes = "  ".join(f"{name}={value}" for name, value in job.sizes.items())
        details = report_details({"job": job.path}, sizes)
    program = "\n\n".join(part.source.text.strip("\n") for part in job.one_after_another())
    write_report(options.report, plan, program=program, title=title, details=details, **more)


def report_details(subject: Mapping[str, str], sizes: str) -> dict[str, str]:
    """Return the lines below the title of a report: what it is about, when, where, which sizes."""
    details = {**subject, "date": current_date(), "host": platform.node()}
    if sizes:
        details["sizes"] = sizes
    return details
