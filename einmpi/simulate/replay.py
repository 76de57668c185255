"""Replay traces with SimGrid's `smpirun`, which is a program of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import NoReturn
from xml.parsers import expat

from einmpi.errors import EinmpiError, InputError, printable
from einmpi.process.signals import on_abort

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


# ---- platform file -------------------------------------------------------------------------------
#
# A platform file of the user: checked, and the hosts that it has. SimGrid may read it then.


MOST_BYTES = 2**26
MOST_HOSTS = 2**20
# Other settings would let a file write traces, load plugins or run programs.
_SETTINGS = re.compile(
    r"(network/[a-zA-Z0-9/-]+|cpu/[a-zA-Z0-9/-]+|surf/precision|smpi/(os|or|ois|bw-factor|lat-factor))"
)
PLATFORM_EXPECTED = "a platform file of SimGrid, version 4 or 4.1"


@dataclass(frozen=True)
class Platform:
    """The text of a platform, its hosts in order, and the cores of each."""

    text: str
    hosts: tuple[str, ...]
    cores: int


def read_platform(path: str) -> Platform:
    """Read a platform file. Raise InputError if it is not one, or may do more than describe."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(path, error.strerror or str(error), PLATFORM_EXPECTED) from None
    if len(data) > MOST_BYTES:
        raise InputError(path, "the file is larger than 64 MiB", PLATFORM_EXPECTED)
    text = data.decode(errors="replace")  # as SimGrid gets it: just this is checked
    reader = _Reader(path)
    reader.read(text)
    cores = set(reader.cores)
    if not reader.hosts:
        raise InputError(path, "there is no host in it", "elements <host> or <cluster>")
    if len(cores) > 1:
        raise InputError(path, "hosts have different numbers of cores", "the same number")
    return Platform(text, tuple(reader.hosts), cores.pop())


class _Reader:
    """Goes through the elements of a platform file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.depth = 0
        self.in_config = False
        self.hosts: list[str] = []
        self.cores: list[int] = []
        self.parser = expat.ParserCreate()
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.EntityDeclHandler = self._refuse_entity

    def read(self, text: str) -> None:
        try:
            self.parser.Parse(text, True)
        except InputError:
            raise
        except (expat.ExpatError, ValueError, LookupError) as error:
            raise InputError(self.path, f"this is not XML: {error}", PLATFORM_EXPECTED) from None

    def _refuse(self, problem: str, expected: str = PLATFORM_EXPECTED) -> NoReturn:
        line = self.parser.CurrentLineNumber
        raise InputError(f"{self.path}:{line}", problem, expected)

    def _refuse_entity(self, name: str, *_: object) -> None:
        self._refuse(f"the entity {name!r:.60}", "no entities")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self.depth += 1
        if self.depth == 1:
            version = attributes.get("version", "")
            if name != "platform" or version not in ("4", "4.1"):
                self._refuse(f"<{name:.60}> of version {version!r:.20}")
        elif name == "include":
            self._refuse("<include>", "a file that needs no others")
        elif name == "prop":
            self._check_setting(attributes.get("id", ""))
        elif name == "config":
            self.in_config = True
        elif name == "host":
            self._add(iter([attributes.get("id", "")]), attributes)
        elif name == "cluster":
            self._add(self._cluster_hosts(attributes), attributes)

    def _end(self, name: str) -> None:
        self.depth -= 1
        if name == "config":
            self.in_config = False

    def _check_setting(self, key: str) -> None:
        if self.in_config and not _SETTINGS.fullmatch(key):
            self._refuse(f"the setting {key!r:.60}", "settings of the network and of CPUs only")

    def _add(self, names: Iterator[str], attributes: dict[str, str]) -> None:
        cores = attributes.get("core", "1")
        if not re.fullmatch("[1-9][0-9]{0,5}", cores):
            self._refuse(f"core={cores!r:.60}", "a number of cores")
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", name):
                self._refuse(f"the host {name!r:.60}", "letters, digits and . _ - in its name")
            if len(self.hosts) == MOST_HOSTS:
                self._refuse(f"more than {MOST_HOSTS} hosts", "fewer")
            self.hosts.append(name)
        self.cores.append(int(cores))

    def _cluster_hosts(self, attributes: dict[str, str]) -> Iterator[str]:
        radical = attributes.get("radical", "")
        prefix = attributes.get("prefix", "")
        suffix = attributes.get("suffix", "")
        for part in radical.split(","):
            found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", part.strip())
            if found is None:
                self._refuse(f"radical={radical!r:.60}", "numbers such as 0-127")
            first = int(found[1])
            last = first if found[2] is None else int(found[2])
            for number in range(first, last + 1):
                yield f"{prefix}{number}{suffix}"
