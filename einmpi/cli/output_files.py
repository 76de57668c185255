"""The files that flags ask for: each can be written and is no other file of the command."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from einmpi.errors import InputError

if TYPE_CHECKING:
    from einmpi.job.job import Job

FLAGS = ("json", "report", "trace", "plot", "out", "save", "memory-curve")
# Values that name no file: standard output, or a curve that is only printed.
_NO_FILE = {"json": "-", "out": "-", "memory-curve": ""}


def check_files(options: argparse.Namespace, job: Job | None = None) -> None:
    """Refuse files that cannot be written, or that the command uses for something else."""
    from einmpi.files.replace import check_replaceable

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
    from einmpi.files.replace import replace_file

    if options.json == "-":
        print(json.dumps(data, indent=1))
        return
    if options.json is not None:
        replace_file(options.json, [json.dumps(data, indent=1).encode(), b"\n"])
    if not options.quiet:
        print(text)
