"""The command `einmpi sbatch`: plan a job and write a script that runs it under Slurm."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from einmpi.cli.job_options import checkpoint_interval, given_settings, load_job, loop_interval
from einmpi.cli.output_files import check_files
from einmpi.cli.sbatch.time_limit import MAX_SECONDS, parse_limit
from einmpi.errors import InputError
from einmpi.process.environment import python_command
from einmpi.units import counted
from einmpi.version import __version__

if TYPE_CHECKING:
    from einmpi.cli.sbatch.script import Script
    from einmpi.comm.base import Comm
    from einmpi.job.job import Job


# Names of a site, separated by commas; features also have operators.
_NAMES = r"[A-Za-z0-9_.][A-Za-z0-9_.,:@+-]{0,199}"
_CONSTRAINT = r"[A-Za-z0-9_.(\[][A-Za-z0-9_.,:@+&|*()\[\]-]{0,199}"


def sbatch(options: argparse.Namespace, comm: Comm) -> int:
    """Write a Slurm script for a job, with memory and time from its plan."""
    from einmpi.comm.agreement import on_first_rank

    on_first_rank(comm, lambda: _write(options, str(make_script(options))))
    return 0


def make_script(options: argparse.Namespace) -> Script:
    """Return the script that the command line asks for."""
    from einmpi import api
    from einmpi.cli.sbatch.estimate import estimate
    from einmpi.cli.sbatch.script import Script

    limit = _check_flags(options)
    job = load_job(options)
    if job.loop is None:
        checkpoint_interval(options)
    check_files(options, job)
    ranks = options.nodes * options.ntasks_per_node
    ranks_text = f"{counted(ranks, 'rank')} on {counted(options.nodes, 'node')}"
    plan = api.plan(job, ranks, nodes=options.nodes)
    needs = estimate(plan, job.backend, options.cpus_per_task)
    if limit is None and needs.seconds > MAX_SECONDS:  # Slurm misreads such numbers
        problem = f"the plan predicts {needs.seconds // 86400:,} days on {ranks_text}"
        hint = "use --time LIMIT, more ranks or smaller sizes"
        raise InputError(options.job, problem, hint=hint)
    notes = [
        f"{job.title} ({options.job}), {ranks_text}; written by einmpi {__version__}.",
        *needs.explanation,
    ]
    if limit is not None:
        minutes = needs.seconds // 60 + 1
        notes.append(f"The time limit was given; by the above it would be {minutes} minutes.")
    family, library = _mpi()
    return Script(
        Path(options.job).stem,
        notes,
        options.nodes,
        options.ntasks_per_node,
        options.cpus_per_task,
        needs.memory_mib,
        limit or needs.seconds,
        family,
        library,
        _command_words(options),
        _activate_file(),
        _gpus_per_node(options, job),
        options.checkpoint is not None,
        _site_options(options),
    )


def _check_flags(options: argparse.Namespace) -> int | None:
    """Check the flags and return the time limit in seconds, if there is one."""
    for flag in ("nodes", "ntasks_per_node", "cpus_per_task"):
        count = getattr(options, flag)
        if count < 1:
            raise InputError(f"--{flag.replace('_', '-')}", f"{count} requested", "1 or more")
    limit = None if options.time is None else parse_limit(options.time)
    loop_interval(options)
    return limit


def _gpus_per_node(options: argparse.Namespace, job: Job) -> str:
    """Return what to request for each node, such as 4 or a100:4; empty without GPUs."""
    if options.gpus is None:
        return str(options.ntasks_per_node) if job.backend == "cupy" else ""
    found = re.fullmatch(r"(?:([A-Za-z0-9_.-]+):)?([1-9][0-9]{0,5})", options.gpus)
    if found is None:
        problem = f"{options.gpus!r:.60} is not a number of GPUs"
        raise InputError("--gpus", problem, "a number such as 8, or a type and a number: a100:8")
    if job.backend != "cupy":
        problem = f"the backend {job.backend} uses no GPU"
        raise InputError("--gpus", problem, "--backend cupy")
    gpus = int(found[2])
    if gpus % options.nodes:
        problem = f"{counted(gpus, 'GPU')} on {counted(options.nodes, 'node')}"
        raise InputError("--gpus", problem, "the same number on each node")
    prefix = f"{found[1]}:" if found[1] else ""
    return f"{prefix}{gpus // options.nodes}"


def _site_options(options: argparse.Namespace) -> dict[str, str]:
    """Return the names that a site defines, such as partitions, which Slurm itself checks."""
    found = {}
    for flag in ("partition", "account", "qos", "constraint"):
        value = getattr(options, flag)
        if value is None:
            continue
        # The script has them on #SBATCH lines, where blanks, quotes, # and \ have a meaning.
        letters = _CONSTRAINT if flag == "constraint" else _NAMES
        if re.fullmatch(letters, value) is None:
            example = "a100&ib" if flag == "constraint" else "main"
            expected = f"a value as Slurm writes it, such as {example}"
            raise InputError(f"--{flag}", f"{value!r:.60} is not a name of Slurm", expected)
        found[flag] = value
    return found


def _command_words(options: argparse.Namespace) -> list[str]:
    """Return the arguments of the run. Paths are absolute: a script may be submitted anywhere."""
    words = [os.path.abspath(options.job)]
    for setting in options.set:
        words += ["--set", setting]
    given = given_settings(options)
    for name in ("dtype", "steps", "checkpoint", "every"):
        given[name] = getattr(options, name)
    for name, value in given.items():
        if value is None:
            continue
        words.append("--" + name.replace("_", "-"))
        if name in ("machine", "checkpoint"):
            words.append(os.path.abspath(value))
        elif value is not True:
            words.append(str(value))
    if options.checkpoint is not None:
        words.append("--resume")
    return words


def _activate_file() -> str | None:
    """Return the file that activates the virtual environment of this Python, if it is one."""
    file = Path(sys.prefix, "bin", "activate")
    if sys.prefix == sys.base_prefix or not file.exists():
        return None
    return str(file)


def _mpi() -> tuple[str, str]:
    """Return the family and the name of mpi4py's MPI library, or why there is none.

    Another process finds out, because loading a library may crash.
    """
    from einmpi.cli.doctor.finding import read_answer, start_process
    from einmpi.cli.launch.mpirun import family_in

    process = start_process([*python_command(), "-m", "einmpi.cli.versions", "mpi"])
    answer = read_answer(process, 60)
    if "error" in answer:
        return "other", answer["error"]
    return family_in(answer["library"]), answer["library"]


def _write(options: argparse.Namespace, text: str) -> None:
    from einmpi.files.replace import replace_file

    # File names may contain bytes that are not text; they must be written unchanged.
    data = text.encode(errors="surrogateescape")
    if options.out in (None, "-"):
        sys.stdout.buffer.write(data)
        return
    replace_file(options.out, [data])
    if not options.quiet:
        print(f"sbatch {shlex.quote(options.out)}")
