"""Replay traces with SimGrid's `smpirun`, which is a program of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from einmpi.errors import EinmpiError, InputError

# Small messages are not sent ahead of their receive: in a schedule, the receives come first, so the
# times are the same, and SimGrid is five times as fast.
_OPTIONS = (
    "--cfg=smpi/send-is-detached-thresh:0",
    "--cfg=smpi/host-speed:1f",
    "--cfg=contexts/stack-size:64",
    "--cfg=surf/precision:1e-12",
    "--log=root.thres:warning",
    "--log=smpi_replay.thres:info",
    "--log=smpi_replay.fmt:%.12r%e%m%n",
)
_SECONDS = re.compile(r"^([0-9.e+-]+) Simulation time ", re.MULTILINE)


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


def replay(folder: Path, ranks: int) -> float:
    """Return the simulated seconds of the traces in a folder."""
    command = [
        find_smpirun(),
        *("-np", str(ranks)),
        *("-platform", "platform.xml", "-hostfile", "hosts", "-replay", "traces"),
        *_OPTIONS,
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    found = _SECONDS.search(done.stdout)
    if done.returncode or found is None:
        raise EinmpiError(f"smpirun: {_reason(done.stdout)}")
    return float(found[1])


def _reason(output: str) -> str:
    """Return the line of SimGrid's output that says why it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in lines:
        if "CRITICAL" in line or "rror" in line:
            return line[:300]
    return lines[-1][:300] if lines else "it failed without a word"
