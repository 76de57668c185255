"""Sweep faults over every step of a run: killed, stopped, no disk, files replaced, a second run.

`python -m tests.soak faults [--quick]`; afterwards outputs are old or new, all of them alike."""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import numpy as np

from .faults_inject import ACTIONS, FAULT_VARIABLE, NOTE, Injector
from .fuzz import MPIRUN, OPEN_MPI, ROOT, clean_environment, import_everything
from .fuzz_oracle import Outcome, emptied, run_forked, run_subprocess

JOB = """
program = '''
Y[i,k] = sum(X[i,j] * A[j,k])
Z[i,k] = exp(Y[i,k] / 8)
m[i] = max(Y[i,k])
'''
inputs.X = "x.h5:/X"
inputs.A = { shape = [8, 8], random = "normal", seed = 1 }
outputs.Z = { file = "a.h5", dataset = "/Z", chunks = [4, 4] }
outputs.m = "b.npy"
"""
OTHER_JOB = """
program = "B[i] = V[i] + 1"
inputs.V = { shape = [5], random = "arange" }
outputs.B = "a.h5:/B"
"""
READING_JOB = """
program = "C = sum(Z[i,k]) + sum(m[i])"
inputs.Z = "a.h5:/Z"
inputs.m = "b.npy"
"""
SCENARIOS = {
    "run": ["run", "job.toml", "--quiet"],
    "checkpoint": ["run", "job.toml", "--quiet", "--checkpoint", "saved", "--every", "0"],
}
LAUNCH = """
import sys
from einmpi.cli.launch.launcher import launch
if __name__ == "__main__":
    ranks, rank_program, *words = sys.argv[1:]
    sys.exit(launch(int(ranks), words, (sys.executable, rank_program)))
"""
RANK_PROGRAM = str(Path(__file__).with_name("faults_inject.py"))
_LEFTOVER = re.compile(r"\..*(part|lock|journal|taken)$")
SECONDS_TO_END = 15.0  # for processes, after the command has returned
Launcher = Callable[[Path, list[str], int, str, int, dict[str, str]], Outcome]


# ---- the files ----------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """Fill a folder with jobs, inputs and the old outputs."""
    emptied(folder)
    (folder / "job.toml").write_text(JOB)
    (folder / "other.toml").write_text(OTHER_JOB)
    (folder / "reading.toml").write_text(READING_JOB)
    for name, factor in (("x.h5", 1.0), ("other-x.h5", -1.0)):
        with h5py.File(folder / name, "w") as file:
            values = np.arange(64.0).reshape(8, 8) / 64 * factor
            file.create_dataset("X", data=values, chunks=(4, 4))
    with h5py.File(folder / "a.h5", "w") as file:
        file["Z"] = np.zeros((8, 8))
        file["keep"] = np.arange(3)
    with h5py.File(folder / "other-a.h5", "w") as file:
        file["Z"] = np.ones((8, 8))
        file["keep"] = np.arange(3)
    np.save(folder / "b.npy", np.zeros(8))


@dataclass(frozen=True)
class Outputs:
    """What the output files hold: bytes of values, or what is wrong with a file."""

    z: bytes | str
    m: bytes | str
    keeps: bool  # the other dataset of the file
    second: bytes | None  # what a second run has written


def read_outputs(folder: Path) -> Outputs:
    """Read the outputs, whatever state they are in."""
    z: bytes | str
    m: bytes | str
    keeps = False
    second = None
    try:
        with h5py.File(folder / "a.h5", "r") as file:
            z = file["Z"][()].tobytes()
            keeps = "keep" in file and file["keep"][()].tolist() == [0, 1, 2]
            second = file["B"][()].tobytes() if "B" in file else None
    except FileNotFoundError:
        z = "removed"
    except (OSError, KeyError, ValueError) as error:
        z = f"damaged: {error}"
    try:
        m = np.load(folder / "b.npy").tobytes()
    except FileNotFoundError:
        m = "removed"
    except (OSError, ValueError) as error:
        m = f"damaged: {error}"
    return Outputs(z, m, keeps, second)


# ---- runs ---------------------------------------------------------------------------------------


def run_in_fork(
    folder: Path, command: list[str], number: int, action: str, rank: int, env: dict[str, str]
) -> Outcome:
    """Run on one rank, in a fork of this process."""
    return run_forked(folder, command, Injector(folder, number, action).install)


