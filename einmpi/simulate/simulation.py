"""The simulated run of a plan: traces of all ranks, a platform, and the seconds of their replay by
SimGrid's `smpirun`, which is a program of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import numpy as np

from einmpi.comm.base import spread_over_nodes
from einmpi.errors import EinmpiError, InputError, printable
from einmpi.planner.machine import Machine, Prices
from einmpi.planner.plan import Plan
from einmpi.process.signals import on_abort
from einmpi.report.record import Done, Span, Timeline, spans_of, timeline_of
from einmpi.simulate.classes import classes_of, traces_of
from einmpi.simulate.cluster import Network
from einmpi.simulate.dry_run import TraceComm
from einmpi.simulate.flow_model import run_classes

# ---- replay --------------------------------------------------------------------------------------

# Small messages are not sent ahead of their receive: in a schedule, the receives come first, so the
# times are the same, and SimGrid is five times as fast.
_OPTIONS = (
    "--cfg=smpi/send-is-detached-thresh:0",
    "--cfg=smpi/host-speed:1f",
    "--cfg=contexts/stack-size:64",
    "--log=root.thres:warning",
    "--log=smpi_replay.fmt:%.12r%e%m%n",
)
# What happens within so many seconds counts as one event. SimGrid shares out the links anew at each
# event; where there are many messages, that would take most of the time.
_PRECISION = 1e-12
_MANY_MESSAGES = 200_000
_PRECISION_OF_MANY = 5e-9
_LONGEST_START = 10.0  # seconds until a program has begun, on a machine with much other load
_SECONDS = re.compile(r"([0-9.e+-]+) Simulation time ")
_ACTION = re.compile(r"([0-9.e+-]+) ([0-9]+) [a-z]+ ")
# What SimGrid, C++ and the loader of programs say where there is no memory.
_NO_MEMORY = re.compile(
    r"bad_alloc|failed to allocate|cannot allocate|out of memory|failed to map segment", re.I
)
# What SimGrid writes before its words: a host and a time, a place in its own source, a category.
_PLACE_IN_SIMGRID = re.compile(r"\[[^]]*\] (\./src/\S+ )?\[[^]]*\] (Uncaught exception \S+ )?")


class ReplayError(EinmpiError):
    """SimGrid could not replay traces."""


class ReplayEnded(ReplayError):
    """SimGrid was killed, or had no memory: what it read may be right."""


def find_smpirun() -> str:
    """Return SimGrid's program; refuse if it is not installed."""
    found = shutil.which("smpirun")
    if found is None:
        raise InputError(
            "einmpi simulate",
            "SimGrid's smpirun is not installed",
            "apt-get install libsimgrid-dev, or https://simgrid.org",
        )
    return found


def replay(
    folder: Path,
    ranks: int,
    messages: int,
    on_action: Callable[[int, float], None] | None = None,
) -> float:
    """Return the simulated seconds of the traces in a folder, which have so many messages.

    `on_action` is called with the rank and the time whenever an action of a trace is done, for each
    rank in the order of its trace. The first and the last action, which take no time, are left out.
    """
    precision = _PRECISION if messages < _MANY_MESSAGES else _PRECISION_OF_MANY
    command = [
        find_smpirun(),
        *("-np", str(ranks)),
        *("-platform", "platform.xml", "-hostfile", "hosts", "-replay", "traces"),
        *_OPTIONS,
        f"--cfg=surf/precision:{precision}",
        f"--log=smpi_replay.thres:{'info' if on_action is None else 'verbose'}",
    ]
    seconds = None
    other_lines: deque[str] = deque(maxlen=1000)
    with _running(command, folder) as process:
        assert process.stdout is not None
        for line in process.stdout:
            action = _ACTION.match(line)
            if action is not None and on_action is not None:
                on_action(int(action[2]), float(action[1]))
                continue
            end = _SECONDS.match(line)
            if end is not None:
                seconds = float(end[1])
            other_lines.append(line.strip())
    if process.returncode or seconds is None:
        raise _failure(process.returncode, [line for line in other_lines if line])
    return seconds


