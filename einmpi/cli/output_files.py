"""The files that flags of a command ask for: each is one of its own and can be written. What is printed, as JSON."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from einmpi.errors import InputError

if TYPE_CHECKING:
    from einmpi.job.job import Job

FLAGS = ("json", "report", "trace", "plot", "out", "save")


def check_files(options: argparse.Namespace, job: Job | None = None) -> None:
    """Refuse files that cannot be written, or that would take the place of one that the command reads or writes."""
    from einmpi.files.replace import check_replaceable

    taken = {os.path.realpath(file): what for file, what in _files_in_use(options, job)}
    for flag in FLAGS:
        file = getattr(options, flag, None)
        if file is None or (flag in ("json", "out") and file == "-"):
            continue
        place, path = f"--{flag} {file}", os.path.realpath(file)
        if path in taken and (
            os.path.isfile(file) or not os.path.exists(file)
        ):  # /dev/null has room for all
            raise InputError(place, f"is {taken[path]}", "another file to write")
        taken[path] = f"the file of --{flag} too"
        check_replaceable(file, place)


def _files_in_use(options: argparse.Namespace, job: Job | None) -> Iterable[tuple[str, str]]:
    if options.checkpoint is not None:
        yield options.checkpoint, "the folder of --checkpoint"
    if options.machine is not None:
        yield options.machine, "the file of --machine"
    if job is None:
        return
    yield job.path, "the job file"
    if job.machine is not None:
        yield job.machine, "the machine file of the job"
    named = [(spec.file, spec.name) for spec in job.inputs if spec.file is not None]
    named += [(spec.file, spec.name) for spec in job.outputs]
    yield from ((file, f"the file of {name} in the job") for file, name in named)


def print_or_write(options: argparse.Namespace, text: str, data: object) -> None:
    """Print the text, unless it is to be quiet, and write the same as JSON; `--json -` prints that instead."""
    from einmpi.files.replace import replace_file

    if options.json == "-":
        print(json.dumps(data, indent=1))
        return
    if options.json is not None:
        replace_file(options.json, [json.dumps(data, indent=1).encode(), b"\n"])
    if not options.quiet:
        print(text)
