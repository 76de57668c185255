"""Run a job of the fault sweep: scenarios, launchers, a server that forks, and file systems."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import faults_client
from .faults_files import Outputs, make_template, read_outputs
from .faults_inject import (
    FAULT_VARIABLE,
    FORKED_RANK,
    NEW_RANK,
    NO_STEP,
    ON_DISK,
    ON_VOLUME,
    RANK_COMMAND_VARIABLE,
    Fault,
    text_of,
)
from .faults_volume import (
    DiskVolume,
    MemoryVolume,
    PlainVolume,
    make_private_mounts,
    mount_memory,
    unmount,
)
from .fuzz import MPIRUN, OPEN_MPI, ROOT, clean_environment
from .fuzz_oracle import WALL_SECONDS, Outcome, run_subprocess

SCENARIOS = ("run", "checkpoint", "resume")
ALONE = "alone"
BY_MPIRUN = "mpirun"
BY_EINMPI = "einmpi run -n"
SEGMENTS = Path("/dev/shm")


@dataclass(frozen=True)
class Way:
    """How a job is run: the scenario, the launcher, and the rank that has the fault."""

    scenario: str
    launcher: str
    ranks: int
    rank: int

    def __str__(self) -> str:
        return f"{self.scenario}, {self.launcher} {self.ranks}, rank {self.rank}"


class Bench:
    """The place of a sweep: a server that forks processes, file systems, and what is expected."""

    def __init__(self, parent: Path, are_mounts_allowed: bool, are_ranks_forked: bool) -> None:
        self.parent = parent
        self.are_mounts_allowed = are_mounts_allowed
        self.impossible: set[str] = set()  # faults for which this machine lacks something
        self._rank_command = FORKED_RANK if are_ranks_forked else NEW_RANK
        (parent / "memory").mkdir()
        (parent / "disk").mkdir()
        (parent / "tmp").mkdir()
        self.memory: PlainVolume
        self.disk: PlainVolume | None = None
        if are_mounts_allowed:
            self.memory = MemoryVolume(parent / "memory")
            self.disk = self._make_disk()
        else:
            self.memory = PlainVolume(parent / "memory")
            self.impossible.update(ON_VOLUME)
        if self.disk is None:
            self.impossible.update(ON_DISK)
        self._templates: dict[str, Path] = {}
        self._note = parent / "note.json"  # what the fault writes down
        self._socket = str(parent / "socket")
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.faults_server", self._socket],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n"
        self._make_templates()

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()
        self.memory.close()
        if self.disk is not None:
            self.disk.close()

    def _make_disk(self) -> PlainVolume | None:
        try:
            return DiskVolume(self.parent / "disk")
        except OSError as error:
            print(f"no disk that fails: {error}", flush=True)
            return None

    def _make_templates(self) -> None:
        template = self.parent / "template"
        make_template(template)
        self._templates["run"] = template
        self._templates["checkpoint"] = template
        self.old = read_outputs(template)
        self.new = self._expected(template)
        self.new_of_other_input = self._expected(template, is_input_replaced=True)
        # A run that was killed has left a checkpoint.
        saved = self.parent / "saved-template"
        number = 1
        way = Way("checkpoint", ALONE, 1, 0)
        while not list(saved.glob("saved/0*")):
            self.memory.fill_case(template)
            self.run(way, self.memory, self.fault(way, "kill", number, self.memory))
            number += 5
            assert self.take_note() is not None, "no checkpoint was saved"
            shutil.rmtree(saved, ignore_errors=True)
            shutil.copytree(self.memory.case, saved)
        self._templates["resume"] = saved

    def _expected(self, template: Path, is_input_replaced: bool = False) -> Outputs:
        self.memory.fill_case(template)
        if is_input_replaced:
            os.rename(self.memory.case / "other-x.h5", self.memory.case / "x.h5")
        outcome = self.run_alone(["run", "job.toml", "--quiet"], self.memory.case)
        assert outcome.status == 0, outcome
        return read_outputs(self.memory.case)

    def volume_for(self, action: str) -> PlainVolume:
        if action not in ON_DISK:
            return self.memory
        assert self.disk is not None
        return self.disk

    def prepare(self, scenario: str, volume: PlainVolume) -> None:
        volume.fill_case(self._templates[scenario])

    def restore_input(self, folder: Path) -> None:
        shutil.copy2(self._templates["run"] / "x.h5", folder / "x.h5")

    def command(self, scenario: str, folder: Path) -> list[str]:
        command = ["run", "job.toml", "--quiet"]
        if scenario != "run":
            # The whole path: a mount in the place of the case is not seen from inside it.
            command += ["--checkpoint", str(folder / "saved"), "--every", "0"]
        if scenario == "resume":
            command.append("--resume")
        return command

    def fault(self, way: Way, action: str, number: int, volume: PlainVolume) -> Fault:
        return Fault(
            action=action,
            rank=way.rank,
            number=number,
            folder=str(volume.case),
            error_trigger=volume.error_trigger,
            command=self.command(way.scenario, volume.case),
            note_path=str(self._note),
        )

    def take_note(self) -> dict[str, Any] | None:
        """Return what the fault has noted; None if the run did not reach its step."""
        try:
            text = self._note.read_text()
        except FileNotFoundError:
            return None
        self._note.unlink()
        note: dict[str, Any] = {"step": "unknown", "phase": "unknown"}
        if text:
            note = json.loads(text)
        return note

    def run_alone(self, command: list[str], folder: Path, fault: Fault | None = None) -> Outcome:
        """Run a command in a fork of the server."""
        return self._run_in_fork(command, folder, self._environment(fault))

    def run(self, way: Way, volume: PlainVolume, fault: Fault, mark: str = "") -> Outcome:
        """Run the job of a scenario with a fault."""
        command = self.command(way.scenario, volume.case)
        environment = {**self._environment(fault), "MARK": mark}
        if way.launcher == ALONE:
            return self._run_in_fork(command, volume.case, environment)
        if way.launcher == BY_EINMPI:
            return self._run_in_fork([*command, "-n", str(way.ranks)], volume.case, environment)
        options = []
        if OPEN_MPI:
            options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        words = [str(MPIRUN), *options, "-n", str(way.ranks), *self._rank_command, *command]
        return run_subprocess(volume.case, words, environment)

    def _environment(self, fault: Fault | None) -> dict[str, str]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.parent / "tmp"),
            faults_client.SERVER_VARIABLE: self._socket,
            RANK_COMMAND_VARIABLE: json.dumps(self._rank_command),
        }
        if fault is not None:
            environment[FAULT_VARIABLE] = text_of(fault)
        return environment

    def _run_in_fork(
        self, command: list[str], folder: Path, environment: dict[str, str]
    ) -> Outcome:
        start = time.monotonic()
        timed_out = False
        # Pipes hold more than a run says, and unlike files they have no limit of size or disk.
        pipes = [os.pipe(), os.pipe()]
        with open(os.devnull) as devnull:
            descriptors = {0: devnull.fileno(), 1: pipes[0][1], 2: pipes[1][1]}
            answers, _ = faults_client.request(environment, command, descriptors, str(folder))
        try:
            answers.raw._sock.settimeout(WALL_SECONDS)
            status = int(answers.readline())
        except TimeoutError:
            timed_out = True
            status = -signal.SIGKILL
        answers.raw._sock.close()  # the server ends what has not ended
        answers.close()
        texts = [_take_text(*pipe) for pipe in pipes]
        return Outcome(status, *texts, time.monotonic() - start, 0, timed_out)

    def temporary_files(self) -> list[str]:
        """Return what is left of launchers and of MPI outside the case."""
        left = os.listdir(self.parent / "tmp")
        if self.are_mounts_allowed:
            left += os.listdir(SEGMENTS)
        return left

    def left_at_end(self, ranks: int) -> list[str]:
        """Run once more without a fault; return the temporary files that are left."""
        if ranks > 1:
            self.steps_of(Way("run", BY_EINMPI, ranks, 0))
        return self.temporary_files()

    def steps_of(self, way: Way) -> list[tuple[str, str]]:
        """Return the phases and names of the steps that a rank has when nothing goes wrong."""
        self.prepare(way.scenario, self.memory)
        outcome = self.run(way, self.memory, self.fault(way, "kill", NO_STEP, self.memory))
        assert outcome.status == 0, (way, outcome)
        found = read_outputs(self.memory.case)
        assert (found.z, found.m) == (self.new.z, self.new.m), way
        note = self.take_note()
        assert note is not None, way
        return [(phase, name) for phase, name in note["steps"]]


def _take_text(reading_end: int, writing_end: int) -> str:
    """Return what is in a pipe, and close it."""
    os.close(writing_end)
    os.set_blocking(reading_end, False)
    data = b""
    with contextlib.suppress(BlockingIOError):
        data = os.read(reading_end, 2**16)
    os.close(reading_end)
    return data.decode(errors="backslashreplace")


@contextlib.contextmanager
def bench(has_mounts: bool = True, are_ranks_forked: bool = True) -> Iterator[Bench]:
    """Make a bench in a folder of its own.

    With mounts, which need root, it is in memory, and this process sees no other files in
    /dev/shm from then on.
    """
    clean_environment()
    parent = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        if has_mounts:
            problem = make_private_mounts()
            if problem:
                print(f"{problem}: faults of file systems are left out", flush=True)
                has_mounts = False
            else:
                mount_memory(str(parent))
                mount_memory(str(SEGMENTS))  # to see what the sweep leaves there
        made = Bench(parent, has_mounts, are_ranks_forked)
        try:
            yield made
        finally:
            made.close()
    finally:
        unmount(str(parent))
        shutil.rmtree(parent, ignore_errors=True)
