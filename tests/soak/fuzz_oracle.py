"""Run an input of the fuzzer in a process of its own, and judge what it did."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .fuzz_inputs import FuzzInput

CPU_SECONDS = 20  # that a command may take; it takes some milliseconds
WALL_SECONDS = 90.0  # after which it hangs, also on a machine with other work
MEMORY_BYTES = 512 * 2**20  # that a command may take beyond what its process has at the start
# Only jobs below these limits are run: others are sound and large.
MOST_OPERATIONS = 10**6
MOST_TENSOR_BYTES = 2**24
MOST_LINE_CHARACTERS = 3000

_STATUS_OF_EXCEPTION = 70  # an exception left the entry point
STATUS_OF_LARGE_JOB = 71  # the job is sound and would take long


@dataclass(frozen=True)
class Outcome:
    """How a command ended. A negative status is the number of a signal, as in subprocess."""

    status: int
    out: str
    err: str
    seconds: float
    peak_bytes: int  # of memory, beyond what the process had at the start
    timed_out: bool = False


# ---- a forked process ---------------------------------------------------------------------------


def run_forked(
    folder: Path, command: Sequence[str], prepare: Callable[[], None] | None = None
) -> Outcome:
    """Run the command line in a fork of this process, which has imported everything."""
    out = os.memfd_create("out")
    err = os.memfd_create("err")
    # A fork begins with the parent's memory, but without the pages of files.
    memory_at_start = os.memfd_create("memory")
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.write(memory_at_start, str(_resident_bytes()).encode())
        _be_the_command(folder, command, prepare, out, err)
    timed_out = False
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(WALL_SECONDS * 1000):
            timed_out = True
            os.killpg(pid, signal.SIGKILL)
        _, wait_status, usage = os.wait4(pid, 0)
    finally:
        os.close(descriptor)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it may have started
    return Outcome(
        os.waitstatus_to_exitcode(wait_status),
        _content(out),
        _content(err),
        time.monotonic() - start,
        max(0, usage.ru_maxrss * 1024 - int(_content(memory_at_start))),
        timed_out,
    )


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _content(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb") as file:
        return file.read(2**20).decode(errors="backslashreplace")


def _be_the_command(
    folder: Path,
    command: Sequence[str],
    prepare: Callable[[], None] | None,
    out: int,
    err: int,
) -> None:
    """Do the work of the new process, and end it."""
    status = _STATUS_OF_EXCEPTION
    try:
        os.setpgid(0, 0)
        faulthandler.disable()
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w"), "utf-8", write_through=True)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w"), "utf-8", write_through=True)
        with open("/proc/self/statm") as file:
            virtual = int(file.read().split()[0]) * resource.getpagesize()
        limit = virtual + 2 * MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 2))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**28, 2**28))
        from einmpi.cli.main import main

        _skip_large_jobs()
        if prepare is not None:
            prepare()
        status = main(list(command))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        status = _STATUS_OF_EXCEPTION
    finally:
        os._exit(status)


def _skip_large_jobs() -> None:
    """Make this process end with a status of its own when it is about to run a large job."""
    import einmpi.cli.run as run_job

    checked_job = run_job.checked_job

    def checked_small_job(options: argparse.Namespace) -> Any:
        job = checked_job(options)
        tensor_bytes = sum(vertex.nbytes for vertex in job.graph.vertices)
        is_large = tensor_bytes > MOST_TENSOR_BYTES or job.graph.operations() > MOST_OPERATIONS
        if is_large or getattr(options, "repeat", 1) > 10:
            os._exit(STATUS_OF_LARGE_JOB)
        return job

    run_job.checked_job = checked_small_job


# ---- other ways to start ------------------------------------------------------------------------


def run_subprocess(folder: Path, words: Sequence[str], environment: dict[str, str]) -> Outcome:
    """Run a whole command, such as mpirun, in a new session."""
    start = time.monotonic()
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    timed_out = False
    try:
        out, err = process.communicate(timeout=WALL_SECONDS)
    except subprocess.TimeoutExpired:
        timed_out = True
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
    return Outcome(
        process.returncode,
        out.decode(errors="backslashreplace"),
        err.decode(errors="backslashreplace"),
        time.monotonic() - start,
        0,
        timed_out,
    )


# ---- the judgement ------------------------------------------------------------------------------

# What a run may say with status 1: its input was read, and then something failed.
_RUN_FAILURES = re.compile(
    r".*(cannot be written: "
    r"|cannot be read: "
    r"|an index .* out of range; expected "
    r"|differ from the reference results$"
    r"|No space left on device"
    r").*"
)
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def judge(made: FuzzInput, outcome: Outcome, before: dict[str, bytes], folder: Path) -> str:
    """Return what is wrong with an outcome, or "".

    `before` has the files of the folder before the command.
    """
    if outcome.status == STATUS_OF_LARGE_JOB:
        return ""
    problem = _judge_end(outcome) or _judge_lines(outcome)
    if problem:
        return problem
    return _judge_files(made, outcome, before, folder)


def _judge_end(outcome: Outcome) -> str:
    if outcome.timed_out:
        return "hang"
    if outcome.status == -signal.SIGXCPU or outcome.status == -signal.SIGKILL:
        return "more than the limit of processor time"
    if outcome.status < 0:
        return f"ended by {signal.Signals(-outcome.status).name}"
    if "Traceback (most recent" in outcome.err or outcome.status == _STATUS_OF_EXCEPTION:
        last = outcome.err.strip().splitlines()[-1:]
        return f"traceback: {_without_values(last[0] if last else '')}"
    if outcome.peak_bytes > MEMORY_BYTES:
        return "more than the limit of memory"
    if outcome.status not in (0, 1, 2):
        return f"status {outcome.status}"
    return ""


def _judge_lines(outcome: Outcome) -> str:
    if outcome.status == 0:
        for line in outcome.err.splitlines():
            if not line.startswith("einmpi: "):
                return "status 0 with other lines on standard error"
    else:
        if outcome.err.count("\n") != 1 or not outcome.err.endswith("\n"):
            return f"status {outcome.status} with {outcome.err.count(chr(10))} lines"
        line = outcome.err[:-1]
        if len(line) > MOST_LINE_CHARACTERS:
            return "a line without end"
        if line.startswith("einmpi: error: ") or outcome.status == 1:
            if not _RUN_FAILURES.fullmatch(line):
                return f"status {outcome.status}: {_without_values(line)}"
        elif not re.fullmatch(r".+(: .+|…)(; |cannot be read( as \S+)?: ).+", line):
            return f"not of the form where: what; expected …: {_without_values(line)}"
    if _CONTROL.search(outcome.err) or _CONTROL.search(outcome.out):
        return "control characters in what is printed"
    return ""


def _judge_files(made: FuzzInput, outcome: Outcome, before: dict[str, bytes], folder: Path) -> str:
    after = folder_content(folder)
    for name in after:
        if name not in before and re.search(r"(^|/)\.[^/]*\.(part|lock|journal)$", name):
            return "a draft or a lock is left"
    if outcome.status != 0:
        for name, content in before.items():
            # A checkpoint folder is tidied up before anything else.
            if after.get(name) != content and not name.startswith("saved/"):
                return "a failed command has changed a file"
    elif made.command[0] == "run" and "--help" not in made.command:
        for name, content in made.expected.items():
            if after.get(name) != content:
                return "status 0 with a wrong result"
    return ""


def folder_content(folder: Path) -> dict[str, bytes]:
    """Return the regular files of a folder."""
    content = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content[str(path.relative_to(folder))] = path.read_bytes()
    return content


def _without_values(line: str) -> str:
    """Return a line without numbers and quoted text, so that like failures look alike."""
    line = re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", line)
    return re.sub(r"\d+", "N", line)[:200]


def emptied(folder: Path) -> Path:
    """Return a folder after everything in it is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
