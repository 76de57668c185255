"""What the doctor finds, and how another process is asked something."""

from __future__ import annotations

import json
import signal
import subprocess
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """`state` is "ok", "note" (a run works, perhaps without something) or "problem" (a run on several ranks fails)."""

    name: str
    state: str
    text: str
    advice: str = ""  # what to do about it


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def answer_of(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """The JSON that a process prints, or {"error": why there is none}."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # a launcher then ends its ranks
        try:
            process.communicate(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return {"error": f"no answer in {seconds:g} s"}
    for line in out.splitlines():  # a library may print as well
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    if process.returncode < 0:
        return {"error": f"it was ended by a signal: {signal.strsignal(-process.returncode)}"}
    words = [line.strip() for line in (err or out).splitlines() if line.strip()]
    return {"error": f"{words[-1] if words else f'it ended with status {process.returncode}':.300}"}
