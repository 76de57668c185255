"""Deliver a fault to a run, and judge what has become of outputs, processes and the next run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .faults_bench import ALONE, BY_EINMPI, Bench, Way
from .faults_files import read_outputs
from .fuzz_oracle import Outcome

SECONDS_TO_END = 15.0  # for processes, after the command has returned
NAME_LENGTH = 15  # of a process; the system cuts longer ones


@dataclass
class Result:
    """What came of one fault: the step at which it was, None if the run did not reach it."""

    way: Way
    action: str
    number: int
    step: str | None = None
    phase: str = ""
    status: int = 0
    seconds: float = 0.0
    problem: str = ""

    def line(self) -> str:
        where = f"{self.way}: {self.action} at step {self.number} ({self.phase}: {self.step})"
        return f"{where}: {self.problem}"


def inject(bench: Bench, way: Way, action: str, number: int) -> Result:
    """Run a job with a fault and judge what happens, then the next runs."""
    volume = bench.volume_for(action)
    bench.prepare(way.scenario, volume)
    mark = str(uuid.uuid4())
    outcome = bench.run(way, volume, bench.fault(way, action, number, volume), mark)
    result = Result(way, action, number, status=outcome.status, seconds=outcome.seconds)
    note = bench.take_note()
    if note is None:
        return result
    result.step = note["step"]
    result.phase = note["phase"]
    are_gone = way.launcher == ALONE or _are_gone(mark)
    volume.restore()
    judge = _Judge(bench, way, action, volume.case, outcome, note)
    result.problem = "" if are_gone else "processes are left"
    result.problem = result.problem or judge.problem()
    if result.problem and outcome.err.strip():
        result.problem += f"; {outcome.err.strip()[-400:]!r}"
    return result


class _Judge:
    """What must hold after a run with a fault."""

    def __init__(
        self,
        bench: Bench,
        way: Way,
        action: str,
        folder: Path,
        outcome: Outcome,
        note: dict[str, Any],
    ) -> None:
        self.bench = bench
        self.way = way
        self.action = action
        self.folder = folder
        self.outcome = outcome
        self.note = note
        self.old = bench.old
        self.new = bench.new
        self.accepted = [bench.new]
        if action == "replaced input":
            self.accepted.append(bench.new_of_other_input)

    def problem(self) -> str:
        """Return what is wrong, or ""."""
        problem = self._problem_of_end() or self._problem_of_files()
        if problem:
            return problem
        if not self._leftovers():
            return self._problem_of_mixture()  # the next run would begin as any other does
        problem = self._problem_of_reading() or self._problem_of_mixture()
        return problem or self._problem_of_next_run()

    def _problem_of_end(self) -> str:
        outcome = self.outcome
        if outcome.timed_out:
            return "hang"
        if "Traceback" in outcome.err or "shows the traceback" in outcome.err:
            return "an error without an explanation"
        lines = re.findall(r"^(?:einmpi|job\.toml|--checkpoint|/).*$", outcome.err, re.MULTILINE)
        last_lines = [line for line in lines if "the run continues" not in line]
        if len(last_lines) > 1 or (outcome.status == 1 and not last_lines):
            return f"status {outcome.status} with {len(last_lines)} lines"
        if "Traceback" in self.note.get("second said", ""):
            return f"the second run has a traceback: {self.note['second said']}"
        if self.way.launcher == BY_EINMPI:
            left = self.bench.temporary_files()
            if left:
                return f"the launcher leaves {', '.join(left)}"
        return ""

    def _problem_of_files(self) -> str:
        found = read_outputs(self.folder)
        z_states = {"old": self.old.z, "new": self.new.z}
        m_states = {"old": self.old.m, "new": self.new.m}
        for other in self.accepted[1:]:
            z_states["other input"] = other.z
            m_states["other input"] = other.m
        if self.action == "replaced output":
            z_states["replaced"] = np.ones((8, 8)).tobytes()
        if self.action == "removed output":
            m_states["removed"] = "removed"
        z_state = _name_of(found.z, z_states)
        m_state = _name_of(found.m, m_states)
        if not z_state or not m_state:
            return f"an output is neither old nor new: {found.z[:80]!r}, {found.m[:80]!r}"
        if not found.keeps:
            return "another dataset of the file is lost"
        # A file that was replaced or removed after the run had put it in place stays so.
        states = {z_state, m_state} - {"replaced", "removed"}
        if self.outcome.status == 0 and states not in ({"new"}, {"other input"}):
            return f"status 0, but the outputs are {z_state} and {m_state}"
        if "is unchanged" in self.outcome.err and z_state == "new" and "same" not in self.note:
            return "the line says unchanged, the file is new"
        if self.note.get("same") == 0 and states != {"new"}:
            return f"the second run has exited 0, but the outputs are {z_state} and {m_state}"
        if self.note.get("second") == 0 and found.second != np.arange(1.0, 6.0).tobytes():
            return "the second run has exited 0 without its data"
        return ""

    def _problem_of_reading(self) -> str:
        """Return what is wrong with a job that reads the outputs, and finishes what was begun."""
        if self.action == "removed output":
            return ""
        reading = self.bench.run_alone(["run", "reading.toml", "--quiet"], self.folder)
        if reading.status != 0:
            return f"a job cannot read the outputs: {reading.err}"
        return ""

    def _problem_of_mixture(self) -> str:
        found = read_outputs(self.folder)
        is_z_old = found.z == self.old.z
        is_m_old = found.m == self.old.m
        if "output" not in self.action and is_z_old != is_m_old:
            return "one output is old, the other one is new"
        return ""

    def _problem_of_next_run(self) -> str:
        """Run the same job again, which must find everything in order and leave nothing."""
        if self.action == "removed input":
            self.bench.restore_input(self.folder)
        saved = self.folder / "saved"
        if self.action == "replaced input":
            shutil.rmtree(saved, ignore_errors=True)
        command = self.bench.command(self.way.scenario, self.folder)
        if self.way.scenario == "checkpoint":
            command.append("--resume")
        again = self.bench.run_alone(command, self.folder)
        if self.action == "replaced checkpoint" and again.status in (1, 2):
            if again.err.count("\n") != 1:
                return f"the next run refuses the checkpoint with other lines: {again.err}"
            shutil.rmtree(saved, ignore_errors=True)
            again = self.bench.run_alone(command, self.folder)
        if again.status != 0:
            return f"the next run fails: {again.err}"
        found = read_outputs(self.folder)
        if not any((found.z, found.m) == (each.z, each.m) for each in self.accepted):
            return "the next run gives other results"
        left = self._leftovers()
        if left:
            return f"the next run leaves {', '.join(left)}"
        return ""

    def _leftovers(self) -> list[str]:
        """Return what is in the folder besides inputs and outputs."""
        saved = self.folder / "saved"
        left = [path.name for path in self.folder.glob(".*")]
        if saved.exists():
            left += os.listdir(saved)
        return left


def _name_of(found: bytes | str, states: dict[str, bytes | str]) -> str:
    for name, content in states.items():
        if found == content:
            return name
    return ""


def _are_gone(mark: str) -> bool:
    """Wait until no process has this mark; return whether all are gone."""
    deadline = time.monotonic() + SECONDS_TO_END
    while True:
        if not _marked_processes(mark):
            return True
        if time.monotonic() > deadline:
            for pid in _marked_processes(mark):
                os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.05)


def _marked_processes(mark: str) -> list[int]:
    """Return the processes that have a mark in their environment, or as the name of a fork."""
    name = mark[:NAME_LENGTH]
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
            is_fork = (folder / "comm").read_text().strip() == name
        except OSError:
            continue
        if is_fork or f"MARK={mark}".encode() in environment:
            found.append(int(folder.name))
    return found