def under_mpirun(ranks: int) -> Launcher:
    """Return how to run on ranks under a plain mpirun."""

    def run(
        folder: Path, command: list[str], number: int, action: str, rank: int, env: dict[str, str]
    ) -> Outcome:
        options = ["--oversubscribe", "--bind-to", "none"] if OPEN_MPI else []
        words = [str(MPIRUN), *options, "-n", str(ranks), sys.executable, RANK_PROGRAM, *command]
        return run_subprocess(folder, words, {**env, **_fault(folder, rank, number, action)})

    return run


def under_own_launcher(ranks: int) -> Launcher:
    """Return how to run on ranks as `einmpi run -n` does."""

    def run(
        folder: Path, command: list[str], number: int, action: str, rank: int, env: dict[str, str]
    ) -> Outcome:
        words = [sys.executable, "-c", LAUNCH, str(ranks), RANK_PROGRAM, *command]
        return run_subprocess(folder, words, {**env, **_fault(folder, rank, number, action)})

    return run


def _fault(folder: Path, rank: int, number: int, action: str) -> dict[str, str]:
    return {FAULT_VARIABLE: json.dumps([str(folder), rank, number, action])}


# ---- the oracle ---------------------------------------------------------------------------------


@dataclass
class Sweep:
    """One kind of fault at every step of one rank, with one launcher."""

    folder: Path
    scenario: str
    launcher_name: str
    launcher: Launcher
    rank: int
    action: str
    stride: int = 1
    results: collections.Counter[str] = field(default_factory=collections.Counter)
    problems: list[str] = field(default_factory=list)

    def run(self, old: Outputs, new: Outputs, new_of_other_input: Outputs) -> None:
        """Move the fault from step to step until the run no longer reaches it."""
        self.old = old
        self.new = new
        self.accepted = [new, new_of_other_input] if self.action == "replaced input" else [new]
        number = 1
        while True:
            prepare(self.folder)
            mark = str(uuid.uuid4())
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "MARK": mark}
            command = SCENARIOS[self.scenario]
            outcome = self.launcher(
                self.folder, command, number, self.action, self.rank, environment
            )
            note_path = self.folder / NOTE
            if not note_path.exists():
                return
            text = note_path.read_text()
            note = json.loads(text) if text else {"step": "unknown"}
            note_path.unlink()
            problem = self._problem(outcome, note, mark)
            word = "finished" if outcome.status == 0 else "failed"
            self.results["WRONG" if problem else word] += 1
            if problem:
                step = note["step"]
                self.problems.append(
                    f"{self.scenario}, {self.launcher_name}, rank {self.rank}: {self.action} "
                    f"at step {number} ({step}): {problem}"
                )
            number += self.stride

    def _problem(self, outcome: Outcome, note: dict[str, object], mark: str) -> str:
        """Return what is wrong after a run with a fault, or ""."""
        if outcome.timed_out:
            return "hang"
        if "Traceback" in outcome.err:
            return f"traceback: {outcome.err.strip().splitlines()[-1]}"
        lines = re.findall(r"^(?:einmpi|job\.toml).*$", outcome.err, re.MULTILINE)
        if len(lines) > 1 or (outcome.status == 1 and len(lines) == 0):
            return f"status {outcome.status} with {len(lines)} lines: {outcome.err[-300:]!r}"
        if not _are_gone(mark):
            return "processes are left"
        found = read_outputs(self.folder)
        problem = self._problem_of_files(outcome, found, note)
        if problem:
            return f"{problem}; {lines}"
        return self._problem_of_next_runs(note)

    def _problem_of_files(self, outcome: Outcome, found: Outputs, note: dict[str, object]) -> str:
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
        if outcome.status == 0 and states not in ({"new"}, {"other input"}):
            return f"status 0, but the outputs are {z_state} and {m_state}"
        if "is unchanged" in outcome.err and z_state == "new":
            return "the line says unchanged, the file is new"
        if note.get("second") == 0 and found.second != np.arange(1.0, 6.0).tobytes():
            return "the second run has exited 0 without its data"
        return ""

    def _problem_of_next_runs(self, note: dict[str, object]) -> str:
        """Run a job that reads the outputs, then the same job again."""
        if self.action != "removed output":
            reading = run_forked(self.folder, ["run", "reading.toml", "--quiet"])
            if reading.status != 0:
                return f"a job cannot read the outputs: {reading.err}"
        found = read_outputs(self.folder)
        is_z_old = found.z == self.old.z
        is_m_old = found.m == self.old.m
        if "output" not in self.action and is_z_old != is_m_old:
            return "one output is old, the other one is new"
        if not (self.folder / "x.h5").exists():
            return ""
        command = list(SCENARIOS[self.scenario])
        if "--checkpoint" in command:
            if self.action == "replaced input":
                shutil.rmtree(self.folder / "saved", ignore_errors=True)
            command.append("--resume")
        again = run_forked(self.folder, command)
        if again.status != 0:
            return f"the next run fails: {again.err}"
        found = read_outputs(self.folder)
        if not any((found.z, found.m) == (each.z, each.m) for each in self.accepted):
            return "the next run gives other results"
        left = []
        for path in self.folder.rglob("*"):
            if _LEFTOVER.fullmatch(path.name):
                left.append(path.name)
        if left:
            return f"the next run leaves {', '.join(left)}"
        return ""


