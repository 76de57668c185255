"""`einmpi sbatch JOB --nodes 4 --ntasks-per-node 16`: plans the job and writes a script that runs it under Slurm."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from einmpi.cli.job_options import chosen_backend, load_job, seconds_between
from einmpi.cli.output_files import check_files
from einmpi.errors import InputError
from einmpi.units import counted, parse_seconds
from einmpi.version import __version__

if TYPE_CHECKING:
    from einmpi.cli.sbatch.script import Script
    from einmpi.comm.base import Comm

MAX_SECONDS = 366 * 86400
_FIELDS = {
    1: (60,),
    2: (60, 1),
    3: (3600, 60, 1),
}  # seconds of the numbers of 90, 90:00 and 1:30:00
_AFTER_DAYS = (3600, 60, 1)


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--nodes", type=int, required=True, metavar="N", help="that the ranks lie on"
    )
    command.add_argument(
        "--ntasks-per-node", type=int, required=True, metavar="M", help="ranks on each node"
    )
    command.add_argument(
        "--cpus-per-task", type=int, default=1, metavar="C", help="threads a rank; 1 by default"
    )
    command.add_argument(
        "--time", metavar="LIMIT", help="90min, 2:30:00, 1-00:00:00; else from the prediction"
    )
    command.add_argument(
        "--out", metavar="FILE", help="write the script here; - or nothing: print it"
    )


def sbatch(options: argparse.Namespace, comm: Comm) -> int:
    """write a Slurm script for a job, with memory and time from its plan"""
    from einmpi.comm.base import on_first_rank

    on_first_rank(comm, lambda: _write(options, str(make_script(options))))
    return 0


def make_script(options: argparse.Namespace) -> Script:
    """The script that was asked for."""
    from einmpi.api import plan as make_plan
    from einmpi.cli.sbatch.estimate import estimate
    from einmpi.cli.sbatch.script import Script

    for flag, count in (
        ("--nodes", options.nodes),
        ("--ntasks-per-node", options.ntasks_per_node),
        ("--cpus-per-task", options.cpus_per_task),
    ):
        if count < 1:
            raise InputError(flag, f"{count}", "1 or more")
    limit = None if options.time is None else parse_limit(options.time)
    if options.checkpoint is None and options.every is not None:
        raise InputError("--every", "there is no folder", "--checkpoint DIR with it")
    seconds_between(options)
    job = chosen_backend(load_job(options), options)
    check_files(options, job)
    ranks = options.nodes * options.ntasks_per_node
    plan = make_plan(
        job,
        ranks,
        strategy=options.strategy,
        memory=options.memory,
        nodes=options.nodes,
        machine=options.machine,
    )
    wanted = estimate(plan, job.backend, options.cpus_per_task)
    if (
        limit is None and wanted.seconds > MAX_SECONDS
    ):  # Slurm takes such numbers, and makes nonsense of them
        raise InputError(
            options.job,
            f"takes {wanted.seconds // 86400:,} days on {_ranks(options)}, by the plan",
            "--time LIMIT, more ranks or smaller sizes",
        )
    family, library = _mpi()
    activate = Path(sys.prefix, "bin", "activate")
    notes = [
        f"{job.title} ({options.job}), {_ranks(options)}; written by einmpi {__version__}.",
        *wanted.why,
    ]
    if limit is not None:
        notes.append(
            f"The time limit was given; by the above it would be {wanted.seconds // 60 + 1} minutes."
        )
    return Script(
        Path(options.job).stem,
        notes,
        options.nodes,
        options.ntasks_per_node,
        options.cpus_per_task,
        wanted.memory,
        limit or wanted.seconds,
        family,
        library,
        _words(options),
        str(activate) if sys.prefix != sys.base_prefix and activate.exists() else None,
        job.backend == "cupy",
        options.checkpoint is not None,
    )


def parse_limit(text: str) -> int:
    """Seconds of a time as Slurm writes it, or as einmpi does elsewhere."""
    try:
        if re.fullmatch(r"[0-9]{1,6}(:[0-9]{1,6}){0,2}", text):
            numbers = [int(number) for number in text.split(":")]
            seconds = sum(a * b for a, b in zip(numbers, _FIELDS[len(numbers)], strict=True))
        elif found := re.fullmatch(r"([0-9]{1,6})-([0-9]{1,6}(?::[0-9]{1,6}){0,2})", text):
            numbers = [int(number) for number in found[2].split(":")]
            seconds = 86400 * int(found[1]) + sum(
                a * b for a, b in zip(numbers, _AFTER_DAYS, strict=False)
            )
        else:
            seconds = int(parse_seconds(text, "--time"))
    except InputError:
        raise InputError(
            "--time", f"{text!r} is not a time", "90, 2:30:00, 1-00:00:00, 90min or 2h"
        ) from None
    if not 60 <= seconds <= MAX_SECONDS:
        raise InputError("--time", f"{seconds} seconds", "from 1 minute to a year")
    return seconds


def _words(options: argparse.Namespace) -> list[str]:
    """The command line of the run. Paths are absolute: the script may be submitted from anywhere."""
    words = [os.path.abspath(options.job)]
    words += [word for setting in options.set for word in ("--set", setting)]
    for flag in ("dtype", "strategy", "memory", "backend", "every"):
        if getattr(options, flag) is not None:
            words += [f"--{flag}", getattr(options, flag)]
    for flag in ("machine", "checkpoint"):
        if getattr(options, flag) is not None:
            words += [f"--{flag}", os.path.abspath(getattr(options, flag))]
    return [
        *words,
        *["--fast-math"] * options.fast_math,
        *["--resume"] * (options.checkpoint is not None),
    ]


def _ranks(options: argparse.Namespace) -> str:
    return f"{counted(options.nodes * options.ntasks_per_node, 'rank')} on {counted(options.nodes, 'node')}"


def _mpi() -> tuple[str, str]:
    """The family of the MPI that mpi4py finds, and its name; in another process, because a library may crash."""
    from einmpi.cli.doctor.finding import answer_of, start
    from einmpi.cli.launch.mpirun import family_in

    answer = answer_of(start([sys.executable, "-m", "einmpi.cli.versions", "mpi"]), 60)
    if "error" in answer:
        return "other", answer["error"]
    return family_in(answer["library"]), answer["library"]


def _write(options: argparse.Namespace, text: str) -> None:
    from einmpi.files.replace import replace_file

    # Names of files may have bytes that are no text; they must come out as they went in.
    data = text.encode(errors="surrogateescape")
    if options.out in (None, "-"):
        sys.stdout.buffer.write(data)
        return
    replace_file(options.out, [data])
    if not options.quiet:
        print(f"sbatch {shlex.quote(options.out)}")