@contextmanager
def _running(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a program, and end it with all that it has started if this process is interrupted.

    smpirun is a script: to kill it alone would leave SimGrid running.
    """
    processes: list[subprocess.Popen[str]] = []
    has_begun = Event()

    def kill() -> None:
        # Another thread may call this while the program is being started.
        has_begun.wait(_LONGEST_START)
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    with on_abort(kill):
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            processes.append(process)
        finally:
            has_begun.set()
        with process:
            try:
                yield process
            except BaseException:
                kill()
                raise


def _failure(status: int, lines: Sequence[str]) -> ReplayError:
    """Return the error for a status of smpirun and the lines that it wrote."""
    # smpirun passes on how SimGrid ended as shells do, unless it was killed itself.
    number = -status if status < 0 else status - 128
    if number > 0 and number != signal.SIGABRT:  # SimGrid aborts when it finds something wrong
        return ReplayEnded(f"smpirun: SimGrid was ended by signal {number}{_meaning(number)}")
    for line in lines:
        if _NO_MEMORY.search(line):
            return ReplayEnded(f"smpirun: not enough memory: {_said(line)}")
    return ReplayError(f"smpirun: {_reason(lines)}")


def _meaning(number: int) -> str:
    if number == signal.SIGKILL:
        return ", SIGKILL; the system does this when memory runs out"
    try:
        return f", {signal.Signals(number).name}"
    except ValueError:
        return ""


def _reason(lines: Sequence[str]) -> str:
    """Return the line of SimGrid's output that says why it failed."""
    for line in lines:
        if "CRITICAL" in line or "rror" in line:
            return _said(line)
    return _said(lines[-1]) if lines else "it failed without a word"


def _said(line: str) -> str:
    """Return a line of SimGrid without the place where it is from."""
    return printable(_PLACE_IN_SIMGRID.sub("", line)[:300])


# ---- timeline ------------------------------------------------------------------------------------
#
# When every rank did its steps in a replay: the timeline that reports and trace files show.


# SimGrid says when each action of a rank is done, and a step is some actions in a row: it lasts
# from the end of the action before its first one to the end of its last one. The first line of a
# trace, init, and the last one, finalize, take no time and are not reported.
_LINES_BEFORE = 1


class StepTimes:
    """Collects the steps of all ranks before a replay, and the times of their actions in it."""

    def __init__(self) -> None:
        self.spans: list[list[Span]] = []  # of each rank; times are still numbers of actions
        self.ends: list[array[float]] = []  # of each rank: when it has done so many actions

    def add_rank(self, trace: TraceComm) -> None:
        """Note the steps of the next rank."""
        lines = [number for number, _ in trace.steps]
        borders = np.array([*lines, len(trace.lines) - 1], float) - _LINES_BEFORE
        done = Done([step for _, step in trace.steps], borders[:-1], borders[1:], ())
        self.spans.append(spans_of(done, len(self.spans)))
        self.ends.append(array("d", [0.0]))

    def on_action(self, rank: int, end: float) -> None:
        """Note that a rank has done its next action."""
        self.ends[rank].append(end)

    def timeline(self) -> Timeline:
        """Return the timeline, after the replay."""
        found = []
        for spans, ends in zip(self.spans, self.ends, strict=True):
            moved = []
            for span in spans:
                moved.append(span._replace(start=ends[int(span.start)], end=ends[int(span.end)]))
            found.append(moved)
        return timeline_of(found)


# ---- simulated runs ------------------------------------------------------------------------------


SIMGRID = "SimGrid"
FLOWS = "flows"
MOST_RANKS_OF_SIMGRID = 4096  # it needs a minute and more; flows take over
_MOST_CLASSES = 1024  # that are lowered for flows: 10 s


@dataclass(frozen=True)
class Place:
    """Where ranks are simulated."""

    platform: str  # the text of the file that SimGrid reads
    hosts: tuple[str, ...]  # one for each node, in order
    machine: Machine | None = None  # how long kernels take; None: as long as the platform says


@dataclass(frozen=True)
class Simulated:
    """What a simulated run took and moved."""

    plan: Plan
    seconds: float
    nbytes: int  # that all ranks receive, those in shared memory included
    shared: int  # those in shared memory
    messages: int  # of elements, between all ranks
    model: str  # SIMGRID or FLOWS
    lowered: int  # ranks; the others do the same with other partners
    timeline: Timeline | None = None

    def as_json(self) -> dict[str, Any]:
        """Return what --json writes."""
        return {
            "ranks": self.plan.ranks,
            "nodes": self.plan.nodes,
            "strategy": self.plan.strategy,
            "digest": self.plan.digest,
            "seconds_simulated": self.seconds,
            "seconds_predicted": self.plan.seconds_predicted,
            "words_predicted": self.plan.words_predicted,
            "bytes_predicted": self.plan.bytes_predicted,
            "bytes_moved": self.nbytes,
            "bytes_shared": self.shared,
            "messages": self.messages,
            "model": self.model,
            "ranks_lowered": self.lowered,
        }


def simulate_plan(
    plan: Plan,
    place: Place,
    *,
    shared: bool = True,
    folder: Path | None = None,
    with_timeline: bool = False,
    network: Network | None = None,
) -> Simulated:
    """Replay the schedules of all ranks; the nodes of the plan are the hosts of the place.

    `shared` says whether ranks of a node share memory. With `folder`, the files of the replay are
    left there. With `network`, which is that of the place, flows on it are looked at in place of a
    replay by SimGrid, and there are neither files nor a timeline.
    """
    if network is not None:
        return _flows(plan, place, shared, network)
    times = StepTimes() if with_timeline else None
    with ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(_temporary_folder())
        nodes = spread_over_nodes(plan.ranks, plan.nodes)
        _write_place(place, nodes, folder)
        counted = _write_traces(plan, place.machine, shared, folder, times)
        if times is None:
            return replace(counted, seconds=replay(folder, plan.ranks, counted.messages))
        seconds = replay(folder, plan.ranks, counted.messages, times.on_action)
        return replace(counted, seconds=seconds, timeline=times.timeline())


def reason_against(place: Place) -> str | None:
    """Return why SimGrid cannot use a platform; None if two ranks of each host can meet there."""
    ranks = range(2 * len(place.hosts))
    nodes = spread_over_nodes(len(ranks), len(place.hosts))
    with _temporary_folder() as folder:
        _write_place(place, nodes, folder)
        for rank in ranks:
            comm = TraceComm(rank, nodes)
            comm.add("init")
            comm.barrier_among(tuple(ranks))
            comm.add("finalize")
            _write_trace(rank, comm.lines, folder)
        _write_names(len(ranks), folder)
        try:
            replay(folder, len(ranks), messages=0)
        except ReplayEnded:
            return None
        except ReplayError as error:
            return str(error)
    return None


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    temporary = TemporaryDirectory(prefix="einmpi-simulate-", ignore_cleanup_errors=True)
    with temporary as name, on_abort(temporary.cleanup):
        yield Path(name)


def _write_place(place: Place, nodes: Sequence[int], folder: Path) -> None:
    """Write the platform, and the host of each rank."""
    (folder / "platform.xml").write_text(place.platform, encoding="utf-8")
    (folder / "hosts").write_text("".join(f"{place.hosts[node]}\n" for node in nodes))


def _write_trace(rank: int, lines: Sequence[str], folder: Path) -> None:
    (folder / f"rank-{rank}.txt").write_text("\n".join(lines) + "\n")


def _write_names(ranks: int, folder: Path) -> None:
    """Write the list of the files of all ranks."""
    (folder / "traces").write_text("".join(f"rank-{rank}.txt\n" for rank in range(ranks)))


def _write_traces(
    plan: Plan, machine: Machine | None, shared: bool, folder: Path, times: StepTimes | None
) -> Simulated:
    """Write a file for each rank and the list of them; return what they move."""
    prices = None if machine is None else Prices.of(machine)
    nbytes = 0
    in_shared_memory = 0
    messages = 0
    lowered = 0
    # A timeline shows the steps of each rank, in which its partners have their own names.
    for ranks in classes_of(plan, prices, shared, apart=times is not None):
        lowered += 1
        for trace in traces_of(plan, ranks):
            _write_trace(trace.rank, trace.lines, folder)
            nbytes += trace.received
            in_shared_memory += trace.received_shared
            messages += trace.messages
            if times is not None:
                times.add_rank(trace)
    _write_names(plan.ranks, folder)
    return Simulated(plan, 0.0, nbytes, in_shared_memory, messages, SIMGRID, lowered)


def _flows(plan: Plan, place: Place, shared: bool, network: Network) -> Simulated:
    """Return what flows between classes of ranks take."""
    prices = None if place.machine is None else Prices.of(place.machine)
    classes = list(classes_of(plan, prices, shared, _MOST_CLASSES))
    seconds, messages = run_classes(plan, classes, network)
    in_shared_memory = sum(len(each.ranks) * each.comm.received_shared for each in classes)
    return Simulated(
        plan, seconds, plan.bytes_predicted, in_shared_memory, messages, FLOWS, len(classes)
    )