def _name_of(found: bytes | str, states: dict[str, bytes | str]) -> str:
    for name, content in states.items():
        if found == content:
            return name
    return ""


def _are_gone(mark: str) -> bool:
    """Wait until no process has this mark in its environment; return whether all are gone."""
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
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"MARK={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


# ---- all sweeps ---------------------------------------------------------------------------------


def sweeps(folder: Path, is_quick: bool, actions: Sequence[str]) -> list[Sweep]:
    """Return the sweeps: every fault on one rank, and faults on several ranks by launcher."""
    made = []
    for scenario in SCENARIOS:
        for action in actions:
            stride = 3 if is_quick or action == "second run" else 1
            made.append(Sweep(folder, scenario, "one rank", run_in_fork, 0, action, stride))
    if not MPIRUN.exists():
        print("no mpirun beside the interpreter: only one rank is swept")
        return made
    for ranks in (2,) if is_quick else (2, 3):
        for name, launcher in (
            (f"mpirun -n {ranks}", under_mpirun(ranks)),
            (f"einmpi run -n {ranks}", under_own_launcher(ranks)),
        ):
            for rank in (0, ranks - 1):
                for action in actions:
                    if is_quick and action not in ("kill", "terminate", "full disk"):
                        continue
                    stride = 17 if is_quick else 5
                    made.append(Sweep(folder, "run", name, launcher, rank, action, stride))
    return made


def reference_outputs(folder: Path) -> tuple[Outputs, Outputs, Outputs]:
    """Return the old outputs, the new ones, and those of the other input."""
    prepare(folder)
    old = read_outputs(folder)
    outcome = run_forked(folder, SCENARIOS["run"])
    assert outcome.status == 0, outcome
    new = read_outputs(folder)
    prepare(folder)
    os.rename(folder / "other-x.h5", folder / "x.h5")
    outcome = run_forked(folder, SCENARIOS["run"])
    assert outcome.status == 0, outcome
    return old, new, read_outputs(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of the fault sweep; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps, fewer launchers")
    parser.add_argument("--action", choices=list(ACTIONS), action="append", help="only this fault")
    parser.add_argument("--one-rank", action="store_true", help="without mpirun")
    options = parser.parse_args(arguments)
    actions = options.action or list(ACTIONS)
    clean_environment()
    import_everything()
    parent = Path(tempfile.mkdtemp(prefix="einmpi-faults-"))
    folder = parent / "case"
    problems: list[str] = []
    total = 0
    try:
        references = reference_outputs(folder)
        for sweep in sweeps(folder, options.quick, actions):
            if options.one_rank and sweep.launcher_name != "one rank":
                continue
            start = time.monotonic()
            sweep.run(*references)
            counts = ", ".join(f"{word} {count}" for word, count in sorted(sweep.results.items()))
            total += sum(sweep.results.values())
            print(
                f"{sweep.scenario:<11}{sweep.launcher_name:<18}rank {sweep.rank}  "
                f"{sweep.action:<16}{counts or 'not reached'} ({time.monotonic() - start:.0f} s)",
                flush=True,
            )
            for problem in sweep.problems[:5]:
                print(f"    {problem}", flush=True)
            problems += sweep.problems
    finally:
        shutil.rmtree(parent, ignore_errors=True)
    print(f"{total} faults, {len(problems)} of them with a wrong end")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
