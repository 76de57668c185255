"""Progress of a run: on a terminal, on the launcher's terminal, and in a log."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest
from mpi_helpers import needs_mpirun
from paths import ROOT

import einmpi
from einmpi.process import environment as terminals
from einmpi.process.environment import CACHE_VARIABLE, CLEAR, TERMINALS_VARIABLE, columns, screen
from einmpi.report import terminal as progress
from einmpi.report.terminal import Progress
from einmpi.schedule.lower import lower

ESCAPE = re.compile(r"\x1b\[[0-9;]*[mK]")


@pytest.fixture(scope="module")
def schedule():
    return lower(einmpi.plan(einmpi.load(ROOT / "jobs/chain.toml"), 4), 0)


def progress_on(monkeypatch, schedule, width, repeats=1):
    """Return a Progress with a clock that stands still, the clock, the stream and the comm."""
    clock, stream, comm = (
        SimpleNamespace(now=100.0),
        io.StringIO(),
        SimpleNamespace(received=0, size=4),
    )
    monkeypatch.setattr(progress, "screen", lambda: (stream, width))
    return Progress(comm, schedule, repeats, lambda: clock.now), clock, stream, comm


def percent(text):
    return [int(found) for found in re.findall(r"(\d+)%", text)]


def test_lines_in_a_log(monkeypatch, schedule):
    shown, clock, stream, _ = progress_on(monkeypatch, schedule, 0, repeats=2)
    assert shown.interval == 30
    shown.show()  # nothing has begun
    for _ in range(2):
        for step in schedule.steps:
            shown(step)
            clock.now += 30
            shown.show()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 * len(schedule.steps)
    form = re.compile(r"einmpi: \d+% [A-Z_0-9]* of 4 vertices(, about [\d.]+ (s|min|h) left)?")
    assert all(form.fullmatch(line) for line in lines)
    parts = percent(stream.getvalue())
    assert parts == sorted(parts) and parts[0] < 20 and parts[-1] == 100
    shown.close()
    assert stream.getvalue().splitlines() == lines


def test_a_bar_goes_on_inside_a_long_step_but_not_beyond_it(monkeypatch, schedule):
    shown, clock, stream, comm = progress_on(monkeypatch, schedule, 100)
    place = next(k for k, step in enumerate(schedule.steps) if step.kernels)
    for step in schedule.steps[: place + 1]:
        clock.now += 1
        shown(step)
    comm.received = 2**20
    for _ in range(200):
        clock.now += 1
        shown.show()
    bars = ESCAPE.sub("", stream.getvalue()).split("\r\r")
    parts = percent(stream.getvalue())
    assert parts == sorted(parts) and parts[0] < parts[-1] == round(100 * shown.done[place + 1])
    assert all(
        f"{schedule.steps[place].vertex}  kernel  1.0 MiB received  about" in bar for bar in bars
    )
    assert all(len(bar.strip()) < 100 for bar in bars)
    shown.close()
    assert stream.getvalue().endswith(CLEAR)


def test_a_bar_is_drawn_only_for_news(monkeypatch, schedule):
    shown, clock, stream, _ = progress_on(
        monkeypatch, schedule, 40
    )  # too narrow for more than text
    shown(schedule.steps[0])
    for _ in range(17):
        shown.show()
        clock.now += 0.125
    assert stream.getvalue().count(CLEAR) == 3  # at once, and after each second
    shown(schedule.steps[1])
    shown.show()
    assert stream.getvalue().count(CLEAR) == 4 and shown.interval >= 0.1


def test_a_closed_terminal_does_not_fail_the_run(monkeypatch, schedule):
    shown, _, stream, _ = progress_on(monkeypatch, schedule, 80)
    stream.close()
    shown(schedule.steps[0])
    shown.show()
    assert shown.closed.is_set()
    shown.close()


def test_ranks_use_the_terminal_of_their_launcher(monkeypatch, tmp_path):
    """Ranks write a bar to their launcher's terminal, unless it is on another machine or gone."""
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        description = terminals.terminal_environment()[TERMINALS_VARIABLE]
        assert description == f"{os.uname().nodename} 0 120 {os.ttyname(theirs)}"
        pipes = [
            SimpleNamespace(fileno=lambda number=number: number, isatty=lambda: False)
            for number in (1, 2)
        ]
        assert [columns(pipe) for pipe in pipes] == [0, 0]
        monkeypatch.setenv(TERMINALS_VARIABLE, description)
        monkeypatch.setattr(sys, "stderr", pipes[1])
        assert [columns(pipe) for pipe in pipes] == [0, 120]
        with open(tmp_path / "log", "w") as file:
            assert columns(file) == columns(io.StringIO()) == 0
        stream, width = screen()
        with stream:
            assert width == 120 and stream.write("bar\r") and stream.flush() is None
        assert os.read(ours, 100) == b"bar\r"
        for other in ("elsewhere 0 120 /dev/null", f"{os.uname().nodename} 0 120 {tmp_path}/none"):
            monkeypatch.setenv(TERMINALS_VARIABLE, other)
            assert screen() == (pipes[1], 0)
    os.close(ours)


