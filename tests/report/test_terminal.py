"""`einmpi plan` on a terminal: a real one, of a given width; and what a pipe gets instead."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios

import pytest
from paths import ROOT

import einmpi
from einmpi.planner.text.compare import compare
from einmpi.report.terminal import comparison_text, plan_text

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def terminal(monkeypatch):
    """Makes standard output a terminal of a given width."""
    opened = []

    def make(columns):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        opened.extend([ours, theirs])
        monkeypatch.setattr(sys, "stdout", os.fdopen(theirs, "w", closefd=False))
        return ours, theirs

    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    yield make
    monkeypatch.undo()
    for descriptor in opened:
        os.close(descriptor)


@pytest.fixture(scope="module")
def plan():
    return einmpi.plan(einmpi.load(ROOT / "jobs/attention.toml"), 8)


@pytest.fixture(scope="module")
def comparison():
    job = einmpi.load(ROOT / "jobs/attention.toml")
    return compare(lambda strategy: einmpi.plan(job, 8, strategy=strategy))


def widest(text):
    return max(map(len, ESCAPE.sub("", text).split("\n")))


def test_a_wide_terminal_shows_the_plain_text_in_colours(terminal, plan):
    terminal(200)
    shown = plan_text(plan)
    assert "\x1b[31m" in shown and "\x1b[1m" in shown
    assert [line.rstrip() for line in ESCAPE.sub("", shown).split("\n")] == str(plan).split("\n")


def test_all_loops_of_a_plan_are_shown(terminal, tmp_path):
    loop = '[[loop]]\nprogram = "y = x + {}"\nsteps = 3\ncarry.x = "y"\n'
    loops = loop.format(1) + loop.format(2)
    (tmp_path / "job.toml").write_text(f'inputs.x = {{ shape = [], random = "ones" }}\n{loops}')
    plan = einmpi.plan(einmpi.load(tmp_path / "job.toml"), 2)
    terminal(200)
    shown = ESCAPE.sub("", plan_text(plan))
    for text in ("loop 1 of 2", "y ← x + 1", "loop 2 of 2", "y ← x + 2"):
        assert shown.count(text) == 1


def test_a_narrow_terminal_wraps(terminal, plan):
    terminal(80)
    shown = ESCAPE.sub("", plan_text(plan))
    assert widest(shown) <= 80 < widest(str(plan))
    for number in re.findall(r"\d+,\d+|\d+\.\d [KM]iB", str(plan)):
        assert number in shown  # no number in two lines
    assert "no room for" not in shown


def test_a_very_narrow_terminal_leaves_columns_out_and_says_so(terminal, plan):
    terminal(60)
    shown = ESCAPE.sub("", plan_text(plan))
    assert widest(shown) <= 60
    assert "no room for: aggregate, repartition" in shown and "192.0 KiB" in shown


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 100, 200])
def test_no_color_means_no_escapes_and_nothing_is_too_wide(
    terminal, monkeypatch, columns, plan, comparison
):
    terminal(columns)
    monkeypatch.setenv("NO_COLOR", "1")
    for shown in (plan_text(plan), comparison_text(comparison)):
        assert "\x1b" not in shown and widest(shown) <= columns


def test_a_dumb_terminal_gets_plain_text(terminal, monkeypatch, plan):
    terminal(80)
    monkeypatch.setenv("TERM", "dumb")
    assert plan_text(plan) == str(plan)


def test_comparison(terminal, comparison):
    terminal(200)
    shown = comparison_text(comparison)
    green = re.findall(r"\x1b\[32m(\w\S*)", shown)
    assert green[0] == "eindecomp" and "sqrt" not in green
    assert ESCAPE.sub("", shown).split() == comparison.text.split()
    terminal(80)
    assert re.search(r"no room for: .*paper's cost", comparison_text(comparison))


def test_names_are_not_taken_for_markup(terminal):
    terminal(80)
    plan = einmpi.plan(einmpi.program("red[i,j] = X[i,j] + 1", X=(8, 8)), 2)
    assert "red[i,j] ← X[i,j] + 1" in ESCAPE.sub("", plan_text(plan))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("arguments", "coloured"), [((), True), (("--json", "-"), False)])
def test_the_command(terminal, arguments, coloured):
    ours, theirs = terminal(100)
    command = [sys.executable, "-m", "einmpi", "plan", "jobs/softmax.toml", "-n", "4", *arguments]
    shown = b""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, cwd=ROOT
    ) as process:
        while select.select([ours], [], [], 0.1)[0] or process.poll() is None:
            if select.select([ours], [], [], 0)[
                0
            ]:  # a terminal holds few bytes, so they are taken while it writes
                shown += os.read(ours, 65536)
    assert process.returncode == 0 and b"eindecomp" in shown and (b"\x1b[1m" in shown) == coloured
