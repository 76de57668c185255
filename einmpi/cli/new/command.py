"""The command `einmpi new`: write a job file that can be run, and then edited."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from einmpi.errors import InputError, printable

if TYPE_CHECKING:
    from einmpi.comm.base import Comm


def new(options: argparse.Namespace, comm: Comm) -> int:
    """Write a job file: for the tensors of a file, or from what the user answers."""
    from einmpi.comm.agreement import on_first_rank

    data_file: str | None = vars(options)["from"]  # the word is a keyword of Python
    on_first_rank(comm, lambda: _write_job(options.job, data_file, options.quiet))
    return 0


def _write_job(job_file: str, data_file: str | None, quiet: bool) -> None:
    from einmpi.cli.new.from_file import job_of_file
    from einmpi.cli.new.questions import job_from_answers
    from einmpi.files.load import describe
    from einmpi.files.replace import check_replaceable, replace_file
    from einmpi.job.job_file import read_job

    if not job_file.endswith(".toml"):
        raise InputError(job_file, "this is not the name of a job file", "JOB.toml")
    if os.path.lexists(job_file):
        raise InputError(job_file, "this file exists already", "the name of a new file")
    check_replaceable(job_file, job_file)
    title = printable(os.path.basename(job_file).removesuffix(".toml"))
    skipped: list[str] = []
    if data_file is None:
        job = job_from_answers(title)
    else:
        job, skipped = job_of_file(job_file, data_file, title)
    try:
        content = str(job).encode()
    except UnicodeEncodeError:
        problem = "a name for the job file is not valid UTF-8"
        raise InputError(job_file, problem, "names that a job file can contain") from None
    replace_file(job_file, [content])
    if not quiet:
        for line in skipped:
            print(line)
        print(f"wrote {job_file}; next: einmpi check {job_file}")
    read_job(job_file, describe)
