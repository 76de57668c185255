"""A finding of the doctor, and questions to other processes."""

from __future__ import annotations

import json
import signal
import subprocess
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """The result of one examination.

    `state` is "ok", "note" (a run works, perhaps with a restriction) or "problem" (a run fails,
    perhaps only on several ranks).
    """

    name: str
    state: str
    text: str
    advice: str = ""  # what to do about it


def start_process(command: list[str]) -> subprocess.Popen[str]:
    """Start a process whose answer `read_answer` reads later."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def read_answer(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """Return the JSON object that a process prints, or {"error": why there is none}."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        return {"error": f"no answer in {seconds:g} s"}
    for line in out.splitlines():  # a library may print as well
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict):
            return answer
    if process.returncode < 0:
        return {"error": f"it was ended by a signal: {signal.strsignal(-process.returncode)}"}
    lines = [line.strip() for line in (err or out).splitlines() if line.strip()]
    if not lines:
        return {"error": f"it exited with status {process.returncode}"}
    return {"error": lines[-1][:300]}


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()  # a launcher ends its ranks then
    try:
        process.communicate(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
