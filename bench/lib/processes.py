"""Tasks that run at the same time, each in a process of its own and with a time limit."""

from __future__ import annotations

import multiprocessing
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from time import monotonic
from typing import Any, Generic, NoReturn, TypeVar

from einmpi.errors import EinmpiError

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Outcome(Generic[Task, Result]):
    """What came of a task: its result, or the reason why there is none."""

    task: Task
    result: Result | None
    failed: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # with those of the programs that it started
    memory: int = 0  # bytes of the largest process


class _Overtime(BaseException):
    """The time of a task is over. Nothing but the end of its process should catch this."""


def outcomes(
    function: Callable[[Task], Result], tasks: Sequence[Task], jobs: int, limit: float
) -> Iterator[Outcome[Task, Result]]:
    """Call the function with each task, `jobs` at a time, and yield what comes as it comes.

    Tasks begin in the order in which they are given. One that takes more than `limit` seconds is
    interrupted by an exception, so that it can end what it has started; so are all of them if the
    caller leaves early.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(tasks))
    running: dict[Connection, tuple[ForkProcess, Task]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.pop()
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(function, task, limit, writer))
                process.start()
                writer.close()
                running[reader] = process, task
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                process, task = running.pop(ready)
                yield _received(ready, process, task)
    finally:
        for process, _ in running.values():
            process.terminate()
        for process, _ in running.values():
            process.join()


def _received(reader: Connection, process: ForkProcess, task: Task) -> Outcome[Task, Any]:
    """Return what a process has sent, or how it ended without that."""
    outcome = None
    with reader, suppress(EOFError):
        outcome = reader.recv()
    process.join()
    if outcome is None:
        return Outcome(task, None, f"its process ended with status {process.exitcode}")
    assert isinstance(outcome, Outcome)
    return outcome


def _work(function: Callable[[Task], Result], task: Task, limit: float, writer: Connection) -> None:
    """Do one task in this process."""

    def stop(number: int, _: object) -> NoReturn:
        if number == signal.SIGALRM:
            raise _Overtime
        sys.exit(128 + number)

    signal.signal(signal.SIGALRM, stop)
    signal.signal(signal.SIGTERM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    start = monotonic()
    result = None
    failed = ""
    try:
        result = function(task)
    except _Overtime:
        failed = f"more than {limit:g} s"
    except EinmpiError as error:
        failed = str(error)
    except Exception as error:
        traceback.print_exc()
        failed = f"{type(error).__name__}: {error}"
    signal.setitimer(signal.ITIMER_REAL, 0)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_seconds = sum(usage.ru_utime + usage.ru_stime for usage in used)
    memory = 1024 * max(usage.ru_maxrss for usage in used)
    writer.send(Outcome(task, result, failed, monotonic() - start, cpu_seconds, memory))
