"""A process that runs some cases, on threads or as one rank of an mpirun.

It writes a line of JSON when a case starts and one when it has ended, so that whoever started it
knows which case a crash or a hang belongs to.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import (
    arrays_case,
    arrays_generate,
    arrays_running,
    arrays_shrink,
    reproduce,
    running,
    sparse_programs,
    traced_running,
)
from . import case as program_case
from . import shrink as program_shrink
from .drive import worker_command, worker_environment
from .running import Outcome

CASE_SECONDS = 90.0  # for a case in a process of its own
FORWARDING_SECONDS = 0.5  # mpirun loses lines that a rank writes just before it aborts


@dataclass(frozen=True)
class Kind:
    """What a soak is about: how its cases are made and run, and how one that fails is shown."""

    make_case: Callable[..., Any]
    check_on_threads: Callable[[Any], Outcome]
    check_on_mpi: Callable[[Any, Any, Path], Outcome]
    shrink: Callable[..., Any]
    failure_text: Callable[..., str]


KINDS = {
    "programs": Kind(
        program_case.make_case,
        running.check_on_threads,
        running.check_on_mpi,
        program_shrink.shrink,
        reproduce.failure_text,
    ),
    "gradients": Kind(
        program_case.make_gradient_case,
        running.check_on_threads,
        running.check_on_mpi,
        program_shrink.shrink,
        reproduce.failure_text,
    ),
    "arrays": Kind(
        arrays_generate.make_array_case,
        arrays_running.check_on_threads,
        arrays_running.check_on_mpi,
        arrays_shrink.shrink,
        arrays_case.failure_text,
    ),
    "traced": Kind(
        arrays_generate.make_array_case,
        traced_running.check_on_threads,
        traced_running.check_on_mpi,
        arrays_shrink.shrink,
        arrays_case.failure_text,
    ),
    "sparse": Kind(
        sparse_programs.make_case,
        sparse_programs.check_on_threads,
        sparse_programs.check_on_mpi,
        sparse_programs.shrink,
        sparse_programs.failure_text,
    ),
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.worker")
    parser.add_argument("--kind", choices=list(KINDS), default="programs")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--ranks", type=int, help="instead of the number that the case draws")
    parser.add_argument("--mpi", action="store_true", help="this is a rank that mpirun started")
    parser.add_argument("--pickled", help="a file with the case to run")
    parser.add_argument("--shrink", type=float, help="seconds to make the case smaller")
    parser.add_argument("--mpirun", help="the mpirun under which the case failed")
    arguments = parser.parse_args(argv)
    kind = KINDS[arguments.kind]
    if arguments.mpi:
        return _run_as_rank(arguments, kind)
    if arguments.shrink is not None:
        case = kind.make_case(arguments.seed, arguments.first, arguments.ranks)
        print(minimised(arguments.kind, case, arguments.shrink, arguments.mpirun))
        return 0
    for number in range(arguments.first, arguments.first + arguments.count):
        say({"start": number})
        case = kind.make_case(arguments.seed, number, arguments.ranks)
        say(record(case, kind.check_on_threads(case)))
    return 0


def say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def record(case: Any, outcome: Outcome) -> dict[str, Any]:
    return {
        "done": case.number,
        "themes": case.themes,
        "ranks": case.ranks,
        "dtypes": case.dtypes,
        "failures": outcome.failures,
        "notes": outcome.notes,
        "compared": outcome.compared,
        "elements": outcome.elements,
    }


def _run_as_rank(arguments: argparse.Namespace, kind: Kind) -> int:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    numbers = range(arguments.first, arguments.first + arguments.count)
    with tempfile.TemporaryDirectory(prefix="einmpi-soak-") as own_folder:
        folder = Path(world.bcast(own_folder, 0))
        for number in numbers:
            if world.rank == 0:
                say({"start": number})
            if arguments.pickled:
                case = pickle.loads(Path(arguments.pickled).read_bytes())
            else:
                case = kind.make_case(arguments.seed, number, world.size)
            case_folder = folder / str(number)
            case_folder.mkdir(exist_ok=True)
            try:
                outcome = kind.check_on_mpi(case, world, case_folder)
            except Exception as error:
                text = "".join(traceback.format_exception(error))[-1500:]
                outcome = Outcome()
                outcome.fail("error", f"on rank {world.rank}: {text}")
                say(record(case, outcome))
                time.sleep(FORWARDING_SECONDS)
                world.Abort(1)
            failures = world.gather(outcome.failures, 0)
            if world.rank == 0:
                for others in failures[1:]:
                    new = [failure for failure in others if failure not in outcome.failures]
                    outcome.failures.extend(new)
                say(record(case, outcome))
        world.barrier()
    return 0


# ---- a smaller case -----------------------------------------------------------------------------


def minimised(kind_name: str, case: Any, seconds: float, mpirun: str | None) -> str:
    """Return the text of a failure, for the smallest case that fails in the same way.

    A case that fails under mpirun alone is made smaller there.
    """
    kind = KINDS[kind_name]
    failures_of = functools.partial(failures_in_a_process, kind.check_on_threads)
    failures = failures_of(case)
    if not failures and mpirun is not None:
        failures_of = functools.partial(failures_under_mpirun, mpirun, kind_name)
        failures = failures_of(case)
    if not failures:
        shown = kind.failure_text(case, case, [])
        return f"{case.name} passes in a process of its own.\n{shown}"
    kinds = _kinds(failures)

    def still_fails(candidate: Any) -> bool:
        return bool(kinds & _kinds(failures_of(candidate)))

    smaller = kind.shrink(case, still_fails, seconds)
    return kind.failure_text(case, smaller, failures_of(smaller) or failures)


def failures_under_mpirun(mpirun: str, kind_name: str, case: Any) -> list[tuple[str, str]]:
    """Run a case in an mpirun of its own."""
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        file.write(pickle.dumps(case))
        file.flush()
        command = worker_command(mpirun, case.ranks)
        command += ["--kind", kind_name]
        command += ["--seed", str(case.seed), "--first", str(case.number), "--pickled", file.name]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=worker_environment(),
        )
        try:
            said, problems = process.communicate(timeout=CASE_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # mpirun ends its ranks; killed at once, it could not
            process.communicate()
            return [("hang", f"not finished in {CASE_SECONDS:g} s")]
    for text in said.splitlines():
        if text.startswith('{"done"'):
            return [(check, problem) for check, problem in json.loads(text)["failures"]]
    return [("crash", f"mpirun ended with status {process.returncode}\n{problems[-1500:]}")]


def _kinds(failures: list[tuple[str, str]]) -> set[str]:
    """Return what failed: the checks, and for errors the class of the exception."""
    kinds = set()
    for check, text in failures:
        kinds.add(f"error {text.split(':')[0]}" if check == "error" else check)
    return kinds


def failures_in_a_process(
    check_on_threads: Callable[[Any], Outcome], case: Any
) -> list[tuple[str, str]]:
    """Run a case in a child process, so that it may crash or hang."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(readable)
        status = 1
        try:
            signal.alarm(int(CASE_SECONDS))
            failures = check_on_threads(case).failures
            with open(writable, "w") as pipe:
                json.dump(failures, pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writable)
    with open(readable) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGALRM:
            return [("hang", f"not finished in {CASE_SECONDS:g} s")]
        return [("crash", f"the process was ended by {signal.Signals(number).name}")]
    if not text:
        return [("crash", f"the process ended with status {os.waitstatus_to_exitcode(status)}")]
    return [(check, problem) for check, problem in json.loads(text)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