def test_terminals_made_by_open_mpi_are_ignored(monkeypatch):
    """Open MPI's mpirun gives its ranks terminals even if its own output goes to a pipe."""
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        monkeypatch.setenv("TERM", "xterm")
        assert columns(terminal) > 0
        monkeypatch.setenv("PMIX_RANK", "0")
        assert columns(terminal) == 0
    os.close(ours)


def on_terminal(command, width, **variables):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("NO_COLOR", "COLUMNS", TERMINALS_VARIABLE) and not key.startswith("NUMBA_")
    }
    shown = b""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env={**kept, "TERM": "xterm", "PYTHONPATH": str(ROOT), **variables},
    ) as process:
        os.close(theirs)
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # the last one has closed it
                break
    os.close(ours)
    return process.returncode, shown.decode()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=[pytest.mark.mpirun, needs_mpirun])])
def test_a_run_on_a_terminal(ranks):
    command = [
        sys.executable,
        "-m",
        "einmpi",
        "run",
        "jobs/chain.toml",
        "-n",
        str(ranks),
        "--set",
        "s=2000",  # the bar appears after 0.2 s
    ]
    status, shown = on_terminal(command, 90)
    assert status == 0
    *bars, rest = shown.split(CLEAR)
    assert any("% " in bar and "\x1b[" in bar for bar in bars)
    text = ESCAPE.sub("", rest)
    assert text.startswith("Matrix chain: ") and f"on {ranks} rank" in text
    assert (
        re.search(r"^vertex +computing s .*imbalance\r$", text, re.MULTILINE) and "\x1b[1m" in rest
    )
    assert re.search(r"^Z_2 ", text, re.MULTILINE) and "peak memory  " in text


# What numba calls of colorama when it compiles; the real one may not be installed.
COLORAMA = """
import atexit, sys
__version__ = "0.4.6"
class Fore:
    BLACK = BLUE = CYAN = GREEN = MAGENTA = RED = WHITE = YELLOW = ""
class Style:
    BRIGHT = RESET_ALL = ""
def init():
    atexit.register(lambda: sys.__stdout__.write("\\x1b[0m"))
def reinit(): pass
def deinit(): pass
"""


@pytest.mark.slow
def test_quiet_on_a_terminal(tmp_path):
    (tmp_path / "colorama.py").write_text(COLORAMA)
    command = [sys.executable, "-m", "einmpi", "jobs/distances.toml", "--quiet"]
    variables = {CACHE_VARIABLE: str(tmp_path), "PYTHONPATH": str(tmp_path)}
    # The ranks of Open MPI have terminals too: numba must not reset their colours at the end.
    assert on_terminal(command, 90, **variables) == (0, "")
