"""The command `einmpi sbatch`: a script for a scheduler, with memory and time from the plan."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from einmpi import api
from einmpi.cli.doctor import read_answer, start_process
from einmpi.cli.job_options import check_files, checkpoint_interval, is_file_name, load_job
from einmpi.cli.launcher import family_in
from einmpi.cli.scripts import SCHEDULERS, Script
from einmpi.errors import InputError
from einmpi.files.atomic import replace_file
from einmpi.graph.eingraph import Vertex
from einmpi.job.job import Job
from einmpi.job.settings import SETTINGS
from einmpi.planner.plan import Plan
from einmpi.process.environment import python_command
from einmpi.units import counted, parse_seconds, show_bytes
from einmpi.version import __version__

# Names of a site, separated by commas; features also have operators.
_NAMES = r"[A-Za-z0-9_.][A-Za-z0-9_.,:@+-]{0,199}"
_CONSTRAINT = r"[A-Za-z0-9_.(\[][A-Za-z0-9_.,:@+&|*()\[\]-]{0,199}"


def sbatch(options: argparse.Namespace) -> None:
    """Write a script for a scheduler, with memory and time from the plan of a job."""
    # File names may contain bytes that are not text; they must be written unchanged.
    data = str(make_script(options)).encode(errors="surrogateescape")
    if options.out in (None, "-"):
        sys.stdout.buffer.write(data)
        return
    replace_file(options.out, [data])
    if not options.quiet:
        print(f"{SCHEDULERS[options.format].submit} {shlex.quote(options.out)}")


def make_script(options: argparse.Namespace) -> Script:
    """Return the script that the command line asks for."""
    limit = _check_flags(options)
    job = load_job(options)
    checkpoint_interval(options, in_steps=job.loop is not None)
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
        options.format,
        options.image,
    )


def _check_flags(options: argparse.Namespace) -> int | None:
    """Check the flags and return the time limit in seconds, if there is one."""
    for flag in ("nodes", "ntasks_per_node", "cpus_per_task"):
        count = getattr(options, flag)
        if count < 1:
            raise InputError(f"--{flag.replace('_', '-')}", f"{count} requested", "1 or more")
    if options.image is not None and options.format != "mpijob":
        title = SCHEDULERS[options.format].title
        raise InputError("--image", f"a script for {title} has no containers", "--format mpijob")
    limit = None if options.time is None else parse_limit(options.time)
    checkpoint_interval(options)
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
    scheduler = SCHEDULERS[options.format]
    if found[1] and not scheduler.has_gpu_types:
        problem = f"{scheduler.title} knows no types of GPUs"
        raise InputError("--gpus", problem, f"only a number: {found[2]}")
    gpus = int(found[2])
    if gpus % options.nodes:
        problem = f"{counted(gpus, 'GPU')} on {counted(options.nodes, 'node')}"
        raise InputError("--gpus", problem, "the same number on each node")
    prefix = f"{found[1]}:" if found[1] else ""
    return f"{prefix}{gpus // options.nodes}"


def _site_options(options: argparse.Namespace) -> dict[str, str]:
    """Return the names that a site defines, such as partitions, which its scheduler checks."""
    scheduler = SCHEDULERS[options.format]
    found = {}
    for flag in ("partition", "account", "qos", "constraint"):
        value = getattr(options, flag)
        if value is None:
            continue
        if flag not in scheduler.site_options:
            known = ", ".join(f"--{name}" for name in scheduler.site_options)
            raise InputError(f"--{flag}", f"{scheduler.title} has none", f"only {known}")
        # The script has them on lines where blanks, quotes, # and \ have a meaning.
        letters = _CONSTRAINT if flag == "constraint" else _NAMES
        if re.fullmatch(letters, value) is None:
            example = "a100&ib" if flag == "constraint" else "main"
            expected = f"a value as {scheduler.title} writes it, such as {example}"
            problem = f"{value!r:.60} is not a name of {scheduler.title}"
            raise InputError(f"--{flag}", problem, expected)
        found[flag] = value
    return found


def _command_words(options: argparse.Namespace) -> list[str]:
    """Return the arguments of the run. Paths are absolute: a script may be submitted anywhere."""
    words = [os.path.abspath(options.job)]
    for setting in options.set:
        name, _, value = setting.partition("=")
        shown = os.path.abspath(value) if is_file_name(value) else value
        words += ["--set", f"{name}={shown}"]
    for name in ("dtype", "steps", *SETTINGS, "every", "checkpoint"):
        value = getattr(options, name, None)
        if value in (None, False):
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
    process = start_process([*python_command(), "-m", "einmpi.cli.versions", "mpi"])
    answer = read_answer(process, 60)
    if "error" in answer:
        return "other", answer["error"]
    return family_in(answer["library"]), answer["library"]


# ---- the time limit ------------------------------------------------------------------------------


MAX_SECONDS = 366 * 86400
# As Slurm writes it: 90 (minutes), 90:00 and 1:30:00, and after days 1-2, 1-2:30 and 1-2:30:00.
_LIMIT = r"(?:([0-9]{1,6})-)?([0-9]{1,6}(?::[0-9]{1,6}){0,2})"


def parse_limit(text: str) -> int:
    """Return the seconds of a time limit."""
    found = re.fullmatch(_LIMIT, text)
    if found is not None:
        days = int(found[1] or 0)
        numbers = [int(number) for number in found[2].split(":")]
        begins_with_hours = found[1] is not None or len(numbers) == 3
        units = (3600, 60, 1) if begins_with_hours else (60, 1)
        seconds = 86400 * days
        for number, unit in zip(numbers, units, strict=False):
            seconds += number * unit
    else:
        try:
            seconds = int(parse_seconds(text, "--time"))
        except InputError:
            problem = f"{text!r} is not a time"
            expected = "a time such as 90, 2:30:00, 1-00:00:00, 90min or 2h"
            raise InputError("--time", problem, expected) from None
    if not 60 <= seconds <= MAX_SECONDS:
        raise InputError("--time", counted(seconds, "second"), "a time from 1 minute to 1 year")
    return seconds


# ---- memory and time: too much beats too little --------------------------------------------------


MIB = 2**20
# Bytes of a rank without its tensors: Python, MPI, compiled kernels and their workspace, files.
OVERHEAD_BYTES = 512 * MIB
START_SECONDS = 300  # many ranks import from a slow file system, and kernels are compiled
MARGIN = 2  # a job is killed at its time limit: request twice the prediction
# Assumed speeds without a measured machine, slow on purpose: operations per second of a core or of
# a GPU, and bytes per second of a file system or a network.
OPERATIONS_PER_SECOND = {"numpy": 10**9, "cupy": 10**12}
BYTES_PER_SECOND = 10**8
_SPEED = f"{BYTES_PER_SECOND // 10**6} MB/s"
# Each rank gets all of the sparse inputs and sorts them, before their plan begins: bytes for keys
# and orders, and seconds, for each stored element; and how often it holds the values.
PATTERN_BYTES = 80
PATTERN_SECONDS = 5e-6
PATTERN_COPIES = 3


@dataclass(frozen=True)
class Estimate:
    """The needs of a run."""

    memory_mib: int  # per node
    seconds: int  # of the whole run
    explanation: Sequence[str]  # lines for people


def estimate(plan: Plan, backend: str, threads: int) -> Estimate:
    """Estimate memory and time of a run with this many threads per rank."""
    ranks_per_node = plan.ranks // plan.nodes
    peak = _peak(plan, backend)
    sparse_bytes, sparse_seconds = _for_patterns(plan)
    memory_mib = ceil(ranks_per_node * (peak + OVERHEAD_BYTES + sparse_bytes) / MIB)
    sparse_text = f"{show_bytes(sparse_bytes)} to read sparse inputs and " if sparse_bytes else ""
    memory_text = (
        f"Memory: {ranks_per_node} × {show_bytes(peak)} for the tensors of a rank, by the plan, "
        f"each plus {sparse_text}{OVERHEAD_BYTES // MIB} MiB for Python, MPI, kernels and files."
    )
    run_seconds, time_text = _run_seconds(plan, backend, threads)
    if sparse_seconds:
        time_text.append(f"sparse inputs sorted on each rank: {_show(sparse_seconds)};")
        run_seconds += sparse_seconds
    file_seconds = _bytes_of_files(plan) / (plan.nodes * BYTES_PER_SECOND)
    time_text.append(
        f"inputs and outputs at {_SPEED} per node: {_show(file_seconds)}; "
        f"{MARGIN} times that, plus {START_SECONDS // 60} minutes for the start."
    )
    seconds = ceil(MARGIN * (run_seconds + file_seconds)) + START_SECONDS
    return Estimate(memory_mib, seconds, [memory_text, *time_text])


def _peak(plan: Plan, backend: str) -> int:
    """Return the bytes that the tensors of a rank take in host memory."""
    peak = plan.peak_in_all
    if backend != "numpy":
        ahead = [0]  # in host memory, which the plan does not count
        for each in plan.loops:
            if each.loop is not None and each.loop.batches is not None:
                ahead.append(each.loop.batches.bytes_ahead)
        peak += max(ahead)
    return peak


def _for_patterns(plan: Plan) -> tuple[int, float]:
    """Return the bytes and the seconds that a rank needs to read and sort sparse inputs."""
    found = {}
    for each in plan.loops or (plan,):
        for vertex in each.graph.inputs:
            if vertex.stored is not None:
                found[vertex.name] = vertex
    nbytes = 0
    seconds = 0.0
    for vertex in found.values():
        assert vertex.stored is not None
        nbytes += PATTERN_COPIES * vertex.nbytes + PATTERN_BYTES * vertex.stored.elements
        seconds += PATTERN_SECONDS * vertex.stored.elements
    return nbytes, seconds


def _bytes_of_files(plan: Plan) -> int:
    """Return the bytes of all inputs and outputs, as if all were in files."""
    tensors: dict[str, Vertex] = {}
    bytes_of_batches = 0  # of all but the first ones
    for each in plan.loops or (plan,):
        for name in (*(vertex.name for vertex in each.graph.inputs), *each.graph.outputs):
            tensors[name] = each.graph[name]
        if each.loop is not None and each.loop.batches is not None:
            bytes_of_batches += (each.loop.steps - 1) * each.loop.batches.nbytes
    return sum(vertex.nbytes for vertex in tensors.values()) + bytes_of_batches


def _run_seconds(plan: Plan, backend: str, threads: int) -> tuple[float, list[str]]:
    """Return the seconds without files, and lines that say what they are based on."""
    cost = plan.cost_in_all
    if cost.seconds is not None and plan.machine is not None:
        seconds = cost.seconds
        source = plan.machine.source
        return seconds, [f"Time: {_show(seconds)} by the plan, from measured times: {source};"]
    per_second = OPERATIONS_PER_SECOND[backend]
    if backend == "numpy":
        per_second *= threads
    computing = cost.operations / (per_second * plan.mesh.ranks)
    moving = cost.nbytes / (BYTES_PER_SECOND * plan.mesh.ranks)
    return computing + moving, [
        "Time: assumes a slow machine; `einmpi calibrate` measures yours, for --machine:",
        f"{per_second / 1e9:g} Gop/s per rank: {_show(computing)}; "
        f"{_SPEED} to each rank: {_show(moving)};",
    ]


def _show(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds / 60:.0f} min"
    if seconds >= 1:
        return f"{seconds:.0f} s"
    return "less than 1 s"
