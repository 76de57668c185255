"""`einmpi plan` on a terminal: a real one, of a given width; and what a pipe gets instead."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import einmpi

ROOT = Path(__file__).resolve().parents[2]
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def on_terminal(columns, *arguments, **environment):
    """What a terminal of this width gets from `einmpi …`."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    kept = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "TERM")}
    command = [sys.executable, "-m", "einmpi", *arguments]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.STDOUT, cwd=ROOT,
                          env={**kept, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), **environment}):  # fmt: skip
        os.close(theirs)
        shown = b""
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
            if not data:
                break
            shown += data
    os.close(ours)
    return shown.decode().replace("\r\n", "\n")


def words(text):
    return ESCAPE.sub("", text).split()


ATTENTION = ("plan", "jobs/attention.toml", "-n", "8")


@pytest.fixture(scope="module")
def plain():
    return str(einmpi.plan(einmpi.load(ROOT / "jobs/attention.toml"), 8))


def test_a_wide_terminal_shows_the_plain_text_in_colours(plain):
    shown = on_terminal(200, *ATTENTION)
    assert "\x1b[31m" in shown and "\x1b[1m" in shown
    assert [line.rstrip() for line in ESCAPE.sub("", shown).rstrip("\n").split("\n")] == plain.split("\n")


def test_a_narrow_terminal_wraps(plain):
    shown = ESCAPE.sub("", on_terminal(80, *ATTENTION))
    assert max(map(len, shown.split("\n"))) <= 80 < max(map(len, plain.split("\n")))
    for number in re.findall(r"\d+,\d+|\d+\.\d [KM]iB", plain):
        assert number in shown  # no number in two lines
    assert "no room for" not in shown


def test_a_very_narrow_terminal_leaves_columns_out_and_says_so():
    shown = ESCAPE.sub("", on_terminal(60, *ATTENTION))
    assert max(map(len, shown.split("\n"))) <= 60
    assert "no room for: aggregate, repartition" in shown and "192.0 KiB" in shown


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_no_color_means_no_escapes(columns, plain):
    shown = on_terminal(columns, *ATTENTION, NO_COLOR="1")
    assert "\x1b" not in shown and max(map(len, shown.split("\n"))) <= columns


def test_a_dumb_terminal_gets_plain_text(plain):
    assert on_terminal(80, *ATTENTION, TERM="dumb") == plain + "\n"


def test_json_has_no_colours():
    assert "\x1b" not in on_terminal(80, *ATTENTION, "--json", "-")


def test_comparison():
    shown = on_terminal(200, *ATTENTION, "--compare")
    green = re.findall(r"\x1b\[32m(\w\S*)", shown)
    assert green[0] == "eindecomp" and "sqrt" not in green
    piped = subprocess.run([sys.executable, "-m", "einmpi", *ATTENTION, "--compare"], cwd=ROOT, capture_output=True,
                           text=True)  # fmt: skip
    assert "\x1b" not in piped.stdout and words(shown) == words(piped.stdout)
    narrow = ESCAPE.sub("", on_terminal(80, *ATTENTION, "--compare"))
    assert max(map(len, narrow.split("\n"))) <= 80 and "no room for: paper's cost" in narrow


def test_names_are_no_markup(tmp_path):
    (tmp_path / "job.toml").write_text(
        'program = "red[i,j] = X[i,j] + 1"\ninputs.X = { shape = [8, 8], random = "ones" }'
    )
    assert "red[i,j] ← X[i,j] + 1" in ESCAPE.sub("", on_terminal(80, "plan", str(tmp_path / "job.toml"), "-n", "2"))
